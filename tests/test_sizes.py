import copy

import pytest

from kvcli.sizes import format_age, format_bytes, parse_bytes, parse_count, parse_count_or_share


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("512", 512), ("32K", 32768), ("32k", 32768), (" 1M ", 2**20), ("1_000", 1000), ("0.5K", 512)],
)
def test_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "K", "-1", "4Q", "1.5", "0.3K", "1e3", "4 GiB", "١", "1K2"])
def test_what_is_no_count_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match="is not a number of tokens") as raised:
        parse_count(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24G", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("7b", 7),
        ("1TiB", 2**40),
    ],
)
def test_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "of_1000"), [("20%", 200), ("1.56%", 15), ("100%", 1000), ("0.1 %", 1), ("33.3%", 333)]
)
def test_shares_are_rounded_down(text, of_1000):
    share = parse_count_or_share(text)
    assert share.of(1000) == of_1000
    assert str(share) == f"{share:,}" == text.replace(" ", "")
    assert copy.deepcopy(share) == share != parse_count_or_share("50%")
    assert share > 1 << 30  # without a prompt it bounds nothing


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%", "20%%", "1e1%", "nan%"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(ValueError, match="is not a share"):
        parse_count_or_share(text)


@pytest.mark.parametrize("text", ["", "24Gi B", "GiB", "24PiBB", "-1GiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (16384, "16.0 KiB"),
        (999 * 1024, "999 KiB"),
        (1020 * 1024, "1.00 MiB"),
        (5 * 2**29, "2.50 GiB"),
        (3000 * 2**40, "3000 TiB"),
    ],
)
def test_sizes_have_three_digits(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "just now"),
        (-3, "just now"),
        (59.9, "just now"),
        (60, "1 min ago"),
        (3599, "59 min ago"),
        (7200, "2 h ago"),
        (86_400, "1 day ago"),
        (2e8, "2,314 days ago"),
    ],
)
def test_ages(seconds, text):
    assert format_age(seconds) == text

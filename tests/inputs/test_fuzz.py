"""Profiles mutated with fixed seeds: each is taken or refused by one clear line, never by another exception."""

import json

import pytest
from mutations import mutated_bytes

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import resolve_profile

PROFILE = b"""method = "freekv"
description = "settings"
paper = "a paper"
[settings]
budget = 2048
tau = [0.5, 0.75]
pooling = "max_s"
score_scale = false
[provenance]
model = "demo"
measured = {loss = 0.01, passages = 3}
"""


def taken_or_refused(**arguments):
    refusal = None
    try:
        json.dumps(resolve_profile(**arguments).as_dict(), allow_nan=False).encode()
    except KvcliError as error:
        refusal = error
    if refusal is not None:
        assert refusal.exit_code == ExitCode.USAGE
        assert refusal.hint
        assert "\n" not in refusal.what


@pytest.mark.parametrize("block", range(4))
def test_mutated_profiles(tmp_path, block):
    for seed in range(100 * block, 100 * (block + 1)):
        (tmp_path / "mine.toml").write_bytes(mutated_bytes(PROFILE, seed))
        taken_or_refused(profile=str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    "value",
    [
        "[" * 5000,
        "9" * 5000,
        "0x" + "f" * 40,
        "1e400",
        "-1e400",
        "2030-01-01",
        "{a = 1}",
        "[[]]",
        "\0",
        '"\\ud800"',
        "1\nx=2",
    ],
)
@pytest.mark.parametrize("key", ["budget", "tau", "pooling", "dense_layers", "b\n", '"'])
def test_odd_values_of_a_setting(key, value):
    taken_or_refused(overrides={key: value})


def test_a_byte_order_mark_and_foreign_line_ends_are_read(tmp_path):
    (tmp_path / "dos.toml").write_bytes(b"\xef\xbb\xbf" + PROFILE.replace(b"\n", b"\r\n").replace(b"[0.5, 0.75]", b"1"))
    assert resolve_profile(profile=str(tmp_path / "dos.toml")).settings.budget == 2048


def test_a_date_in_the_provenance_is_refused_before_the_work(tmp_path):
    (tmp_path / "mine.toml").write_bytes(PROFILE.replace(b'"demo"', b"2030-01-01"))
    with pytest.raises(KvcliError, match=r"provenance.model = .* is not a JSON value"):
        resolve_profile(profile=str(tmp_path / "mine.toml"))

import dataclasses
import json
import tomllib
from importlib import resources

import pydantic
import pytest

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import profile_names, resolve_profile
from kvcli.methods import get_method, method_names


def refused(**arguments):
    """The error of a profile that has to be refused as a usage error with a hint, in one line."""
    with pytest.raises(KvcliError) as raised:
        resolve_profile(**arguments)
    error = raised.value
    assert error.exit_code == ExitCode.USAGE
    assert error.hint
    assert "\n" not in error.what + error.hint
    return error


def toml(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_that_comes_along_is_valid(name):
    profile = resolve_profile(profile=name)
    assert profile.name == name
    assert profile.method in method_names()
    assert profile.description
    assert profile.paper


@pytest.mark.parametrize("method", method_names())
def test_every_method_has_a_profile_of_its_name(method):
    assert resolve_profile(method=method).name == method


def test_profiles_hold_what_differs_from_the_defaults_and_no_two_are_the_same():
    profiles = [resolve_profile(profile=name) for name in profile_names()]
    assert len({profile.hash for profile in profiles}) == len(profiles)
    for profile in profiles:
        file = resources.files("kvcli.profiles") / f"{profile.name}.toml"
        stated = tomllib.loads(file.read_text())["settings"] if file.is_file() else {}
        assert stated or not file.is_file(), "a method's defaults need no file"
        for key, value in stated.items():
            assert value != type(profile.settings).model_fields[key].default, (profile.name, key)


def test_the_papers_values():
    general, long_input = resolve_profile(profile="freekv"), resolve_profile(profile="freekv-long-input")
    values = ("budget", "page_size", "sink", "window", "tau")
    assert [getattr(general.settings, key) for key in values] == [2048, 32, 512, 512, 0.9]
    assert [getattr(long_input.settings, key) for key in values] == [2048, 32, 128, 128, 0.8]


def test_overrides_lie_on_top_and_are_read_as_toml():
    overrides = {"budget": "4K", "tau": "0.75", "pooling": "max_s", "score_scale": "false", "sink": 96}
    settings = resolve_profile("freekv", overrides=overrides).settings
    assert (settings.budget, settings.tau, settings.sink) == (4096, 0.75, 96)
    assert settings.pooling == "max_s"
    assert settings.score_scale is False


def test_quoted_text_and_whole_numbers_are_taken_for_what_they_mean():
    settings = resolve_profile("freekv", overrides={"pooling": '"max_s"', "tau": "1", "budget": '"4K"'}).settings
    assert (settings.pooling, settings.tau, settings.budget) == ("max_s", 1.0, 4096)


def test_sizes_are_for_tokens_only():
    assert "dense_layers = '1K'" in refused(overrides={"dense_layers": "1K"}).what


def test_a_profile_and_its_settings_are_frozen():
    profile = resolve_profile()
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.method = "full"
    with pytest.raises(pydantic.ValidationError):
        profile.settings.budget = 1


def test_the_hash_follows_method_and_settings_alone(tmp_path):
    plain = resolve_profile("freekv")
    text = 'method = "freekv"\ndescription = "other words"\n[settings]\nsink = 512\n'
    assert resolve_profile(profile=toml(tmp_path, text)).hash == plain.hash
    assert resolve_profile("freekv", overrides={"tau": 0.8}).hash != plain.hash
    assert len({resolve_profile(method=method).hash for method in method_names()}) == len(method_names())
    assert plain.as_dict()["hash"] == plain.hash


def test_a_profile_as_a_dictionary_is_json_with_every_setting():
    body = json.loads(json.dumps(resolve_profile(profile="freekv-long-input").as_dict()))
    assert (body["name"], body["method"]) == ("freekv-long-input", "freekv")
    assert body["settings"].keys() == get_method("freekv").Config.model_fields.keys()


def test_a_profile_file_is_named_like_the_file(tmp_path):
    profile = resolve_profile(profile=toml(tmp_path, 'method = "quest"\n[settings]\nbudget = 512\n'))
    assert (profile.name, profile.method, profile.settings.budget) == ("mine", "quest", 512)
    assert profile.paper == get_method("quest").paper


def test_method_and_profile_must_agree():
    assert resolve_profile(method="freekv", profile="freekv-long-input").name == "freekv-long-input"
    error = refused(method="quest", profile="freekv-long-input")
    assert "freekv-long-input" in error.what
    assert "quest" in error.what


def test_unknown_names_come_with_the_nearest():
    assert "'freekv'" in refused(method="frekv").hint
    assert "'freekv-long-input'" in refused(profile="freekv-long-imput").hint
    assert "'budget'" in refused(overrides={"bugdet": "2K"}).hint
    assert "--method offload" in refused(method="snapkv", overrides={"kv_dtype": "int8"}).hint
    assert "prefill" in refused(method="full", overrides={"budget": "2K"}).hint


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"tau": "high"}, ["tau = 'high'", "number"]),
        ({"tau": "1.5"}, ["tau = 1.5", "less than or equal to 1"]),
        ({"tau": "nan"}, ["tau = nan", "finite"]),
        ({"tau": ""}, ["tau = ''", "number"]),
        ({"tau": "[0.5, 1.5]"}, ["tau = 1.5", "less than or equal to 1"]),
        ({"tau": "[0.5, nan]"}, ["tau = nan"]),
        ({"tau": '[0.5, "high"]'}, ["tau = 'high'", "number"]),
        ({"budget": "2.5"}, ["budget = 2.5", "integer"]),
        ({"budget": "-5"}, ["budget = -5", "greater than or equal to 1"]),
        ({"budget": "true"}, ["budget = True", "integer"]),
        ({"page_size": "24"}, ["page_size = 24", "power of two"]),
        ({"pooling": "median"}, ["pooling = 'median'", "'mean_s'"]),
        ({"budget": "1K", "sink": "512", "window": "512"}, ["budget 1024", "sink 512", "window 512"]),
    ],
)
def test_bad_values_are_refused_with_key_value_and_what_is_expected(overrides, words):
    what = refused(method="freekv", overrides=overrides).what
    assert all(word in what for word in words), what


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('method = "freekv\n', ["bad TOML", "line 1, column"]),
        ('method = "freekv"\n[settings]\nbudget 3\n', ["bad TOML", "line 3, column"]),
        ('method = "freekv"\nmetod = "x"\n', ["unknown key 'metod'"]),
        ("[settings]\nbudget = 4096\n", ["no method"]),
        ("method = 3\n", ["method = 3", "text"]),
        ('method = "freekv"\nsettings = 1\n', ["settings = 1", "table"]),
        ('method = "freekv"\n[settings]\nbudget = "4096"\n', ["budget = '4096'", "integer"]),
        ('method = "freekv"\n[settings]\nbugdet = 4096\n', ["'bugdet'"]),
        ('method = "nokv"\n', ["'nokv'"]),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, text, words):
    what = refused(profile=toml(tmp_path, text)).what
    assert all(word in what for word in words), what


def test_a_setting_outside_its_table_is_sent_there(tmp_path):
    assert "[settings]" in refused(profile=toml(tmp_path, 'method = "freekv"\nbudget = 4096\n')).hint


def test_a_missing_file_and_one_that_is_no_text(tmp_path):
    assert "No such file" in refused(profile=str(tmp_path / "none.toml")).what
    (tmp_path / "bytes.toml").write_bytes(b"method = \xff")
    assert "UTF-8" in refused(profile=str(tmp_path / "bytes.toml")).what


@pytest.mark.parametrize(
    ("method", "budget", "sink", "window", "page"),
    [
        ("freekv", 512, 16, 128, 8),
        ("freekv", 1055, 16, 256, 16),
        ("freekv", 1056, 16, 256, 16),  # the method's own sizes would leave one page
        ("freekv", 2047, 16, 496, 16),
        ("freekv", 256, 16, 64, 8),
        ("freekv", 96, 16, 24, 8),
        ("freekv", 32, 0, 16, 8),
        ("freekv", 24, 0, 16, 8),
        ("tokenselect", 256, 16, 48, None),
        ("tokenselect", 1279, 16, 243, None),
        ("infllm", 256, 32, 64, 32),
    ],
)
def test_a_small_budget_scales_sink_window_and_pages_and_says_so(method, budget, sink, window, page):
    found = resolve_profile(method, overrides={"budget": budget})
    assert (found.settings.sink, found.settings.window) == (sink, window)
    assert getattr(found.settings, "page_size", None) == page
    assert f"budget {budget:,} is small for sink" in found.notice
    now = f"using sink {sink:,} and window {window:,}; to set them, use --sink and --window"
    if method == "freekv":
        now = (
            f"using sink {sink:,}, window {window:,} and pages of {page} tokens; to set them, use --sink, --window and"
        )
    assert now in found.notice


def test_a_page_that_is_given_keeps_its_size():
    found = resolve_profile("freekv", overrides={"budget": 512, "page_size": 32})
    assert (found.settings.sink, found.settings.window, found.settings.page_size) == (32, 128, 32)
    assert "pages of" not in found.notice


def test_a_size_that_is_given_stays_and_the_other_is_scaled():
    found = resolve_profile("freekv", overrides={"budget": 256, "window": 64})
    assert (found.settings.sink, found.settings.window, found.settings.page_size) == (16, 64, 8)
    assert found.notice == (
        "budget 256 is small for sink 512: using sink 16 and pages of 8 tokens; to set them, use --sink and --page-size"
    )
    share = resolve_profile("freekv", overrides={"budget": "10%", "sink": 32}).for_prompt(4000)
    assert (share.settings.sink, share.settings.window) == (32, 96)


@pytest.mark.parametrize(("method", "budget"), [("freekv", 2048), ("freekv", 4096), ("tokenselect", 1280)])
def test_a_budget_that_both_leave_half_of_scales_nothing(method, budget):
    found, own = resolve_profile(method, overrides={"budget": budget}), resolve_profile(method)
    assert (found.settings.sink, found.settings.window) == (own.settings.sink, own.settings.window)
    assert found.notice is None


def test_sizes_that_are_given_are_not_scaled():
    given = resolve_profile("freekv", overrides={"budget": 1056, "sink": 512, "window": 512})
    assert (given.settings.page_size, given.notice) == (32, None)
    refused(method="freekv", overrides={"budget": 512, "sink": 512})
    refused(method="freekv", overrides={"budget": 512, "window": 512})
    refused(method="freekv", overrides={"budget": 16})  # not even a page


def test_a_share_of_a_short_prompt_scales_too():
    share = resolve_profile("freekv", overrides={"budget": "10%"})
    assert share.notice is None
    assert share.for_prompt(40_000).notice is None
    short = share.for_prompt(4000)
    assert (short.settings.budget, short.settings.sink, short.settings.window) == (400, 16, 96)
    assert "budget 400" in short.notice
    with pytest.raises(KvcliError, match="leaves no page"):
        resolve_profile("freekv", overrides={"budget": "10%", "sink": 512}).for_prompt(4000)


def test_without_a_name_the_profile_is_that_for_documents():
    assert (resolve_profile().name, resolve_profile().unnamed) == ("retroinfer", True)
    assert not resolve_profile("freekv").unnamed
    assert resolve_profile("freekv", overrides={"budget": 4096}).chosen is None


def test_settings_without_a_name_have_the_default_method_which_says_so_and_a_form_of_kv_leaves_the_choice():
    given = resolve_profile(overrides={"budget": 4096, "kv_dtype": "int8"})
    assert (given.unnamed, given.chosen) == (
        False,
        "no --method: using retroinfer, the default where settings are given",
    )
    form = resolve_profile(overrides={"kv_dtype": "int8"})
    assert (form.unnamed, form.chosen, form.settings.kv_dtype) == (True, None, "int8")
    wide = resolve_profile(overrides={"kv_dtype": "bfloat16"})  # a form that the default does not have
    assert (wide.method, wide.unnamed, wide.chosen) == (
        "full",
        False,
        "no --method: using full attention, which keeps KV as bfloat16",
    )

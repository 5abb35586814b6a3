import json

from command import assert_refused

from kvcli.methods import get_method, method_names
from kvcli.profile import profile_names


def test_the_list_names_every_method_and_profile(warm):
    result = warm("methods")
    assert result.returncode == 0
    assert result.stderr == ""
    for name in [*method_names(), *profile_names()]:
        assert name in result.stdout


def test_a_page_shows_settings_profiles_and_paper(warm):
    text = warm("methods", "freekv", COLUMNS="200").stdout
    method = get_method("freekv")
    assert method.paper in text
    for key, field in method.Config.model_fields.items():
        assert key in text
        assert field.description.split(",")[0] in text
    assert "0..1" in text
    assert "mean_qk" in text
    assert "freekv-long-input" in text
    assert "tau 0.8" in text


def test_a_method_without_settings_says_so(warm):
    assert "no settings" in warm("methods", "full").stdout


def test_json_is_one_object(warm):
    body = json.loads(warm("methods", "--json").stdout)
    assert body["schema_version"] == 1
    assert [entry["name"] for entry in body["methods"]] == method_names()
    freekv = next(entry for entry in body["methods"] if entry["name"] == "freekv")
    tau = next(setting for setting in freekv["settings"] if setting["name"] == "tau")
    assert (tau["type"], tau["default"], tau["minimum"], tau["maximum"]) == ("number", 0.9, 0, 1)
    assert {"freekv", "freekv-long-input", "freekv-reasoning"} <= {profile["name"] for profile in freekv["profiles"]}


def test_the_list_can_go_to_a_file(warm, tmp_path):
    result = warm("methods", "-o", tmp_path / "methods.txt", FORCE_COLOR="1")
    assert (result.returncode, result.stdout) == (0, "")
    text = (tmp_path / "methods.txt").read_text()
    assert "freekv" in text
    assert "\x1b" not in text


def test_an_unknown_method_comes_with_the_nearest(warm):
    result = warm("methods", "frekv")
    assert_refused(result, 2, "'frekv'")
    assert "did you mean 'freekv'?" in result.stderr

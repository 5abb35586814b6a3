"""Methods with parts switched off: what each declares can be resolved, and is something else than the method."""

import pytest

from kvcli.errors import KvcliError
from kvcli.inputs.variants import ablated, paper_names, read_paper, scaled, variants, where_settings_go
from kvcli.methods import get_method, method_names
from kvcli.sizes import Share


@pytest.mark.parametrize("name", [name for name in method_names() if get_method(name).ablation])
def test_every_declared_part_changes_the_method(name):
    (whole,) = variants([name], [], [], {})
    parts = ablated(whole)
    assert len(parts) == len(get_method(name).ablation)
    assert len({each.profile.hash for each in (*parts, whole)}) == len(parts) + 1
    assert all(each.label.startswith(f"{name}, ") for each in parts)


def test_parts_keep_the_other_settings_and_the_share():
    (whole,) = variants(["fier"], [], [1 << 9], {"group": "64"})
    alone = ablated(whole)[0]
    assert (alone.profile.settings.budget, alone.profile.settings.group) == (512, 64)
    assert alone.profile.settings.pooling == "none"
    assert alone.as_dict()["label"] == "fier, each query head alone 512"


def test_a_part_that_does_not_go_with_the_budget_is_left_out():
    (whole,) = variants(["fier"], [], [128], {})
    assert "fier, groups of 256 128" not in [each.label for each in ablated(whole)]
    assert "fier, groups of 128 128" in [each.label for each in ablated(whole)]


@pytest.mark.parametrize("name", paper_names())
def test_every_run_of_a_paper_is_a_profile(name):
    paper, found = read_paper(name), variants([], [f"paper-{name}"], [], {})
    assert [each.profile.method for each in found] == [run.method for run in paper.runs]
    for each, run in zip(found, paper.runs, strict=True):
        assert each.profile.paper.startswith(f"{paper.paper}, ")
        assert any(word in run.where for word in ("table", "figure"))
        given = {key: getattr(each.profile.settings, key) for key in run.settings}
        assert {key: str(v) if isinstance(v, Share) else v for key, v in given.items()} == run.settings
    assert len({each.profile.hash for each in found}) == len(found)


def test_the_five_papers_are_there_and_others_are_refused():
    assert paper_names() == ["actqkv", "fier", "freekv", "refreekv", "shadowkv"]
    with pytest.raises(KvcliError, match="unknown paper 'frekv'") as refused:
        variants([], ["paper-frekv"], [], {})
    assert "'freekv'" in refused.value.hint


def test_budgets_and_settings_of_a_command_line_come_on_top():
    found = variants([], ["paper-refreekv"], [Share("90%"), Share("20%")], {"sink": "8"})
    assert [each.label for each in found if each.profile.method == "snapkv"] == ["snapkv 90%", "snapkv 20%"]
    assert all(each.profile.settings.sink == 8 for each in found if each.profile.method == "streaming")


def test_a_setting_goes_to_one_method_by_its_name():
    found = variants(["freekv", "snapkv"], [], [], {"window": "96", "snapkv.window": "16"})
    assert [each.profile.settings.window for each in found] == [96, 16]
    with pytest.raises(KvcliError, match=r"none of freekv"):
        variants(["freekv"], [], [], {"snapkv.window": "16"})


def test_a_setting_where_settings_go_is_explained():
    found = variants(["freekv", "quest", "snapkv"], [], [], {})
    (line,) = where_settings_go(["window"], found)
    assert "freekv, quest: most recent tokens" in line
    assert "snapkv: " in line
    assert not [*where_settings_go(["window", "budget"], found[:2])]
    (line,) = where_settings_go(["tau"], found)
    assert line == "quest, snapkv: no setting tau, which goes to the others"


def test_a_share_that_scales_sink_and_window_is_said_too():
    labelled = [(each.label, each.profile) for each in variants(["full", "freekv"], [], [Share("10%")], {})]
    assert not [*scaled(labelled, None)]
    assert not [*scaled(labelled, 40_000)]
    (line,) = scaled(labelled, 4000)
    assert line.startswith("freekv 10%: budget 400 is small for sink 512 and window 512")

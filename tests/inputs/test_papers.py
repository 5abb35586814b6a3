"""Papers as sets of profiles: every run can be resolved, and says where the paper reports it."""

import pytest

from kvcli.errors import KvcliError
from kvcli.inputs.variants import paper_names, read_paper, variants
from kvcli.sizes import Share


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

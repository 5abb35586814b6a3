"""Methods with parts switched off: what each declares can be resolved, and is something else than the method."""

import pytest

from kvcli.inputs.variants import ablated, variants
from kvcli.methods import get_method, method_names


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

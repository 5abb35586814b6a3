"""Numbers compared 64 at a time: against numpy, at every end of a lot, among numbers that are not to be looked at."""

import numpy as np
import pytest

from kvcli.kernels import _numba
from kvcli.kernels._llvm import LOT, first_one, ones, without_first
from kvcli.kernels.topk import above, at_least

pytestmark = pytest.mark.skipif(_numba.numba is None, reason="numba is not there")


@_numba.serial
def flags(keys, bound, counts, reached, exceeding):
    for j in range(0, len(keys), LOT):
        mask = at_least(keys, j, bound)
        counts[0] += ones(mask)
        while mask:
            reached[j + first_one(mask)] += 1
            mask = without_first(mask)
        mask = above(keys, j, bound)
        counts[1] += ones(mask)
        while mask:
            exceeding[j + first_one(mask)] += 1
            mask = without_first(mask)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint32])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 300])
def test_flags_are_those_of_numpy(n, dtype):
    limits = np.iinfo(dtype)
    around = np.random.default_rng(n).integers(limits.min, limits.max, n + 6, dtype, endpoint=True)
    keys = around[3:-3]  # which do not begin where a line does
    for bound in (limits.min, limits.max, int(np.sort(keys)[n // 2])):
        counts, reached, exceeding = np.zeros(2, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
        flags(keys, bound, counts, reached, exceeding)
        assert np.array_equal(reached, keys >= bound)
        assert np.array_equal(exceeding, keys > bound)
        assert counts.tolist() == [(keys >= bound).sum(), (keys > bound).sum()]

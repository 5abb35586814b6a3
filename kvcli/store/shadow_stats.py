"""How well ShadowKV's caches keep their keys, and what they save, for the report.

The paper's formula for the memory saved (arXiv 2410.21465, appendix A.2) lacks a factor, the width of a token's keys,
in the term for selected chunks and outliers; `memory_saving` has it, which makes 6.26 of the paper's 7.08 in its
example.
"""

from collections.abc import Mapping
from typing import Any

from kvcli.store.shadow import ShadowCache
from kvcli.telemetry import report


def summarise(layers: Mapping[int, ShadowCache], pages: report.Cache) -> dict[str, Any]:
    """Return plain data for the report, of the layers whose keys are factorised; nothing where there is none.

    `key_error` is the relative error (Frobenius) of the prompt's keys as stored, the worst of all layers and layer by
    layer. `memory_saving` is the factor of the paper's appendix A.2 as corrected, `bytes_saved` the same in bytes, both
    for the tokens that are kept in this way. `outlier_bytes_on_host`: values of outliers lie in host memory as well,
    where a chunk's place is its number; the paper leaves them out.
    """
    active = {layer: cache for layer, cache in layers.items() if cache.active}
    if not active:
        return {}
    errors = {layer: cache.keys.error or 0.0 for layer, cache in active.items()}
    full = kept = 0
    for cache in active.values():
        width = cache.k.shape[0] * cache.k.shape[2]
        full += 2 * cache.covered * width * cache.k.element_size()
        kept += cache.layout.elements(cache.covered, width, cache.keys.rank) * cache.k.element_size()
    return {
        "rank": max(cache.keys.rank for cache in active.values()),
        "key_error": max(errors.values()),
        "outlier_bytes_on_host": sum(
            cache.resident.shape[0] * cache.layout.outliers * cache.values.block_bytes for cache in active.values()
        ),
        "hit_rate": pages.hits / pages.pages_requested if pages.pages_requested else 0.0,
        "memory_saving": full / kept,
        "bytes_saved": full - kept,
        "layers": [{"layer": layer, "key_error": error} for layer, error in errors.items()],
    }

"""Reading a long prompt: kvcli's prefill, whose KV leaves for host memory, against transformers' with sdpa.

Both return the logits of one token and keep all KV: kvcli in pinned host memory, which is allocated within the time
taken; transformers on the device. Peak memory is the allocator's, above weights and hidden states; kvcli's includes the
intermediates of a chunk, so that what is related to KV is less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache

from gpu_parts.clock import freed
from gpu_parts.frame import Row
from gpu_parts.made_up import dummy_model
from gpu_parts.setting import Setting
from kvcli.bench.runs import seeded_tokens
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.layers import cache_argument
from kvcli.models.loading import Model
from kvcli.runtime.engine import engine

ROUNDS = 2


def run(setting: Setting, found: Any) -> Iterator[Row]:  # noqa: ARG001
    """Yield a row for each reading, in turn; a short one of each goes before."""
    model = dummy_model(setting, setting.shape)
    ids = seeded_tokens(setting.middle, model.geometry.vocab_size, 0)
    readers: dict[str, Callable[[Model, list[int]], object]] = {"kvcli": by_kvcli, "transformers": by_transformers}
    for reader in readers.values():
        reader(model, ids[: setting.middle // 32])
    for number in range(ROUNDS):
        for name, reader in readers.items():
            yield shown({"case": name, "round": number} | _measured(model, ids, reader))


def by_kvcli(model: Model, ids: list[int]) -> object:
    """Read as `generate` does, into freekv."""
    with engine(model, [len(ids) + 1]) as ready:
        method = ready.method(resolve_profile("freekv"), ready.context(len(ids), 1))
        return method, ready.prefill(ids, [method])


@torch.inference_mode()
def by_transformers(model: Model, ids: list[int]) -> object:
    """Read in one forward pass."""
    cache, tokens = DynamicCache(config=model.module.config), torch.tensor([ids], device=model.device)
    given = {cache_argument(model.module): cache, "use_cache": True}
    return cache, model.module(input_ids=tokens, logits_to_keep=1, **given)


def _measured(model: Model, ids: list[int], reader: Callable[[Model, list[int]], object]) -> Row:
    freed(model.device)  # the KV of the reading before, many GiB of pinned memory
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started = time.perf_counter()
    kept = reader(model, ids)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    del kept
    hidden = len(ids) * model.module.config.hidden_size * model.dtype.itemsize
    peak = torch.cuda.max_memory_allocated() if cuda else None
    return {
        "context": len(ids),
        "seconds": seconds,
        "peak_bytes": peak,
        "weight_bytes": model.geometry.weight_bytes,
        "hidden_bytes": hidden,
        "above_bytes": None if peak is None else peak - model.geometry.weight_bytes - hidden,
    }


def shown(row: Row) -> Row:
    """Print a reading, and pass it on."""
    above = row["above_bytes"]
    memory = "" if above is None else f", {above / 2**30:.2f} GiB above weights and hidden states"
    print(f"  {row['case']:<34} {row['context']:>9,} tokens: {row['seconds']:8.2f} s{memory}", flush=True)
    return row

"""The forms of a model that take less memory than the one asked for, and which of them would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from kvcli.errors import KvcliError
from kvcli.models.geometry import ModelGeometry, build_on_meta
from kvcli.models.loading import describe
from kvcli.models.streamed import WeightsOn, WeightStreaming
from kvcli.models.weights import ON_LOADING, HalfForm, WeightForm

_WEIGHTS = ("int8", "int4")  # the closest to the model's own first


@dataclass(frozen=True)
class SmallerForm:
    """A model as these options make it."""

    options: tuple[str, ...]
    dtype: torch.dtype
    geometry: ModelGeometry


def smaller_forms(
    config: PreTrainedConfig, dtype: torch.dtype, geometry: ModelGeometry, path: Path | None, device: torch.device
) -> Iterator[SmallerForm]:
    """Yield what options make of a model of this `dtype` and `geometry`, those of a single option first.

    Only a model with files at `path` can leave weights outside the memory of its `device`.
    """
    if geometry.streaming is not None:  # its other forms cannot be streamed
        return
    form = geometry.form
    narrow = ("--dtype bfloat16",) if dtype.itemsize > torch.bfloat16.itemsize else ()
    packed = [name for name in _WEIGHTS if _can_become(form, ON_LOADING[name])]
    if narrow:
        own = None if isinstance(form, HalfForm) else form  # the files' halves are kept for computing in fp32
        yield SmallerForm(narrow, torch.bfloat16, describe(config, torch.bfloat16, own, path))
    for more, as_dtype in [((), dtype), (narrow, torch.bfloat16)][: 1 + len(narrow)]:
        for name in packed:
            made = describe(config, as_dtype, ON_LOADING[name], path)
            yield SmallerForm((*more, f"--weights {name}"), as_dtype, made)
        if not more and path is not None:
            where: WeightsOn = "host" if device.type == "cuda" else "disk"
            with suppress(KvcliError):
                streaming = WeightStreaming.of(build_on_meta(config, dtype), form, geometry.weight_bytes, where)
                yield SmallerForm((f"--weights-on {where}",), dtype, replace(geometry, streaming=streaming))


def _can_become(now: WeightForm | None, form: WeightForm) -> bool:
    """Tell whether weights can be quantised on loading, to fewer bits than they have."""
    if now is None or isinstance(now, HalfForm):
        return True
    return not now.stored and (now.bits or 0) > (form.bits or 0)


def that_fit(forms: Iterable[SmallerForm], fits: Callable[[SmallerForm], bool]) -> list[str]:
    """List the options of the forms that fit; those of two options only where no single one is enough."""
    for _, alike in groupby(forms, key=lambda form: len(form.options)):
        if found := [" ".join(form.options) for form in alike if fits(form)]:
            return found
    return []


def in_words(options: Sequence[str]) -> str:
    """Write options as a sentence has them, "a, b or c", with what they need and is not installed."""
    *others, last = options
    missing = any(
        form.made is None and f"--weights {name}" in each for name, form in ON_LOADING.items() for each in options
    )
    installed = " (pip install 'kvcli[weights]')" if missing else ""
    return (f"{', '.join(others)} or {last}" if others else last) + installed

"""The pipeline over slots against the blocking one: the same selections and counts, outputs within rounding.

First attention alone, layer by layer, with the same made-up queries, keys and values for both, so that nothing but the
pipeline can differ: captured in a CUDA graph, launched kernel by kernel, and with every stream made late at random.
The two sum the scores of pages in different orders, so a selection may differ where two scores are equal but for
rounding; such near-ties are counted, and left out of the comparison of outputs and transfers. Then whole texts, in
fp32, whose tokens and counts have to be the same: steps of both pipelines run the layers fused, so that products are
summed in one order.

`texts` holds what every method writes with the bundled model on the device against what it writes on a CPU.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS
from torch import Tensor

import kvcli
from gpu_parts.clock import captured
from gpu_parts.frame import Ended, Found, Row, Rows, in_processes
from gpu_parts.setting import Setting
from kvcli.bench.runs import seeded_tokens
from kvcli.inputs.profiles import resolve_profile
from kvcli.kernels.page_scores import page_scores_ref
from kvcli.kernels.softmax import Softmax
from kvcli.methods import get_method, method_names
from kvcli.methods.contract import SequenceContext
from kvcli.methods.freekv import FreeKV, FreeKVConfig
from kvcli.models.geometry import LayerGeometry
from kvcli.models.loading import ModelSpec, load_model
from kvcli.runtime.engine import Engine, engine
from kvcli.runtime.gpu.fused import fused_layers
from kvcli.runtime.gpu.pipeline import SlotPipeline
from kvcli.runtime.gpu.recorder import CudaStreams, SerialStreams, Streams
from kvcli.runtime.pipeline import Pipeline
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.counters import Count, Counters

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # relative RMS
KEPT = 0.9  # of a query from one step to the next: the cosines of the heads then lie on both sides of tau
NEAR = 1e-5  # difference of two scores, relative to the best one, that rounding can cause
MOVED = (Count.MISSES, Count.BYTES_TO_DEVICE, Count.BYTES_EXPOSED)  # counts that a near-tie changes
LATE = 200_000  # clock cycles that a stream is late at most
Variant = tuple[str, torch.dtype, dict[str, Any]]
ABLATED: list[Variant] = [
    ("launched", torch.float32, {"tau": 0.9, "host_layout": "nhd"}),
    ("launched", torch.float32, {"tau": 0.9, "recall": "copy"}),
]
CAPTURED: list[Variant] = [
    *(("captured", torch.bfloat16, {"tau": tau}) for tau in (0.0, 0.9, 1.0)),
    ("captured", torch.float32, {"tau": 0.9}),
    *(("late", torch.float32, {"tau": tau}) for tau in (0.9, 1.0)),
    *ABLATED,
]
LAUNCHED: list[Variant] = [*(("launched", torch.float32, {"tau": tau}) for tau in (0.0, 0.9, 1.0)), *ABLATED]


def agreement(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row for each comparison; what differed before is compared again."""
    variants = CAPTURED if setting.device.type == "cuda" else LAUNCHED
    for how, dtype, settings in variants:
        if not found.has(name_of_attention(how, dtype, settings), agrees=True):
            yield [shown(attention(setting, how, dtype, settings))]
    if not found.has(TEXTS, agrees=True):
        yield [shown(same_texts(setting))]


TEXTS = "texts"


def name_of_attention(how: str, dtype: torch.dtype, settings: dict[str, Any]) -> str:
    """Name a comparison."""
    changed = [f"{name} {value}" for name, value in settings.items()]
    return ", ".join(["attention", how, str(dtype).removeprefix("torch."), *changed])


class Bench:
    """Layers of some sequences, in the store of one pipeline or the other."""

    def __init__(self, setting: Setting, dtype: torch.dtype, settings: dict[str, Any]):
        self.device, self.dtype = setting.device, dtype
        self.steps = 3 * setting.page + 3
        heads, num_kv_heads, d = (8, 2, 32) if setting.smoke else (32, 8, 128)
        self.layers = [LayerGeometry(index, heads, num_kv_heads, d, None, True) for index in range(4)]
        # One has outgrown its budget, one does so on the way.
        self.lengths = [setting.short // 4 + 5, setting.budget - setting.page - 3]
        same = {"budget": setting.budget, "sink": setting.sink, "window": setting.sink, "page_size": setting.page}
        self.config = FreeKVConfig(**same, **settings)
        self.softmax = Softmax(d**-0.5)

    def methods(self) -> list[FreeKV]:
        """Make the method objects, with the same prompts every time."""
        draw, made = self.drawing(1), []
        for length in self.lengths:
            room, layers = length + self.steps + 1, len(self.layers)
            known = SequenceContext.of(layers, self.device, self.dtype, room, prompt_tokens=length)
            method = FreeKV(self.config, self.layers, known)
            for layer in self.layers:
                k, v = draw(2, layer.num_kv_heads, length, layer.head_dim)
                method.prefill(layer.index, k, v, k[:, :0], self.softmax)
            made.append(method)
        return made

    def tokens(self) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
        """Yield a step's q [b, H, 1, d], k and v [b, Hk, 1, d] of every layer; queries turn slowly."""
        draw, b, q = self.drawing(2), len(self.lengths), {}
        for _ in range(self.steps):
            step = []
            for layer in self.layers:
                new = draw(b, layer.num_heads, 1, layer.head_dim)
                q[layer.index] = KEPT * q[layer.index] + (1 - KEPT**2) ** 0.5 * new if layer.index in q else new
                step.append((q[layer.index], *draw(2, b, layer.num_kv_heads, 1, layer.head_dim)))
            yield step

    def drawing(self, seed: int) -> Callable[..., Tensor]:
        """Give a source of normal numbers."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return lambda *shape: torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)


@torch.inference_mode()
def attention(setting: Setting, how: str, dtype: torch.dtype, settings: dict[str, Any]) -> Row:
    """Run both pipelines over the same steps."""
    bench = Bench(setting, dtype, settings)
    blocking, over_slots = bench.methods(), bench.methods()
    slots = SlotRun(bench, over_slots, how)
    differing, ties, error = 0, 0, 0.0
    before: set[Head] = set()  # heads whose pages differed after the last step
    for step in bench.tokens():
        for method in (*blocking, *over_slots):
            method.context.counters.next_step()
        expected = [
            torch.stack([method.attend(layer, q[row, :, 0], k[row, :, 0], v[row, :, 0], bench.softmax)
                         for row, method in enumerate(blocking)])
            for layer, (q, k, v) in enumerate(step)
        ]  # fmt: skip
        outs = slots.step(step)
        apart = {head: pages for row in range(len(blocking)) for head, pages in _apart(row, blocking, over_slots)}
        for head, pages in apart.items():
            near = near_tie(blocking[head.row], head, step[head.layer][0][head.row, :, 0], pages, bench.softmax)
            ties, differing = ties + near * len(pages), differing + (not near) * len(pages)
        for layer, (found, reference) in enumerate(zip(outs, expected, strict=True)):
            excused = [head for head in before | set(apart) if head.layer == layer]
            error = max(error, _relative_rms(found[:, 0], reference, excused, bench.layers[layer]))
        before = set(apart)
    slots.pipeline.count()
    pairs = zip(blocking, over_slots, strict=True)
    counted = all(same_counts(one.context.counters, other.context.counters, ties) for one, other in pairs)
    correction = blocking[0].context.counters.correction()
    return {
        "case": name_of_attention(how, dtype, settings),
        "how": how,
        "ran": setting.ran,
        "dtype": str(dtype).removeprefix("torch."),
        "settings": settings,
        "steps": bench.steps,
        "corrected": correction.heads_corrected / max(1, correction.heads_checked),
        "differing_pages": differing,
        "near_ties": ties,
        "same_counts": counted,
        "error": error,
        "agrees": differing == 0 and counted and error <= TOLERANCE[dtype],
    }


class SlotRun:
    """The pipeline over slots, with tensors that stay where they are, so that its step can be captured."""

    def __init__(self, bench: Bench, methods: Sequence[FreeKV], how: str):
        self.bench = bench
        self.pipeline = SlotPipeline(methods, bench.lengths, lanes_for(bench.device, how))
        self.inputs = [tuple(torch.zeros_like(x) for x in parts) for parts in next(bench.tokens())]
        self.outs: list[Tensor] = []
        self.replay: Callable[[], None] = self._run
        if how == "captured":
            self.replay = captured(self._run, bench.device)
        else:
            self._run()  # a step that is tried out before the sequences take part, as every capture does
        self.pipeline.start()

    def step(self, step: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        """Run a step: what every layer attends to [b, 1, H, d]."""
        for targets, values in zip(self.inputs, step, strict=True):
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)
        self.replay()
        self.pipeline.stepped()
        return self.outs

    def _run(self) -> None:
        self.pipeline.advance()
        self.outs = [self.pipeline(layer, *parts, self.bench.softmax) for layer, parts in enumerate(self.inputs)]
        self.pipeline.settle()


def lanes_for(device: torch.device, how: str) -> Streams:
    """Choose the streams: late ones sleep on the device before their work, for a time drawn at random."""
    if device.type != "cuda":
        return SerialStreams()
    drawn = random.Random(0)
    return (
        CudaStreams(device, lambda: torch.cuda._sleep(drawn.randrange(LATE))) if how == "late" else CudaStreams(device)
    )


class Head(NamedTuple):
    """A KV head of a layer of a sequence."""

    row: int
    layer: int
    head: int


def _apart(row: int, blocking: Sequence[FreeKV], over_slots: Sequence[FreeKV]) -> Iterator[tuple[Head, set[int]]]:
    """Yield the KV heads of a sequence that hold other pages in one pipeline than in the other, with those pages."""
    for layer, cache in blocking[row].retrieval.items():
        if cache.active:
            pairs = zip(cache.resident.tolist(), over_slots[row].retrieval[layer].resident.tolist(), strict=True)
            for index, (one, other) in enumerate(pairs):
                if pages := set(one) ^ set(other):
                    yield Head(row, layer, index), pages


def near_tie(method: FreeKV, head: Head, q: Tensor, pages: set[int], softmax: Softmax) -> bool:
    """Tell whether all `pages` have the score of the last selected page but for rounding; q [H, d] of the step."""
    cache, config = method.retrieval[head.layer], method.config
    summary = cache.summaries.of(cache.candidates).double()
    scale = softmax.scale if config.score_scale else 1.0
    scores = page_scores_ref(q.double(), summary, scale, config.pooling)[head.head]  # [n]
    last = scores.topk(cache.budget.selected).values[-1]
    found = scores[[page - cache.candidates.start for page in sorted(pages)]]
    return bool(((found - last).abs() <= NEAR * scores.abs().max()).all())


def same_counts(one: Counters, other: Counters, ties: int) -> bool:
    """Compare all counts; after near-ties the misses may differ by two for each of their pages, and bytes at all."""
    if not ties:
        return bool(one.counts == other.counts)
    kept = [count for count in Count if count not in MOVED]
    pairs = [
        (a, b) for x, y in zip(one.counts, other.counts, strict=True) for a, b in zip(x, y, strict=True)
    ]  # of a layer at a step
    misses = sum(abs(a[Count.MISSES] - b[Count.MISSES]) for a, b in pairs)
    return misses <= 2 * ties and all(a[count] == b[count] for a, b in pairs for count in kept)


def _relative_rms(found: Tensor, reference: Tensor, excused: Sequence[Head], layer: LayerGeometry) -> float:
    """Give the error of outputs [b, H, d] without those of the KV heads that are excused."""
    found, reference, group = found.double(), reference.double(), layer.num_heads // layer.num_kv_heads
    for head in excused:
        queries = slice(head.head * group, (head.head + 1) * group)
        found[head.row, queries] = reference[head.row, queries]
    return float((found - reference).norm() / reference.norm())


def same_texts(setting: Setting) -> Row:
    """Continue the same prompts through both pipelines, and compare tokens and counts."""
    shape = setting.shape if setting.smoke else "small"
    model = load_model(ModelSpec(shape, device=setting.device.type, dtype="float32", load_format="dummy"))
    lengths, steps = [4 * setting.budget + 7, setting.budget - 5], 2 * setting.page + 5
    with engine(model, [length + steps for length in lengths]) as ready:
        both = [_decoded(ready, setting, lengths, steps, pipeline) for pipeline in ("blocking", "overlapped")]
    same = [[sequence.token_ids for sequence in run] for run in both]
    counts = [[(report.correction, report.cache) for report in map(RunningSequence.report, run)] for run in both]
    return {
        "case": TEXTS,
        "how": "captured" if setting.device.type == "cuda" else "launched",
        "ran": setting.ran,
        "dtype": "float32",
        "steps": steps,
        "same_tokens": same[0] == same[1],
        "same_counts": counts[0] == counts[1],
        "agrees": same[0] == same[1] and counts[0] == counts[1],
    }


def _decoded(
    ready: Engine, setting: Setting, lengths: list[int], steps: int, pipeline: Pipeline
) -> list[RunningSequence]:
    same = {"budget": setting.budget, "sink": setting.sink, "window": setting.sink, "page_size": setting.page}
    profile, sequences = resolve_profile("freekv", None, same), []
    for row, length in enumerate(lengths):
        method = ready.method(profile, ready.context(length, steps))
        ids = seeded_tokens(length, ready.model.geometry.vocab_size, row)
        (logits,) = ready.prefill(ids, [method])
        sequence = ready.sequence(method, Sampling(max_tokens=steps, ignore_eos=True), index=row, sample=row)
        sequence.accept(logits)
        sequences.append(sequence)
    with fused_layers(ready.model.module):
        for _ in ready.decode(sequences, pipeline=pipeline):
            pass
    return sequences


DOCUMENT = Path(__file__).parents[2] / "examples/needle-4k.txt"
WRITTEN = 48  # tokens
SETTINGS = {"budget": 512, "sink": 64, "window": 64}
LIMIT = 90.0  # seconds for one method


def texts(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row for each method: how many tokens it writes on the device that it also writes on a CPU, in fp32.

    `texts.py` has written down what it writes on a CPU. Each method has a process of its own, several side by side: it
    is the kernels that take time to compile. `random` draws its pages on the device, so that another text is no fault
    of it.
    """
    known = json.loads((RESULTS / "texts.json").read_text())["methods"]
    expected = {name: known[name]["ids"] for name in method_names() if not found.has(name, agrees=True)}
    works = {name: partial(written, setting.device.type, [name]) for name in expected}
    at_once = 1 if setting.smoke else min(6, os.cpu_count() or 1)
    for name, message in in_processes(works, LIMIT, at_once):
        if not isinstance(message, Ended):
            ids = message[0].pop("ids")
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected[name], ids, strict=False)))
            problem = "" if same == len(expected[name]) else f"only the first {same} tokens are those of a CPU"
            row = {**message[0], "same": same, "agrees": not problem or name == "random", "problem": problem}
        elif message.error is not None:
            row = {"case": name, "agrees": False, "problem": message.error}
        else:
            continue
        print(f"  text of {name:<54} {'agrees' if row['agrees'] else 'DIFFERS: ' + row['problem']}", flush=True)
        yield [row | {"ran": setting.ran}]


def written(device: str, names: Sequence[str]) -> Iterator[Rows]:
    """Yield what each of some methods answers to a question about a text, as token ids."""
    torch.set_num_threads(4)
    model = kvcli.load(device=device, dtype="float32")
    for name in names:
        settings = {key: SETTINGS[key] for key in SETTINGS if key in get_method(name).Config.model_fields}
        same: dict[str, Any] = {"method": name, "max_tokens": WRITTEN, "ignore_eos": True, **settings}
        answer = model.generate(DOCUMENT.read_text(), prompt="Who has this code?", **same)
        yield [{"case": name, "ids": answer.token_ids, "text": answer.text}]


def shown(row: Row) -> Row:
    """Print a comparison, and pass it on."""
    error = f", error {row['error']:.1e}, {row['corrected']:.0%} corrected" if "error" in row else ""
    print(f"  {row['case']:<62} {'agrees' if row['agrees'] else 'DIFFERS'}{error}", flush=True)
    if not row["agrees"]:
        print(f"    {row}", flush=True)
    return row

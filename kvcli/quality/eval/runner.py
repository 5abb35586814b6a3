"""Ask examples: each is read once for all variants with exact prefill, then answered by each on its own.

Several questions on one document are examples with the same prompt, which is read once for all of them: each is
answered by a copy of the method's state.

Variants are decoded one after another, the samples of one together, so that the time of a step is the variant's. A
sample's text is kept as soon as it ends: a run that is cut off continues with the missing samples.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from kvcli.capacity import memory
from kvcli.capacity.need import by_pool
from kvcli.errors import KvcliError
from kvcli.inputs.variants import Variant
from kvcli.memory.disk_tier import DiskTier
from kvcli.methods.contract import AnyMethod
from kvcli.models.loading import Model
from kvcli.quality.eval.example import Cell, Encoded, Example, encode_example
from kvcli.quality.eval.predictions import Prediction, Predictions
from kvcli.quality.eval.scorers import score
from kvcli.quality.eval.suite import FED, FIDELITY, EvaluationPlan
from kvcli.quality.fidelity import MeasuredMethod, Passage, measure
from kvcli.runtime.engine import Engine, engine
from kvcli.runtime.sampling import Prompted, Sampler, TeacherForcing
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.counters import Counters
from kvcli.telemetry.observer import Observer
from kvcli.ui import summary

# Part of the free memory that the caches of variants read together may take.
_SHARE = 0.5


@dataclass
class Reading:
    """The tokens that one sequence read, summed over its steps."""

    steps: int = 0
    attended: float = 0.0  # tokens, mean over KV heads and layers of retrieval
    share: float = 0.0  # of all KV, over all layers

    def note(self, method: AnyMethod) -> None:
        """Add the step that `method` has just done."""
        masks = {layer: method.attended(layer) for layer in range(len(method.caches))}  # bool [Hk, length]
        chosen = [masks[layer] for layer in method.retrieval] or list(masks.values())
        self.steps += 1
        self.attended += sum(float(mask.sum(1).float().mean()) for mask in chosen) / len(chosen)
        self.share += sum(float(mask.float().mean()) for mask in masks.values()) / len(masks)


@dataclass(frozen=True)
class AskedExample:
    """An example of a cell, and the samples that are `missing` of each variant, by its label."""

    cell: Cell
    example: Example
    read: Encoded
    missing: dict[str, list[int]]


@dataclass
class Evaluation:
    """A plan for a model; `run` fills `predictions`. A prompt that exceeds `most` tokens with its answer is cut."""

    plan: EvaluationPlan
    model: Model
    predictions: Predictions
    observer: Observer
    most: int | None = None
    disk: DiskTier | None = None
    _engine: Engine = field(init=False)

    def run(self, cells: Sequence[Cell]) -> None:
        """Ask every example of every cell that has no prediction yet."""
        self.observer.stage("eval", sum(cell.size for cell in cells) * len(self.plan.variants))
        for number, cell in enumerate(cells, 1):
            begun, known = time.perf_counter(), len(self.predictions)
            series = [each for each in cells if each.series == cell.series] if cell.series else [cell]
            if cell is not series[0]:
                continue
            for index in range(max(each.size for each in series)):
                self._ask_series([each for each in series if index < each.size], index)
            if len(self.predictions) > known:
                taken = summary.duration(1000 * (time.perf_counter() - begun))
                done = number + len(series) - 1
                self.observer.notice(f"{series[-1].title}: done in {taken} ({done} of {len(cells)})")

    def _missing(self, cell: Cell, index: int, variant: Variant) -> list[int]:
        """List the samples of an example that have no prediction yet; a text that is fed has only one."""
        samples = 1 if cell.metric in FED else self.plan.sampling.num_samples
        place = cell.task, cell.length, cell.depth, index, variant.label
        return [sample for sample in range(samples) if (*place, sample) not in self.predictions]

    def _ask_series(self, cells: Sequence[Cell], index: int) -> None:
        """Ask what is missing of the examples of this number, those with equal prompts together."""
        together: dict[tuple[int, ...], list[AskedExample]] = {}
        for cell in cells:
            missing = {variant.label: self._missing(cell, index, variant) for variant in self.plan.variants}
            self.observer.advance(sum(not samples for samples in missing.values()))
            if any(missing.values()):
                example = cell.make(index)
                options = self.plan.template, self.model.tokenizer, self.plan.max_tokens, self.most
                asked = AskedExample(cell, example, encode_example(example, *options), missing)
                together.setdefault(tuple(asked.read.ids), []).append(asked)
        for questions in together.values():
            self._ask(questions, index)

    def _ask(self, questions: Sequence[AskedExample], index: int) -> None:
        """Ask questions on one prompt of every variant that lacks an answer."""
        variants = [each for each in self.plan.variants if any(asked.missing[each.label] for asked in questions)]
        ids, room = questions[0].read.ids, max(asked.read.room for asked in questions)
        closeness = questions[0].cell.metric == FIDELITY
        room -= closeness  # the last token of a text that is compared is not fed
        answered = self._compared if closeness else self._answers
        with engine(self.model, [len(ids) + room], self.observer.notice, self.disk) as self._engine:
            for group in self._groups(variants, len(ids), len(ids) + room):
                for variant, asked, answers in answered(questions, room, group):
                    for answer in answers:
                        place = asked.cell.task, asked.cell.length, asked.cell.depth, index, variant.label
                        self.predictions.add([Prediction(*place, **answer)])
                    self.observer.advance()

    def _groups(self, variants: Sequence[Variant], prompt_tokens: int, capacity: int) -> Iterator[list[Variant]]:
        """Split variants so that the caches of each part fit into memory together; a single one is tried anyway."""
        place, geometry, dtype = self.model.place, self.model.geometry, self.model.dtype
        free = memory.available(place)
        group: list[Variant] = []
        taken = dict.fromkeys(free, 0)
        for variant in variants:
            disk = self.disk if variant.profile.settings.on_host else None
            method = memory.planned_method(variant.profile, geometry, capacity, dtype, prompt_tokens, disk, place)
            size = by_pool(method.footprint(), place)
            size = {pool: taken[pool] + self.plan.sampling.num_samples * size[pool] for pool in taken}
            if group and any(size[pool] > _SHARE * free[pool] for pool in free):
                yield group
                group, size = [], {pool: size[pool] - taken[pool] for pool in taken}
            group.append(variant)
            taken = size
        yield group

    def _answers(
        self, questions: Sequence[AskedExample], room: int, variants: Sequence[Variant]
    ) -> Iterator[tuple[Variant, AskedExample, Iterator[dict[str, Any]]]]:
        """Let variants read a prompt together and answer one after another, each question on a copy of its own.

        A method that looks at the prompt's question first sees the first of several questions.
        """
        read = questions[0].read
        contexts = [self._engine.context(len(read.ids), room, read.question) for _ in variants]
        methods = [
            self._engine.method(variant.profile, context) for variant, context in zip(variants, contexts, strict=True)
        ]
        begun = time.perf_counter()
        logits = self._engine.prefill(read.ids, methods)
        prefill_ms = 1000 * (time.perf_counter() - begun)
        for variant in variants:
            method, expected = methods.pop(0), logits.pop(0)  # memory is given back once the method has answered
            missing = [asked for asked in questions if asked.missing[variant.label]]
            for asked in missing:
                last, rest = asked is missing[-1], (expected, prefill_ms, asked.missing[variant.label])
                # A copy has no name here, which would keep it alive while the next one is made.
                yield variant, asked, self._answer(asked, method if last else _fork(method), *rest)

    def _compared(
        self,
        questions: Sequence[AskedExample],
        room: int,  # noqa: ARG002
        variants: Sequence[Variant],
    ) -> Iterator[tuple[Variant, AskedExample, Iterator[dict[str, Any]]]]:
        """Feed a text to all variants in one batch, with full attention as the reference; times are not measured."""
        (asked,) = questions
        read = asked.read
        passage = Passage(asked.cell.task, read.ids, read.fed[:-1], read.question, read.fed[-1])
        readings = [Reading() for _ in variants]
        measured, _ = measure(
            self._engine,
            passage,
            [variant.profile for variant in variants],
            attention=False,
            stepped=lambda place, method: readings[place].note(method),
        )
        for variant, found, reading in zip(variants, measured, readings, strict=True):
            yield variant, asked, iter([self._closeness(read, found, reading)])

    def _closeness(self, read: Encoded, found: MeasuredMethod, reading: Reading) -> dict[str, Any]:
        """Return a prediction's fields, except its key."""
        return {
            "sample": 0,
            "text": "",
            "score": None,
            "finish_reason": "length",
            "prompt_tokens": len(read.ids),
            "cut_tokens": read.cut,
            "output_tokens": len(read.fed) - 1,
            "nll": None,
            "prefill_ms": 0.0,
            "decode_ms": None,
            "kl": found.fidelity.kl,
            "same_top": found.fidelity.agreement,
            "nll_gap": found.nll_gap,
            **_cost(found.method, reading),
        }

    def _answer(
        self,
        asked: AskedExample,
        method: AnyMethod,
        logits: Tensor,
        prefill_ms: float,
        samples: Sequence[int],
    ) -> Iterator[dict[str, Any]]:
        """Continue one method's samples, all of them as one batch; yield each when it ends.

        Steps have a row for every sample of the plan, including those that have ended or are known already: another
        number of rows would sum in another order, and a run that was cut off would continue with another text.
        """
        example, read = asked.example, asked.read
        forks = [_fork(method) for _ in samples[1:]]
        sequences = [
            self._sequence(read, each, sample, prefill_ms)
            for sample, each in zip(samples, [method, *forks], strict=True)
        ]
        readings = {sequence.sample: Reading() for sequence in sequences}
        ends = sequences[0].eos
        for sequence in sequences:
            if read.turns:
                sequence.eos = ()  # the end of an answer in an earlier turn is not that of the sequence
            sequence.accept(logits)
            if not sequence.running:
                yield self._entry(example, read, sequence, Reading())
        rows = 1 if read.fed else self.plan.sampling.num_samples
        for step in self._engine.decode(sequences, rows=rows):
            for sequence, _ in step:
                readings[sequence.sample].note(sequence.method)
                if read.turns and len(sequence.token_ids) == len(read.turns):
                    sequence.eos = ends
                if not sequence.running:
                    yield self._entry(example, read, sequence, readings[sequence.sample])

    def _sequence(self, read: Encoded, method: AnyMethod, sample: int, prefill_ms: float) -> RunningSequence:
        sampling = replace(self.plan.sampling, max_tokens=read.room, ignore_eos=bool(read.fed))
        sampler: TeacherForcing | Prompted | None = TeacherForcing(read.fed) if read.fed else None
        if read.turns:
            sampler = Prompted(read.turns, Sampler(sampling, sample, self.model.device, read.ids))
        drawn = method, sampling
        sequence = self._engine.sequence(*drawn, index=sample, sample=sample, sampler=sampler, ids=read.ids)
        sequence.prefill_ms = prefill_ms
        return sequence

    def _entry(self, example: Example, read: Encoded, sequence: RunningSequence, reading: Reading) -> dict[str, Any]:
        """Return a prediction's fields, except its key.

        Raises:
            KvcliError: the sequence failed, or a text that it was fed cannot be the model's.
        """
        if sequence.error is not None:
            raise KvcliError(sequence.error, "kvcli generate with the same model names the layer")
        if isinstance(sequence.sampler, TeacherForcing) and math.isinf(sequence.sampler.nll):
            what = "the model gives a token of the text that it is fed no likelihood at all: the perplexity is infinite"
            raise KvcliError(what, "use a text without tokens that the model never writes, such as special ones")
        teacher = sequence.sampler if isinstance(sequence.sampler, TeacherForcing) else None
        answer = sequence.token_ids[len(read.turns) :]
        text = said = sequence.detokenizer.text
        if read.turns:
            text = said = str(self.model.tokenizer.decode(answer, skip_special_tokens=True))
        elif sequence.detokenizer.thoughts is not None:
            _, said = sequence.detokenizer.thoughts  # what a model thinks is no answer
        return {
            "sample": sequence.sample,
            "text": text,
            "score": None if teacher else _score(said, example),
            "finish_reason": sequence.finish_reason,
            "prompt_tokens": len(read.ids),
            "cut_tokens": read.cut,
            "output_tokens": len(answer),
            "nll": teacher.nll if teacher else None,
            "prefill_ms": sequence.prefill_ms,
            "decode_ms": sum(sequence.decode_ms),
            **_cost(sequence.method, reading),
        }


def _cost(method: AnyMethod, reading: Reading) -> dict[str, Any]:
    """Return the cost of a prediction, except its time."""
    counters = method.context.counters
    kv, cache, correction = method.footprint(), counters.cache(), counters.correction()
    return {
        "steps": reading.steps,
        "attended": reading.attended / reading.steps if reading.steps else None,
        "attended_share": reading.share / reading.steps if reading.steps else None,
        "device_kv_bytes": kv.device,
        "host_kv_bytes": kv.host,
        "bytes_to_device": cache.bytes_to_device,
        "heads_checked": correction.heads_checked,
        "heads_corrected": correction.heads_corrected,
        "pages_requested": cache.pages_requested,
        "misses": cache.misses,
    }


def _fork(method: AnyMethod) -> AnyMethod:
    return method.fork(Counters(method.context.counters.num_layers), "sequence 0")


def _score(text: str, example: Example) -> float:
    if example.first_line:
        text = text.lstrip("\n").split("\n")[0]
    return score(example.metric, text, example.references, example.choices)

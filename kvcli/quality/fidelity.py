"""How close a method comes to full attention, measured on the same tokens.

Two runs read the same prompt and are fed the same tokens, whatever either would have generated: the method's, and the
reference's, with full attention. At an audited step, and in every layer in which the method chooses what to attend to,
the query is the method's own, because it chose by that query; keys and values are the reference's, because an exact run
would have had them. So a figure covers everything that the method does to this layer's attention: what it leaves out,
what it keeps in another form, and how far its cache has drifted from the exact one. With w_h the weights of query head
h over all tokens, of the G heads of a KV head, S the tokens it attended to and o its output:

    mass       mean over the G heads of sum_{j in S} w_hj / sum_j w_hj
    recall     part of the `TOP` tokens of the largest sum_h w_hj that are in S
    error      ||o - o*|| / ||o*|| over the G heads together, o* = sum_j w_hj v_j
    attended   tokens in S

The sum of all layers shows in the next token's distributions, p of the reference and p' of the method:

    kl         KL(p || p') in nats
    agreement  whether both are largest at the same token

Everything streams into sums: memory does not grow with the context, and by seven numbers per audited step. In addition
to the method's own memory the reference takes a full KV cache on the device.

`Audit` audits a generation every few steps: the reference reads the prompt with the sequence's method, and before each
audited step, as one window, the tokens that the sequence has generated since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvcli.errors import usage_error
from kvcli.inputs.profiles import Profile, reference_profile
from kvcli.kernels.block_attention import attention_scores
from kvcli.kernels.softmax import Softmax
from kvcli.methods.contract import AnyMethod, AttentionObserver
from kvcli.runtime.engine import Engine
from kvcli.runtime.not_finite import check_finite
from kvcli.runtime.sampling import Sampling, TeacherForcing
from kvcli.runtime.sequence import RunningSequence

TOP = 64
"""Tokens that recall looks for; all of them if there are fewer."""
ATTENTION = ("mass", "recall", "error", "attended")
_WORST: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (torch.minimum, torch.minimum, torch.maximum, torch.maximum)


def compare_attention(
    q: Tensor, out: Tensor, k: Tensor, v: Tensor, attended: Tensor, softmax: Softmax, top: int = TOP
) -> Tensor:
    """Return the figures of `ATTENTION`, [4, Hk], for q [H, d] with output out [H, d] over tokens `attended` [Hk, n].

    k, v [Hk, n, d] are all tokens. A logit of the softmax that carries no value takes no part in the mass.
    """
    by_group = (k.shape[0], -1, k.shape[2])
    scores = attention_scores(q.view(by_group), k, softmax)  # [Hk, G, n]
    norm = scores.logsumexp(-1, keepdim=True)
    weights = torch.exp(scores - norm)
    mass = weights.where(attended[:, None], 0.0).sum(-1).mean(-1)
    best = weights.sum(1).topk(min(top, k.shape[1]), dim=-1).indices  # [Hk, top]
    recall = attended.gather(1, best).to(mass.dtype).mean(-1)
    true = weights @ v.to(weights.dtype)  # [Hk, G, d]
    if softmax.sinks is not None:
        true = true * torch.sigmoid(norm - softmax.sinks.view(*norm.shape))
    error = (out.view(by_group).to(true.dtype) - true).flatten(1).norm(dim=-1) / true.flatten(1).norm(dim=-1)
    return torch.stack((mass, recall, error, attended.sum(1).to(mass.dtype)))


@dataclass
class HeadSums:
    """Running sums of one layer: of the figures of `ATTENTION` by KV head, and the worst of each."""

    steps: int
    total: Tensor  # [4, Hk]
    worst: Tensor

    @classmethod
    def of(cls, figures: Tensor) -> HeadSums:
        """Begin with one step's figures [4, Hk]."""
        return cls(1, figures, figures)

    def __add__(self, other: HeadSums) -> HeadSums:
        rows = (worse(a, b) for worse, a, b in zip(_WORST, self.worst, other.worst, strict=True))
        return HeadSums(self.steps + other.steps, self.total + other.total, torch.stack(list(rows)))

    @property
    def mean(self) -> Tensor:
        """Means by head: [4, Hk]."""
        return self.total / self.steps


@dataclass(frozen=True)
class StepFidelity:
    """One audited step; figures of attention are means over layers and KV heads, None without a layer."""

    step: int
    mass: float | None
    recall: float | None
    error: float | None
    attended: float | None
    kl: float
    agrees: bool


@dataclass
class Fidelity:
    """The figures so far, of one sequence or of several added up."""

    layers: dict[int, HeadSums] = field(default_factory=dict)
    steps: list[StepFidelity] = field(default_factory=list)
    _now: dict[int, Tensor] = field(default_factory=dict)  # layer -> figures of the step being audited

    def note_layer(self, layer: int, figures: Tensor) -> None:
        """Add the figures of `ATTENTION`, [4, Hk], of a layer at the current step."""
        self._now[layer] = figures

    def note_step(self, step: int, reference: Tensor, logits: Tensor) -> None:
        """End a step, given the next token's logits [vocab] of both runs."""
        expected, found = (each.double().log_softmax(-1) for each in (reference, logits))
        kl = float((expected.exp() * (expected - found)).sum())
        agrees = bool(reference.argmax() == logits.argmax())
        figures = {layer: each.double().cpu() for layer, each in self._now.items()}
        means = torch.cat(list(figures.values()), 1).mean(1).tolist() if figures else [None] * len(ATTENTION)
        mass, recall, error, attended = means
        self.steps.append(StepFidelity(step, mass, recall, error, attended, max(0.0, kl), agrees))
        self._add({layer: HeadSums.of(each) for layer, each in figures.items()})
        self._now = {}

    def add(self, other: Fidelity) -> None:
        """Add the figures of another sequence."""
        self.steps += other.steps
        self._add(other.layers)

    @property
    def kl(self) -> float:
        """Mean over the steps, in nats."""
        return fmean(step.kl for step in self.steps)

    @property
    def agreement(self) -> float:
        """Part of the steps at which both runs have the same likeliest token."""
        return fmean(step.agrees for step in self.steps)

    def attention(self) -> dict[str, float | None]:
        """Return the figures of `ATTENTION`, each the mean over steps, KV heads and layers; None if no layer chose."""
        if not self.layers:
            return dict.fromkeys(ATTENTION)
        mean = torch.cat([sums.mean for sums in self.layers.values()], 1).mean(1)
        return dict(zip(ATTENTION, mean.tolist(), strict=True))

    def summary(self) -> dict[str, Any]:
        """Return plain data for a report; empty without an audited step. Lists by KV head have their heads in order."""
        if not self.steps:
            return {}
        return {
            "steps_audited": len(self.steps),
            "top": TOP,
            **self.attention(),
            "kl": self.kl,
            "kl_max": max(step.kl for step in self.steps),
            "agreement": self.agreement,
            "layers": [_by_head(layer, sums) for layer, sums in sorted(self.layers.items())],
            "steps": [vars(step) for step in self.steps],
        }

    def _add(self, layers: Mapping[int, HeadSums]) -> None:
        for layer, sums in layers.items():
            self.layers[layer] = self.layers[layer] + sums if layer in self.layers else sums


def _by_head(layer: int, sums: HeadSums) -> dict[str, Any]:
    means = {name: row.tolist() for name, row in zip(ATTENTION, sums.mean, strict=True)}
    worst = {f"{name}_worst": row.tolist() for name, row in zip(ATTENTION, sums.worst, strict=True)}
    return {"layer": layer, **means, **worst}


class FidelityProbe:
    """Compares one method with the reference, which is ahead of it: it has read the current token already.

    While `looking`, it is the method's attention observer; `along` is another observer.
    """

    def __init__(self, reference: AnyMethod, along: AttentionObserver | None = None):
        self.reference, self.along = reference, along
        self.fidelity = Fidelity()
        self.looking = True

    def __call__(self, method: AnyMethod, layer: int, q: Tensor, out: Tensor, softmax: Softmax) -> None:
        """Compare a step of one layer, as `AttentionObserver` says."""
        if self.along is not None:
            self.along(method, layer, q, out, softmax)
        if self.looking and layer in method.retrieval:
            attended = method.attended(layer)
            kv = self.reference.retrieval[layer]
            k, v = (each[:, : attended.shape[1]] for each in (kv.k, kv.v))
            self.fidelity.note_layer(layer, compare_attention(q, out, k, v, attended, softmax))


@dataclass(frozen=True)
class Passage:
    """Text to measure on: a prompt with its question's tokens, if any, and the tokens that all runs are fed after it.

    `following` is the token that comes next in the text, whose likelihood counts as well.
    """

    source: str
    prompt: list[int]
    continuation: list[int]
    question: list[int] = field(default_factory=list)
    following: int | None = None

    @property
    def capacity(self) -> int:
        """Tokens after everything was fed."""
        return len(self.prompt) + len(self.continuation)


@dataclass(frozen=True)
class MeasuredMethod:
    """A method after a passage, and how close it came.

    `nll_gap` says by how many nats per token the text is less likely than under full attention, None without a
    `Passage.following`.
    """

    method: AnyMethod
    fidelity: Fidelity
    nll_gap: float | None = None


def measure(
    engine: Engine,
    passage: Passage,
    profiles: Sequence[Profile],
    along: Mapping[int, AttentionObserver] | None = None,
    advance: Callable[[int], None] = lambda _: None,
    attention: bool = True,
    stepped: Callable[[int, AnyMethod], None] = lambda *_: None,
) -> tuple[list[MeasuredMethod], AnyMethod]:
    """Feed a passage to a method for each profile, all with one reference; return the methods, and the reference.

    The continuation's tokens are fed one by one, each a step, and every step is compared; without `attention`, only the
    next token's distributions are. `along` gives the methods of some profiles an attention observer of their own.
    `advance` is called with the tokens that a layer has just processed, those of the prompt once for all methods that
    read it exactly; `stepped` with the place of each profile and its method after every step.

    Raises:
        KvcliError: NaN or infinity in the reference's logits; the model selects by itself (usage).
    """
    if engine.model.geometry.selects is not None:
        what = "closeness is measured against attention to everything, but this model's layers select by themselves"
        raise usage_error(what, "native and full attend to exactly what the model selects")
    prompt, continuation = passage.prompt, passage.continuation
    contexts = [engine.context(len(prompt), len(continuation), passage.question) for _ in (*profiles, "reference")]
    *methods, reference = map(engine.method, [*profiles, reference_profile()], contexts)
    engine.prefill(prompt, [*methods, reference], advance)
    expected = engine.extend(continuation, reference, keep=len(continuation))  # [n, vocab]
    check_finite(engine, expected, prompt)
    probes = [FidelityProbe(reference, (along or {}).get(index)) for index in range(len(methods))]
    if attention:
        for method, probe in zip(methods, probes, strict=True):
            method.context.attention_observer = probe
    first, *others = continuation
    following = [*others, first if passage.following is None else passage.following]  # the last one is not fed
    fed = Sampling(max_tokens=len(continuation) + 1, ignore_eos=True)
    texts = [TeacherForcing(following) for _ in methods]
    sequences = [
        engine.sequence(method, fed, sampler=text, first_token=first)
        for method, text in zip(methods, texts, strict=True)
    ]
    true = TeacherForcing(following)
    for row in expected if passage.following is not None else ():
        true(row)
    for step, _ in enumerate(engine.decode(sequences)):
        for place, (probe, sequence) in enumerate(zip(probes, sequences, strict=True)):
            assert sequence.logits is not None
            probe.fidelity.note_step(step, expected[step], sequence.logits)
            stepped(place, sequence.method)
        advance(engine.depth * len(sequences))
    gaps = [None if passage.following is None else (text.nll - true.nll) / len(continuation) for text in texts]
    measured = [
        MeasuredMethod(method, probe.fidelity, gap) for method, probe, gap in zip(methods, probes, gaps, strict=True)
    ]
    return measured, reference


class Audit:
    """Audits one sequence; call `before` and `after` around each decode step of its batch."""

    def __init__(self, engine: Engine, sequence: RunningSequence, every: int):
        assert sequence.reference is not None
        self.engine, self.sequence, self.every = engine, sequence, every
        self.reference: AnyMethod = sequence.reference
        self.probe = FidelityProbe(self.reference)
        self.probe.looking = False
        self.known = 0  # tokens of the sequence that the reference has read
        sequence.method.context.attention_observer = self.probe

    @property
    def steps(self) -> int:
        """Number of decode steps of the sequence."""
        return len(self.sequence.token_ids) - 1

    def before(self) -> None:
        """Bring the reference up to date if the next step is to be audited."""
        self.probe.looking = self.sequence.running and self.steps % self.every == 0
        if self.probe.looking:
            (self.expected,) = self.engine.extend(self.sequence.token_ids[self.known :], self.reference)
            self.known = len(self.sequence.token_ids)

    def after(self) -> None:
        """Compare the next token's distributions of both runs."""
        if self.probe.looking and self.sequence.logits is not None:
            self.probe.fidelity.note_step(self.steps - 1, self.expected, self.sequence.logits)

    def summary(self) -> dict[str, Any]:
        """Return plain data for the report."""
        found = self.probe.fidelity.summary()
        kv = self.reference.footprint()
        return {"every": self.every, "reference_kv_bytes": kv.device + kv.host, **found} if found else {}


def prepare(audits: Iterable[Audit]) -> None:
    """Call `Audit.before` of all."""
    for audit in audits:
        audit.before()


def conclude(audits: Iterable[Audit]) -> None:
    """Call `Audit.after` of all."""
    for audit in audits:
        audit.after()

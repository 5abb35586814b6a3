"""Train the bundled demo model from scratch on the CPU: `python research/demo_model/train.py --out DIR`.

Batches are repeats of names and numbers, or documents with questions behind them; `STAGES` is the curriculum, about an
hour of one core. The state is saved every few minutes in DIR and `--resume` goes on from there, within a stage
too. Matrices are trained by Muon, everything else by AdamW. `--bfloat16` computes products in bfloat16 (weights and
sums stay float32), which is faster only on CPUs that have instructions for it; others take fifty times as long.
"""

import argparse
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from architecture import demo_config, initialise
from documents import ANSWER, FILLER, IGNORED, KINDS, VALUE, Writer
from tokenizer import build_tokenizer, token_classes
from torch import Tensor, nn
from transformers import AttentionInterface, GenerationConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

LENGTH = 16384  # tokens that the model reads

_MIXTURE = {"facts": 0.64, "lists": 0.31, "records": 0.05}
_ANY_ORDER = {"facts in any order": 0.64, "lists": 0.31, "records": 0.05}
_SAID_ONCE = {"facts asked once": 0.5, "frequent words": 0.5}
_ONCE = {"facts asked once": 0.6, "lists": 0.15, "frequent words": 0.2, "records": 0.05}


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum: `steps` batches of `batch` sequences of `length` tokens."""

    length: int
    batch: int
    steps: int
    dense: float = 0.1  # share of the batches that are repeats of names and numbers
    rate: tuple[float, float] = (2e-3, 2e-3)  # learning rate at the first and at the last step
    short: float = 0.0  # share of the batches that hold eight times as many sequences of an eighth of the length
    kinds: Mapping[str, float] = field(default_factory=lambda: _MIXTURE)  # shares of the other batches


STAGES: tuple[Stage, ...] = (
    Stage(320, 12, 250, rate=(1.5e-3, 1.5e-3)),
    Stage(640, 8, 300, rate=(1.5e-3, 1.5e-3)),
    Stage(1280, 5, 260, rate=(1.5e-3, 1.5e-3), short=0.2),
    Stage(2560, 3, 190, rate=(1.5e-3, 1.2e-3), short=0.3, kinds=_ANY_ORDER),
    Stage(1280, 6, 160, rate=(1.2e-3, 1.2e-3), kinds=_SAID_ONCE),
    Stage(4096, 2, 100, rate=(1.2e-3, 8e-4), short=0.3, kinds=_ONCE),
    Stage(8192, 1, 90, rate=(8e-4, 4e-4), short=0.4, kinds=_ONCE),
    Stage(16384, 1, 24, rate=(4e-4, 5e-5), short=0.6, kinds=_ONCE),
)

_WARM_UP = 100  # steps
_FILLER_SHARE = 0.25  # of the filler tokens of a sequence take part in the loss
_OTHER_WEIGHT = 0.3  # of the words around a value, and of the filler, beside the values' 1
_FUSED_FROM = 400  # tokens of a sequence
_SAVED_EVERY = 240.0  # seconds
_SAID_EVERY = 25  # steps


@dataclass(frozen=True)
class Batch:
    """Token ids, what each of them is to the loss, and their positions, all [batch, length].

    `tags` names what each VALUE belongs to, row by row.
    """

    ids: Tensor
    kinds: Tensor
    positions: Tensor
    tags: list[str]


def skipping_positions(rng: random.Random, length: int, size: int, reach: int) -> Tensor:
    """Return positions that grow by one, apart from a few gaps: distances of up to `reach` in short sequences.

    After Zhu et al., "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training", arXiv
    2309.10400. Half of the sequences have no gaps. [size, length]
    """
    positions = torch.arange(length).repeat(size, 1)
    for row in range(size):
        if rng.random() < 0.5 or length >= reach:
            continue
        cuts = sorted(rng.sample(range(1, length), rng.randint(1, 6)))
        extra = rng.randint(0, reach - length)
        ends = sorted(rng.randint(0, extra) for _ in cuts)
        for cut, gap in zip(cuts, ends, strict=True):
            positions[row, cut:] = torch.arange(cut, length) + gap
    return positions


def dense_batch(rng: random.Random, length: int, size: int, vocabulary: Sequence[int], reach: int) -> Batch:
    """Return sequences of the tokens `vocabulary` of which every later token is a VALUE.

    Half of the batches repeat one random segment; the others repeat records of four tokens, each time in another order,
    with the first token of each left to chance. Nothing but a match with the earlier copy predicts the others. These
    batches make the matching heads form.
    """
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    period = rng.randint(max(length // 8, 8), length // 2) // 4 * 4
    drawn = torch.randint(len(vocabulary), (size, period), generator=generator)
    segment = torch.tensor(vocabulary)[drawn]
    times = -(-length // period)
    if rng.random() < 0.5:
        ids, kinds = segment.repeat(1, times), torch.full((size, period * times), VALUE)
        kinds[:, period] = IGNORED
    else:
        entries = segment.view(size, -1, 4)  # [size, entries, 4]
        orders = torch.rand(size, times - 1, entries.shape[1], generator=generator).argsort(-1).flatten(1)
        again = entries.gather(1, orders[..., None].expand(-1, -1, 4))
        ids = torch.cat([entries, again], 1).flatten(1)
        kinds = torch.full_like(ids, VALUE)
        kinds[:, ::4] = IGNORED
    kinds[:, :period] = IGNORED
    positions = skipping_positions(rng, length, size, reach)
    return Batch(ids[:, :length], kinds[:, :length], positions, ["dense"] * int((kinds[:, :length] == VALUE).sum()))


def question_batch(kind: str, rng: random.Random, writer: Writer, *, length: int, size: int, reach: int) -> Batch:
    """Return `size` documents of one kind with questions behind them, cut or padded (IGNORED) to `length`."""
    ids = torch.zeros((size, length), dtype=torch.long)
    kinds = torch.zeros((size, length), dtype=torch.long)
    tags: list[str] = []
    for row in range(size):
        KINDS[kind](rng, writer, length)
        n = min(len(writer.ids), length)
        ids[row, :n] = torch.tensor(writer.ids[:n])
        kinds[row, :n] = torch.tensor(writer.kinds[:n])
        tags += writer.tags[: int((kinds[row] == VALUE).sum())]
    return Batch(ids, kinds, skipping_positions(rng, length, size, reach), tags)


_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the Newton-Schulz iteration
_ITERATIONS = 5


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return about U V^T of each of `matrices` [n, rows, columns] = U S V^T: singular values come out near 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon over matrices, in float32 for CPUs without instructions for bfloat16.

    Momentum is orthogonalised before it is applied (Jordan et al., "Muon: An optimizer for hidden layers in neural
    networks", 2024), with the step scaled as in Liu et al. (arXiv 2502.16982), so that AdamW's learning rates serve.
    `torch.optim.Muon` computes the same in bfloat16, which takes longer than the rest of a step on such CPUs.
    Matrices of one shape are orthogonalised together.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, weight_decay: float = 0.01, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Apply one step to every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                average = state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(average, group["momentum"])  # Nesterov's
                by_shape.setdefault(weight.shape, []).append((weight, update))
            for shape, pairs in by_shape.items():
                updates = orthogonalised(torch.stack([update for _, update in pairs]))
                for (weight, _), update in zip(pairs, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(shape)))


@dataclass
class Progress:
    """Where a run stands; saved beside the weights."""

    stage: int = 0
    step: int = 0  # within the stage
    total: int = 0
    seconds: float = 0.0  # of training, all runs together


_ATTENTION = "kvcli_demo_training"
_MASKS: dict[tuple[int, int], Tensor] = {}


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention q [b, H, s, d], k and v [b, Hk, s, d] -> [b, s, H, d]; short sequences by plain products.

    The fused kernel's backward pass takes several times as long on them.
    """
    b, heads, s, d = q.shape
    if s > _FUSED_FROM:
        return sdpa_attention_forward(module, q, k, v, mask, **options)
    group = heads // k.shape[1]
    if (s, group) not in _MASKS:
        _MASKS[s, group] = torch.full((s, s), float("-inf"), dtype=q.dtype).triu(1).repeat(group, 1)[None]
    rows = q.reshape(-1, group * s, d)
    scores = torch.baddbmm(_MASKS[s, group], rows, k.reshape(-1, s, d).transpose(1, 2), alpha=d**-0.5)
    return torch.bmm(scores.softmax(-1), v.reshape(-1, s, d)).view(b, heads, s, d).transpose(1, 2).contiguous(), None


class Positions(nn.Module):
    """Rotary embedding at the positions that were set, instead of those that the model counts."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.at: Tensor | None = None  # [batch, length]

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [batch, length, d] each."""
        found: tuple[Tensor, Tensor] = self.inner(x, position_ids if self.at is None else self.at)
        return found


def loss_and_hits(
    model: LlamaForCausalLM, batch: Batch, generator: torch.Generator, *, bfloat16: bool = False
) -> tuple[Tensor, dict[str, tuple[float, int]]]:
    """Return the loss, and the share of right predictions and their number by what they belong to.

    Of values only the first token of a run counts as a hit: it takes the look-up, the others follow from it.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state  # [b, s, width]
        kinds = batch.kinds[:, 1:].reshape(-1)
        kept = torch.rand(kinds.shape, generator=generator) < _FILLER_SHARE
        chosen = ((kinds >= ANSWER) | ((kinds == FILLER) & kept)).nonzero()[:, 0]
        logits = model.lm_head(hidden[:, :-1].reshape(-1, hidden.shape[-1])[chosen]).float()  # [chosen, vocabulary]
    labels = batch.ids[:, 1:].reshape(-1)[chosen]
    losses = F.cross_entropy(logits, labels, reduction="none")
    right = logits.detach().argmax(-1) == labels
    of = kinds[chosen]

    loss = losses.new_zeros(())
    hits: dict[str, tuple[float, int]] = {}
    for kind, weight, name in ((VALUE, 1.0, ""), (ANSWER, _OTHER_WEIGHT, "words"), (FILLER, _OTHER_WEIGHT, "filler")):
        if (of == kind).any():
            loss = loss + weight * losses[of == kind].mean()
            if name:
                hits[name] = (float(right[of == kind].float().mean()), 1)
    first = (batch.kinds[:, 1:] == VALUE) & (batch.kinds[:, :-1] != VALUE)
    first = first.reshape(-1)[chosen][of == VALUE]
    tags = [tag for tag, is_first in zip(batch.tags, first.tolist(), strict=True) if is_first]
    of_first = right[of == VALUE][first].tolist()
    for tag in dict.fromkeys(tags):
        own = [hit for hit, other in zip(of_first, tags, strict=True) if other == tag]
        hits[tag] = (sum(own) / len(own), len(own))
    return loss, hits


class Trainer:
    """The model, its optimizers and the stream of random numbers that every batch is drawn from."""

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        seed: int,
        layers: int = 4,
        length: int = LENGTH,
        bfloat16: bool = False,
    ):
        torch.manual_seed(seed)
        self.stages, self.length, self.bfloat16 = stages, length, bfloat16
        self.tokenizer = build_tokenizer(length)
        self.model = LlamaForCausalLM(demo_config(len(self.tokenizer), length, layers=layers))
        self._names, self._telling = token_classes(self.tokenizer)
        initialise(self.model, self._names, self._telling)
        AttentionInterface.register(_ATTENTION, attend)
        self.model.config._attn_implementation = _ATTENTION
        self._positions = Positions(self.model.model.rotary_emb)
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        inner = {id(weight) for weight in self.model.model.layers.parameters()}
        matrices = [weight for weight in trained if id(weight) in inner and weight.ndim == 2]
        others = [weight for weight in trained if id(weight) not in inner or weight.ndim != 2]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01),
        )
        self.rng = random.Random(f"train:{seed}")
        self.progress = Progress()
        self._writer = Writer(self.tokenizer)

    def batch(self, stage: Stage) -> Batch:
        """Draw a batch of `stage`."""
        many = 8 if self.rng.random() < stage.short else 1
        length, size = stage.length // many, stage.batch * many
        if self.rng.random() < stage.dense:
            return dense_batch(self.rng, length, size, [*self._names, *self._telling], self.length)
        (kind,) = self.rng.choices(list(stage.kinds), list(stage.kinds.values()))
        return question_batch(kind, self.rng, self._writer, length=length, size=size, reach=self.length)

    def step(self, stage: Stage) -> tuple[float, dict[str, tuple[float, int]]]:
        """Train on one batch of `stage`. Returns the loss and the hits."""
        batch = self.batch(stage)
        start, end = stage.rate
        rate = start + (end - start) * self.progress.step / stage.steps
        rate *= min(1.0, (self.progress.total + 1) / _WARM_UP)
        self._positions.at = batch.positions
        self.model.model.rotary_emb = self._positions
        generator = torch.Generator().manual_seed(self.rng.getrandbits(63))
        loss, hits = loss_and_hits(self.model, batch, generator, bfloat16=self.bfloat16)
        self.model.model.rotary_emb = self._positions.inner
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.progress = replace(self.progress, step=self.progress.step + 1, total=self.progress.total + 1)
        return float(loss.detach()), hits

    def run(self) -> Iterator[str]:
        """Train what is left. Yields a line of progress every 25 steps and at the end of a stage."""
        for index in range(self.progress.stage, len(self.stages)):
            stage = self.stages[index]
            means: dict[str, float] = {}
            while self.progress.step < stage.steps:
                began = time.monotonic()
                loss, hits = self.step(stage)
                self.progress.seconds += time.monotonic() - began
                for name, (hit, count) in {"loss": (loss, 1), **hits}.items():
                    share = 1 - 0.95 ** min(count, 14)
                    means[name] = hit if name not in means else means[name] + share * (hit - means[name])
                if self.progress.step % _SAID_EVERY == 0:
                    figures = " ".join(f"{name} {mean:.2f}" for name, mean in sorted(means.items()))
                    yield f"length {stage.length} step {self.progress.step} {self.progress.seconds:.0f} s: {figures}"
            self.progress = Progress(index + 1, 0, self.progress.total, self.progress.seconds)
            yield f"length {stage.length} done after {self.progress.seconds:.0f} s"

    def save(self, path: Path) -> None:
        """Write everything a resumed run needs; a run that is killed leaves the last such file whole."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": self.rng.getstate(),
            "progress": asdict(self.progress),
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        version, internal, gauss = state["rng"]
        self.rng.setstate((version, tuple(internal), gauss))
        self.progress = Progress(**state["progress"])

    def export(self, folder: Path) -> None:
        """Write the checkpoint in Hugging Face format: weights, configuration and tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
        self.model.generation_config = GenerationConfig(**ids, do_sample=False)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(prog="python research/demo_model/train.py", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and the resume state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bfloat16", action="store_true", help="products in bfloat16, for CPUs with such instructions")
    parser.add_argument("--stages", type=int, default=len(STAGES), help="train only the first N stages")
    parser.add_argument("--resume", action="store_true", help="go on from the resume state in --out")
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)  # attention's backward pass takes five times as long on such numbers
    options.out.mkdir(parents=True, exist_ok=True)
    state = options.out / "resume.pt"
    trainer = Trainer(STAGES[: options.stages], seed=options.seed, bfloat16=options.bfloat16)
    if options.resume:
        trainer.load(state)
    saved = time.monotonic()
    for line in trainer.run():
        print(line, flush=True)
        if "done" in line or time.monotonic() - saved > _SAVED_EVERY:
            trainer.save(state)
            trainer.export(options.out / "model")
            saved = time.monotonic()


if __name__ == "__main__":
    main()

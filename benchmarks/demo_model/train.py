"""Train the bundled demo model from scratch on the CPU: `python benchmarks/demo_model/train.py --out DIR`.

Batches are either repeats over the whole vocabulary, half of them at first, or documents with many facts and many
questions behind them; `STAGES` is the curriculum. A stage ends when the running share of right VALUE tokens passes its
target, or after a fixed number of steps. `--resume` goes on after the last finished stage.
"""

import argparse
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from architecture import demo_config, initialise
from batches import ANSWER, FILLER, VALUE, Batch, Writer, dense_batch, question_batch
from page_loss import Recorder, page_loss
from tokenizer import build_tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM

_CODES = {"codes": 1.0}
_MIXTURE = {"codes": 0.6, "multiquery": 0.15, "multivalue": 0.1, "vt": 0.1, "fwe": 0.05}
_EVEN = {"codes": 0.3, "multiquery": 0.25, "multivalue": 0.15, "vt": 0.25, "fwe": 0.05}
_LAST = {"codes": 0.5, "multiquery": 0.2, "multivalue": 0.1, "vt": 0.2}


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum. It ends at `target` (running accuracy on codes) or after `max_steps`."""

    length: int
    facts: int
    questions: int
    batch: int
    target: float
    min_steps: int
    max_steps: int
    learning_rate: float = 1e-3
    decay: bool = False  # let the learning rate fall linearly to a tenth over max_steps
    dense: float = 0.1  # share of the batches that are repeats over the whole vocabulary
    few: float = 0.0  # share of the documents with one to three questions: the first one meets no earlier answers
    short: float = 0.0  # share of the batches that hold four times as many sequences of a quarter of the length
    kinds: Mapping[str, float] = field(default_factory=lambda: _MIXTURE)  # shares of the other batches
    page_weight: float = 1.0  # of the page loss of questions


# The matching heads form in the first two stages, which are half repeats. Their keys become retrievable by page from
# the second stage at 1,024 on. The longer answers of the other tasks are learnt at short lengths
# first; the later stages go over all of it once more.
STAGES: tuple[Stage, ...] = (
    Stage(128, 4, 3, 48, 0.80, 150, 1500, dense=0.5, kinds=_CODES, page_weight=0.0),
    Stage(256, 8, 6, 24, 0.90, 50, 600, dense=0.5, kinds=_CODES, page_weight=0.0),
    Stage(512, 16, 10, 12, 0.94, 50, 600, dense=0.5, page_weight=0.0),
    Stage(1024, 32, 16, 6, 0.96, 50, 600, dense=0.5, page_weight=0.0),
    Stage(1024, 32, 16, 6, 0.96, 50, 600),
    Stage(2048, 64, 20, 3, 0.97, 50, 600),
    Stage(4096, 96, 24, 1, 1.01, 200, 200, short=0.5),
    Stage(320, 10, 6, 16, 1.01, 250, 250, kinds=_EVEN),
    Stage(1024, 32, 16, 4, 1.01, 150, 150, short=0.5, kinds=_EVEN),
    Stage(4096, 96, 24, 1, 1.01, 100, 100, short=0.5, kinds=_EVEN, page_weight=2.0),
    Stage(8192, 160, 32, 1, 1.01, 200, 200, decay=True, short=0.5, kinds=_EVEN, page_weight=2.0),
    Stage(1024, 32, 16, 4, 1.01, 250, 250, short=0.5, kinds=_EVEN, page_weight=2.0),
    Stage(4096, 96, 24, 1, 1.01, 150, 150, short=0.5, kinds=_EVEN, page_weight=2.0),
    Stage(4096, 96, 24, 1, 1.01, 100, 100, short=0.5, few=0.5, kinds=_EVEN, page_weight=2.0),
    Stage(8192, 160, 32, 1, 1.01, 100, 100, 7e-4, decay=True, short=0.7, few=0.5, kinds=_LAST, page_weight=2.0),
    Stage(8192, 160, 32, 1, 1.01, 80, 80, 5e-4, decay=True, short=0.5, few=0.5, kinds=_LAST, page_weight=2.0),
)

_PAGE_ROWS = 64  # queries a batch that the page loss looks at

_WARM_UP = 100  # steps
_FILLER_SHARE = 0.25  # of the filler tokens of a sequence take part in the loss
_OTHER_WEIGHT = 0.3  # of the words around a value, and of the filler, beside the values' 1


@dataclass
class Progress:
    """Where a run stands; saved beside the weights."""

    stage: int = 0
    step: int = 0  # within the stage
    total: int = 0


def loss_and_hits(
    model: LlamaForCausalLM, batch: Batch, rng: random.Random, recorder: Recorder, page_weight: float
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss and the share of right predictions, by kind and by place of a token within its value.

    The loss includes `page_weight` times that of `page_loss.page_loss`, over all layers but the first.
    """
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state  # [b, s, width]
    kinds = batch.kinds[:, 1:].reshape(-1)
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    kept = torch.rand(kinds.shape, generator=generator) < _FILLER_SHARE
    chosen = ((kinds >= ANSWER) | ((kinds == FILLER) & kept)).nonzero()[:, 0]
    logits = model.lm_head(hidden[:, :-1].reshape(-1, hidden.shape[-1])[chosen])  # [chosen, vocabulary]
    labels = batch.ids[:, 1:].reshape(-1)[chosen]
    losses = F.cross_entropy(logits, labels, reduction="none")
    right = logits.argmax(-1) == labels
    chosen_kinds = kinds[chosen]

    loss = losses.new_zeros(())
    for kind, weight in ((VALUE, 1.0), (ANSWER, _OTHER_WEIGHT), (FILLER, _OTHER_WEIGHT)):
        if (chosen_kinds == kind).any():
            loss = loss + weight * losses[chosen_kinds == kind].mean()
    is_value = (batch.kinds == VALUE).long()
    place = torch.zeros_like(is_value)  # 1, 2, 3, ... within a run of VALUE tokens
    for _ in range(4):
        place[:, 1:] = is_value[:, 1:] * (place[:, :-1] + 1)
    places = place[:, 1:].reshape(-1)[chosen]
    hits = {}
    if (chosen_kinds == VALUE).any():
        hits["value"] = float(right[chosen_kinds == VALUE].float().mean())
    for n in (1, 2, 3):
        if (places == n).any():
            hits[f"token{n}"] = float(right[places == n].float().mean())
    if (chosen_kinds == ANSWER).any():
        hits["words"] = float(right[chosen_kinds == ANSWER].float().mean())
    if (chosen_kinds == FILLER).any():
        hits["filler_loss"] = float(losses[chosen_kinds == FILLER].detach().mean())
    if page_weight:
        rows = (batch.kinds == VALUE).nonzero() - torch.tensor([0, 1])  # the queries that predict a value
        rows = rows[torch.randperm(len(rows), generator=generator)[:_PAGE_ROWS]]
        paging = [page_loss(recorder.queries[i], recorder.keys[i], rows) for i in recorder.keys if i > 0]
        pages = torch.stack(paging).sum()
        loss = loss + page_weight * pages
        hits["pages"] = float(pages.detach())
    return loss, hits


class Trainer:
    """The model, its optimizer and the stream of random numbers that every batch is drawn from."""

    def __init__(self, stages: Sequence[Stage], *, seed: int, width: int = 128, layers: int = 4):
        torch.manual_seed(seed)
        self.stages = stages
        self.tokenizer = build_tokenizer(stages[-1].length)
        config = demo_config(len(self.tokenizer), stages[-1].length, width=width, layers=layers)
        self.model = LlamaForCausalLM(config)
        initialise(self.model)
        self._recorder = Recorder(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=stages[0].learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.rng = random.Random(f"train:{seed}")
        self.progress = Progress()
        self._writer = Writer(self.tokenizer)

    def step(self, stage: Stage) -> tuple[str, float, dict[str, float]]:
        """Train on one batch of `stage`. Returns the kind of batch, the loss and the hits."""
        many = 4 if stage.short and self.rng.random() < stage.short else 1
        length, size = stage.length // many, stage.batch * many
        if self.rng.random() < stage.dense:
            kind = "dense"
            batch = dense_batch(self.rng, length, size, len(self.tokenizer))
        else:
            (kind,) = self.rng.choices(list(stage.kinds), list(stage.kinds.values()))
            batch = question_batch(
                kind,
                self.rng,
                self._writer,
                length=length,
                facts=max(stage.facts // many, 1),
                questions=stage.questions // many,
                size=size,
                few=stage.few,
            )
        rate = stage.learning_rate * min(1.0, (self.progress.total + 1) / _WARM_UP)
        if stage.decay:
            rate *= 1.0 - 0.9 * self.progress.step / stage.max_steps
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        page_weight = 0.0 if kind == "dense" else stage.page_weight
        loss, hits = loss_and_hits(self.model, batch, self.rng, self._recorder, page_weight)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.progress = replace(self.progress, step=self.progress.step + 1, total=self.progress.total + 1)
        return kind, float(loss.detach()), hits

    def run(self) -> Iterator[str]:
        """Train the stages that are left. Yields a line of progress every 25 steps and at the end of a stage."""
        began = time.monotonic()
        for index in range(self.progress.stage, len(self.stages)):
            stage = self.stages[index]
            running = 0.0
            means: dict[str, float] = {}
            while self.progress.step < stage.max_steps:
                kind, loss, hits = self.step(stage)
                for name, hit in {"loss": loss, **hits}.items():
                    key = f"{kind}.{name}"
                    means[key] = hit if key not in means else 0.9 * means[key] + 0.1 * hit
                if kind == "codes" and "value" in hits:
                    running = 0.95 * running + 0.05 * hits["value"]
                done = self.progress.step >= stage.min_steps and running >= stage.target
                if self.progress.step % 25 == 0 or done:
                    figures = " ".join(f"{name} {mean:.3f}" for name, mean in sorted(means.items()))
                    place = f"length {stage.length} step {self.progress.step} {time.monotonic() - began:.0f} s"
                    yield f"{place}: running {running:.3f} {figures}"
                if done:
                    break
            self.progress = Progress(index + 1, 0, self.progress.total)
            yield f"length {stage.length} done"

    def save(self, path: Path) -> None:
        """Write everything a resumed run needs."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.getstate(),
            "progress": asdict(self.progress),
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
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
    parser = argparse.ArgumentParser(prog="python benchmarks/demo_model/train.py", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and the resume state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stages", type=int, default=len(STAGES), help="train only the first N stages")
    parser.add_argument("--resume", action="store_true", help="go on from the resume state in --out")
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    state = options.out / "resume.pt"
    trainer = Trainer(STAGES[: options.stages], seed=options.seed)
    if options.resume:
        trainer.load(state)
    for line in trainer.run():
        print(line, flush=True)
        if line.endswith("done"):
            trainer.save(state)
            trainer.export(options.out / "model")


if __name__ == "__main__":
    main()

"""A decode step over slots: run the newest tokens through the model, captured in a CUDA graph if possible.

The graph holds the whole step: positions, every layer with its streams, the choice of the next token if it is greedy,
and the log. Between two replays the host reads the chosen tokens, to see which sequences end. If layers lie on several
devices, each device has a graph of its own, and hidden states are copied between them.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.methods.card import GRAPH, LAUNCHED
from kvcli.models.rope import Rope
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.decode import Stepper
from kvcli.runtime.gpu.fused import fused_layers
from kvcli.runtime.gpu.pipeline import DecisionRates, SlotPipeline
from kvcli.runtime.gpu.recorder import CaptureError, CudaRecorder, Recorder, Streams, streams_for
from kvcli.runtime.next_query import predicting
from kvcli.runtime.recurrent import BatchStates
from kvcli.runtime.sampling import NOT_FINITE
from kvcli.runtime.sequence import RunningSequence

UNCAPTURED = "a decode step cannot be captured in a CUDA graph, its kernels are launched one by one"


class SlotStepper(Stepper):
    """Steps of a prefilled batch; takes over the caches of its method objects.

    `notice` is told if a step cannot be captured; it is then launched kernel by kernel. `rates`: see
    `kvcli.runtime.gpu.pipeline`.

    Raises:
        ValueError: the sequences' method cannot be served over slots.
    """

    @torch.inference_mode()
    def __init__(
        self,
        hook: Hook,
        sequences: Sequence[RunningSequence],
        rope: Rope,
        notice: Callable[[str], None] = lambda _: None,
        streams: Streams | None = None,
        rates: DecisionRates | None = None,
        recorder: Recorder | None = None,
    ):
        self.hook, self.sequences = hook, sequences
        model = hook.model
        methods = [sequence.method for sequence in sequences]
        lengths = [sequence.length for sequence in sequences]
        devices = {model.device, *map(methods[0].context.device, range(len(methods[0].caches)))}
        self.pipeline = SlotPipeline(
            methods, lengths, streams or {each: streams_for(each) for each in devices}, rates, hook.on
        )
        self.left = ExitStack()  # undone at the end
        if model.device.type == "cuda":
            self.left.enter_context(fused_layers(model))
        self.greedy = all(sequence.greedy for sequence in sequences)
        self.states = BatchStates(hook.geometry.states, [method.states for method in methods])
        self.tokens = torch.zeros(len(sequences), 1, dtype=torch.int64, device=model.device)
        self.positions = torch.zeros_like(self.tokens)
        self.logits: Tensor | None = None  # [b, vocab] of the last step
        self.taking_part = list(range(len(sequences)))
        rope.use([method.context.capacity for method in methods])
        self.recorder = recorder
        if recorder is None and model.device.type == "cuda":
            if self.pipeline.waits_for_device:
                notice(f"{UNCAPTURED}: the host copies pages, and has to know which")
            else:
                self.recorder = CudaRecorder(*hook.places)
        if self.recorder is not None:
            with self.states.untouched():
                self._capture(self.recorder, notice)
        self.pipeline.start()
        self._feed()

    @property
    @override
    def ran_by(self) -> str:
        return LAUNCHED if self.recorder is None else GRAPH

    @override
    @torch.inference_mode()
    def step(self, batch: Sequence[RunningSequence]) -> list[tuple[Tensor, int | None]]:
        # The logits are views: the next step overwrites them.
        self._leave(batch)
        if not self.greedy:
            self._feed()
        if self.recorder is None:
            self._run()
        else:
            self.recorder.replay(0)
        self.pipeline.stepped()
        assert self.logits is not None
        chosen = self.tokens[:, 0].tolist() if self.greedy else [None] * len(self.tokens)
        return [(self.logits[row], chosen[row]) for row in self.taking_part]

    @override
    @torch.inference_mode()
    def finish(self) -> None:
        self.left.close()
        self.pipeline.finish()
        for sequence in self.sequences:
            for cache in sequence.method.caches:
                for part in (cache, *(own for _, own in cache.apart)):
                    part.length = sequence.length

    def _run(self) -> None:
        """Do everything a step consists of; no line of it waits for the device."""
        self.pipeline.advance()
        self.positions.copy_((self.pipeline.lengths.seen - 1).clamp_min(0)[:, None])
        with predicting(self.hook, self.pipeline.predicted, self.pipeline.predict):
            self.logits = self.hook.run(self.pipeline, self.tokens, self.positions, 1, self.states)[:, 0]
        if self.greedy:
            highest, tokens = _highest(self.logits)
            self.tokens.copy_(tokens.where(highest.isfinite(), NOT_FINITE))
        self.pipeline.settle()

    def _leave(self, batch: Sequence[RunningSequence]) -> None:
        """Let the sequences that are not in `batch` take part no more; the order stays that of the beginning."""
        staying = [row for row in self.taking_part if any(self.sequences[row] is sequence for sequence in batch)]
        for row in set(self.taking_part) - set(staying):
            self.pipeline.end(row)
        self.taking_part = staying

    def _feed(self) -> None:
        self.tokens.copy_(torch.tensor([[sequence.token_ids[-1]] for sequence in self.sequences]))

    def _capture(self, recorder: Recorder, notice: Callable[[str], None]) -> None:
        """Capture a step while no sequence takes part."""

        def carried() -> None:
            with self.hook.carried(recorder):
                self._run()

        try:
            recorder.record(self._run, carried, self.pipeline.leave)
        except CaptureError as error:
            self.recorder = self.logits = None
            self.pipeline.forget()
            notice(f"{UNCAPTURED}: {error}")
        except BaseException:
            self.left.close()
            raise


def _highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest of logits [b, vocab] and its token, [b, 1] each; the first of equal ones.

    A row is reduced in parts of equal size first, if it has some: by itself it keeps few multiprocessors busy.
    """
    vocab = logits.shape[-1]
    parts = min(256, vocab & -vocab)
    if parts < 8:
        return logits.max(-1, keepdim=True)
    best = torch.unflatten(logits, -1, (parts, -1)).max(-1)
    highest, part = best.values.max(-1, keepdim=True)
    return highest, best.indices.gather(-1, part) + part * (vocab // parts)

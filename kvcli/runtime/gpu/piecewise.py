"""A decode step in pieces: the work between the attention of two layers, each captured in a CUDA graph.

For methods that run their own step (no `step_plan`): attention stays phase after phase, sequence by sequence.
Everything else, in few kernels (`kvcli.runtime.gpu.fused`), costs the host one replay per layer. Queries, keys, values
and attention outputs lie in tensors that never move. A sequence that has ended stays in its place without attending.

Layers that select by themselves do so within a piece: their modules score all places that there are for tokens, those
to come masked, so that shapes are the same at every step. What they selected is recalled and attended to in between.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.softmax import Softmax
from kvcli.kv.selected import SelectingCache
from kvcli.methods.card import LAUNCHED, PIECEWISE
from kvcli.models.rope import Rope
from kvcli.runtime.attention_hook import Handler, Hook
from kvcli.runtime.decode import Stepper
from kvcli.runtime.gpu.fused import fused_layers
from kvcli.runtime.gpu.recorder import CaptureError, CudaRecorder, Recorder
from kvcli.runtime.recurrent import BatchStates
from kvcli.runtime.sequence import RunningSequence


class Call(NamedTuple):
    """A layer's attention: queries [b, H, 1, d], keys and values [b, Hk, 1, d]; its result goes to out [b, 1, H, d].

    There is no `kv` if a later layer reads that of `layer`.
    """

    layer: int
    q: Tensor
    kv: tuple[Tensor, Tensor] | None
    softmax: Softmax
    out: Tensor


class PiecewiseStepper(Stepper):
    """Steps of a batch by its own method objects, with a piece of the model between the attention of two layers.

    `notice` is told if pieces cannot be captured; in that case, and without a `recorder`, the model runs as it is.
    """

    @torch.inference_mode()
    def __init__(
        self,
        hook: Hook,
        sequences: Sequence[RunningSequence],
        rope: Rope,
        notice: Callable[[str], None] = lambda _: None,
        recorder: Recorder | None = None,
    ):
        self.hook, self.sequences = hook, sequences
        device = hook.model.device
        self.left = ExitStack()  # undone at the end
        if device.type == "cuda" or recorder is not None:
            self.left.enter_context(fused_layers(hook.model))
        self.states = BatchStates(hook.geometry.states, [sequence.method.states for sequence in sequences])
        self.tokens = torch.zeros(len(sequences), 1, dtype=torch.int64, device=device)
        # Where the next tokens go, also in a rehearsal: an index is written to within a piece.
        self.positions = torch.tensor([[sequence.length] for sequence in sequences], device=device)
        self.room = max(sequence.method.context.capacity for sequence in sequences)
        self.taking_part: list[int] = []
        self.calls: list[Call] = []  # of the layers, in order
        self.cut: Callable[[], None] | None = None  # ends a piece, while pieces are captured
        self.logits: Tensor | None = None  # [b, vocab] of the last step
        rope.use([sequence.method.context.capacity for sequence in sequences])
        if recorder is None and device.type == "cuda":
            recorder = CudaRecorder(*hook.places)
        self.recorder = recorder
        if recorder is not None:
            with self.states.untouched():
                self._capture(recorder, notice)

    @property
    @override
    def ran_by(self) -> str:
        return LAUNCHED if self.recorder is None else PIECEWISE

    @override
    @torch.inference_mode()
    def step(self, batch: Sequence[RunningSequence]) -> list[tuple[Tensor, int | None]]:
        self.taking_part = [
            row for row, sequence in enumerate(self.sequences) if any(sequence is other for other in batch)
        ]
        self.tokens.copy_(torch.tensor([[sequence.token_ids[-1]] for sequence in self.sequences]))
        self.positions.copy_(torch.tensor([[sequence.length] for sequence in self.sequences]))
        if self.recorder is None:
            self._run()
        else:
            for piece, call in enumerate(self.calls):
                self.recorder.replay(piece)
                with self.hook.on(call.q.device):
                    self._attend(call)
            self.recorder.replay(len(self.calls))
        assert self.logits is not None
        return [(self.logits[row], None) for row in self.taking_part]

    @override
    def finish(self) -> None:
        self.left.close()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend for the sequences that take part, or end a piece of a step that is captured."""
        return self._call(layer, q, (k, v), softmax)

    def read(self, layer: int, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend to the KV of an earlier layer."""
        return self._call(layer, q, None, softmax)

    def index(self, layer: int, keys: Tensor) -> Sequence[Tensor]:
        """Return each sequence's index keys of all places, [capacity, c]; `keys` [b, 1, c] go to the newest ones."""
        caches = [cast(SelectingCache, sequence.method.caches[layer]) for sequence in self.sequences]
        places = self.positions.to(keys.device)
        return [cache.index_at(*row) for cache, *row in zip(caches, places, keys, strict=True)]

    def apart(self) -> Sequence[Handler]:
        """Refuse: modules that run for one sequence at a time look at numbers."""
        raise RuntimeError("modules that look at numbers do not run in pieces")

    def _call(self, layer: int, q: Tensor, kv: tuple[Tensor, Tensor] | None, softmax: Softmax) -> Tensor:
        # The zeros belong to the piece before; attention overwrites them before the next piece.
        call = Call(layer, q, kv, softmax, q.new_zeros(q.transpose(1, 2).shape))
        if self.cut is None:
            self._attend(call)
        else:
            self.calls.append(call)
            self.cut()
        return call.out

    def _run(self) -> None:
        self.logits = self.hook.run(self, self.tokens, self.positions, 1, self.states)[:, 0]

    def _attend(self, call: Call) -> None:
        softmax = call.softmax
        if softmax.selected is not None:  # caches note what was selected last, and the next step writes to this tensor
            softmax = softmax._replace(selected=softmax.selected.clone())
        for row in self.taking_part:
            method, q, its = self.sequences[row].method, call.q[row, :, 0], softmax.of(row)
            if call.kv is None:
                call.out[row, 0] = method.attend_to(call.layer, q, its)
            else:
                k, v = (x[row, :, 0] for x in call.kv)
                call.out[row, 0] = method.attend(call.layer, q, k, v, its)

    def _capture(self, recorder: Recorder, notice: Callable[[str], None]) -> None:
        """Capture a step in pieces, while no sequence takes part."""

        def work() -> None:
            self.cut = recorder.cut
            try:
                with self.hook.carried(recorder):
                    self._run()
            finally:
                self.cut = None

        try:
            recorder.record(self._run, work)
        except CaptureError as error:
            self.recorder = self.logits = None
            self.calls.clear()
            notice(f"a decode step cannot be captured in pieces, its kernels are launched one by one: {error}")
        except BaseException:
            self.left.close()
            raise

"""DuoAttention's gates, one a KV head, by optimisation (arXiv 2410.10819, section 2.2).

    out_h = gate_h full_h + (1 - gate_h) near_h      loss = mean |H - H'|^2 + 0.05 mean gate

full is attention to everything and near that to sinks and window; H and H' are the last hidden states at the answer of
a passage, of the model as it is and with gates. Weights stay as they are. Gates begin at 1 and stay within 0 and 1.

The passages are the built-in ones, needles in a long text that a question asks for, in the place of the paper's ten
passkeys; each is gone over `ROUNDS` times, in one pass of the model forward and backward, 16 passages thus 320 times
where the paper takes 2,000. Near is what the profile's sinks and window are; the paper's gates have twice the sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from kvcli.inputs.profiles import Profile
from kvcli.kernels.block_attention import add_sinks, block_attention_ref
from kvcli.kernels.prefill_attention import prefill_attention_ref
from kvcli.kernels.softmax import Softmax
from kvcli.methods.duoattention import DuoAttentionConfig
from kvcli.models.geometry import LayerGeometry
from kvcli.quality.calibrate.matrices import TensorFinder, layer_table
from kvcli.quality.fidelity import Passage
from kvcli.runtime.engine import Engine
from kvcli.runtime.not_finite import check_finite
from kvcli.ui.summary import Table

ROUNDS = 20
LEARNING_RATE, SPARSITY = 0.02, 0.05  # of AdamW, and of the gates' mean in the loss: section 3.1


class Gates(TensorFinder):
    """One tensor, `gates`: fp32 [layers, KV heads]; 0 where a layer has no such head, 1 in sliding-window layers."""

    def __init__(self, profile: Profile, layers: Sequence[LayerGeometry]):
        super().__init__(profile, layers)
        self.all_layers = layers
        most = max(layer.num_kv_heads for layer in layers)
        self.gates = torch.zeros(len(layers), most)
        for layer in layers:
            self.gates[layer.index, : layer.num_kv_heads] = 1
        self.optimiser: torch.optim.Optimizer | None = None

    def read(self, engine: Engine, passage: Passage, advance: Callable[[int], None]) -> None:
        """Lower the gates on one passage.

        Raises:
            KvcliError: NaN or infinity in the model's hidden states.
        """
        ids, asked = [*passage.prompt, *passage.continuation], len(passage.continuation)
        engine.rope.use([passage.capacity])
        with torch.inference_mode(False), torch.enable_grad():  # checkpoints keep no more than a layer's q, k and v
            if self.optimiser is None:
                self.gates = self.gates.to(engine.model.device).requires_grad_()
                self.optimiser = torch.optim.AdamW([self.gates], lr=LEARNING_RATE, weight_decay=0)
            with torch.no_grad():
                expected = self._last_hidden(engine, ids, asked, torch.ones_like(self.gates))
            check_finite(engine, expected, ids)
            for _ in range(ROUNDS):
                self.optimiser.zero_grad()
                found = self._last_hidden(engine, ids, asked, self.gates)
                distance = (found - expected).square().mean()
                (distance + SPARSITY * self.gates[list(self.layers)].mean()).backward()  # type: ignore[no-untyped-call]
                self.optimiser.step()
                with torch.no_grad():
                    self.gates.clamp_(0, 1)
        advance(engine.depth * passage.capacity)

    def _last_hidden(self, engine: Engine, ids: Sequence[int], count: int, gates: Tensor) -> Tensor:
        """Run tokens through the model -> what its output layer is given for the last `count` of them, [count, D]."""
        seen: list[Tensor] = []
        config = self.profile.settings
        assert isinstance(config, DuoAttentionConfig)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
            this, gate = self.all_layers[layer], gates[layer, : k.shape[1]]
            gated = partial(gated_attention, gate=gate, sink=config.sink, window=config.window)
            sliding = partial(prefill_attention_ref, window=this.window, chunked=this.chunked)
            read = gated if this.window is None else sliding
            out = checkpoint(read, q[0], k[0], v[0], softmax, use_reentrant=False)
            return out.transpose(0, 1)[None]  # type: ignore[no-any-return]

        output = engine.model.module.get_output_embeddings()  # type: ignore[no-untyped-call]
        watch = output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].float()))
        try:
            device = engine.model.device
            tokens, positions = torch.tensor([ids], device=device), torch.arange(len(ids), device=device)[None]
            engine.hook.run(attend, tokens, positions, keep=count)
        finally:
            watch.remove()
        return seen[0]

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"gates": self.gates.detach().cpu()}

    @override
    def tables(self) -> list[tuple[str, Table]]:
        found = self.tensors()["gates"]
        cells = ((layer, [f"{gate:.3f}" for gate in found[layer].tolist()]) for layer in self.layers)
        columns = (f"KV head {head}" for head in range(found.shape[1]))
        return [layer_table("Gate of every KV head: 1 needs everything, 0 sinks and window", columns, cells)]


def gated_attention(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, gate: Tensor, sink: int, window: int) -> Tensor:
    """Causal attention of a prompt: `gate` [Hk] of it to everything, the rest to sinks and window -> [H, n, d].

    q [H, n, d], k and v [Hk, n, d]. In the reference's torch, so that gradients pass.
    """
    heads, n, groups = len(k), q.shape[1], len(q) // len(k)
    token = torch.arange(n, device=q.device)
    causal = token[:, None] >= token
    near = causal & ((token < sink) | (token > token[:, None] - window))
    rows = q.reshape(heads, groups * n, -1)
    parts = []
    for mask in (causal, near):
        out, lse = block_attention_ref(rows, k, v, softmax, mask.repeat(groups, 1))
        if softmax.sinks is not None:
            out = add_sinks(out, lse, softmax.sinks.view(heads, groups, 1).expand(-1, -1, n).reshape(heads, -1))
        parts.append(out)
    share = gate.to(q.dtype)[:, None, None]
    return (share * parts[0] + (1 - share) * parts[1]).reshape(q.shape)

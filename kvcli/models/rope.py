"""Rotary positions: tables instead of trigonometry at every step, and rotation of keys back and forth.

Both start from the model's own rotary module, and know nothing of scaling rules. Some rules (dynamic, longrope) choose
the frequencies by the length of the sequence. Here the choice is made once for each sequence, for its full length, as
the module itself would make it at that length. So keys of one sequence never mix two sets, and a sequence's frequencies
do not depend on its company.
"""

from __future__ import annotations

import copy
import hashlib
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from kvcli.kernels._numba import serves
from kvcli.kernels.norm_rope import Arrays, Rotation, arrays_of, rotate_at_cpu
from kvcli.models.auto import Angles, angles_at, decoder_of, rotary_name, rotate_halves, rotate_neighbours
from kvcli.models.devices import Placement
from kvcli.models.geometry import attention_modules, geometry_of_model
from kvcli.models.layers import layer_type_of, refusal

# The cosines and sines of a rotary module for sequences of one length, computed or looked up in a table.

# Positions per call while a table is built: its float32 intermediates stay below 100 MB.
_CHUNK = 1 << 16


class Frequencies:
    """The cosines and sines of a rotary module whose frequencies are settled for sequences of `length` tokens."""

    def __init__(self, rotary: nn.Module, length: int, device: torch.device):
        self.length = length
        self.device = device
        # A copy: the frequencies are buffers, which a longer sequence may have changed in the original.
        self.rotary = copy.deepcopy(rotary).to(device)
        self.complex = False  # whether the module gives complex numbers, for pairs of neighbouring channels
        self.sines_first: bool | None = None  # whether it gives sines, then cosines (GPT-J); at position 0 these are 1
        kinds = getattr(rotary, "rope_type", "default")
        self.layer_types: tuple[str | None, ...] = tuple(kinds) if isinstance(kinds, dict) else (None,)
        self.tables: dict[tuple[torch.dtype, str | None], tuple[Tensor, Tensor]] = {}
        self._last = torch.tensor([length - 1], device=device)
        for layer_type in self.layer_types:
            for position in (self._last.new_zeros(1), self._last):  # back to the start, then the full length
                self._call(position, torch.float32, layer_type)
        # From here on the module keeps its choice, and asks for no maximum on the host.
        self.rotary.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"  # type: ignore[assignment]

    def at(self, positions: Tensor, dtype: torch.dtype, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [n, r] of positions [n] < length, times the attention scaling; r is the model's."""
        # The last position is there for modules that scale by the largest one they see (phimoe).
        cos, sin = self._call(torch.cat((positions, self._last)), dtype, layer_type)
        return cos[:-1], sin[:-1]

    def table(self, dtype: torch.dtype, layer_type: str | None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [length, r] of all positions; made once."""
        if (dtype, layer_type) not in self.tables:
            width = self.at(self._last.new_zeros(1), dtype, layer_type)[0].shape[-1]
            cos, sin = (torch.empty(self.length, width, dtype=dtype, device=self.device) for _ in range(2))
            for start in range(0, self.length, _CHUNK):
                part = slice(start, min(start + _CHUNK, self.length))
                positions = torch.arange(part.start, part.stop, device=self.device)
                cos[part], sin[part] = self.at(positions, dtype, layer_type)
            self.tables[dtype, layer_type] = cos, sin
        return self.tables[dtype, layer_type]

    def begin(self, longer: Frequencies) -> bool:
        """Tell whether a sequence of the other's length has the same cosines and sines, as far as this one goes."""
        ends = torch.cat((self._last.new_ones(1), self._last))[: self.length]
        pairs = (
            (self.at(ends, torch.float32, kind), longer.at(ends, torch.float32, kind)) for kind in self.layer_types
        )
        return all(torch.equal(mine, theirs) for pair in pairs for mine, theirs in zip(*pair, strict=True))

    def _call(self, positions: Tensor, dtype: torch.dtype, layer_type: str | None) -> tuple[Tensor, Tensor]:
        like = torch.empty(1, 1, 1, dtype=dtype, device=self.device)  # tells the module its dtype and device
        angles = angles_at(self.rotary, like, positions, layer_type)
        self.complex = isinstance(angles, Tensor)
        first, second = (angles.real, angles.imag) if isinstance(angles, Tensor) else angles
        if self.sines_first is None:
            self.sines_first = not first.any().item()
        return (second[0], first[0]) if self.sines_first else (first[0], second[0])


class RopeTable(nn.Module):
    """Looks up what a rotary module computes, bit for bit; `others` are the same frequencies on other devices."""

    def __init__(self, frequencies: Frequencies, dtype: torch.dtype, others: Sequence[Frequencies] = ()):
        super().__init__()
        self._elsewhere = {each.device: RopeTable(each, dtype) for each in others}
        self.length, self.complex, self.sines_first = frequencies.length, frequencies.complex, frequencies.sines_first
        dtype = torch.float32 if self.complex else dtype  # no one else asks the module
        for layer_type in frequencies.layer_types:
            cos, sin = frequencies.table(dtype, layer_type)  # [length, r]
            self.register_buffer(f"cos_{layer_type}", cos, persistent=False)
            self.register_buffer(f"sin_{layer_type}", sin, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [b, n, r] of position_ids [b, n] < length, in the table's dtype, on `x`'s device."""
        if x.device in self._elsewhere:
            found: tuple[Tensor, Tensor] = self._elsewhere[x.device](x, position_ids, layer_type)
            return found
        cos, sin = self.get_buffer(f"cos_{layer_type}"), self.get_buffer(f"sin_{layer_type}")
        return cos[position_ids], sin[position_ids]


@contextmanager
def installed(model: PreTrainedModel, lengths: Collection[int], placement: Placement | None = None) -> Iterator[Rope]:
    """Replace the rotary module of `model` by tables for sequences of these final lengths, in tokens.

    The original is restored at the end. Sequences with the same frequencies share a table; if layers lie on several
    devices, each has one.
    """
    decoder = decoder_of(model)
    name = rotary_name(decoder)
    if name is None:
        yield NoRope(len(attention_modules(model)))
        return
    original = decoder.get_submodule(name)
    rope = Rope(model, original, lengths, placement)
    setattr(decoder, name, rope)
    try:
        yield rope
    finally:
        setattr(decoder, name, original)


class Rope(nn.Module):
    """Drop-in for a decoder's rotary module that serves a batch of sequences of several lengths."""

    def __init__(
        self,
        model: PreTrainedModel,
        original: nn.Module,
        lengths: Collection[int],
        placement: Placement | None = None,
    ):
        super().__init__()
        self._placement = placement
        self.layer_types = getattr(original, "layer_types", None)  # which a decoder may ask for (lfm3)
        self._model, self._original = (model,), (original,)  # tuples, so that they are not submodules
        self._of_length: dict[int, tuple[Frequencies, RopeTable]] = {}
        self._rotary: dict[int, list[Rotary | None]] = {}
        for length in sorted(set(lengths), reverse=True):
            self.cover(length)
        self.use([max(lengths)])

    def cover(self, length: int) -> None:
        """Serve sequences of this length, too."""
        if length in self._of_length:
            return
        (model,), (original,) = self._model, self._original
        frequencies = Frequencies(original, length, model.device)
        tables = {id(entry): entry for entry in self._of_length.values() if entry[0].length > length}
        same = next((entry for entry in tables.values() if frequencies.begin(entry[0])), None)
        if same is not None:
            self._of_length[length] = same
            return
        everywhere = {frequencies.device: frequencies}
        for device in () if self._placement is None else self._placement.devices[1:]:
            everywhere[device] = Frequencies(original, length, device)
        _, *others = everywhere.values()
        self._of_length[length] = frequencies, RopeTable(frequencies, model.dtype, others)
        of_layers = [frequencies.device] * len(geometry_of_model(model).layers)
        of_layers = of_layers if self._placement is None else list(self._placement.attending)
        self._rotary[id(frequencies)] = _per_layer(model, [everywhere[device] for device in of_layers])

    def use(self, lengths: Sequence[int]) -> None:
        """Set the sequences, by their lengths, of the rows of the next forward passes."""
        self._rows = [self._of_length[length][1] for length in lengths]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Restore the sequences in use after this context, so that others may be in use within it."""
        rows = self._rows
        try:
            yield
        finally:
            self._rows = rows

    def alike(self, lengths: Collection[int]) -> bool:
        """Tell whether sequences of these lengths rotate the same token by the same angles."""
        found = {id(entry): entry[0] for entry in map(self._of_length.__getitem__, lengths)}
        *shorter, longest = sorted(found.values(), key=lambda frequencies: frequencies.length)
        return all(frequencies.begin(longest) for frequencies in shorter)

    def fingerprint(self, length: int) -> str:
        """Hash the angles at the first positions of sequences of this length into twelve hexadecimal digits."""
        frequencies = self._of_length[length][0]
        first = torch.arange(min(2, length), device=frequencies.device)
        tables = [table for kind in frequencies.layer_types for table in frequencies.at(first, torch.float32, kind)]
        return hashlib.sha256(torch.cat([table.flatten() for table in tables]).cpu().numpy().tobytes()).hexdigest()[:12]

    def rotary(self, length: int) -> list[Rotary | None]:
        """Return one Rotary per layer for a sequence of this length, None for a layer without rotary positions."""
        return self._rotary[id(self._of_length[length][0])]

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Angles:
        """Return cosines and sines [b, n, r] of position_ids [b, n], each row from its sequence's table.

        If a model counts positions along several axes, [axes, b, n], those of a text are equal.
        """
        position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
        first, *others = self._rows
        if all(table is first for table in others):
            cos, sin = first(x, position_ids, layer_type)
        else:
            rows = [table(x, position_ids[i : i + 1], layer_type) for i, table in enumerate(self._rows)]
            cos, sin = torch.cat([cos for cos, _ in rows]), torch.cat([sin for _, sin in rows])
        if first.complex:
            return torch.complex(cos, sin)
        return (sin, cos) if first.sines_first else (cos, sin)


class NoRope(Rope):
    """Stands in for the rotary positions of a model that has none in any layer."""

    def __init__(self, layers: int):
        nn.Module.__init__(self)
        self.layers, self._rows = layers, []

    @override
    def cover(self, length: int) -> None: ...

    @override
    def use(self, lengths: Sequence[int]) -> None: ...

    @override
    def alike(self, lengths: Collection[int]) -> bool:
        return True

    @override
    def fingerprint(self, length: int) -> str:
        return hashlib.sha256().hexdigest()[:12]

    @override
    def rotary(self, length: int) -> list[Rotary | None]:
        return [None] * self.layers


class Rotary:
    """One layer's rotation, applied to keys or queries outside the model, in float32.

    It runs the model's own `apply_rotary_pos_emb`, so the layout of the pairs, partial rotation and the attention
    scaling are the model's. `unrotate` inverts `rotate`: from float32 keys to 1e-6, from bfloat16 keys to the rounding
    that they carry.
    """

    stateless: ClassVar[bool] = True

    def __init__(self, frequencies: Frequencies, layer_type: str | None, apply: Callable[..., Any], head_dim: int):
        self._frequencies = frequencies
        self._layer_type = layer_type
        self._apply = apply
        cos, sin = self._angles(torch.zeros(1, dtype=torch.long, device=frequencies.device))
        self.attention_scaling = float(cos[0, 0])  # the cosine of position 0 is one
        self._rotated = head_dim
        self._tables: Rotation | None = None
        self._arrays: dict[int, Arrays | None] = {}  # by head size
        try:
            self._turn(torch.empty(1, 1, 1, head_dim, device=cos.device), cos[None], sin[None])
        except RuntimeError:  # models that cut the rotated part off before they call the function (phi, stablelm)
            self._rotated = cos.shape[-1] * (2 if frequencies.complex or frequencies.sines_first else 1)

    def rotation(self, head_dim: int) -> Rotation:
        """Return the rotation of keys as kernels apply it, by tables of all positions; made once."""
        if self._tables is None:
            cos, sin = self._frequencies.table(torch.float32, self._layer_type)
            self._tables = Rotation.of(cos, sin, self._turn, self._rotated, head_dim)
        return self._tables

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [..., n, d] to positions [n], or [..., n] with the leading dimensions of x; return float32."""
        if (tables := self._for_loops(x)) is not None:
            return rotate_at_cpu(x, positions, tables)
        cos, sin = self._angles(positions.reshape(-1))
        return self._run(x, positions, cos, sin)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undo `rotate`: x [..., n, d] rotated to positions [n] or [..., n] -> unrotated, float32."""
        scaling = self.attention_scaling**2  # the rotation has applied it once, and the inverse once more
        if (tables := self._for_loops(x)) is not None:
            return rotate_at_cpu(x, positions, tables, back=True, scale=1 / scaling)
        cos, sin = self._angles(positions.reshape(-1))
        return self._run(x, positions, cos / scaling, -sin / scaling)

    def rotate_on_average(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [..., n, d] by the mean of the rotations to positions [m], which may be beyond the end; float32."""
        cos, sin = (each.mean(0) for each in self._frequencies.at(positions, torch.float32, self._layer_type))
        n = x.shape[-2]
        return self._run(x, positions[:1].expand(n), cos.expand(n, -1), sin.expand(n, -1))  # linear in the angles

    def _for_loops(self, x: Tensor) -> Arrays | None:
        """Return the tables for the loops that can rotate x; None without tables, or for pairs unknown to them."""
        known = self._frequencies.tables.get((torch.float32, self._layer_type))  # there for models in fp32
        if known is None or not serves(x, numbers=known[0].numel()):
            return None
        if x.shape[-1] not in self._arrays:
            try:
                self._arrays[x.shape[-1]] = arrays_of(self.rotation(x.shape[-1]))
            except ValueError:
                self._arrays[x.shape[-1]] = None
        return self._arrays[x.shape[-1]]

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        known = self._frequencies.tables.get((torch.float32, self._layer_type))  # there for models in fp32
        if known is None:
            return self._frequencies.at(positions, torch.float32, self._layer_type)
        return known[0].index_select(0, positions), known[1].index_select(0, positions)

    def _run(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        *lead, n, d = x.shape
        rows = math.prod(lead)
        # One list of positions serves all rows, as heads of one sequence; else each row is a sequence of one head.
        b, heads = (1, rows) if positions.dim() == 1 else (rows, 1)
        x = x.float().reshape(b, heads, n, d)
        turned = self._turn(x[..., : self._rotated], cos.view(b, n, cos.shape[-1]), sin.view(b, n, sin.shape[-1]))
        return torch.cat((turned, x[..., self._rotated :]), dim=-1).view(*lead, n, d)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply to x [b, heads, n, d] the rotation of cos and sin [b, n, r]."""
        turned: Tensor = self._apply(x, x[:, :0], cos, sin)[0]  # the function rotates a query and a key
        return turned


def _one_by_one(apply: Callable[..., Tensor], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by a function that takes one of them (Gemma 3n, Gemma 4)."""
    return apply(q, cos, sin), apply(k, cos, sin)


def _tokens_first(apply: Callable[..., Tensor], *qk_cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by a function that takes a query or key [b, n, H, d], and sines first (GPT-J, CodeGen)."""
    *both, cos, sin = qk_cos_sin
    q, k = (apply(x.transpose(1, 2), sin, cos).transpose(1, 2) for x in both)
    return q, k


def _per_layer(model: PreTrainedModel, of_layers: Sequence[Frequencies]) -> list[Rotary | None]:
    text = model.config.get_text_config(decoder=True)
    shared: dict[tuple[int, str | None, int], Rotary] = {}
    rotary: list[Rotary | None] = []
    geometry = geometry_of_model(model)
    places = [place for place, each in enumerate(geometry.decoder) for _ in each.attention]
    for place, module, layer, frequencies in zip(
        places, attention_modules(model), geometry.layers, of_layers, strict=True
    ):
        layer_type = layer_type_of(frequencies.rotary, text, place)
        if not layer.rope or layer_type not in frequencies.layer_types:  # or it takes several kinds of angles
            rotary.append(None)
            continue
        apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        if frequencies.complex or layer.latent is not None:  # latents have their own layout
            apply = rotate_neighbours if frequencies.complex else rotate_halves
        if apply is None:
            raise refusal(model.config, "its modelling code has no apply_rotary_pos_emb")
        if frequencies.sines_first:
            apply = partial(_tokens_first, apply)
        elif "k" not in signature(apply).parameters:
            apply = partial(_one_by_one, apply)
        key = (id(frequencies), layer_type, layer.head_dim)
        if key not in shared:
            shared[key] = Rotary(frequencies, layer_type, apply, layer.head_dim)
        rotary.append(shared[key])
    return rotary

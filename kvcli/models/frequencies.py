"""The cosines and sines of a rotary module for sequences of one length, asked for or looked up in a table."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvcli.models.auto import angles_at

# Positions per call while a table is built: its float32 intermediates stay below 100 MB.
_CHUNK = 1 << 16


class Frequencies:
    """The cosines and sines of a rotary module whose frequencies are settled for sequences of `length` tokens."""

    def __init__(self, rotary: nn.Module, length: int, device: torch.device):
        self.length = length
        self.device = device
        # A copy: the frequencies live in buffers, and a longer sequence that the original saw may have changed them.
        self.rotary = copy.deepcopy(rotary).to(device)
        self.complex = False  # whether the module gives complex numbers, for pairs of neighbouring channels
        kinds = getattr(rotary, "rope_type", "default")
        self.layer_types: tuple[str | None, ...] = tuple(kinds) if isinstance(kinds, dict) else (None,)
        self.tables: dict[tuple[torch.dtype, str | None], tuple[Tensor, Tensor]] = {}
        self._last = torch.tensor([length - 1], device=device)
        for layer_type in self.layer_types:
            for position in (self._last.new_zeros(1), self._last):  # back to the start, then the full length
                self._call(position, torch.float32, layer_type)
        # From here on the module keeps what it has chosen, and asks for no maximum on the host.
        self.rotary.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"  # type: ignore[assignment]

    def at(self, positions: Tensor, dtype: torch.dtype, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, r] of positions [n] < length, times the attention scaling; r as the model has it."""
        # The last position is there for modules that scale by the largest one they see (phimoe).
        cos, sin = self._call(torch.cat((positions, self._last)), dtype, layer_type)
        return cos[:-1], sin[:-1]

    def table(self, dtype: torch.dtype, layer_type: str | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, r] of all positions; made once."""
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
        """Tell whether a sequence of the other's length has, as far as this one goes, the same cosines and sines."""
        ends = torch.cat((self._last.new_ones(1), self._last))[: self.length]
        pairs = (
            (self.at(ends, torch.float32, kind), longer.at(ends, torch.float32, kind)) for kind in self.layer_types
        )
        return all(torch.equal(mine, theirs) for pair in pairs for mine, theirs in zip(*pair, strict=True))

    def _call(self, positions: Tensor, dtype: torch.dtype, layer_type: str | None) -> tuple[Tensor, Tensor]:
        like = torch.empty(1, 1, 1, dtype=dtype, device=self.device)  # tells the module its dtype and device
        angles = angles_at(self.rotary, like, positions, layer_type)
        self.complex = isinstance(angles, Tensor)
        cos, sin = (angles.real, angles.imag) if isinstance(angles, Tensor) else angles
        return cos[0], sin[0]


class RopeTable(nn.Module):
    """Looks up what a rotary module computes, bit for bit; `others` are the same frequencies on other devices."""

    def __init__(self, frequencies: Frequencies, dtype: torch.dtype, others: Sequence[Frequencies] = ()):
        super().__init__()
        self._elsewhere = {each.device: RopeTable(each, dtype) for each in others}
        self.length, self.complex = frequencies.length, frequencies.complex
        dtype = torch.float32 if self.complex else dtype  # the module asks no one else
        for layer_type in frequencies.layer_types:
            cos, sin = frequencies.table(dtype, layer_type)  # [length, r]
            self.register_buffer(f"cos_{layer_type}", cos, persistent=False)
            self.register_buffer(f"sin_{layer_type}", sin, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [b, n, r] of position_ids [b, n] < length, in the table's dtype, on the device of `x`."""
        if x.device in self._elsewhere:
            found: tuple[Tensor, Tensor] = self._elsewhere[x.device](x, position_ids, layer_type)
            return found
        cos, sin = self.get_buffer(f"cos_{layer_type}"), self.get_buffer(f"sin_{layer_type}")
        return cos[position_ids], sin[position_ids]

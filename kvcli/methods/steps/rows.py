"""Rows of a batch's tensors that are written where the device alone knows."""

from torch import Tensor


def put_rows(target: Tensor, at: Tensor, values: Tensor) -> None:
    """Write values [b, Hk, ...] to row at [b] of target [b, Hk, n, ...], for sequences whose row is not negative."""
    shape = (-1, 1, 1, *[1] * (values.dim() - 2))
    row = at.long().clamp_min(0).view(shape).expand(-1, values.shape[1], -1, *values.shape[2:])
    before = target.gather(2, row)
    target.scatter_(2, row, values[:, :, None].to(target.dtype).where(at.view(shape) >= 0, before))

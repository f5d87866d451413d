"""Temperature pressure: whether the loss would fall with sharper or softer attention, from the backward pass."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.show.table import Shown, Table, count
from sqrtdk.wording.numbers import write_number

# One lock for all objects: backward runs one thread per device, and a lock in an object could not be copied or pickled.
_adding = threading.Lock()

# Elements of q that are widened at a time.
_BLOCK = 1 << 22


# Keys: whether the pressure is positive, whether it is negative.
_LOWERS_LOSS = {(True, False): "softer", (False, True): "sharper", (False, False): "neither"}


class TemperaturePressure(Shown):
    """∂loss/∂log scale per head, at no extra pass: ⟨q, ∂loss/∂q⟩ over rows and features.

    The scores are scale·q·k, so a factor of q is a factor of the scale. With a pressure p < 0 a larger scale lowers the
    loss: the loss would fall with a **sharper** head. With p > 0 the loss would fall with a **softer** head, and with
    p = 0 it would not change, to first order. The q is the one that enters the product, after rotary embedding and
    norms. Any implementation of attention can be followed::

        pressure = TemperaturePressure()
        out = torch.nn.functional.scaled_dot_product_attention(pressure.follow(q), k, v)
        loss(out).backward()
        pressure.per_head           # float64 [H]

    Like `.grad` it accumulates until `reset()`: over the micro-batches of a step (if each loss is divided by their
    number, it is the pressure of the mean loss) and over all calls that share the object. Use one object per layer.

    Args:
        scaler: the `torch.amp.GradScaler` that scales the loss, if one does; its factor at the time of the backward
            pass is undone.

    >>> pressure = TemperaturePressure()
    >>> q = torch.tensor([[3.0]], requires_grad=True)
    >>> (2 * pressure.follow(q)).sum().backward()
    >>> pressure.per_head
    tensor([6.], dtype=torch.float64)
    >>> pressure
    TemperaturePressure of 1 head after 1 backward pass
    head  pressure  the loss falls if
       0         6             softer
    """

    def __init__(self, scaler: Any = None) -> None:
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise InvalidTypeError("scaler", f"must be a torch.amp.GradScaler or None, got {type(scaler).__name__}")
        self.scaler = scaler
        self.reset()

    def reset(self) -> None:
        """Clear the record; the next `follow` may have another number of heads."""
        self._heads: int | None = None
        self._sum: Tensor | None = None
        self._passes: Tensor | None = None
        self._overflows: Tensor | None = None

    @property
    def per_head(self) -> Tensor | None:
        """∂loss/∂log scale `[H]`, float64 (float32 on MPS), on the device of q; None before any backward pass."""
        return self._sum

    @property
    def passes(self) -> int:
        """Number of backward passes through followed queries in `per_head`."""
        return 0 if self._passes is None else int(self._passes)

    @property
    def overflows(self) -> int:
        """Number of backward passes left out for an infinite or NaN gradient, as in steps that a GradScaler skips."""
        return 0 if self._overflows is None else int(self._overflows)

    def _table(self) -> Table:
        if self._sum is None:
            return Table("TemperaturePressure before any backward pass", (), [])
        title = f"TemperaturePressure of {count(len(self._sum), 'head')} after "
        try:
            rows = [
                (str(head), write_number(p, 3), _LOWERS_LOSS[p > 0, p < 0]) for head, p in enumerate(self._sum.tolist())
            ]
        except RuntimeError:  # a tensor without numbers
            return Table(title + f"a backward pass on {self._sum.device}, without numbers", (), [])
        title += count(self.passes, "backward pass")
        if self.overflows:
            title += f", {self.overflows} more left out: gradients not finite"
        return Table(title, ("head", "pressure", "the loss falls if"), rows)

    def follow(self, q: Tensor) -> Tensor:
        """Return an alias of q `[..., H, L, D]` (or `[L, D]`, one head) for the product q·k; its gradient is recorded.

        Use the alias in the product and nowhere else: only that path tells about the scale. q itself may serve
        elsewhere, for instance to compute a temperature. Without a gradient to come q is returned and nothing recorded.

        Raises:
            InvalidValueError: for q of another number of heads than before, or inside torch.compile (with fullgraph;
                without it torch runs the function that calls `follow` uncompiled).
        """
        if torch.compiler.is_compiling():
            raise InvalidValueError(
                "TemperaturePressure.follow records during the backward pass and cannot be traced by torch.compile; "
                "call it outside the compiled region, or leave pressure out of the compiled model"
            )
        if not isinstance(q, Tensor):
            raise InvalidTypeError("q", f"must be a tensor, got {type(q).__name__}")
        if q.dim() < 2:
            raise InvalidValueError("q", f"must have shape [..., H, L, D] or [L, D], got {tuple(q.shape)}")
        if not (q.requires_grad and torch.is_grad_enabled()):
            return q
        heads = q.shape[-3] if q.dim() > 2 else 1
        if self._heads not in (None, heads):
            raise InvalidValueError("q", f"must have {self._heads} heads, as the q followed before, got {heads}")
        self._heads = heads
        alias: Tensor = _Follow.apply(q, self)  # type: ignore[no-untyped-call]
        return alias

    @torch.no_grad()
    def _record(self, q: Tensor, grad: Tensor) -> None:
        pressure = _dot_per_head(q.detach(), grad.detach())
        if self.scaler is not None:
            pressure = pressure / self.scaler.get_scale()
        # Decided on the device: reading the value on the host would wait for the device.
        finite = pressure.isfinite().all()
        pressure = torch.where(finite, pressure, 0.0)
        with _adding:
            if self._sum is None or self._passes is None or self._overflows is None:
                self._sum, self._passes, self._overflows = pressure, finite.long(), (~finite).long()
            else:
                home = self._sum.device
                self._sum = self._sum + pressure.to(home)
                self._passes = self._passes + finite.to(home)
                self._overflows = self._overflows + (~finite).to(home)


def _dot_per_head(q: Tensor, grad: Tensor) -> Tensor:
    """Σ q·grad over all axes but the heads', in float64, a block of rows at a time: widening all would take 4 × q."""
    wide = torch.float32 if q.device.type == "mps" else torch.float64
    if q.dim() == 2:
        q, grad = q[None], grad[None]
    step = max(1, _BLOCK * q.shape[-2] // max(q.numel(), 1))
    total = torch.zeros(q.shape[-3], dtype=wide, device=q.device)
    for at in range(0, q.shape[-2], step):
        slope = grad[..., at : at + step, :]
        products = q[..., at : at + step, :].to(wide) * slope.to(wide)
        # A row that sees nothing adds nothing, even if its q is NaN.
        products.masked_fill_(slope == 0, 0.0)
        total += products.sum(dim=(-1, -2)).reshape(-1, q.shape[-3]).sum(dim=0)
    return total


class _Follow(torch.autograd.Function):
    """The identity; its backward records. q is saved as autograd saves it, so checkpointing may recompute it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, pressure: TemperaturePressure) -> Tensor:
        ctx.save_for_backward(q)
        ctx.pressure = pressure
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.pressure._record(ctx.saved_tensors[0], grad)
        return grad, None

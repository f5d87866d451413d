"""Sums query lengths and key spread of watched calls per head, to explain large scores."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sqrtdk import HeadSummary
from sqrtdk.compiled import load_kernel
from sqrtdk.diagnosis.score_size import CauseSplit
from sqrtdk.summary.heads import Array
from sqrtdk.torch.engines.kernel import DTYPE_CODES
from sqrtdk.torch.internals import unseen
from sqrtdk.torch.watch.recognise.calls import SeenCall

# Tokens read per sequence, evenly spaced. Their means are accurate to a few percent.
_MOST_TOKENS = 64


class CauseSums(NamedTuple):
    """Sums per head `[H]`: queries, ‖q‖, scale²·‖q‖²; sequences, tr Cov(k)/dₖ, mean ‖k‖²/dₖ."""

    queries: Array
    norms: Array
    squares: Array
    sequences: Array
    spreads: Array
    key_squares: Array

    def merge(self, other: CauseSums) -> CauseSums:
        """Return the sums over the rows of both."""
        return CauseSums(*(one + two for one, two in zip(self, other, strict=True)))

    def split(self, summary: HeadSummary) -> CauseSplit:
        """Return the causes of large scores, given the head summary that has the score variance."""
        with np.errstate(invalid="ignore", divide="ignore"):
            norm, square = self.norms / self.queries, self.squares / self.queries
            spread, key_square = self.spreads / self.sequences, self.key_squares / self.sequences
        return CauseSplit.of(norm, square, spread, summary["score_variance"].mean, key_square)


def read_causes(call: SeenCall, tokens: Tensor | None, dimension: int) -> Tensor:
    """Return the sums `[6, H]` of a call from some of its tokens, leaving out padding (False in `tokens` `[B, L]`).

    Args:
        call: the call.
        tokens: a mask of the queries that are tokens, if known. It also applies to the keys if their number is equal.
        dimension: dₖ, not counting padding columns.
    """
    with unseen():
        if not isinstance(call.scale, Tensor) and (tokens is None or bool(tokens.all())):
            sums = _add_up(call.q, call.k, call.scale, dimension)
            if sums is not None:
                return sums
        heads, groups = call.q.shape[1], call.k.shape[1]
        queries, keys = _thin(call.q), _thin(call.k)
        squares = queries.square().sum(dim=-1)  # [B, H, n]
        factor = call.scale
        if isinstance(factor, Tensor):
            factor = factor.detach().to(squares)
            factor = _thin(factor[..., None])[..., 0] if factor.shape[-1] > 1 else factor
        present = _present(tokens, call.q, squares)
        use = present * squares.isfinite()
        squares = squares.nan_to_num(0.0, 0.0, 0.0)
        scaled = squares * (factor * factor)
        spreads, key_squares = _spread(keys, _present(tokens, call.k, keys[..., 0]), dimension).repeat_interleave(
            heads // groups, dim=-1
        )
        finite = spreads.isfinite() & key_squares.isfinite()
        return torch.stack(
            [
                use.sum(dim=(0, 2)),
                (squares.sqrt() * use).sum(dim=(0, 2)),
                (scaled * use).sum(dim=(0, 2)),
                finite.sum(dim=0).to(squares),
                *((one * finite).nan_to_num(0.0, 0.0, 0.0).sum(dim=0) for one in (spreads, key_squares)),
            ]
        )


def _add_up(q_BHLD: Tensor, k_BGSD: Tensor, scale: float, dimension: int) -> Tensor | None:
    """Return the sums if all tokens count, computed by the kernel; None where the kernel cannot."""
    kernel, _ = load_kernel()
    if kernel is None or not (q_BHLD.is_cpu and k_BGSD.is_cpu) or k_BGSD.shape[-2] < 2:
        return None
    views, kept, codes = [], [], set()
    for x in (q_BHLD, k_BGSD):
        step = _step(x)
        if x.stride(-1) != 1 or x.itemsize < 4:
            # The kernel reads vectors of contiguous float32 or float64 numbers; these are few.
            x, step = _thin(x).contiguous(), 1
        kept.append(x)
        codes.add(DTYPE_CODES.get(x.dtype))
        (batch, heads, rows, width), (*outer, row, entry) = x.shape, x.stride()
        views.append((x.data_ptr(), x.itemsize, (batch, heads, -(-rows // step), width), (*outer, row * step, entry)))
    code = codes.pop()
    if codes or code is None or not all(x.data_ptr() for x in kept):
        return None
    sums = np.empty((6, q_BHLD.shape[1]))
    return torch.from_numpy(sums) if kernel.add_up_lengths(code, *views, scale, dimension, sums) else None


def _step(x_BHLD: Tensor) -> int:
    return -(-x_BHLD.shape[-2] // _MOST_TOKENS)


def _thin(x_BHLD: Tensor) -> Tensor:
    """Return evenly spaced tokens of each sequence, in float32 or wider."""
    step = _step(x_BHLD)
    thin = x_BHLD.detach() if step < 2 else x_BHLD.detach()[..., ::step, :]
    return thin.float() if thin.element_size() < 4 else thin


def _present(tokens: Tensor | None, x_BHLD: Tensor, like_BHn: Tensor) -> Tensor:
    """Return 1 for tokens and 0 for padding `[B, 1, n]`, and all 1 if the mask does not fit."""
    batch, length = x_BHLD.shape[0], x_BHLD.shape[2]
    if tokens is None or tuple(tokens.shape) != (batch, length):
        return torch.ones_like(like_BHn[:, :1])
    return _thin(tokens[:, None, :, None].to(like_BHn))[..., 0]


def _spread(k_BGnD: Tensor, present_B1n: Tensor, dimension: int) -> Tensor:
    """Return tr Cov(k)/dₖ and mean ‖k‖²/dₖ per sequence and key head `[2, B, G]`; NaN with fewer than two keys."""
    weight = present_B1n[..., None]
    total = weight.sum(dim=-2)  # [B, 1, 1]
    mean = (k_BGnD * weight).sum(dim=-2, keepdim=True) / total[..., None]
    sums = torch.stack([((k_BGnD - shift).square() * weight).sum(dim=(-1, -2)) for shift in (mean, 0.0)])
    return torch.where(total[..., 0] > 1, sums / (total[..., 0] * dimension), torch.nan)

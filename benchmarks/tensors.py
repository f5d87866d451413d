"""Contenders and cases on tensors: torch and sqrtdk, forward only, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from benchmarks.cases import Case, Inputs
from benchmarks.contender import (
    TENSORS,
    TENSORS_BACKWARD,
    TENSORS_RECORDED,
    TENSORS_WITH_STATISTICS,
    TORCH,
    TORCH_BACKWARD,
    TORCH_RECORDED,
    Contender,
    TimedCall,
)
from benchmarks.task import Array, ContenderResult, Errors, Truth
from sqrtdk import backends
from sqrtdk.operation.attention import attention_gradients

# Function of q, k and v.
Attend = Callable[[Any, Any, Any], Any]


class GradientTruth(NamedTuple):
    """Gradients in float64 of q, k and v, for one sequence and some of its heads."""

    sequence: int
    heads: Array
    groups: Array
    gradients: tuple[Array, Array, Array]

    def compare(self, answer: ContenderResult) -> Errors:
        """Return the largest error of the three gradients, each relative to its largest entry."""
        assert answer.gradients is not None
        taken = (self.heads, self.groups, self.groups)
        off = [
            np.abs(gradient[self.sequence][heads] - exact).max() / np.abs(exact).max()
            for gradient, exact, heads in zip(answer.gradients, self.gradients, taken, strict=True)
        ]
        return Errors(float(np.max(off)))  # unlike max, np.max keeps NaN


@dataclass(frozen=True)
class BackwardCase(Case):
    """Forward pass and gradients, at a fixed random gradient of the output."""

    error_of: ClassVar[str] = "gradients, relative"

    def make_inputs(self, rng: np.random.Generator) -> list[Inputs]:
        """Return standard normal q, k, v and gradient of the output, in the memory layout of q."""
        made = super().make_inputs(rng)
        return [one._replace(grad_output=self.draw(rng, self.heads, self.queries)) for one in made]

    def compute_truth(self, inputs: Inputs) -> Truth:
        """Return float64 gradients for the last sequence: its first and last key/value heads and their query heads."""
        _, heads, groups, _, _, _ = self.shape
        sequence = self.batch - 1
        checked = np.unique([0, groups - 1])
        served = heads // groups
        queries = (checked[:, None] * served + np.arange(served)).ravel()
        q, k, v, grad = (
            array[sequence][taken].astype(np.float64)
            for array, taken in zip(
                (inputs.q, inputs.k, inputs.v, _require_gradient(inputs)),
                (queries, checked, checked, queries),
                strict=True,
            )
        )
        visible = self.visible()
        mask = None if visible is None else visible[min(sequence, len(visible) - 1)]
        with backends.use(backends.REFERENCE):
            exact = attention_gradients(q, k, v, grad, mask=mask)
        return GradientTruth(sequence, queries, checked, (exact.query, exact.key, exact.value))

    def multiply_adds(self) -> int:
        """Return the multiply-adds of two products forward and five backward, including recomputed logits."""
        return super().multiply_adds() * 7 // 2


@dataclass(frozen=True)
class RecordedCase(Case):
    """Forward pass that torch records for a backward pass, without running the backward pass."""


def tensors_of(inputs: Inputs, dtype: str = "float32") -> list[Any]:
    """Return q, k and v as tensors; in float32 they share the memory of the arrays."""
    import torch

    return [tensor_of(array).to(getattr(torch, dtype)) for array in inputs[:3]]


def tensor_of(array: Array | None) -> Any:
    """Return an array as a tensor on the same memory; None for None."""
    import torch

    return None if array is None else torch.from_numpy(array)


def _attend_by_torch(case: Case, inputs: Inputs) -> Attend:
    from torch.nn.functional import scaled_dot_product_attention

    options: dict[str, Any] = {}
    if case.window is not None or case.padding is not None:
        options["attn_mask"] = tensor_of(case.visible())
    elif case.causal:
        options["is_causal"] = True
    if inputs.q.shape[1] != inputs.k.shape[1]:
        options["enable_gqa"] = True
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)


def _attend_by_sqrtdk(case: Case, inputs: Inputs) -> Attend:
    """Return the function with torch's signature, or `attention` for options that the signature lacks."""
    from sqrtdk.torch import attention, scaled_dot_product_attention

    if case.window is not None:
        options = case.options() | {"mask": tensor_of(inputs.mask), "statistics": False}
        return lambda q, k, v: attention(q, k, v, **options).output
    # Pass as few arguments as torch gets, because they cost time on a tiny input.
    options = {}
    if case.padding is not None:
        options["attn_mask"] = tensor_of(inputs.mask)
    if case.causal:
        options["is_causal"] = True
    if inputs.q.shape[1] != inputs.k.shape[1]:
        options["enable_gqa"] = True
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)


def _describe_by_sqrtdk(case: Case, inputs: Inputs) -> Attend:
    from sqrtdk.torch import attention

    options = case.options()
    if case.padding is not None:
        options["mask"] = tensor_of(inputs.mask)
    return lambda q, k, v: attention(q, k, v, **options)


def _prepare_forward(choose: Callable[[Case, Inputs], Attend]) -> Callable[[Case, Inputs, int], TimedCall]:
    def prepare(case: Case, inputs: Inputs, threads: int) -> TimedCall:
        q, k, v = tensors_of(inputs, case.dtype)
        attend = choose(case, inputs)
        return lambda: attend(q, k, v)

    return prepare


def _prepare_recorded(choose: Callable[[Case, Inputs], Attend]) -> Callable[[Case, Inputs, int], TimedCall]:
    def prepare(case: Case, inputs: Inputs, threads: int) -> TimedCall:
        q, k, v = (tensor.requires_grad_() for tensor in tensors_of(inputs, case.dtype))
        attend = choose(case, inputs)
        return lambda: attend(q, k, v)

    return prepare


def _prepare_backward(choose: Callable[[Case, Inputs], Attend]) -> Callable[[Case, Inputs, int], TimedCall]:
    def prepare(case: Case, inputs: Inputs, threads: int) -> TimedCall:
        import torch

        leaves = [tensor.requires_grad_() for tensor in tensors_of(inputs, case.dtype)]
        grad_output = tensor_of(_require_gradient(inputs)).to(leaves[0].dtype)
        attend = choose(case, inputs)

        def run() -> tuple[Any, Any]:
            output = attend(*leaves)
            return output, torch.autograd.grad(output, leaves, grad_output)

        return run

    return prepare


def _require_gradient(inputs: Inputs) -> Array:
    assert inputs.grad_output is not None
    return inputs.grad_output


def _read_output(output: Any) -> ContenderResult:
    return ContenderResult(output.detach().float().numpy())


def _read_statistics(result: Any) -> ContenderResult:
    return ContenderResult(np.asarray(result.output.float()), np.asarray(result.statistics.entropy))


def _read_gradients(result: tuple[Any, Any]) -> ContenderResult:
    output, gradients = result
    return ContenderResult(
        output.detach().float().numpy(), gradients=tuple(gradient.float().numpy() for gradient in gradients)
    )


TENSOR_CONTENDERS = (
    Contender(TENSORS, ("torch",), _prepare_forward(_attend_by_sqrtdk), _read_output),
    Contender(TENSORS_WITH_STATISTICS, ("torch",), _prepare_forward(_describe_by_sqrtdk), _read_statistics),
    Contender(TENSORS_BACKWARD, ("torch",), _prepare_backward(_attend_by_sqrtdk), _read_gradients),
    Contender(TENSORS_RECORDED, ("torch",), _prepare_recorded(_attend_by_sqrtdk), _read_output),
    Contender(TORCH_RECORDED, ("torch",), _prepare_recorded(_attend_by_torch), _read_output),
    Contender(TORCH, ("torch",), _prepare_forward(_attend_by_torch), _read_output),
    Contender(TORCH_BACKWARD, ("torch",), _prepare_backward(_attend_by_torch), _read_gradients),
)

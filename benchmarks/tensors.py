"""Attention on tensors: torch's own and sqrtdk's, forward alone, and forward and backward with its case and truth."""

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
    Run,
)
from benchmarks.task import Answer, Array, Errors, Truth
from sqrtdk import backends
from sqrtdk.attention import attention_gradients

# q, k, v to what is computed of them.
Attend = Callable[[Any, Any, Any], Any]


class GradientTruth(NamedTuple):
    """Gradients in float64 of q, k and v, for one sequence and some of its heads."""

    sequence: int
    heads: Array
    groups: Array
    gradients: tuple[Array, Array, Array]

    def compare(self, answer: Answer) -> Errors:
        """The largest error of each gradient relative to its largest entry; the worst of the three."""
        assert answer.gradients is not None
        taken = (self.heads, self.groups, self.groups)
        off = [
            np.abs(gradient[self.sequence][heads] - exact).max() / np.abs(exact).max()
            for gradient, exact, heads in zip(answer.gradients, self.gradients, taken, strict=True)
        ]
        return Errors(float(np.max(off)))  # unlike max it keeps NaN


@dataclass(frozen=True)
class BackwardCase(Case):
    """The same computation and then its gradients, at a fixed random gradient of the output."""

    error_of: ClassVar[str] = "gradients, relative"

    def make_inputs(self, rng: np.random.Generator) -> list[Inputs]:
        """Standard normal q, k, v and gradient of the output; it lies in memory as q does."""
        made = super().make_inputs(rng)
        return [one._replace(grad_output=self.draw(rng, self.heads, self.queries)) for one in made]

    def compute_truth(self, inputs: Inputs) -> Truth:
        """The gradients in float64: of the last sequence, its first and last key/value head and whom these serve."""
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
        """Multiply-adds of two products forward and five backward, the logits computed anew among them."""
        return super().multiply_adds() * 7 // 2


@dataclass(frozen=True)
class RecordedCase(Case):
    """The same computation, recorded for a backward pass that never comes."""


def tensors_of(inputs: Inputs, dtype: str = "float32") -> list[Any]:
    """q, k and v as tensors, in float32 on the same memory."""
    import torch

    return [tensor_of(array).to(getattr(torch, dtype)) for array in inputs[:3]]


def tensor_of(array: Array | None) -> Any:
    """An array as a tensor on the same memory; None stays None."""
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
    """The function with torch's signature; what that cannot say goes to the other one."""
    from sqrtdk.torch import attention, scaled_dot_product_attention

    if case.window is not None:
        options = case.options() | {"mask": tensor_of(inputs.mask), "statistics": False}
        return lambda q, k, v: attention(q, k, v, **options).output
    # As few arguments as torch gets: on a tiny input they show.
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


def _prepare_forward(choose: Callable[[Case, Inputs], Attend]) -> Callable[[Case, Inputs, int], Run]:
    def prepare(case: Case, inputs: Inputs, threads: int) -> Run:
        q, k, v = tensors_of(inputs, case.dtype)
        attend = choose(case, inputs)
        return lambda: attend(q, k, v)

    return prepare


def _prepare_recorded(choose: Callable[[Case, Inputs], Attend]) -> Callable[[Case, Inputs, int], Run]:
    def prepare(case: Case, inputs: Inputs, threads: int) -> Run:
        q, k, v = (tensor.requires_grad_() for tensor in tensors_of(inputs, case.dtype))
        attend = choose(case, inputs)
        return lambda: attend(q, k, v)

    return prepare


def _prepare_backward(choose: Callable[[Case, Inputs], Attend]) -> Callable[[Case, Inputs, int], Run]:
    def prepare(case: Case, inputs: Inputs, threads: int) -> Run:
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


def _read_output(output: Any) -> Answer:
    return Answer(output.detach().float().numpy())


def _read_statistics(result: Any) -> Answer:
    return Answer(np.asarray(result.output.float()), np.asarray(result.statistics.entropy))


def _read_gradients(result: tuple[Any, Any]) -> Answer:
    output, gradients = result
    return Answer(output.detach().float().numpy(), gradients=tuple(gradient.float().numpy() for gradient in gradients))


TENSOR_CONTENDERS = (
    Contender(TENSORS, ("torch",), _prepare_forward(_attend_by_sqrtdk), _read_output),
    Contender(TENSORS_WITH_STATISTICS, ("torch",), _prepare_forward(_describe_by_sqrtdk), _read_statistics),
    Contender(TENSORS_BACKWARD, ("torch",), _prepare_backward(_attend_by_sqrtdk), _read_gradients),
    Contender(TENSORS_RECORDED, ("torch",), _prepare_recorded(_attend_by_sqrtdk), _read_output),
    Contender(TORCH_RECORDED, ("torch",), _prepare_recorded(_attend_by_torch), _read_output),
    Contender(TORCH, ("torch",), _prepare_forward(_attend_by_torch), _read_output),
    Contender(TORCH_BACKWARD, ("torch",), _prepare_backward(_attend_by_torch), _read_gradients),
)

"""Runs a case through the package, on arrays or tensors, forward, backward or forward-mode; returns named arrays."""

from __future__ import annotations

import numpy as np
import torch
from torch.autograd import forward_ad

import sqrtdk
import sqrtdk.torch
from sqrtdk import backends
from sqrtdk.statistics import ROW_FIELDS

from .case import Case, Learnable
from .layouts import to_array, to_tensor

STATISTICS = ROW_FIELDS


def run(case: Case) -> dict[str, np.ndarray]:
    """Return the requested results of a call: `output`, `weights`, `statistics.…`, `gradient.…`, `tangent`."""
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        with backends.use(case.level), backends.use_threads(case.threads):
            if case.front == "arrays":
                return _run_arrays(case)
            if case.front == "array gradients":
                return _run_array_gradients(case)
            if case.front == "jvp":
                return _run_forward_mode(case)
            return _run_tensors(case)
    finally:
        torch.set_num_threads(before)


def _options(case: Case) -> dict:
    names = ("scale", "mask", "causal", "causal_offset", "window", "softcap", "sinks", "alibi")
    return {name: getattr(case, name) for name in names}


def _collect(result, to_numpy=lambda x: x) -> dict[str, np.ndarray]:
    results = {"output": to_numpy(result.output)}
    if result.weights is not None:
        results["weights"] = to_numpy(result.weights)
    if result.statistics is not None:
        for name in STATISTICS:
            results[f"statistics.{name}"] = to_numpy(getattr(result.statistics, name))
    return results


def _run_arrays(case: Case) -> dict[str, np.ndarray]:
    wanted = {"statistics": case.statistics, "weights": case.weights}
    return _collect(sqrtdk.attention(case.q, case.k, case.v, **_options(case), **wanted))


def _run_array_gradients(case: Case) -> dict[str, np.ndarray]:
    grad = case.cotangents["output"].astype(case.q.dtype)
    gradients = sqrtdk.attention_gradients(case.q, case.k, case.v, grad, **_options(case))
    named = gradients._asdict().items()
    return {f"gradient.{name}": value for name, value in named if value is not None}


def make_module(case: Case):
    """Return the learnable scale of a case, with its parameters set."""
    from sqrtdk.torch import nn

    given: Learnable = case.scale
    d_k, heads = case.q.shape[-1], case.heads if given.per_head else None
    if given.kind == "learned":
        module = nn.LearnedTemperature(d_k, heads)
    elif given.kind in ("rms", "l2"):
        module = nn.QKNorm(d_k, heads, norm=given.kind)
    else:
        module = nn.QueryTemperature(d_k, heads, source=given.kind)
    with torch.no_grad():
        for name, value in given.parameters.items():
            getattr(module, name).copy_(torch.from_numpy(value))
    return module


def _run_tensors(case: Case) -> dict[str, np.ndarray]:
    # The backward pass depends on which of the smaller tensors need a gradient.
    chance = np.random.default_rng([case.seed, case.index, 1])
    backward = case.front == "tensor gradients" or (case.front == "drop-in" and case.statistics)
    leaves = {}

    def leaf(name, array, layout="plain"):
        tensor = to_tensor(array, layout)
        if backward and tensor.is_floating_point() and chance.random() < 0.7:
            tensor = tensor.detach().requires_grad_()
            leaves[name] = tensor
        return tensor

    q = leaf("query", case.q, case.layouts.get("q"))
    k = leaf("key", case.k, case.layouts.get("k"))
    v = leaf("value", case.v, case.layouts.get("v"))
    options = _options(case)
    for name in ("mask", "sinks", "alibi"):
        if options[name] is not None:
            options[name] = leaf(name, options[name], case.layouts.get(name))
    if isinstance(case.scale, Learnable):
        options["scale"] = make_module(case)
        leaves |= {f"parameter {name}": x for name, x in options["scale"].named_parameters()} if backward else {}
    elif isinstance(case.scale, np.ndarray):
        options["scale"] = leaf("scale", case.scale)
    torch.manual_seed(case.index)
    if case.front == "drop-in":
        output = sqrtdk.torch.scaled_dot_product_attention(
            q,
            k,
            v,
            options["mask"],
            case.dropout,
            case.causal,
            scale=case.scale,
            enable_gqa=case.heads != _groups(case),
        )
        results = {"output": to_array(output)}
        attended, weights = output, None
    else:
        wanted = {"statistics": case.statistics, "weights": case.weights}
        result = sqrtdk.torch.attention(q, k, v, **options, **wanted, dropout=case.dropout)
        results = _collect(result, to_array)
        attended, weights = result.output, result.weights
    if leaves:
        outputs, cotangents = [attended], [to_tensor(case.cotangents["output"], case.layouts.get("gradient"))]
        if weights is not None and "weights" in case.cotangents:
            outputs.append(weights)
            cotangents.append(to_tensor(case.cotangents["weights"]))
        gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
        for (name, tensor), gradient in zip(leaves.items(), gradients, strict=True):
            gradient = torch.zeros_like(tensor) if gradient is None else gradient
            results[f"gradient.{name}"] = to_array(gradient)
    return results


def _groups(case: Case) -> int:
    return case.k.shape[-3] if case.k.ndim > 2 else 1


def _run_forward_mode(case: Case) -> dict[str, np.ndarray]:
    options = _options(case)
    if case.mask is not None:
        options["mask"] = to_tensor(case.mask)
    if isinstance(case.scale, np.ndarray):
        options["scale"] = to_tensor(case.scale)
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(to_tensor(getattr(case, name)), to_tensor(tangent))
            for name, tangent in case.cotangents.items()
        }
        options["sinks"] = duals.pop("sinks", None)
        result = sqrtdk.torch.attention(**duals, **options, statistics=case.statistics, weights=case.weights)
        output, tangent = forward_ad.unpack_dual(result.output)
        result = result._replace(
            output=output, weights=None if result.weights is None else forward_ad.unpack_dual(result.weights)[0]
        )
        return _collect(result, to_array) | {
            "tangent": to_array(torch.zeros_like(output) if tangent is None else tangent)
        }

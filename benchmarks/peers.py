"""Contenders from other libraries: their fused attention, called as each documentation describes.

Two of these libraries in one process disturb each other, so each is timed in its own process (`apart`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.cases import Case, Inputs, narrow_to_bfloat16, widen_bfloat16
from benchmarks.contender import PEERS, Contender, NotForThisCaseError, TimedCall
from benchmarks.task import Array, ContenderResult
from benchmarks.tensors import tensors_of

Prepare = Callable[[Case, Inputs, int], TimedCall]


def _for_plain_cases(prepare: Prepare) -> Prepare:
    """Return a `prepare` that accepts only full or causal attention with equal numbers of query and key/value heads."""

    def prepare_plain(case: Case, inputs: Inputs, threads: int) -> TimedCall:
        if case.groups not in (None, case.heads):
            raise NotForThisCaseError("timed with as many key/value heads as query heads only")
        if case.window is not None or case.padding is not None:
            raise NotForThisCaseError("timed without masks and windows only")
        return prepare(case, inputs, threads)

    return prepare_plain


def _prepare_zentorch(case: Case, inputs: Inputs, threads: int) -> TimedCall:
    """Return a call of AMD's plugin, a torch operator that returns output and log-sum-exp."""
    torch = import_module("torch")
    import_module("zentorch")
    q, k, v = tensors_of(inputs, case.dtype)
    attend = torch.ops.zentorch.zentorch_sdpa
    return lambda: attend(q, k, v, 0.0, case.causal)[0]


def _prepare_flex(case: Case, inputs: Inputs, threads: int) -> TimedCall:
    """Return a call of FlexAttention compiled for this shape; a block mask makes it causal."""
    torch, flex = import_module("torch"), import_module("torch.nn.attention.flex_attention")
    q, k, v = tensors_of(inputs, case.dtype)
    visible = None
    if case.causal:
        _, _, _, queries, keys, _ = case.shape
        visible = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, queries, keys, device="cpu")
    torch.compiler.reset()  # after some shapes the compiler stops compiling a function
    attend = torch.compile(flex.flex_attention, dynamic=False)

    def run() -> Any:
        with torch.no_grad():
            return attend(q, k, v, block_mask=visible)

    return run


def _read_tensor(output: Any) -> ContenderResult:
    return ContenderResult(output.float().numpy())


def _prepare_onnxruntime(case: Case, inputs: Inputs, threads: int) -> TimedCall:
    """Return a call of onnxruntime's operator MultiHeadAttention on `[B, L, H·D]`."""
    if case.dtype != "float32":
        raise NotForThisCaseError(f"its attention on the CPU has no {case.dtype}")
    runtime, onnx = import_module("onnxruntime"), import_module("onnx")
    fed = {name: _by_token(array) for name, array in zip("qkv", inputs[:3], strict=True)}
    fed = {name: array.reshape(*array.shape[:2], -1) for name, array in fed.items()}
    real = onnx.TensorProto.FLOAT
    node = onnx.helper.make_node(
        "MultiHeadAttention", list("qkv"), ["o"], domain="com.microsoft", num_heads=case.heads,
        unidirectional=int(case.causal),
    )  # fmt: skip
    graph = onnx.helper.make_graph(
        [node],
        "attention",
        [onnx.helper.make_tensor_value_info(name, real, array.shape) for name, array in fed.items()],
        [onnx.helper.make_tensor_value_info("o", real, fed["q"].shape)],
    )
    domains = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    model = onnx.helper.make_model(graph, opset_imports=domains, ir_version=8)
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    heads = case.heads
    return lambda: (session.run(None, fed)[0], heads)


def _read_onnxruntime(result: tuple[Array, int]) -> ContenderResult:
    output, heads = result
    return ContenderResult(output.reshape(*output.shape[:2], heads, -1).swapaxes(1, 2))


def _prepare_openvino(case: Case, inputs: Inputs, threads: int) -> TimedCall:
    openvino, operations = import_module("openvino"), import_module("openvino.opset13")
    arrays = [np.ascontiguousarray(array) for array in inputs[:3]]
    element, hint = (openvino.Type.bf16, "bf16") if case.dtype == "bfloat16" else (openvino.Type.f32, "f32")
    parameters = [operations.parameter(list(array.shape), element) for array in arrays]
    node = operations.scaled_dot_product_attention(*parameters, causal=case.causal)
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(openvino.Model([node], parameters, "attention"), "CPU", settings)
    request = compiled.create_infer_request()
    if case.dtype == "bfloat16":
        # NumPy has no bfloat16, so tensors are made from the bits.
        fed = {i: openvino.Tensor(narrow_to_bfloat16(a), list(a.shape), element) for i, a in enumerate(arrays)}
    else:
        fed = dict(enumerate(arrays))
    return lambda: request.infer(fed, share_inputs=True, share_outputs=True)[0]


def _read_openvino(output: Any) -> ContenderResult:
    """Return the result from float32, or from bfloat16 bits that have another two-byte type."""
    array = np.asarray(output)
    return ContenderResult(
        array if array.itemsize == 4 else widen_bfloat16(np.ascontiguousarray(array).view(np.uint16))
    )


def _prepare_jax(case: Case, inputs: Inputs, threads: int) -> TimedCall:
    """Return a call of JAX's attention on `[B, L, H, D]`, compiled by XLA."""
    jax = import_module("jax")
    q, k, v = (jax.numpy.asarray(_by_token(array)).astype(case.dtype) for array in inputs[:3])
    attend = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=case.causal))
    return lambda: attend(q, k, v).block_until_ready()


def _read_jax(output: Any) -> ContenderResult:
    return ContenderResult(np.asarray(output).astype(np.float32).swapaxes(1, 2))


def _by_token(array: Array) -> Array:
    return np.ascontiguousarray(array.swapaxes(1, 2))


_ZENTORCH, _FLEX, _ONNXRUNTIME, _OPENVINO, _JAX = PEERS

PEER_CONTENDERS = (
    Contender(_ZENTORCH, ("torch", "zentorch"), _for_plain_cases(_prepare_zentorch), _read_tensor),
    Contender(_FLEX, ("torch",), _for_plain_cases(_prepare_flex), _read_tensor),
    Contender(_ONNXRUNTIME, ("onnxruntime", "onnx"), _for_plain_cases(_prepare_onnxruntime), _read_onnxruntime),
    Contender(_OPENVINO, ("openvino",), _for_plain_cases(_prepare_openvino), _read_openvino),
    Contender(_JAX, ("jax",), _for_plain_cases(_prepare_jax), _read_jax, takes_threads=False),
)

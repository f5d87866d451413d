"""Who is timed: sqrtdk, the fused attention of other libraries, and statistics computed by hand.

A contender turns the inputs into its own arrays before the clock starts; what is timed is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module, metadata

import numpy as np

from sqrtdk.attention import Attention, attention
from sqrtdk.bench import by_hand
from sqrtdk.bench.cases import Case, Inputs
from sqrtdk.bench.contender import (
    PLAIN,
    TORCH,
    WITH_STATISTICS,
    WITHOUT_MASK,
    Contender,
    NotForThisCaseError,
    Run,
)
from sqrtdk.bench.model import MODEL_CONTENDERS
from sqrtdk.bench.task import Answer, Array
from sqrtdk.bench.tensors import TENSOR_CONTENDERS, tensor_of, tensors_of
from sqrtdk.errors import unknown_name


def find_contender(name: str) -> Contender:
    """A contender by its name; an unknown name raises and lists the known ones.

    >>> find_contender("sqrtdk").needs
    ()
    """
    for contender in CONTENDERS:
        if contender.name == name:
            return contender
    raise unknown_name("contender", name, [contender.name for contender in CONTENDERS])


def peer_versions() -> dict[str, str]:
    """Versions of the libraries that contenders need, of those installed."""
    versions = {}
    for package in sorted({package for contender in CONTENDERS for package in contender.needs}):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _prepare_sqrtdk(*, statistics: bool, mask: bool = True) -> Callable[[Case, Inputs, int], Run]:
    def prepare(case: Case, inputs: Inputs, threads: int) -> Run:
        q, k, v, padding = inputs[:4]
        options = case.options()
        if padding is not None and mask:
            options["mask"] = padding
        return lambda: attention(q, k, v, statistics=statistics, **options)

    return prepare


def _read_sqrtdk(result: Attention) -> Answer:
    return Answer(result.output, None if result.statistics is None else result.statistics.entropy)


def _prepare_torch_matrix(case: Case, inputs: Inputs, threads: int) -> Run:
    _require_equal_heads(case)
    q, k, v = tensors_of(inputs)
    visible = tensor_of(case.visible())
    return lambda: by_hand.attend_in_torch(q, k, v, visible)


def _prepare_two_passes(case: Case, inputs: Inputs, threads: int) -> Run:
    _require_equal_heads(case)
    if case.window is not None or case.padding is not None:
        raise NotForThisCaseError("the second pass is written for full and causal attention")
    q, k, v = tensors_of(inputs)
    return lambda: by_hand.attend_in_two_passes(q, k, v, case.causal)


def _prepare_numpy_matrix(case: Case, inputs: Inputs, threads: int) -> Run:
    _require_equal_heads(case)
    visible = case.visible()
    return lambda: by_hand.attend_in_numpy(inputs, visible)


def _prepare_onnxruntime(case: Case, inputs: Inputs, threads: int) -> Run:
    """Its own operator, MultiHeadAttention, on `[B, L, H·D]`."""
    _require_plain(case)
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


def _read_onnxruntime(result: tuple[Array, int]) -> Answer:
    output, heads = result
    return Answer(output.reshape(*output.shape[:2], heads, -1).swapaxes(1, 2))


def _prepare_openvino(case: Case, inputs: Inputs, threads: int) -> Run:
    _require_plain(case)
    openvino, operations = import_module("openvino"), import_module("openvino.opset13")
    arrays = [np.ascontiguousarray(array) for array in inputs[:3]]
    parameters = [operations.parameter(list(array.shape), np.float32) for array in arrays]
    node = operations.scaled_dot_product_attention(*parameters, causal=case.causal)
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(openvino.Model([node], parameters, "attention"), "CPU", settings)
    request = compiled.create_infer_request()
    fed = dict(enumerate(arrays))
    return lambda: request.infer(fed, share_inputs=True, share_outputs=True)[0]


def _prepare_jax(case: Case, inputs: Inputs, threads: int) -> Run:
    jax = import_module("jax")
    q, k, v = (jax.numpy.asarray(_by_token(array)) for array in inputs[:3])
    mask = None if inputs.mask is None else jax.numpy.asarray(inputs.mask)
    window = None if case.window is None else (case.window, 0)
    causal = case.causal or case.window is not None
    attend = jax.jit(
        lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=causal, local_window_size=window
        )
    )  # fmt: skip
    return lambda: attend(q, k, v).block_until_ready()


def _require_plain(case: Case) -> None:
    _require_equal_heads(case)
    if case.window is not None or case.padding is not None:
        raise NotForThisCaseError("timed without masks and windows only")


def _require_equal_heads(case: Case) -> None:
    if case.groups not in (None, case.heads):
        raise NotForThisCaseError("timed with as many key/value heads as query heads only")


def _by_token(array: Array) -> Array:
    return np.ascontiguousarray(array.swapaxes(1, 2))


def _read_by_hand(result: by_hand.ByHand) -> Answer:
    return Answer(np.asarray(result.output), np.asarray(result.statistics["entropy"]))


CONTENDERS: Sequence[Contender] = (
    Contender(PLAIN, (), _prepare_sqrtdk(statistics=False), _read_sqrtdk),
    Contender(WITH_STATISTICS, (), _prepare_sqrtdk(statistics=True), _read_sqrtdk),
    Contender(WITHOUT_MASK, (), _prepare_sqrtdk(statistics=False, mask=False), _read_sqrtdk),
    *TENSOR_CONTENDERS,
    *MODEL_CONTENDERS,
    Contender("onnxruntime", ("onnxruntime", "onnx"), _prepare_onnxruntime, _read_onnxruntime),
    Contender("OpenVINO", ("openvino",), _prepare_openvino, lambda result: Answer(np.asarray(result))),
    Contender(
        "jax", ("jax",), _prepare_jax, lambda result: Answer(np.asarray(result).swapaxes(1, 2)), takes_threads=False
    ),
    Contender("n×n in NumPy", (), _prepare_numpy_matrix, _read_by_hand, takes_threads=False),
    Contender("n×n in torch", ("torch",), _prepare_torch_matrix, _read_by_hand),
    Contender("torch SDPA + second pass", ("torch",), _prepare_two_passes, _read_by_hand),
)

FUSED = (TORCH, "onnxruntime", "OpenVINO", "jax")
MATRICES = ("n×n in torch", "n×n in NumPy")
BY_HAND = ("torch SDPA + second pass", *MATRICES)

"""Who is timed: sqrtdk, the fused attention of other libraries, and statistics computed by hand.

A contender turns the inputs into its own arrays before the clock starts; what is timed is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata

import numpy as np

from benchmarks import by_hand
from benchmarks.cases import Case, Inputs
from benchmarks.contender import (
    PLAIN,
    WITH_STATISTICS,
    WITHOUT_MASK,
    Contender,
    NotForThisCaseError,
    Run,
)
from benchmarks.model import MODEL_CONTENDERS
from benchmarks.peers import PEER_CONTENDERS
from benchmarks.task import Answer
from benchmarks.tensors import TENSOR_CONTENDERS, tensor_of, tensors_of
from benchmarks.training import TRAINING_CONTENDERS
from sqrtdk.attention import Attention, attention
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


def _require_equal_heads(case: Case) -> None:
    if case.groups not in (None, case.heads):
        raise NotForThisCaseError("timed with as many key/value heads as query heads only")


def _read_by_hand(result: by_hand.ByHand) -> Answer:
    return Answer(np.asarray(result.output), np.asarray(result.statistics["entropy"]))


CONTENDERS: Sequence[Contender] = (
    Contender(PLAIN, (), _prepare_sqrtdk(statistics=False), _read_sqrtdk),
    Contender(WITH_STATISTICS, (), _prepare_sqrtdk(statistics=True), _read_sqrtdk),
    Contender(WITHOUT_MASK, (), _prepare_sqrtdk(statistics=False, mask=False), _read_sqrtdk),
    *TENSOR_CONTENDERS,
    *MODEL_CONTENDERS,
    *TRAINING_CONTENDERS,
    *PEER_CONTENDERS,
    Contender("n×n in NumPy", (), _prepare_numpy_matrix, _read_by_hand, takes_threads=False),
    Contender("n×n in torch", ("torch",), _prepare_torch_matrix, _read_by_hand),
    Contender("torch SDPA + second pass", ("torch",), _prepare_two_passes, _read_by_hand),
)

MATRICES = ("n×n in torch", "n×n in NumPy")
BY_HAND = ("torch SDPA + second pass", *MATRICES)

"""Benchmark contenders: each gets its case right, and the suites hold what they promise."""

import numpy as np
import pytest

import sqrtdk
from benchmarks import by_hand, contenders, peers, suites
from benchmarks.cases import Case
from benchmarks.contender import NotForThisCaseError
from benchmarks.contenders import find_contender
from sqrtdk import backends

CASES = [
    Case("test", "full", 2, 2, 9, 8),
    Case("test", "causal", 1, 2, 300, 8, causal=True),
    Case("test", "cross", 1, 2, 9, 8, keys=13),
    Case("test", "padded", 3, 2, 16, 8, padding=0.5),
    Case("test", "causal and padded", 3, 2, 16, 8, padding=0.5, causal=True),
    Case("test", "mask that hides nothing", 1, 2, 16, 8, padding=0.0),
    Case("test", "window", 1, 2, 40, 8, causal=True, window=5),
    Case("test", "grouped", 1, 8, 17, 8, groups=2, causal=True, by_token=True),
    Case("test", "decode", 1, 8, 1, 8, keys=100, sets=3, bound_by_reading=True),
]


def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _reference():
    with backends.use(backends.REFERENCE):
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pairs_are_those_that_the_visibility_shows(case):
    batch, heads, _, queries, keys, _ = case.shape
    visible = case.visible()
    everyone = np.ones((batch, 1, queries, keys), dtype=bool)
    assert case.visible_pairs() == heads * (everyone if visible is None else everyone & visible).sum()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_truth_is_what_the_options_say(case):
    inputs = case.make_inputs(rng())[0]
    truth = case.compute_truth(inputs)
    q, k, v = (array.astype(np.float64) for array in inputs[:3])
    whole = sqrtdk.attention(q, k, v, mask=inputs.mask, **case.options())
    assert {0, case.queries - 1} <= set(truth.rows.tolist())
    np.testing.assert_allclose(truth.output, whole.output[:, :, truth.rows], atol=1e-14)
    np.testing.assert_allclose(truth.entropy, whole.statistics.entropy[:, :, truth.rows], atol=1e-13)


WITHOUT_STATISTICS = ("sqrtdk", "sqrtdk.torch", "torch SDPA")
WITH_STATISTICS = ("sqrtdk with statistics", "sqrtdk.torch with statistics", *contenders.BY_HAND)


@pytest.mark.parametrize("name", [*WITHOUT_STATISTICS, *WITH_STATISTICS])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contenders_compute_the_case(case, name):
    contender = find_contender(name)
    for package in contender.needs:
        pytest.importorskip(package)
    inputs = case.make_inputs(rng())[0]
    truth = case.compute_truth(inputs)
    try:
        answer = contender.read(contender.prepare(case, inputs, 1)())
    except NotForThisCaseError:
        assert name in contenders.BY_HAND
        assert case.groups or case.window or case.padding is not None
        return
    np.testing.assert_allclose(answer.output[:, :, truth.rows], truth.output, atol=2e-6)
    assert (answer.entropy is None) == (name in WITHOUT_STATISTICS)
    if answer.entropy is not None:
        np.testing.assert_allclose(answer.entropy[:, :, truth.rows], truth.entropy, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_statistics_by_hand_are_the_statistics(causal):
    torch = pytest.importorskip("torch")
    case = Case("test", "case", 1, 2, by_hand.BLOCK + 7, 8, causal=causal)
    inputs = case.make_inputs(rng())[0]
    q, k, v = (torch.from_numpy(array) for array in inputs[:3])
    visible = case.visible()
    mask = None if visible is None else torch.from_numpy(visible)
    expected = sqrtdk.attention(*(array.astype(np.float64) for array in inputs[:3]), causal=causal).statistics
    for result in (
        by_hand.attend_in_numpy(inputs, visible),
        by_hand.attend_in_torch(q, k, v, mask),
        by_hand.attend_in_two_passes(q, k, v, causal),
    ):
        for name, values in result.statistics.items():
            np.testing.assert_allclose(np.asarray(values), getattr(expected, name), rtol=1e-4, atol=1e-5, err_msg=name)


class FakeJax:
    """What its documentation says of jax.nn.dot_product_attention: `[B, T, N, H]` in and out."""

    numpy = np

    @property
    def nn(self):
        return self

    @staticmethod
    def jit(function):
        return function

    @staticmethod
    def dot_product_attention(q, k, v, *, is_causal):
        result = sqrtdk.attention(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=is_causal)

        class Result(np.ndarray):
            def block_until_ready(self):
                return self

        return result.output.swapaxes(1, 2).view(Result)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_jax_gets_its_layout(case, monkeypatch):
    monkeypatch.setattr(peers, "import_module", {"jax": FakeJax()}.__getitem__)
    contender, inputs = find_contender("jax"), case.make_inputs(rng())[0]
    if case.groups or case.window or case.padding is not None:
        with pytest.raises(NotForThisCaseError, match="only"):
            contender.prepare(case, inputs, 1)
        return
    truth = case.compute_truth(inputs)
    answer = contender.read(contender.prepare(case, inputs, 1)())
    np.testing.assert_allclose(answer.output[:, :, truth.rows], truth.output, atol=2e-6)


def test_the_suites_hold_what_they_promise():
    cases = {suite.name: suite.cases for suite in suites.SUITES}
    shapes = {case.shape[:2] + case.shape[3:] for case in cases["square"]}
    assert shapes == {(8, 8, 128, 128, 64), (1, 8, 512, 512, 64), (1, 8, 2048, 2048, 64), (1, 4, 4096, 4096, 128)}
    real = cases["real"]
    assert {40, 80, 96} <= {case.d_k for case in real}
    assert {77, 197, 257} <= {case.queries for case in real}
    assert (32, 8) in {(case.heads, case.groups) for case in real}
    assert any(case.by_token for case in real)
    assert any(case.padding for case in real)
    full = [case.queries for case in cases["growth"] if case.window is None]
    assert (min(full), max(full)) == (512, 32768)
    names = [(case.suite, case.name) for suite in suites.SUITES for case in suite.cases]
    assert len(set(names)) == len(names)
    for suite in suites.choose_suites(None, quick=True):
        assert all(case.queries <= 2048 for case in suite.cases if isinstance(case, Case))
        assert suite.cases or suite.name == "memory"

"""Row statistics against arbitrary precision, and their bounds."""

import itertools
import math

import numpy as np
import pytest

from oracle import exact_row
from sqrtdk import attention

pytestmark = pytest.mark.usefixtures("backend")

FIELDS = (
    "logsumexp",
    "entropy",
    "max_weight",
    "tail_weight",
    "sum_p2",
    "sum_p3",
    "jacobian_trace",
    "jacobian_norm",
    "logit_variance",
)


def rows_of(logits, dtype=np.float64, queries=1):
    """Statistics of rows whose logits are given: dₖ = 1, q = 1, scale = 1, so k is the logits.

    More queries, all the same, take the kernel's loop for many rows.
    """
    k = np.atleast_2d(np.asarray(logits, dtype=dtype))[:, :, None]
    q = np.ones((k.shape[0], queries, 1), dtype)
    return attention(q, k, np.zeros((*k.shape[:2], 1), dtype), scale=1.0).statistics


def one_ulp(n, rng):
    return np.where(rng.random(n) < 0.5, 1000.0, np.nextafter(1000.0, 2000.0))


def with_peak(height, at):
    def build(n, rng):
        x = rng.standard_normal(n)
        x[at(n)] += height
        return x

    return build


ADVERSARIES = {
    "normal": lambda n, rng: rng.standard_normal(n),
    "constant": lambda n, rng: np.full(n, 0.1),
    "large mean": lambda n, rng: 1e6 + rng.standard_normal(n),
    "large negative mean": lambda n, rng: -1e8 + rng.standard_normal(n),
    "one ulp": one_ulp,
    "peak 25": with_peak(25.0, lambda n: n // 2),
    "peak 60": with_peak(60.0, lambda n: n - 1),
    "peak 300": with_peak(300.0, lambda n: n // 3),
    "sink at key 0": with_peak(12.0, lambda n: 0),
    "two equal peaks": lambda n, rng: np.where(np.arange(n) < 2, 40.0, rng.standard_normal(n)),
    "ramp": lambda n, rng: np.linspace(-50.0, 50.0, n),
    "steep ramp": lambda n, rng: np.arange(n)[::-1] * 1.0,
    "wild": lambda n, rng: 1e4 * rng.standard_normal(n),
    "huge": lambda n, rng: 1e30 * rng.standard_normal(n),
}


def assert_exact(logits, dtype=np.float64, queries=1):
    """The contract is 1e-6; float64 all the way gives better, and a loss of digits should show."""
    logits = np.asarray(logits).astype(dtype).astype(np.float64)
    rows, exact = rows_of(logits, dtype, queries), exact_row(logits)
    # Numbers below `least` need not be told from 0; for the norm squares of weights come into it. The distance of two
    # float32 logits is rounded itself, by up to 2⁻²⁴ of it, and what hangs on its exponential as much.
    apart = float(np.ptp(np.sort(logits)[-2:])) if len(logits) > 1 else 0.0
    relative, least = (1e-9, 1e-300) if dtype == np.float64 else (1e-6 + 2**-24 * apart, 1e-37)
    rounding = 1e-12 if dtype == np.float64 else 1e-6
    for name in FIELDS:
        result, expected = float(np.asarray(getattr(rows, name))[0, -1]), float(exact[name])
        smallest = math.sqrt(least) if "norm" in name else least
        # A cube carries three times the rounding of its weight.
        assert result == pytest.approx(expected, rel=(2 if "p3" in name else 1) * relative, abs=smallest), name
    # A mean may be zero by cancellation: its rounding is relative to the logits.
    spread = float(np.abs(logits).max())
    mean = pytest.approx(float(exact["logit_mean"]), rel=rounding, abs=0.2 * rounding * spread)
    assert float(rows.logit_mean[0, 0]) == mean
    assert float(rows.max_logit[0, 0]) == float(exact["max_logit"]) == logits[int(rows.max_key[0, 0])]
    assert int(rows.visible_keys[0, 0]) == len(logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", ADVERSARIES)
@pytest.mark.parametrize("n", [1, 2, 3, 17, 127, 1024])
def test_statistics_are_those_of_arbitrary_precision(family, n):
    for dtype, queries in itertools.product((np.float64, np.float32), (1, 9)):
        assert_exact(ADVERSARIES[family](n, np.random.default_rng(n)), dtype, queries)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "n"),
    [
        ("normal", 20011),
        ("one ulp", 20011),
        ("large mean", 20011),
        ("peak 25", 20011),
        ("peak 60", 65537),
        ("one ulp", 131072),
        ("sink at key 0", 32771),
        ("ramp", 32771),
    ],
)
def test_long_rows_are_those_of_arbitrary_precision(family, n):
    assert_exact(ADVERSARIES[family](n, np.random.default_rng(n)))


@pytest.mark.parametrize("height", [1.0, 40.0, 46.0, 100.0, 300.0])
def test_one_hot_rows_keep_their_small_numbers(height):
    """1 − Σp² of a row that is one-hot but for e^−300 is 2e^−300, not 0."""
    rows, exact = rows_of([height, 0.0, 0.0]), exact_row([height, 0.0, 0.0])
    for name in ("jacobian_trace", "jacobian_norm", "entropy", "tail_weight"):
        assert float(np.asarray(getattr(rows, name))[0, 0]) == pytest.approx(float(exact[name]), rel=1e-12), name
        assert float(np.asarray(getattr(rows, name))[0, 0]) > 0


def assert_bounds(rows):
    n = rows.visible_keys.astype(np.float64)
    assert (rows.entropy >= 0).all()
    assert (rows.entropy <= np.log(n)).all()
    assert (rows.sum_p2 >= 1 / n).all()
    assert (rows.sum_p2 <= 1).all()
    assert (rows.logit_variance >= 0).all()
    assert (rows.score_variance >= 0).all()
    assert (rows.max_weight >= 1 / n).all()
    assert (rows.jacobian_trace >= 0).all()
    assert (rows.jacobian_trace <= 1 - 1 / n).all()
    assert (rows.effective_keys <= n).all()
    several = n > 1
    assert (rows.entropy_ratio[several] <= 1).all()


@pytest.mark.parametrize("family", ADVERSARIES)
def test_bounds_hold_to_the_last_bit(family):
    for n in (1, 2, 3, 5, 7, 10, 49, 127, 1000, 4099):
        rng = np.random.default_rng(n)
        assert_bounds(rows_of(np.stack([ADVERSARIES[family](n, rng) for _ in range(20)])))


def test_bounds_hold_for_nearly_uniform_rows():
    rng = np.random.default_rng(0)
    for n in range(1, 300):
        assert_bounds(rows_of(np.array([[1e-3], [1e-8], [1e-15], [0.0]]) * rng.standard_normal((4, n))))


def test_a_row_that_sees_nothing_has_the_documented_values():
    rows = attention(np.ones((1, 2)), np.ones((3, 2)), np.ones((3, 2)), mask=np.zeros(3, bool)).statistics
    zero = ("entropy", "tail_weight", "sum_p2", "sum_p3", "max_weight", "effective_keys", "jacobian_trace")
    assert all(getattr(rows, name)[0] == 0 for name in (*zero, "jacobian_norm", "sink_weight", "visible_keys"))
    assert rows.max_key[0] == -1
    assert all(getattr(rows, name)[0] == -np.inf for name in ("max_logit", "score_max", "logsumexp"))
    missing = ("logit_mean", "logit_variance", "score_variance", "entropy_ratio", "saturation_index")
    assert all(np.isnan(getattr(rows, name)[0]) for name in missing)


def test_one_key_has_no_ratio_and_no_index():
    rows = rows_of([3.0])
    assert np.isnan(rows.entropy_ratio)
    assert np.isnan(rows.saturation_index)
    assert (rows.entropy, rows.sum_p2, rows.logit_variance, rows.jacobian_norm) == (0, 1, 0, 0)


def test_derived_numbers_by_hand():
    rows = rows_of([math.log(6), math.log(3), math.log(1)])  # weights 0.6, 0.3, 0.1
    assert rows.shape == (1, 1)
    assert float(rows.sum_p2[0, 0]) == pytest.approx(0.46)
    assert float(rows.sum_p3[0, 0]) == pytest.approx(0.244)
    assert float(rows.effective_keys[0, 0]) == pytest.approx(1 / 0.46)
    assert float(rows.max_weight[0, 0]) == pytest.approx(0.6)
    assert float(rows.jacobian_trace[0, 0]) == pytest.approx(0.54)
    assert float(rows.jacobian_norm[0, 0]) == pytest.approx(math.sqrt(0.46 - 0.488 + 0.46**2))
    assert float(rows.entropy_ratio[0, 0]) == pytest.approx(0.8979457 / math.log(3), rel=1e-6)
    sigma = np.std([math.log(6), math.log(3), 0.0])
    assert float(rows.saturation_index[0, 0]) == pytest.approx(sigma / math.sqrt(2 * math.log(3)))

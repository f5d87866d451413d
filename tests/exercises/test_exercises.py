"""The exercises' numbers against independent computations, and their refusals."""

import math
import subprocess
import sys

import mpmath
import numpy as np
import pytest

from sqrtdk import attention_gradients, exercises
from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError
from sqrtdk.exercises.estimates import estimate_mean, estimate_quantile, judge_jointly
from sqrtdk.exercises.gaussian_rows import choose_effort, sample_attention, sample_rows
from sqrtdk.exercises.variance import estimate_std, sample_dot_products

ALL = (
    exercises.variance,
    exercises.saturation,
    exercises.temperature,
    exercises.gradients,
    exercises.explain,
    exercises.concentration,
)


def rows_of(record, table, **wanted):
    return [row for row in record.tables[table] if all(row[key] == value for key, value in wanted.items())]


def row_of(record, table, **wanted):
    (row,) = rows_of(record, table, **wanted)
    return row


# Concentration


@pytest.mark.slow
def test_concentration_measures_the_rows_of_explain():
    swept = exercises.concentration(d_ks=(64, 16), ns=(32,), seed=3)
    alone = exercises.explain(d_k=16, n=32, seed=3)
    for policy in ("none", "sqrt", "inverse"):
        row = row_of(swept, "concentration", d_k=16, scale=policy)
        for quantity in ("effective_keys", "sum_p2", "entropy_ratio", "max_weight"):
            measured = row_of(alone, "explain", scale=policy, quantity=quantity)
            values = row[quantity], row[f"{quantity}_low"], row[f"{quantity}_high"]
            assert values == (measured["measured"], measured["low"], measured["high"])
    (crossover,) = swept.tables["crossover"]
    assert crossover["half_from"] == 64
    assert crossover["concentrated_from"] == 16
    assert "Σp² ≥ ½ on average from dₖ = 16 on" in swept.headline


def test_the_crossing_does_not_depend_on_the_sizes_measured():
    """The measured sizes lie far beyond it, or none reaches it; two keys have no crossing."""
    far, none, two = (
        exercises.concentration(d_ks=d_ks, ns=(n,), budget=1) for d_ks, n in (((1, 256), 64), ((1, 2), 64), ((1, 4), 2))
    )
    assert [record.tables["crossover"][0]["half_from"] for record in (far, none, two)] == [256, None, 1]
    assert "from dₖ = 21 on" in far.headline
    assert "from dₖ = 21 on" in none.headline
    assert two.headline.startswith("Two keys have Σp² ≥ ½ at every dₖ and every scale. At dₖ = 4 ")


# Sampling


def test_student_interval_against_mpmath():
    half = np.random.default_rng(0).standard_normal(4)
    values = np.concatenate([half, -half])  # no skewness: what is left is Student's t
    # P(|T| < t) = 0.95 for 7 degrees of freedom, from the incomplete beta function.
    quantile = mpmath.findroot(lambda t: mpmath.betainc(3.5, 0.5, 0, 7 / (7 + t * t), regularized=True) - 0.05, 2.3)
    half = float(quantile) * values.std(ddof=1) / math.sqrt(8)
    result = estimate_mean(values)
    assert result.high - result.value == pytest.approx(half, rel=1e-3)
    assert result.value - result.low == pytest.approx(half, rel=1e-3)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_interval_of_skewed_values_against_hall(sign):
    """The end in the tail solves Hall's equation, with moments by mpmath; the other one is Student's."""
    values = sign * np.random.default_rng(1).exponential(size=40)
    with mpmath.workdps(30):
        x = [mpmath.mpf(float(value)) for value in values]
        mean = mpmath.fsum(x) / 40
        second, third = (mpmath.fsum((value - mean) ** power for value in x) / 40 for power in (2, 3))
        gamma, error = third / second**1.5, mpmath.sqrt(second / 39)
        t = mpmath.findroot(lambda t: mpmath.betainc(19.5, 0.5, 0, 39 / (39 + t * t), regularized=True) - 0.05, 2)
        a = gamma / (3 * mpmath.sqrt(40))
        longer = mpmath.findroot(lambda y: y + a * y**2 + a**2 * y**3 / 3 + a / 2 + sign * t, -sign * t)
    result = estimate_mean(values)
    tail, other = (result.high, result.low) if sign > 0 else (result.low, result.high)
    assert tail - result.value == pytest.approx(float(-longer * error), rel=1e-3)
    assert result.value - other == pytest.approx(sign * float(t * error), rel=1e-3)
    assert abs(longer) > 1.1 * t


def test_quantile_interval_allows_for_dependent_rows_of_a_sample():
    """Rows that are equal within a sample count once: 64 samples of 16 equal rows give the interval of 64 rows."""
    values = np.random.default_rng(0).standard_normal((64, 1))
    alone, repeated = (estimate_quantile(rows, 0.3) for rows in (values, np.repeat(values, 16, axis=1)))
    assert repeated.high - repeated.low == pytest.approx(alone.high - alone.low, rel=0.2)
    many = estimate_quantile(np.random.default_rng(0).standard_normal((64, 16)), 0.3)
    assert many.high - many.low < 0.5 * (repeated.high - repeated.low)


def test_a_joint_distance_counts_equal_measurements_once():
    """Nine copies of one measurement have its own probability; nine others have a larger one."""
    rng = np.random.default_rng(0)
    one = rng.standard_normal((64, 1))
    one += 2.0 / 8.0 * one.std(ddof=1) - one.mean()  # two standard errors from 0: 5 % of measurements are that far off
    alone, copied = (judge_jointly(np.repeat(one, copies, axis=1), np.zeros(copies)) for copies in (1, 9))
    assert alone.standard_errors == pytest.approx(2.0, abs=0.1)
    assert copied.standard_errors == alone.standard_errors
    assert alone.probability == pytest.approx(0.05, abs=0.01)
    assert copied.probability == pytest.approx(alone.probability, abs=0.01)
    others = rng.standard_normal((64, 8))
    spread = judge_jointly(np.hstack([one, others - others.mean(axis=0)]), np.zeros(9))
    assert spread.probability == pytest.approx(1 - 0.95**9, abs=0.05)


def test_measurements_without_spread_are_right_or_wrong():
    assert judge_jointly(np.ones((8, 2)), [1.0, 1.0]) == (0.0, 1.0)
    assert judge_jointly(np.ones((8, 2)), [1.0, 2.0]) == (math.inf, 0.0)


@pytest.mark.parametrize(("d_k", "n"), [(1, 2), (4, 1024), (64, 16), (512, 1024), (4, 10**6), (4096, 65536)])
@pytest.mark.parametrize("budget", [1, 2**19, 2**30])
def test_effort_stays_within_its_bounds(d_k, n, budget):
    samples, queries = choose_effort(d_k, n, budget)
    assert 16 <= samples <= 256
    assert 512 <= samples * queries <= 4096
    assert samples * queries * n <= max(2**24, 512 * n)


def test_sampled_rows_against_a_direct_computation():
    (sampled,) = sample_rows([0.3], d_k=5, n=7, samples=8, queries=3, seed=4)
    rng = np.random.default_rng([4, 5, 7])
    k, v = rng.standard_normal((2, 7, 5))
    q, grad_output = rng.standard_normal((2, 3, 5))
    logits = 0.3 * q @ k.T
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(sampled.sum_p2[0], (p * p).sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(sampled.logit_square[0], (logits**2).mean(axis=1), rtol=1e-12)
    for row in range(3):
        jacobian = np.diag(p[row]) - np.outer(p[row], p[row])
        grad_q = 0.3 * k.T @ jacobian @ v @ grad_output[row]
        assert sampled.grad_q[0, row] == pytest.approx(np.linalg.norm(grad_q), rel=1e-10)
        assert sampled.jacobian_norm[0, row] == pytest.approx(np.linalg.norm(jacobian), rel=1e-10)


# Exercise 1


def test_variance_predicts_the_formula_under_each_scale():
    record = exercises.variance(d_ks=(4, 64, 512), samples=2000, seed=0)
    for d_k in (4, 64, 512):
        none, sqrt, inverse = rows_of(record, "variance", d_k=d_k)
        assert none["predicted"] == pytest.approx(math.sqrt(d_k), rel=1e-12)
        assert sqrt["predicted"] == pytest.approx(1.0, rel=1e-12)
        assert inverse["predicted"] == pytest.approx(1 / math.sqrt(d_k), rel=1e-12)
        assert sqrt["measured"] == pytest.approx(none["measured"] / math.sqrt(d_k), rel=1e-12)
        assert inverse["measured"] == pytest.approx(none["measured"] / d_k, rel=1e-12)


def test_variance_intervals_cover_the_truth_as_often_as_they_say():
    # 60 seeds × 2 sizes: 114 of 120 expected; fewer than 105 has probability 1e-3 for 95% intervals.
    inside = [
        row["inside"]
        for seed in range(60)
        for row in rows_of(exercises.variance(d_ks=(4, 64), samples=1000, seed=seed), "variance", scale="none")
    ]
    assert 105 <= sum(inside) < 120


def test_variance_of_one_size_does_not_depend_on_the_others():
    alone = exercises.variance(d_ks=(64,), samples=1000, seed=3)
    among = exercises.variance(d_ks=(4, 64), samples=1000, seed=3)
    assert rows_of(alone, "variance", d_k=64) == rows_of(among, "variance", d_k=64)


def test_variance_blocks_use_every_sample(monkeypatch):
    # The name in the package is the function.
    monkeypatch.setattr(sys.modules["sqrtdk.exercises.variance"], "_BLOCK", 64 * 7)
    dots = sample_dot_products(64, 100, 0)
    assert dots.shape == (100,)
    assert len(np.unique(dots)) == 100


def test_standard_deviation_interval_uses_the_fourth_moment():
    # Var(s²) is larger for heavy tails; a Gaussian formula would give the same relative width for both.
    rng = np.random.default_rng(0)
    light, heavy = rng.uniform(-1, 1, 5000), rng.standard_t(5, 5000)
    width = [math.log(result.high / result.low) for result in (estimate_std(light), estimate_std(heavy))]
    assert width[0] < 0.75 * width[1]


def test_variance_densities_integrate_to_what_they_show():
    for curve in exercises.variance(d_ks=(64,), samples=4000, seed=0).curves["densities"]:
        step = curve["x"][1] - curve["x"][0]
        assert sum(curve["density"]) * step == pytest.approx(0.99, abs=0.002)


# Exercise 2


def solve_trace(zeros, share):
    def trace(x):
        p = mpmath.e**x / (mpmath.e**x + zeros)
        rest = (1 - p) / zeros
        return 1 - p**2 - zeros * rest**2

    return mpmath.findroot(lambda x: trace(x) - share * trace(mpmath.mpf(0)), 5)


@pytest.mark.parametrize(("zeros", "share"), [(3, 0.05), (1, 0.05), (3, 0.01), (99, 0.05)])
def test_saturation_points_against_mpmath(zeros, share):
    with mpmath.workdps(30):
        trace = float(solve_trace(zeros, share))
        weight = float(mpmath.log(zeros * (1 - share) / share))
        slope = mpmath.findroot(lambda p: p * (1 - p) - mpmath.mpf(share) / 4, 1 - share / 4)
        slope = float(mpmath.log(zeros * slope / (1 - slope)))

        def entropy(x):
            p = mpmath.e**x / (mpmath.e**x + zeros)
            rest = (1 - p) / zeros
            return -p * mpmath.log(p) - zeros * rest * mpmath.log(rest)

        ratio = float(mpmath.findroot(lambda x: entropy(x) - share * mpmath.log(zeros + 1), trace + 1))
    result = exercises.saturation(zeros=zeros, share=share).tables["points"]
    assert [row["x"] for row in result[:4]] == pytest.approx([trace, weight, ratio, slope], rel=1e-9)
    assert [row["main"] for row in result] == [True, False, False, False, False]


def test_float32_saturation_point_is_the_first():
    x = exercises.saturation().tables["points"][-1]["x"]

    def largest_weight(x):
        row = np.exp(np.array([0.0, -x, -x, -x], dtype=np.float32))
        return row[0] / row.sum()

    assert largest_weight(x) == 1.0
    assert largest_weight(x - 1e-5) < 1.0


def test_saturation_sweep_is_the_softmax():
    record = exercises.saturation()
    assert [row["x"] for row in record.tables["sweep"]] == list(range(11))
    for row in record.tables["sweep"]:
        e = np.exp([row["x"], 0, 0, 0])
        p = e / e.sum()
        assert row["first_weight"] == pytest.approx(p[0], rel=1e-12)
        assert row["other_weight"] == pytest.approx(p[1], rel=1e-12)
        assert row["jacobian_trace"] == pytest.approx(1 - (p * p).sum(), rel=1e-9)
        assert row["entropy_ratio"] == pytest.approx(-(p * np.log(p)).sum() / np.log(4), rel=1e-9)
    assert record.curves["x"][-1] == 10.0
    assert len(record.curves["x"]) == 101


def test_saturation_trace_keeps_its_accuracy_far_out():
    far = exercises.saturation(largest=40.0, points=2).curves["jacobian_trace"][-1]
    assert far == pytest.approx(6 * math.exp(-40), rel=1e-12)


@pytest.mark.parametrize("share", [1e-12, 3e-7, 0.05, 0.5, 0.7])
def test_no_saturation_point_lies_below_its_own_threshold(share):
    trace, weight, _, _, single = exercises.saturation(share=share).tables["points"]
    assert trace["jacobian_trace"] <= share * 0.75
    assert weight["first_weight"] >= 1.0 - share
    assert weight["x"] == pytest.approx(max(0.0, math.log(3) + math.log1p(-share) - math.log(share)), rel=1e-12)
    assert "100%" not in weight["definition"]
    said = exercises.saturation(share=share).reading
    assert "1.0000" not in said[0]
    assert ("already from" in said[2]) == (single["x"] < trace["x"])
    assert ("only from" in said[2]) == (share >= 0.05)


def test_saturation_says_whether_the_point_lies_in_the_sweep():
    assert "within the sweep" in exercises.saturation().reading[0]
    assert "beyond the sweep" in exercises.saturation(largest=2.0).reading[0]


# Exercise 4


def test_temperatures_are_sharper_below_and_softer_above():
    sharp, default, soft = exercises.temperature(seed=0).tables["temperature"]
    assert [row["tau"] for row in (sharp, default, soft)] == [4.0, 8.0, 16.0]
    assert sharp["entropy_ratio_high"] < default["entropy_ratio_low"]
    assert default["entropy_ratio_high"] < soft["entropy_ratio_low"]
    assert sharp["max_weight"] > default["max_weight"] > soft["max_weight"]
    assert sharp["jacobian_trace"] < default["jacobian_trace"] < soft["jacobian_trace"]
    # Pairs see the same samples, so the spread of the logits is exactly inverse to the temperature.
    assert sharp["logit_std"] == pytest.approx(2 * default["logit_std"], rel=1e-12)
    assert soft["saturation_index"] == pytest.approx(default["saturation_index"] / 2, rel=1e-12)


def test_temperature_patterns_are_the_weights_of_one_sample():
    record = exercises.temperature(d_k=16, n=6, queries=3, samples=8, relatives=(2.0, 0.5), seed=1)
    rng = np.random.default_rng([1, 16, 6])
    k = rng.standard_normal((2, 6, 16))[0]
    q = rng.standard_normal((2, 3, 16))[0]
    assert [pattern["relative"] for pattern in record.curves["patterns"]] == [0.5, 2.0]
    for pattern in record.curves["patterns"]:
        e = np.exp(q @ k.T / (pattern["relative"] * 4))
        np.testing.assert_allclose(pattern["weights"], e / e.sum(axis=1, keepdims=True), rtol=1e-12)


# Exercise 5


def test_jacobians_of_the_sources():
    record = exercises.gradients(d_ks=(4,), ns=(4,), budget=1)
    assert row_of(record, "jacobians", name="mild")["diagonal"] == "0.21, 0.21, 0.16, 0.16"
    uniform, one_hot = row_of(record, "jacobians", name="uniform"), row_of(record, "jacobians", name="one-hot")
    assert uniform["jacobian_trace"] == pytest.approx(0.75)
    assert uniform["jacobian_norm"] == pytest.approx(math.sqrt(3) / 4)
    assert one_hot["largest_entry"] < 1e-5
    for jacobian in record.curves["jacobians"]:
        np.testing.assert_allclose(np.sum(jacobian["matrix"], axis=0), 0, atol=1e-15)


@pytest.mark.slow
def test_gradients_agree_with_the_measured_claim():
    record = exercises.gradients(d_ks=(64, 512), ns=(16, 1024), seed=0)
    wide = {name: row_of(record, "vanish", d_k=64, n=1024, scale=name) for name in ("none", "sqrt", "inverse")}
    for name, claimed in (("none", 13.7), ("sqrt", 0.40), ("inverse", 0.031)):
        # Half the width again beyond the 95% interval: four standard errors.
        half = wide[name]["grad_q_high"] - wide[name]["grad_q_mean"]
        assert abs(wide[name]["grad_q_mean"] - claimed) < 2 * half + 0.005 * claimed
    few = {name: row_of(record, "vanish", d_k=512, n=16, scale=name) for name in ("none", "sqrt", "inverse")}
    assert few["none"]["rows"] == 4096
    assert 0.03 < few["none"]["grad_q_median"] < 0.3
    assert few["sqrt"]["grad_q_median"] == pytest.approx(6.1, rel=0.05)
    assert few["inverse"]["grad_q_median"] == pytest.approx(0.24, rel=0.05)
    assert 1e-11 < few["none"]["grad_q_p5"] < 1e-9
    assert few["sqrt"]["grad_q_p5"] == pytest.approx(3.4, rel=0.1)
    assert few["inverse"]["grad_q_p5"] == pytest.approx(0.17, rel=0.1)
    assert few["none"]["top_share"] > 2 * few["sqrt"]["top_share"]
    assert few["none"]["jacobian_trace_mean"] < few["sqrt"]["jacobian_trace_mean"]


def test_gradient_summary_is_ordered():
    for row in exercises.gradients(d_ks=(16,), ns=(8,), budget=4096, seed=2).tables["vanish"]:
        assert row["grad_q_low"] < row["grad_q_mean"] < row["grad_q_high"]
        assert row["grad_q_p5_low"] <= row["grad_q_p5"] <= row["grad_q_p5_high"] < row["grad_q_median"]
        assert 0.05 < row["top_share"] <= 1.0


def test_gradients_count_sizes_from_their_numbers():
    record = exercises.gradients(d_ks=(64,), ns=(16,), budget=2**14, seed=0)
    none, sqrt, _ = record.tables["vanish"]
    expected = int(none["grad_q_mean"] > sqrt["grad_q_mean"])
    assert f"larger without scaling than with 1/√dₖ in {expected} of 1 sizes" in record.reading[2]


# All


@pytest.mark.slow
@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.__name__)
def test_default_exercises_have_full_sentences(exercise):
    record = exercise()
    assert record.kind == exercise.__name__
    assert len(record.reading) >= 3
    assert all(sentence.endswith(".") for sentence in record.reading)
    assert record.as_json()["spec_hash"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda seed: exercises.variance(d_ks=(8,), samples=1000, seed=seed),
        lambda seed: exercises.temperature(samples=8, queries=2, n=4, seed=seed),
        lambda seed: exercises.gradients(d_ks=(4,), ns=(4,), budget=1, seed=seed),
        lambda seed: exercises.explain(d_k=4, n=8, samples=8, queries=2, seed=seed),
    ],
)
def test_equal_seeds_give_equal_records_and_others_do_not(call):
    assert call(1).as_json() == call(1).as_json()
    first, second = call(1), call(2)
    assert first.tables != second.tables


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: exercises.variance(d_ks=()), "d_ks"),
        (lambda: exercises.variance(d_ks=(4, 0)), "d_ks"),
        (lambda: exercises.variance(d_ks=(4, 4)), "d_ks"),
        (lambda: exercises.variance(samples=999), "samples must be at least 1000"),
        (lambda: exercises.variance(seed=-1), "seed"),
        (lambda: exercises.saturation(largest=0.0), "largest"),
        (lambda: exercises.saturation(largest=math.nan), "largest"),
        (lambda: exercises.saturation(points=1), "points"),
        (lambda: exercises.saturation(zeros=0), "zeros"),
        (lambda: exercises.saturation(share=1.0), "share"),
        (lambda: exercises.temperature(relatives=()), "relatives"),
        (lambda: exercises.temperature(relatives=(0.0,)), "relatives"),
        (lambda: exercises.temperature(relatives=(1.0, 1.0)), "relatives"),
        (lambda: exercises.temperature(n=1), "n must"),
        (lambda: exercises.temperature(samples=3), "samples"),
        (lambda: exercises.temperature(queries=0), "queries"),
        (lambda: exercises.gradients(ns=(1,)), "ns"),
        (lambda: exercises.gradients(budget=0), "budget"),
        (lambda: exercises.explain(d_k=0), "d_k"),
        (lambda: exercises.explain(n=1), "n must"),
        (lambda: exercises.explain(n=2**30), "n·d_k"),
    ],
)
def test_bad_values_are_refused_by_name(call, argument):
    with pytest.raises(InvalidValueError, match=argument) as caught:
        call()
    assert isinstance(caught.value, SqrtdkError)
    assert "got" in str(caught.value)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: exercises.variance(d_ks=64), "d_ks"),
        (lambda: exercises.variance(d_ks=("64",)), "d_ks"),
        (lambda: exercises.variance(samples=1e4), "samples"),
        (lambda: exercises.temperature(relatives="1"), "relatives"),
        (lambda: exercises.explain(d_k=True), "d_k"),
    ],
)
def test_bad_types_are_refused_by_name(call, argument):
    with pytest.raises(InvalidTypeError, match=argument):
        call()


@pytest.mark.slow
def test_exercises_load_numpy_alone():
    code = (
        "import sys, sqrtdk.exercises;"
        "print([name for name in ('torch', 'plotly', 'matplotlib', 'rich', 'typer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_key_gradients_are_per_query():
    q, k, v, grad_output = next(sample_attention(d_k=8, n=5, queries=7, seed=3))
    slopes = attention_gradients(q, k, v, grad_output, scale=0.5)
    (rows,) = sample_rows([0.5], d_k=8, n=5, samples=1, queries=7, seed=3)
    np.testing.assert_allclose(rows.grad_k, np.full((1, 7), np.linalg.norm(slopes.key) / 7**0.5))
    np.testing.assert_allclose(rows.grad_q[0], np.linalg.norm(slopes.query, axis=-1))

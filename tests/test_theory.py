"""The formulas behind the scale, each against sampling with intervals, quadrature, finite differences or mpmath."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqrtdk import SqrtdkError, attention, attention_gradients, softmax, theory


def assert_covers(sample, expected):
    """The mean of a sample lies within five of its standard errors of the expected value."""
    error = sample.std(ddof=1) / math.sqrt(len(sample))
    assert abs(sample.mean() - expected) < 5 * error, (sample.mean(), expected, error)
    return error


CORRELATED = [
    {},
    {"mean_q": 1.0},
    {"mean_q": 0.5, "mean_k": -2.0, "std_q": 3.0, "std_k": 0.5},
    {"correlation": 1.0},
    {"correlation": -0.7, "std_q": 2.0},
    {"mean_q": 1.0, "mean_k": -0.5, "std_q": 2.0, "std_k": 0.7, "correlation": 0.6},
]


@pytest.mark.parametrize("d_k", [1, 16])
@pytest.mark.parametrize("moments", CORRELATED, ids=str)
def test_mean_and_variance_of_dot_products_by_sampling(moments, d_k):
    rng = np.random.default_rng(7)
    full = {"mean_q": 0.0, "mean_k": 0.0, "std_q": 1.0, "std_k": 1.0, "correlation": 0.0} | moments
    one, other = rng.standard_normal((2, 60_000, d_k))
    r = full["correlation"]
    q = full["mean_q"] + full["std_q"] * one
    k = full["mean_k"] + full["std_k"] * (r * one + math.sqrt(1 - r * r) * other)
    dots = (q * k).sum(axis=1)
    mean, variance = theory.dot_product_mean(d_k, **moments), theory.dot_product_variance(d_k, **moments)
    assert_covers(dots, mean)
    assert assert_covers((dots - mean) ** 2, variance) < 0.1 * variance


@pytest.mark.parametrize("entries", ["signs", "uniform", "exponential"])
def test_the_variance_formula_needs_no_normal_distribution(entries):
    rng = np.random.default_rng(8)
    draw = {
        "signs": lambda size: rng.choice([-1.0, 1.0], size),
        "uniform": lambda size: rng.uniform(-math.sqrt(3), math.sqrt(3), size),
        "exponential": lambda size: rng.exponential(size=size) - 1.0,
    }[entries]
    dots = ((draw((50_000, 8)) + 0.5) * draw((50_000, 8))).sum(axis=1)
    assert_covers((dots - dots.mean()) ** 2, theory.dot_product_variance(8, mean_q=0.5))


def test_a_row_does_not_see_the_mean_of_its_keys():
    """Over pairs Var(q·k) is 128 at μ_k = 1, dₖ = 64; over the keys of one row it is 64."""
    rng = np.random.default_rng(12)
    q, k = rng.standard_normal((4000, 64)), 1.0 + rng.standard_normal((500, 64))
    within = (q @ k.T).var(axis=1, ddof=1)
    # One set of keys is shared by all rows: its own scatter is 64·√(2/(64·500)) and more than that of the queries.
    assert within.mean() == pytest.approx(theory.row_variance(64), rel=0.05)
    pairs = (rng.standard_normal((40_000, 64)) * (1.0 + rng.standard_normal((40_000, 64)))).sum(axis=1)
    assert_covers((pairs - pairs.mean()) ** 2, theory.dot_product_variance(64, mean_k=1.0))


@pytest.mark.parametrize(
    "moments", [{"mean_q": 2.0, "std_q": 0.5}, {"std_k": 3.0}, {"key_correlation": 0.9}, {}], ids=str
)
def test_variance_within_rows_by_sampling(moments):
    rng = np.random.default_rng(13)
    full = {"mean_q": 0.0, "std_q": 1.0, "std_k": 1.0, "key_correlation": 0.0} | moments
    r = full["key_correlation"]
    q = full["mean_q"] + full["std_q"] * rng.standard_normal((20_000, 8, 1))
    shared, own = rng.standard_normal((20_000, 8, 1)), rng.standard_normal((20_000, 8, 6))
    k = full["std_k"] * (math.sqrt(r) * shared + math.sqrt(1 - r) * own)
    assert_covers((q * k).sum(axis=1).var(axis=1, ddof=1), theory.row_variance(8, **moments))


def test_variance_of_keys_that_are_not_isotropic():
    """A spectrum λᵢ = i^(−1.5) on q and on k, turned by one rotation: Var(q·k) = tr(Σ_qΣ_k) = 13.8 times isotropic."""
    rng = np.random.default_rng(14)
    turn, _ = np.linalg.qr(rng.standard_normal((64, 64)))
    spectrum = np.arange(1, 65) ** -1.5
    spectrum *= 64 / spectrum.sum()
    q, k = ((rng.standard_normal((60_000, 64)) * np.sqrt(spectrum)) @ turn for _ in range(2))
    covariance = (turn.T * spectrum) @ turn
    a = theory.alignment(covariance, covariance)
    assert a == pytest.approx(64 * (spectrum**2).sum() / spectrum.sum() ** 2)
    assert a == pytest.approx(13.8, abs=0.05)
    assert theory.alignment(np.eye(64), covariance) == pytest.approx(1.0)
    assert_covers((q * k).sum(axis=1) ** 2, theory.row_variance(64, alignment=a))


def test_correlated_keys_concentrate_as_the_variance_within_a_row_says():
    """r = 0.9, dₖ = 64, n = 1024: Σp² follows σ√(1 − r); without it one would expect 0.6."""
    rng = np.random.default_rng(15)
    measured = []
    for _ in range(60):
        q, shared, own = rng.standard_normal((16, 64)), rng.standard_normal((1, 64)), rng.standard_normal((1024, 64))
        k = math.sqrt(0.9) * shared + math.sqrt(0.1) * own
        measured.append(attention(q, k, k[:, :0], scale=1.0).statistics.sum_p2.mean())
    assert_covers(np.array(measured), theory.expected_rows(math.sqrt(0.1), 64, 1024).sum_p2)
    assert theory.expected_rows(1.0, 64, 1024).sum_p2 > 0.55


@pytest.mark.parametrize(("entries", "of_pairs"), [("signs", 0.0), ("uniform", 0.8), ("normal", 2.0), ("laplace", 5.0)])
def test_a_vector_with_itself_has_the_variance_of_its_fourth_moment(entries, of_pairs):
    """Var(q·q)/dₖ = E q⁴ − 1: the formula with r² is for Gaussian pairs alone."""
    rng = np.random.default_rng(16)
    draw = {
        "signs": lambda size: rng.choice([-1.0, 1.0], size),
        "uniform": lambda size: rng.uniform(-math.sqrt(3), math.sqrt(3), size),
        "normal": rng.standard_normal,
        "laplace": lambda size: rng.laplace(scale=math.sqrt(0.5), size=size),
    }[entries]
    squares = (draw((200_000, 4)) ** 2).sum(axis=1)
    if of_pairs:
        assert_covers((squares - 4.0) ** 2, 4 * of_pairs)
    else:
        assert np.ptp(squares) == pytest.approx(0.0, abs=1e-12)
    assert (theory.dot_product_variance(4, correlation=1.0) == 4 * of_pairs) == (entries == "normal")


def test_variance_by_hand():
    assert theory.dot_product_variance(64) == 64
    assert math.sqrt(theory.dot_product_variance(512)) == pytest.approx(22.627417)
    assert theory.dot_product_variance(64, correlation=1.0) == 128
    assert theory.dot_product_mean(64, mean_q=0.5, mean_k=-2.0) == -64
    assert theory.dot_product_variance(0) == theory.dot_product_mean(0, correlation=1.0) == 0
    assert theory.divided_variance(np.var([2, 4, 6]), 2.0) == pytest.approx(np.var([1, 2, 3]))


@pytest.mark.parametrize("d_k", [0, 1, 3, 7])
def test_terms_of_the_square_are_counted_right(d_k):
    pairs = list(itertools.product(range(d_k), repeat=2))
    squares = sum(i == j for i, j in pairs)
    assert theory.squared_sum_terms(d_k) == (len(pairs), squares, len(pairs) - squares)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 10.0])
def test_the_jacobian_is_the_derivative_of_softmax(sharpness):
    x = sharpness * np.random.default_rng(0).standard_normal((2, 6))
    jacobian = theory.softmax_jacobian(softmax(x))
    for j in range(6):
        step = np.zeros(6)
        step[j] = 1e-6
        slope = (softmax(x + step) - softmax(x - step)) / 2e-6
        np.testing.assert_allclose(jacobian[..., j], slope, atol=1e-9)


def test_the_sizes_of_the_jacobian():
    p = softmax(2 * np.random.default_rng(1).standard_normal((5, 7)))
    jacobian, size = theory.softmax_jacobian(p), theory.jacobian_size(p)
    np.testing.assert_allclose(size.trace, 1 - (p**2).sum(axis=-1), rtol=1e-13)
    p2, p3 = (p**2).sum(axis=-1), (p**3).sum(axis=-1)
    np.testing.assert_allclose(size.frobenius, np.sqrt(p2 - 2 * p3 + p2**2), rtol=1e-12)
    np.testing.assert_allclose(size.spectral, np.linalg.svd(jacobian, compute_uv=False)[..., 0], rtol=1e-12)
    assert (size.spectral <= 0.5).all()
    np.testing.assert_allclose(np.diag(theory.softmax_jacobian([0.3, 0.3, 0.2, 0.2])), [0.21, 0.21, 0.16, 0.16])
    assert theory.jacobian_size([1.0, 0.0, 0.0]) == (0, 0, 0)
    uniform = theory.jacobian_size(np.full(8, 1 / 8))
    assert float(uniform.trace) == pytest.approx(7 / 8)
    rows = attention(np.ones((1, 1)), np.log(p[0])[:, None], np.zeros((7, 1)), scale=1.0).statistics
    assert float(rows.jacobian_norm[0]) == pytest.approx(float(size.frobenius[0]), rel=1e-12)


def test_the_saturation_index():
    assert float(theory.saturation_index(math.sqrt(2 * math.log(50)), 50)) == pytest.approx(1.0)
    assert np.isnan(theory.saturation_index(1.0, [0, 1])).all()
    assert theory.saturation_index([1.0, 2.0], 100).shape == (2,)
    begins, nearly = theory.crossover_without_scaling(1024)
    assert float(theory.saturation_index(math.sqrt(begins), 1024)) == pytest.approx(1.0)
    assert float(theory.saturation_index(math.sqrt(nearly), 1024)) == pytest.approx(2.0)


@pytest.mark.parametrize("x", [1e-8, 1e-3, 0.1, 0.5, 1.0, 1.4616321449683622, 2.0, 9.99, 10.0, 123.4, 1e6])
def test_digamma_is_mpmaths(x):
    expected = float(mpmath.digamma(x))
    assert abs(theory.digamma(x) - expected) <= 1e-13 * max(1.0, abs(expected))


def two_keys(sigma):
    """E H and E Σp² for two keys: softmax of a difference that is N(0, 2σ²), by a fine sum."""
    z = np.linspace(-12, 12, 400_001)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    x = math.sqrt(2) * sigma * np.abs(z)
    small = np.exp(-x) / (1 + np.exp(-x))
    h = np.log1p(np.exp(-x)) + x * small
    return float(density @ h), float(density @ (small**2 + (1 - small) ** 2))


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0, 3.0, 10.0, 40.0])
def test_expected_softmax_of_two_keys_by_quadrature(sigma):
    result = theory.expected_softmax(sigma, 2)
    expected = two_keys(sigma)
    assert result.entropy == pytest.approx(expected[0], abs=1e-6)
    assert result.sum_p2 == pytest.approx(expected[1], abs=1e-6)
    assert result.entropy_ratio == pytest.approx(result.entropy / math.log(2))


@pytest.mark.parametrize(
    ("sigma", "n", "rows"), [(1.0, 64, 4000), (3.0, 64, 8000), (8.0, 1024, 2000), (22.6, 17, 20000)]
)
def test_expected_softmax_by_sampling(sigma, n, rows):
    logits = sigma * np.random.default_rng(9).standard_normal((rows, n))
    statistics = attention(np.ones((rows, 1, 1)), logits[..., None], np.zeros((rows, n, 0)), scale=1.0).statistics
    result = theory.expected_softmax(sigma, n)
    assert_covers(statistics.entropy.ravel(), result.entropy)
    assert assert_covers(statistics.sum_p2.ravel(), result.sum_p2) < 0.01


def test_expected_softmax_without_spread_is_uniform():
    for n in (2, 1000, 10**6):
        result = theory.expected_softmax(0.0, n)
        assert result.entropy == pytest.approx(math.log(n), abs=1e-6)
        assert result.sum_p2 == pytest.approx(1 / n, rel=1e-6)


def test_condensation_says_what_the_design_says():
    assert theory.condensation(1.0, 1024).entropy_ratio == pytest.approx(0.928, abs=5e-4)
    assert theory.condensation(math.sqrt(8), 1024).entropy_ratio == pytest.approx(0.42, abs=5e-3)
    for rho, sum_p2 in ((2.14, 0.53), (6.07, 0.835)):
        result = theory.condensation(rho * math.sqrt(2 * math.log(1024)), 1024)
        assert result.saturation_index == pytest.approx(rho)
        assert result.regime == "condensed"
        assert result.sum_p2 == pytest.approx(sum_p2, abs=5e-3)
        assert result.entropy == pytest.approx(float(mpmath.digamma(1) - mpmath.digamma(1 - 1 / rho)))
    assert theory.condensation(0.5, 64).regime == "spread"


def test_condensation_is_trusted_where_it_is_good():
    """Within 0.03 of the exact entropy ratio up to ρ = ½, within 0.12 of the exact Σp² from ρ = 2, for n ≥ 64."""
    worst = {"spread": 0.0, "condensed": 0.0}
    for n, rho in itertools.product((64, 1024, 65536), (0.05, 0.25, 0.4999, 0.75, 1.5, 2.0001, 3.0, 5.0)):
        sigma = rho * math.sqrt(2 * math.log(n))
        limit, exact = theory.condensation(sigma, n), theory.expected_softmax(sigma, n)
        assert limit.trusted == (rho < 0.5 or rho > 2)
        if rho < 0.5:
            worst["spread"] = max(worst["spread"], abs(limit.entropy_ratio - exact.entropy_ratio))
        elif rho > 2:
            worst["condensed"] = max(worst["condensed"], abs(limit.sum_p2 - exact.sum_p2))
    assert worst["spread"] < 0.03
    assert worst["condensed"] < 0.12
    assert worst["condensed"] > 0.01  # the stated bound is of the right order, not idle


def test_condensation_of_sum_p2_below_the_transition():
    for rho, n in ((0.2, 10**5), (0.4, 10**5)):
        sigma = rho * math.sqrt(2 * math.log(n))
        assert theory.condensation(sigma, n).sum_p2 == pytest.approx(math.exp(sigma**2) / n)
        assert theory.condensation(sigma, n).sum_p2 == pytest.approx(theory.expected_softmax(sigma, n).sum_p2, rel=0.05)


def test_the_average_of_sum_p2_between_spread_and_condensed():
    """One key against the mean of the rest: n∫N(x)·(eˣ/(eˣ + Z₀))²dx with Z₀ = n·e^{σ²/2}, extended from its edge."""
    n = 1024
    ratios = {}
    for rho in (0.65, 0.75, 0.85, 0.95):
        sigma = rho * math.sqrt(2 * math.log(n))
        ratios[rho] = theory.condensation(sigma, n).sum_p2 / theory.expected_softmax(sigma, n).sum_p2
    assert ratios == pytest.approx({0.65: 1.69, 0.75: 0.96, 0.85: 0.71, 0.95: 0.53}, abs=0.01)
    # What it is at ρ = ¾: 0.103 by the limit, 0.107 exactly; the typical row's n^(−2(1−ρ)²) would be 0.42.
    sigma = 0.75 * math.sqrt(2 * math.log(n))
    assert theory.condensation(sigma, n).sum_p2 == pytest.approx(0.103, abs=5e-4)
    assert theory.expected_softmax(sigma, n).sum_p2 == pytest.approx(0.1074, abs=5e-5)
    # With other exponents the ratio would change by orders of magnitude from a thousand keys to 10¹².
    for many in (10**3, 10**6, 10**9, 10**12):
        wide = 0.75 * math.sqrt(2 * math.log(many))
        limit, exact = theory.condensation(wide, many).sum_p2, theory.expected_softmax(wide, many).sum_p2
        assert limit == pytest.approx(exact, rel=0.07)


@pytest.mark.parametrize("rho", [0.0, 0.1, 0.2, 0.3, 0.4])
@pytest.mark.parametrize("n", [64, 1024, 10**5])
def test_the_entropy_expansion_is_good_at_small_spread(rho, n):
    sigma = rho * math.sqrt(2 * math.log(n))
    exact = theory.expected_softmax(sigma, n).entropy
    expansion, limit = theory.entropy_expansion(sigma, n), theory.condensation(sigma, n).entropy
    assert abs(expansion - exact) < 0.011
    assert abs(expansion - exact) <= abs(limit - exact) + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "n"), [(0.5, 8), (2.0, 64), (8.0, 1024), (22.0, 16), (5.0, 2), (3.0, 3)])
def test_expected_jacobian_by_sampling(sigma, n):
    logits = sigma * np.random.default_rng(17).standard_normal((max(4000, 10**6 // n), n))
    p = softmax(logits)
    p2, p3 = (p**2).sum(axis=1), (p**3).sum(axis=1)
    along = p * (logits - (p * logits).sum(axis=1, keepdims=True)) / sigma
    result = theory.expected_jacobian(sigma, n)
    assert_covers(p2 - 2 * p3 + p2**2, result.norm_square)
    assert_covers((along**2).sum(axis=1), result.along_square)


def test_expected_jacobian_in_the_condensed_phase():
    """E‖J‖²_F → y(1 − y)/3 as ρ grows, where (Σp² − (Σp²)²) alone would give y(1 − y)."""
    shares = []
    for rho in (2.0, 4.0, 8.0):
        sigma = rho * math.sqrt(2 * math.log(1024))
        y = theory.expected_softmax(sigma, 1024).sum_p2
        shares.append(theory.expected_jacobian(sigma, 1024).norm_square / (y * (1 - y)))
    assert shares == pytest.approx([1 / 3, 1 / 3, 1 / 3], rel=0.09)
    assert shares[0] > shares[1] > shares[2] > 1 / 3


def test_averages_are_continuous_where_the_expansion_takes_over():
    for n in (2, 5, 1000):
        for function in (theory.expected_softmax, theory.expected_jacobian):
            below, above = np.array(function(0.99999e-3, n)), np.array(function(1.00001e-3, n))
            np.testing.assert_allclose(below, above, rtol=1e-5)


def test_the_crossing_is_the_first_size_whose_sum_is_a_half():
    for n in (3, 16, 1024):
        crossing = theory.concentration_crossing(n)
        assert theory.expected_rows(1.0, crossing, n).sum_p2 >= 0.5 > theory.expected_rows(1.0, crossing - 1, n).sum_p2
        assert crossing < theory.crossover_without_scaling(n).concentrated


def test_expected_rows_by_sampling():
    rng = np.random.default_rng(18)
    ratios, sums = [], []
    for _ in range(200):
        q, k = rng.standard_normal((16, 8)), rng.standard_normal((1024, 8))
        rows = attention(q, k, k[:, :0], scale=1.0).statistics
        ratios.append(rows.entropy_ratio.mean())
        sums.append(rows.sum_p2.mean())
    expected = theory.expected_rows(1.0, 8, 1024)
    assert expected.entropy_ratio == pytest.approx(0.5635, abs=5e-5)
    assert_covers(np.array(ratios), expected.entropy_ratio)
    assert_covers(np.array(sums), expected.sum_p2)


@pytest.mark.parametrize("n", [2, 3, 10, 1000])
@pytest.mark.parametrize("gap", [0.0, 0.5, 3.0, 30.0])
def test_the_entropy_bound_is_reached_by_one_high_logit(n, gap):
    x = np.zeros((1, n))
    x[0, 0] = gap
    rows = attention(np.ones((1, 1, 1)), x[..., None], np.zeros((1, n, 0)), scale=1.0).statistics
    bound = theory.entropy_lower_bound(np.std(x), n)
    assert float(rows.entropy[0, 0]) == pytest.approx(float(bound), rel=1e-9, abs=1e-15)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(x=st.lists(st.floats(-30, 30), min_size=1, max_size=12), power=st.sampled_from([0.1, 1.0, 3.0]))
def test_the_entropy_bound_is_never_violated(x, power):
    x = power * np.array([x])
    rows = attention(np.ones((1, 1, 1)), x[..., None], np.zeros((1, x.shape[1], 0)), scale=1.0).statistics
    bound = theory.entropy_lower_bound(np.sqrt(rows.logit_variance), rows.visible_keys)
    assert rows.entropy[0, 0] >= bound[0, 0] * (1 - 1e-9) - 1e-13


def test_the_entropy_bound_falls_with_the_spread():
    bounds = theory.entropy_lower_bound([0.0, 0.1, 1.0, 10.0, 1e4, math.inf], 64)
    assert float(bounds[0]) == pytest.approx(math.log(64))
    assert (np.diff(bounds) <= 0).all()
    assert bounds[-1] == 0
    assert float(theory.entropy_lower_bound(3.0, 1)) == 0


D_MODEL, D_K, HEADS = 24, 6, 4


def projection(name, rng, draws):
    """W `[draws, dₖ, d_model]` and bias `[draws, dₖ]` as each initialisation would draw one head of it."""
    shape = (draws, D_K, D_MODEL)
    bias = np.zeros((draws, D_K))
    if name == "torch":
        edge = 1 / math.sqrt(D_MODEL)
        return rng.uniform(-edge, edge, shape), rng.uniform(-edge, edge, bias.shape)
    if name in ("xavier", "xavier_packed"):
        fan_out = HEADS * D_K if name == "xavier" else 3 * D_MODEL
        edge = math.sqrt(6 / (D_MODEL + fan_out))
        return rng.uniform(-edge, edge, shape), bias
    spread = {"unit": D_MODEL**-0.5, "unit_weights": 1.0, "kaiming": math.sqrt(2 / D_MODEL), "gpt2": 0.02}
    spread["rescaled"] = D_MODEL**-0.5 * D_K**-0.25
    return spread[name] * rng.standard_normal(shape), bias


@pytest.mark.parametrize("name", sorted(theory.initialisations()))
def test_initial_variance_by_sampling(name):
    rng = np.random.default_rng(10)
    draws = 12_000
    expected = theory.initial_variance(name, d_model=D_MODEL, d_k=D_K, heads=HEADS, input_variance=2.0)
    sides = []
    for _ in range(2):
        weight, bias = projection(name, rng, draws)
        assert weight.var() == pytest.approx(expected.weight, rel=0.02)
        x = math.sqrt(2.0) * rng.standard_normal((draws, D_MODEL))
        sides.append(np.einsum("nij,nj->ni", weight, x) + bias)
    assert_covers((sides[0] ** 2).mean(axis=1), expected.entry)
    assert_covers((sides[0] * sides[1]).sum(axis=1) ** 2, expected.dot_product)


@pytest.mark.slow
def test_torchs_own_layers_start_with_the_stated_variance():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 512)
    expected = theory.initial_variance("torch", d_model=512, d_k=64, heads=8)
    assert float(linear.weight.detach().var()) == pytest.approx(expected.weight, rel=0.02)
    packed = torch.nn.MultiheadAttention(512, 8).in_proj_weight.detach()
    expected = theory.initial_variance("xavier_packed", d_model=512, d_k=64, heads=8)
    assert float(packed.var()) == pytest.approx(expected.weight, rel=0.02)
    torch.nn.init.xavier_uniform_(linear.weight)
    expected = theory.initial_variance("xavier", d_model=512, d_k=64, heads=8)
    assert float(linear.weight.detach().var()) == pytest.approx(expected.weight, rel=0.02)


def measured_gradients(scale, d_k, n, samples, queries=32, seed=11):
    """‖∂loss/∂q‖ per unit of ‖∂loss/∂o‖ for Gaussian q, k, v and output gradient, `[samples, queries]`."""
    rng = np.random.default_rng(seed)
    q, grad = rng.standard_normal((2, samples, queries, d_k))
    k, v = rng.standard_normal((2, samples, n, d_k))
    norms = np.linalg.norm(attention_gradients(q, k, v, grad, scale=scale).query, axis=-1)
    return norms / np.linalg.norm(grad, axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d_k", "n", "power"), [(64, 256, 0), (64, 256, 0.5), (64, 256, 1), (512, 16, 0), (4, 16, 0), (1, 16, 0), (2, 2, 0)]
)
def test_gradient_scale_is_the_root_mean_square(d_k, n, power):
    scale = d_k**-power
    squares = (measured_gradients(scale, d_k, n, samples=64) ** 2).mean(axis=1)
    assert_covers(squares, theory.gradient_scale(scale, d_k=d_k, n=n) ** 2)


def test_gradient_scale_of_a_zero_and_of_a_negative_scale():
    assert theory.gradient_scale(-0.125, d_k=64, n=1024) == theory.gradient_scale(0.125, d_k=64, n=1024)
    assert theory.gradient_scale(0.0, d_k=64, n=1024) == 0


@pytest.mark.slow
def test_the_gap_density_by_sampling():
    for n in (2, 16, 300):
        top = np.sort(np.random.default_rng(19).standard_normal((200_000, n) if n < 50 else (20_000, n)), axis=1)[
            :, -2:
        ]
        near = (top[:, 1] - top[:, 0] < 0.02) / 0.02
        # The density falls from 0 on: at most by its own slope over the interval.
        error = near.std() / math.sqrt(len(near))
        assert abs(near.mean() - theory.top_gap_density(n)) < 5 * error + 0.03 * theory.top_gap_density(n)


@pytest.mark.slow
def test_gradients_without_scaling_are_uneven_as_the_limit_says():
    """The mean stays, the root mean square grows as dₖ^¼, and ever fewer rows have a largest weight below 0.9."""
    limits = {d_k: theory.gradients_without_scaling(d_k, 16) for d_k in (64, 512, 4096)}
    assert {limit.mean for limit in limits.values()} == {math.sqrt(2 / math.pi) * theory.top_gap_density(16)}
    norms = measured_gradients(1.0, 512, 16, samples=600, queries=4).mean(axis=1)
    assert assert_covers(norms, limits[512].mean) < 0.1
    assert theory.gradient_scale(1.0, d_k=512, n=16) == pytest.approx(limits[512].root_mean_square, rel=0.05)
    rng = np.random.default_rng(20)
    q, k = rng.standard_normal((2000, 1, 512)), rng.standard_normal((2000, 16, 512))
    alive = attention(q, k, k[..., :0], scale=1.0).statistics.max_weight < 0.9
    assert float(alive.mean()) == pytest.approx(limits[512].alive, abs=0.03)


def test_query_gradient_norm_is_its_formula():
    assert theory.query_gradient_norm(0.25, d_k=16, jacobian_norm=0.3, output_gradient_norm=2.0) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: theory.dot_product_variance(-1), r"d_k must not be negative, got -1"),
        (lambda: theory.dot_product_mean(4, std_q=-1.0), r"std_q and std_k must not be negative, got -1.0 and 1.0"),
        (lambda: theory.dot_product_variance(4, correlation=1.5), r"correlation must lie in \[-1, 1\], got 1.5"),
        (lambda: theory.squared_sum_terms(-2), r"d_k must not be negative, got -2"),
        (lambda: theory.divided_variance(1.0, 0.0), r"divisor must not be 0"),
        (lambda: theory.condensation(1.0, 1), r"n must be at least 2, got 1"),
        (lambda: theory.expected_softmax(-1.0, 4), r"sigma must be finite and not negative, got -1.0"),
        (lambda: theory.expected_softmax(math.inf, 4), r"sigma must be finite and not negative, got inf"),
        (lambda: theory.crossover_without_scaling(1), r"n must be at least 2, got 1"),
        (lambda: theory.row_variance(4, alignment=-1.0), r"alignment must not be negative, got -1.0"),
        (lambda: theory.alignment(np.eye(2), np.eye(3)), r"must have shape \[d_k, d_k\], got \(2, 2\) and \(3, 3\)"),
        (lambda: theory.alignment(np.eye(2), np.zeros((2, 2))), r"must have a positive trace, got 2.0 and 0.0"),
        (lambda: theory.expected_rows(1.0, 0, 4), r"d_k must be at least 1, got 0"),
        (lambda: theory.gradient_scale(1.0, d_k=0, n=4), r"d_k must be at least 1, got 0"),
        (lambda: theory.gradients_without_scaling(0, 4), r"d_k must be at least 1, got 0"),
        (lambda: theory.top_gap_density(1), r"n must be at least 2, got 1"),
        (lambda: theory.concentration_crossing(1), r"n must be at least 2, got 1"),
        (lambda: theory.digamma(0.0), r"x must be positive, got 0.0"),
        (lambda: theory.digamma(math.nan), r"x must be positive, got nan"),
        (
            lambda: theory.initial_variance("he", d_model=4, d_k=2),
            r"unknown initialisation 'he'; known: gpt2, kaiming, rescaled",
        ),
        (
            lambda: theory.initial_variance("unit", d_model=0, d_k=2),
            r"d_model, d_k and heads must be at least 1 .*got 0, 2",
        ),
    ],
)
def test_wrong_arguments_are_named(call, text):
    with pytest.raises(SqrtdkError, match=text) as raised:
        call()
    assert isinstance(raised.value, ValueError)

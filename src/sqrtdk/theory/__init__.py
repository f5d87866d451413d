"""Formulas behind the scale: variance of q·k, softmax of Gaussian rows, gradients. Pure functions, no state.

Symbols: σ standard deviation of a row's logits, n its visible keys, p its softmax weights,
ρ = σ/√(2 ln n) the saturation index.
"""

from sqrtdk.theory.dot_products import (
    InitialVariance,
    SquaredSumTerms,
    alignment,
    divided_variance,
    dot_product_mean,
    dot_product_variance,
    initial_variance,
    initialisations,
    row_variance,
    squared_sum_terms,
)
from sqrtdk.theory.gaussian_softmax import (
    Condensation,
    Crossover,
    ExpectedJacobian,
    ExpectedSoftmax,
    concentration_crossing,
    condensation,
    crossover_without_scaling,
    digamma,
    entropy_expansion,
    expected_jacobian,
    expected_rows,
    expected_softmax,
)
from sqrtdk.theory.gradients import (
    GradientsWithoutScaling,
    gradient_scale,
    gradients_without_scaling,
    query_gradient_norm,
    top_gap_density,
)
from sqrtdk.theory.softmax import (
    JacobianSize,
    entropy_lower_bound,
    jacobian_size,
    saturation_index,
    softmax_jacobian,
)

__all__ = [
    "Condensation",
    "Crossover",
    "ExpectedJacobian",
    "ExpectedSoftmax",
    "GradientsWithoutScaling",
    "InitialVariance",
    "JacobianSize",
    "SquaredSumTerms",
    "alignment",
    "concentration_crossing",
    "condensation",
    "crossover_without_scaling",
    "digamma",
    "divided_variance",
    "dot_product_mean",
    "dot_product_variance",
    "entropy_expansion",
    "entropy_lower_bound",
    "expected_jacobian",
    "expected_rows",
    "expected_softmax",
    "gradient_scale",
    "gradients_without_scaling",
    "initial_variance",
    "initialisations",
    "jacobian_size",
    "query_gradient_norm",
    "row_variance",
    "saturation_index",
    "softmax_jacobian",
    "squared_sum_terms",
    "top_gap_density",
]

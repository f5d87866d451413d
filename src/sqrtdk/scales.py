"""Scaling policies, which multiply q·k, each with formula and source, and the registry of their names.

A policy is an optional `prepare(q, k)` (normalise before the product) and a `factor(context)` (the number,
or one number per head and query, that multiplies the product). `scale` multiplies; a temperature divides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from sqrtdk.errors import InvalidTypeError, InvalidValueError, unknown_name
from sqrtdk.theory.softmax import namespace_of

__all__ = [
    "LEARNABLE",
    "Cosine",
    "Fixed",
    "Inverse",
    "Learnable",
    "Llama4",
    "LogN",
    "Mup",
    "NoScaling",
    "Policy",
    "QKNorm",
    "ScaleContext",
    "Sqrt",
    "Temperature",
    "Yarn",
    "get",
    "names",
    "policy_type",
    "register",
    "resolve",
]

Array = npt.NDArray[Any]
Factor = float | Array


def default_factor(d_k: int) -> float:
    """Return 1/√dₖ, the default scale, without a context, whose creation would take as long as all checks."""
    return 1.0 / math.sqrt(d_k)


# Cached for calls of microseconds. A tracer calls the function itself.
known_default_factor = lru_cache(maxsize=1024)(default_factor)


@dataclass(frozen=True)
class ScaleContext:
    """Properties of a call that a policy may use.

    Args:
        d_k: length of a query or key vector.
        positions: absolute position of each query, integers `[L]`.
        count_visible: returns the number of keys that each query sees, integers that broadcast to `[..., H, L]`. It
            is called only by policies that need it, because counting under a mask costs a pass over the mask.
    """

    d_k: int
    positions: Array = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    count_visible: Callable[[], Array] = lambda: np.ones(1, dtype=np.int64)

    @property
    def visible_keys(self) -> Array:
        """Number of keys each query sees, broadcastable to `[..., H, L]`."""
        return self.count_visible()


@dataclass(frozen=True)
class Policy:
    """Base class of all policies, with a factor to define, no preparation, and texts for tables and docs."""

    name: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    source: ClassVar[str] = ""
    takes_tensors: ClassVar[bool] = False
    """Whether `factor` takes torch tensors. Otherwise tensors are converted to NumPy for it."""

    def factor(self, context: ScaleContext) -> Factor:
        """Return the multiplier of q·k: a number, or an array that broadcasts to `[..., H, L]`."""
        raise TypeError(f"{type(self).__name__} must define factor(context)")

    def prepare(self, q: Any, k: Any) -> tuple[Any, Any]:
        """Return the arrays or tensors `[..., L, D]` that enter the product in place of q and k."""
        return q, k

    def pull_back(self, q: Array, k: Array, grad_q: Array, grad_k: Array) -> tuple[Array, Array]:
        """Return the gradients of the given q and k from those of the prepared q and k.

        A policy that defines `prepare` must define this as well. Otherwise its gradients would be wrong.
        """
        if type(self).prepare is not Policy.prepare:
            raise InvalidTypeError(f"{type(self).__name__} defines prepare and must define pull_back to have gradients")
        return grad_q, grad_k

    def __str__(self) -> str:
        first = next(iter(fields(self)), None)
        return self.name if first is None else f"{self.name}:{getattr(self, first.name)}"


@dataclass(frozen=True)
class Learnable:
    """Description of a scale with trainable parameters. The module itself is `sqrtdk.torch.nn.<module>`."""

    name: str
    module: str
    formula: str
    source: str


_SELECTIVE = "after Zhang et al. 2024 (Selective Self-Attention), in log space"
LEARNABLE = {
    one.name: one
    for one in (
        Learnable("learned", "LearnedTemperature", "eˢ/√dₖ", "Radford et al. 2021 (CLIP), with √dₖ as the unit"),
        Learnable("query", "QueryTemperature", "exp(w·q/√dₖ + b)/√dₖ", f"{_SELECTIVE}: from the query"),
        Learnable("position", "QueryTemperature", "exp(a·ln(1 + pos) + b)/√dₖ", f"{_SELECTIVE}: from its position"),
        Learnable("qk_norm", "QKNorm", "eˢ/√dₖ·(q/rms(q))·(k/rms(k))", "Henry et al. 2020 (Query-Key Normalization)"),
    )
}
"""Scales that learn, by name. All parameters start at 0, which gives the default scale."""

_registry: dict[str, type[Policy]] = {}


def register(policy: type[Policy]) -> type[Policy]:
    """Register a policy under its name, which must be new, and return the policy.

    >>> "sqrt" in names()
    True
    """
    if not policy.name or not policy.formula or not policy.source:
        raise InvalidValueError(policy.__name__, "must state name, formula and source before it is registered")
    if policy.name in _registry:
        raise InvalidValueError(f"a policy named {policy.name!r} is registered already")
    _registry[policy.name] = policy
    return policy


def names() -> list[str]:
    """Return the registered names in the order of registration.

    >>> names()[:3]
    ['none', 'sqrt', 'inverse']
    """
    return list(_registry)


def policy_type(name: str) -> type[Policy]:
    """Return the class registered under a name, with formula, source and parameters.

    >>> policy_type("inverse").formula
    '1/dₖ'
    """
    if name in _registry:
        return _registry[name]
    if name in LEARNABLE:
        raise InvalidValueError(
            f"{name!r} has parameters to train and works on tensors: it is sqrtdk.torch.nn.{LEARNABLE[name].module}; "
            f"by the bare name {name!r} it is known to ScaledAttention there and to `sqrtdk ablate`"
        )
    raise unknown_name("scaling policy", name, names(), "scale")


def get(name: str, *args: Any, **kwargs: Any) -> Policy:
    """Return a policy by name and parameters. The text may include the first parameter: ``"fixed:10"``.

    >>> get("fixed", 10) == get("fixed:10")
    True
    >>> round(get("yarn", 4.0).factor(ScaleContext(d_k=64)), 4)         # (0.1 ln 4 + 1)² / 8
    0.1621

    Raises:
        InvalidValueError: unknown name (the message lists the known ones), or bad or missing parameters.
    """
    name, colon, value = name.partition(":")
    kind = policy_type(name)
    if colon:
        try:
            args = (float(value), *args)
        except ValueError:
            raise InvalidValueError(f"the parameter of {name!r} must be a number, got {value!r}") from None
    try:
        return kind(*args, **kwargs)
    except TypeError as error:
        parameters = ", ".join(item.name for item in fields(kind)) or "none"
        raise InvalidValueError(f"policy {name!r} takes the parameters: {parameters} ({error})") from None


def resolve(scale: str | Policy | None) -> Policy:
    """Return the policy for None (the default), a name, or a policy object.

    >>> resolve(None)
    Sqrt()
    """
    if scale is None:
        return Sqrt()
    if isinstance(scale, str):
        return get(scale)
    if isinstance(scale, Policy):
        return scale
    raise InvalidTypeError("scale", f"must be a policy, a policy's name or None here, got {type(scale).__name__}")


def _require_finite(name: str, value: Factor, *, positive: bool = False) -> None:
    if type(value) is float and math.isfinite(value) and (value > 0.0 or not positive):
        return  # the usual case, and one that torch.compile can trace
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise InvalidTypeError(name, f"must be a number, got {value!r}")
    if not np.isfinite(array).all() or (positive and not (array > 0).all()):
        raise InvalidValueError(name, f"must be {'positive and ' if positive else ''}finite, got {value!r}")


def _as_floats(x: Any) -> Any:
    """Return integers of an array or a tensor as float64 (float32 on a device without it)."""
    if namespace_of(x) is np:
        return np.asarray(x, dtype=np.float64)
    return x.float() if x.device.type == "mps" else x.double()


def _require_positive(name: str, value: Factor) -> None:
    _require_finite(name, value, positive=True)


@register
@dataclass(frozen=True)
class NoScaling(Policy):
    """No scaling: softmax receives q·k as it is."""

    name = "none"
    formula = "1"
    source = "the control; also T5 (Raffel et al. 2020), which folds the scale into its initialisation"

    def factor(self, context: ScaleContext) -> Factor:
        return 1.0


@register
@dataclass(frozen=True)
class Sqrt(Policy):
    """1/√dₖ, the default: unit-variance q and k give unit-variance logits at every dₖ."""

    name = "sqrt"
    formula = "1/√dₖ"
    source = "Vaswani et al. 2017, eq. 1"

    def factor(self, context: ScaleContext) -> Factor:
        return default_factor(context.d_k)


@register
@dataclass(frozen=True)
class Inverse(Policy):
    """1/dₖ: keeps q·k of *correlated* q and k at order one (muP). For independent q and k the variance is 1/dₖ."""

    name = "inverse"
    formula = "1/dₖ"
    source = "Yang et al. 2022 (Tensor Programs V), definition 4.1"

    def factor(self, context: ScaleContext) -> Factor:
        return 1.0 / context.d_k


@register
@dataclass(frozen=True)
class Fixed(Policy):
    """A constant divisor that does not depend on dₖ."""

    divisor: float
    name = "fixed"
    formula = "1/c"
    source = "any constant; Gemma 2 27B divides by √144 with dₖ = 128"

    def __post_init__(self) -> None:
        _require_positive("divisor", self.divisor)

    def factor(self, context: ScaleContext) -> Factor:
        return 1.0 / self.divisor


@register
@dataclass(frozen=True, eq=False)
class Temperature(Policy):
    """A temperature relative to the default √dₖ: t < 1 is sharper, t > 1 is softer, t = 1 is the default.

    Args:
        relative: t = τ/√dₖ, a number or an array that broadcasts to `[..., H, L]` (one per head or per query).
    """

    relative: Factor = 1.0
    name = "temperature"
    formula = "1/(t·√dₖ), t = τ/√dₖ"
    source = "Hinton et al. 2015, eq. 1, with √dₖ as the unit"

    def __post_init__(self) -> None:
        _require_positive("relative", self.relative)

    def factor(self, context: ScaleContext) -> Factor:
        return 1.0 / (self.relative * math.sqrt(context.d_k))


@register
@dataclass(frozen=True)
class Mup(Policy):
    """α·√d_base/dₖ: the default at dₖ = d_base, 1/dₖ growth beyond; 8/dₖ is d_base = 64."""

    d_base: float = 64.0
    alpha: float = 1.0
    name = "mup"
    formula = "α·√d_base/dₖ"
    source = "Yang et al. 2022 (Tensor Programs V), section B.1"

    def __post_init__(self) -> None:
        _require_positive("d_base", self.d_base)
        _require_positive("alpha", self.alpha)

    def factor(self, context: ScaleContext) -> Factor:
        return self.alpha * math.sqrt(self.d_base) / context.d_k


@register
@dataclass(frozen=True)
class LogN(Policy):
    """s·(ln n)^power/√dₖ with n the visible keys: sharper as the context grows.

    For Gaussian logits `power=0.5` holds the saturation index ρ, and with it the entropy ratio, at every n. `power=1`
    makes ρ grow like √(ln n): with s = 1, which the bare name means, rows of unit-variance q and k are past ρ = 1 from
    n > e² on and keep two to three effective keys at every length. The paper learns s per layer and head (0.43 in its
    Figure 1): choose it by ``"log_n:0.43"``, or ``LogN(s=1 / ln n₀)`` for 1/√dₖ at n₀ keys. A row that sees one key or
    none gets the factor 0; without sinks its weights do not depend on it.
    """

    s: float = 1.0
    power: float = 1.0
    name = "log_n"
    formula = "s·(ln n)^a/√dₖ, n visible keys"
    source = "Nakanishi 2025 (Scalable-Softmax), eq. 3 with a = 1; a = ½ from the random energy model"
    takes_tensors = True

    def __post_init__(self) -> None:
        _require_positive("s", self.s)
        _require_positive("power", self.power)

    def factor(self, context: ScaleContext) -> Factor:
        n = _as_floats(context.visible_keys)
        log_n = namespace_of(n).log(n.clip(1.0))
        return cast(Array, self.s * log_n**self.power / math.sqrt(context.d_k))


@register
@dataclass(frozen=True)
class Yarn(Policy):
    """(0.1·ln s + 1)²/√dₖ for a context extended s times; the default for s ≤ 1.

    The paper puts the factor's root on q and on k each, so the logits get its square.
    """

    extension: float = 1.0
    name = "yarn"
    formula = "(0.1·ln s + 1)²/√dₖ, s ≤ 1: 1/√dₖ"
    source = "Peng et al. 2023 (YaRN), eq. 22: √(1/t) = 0.1 ln s + 1"

    def __post_init__(self) -> None:
        _require_positive("extension", self.extension)

    def factor(self, context: ScaleContext) -> Factor:
        root = 0.1 * math.log(max(self.extension, 1.0)) + 1.0
        return root * root / math.sqrt(context.d_k)


@register
@dataclass(frozen=True)
class Llama4(Policy):
    """(1 + β·ln(1 + ⌊(position + 1)/floor⌋))/√dₖ: the default for the first floor − 1 positions, then sharper."""

    floor: float = 8192.0
    beta: float = 0.1
    name = "llama4"
    formula = "(1 + 0.1·ln(1 + ⌊(pos+1)/8192⌋))/√dₖ"
    source = "Llama 4 model code (floor_scale 8192, attn_scale 0.1)"
    takes_tensors = True

    def __post_init__(self) -> None:
        _require_positive("floor", self.floor)
        _require_positive("beta", self.beta)

    def factor(self, context: ScaleContext) -> Factor:
        # A query before the first key has a negative position, which counts as 0 keys.
        positions = _as_floats(context.positions)
        xp = namespace_of(positions)
        steps = xp.floor((positions + 1.0).clip(0.0) / self.floor)
        return cast(Array, (1.0 + self.beta * xp.log1p(steps)) / math.sqrt(context.d_k))


@dataclass(frozen=True)
class _Normalised(Policy):
    """q and k each divided by a size of their own before the product: the root of Σx² (length) or of its mean."""

    of_mean: ClassVar[bool] = False
    epsilon: ClassVar[float] = 1e-12

    def prepare(self, q: Any, k: Any) -> tuple[Any, Any]:
        return self._normalise(q)[0], self._normalise(k)[0]

    def _normalise(self, x: Any) -> tuple[Any, Any, Any]:
        """Return x divided by its size, the size, and the factor that shrank x where its squares would overflow.

        The factor is a power of two, so that nothing is rounded."""
        xp = namespace_of(x)
        largest, shrink = (2.0**500, 2.0**-600) if x.dtype == xp.float64 else (2.0**56, 2.0**-70)
        huge = xp.amax(abs(x), axis=-1, keepdims=True) > largest
        x = xp.where(huge, x * shrink, x)
        square = (x * x).sum(axis=-1, keepdims=True)
        square = square / x.shape[-1] if self.of_mean else square
        size = xp.where(huge, square, square + self.epsilon) ** 0.5
        return x / size, size, xp.where(huge, xp.ones_like(size) * shrink, xp.ones_like(size))

    def pull_back(self, q: Array, k: Array, grad_q: Array, grad_k: Array) -> tuple[Array, Array]:
        return self._pull_back_one(q, grad_q), self._pull_back_one(k, grad_k)

    def _pull_back_one(self, x: Array, grad: Array) -> Array:
        # y = x/r(x) with r² = w·Σx² + ε, so ∂r/∂x = w·y; w is 1 for the length and 1/D for the mean square.
        y, size, shrink = self._normalise(x)
        weight = 1.0 / x.shape[-1] if self.of_mean else 1.0
        along = (grad * y).sum(axis=-1, keepdims=True)
        carried = (grad - y * (weight * along)) / size * shrink
        # A vector without influence has no gradient, even where it is NaN or infinite itself.
        return np.asarray(np.where((grad != 0).any(axis=-1, keepdims=True), carried, 0.0))


@register
@dataclass(frozen=True)
class Cosine(_Normalised):
    """exp(min(s, ln 100)) times the cosine of q and k; s starts at ln 10, so the logits lie in [−10, 10]."""

    log_scale: float = math.log(10.0)
    name = "cosine"
    formula = "exp(min(s, ln 100))·cos(q, k)"
    source = "Liu et al. 2022 (Swin Transformer V2), eq. 2 and model code"

    def __post_init__(self) -> None:
        _require_finite("log_scale", self.log_scale)

    def factor(self, context: ScaleContext) -> Factor:
        return math.exp(min(self.log_scale, math.log(100.0)))


@register
@dataclass(frozen=True)
class QKNorm(_Normalised):
    """g/√dₖ on q and k of root mean square 1: the default's logit variance whatever the size of q and k."""

    gain: float = 1.0
    name = "qk_norm"
    formula = "g/√dₖ·(q/rms(q))·(k/rms(k))"
    source = "Henry et al. 2020 (Query-Key Normalization); Dehghani et al. 2023 (ViT-22B); Qwen3 (RMS norm)"
    of_mean = True

    def __post_init__(self) -> None:
        _require_positive("gain", self.gain)

    def factor(self, context: ScaleContext) -> Factor:
        return self.gain / math.sqrt(context.d_k)

"""Nested derivatives under torch.compile, which traces the same graph on every backend: one is enough."""

import pytest
import torch
from torch.func import grad

from nested_derivatives import NESTED, K, Q, V, eager, ours, square

pytestmark = [
    pytest.mark.slow,
    # Second derivatives are computed by torch on any backend.
    pytest.mark.filterwarnings("ignore::sqrtdk.errors.FallbackWarning"),
    # Forward-mode rules of torch itself are scripted; torch.compile itself makes the object that it warns of.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.mark.parametrize(
    "name", ["grad", "grad of vmap", "hessian", "jacrev of jacrev", "grad of grad by another", "grad of vmap of grad"]
)
def test_nested_derivatives_may_be_compiled(name):
    find = NESTED | {"grad": lambda f: grad(lambda q: square(f)(q, K, V))(Q)}
    torch._dynamo.reset()
    result = torch.compile(lambda: find[name](ours), backend="aot_eager", fullgraph=True)()
    torch.testing.assert_close(result, find[name](eager), rtol=1e-9, atol=1e-11)

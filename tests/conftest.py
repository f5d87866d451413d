"""Fixtures that several test modules share."""

import pytest

from sqrtdk import backends

RUNNING = [backend.name for backend in backends.list() if backend.runs_here]
NATIVE = [name for name in RUNNING if name != backends.REFERENCE]


# Per module, not per test: hypothesis refuses fixtures that would have to be set up again for every example.
@pytest.fixture(scope="module", params=RUNNING)
def backend(request):
    """Every implementation that this machine can run, in use while the tests of a module run."""
    with backends.use(request.param):
        yield request.param


@pytest.fixture(scope="module", params=NATIVE)
def native(request):
    """Every level of the kernel that this machine can run."""
    with backends.use(request.param):
        yield request.param

"""Fixtures that several test modules share; README.md beside this file says which oracle is for what."""

import signal
import sys
from pathlib import Path

import pytest

from levels import NATIVE, TRIED
from sqrtdk import backends, errors

# A shell starts what runs in the background with Ctrl-C ignored, and every process from there on inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Away from the source tree, as `make wheel` runs the tests, there is nothing for these to read.
HAS_TREE = (Path(__file__).parents[1] / "src").is_dir()
NEEDS_TREE = ["benchmarks", "mutants.py", "support/bench_machine.py", "support/bench_peers.py"]
NEEDS_TREE += [f"project/test_{name}.py" for name in ("architecture", "build", "docs", "mutants", "notebook", "words")]
collect_ignore = [] if HAS_TREE else NEEDS_TREE

# Each of two test processes would make them.
SLOW_FIXTURES = {"verdicts"}

# Faults of ours are not hidden by what must not end a user's program; a test of that switches it off.
errors.faults_are_raised = True


@pytest.fixture(scope="module", autouse=True)
def _torchs_threads_stay():
    """Torch has as many threads after a module as before it: more than one per test process wait for each other."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    yield
    if torch:
        assert torch.get_num_threads() == before


# Per module, not per test: hypothesis refuses fixtures that would have to be set up again for every example.
@pytest.fixture(scope="module", params=TRIED)
def backend(request):
    """Every implementation that this machine can run and that differs, in use while the tests of a module run."""
    with backends.use(request.param):
        yield request.param


@pytest.fixture(scope="module", params=NATIVE)
def native(request):
    """Every level of the kernel that this machine can run."""
    with backends.use(request.param):
        yield request.param


@pytest.fixture
def nothing_left():
    """Torch is after a watch as it was before."""
    from torch_watched import hooks_now, modes_now, replaced_now

    before = hooks_now(), modes_now(), replaced_now()
    yield
    assert (hooks_now(), modes_now(), replaced_now()) == before


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`make check` tries the best level and the reference, and does without fixtures that take seconds."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        is_between = {parameters.get("backend"), parameters.get("native")} & set(TRIED[1:-1])
        if is_between or SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)

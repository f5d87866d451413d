"""Fixtures that several test modules share."""

import signal
from pathlib import Path

import pytest

from sqrtdk import backends

# A shell starts what runs in the background with Ctrl-C ignored, and every process from there on inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Away from the source tree, as `make wheel` runs the tests, there is nothing for these to read.
HAS_TREE = (Path(__file__).parents[1] / "src").is_dir()
collect_ignore = [] if HAS_TREE else ["benchmarks", "mutants.py", "test_build.py", "test_docs.py", "test_notebook.py"]

RUNNING = [backend.name for backend in backends.list() if backend.runs_here]
# avx512_bf16 is avx512 but for bfloat16, and there random calls (test_fuzz, make sanitize) try both.
TRIED = [name for name in RUNNING if not (name == "avx512" and "avx512_bf16" in RUNNING)]
NATIVE = [name for name in TRIED if name != backends.REFERENCE]


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
    """`make check` tries the best level and the reference; those in between repeat the same tests in `make test`."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if {parameters.get("backend"), parameters.get("native")} & set(TRIED[1:-1]):
            item.add_marker(pytest.mark.slow)

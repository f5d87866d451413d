"""Backends as a user meets them: listed best first, inspected, forced, and honest when the kernel is not there."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from levels import NATIVE, RUNNING
from oracle import draw
from sqrtdk import SqrtdkError, attention, backends
from sqrtdk.operation.cpus import read_cgroup_quota

NAMES = ["avx512_bf16", "avx512", "avx2", "portable", "reference"]


def run_python(code, **environment):
    """What a fresh interpreter prints, with these environment variables (None: unset)."""
    kept = {name: value for name, value in os.environ.items() if name not in ("SQRTDK_BACKEND", "OMP_NUM_THREADS")}
    given = {name: value for name, value in environment.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120, env=kept | given
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_list_is_complete_and_best_first():
    result = backends.list()
    assert [backend.name for backend in result] == NAMES
    for backend in result:
        assert backend == backends.inspect(backend.name)
        assert backend.runs_here == (backend.why_not is None)
        assert backend.about
    assert result[-1].runs_here


@pytest.mark.skipif(not NATIVE, reason="built without the kernel")
def test_the_best_that_runs_here_is_the_default():
    assert run_python("from sqrtdk import backends; print(backends.current())") == RUNNING[0] == NATIVE[0]
    assert "portable" in NATIVE


def test_use_forces_until_the_block_ends_and_restores_after_an_error():
    before = backends.current()
    for name in RUNNING:
        with backends.use(name):
            assert backends.current() == name
            with backends.use("reference"):
                assert backends.current() == "reference"
            assert backends.current() == name
    with pytest.raises(ZeroDivisionError), backends.use("reference"):
        raise ZeroDivisionError
    assert backends.current() == before


@pytest.mark.slow
def test_use_without_a_block_holds_for_the_process():
    code = "from sqrtdk import backends; backends.use('reference'); print(backends.current())"
    assert run_python(code) == "reference"
    assert run_python(code + "; backends.use(None); print(backends.current())").split() == ["reference", RUNNING[0]]


def test_the_forced_backend_is_the_one_that_computes():
    q, k, v = draw(0, (2, 33, 16), (2, 65, 16), 8, np.float32)
    outputs = []
    for name in RUNNING:
        with backends.use(name):
            outputs.append(attention(q, k, v).output)
    for output in outputs[:-1]:
        np.testing.assert_allclose(output, outputs[-1], rtol=1e-4, atol=1e-5)
        assert output.tobytes() != outputs[-1].tobytes()  # float32 is not float64 rounded


def test_unknown_names_list_the_known_ones():
    for ask in (backends.inspect, backends.use):
        with pytest.raises(
            SqrtdkError, match=r"unknown backend 'avx'; known: avx2, avx512, avx512_bf16, portable, reference"
        ):
            ask("avx")
    with pytest.raises(TypeError, match=r"name must be a backend's name or None, got 3"):
        backends.use(3)


def test_a_backend_that_does_not_run_here_says_why(monkeypatch):
    class OldMachine:
        @staticmethod
        def levels():
            return [("avx2", False), ("portable", True)]

    monkeypatch.setattr(backends, "_load_kernel", lambda: (OldMachine, None))
    assert backends.inspect("avx512").why_not == "not compiled for this machine"
    with pytest.raises(
        ValueError, match=r"runs here \(portable, reference\), got 'avx2': this CPU lacks its instructions"
    ):
        backends.use("avx2")


def test_without_a_level_for_this_cpu_the_reference_computes(monkeypatch):
    class OfAnotherMachine:
        @staticmethod
        def levels():
            return [("avx512", False)]

    monkeypatch.setattr(backends, "_load_kernel", lambda: (OfAnotherMachine, None))
    plan = backends._make_plan(backends._Choice(None, 1))
    assert (plan.level, plan.forward) == ("reference", None)


@pytest.mark.parametrize(
    ("count", "kind", "text"),
    [
        (0, ValueError, "count must be from 1 to 256, got 0"),
        (257, ValueError, "count must be from 1 to 256, got 257"),
        (True, TypeError, "count must be an integer, got True"),
        (2.0, TypeError, r"count must be an integer, got 2\.0"),
    ],
)
def test_wrong_numbers_of_threads(count, kind, text):
    with pytest.raises(SqrtdkError, match=text) as raised:
        backends.use_threads(count)
    assert isinstance(raised.value, kind)


def test_threads_are_set_and_restored():
    before = backends.threads()
    with backends.use_threads(7):
        assert backends.threads() == 7
        with backends.use("reference"):
            assert backends.threads() == 7
    assert backends.threads() == before


def test_importing_reads_no_environment_and_loads_no_kernel():
    code = (
        "import os, sys, sqrtdk; loaded = 'sqrtdk._kernel' in sys.modules; os.environ['SQRTDK_BACKEND'] = 'reference';"
        "os.environ['OMP_NUM_THREADS'] = '3'; print(loaded, sqrtdk.backends.current(), sqrtdk.backends.threads())"
    )
    assert run_python(code, SQRTDK_BACKEND="nonsense") == "False reference 3"


def test_a_wrong_environment_is_named():
    code = (
        "import numpy, sqrtdk\n"
        "try: sqrtdk.attention(*numpy.ones((3, 2, 2)))\n"
        "except sqrtdk.SqrtdkError as error: print(error)"
    )
    known = "known: avx2, avx512, avx512_bf16, portable, reference"
    assert run_python(code, SQRTDK_BACKEND="nonsense") == f"unknown backend 'nonsense'; {known}"


THREADS = "import os; {}; from sqrtdk import backends; print(backends.threads())"


@pytest.mark.slow
@pytest.mark.parametrize(("text", "count"), [("1", 1), ("3", 3), (" 5 , 2", 5), ("1000", 256)])
def test_threads_follow_omp_num_threads(text, count):
    assert run_python(THREADS.format("pass"), OMP_NUM_THREADS=text) == str(count)


@pytest.mark.slow
@pytest.mark.parametrize("text", [None, "", "0", "-1", "many"])
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_threads_follow_the_affinity_where_openmp_would_ignore_the_variable(text):
    one = min(os.sched_getaffinity(0))
    assert run_python(THREADS.format(f"os.sched_setaffinity(0, {{{one}}})"), OMP_NUM_THREADS=text) == "1"


def control_group(root, path, **files):
    group = root / path
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(text)


def test_quota_of_control_groups_version_2(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("0::/slice/task\n")
    root = tmp_path / "cgroup"
    assert read_cgroup_quota(root, membership) is None
    control_group(root, "slice/task", cpu__max="max 100000\n")
    assert read_cgroup_quota(root, membership) is None
    control_group(root, "slice", cpu__max="150000 100000\n")  # the parent's limit holds for the child
    assert read_cgroup_quota(root, membership) == 1.5
    control_group(root, "slice/task", cpu__max="50000 100000\n")
    assert read_cgroup_quota(root, membership) == 0.5
    assert read_cgroup_quota(root, tmp_path / "nothing") is None


def test_quota_of_control_groups_version_1(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/task\n3:cpu,cpuacct:/task\n")
    root = tmp_path / "cgroup"
    control_group(root, "cpu,cpuacct/task", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert read_cgroup_quota(root, membership) is None
    control_group(root, "cpu,cpuacct", cpu__cfs_quota_us="250000\n", cpu__cfs_period_us="100000\n")
    assert read_cgroup_quota(root, membership) == 2.5


WITHOUT_KERNEL = """
import json, sys, warnings
sys.modules["sqrtdk._kernel"] = None
import numpy, sqrtdk
from sqrtdk import backends
{prepare}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("{filter}")
    for _ in range(3):
        sqrtdk.attention(*numpy.ones((3, 2, 2)))
print(json.dumps([[str(one.category.__name__), str(one.message), one.filename] for one in said]))
"""


def test_without_the_kernel_the_first_call_says_so_once():
    said = json.loads(run_python(WITHOUT_KERNEL.format(prepare="", filter="always")))
    assert len(said) == 1
    kind, message, where = said[0]
    assert kind == "SqrtdkWarning"
    assert "without its kernel (it was not compiled at installation)" in message
    assert "SQRTDK_BACKEND=reference silences this" in message
    assert where == "<string>"  # the caller's line, not ours


@pytest.mark.slow
def test_choosing_the_reference_gives_no_warning():
    by_name = WITHOUT_KERNEL.format(prepare="backends.use('reference')", filter="error")
    assert json.loads(run_python(by_name)) == []
    by_variable = WITHOUT_KERNEL.format(prepare="", filter="error")
    assert json.loads(run_python(by_variable, SQRTDK_BACKEND="reference")) == []


def test_without_the_kernel_everything_but_the_reference_says_why():
    code = (
        "import sys; sys.modules['sqrtdk._kernel'] = None\n"
        "from sqrtdk import backends\n"
        "print([(one.name, one.why_not) for one in backends.list() if not one.runs_here])\n"
        "print(backends.current())"
    )
    why = "it was not compiled at installation"
    assert run_python(code).splitlines() == [str([(name, why) for name in NAMES[:-1]]), "reference"]


def test_a_kernel_that_cannot_be_loaded_gives_its_own_error(tmp_path):
    (tmp_path / "broken.so").write_text("not a library")
    code = (
        "import importlib.machinery, importlib.util, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'sqrtdk._kernel':\n"
        f"            loader = importlib.machinery.ExtensionFileLoader(name, {str(tmp_path / 'broken.so')!r})\n"
        "            return importlib.util.spec_from_loader(name, loader)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from sqrtdk import backends\n"
        "print(backends.inspect('portable').why_not)"
    )
    assert run_python(code).startswith("it cannot be loaded: ")


def test_a_choice_holds_while_another_thread_makes_a_plan_of_the_former_one(monkeypatch):
    inside, chosen = threading.Event(), threading.Event()
    load = backends._load_kernel

    def load_slowly():
        if threading.current_thread() is worker:
            inside.set()
            assert chosen.wait(10)
        return load()

    worker = threading.Thread(target=lambda: attention(*np.ones((3, 2, 4)), statistics=False))
    monkeypatch.setattr(backends, "_load_kernel", load_slowly)
    with backends.use(None):
        worker.start()
        assert inside.wait(10)
        with backends.use("reference"):
            chosen.set()
            worker.join()
            assert backends.current() == "reference"

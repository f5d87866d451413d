"""The kernel on the threads of torch's own runtime."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from sqrtdk import backends
from sqrtdk.torch.engines import openmp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or "OpenMP" not in torch.__config__.parallel_info(),
        reason="torch has no OpenMP runtime on this platform",
    ),
]

PREPARE = """
import os, sys, threading
import torch, sqrtdk, sqrtdk.torch
from sqrtdk import _kernel
torch.set_num_threads(2)
q, k, v = torch.randn(3, 2, 4, 512, 64, generator=torch.Generator().manual_seed(0))
def attend():
    return sqrtdk.torch.scaled_dot_product_attention(q, k, v)
"""


def run(script, **environment):
    done = subprocess.run(
        [sys.executable, "-c", PREPARE + script], capture_output=True, text=True, timeout=120, env=_environ(environment)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def _environ(more):
    return {**os.environ, "OMP_NUM_THREADS": "2", **more}


needs_kernel = pytest.mark.skipif(backends.list()[2].why_not is not None, reason="no kernel compiled")


TOGETHER = """
import warnings
warnings.simplefilter("ignore")
first = attend()
print(_kernel.pool_size())
before = first.numpy().tobytes()  # not torch.equal: torch's own operations wait for ever in a forked child
child = os.fork()
if child == 0:
    os._exit(0 if attend().numpy().tobytes() == before and _kernel.pool_size() == 1 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
others = []
thread = threading.Thread(target=lambda: others.append(attend())); thread.start(); thread.join()
print(_kernel.pool_size(), torch.equal(first, others[0]))
"""


@pytest.fixture(scope="module")
def together():
    """What one process shows, because loading torch takes longer than all of it."""
    names = ("pool of the main thread", "exit of a forked child", "pool of another thread", "same bits")
    return dict(zip(names, run(TOGETHER), strict=True))


@needs_kernel
def test_the_main_thread_uses_torchs_threads_and_no_others(together):
    assert together["pool of the main thread"] == "0"


@needs_kernel
def test_other_threads_use_the_kernels_own(together):
    assert together["pool of another thread"] == "1"


@needs_kernel
def test_both_give_the_same_bits(together):
    assert together["same bits"] == "True"


@needs_kernel
def test_a_forked_child_computes(together):
    assert together["exit of a forked child"] == "0"


FORKED_BEFORE_THE_FIRST_CALL = """
import os, sys, warnings
import numpy as np
import torch
warnings.simplefilter("ignore")
torch.set_num_threads(2)
if sys.argv[1] == "imported":
    import sqrtdk.torch
torch.ones(1000, 1000).exp()  # torch's threads are started, and lost in the child
child = os.fork()
if child == 0:
    import sqrtdk.torch
    q, k, v = (torch.from_numpy(x) for x in np.random.default_rng(0).standard_normal((3, 2, 4, 512, 64)).astype("f"))
    output = sqrtdk.torch.attention(q, k, v).output.numpy()
    os._exit(0 if np.isfinite(output).all() and sqrtdk._kernel.pool_size() == 1 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@needs_kernel
@pytest.mark.parametrize("parent", ["imported", "not imported"])
def test_a_child_computes_whose_parent_used_torchs_threads_before_any_call(parent):
    with subprocess.Popen(
        [sys.executable, "-c", FORKED_BEFORE_THE_FIRST_CALL, parent],
        stdout=subprocess.PIPE,
        text=True,
        env=_environ({}),
        start_new_session=True,
    ) as process:
        try:
            assert process.communicate(timeout=120)[0].split() == ["0"]
        finally:
            if process.returncode is None:  # a child that hangs would outlive its parent
                os.killpg(process.pid, signal.SIGKILL)


@needs_kernel
def test_a_stack_size_of_the_users_own_keeps_the_kernel_off_torchs_threads():
    assert run("attend(); print(_kernel.pool_size())", OMP_STACKSIZE="1M") == ["1"]


@needs_kernel
def test_ctrl_c_reaches_a_call_on_torchs_threads_and_attention_in_numpy_keeps_its_own():
    script = """
import signal, time
q, k, v = torch.randn(3, 1, 8, 16384, 64)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
began = time.monotonic()
try:
    attend()
except KeyboardInterrupt:
    print("stopped", time.monotonic() - began < 2.0)
q, k, v = torch.randn(3, 1, 2, 64, 64)
print(bool(torch.isfinite(attend()).all()), _kernel.pool_size())
q, k, v = torch.randn(3, 2, 4, 512, 64)
sqrtdk.attention(q.numpy(), k.numpy(), v.numpy(), statistics=False)
print(_kernel.pool_size())
"""
    assert run(script) == ["stopped", "True", "True", "0", "1"]


def test_the_team_is_searched_once():
    first = openmp.find_team()
    assert openmp.find_team() == first
    assert isinstance(first, int)


def test_without_a_process_table_there_is_none(monkeypatch):
    def refuse(self):
        raise FileNotFoundError(self)

    monkeypatch.setattr(openmp.Path, "read_text", refuse)
    assert openmp._look_for_team() == 0

"""Promises of the kernel beyond right numbers: the same bits always, a quiet process, any strides, Ctrl-C."""

import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest

from levels import NATIVE
from oracle import DTYPES, draw, same
from sqrtdk import attention, backends
from sqrtdk.statistics import ROW_FIELDS

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(not NATIVE, reason="built without the kernel"),
]


def run_python(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SHAPES = {
    "tiles": ((3, 4, 131, 40), (3, 2, 197, 40), 24),
    "decode": ((2, 8, 1, 64), (2, 2, 1031, 64), 64),
    "few rows": ((1, 4, 3, 16), (1, 4, 300, 16), 5),
}
CALLS = {
    "plain": {},
    "causal": {"causal": True, "causal_offset": 40},
    "all": {"softcap": 5.0, "window": (300, 9), "causal_offset": 30, "scale": 0.7, "sinks": True, "mask": True},
}


def build(shape, call, dtype=np.float32):
    q_shape, k_shape, d_v = SHAPES[shape]
    arrays = draw(1, q_shape, k_shape, d_v, dtype)
    call = dict(CALLS[call])
    if call.get("sinks"):
        call["sinks"] = np.linspace(-1, 1, q_shape[1])
    if call.get("mask"):
        call["mask"] = np.random.default_rng(2).random((*q_shape[:-1], k_shape[2])) < 0.8
    return arrays, call


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_threads(shape, call):
    arrays, call = build(shape, call)
    with backends.use_threads(1):
        alone = attention(*arrays, **call)
    for count in (2, 3, 16):
        with backends.use_threads(count):
            same(alone, attention(*arrays, **call))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_change_over_250_repeats(shape):
    arrays, call = build(shape, "causal")
    with backends.use_threads(2):
        first = attention(*arrays, **call)
        for _ in range(250):
            same(first, attention(*arrays, **call))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_the_batch_or_on_statistics(shape, dtype):
    (q, k, v), call = build(shape, "all", DTYPES[dtype])
    whole = attention(q, k, v, **call)
    bare = attention(q, k, v, **call, statistics=False)
    assert bare.statistics is None
    assert bare.output.tobytes() == whole.output.tobytes()
    for n in range(len(q)):
        part = attention(q[n], k[n], v[n], **call | {"mask": call["mask"][n]})
        assert part.output.tobytes() == whole.output[n].tobytes()
        np.testing.assert_array_equal(part.statistics.entropy, whole.statistics.entropy[n])


@pytest.mark.slow
def test_eight_python_threads_at_once_get_the_same_bits():
    arrays, call = build("tiles", "all")
    with backends.use_threads(2):
        alone = attention(*arrays, **call)
        wrong = []

        def repeat():
            for _ in range(20):
                if attention(*arrays, **call).output.tobytes() != alone.output.tobytes():
                    wrong.append(1)

        workers = [threading.Thread(target=repeat) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_keys_have_no_influence_to_the_bit(shape, poison, dtype):
    (q, k, v), call = build(shape, "causal", DTYPES[dtype])
    mask = np.random.default_rng(3).random((q.shape[2], k.shape[2])) < 0.7
    hidden = np.array([0, 5, k.shape[2] - 1])
    mask[:, hidden] = False
    clean = attention(q, k, v, mask=mask, **call)
    dirty_k, dirty_v = k.copy(), v.copy()
    dirty_k[:, :, hidden] = poison
    dirty_v[:, :, hidden] = poison
    same(clean, attention(q, dirty_k, dirty_v, mask=mask, **call))
    additive = np.where(mask, 0.0, -np.inf).astype(np.float32)
    result = attention(q, dirty_k, dirty_v, mask=additive, **call)
    same(attention(q, k, v, mask=additive, **call), result)
    np.testing.assert_array_equal(result.output, clean.output)


def test_leading_axes_that_do_not_join_are_gone_through_one_by_one():
    """A batch of (3, 2) whose arrays and mask lie unevenly cannot be one stride; nothing is copied to make it so."""
    q, k, v = draw(4, (3, 2, 4, 19, 16), (3, 2, 2, 23, 16), 8, np.float32)
    uneven = [np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (q, k, v)]
    mask = np.random.default_rng(4).random((3, 1, 1, 19, 23)) < 0.7
    scale = np.linspace(0.1, 0.5, 2)[:, None, None]
    for call in ({}, {"mask": mask}, {"scale": scale}, {"mask": mask, "scale": scale}):
        expected = attention(q, k, v, **call)
        same(expected, attention(*uneven, **call))
        for i, j in np.ndindex(3, 2):
            one = {}
            if "mask" in call:
                one["mask"] = mask[i, 0]
            if "scale" in call:
                one["scale"] = float(scale[j, 0, 0])
            part = attention(q[i, j], k[i, j], v[i, j], **one)
            assert part.output.tobytes() == expected.output[i, j].tobytes()
            np.testing.assert_array_equal(part.statistics.logsumexp, expected.statistics.logsumexp[i, j])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_other_byte_order_is_read_and_kept(dtype):
    q, k, v = draw(5, (2, 9, 16), (2, 11, 16), 8, dtype)
    mask = np.random.default_rng(5).standard_normal((9, 11)).astype(dtype)
    swapped = [x.astype(x.dtype.newbyteorder()) for x in (q, k, v, mask)]
    result = attention(*swapped[:3], mask=swapped[3])
    assert result.output.dtype == swapped[0].dtype
    np.testing.assert_array_equal(result.output.astype(dtype), attention(q, k, v, mask=mask).output)


def test_a_misaligned_additive_mask():
    q, k, v = draw(6, (2, 9, 16), (2, 11, 16), 8, np.float32)
    mask = np.random.default_rng(6).standard_normal((9, 11))
    raw = np.zeros(mask.nbytes + 3, np.uint8)
    shifted = raw[3:].view(np.float64).reshape(mask.shape)
    shifted[...] = mask
    same(attention(q, k, v, mask=mask), attention(q, k, v, mask=shifted))


def test_offsets_beyond_32_bits():
    """Keys, values and mask two billion elements apart, in memory that is reserved and never touched in between."""
    apart = 2**30 + 7
    q, k, v = draw(7, (1, 2, 5, 4), (1, 2, 3, 4), 4, np.float16)
    try:
        far = [np.zeros(2 * apart + 64, np.float16) for _ in range(2)]
        bits = np.zeros(2 * apart + 64, bool)
    except MemoryError:
        pytest.skip("this machine does not reserve 11 GB")
    spread = [np.lib.stride_tricks.as_strided(x, (1, 2, 3, 4), (0, 8, 2 * apart, 2)) for x in far]
    for wide, given in zip(spread, (k, v), strict=True):
        wide[...] = given
    mask = np.lib.stride_tricks.as_strided(bits, (5, 3), (1, apart))
    mask[...] = np.random.default_rng(7).random((5, 3)) < 0.7
    same(attention(q, k, v, mask=mask.copy()), attention(q, *spread, mask=mask))


def test_70000_tiny_batches():
    rng = np.random.default_rng(8)
    q, k, v = rng.standard_normal((3, 70_000, 1, 2, 4)).astype(np.float32)
    with backends.use_threads(2):
        result = attention(q, k, v)
    for n in (0, 1, 65_535, 65_536, 69_999):
        same(attention(q[n], k[n], v[n]), found_at(result, n))


def found_at(result, n):
    """The n-th entry of a batch's result."""
    rows = {name: getattr(result.statistics, name)[n] for name in ROW_FIELDS}
    return result._replace(output=result.output[n], statistics=type(result.statistics)(**rows))


def test_a_broadcast_mask_is_never_written_out():
    q, k, v = draw(9, (2, 8, 1024, 8), (2, 8, 1024, 8), 8, np.float32)
    mask = np.broadcast_to(np.random.default_rng(9).random((2, 1, 1, 1024)) < 0.9, (2, 8, 1024, 1024))
    tracemalloc.start()
    try:
        attention(q, k, v, mask=mask)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20  # the mask written out is 16 MiB


FLAT = """
import resource, sys
import numpy as np
from sqrtdk import attention, backends
backends.use(sys.argv[1])
backends.use_threads(2)
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 40, 16)).astype(np.float32)
strided = [np.asfortranarray(x) for x in (q, k, v)]
mask = np.ones((40, 40), bool)
def repeat(count):
    for _ in range(count):
        attention(q, k, v, mask=mask, sinks=np.zeros(4))
        attention(*strided, statistics=False, causal=True)
        attention(q[..., :1, :], k, v)
        attention(k, q[..., ::-1], v, scale="cosine")
def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
repeat(500)
before = held()
repeat(2500)
print(held() - before)
"""


@pytest.mark.slow
def test_memory_is_flat_over_10000_calls(native):
    assert int(run_python(FLAT, native)) < 2**20


FORK = """
import os, sys
import numpy as np
from sqrtdk import attention, backends
backends.use(sys.argv[1])
backends.use_threads(2)
q, k, v = np.random.default_rng(0).standard_normal((3, 4, 512, 64)).astype(np.float32)
expected = attention(q, k, v).output.tobytes()
for _ in range(5):
    child = os.fork()
    if child == 0:
        same = all(attention(q, k, v).output.tobytes() == expected for _ in range(3))
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if attention(q, k, v).output.tobytes() == expected else 1)
        os._exit(0 if same and os.waitpid(grandchild, 0)[1] == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0, "the child did not compute"
    assert attention(q, k, v).output.tobytes() == expected
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_computes(native):
    run_python(FORK, native)


FORK_WHILE_BUSY = """
import os, sys, threading
import numpy as np
from sqrtdk import attention, backends
backends.use(sys.argv[1])
backends.use_threads(2)
q, k, v = np.random.default_rng(0).standard_normal((3, 4, 512, 64)).astype(np.float32)
expected = attention(q, k, v).output.tobytes()
stop = threading.Event()
def work():
    while not stop.is_set():
        attention(q, k, v)
worker = threading.Thread(target=work)
worker.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        os._exit(0 if attention(q, k, v).output.tobytes() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0, "the child did not compute"
stop.set()
worker.join()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_forked_in_the_middle_of_another_threads_call_computes(native):
    run_python(FORK_WHILE_BUSY, native)


ENVIRONMENT = """
import ctypes, sys
import numpy as np
from sqrtdk import _kernel, attention, backends
from sqrtdk.operation.call import Call
from sqrtdk.operation.engines.kernel import pack
backends.use(sys.argv[1])
libm = ctypes.CDLL("libm.so.6")
q, k, v = np.random.default_rng(0).standard_normal((3, 4, 300, 64)).astype(np.float32)
q[0], v[1] = 1e-38, 1e-39   # products and values among the denormals
for threads in (1, 2):
    backends.use_threads(threads)
    expected = attention(q, k, v)
    for mode in (0x400, 0x800, 0xC00):  # x86: down, up, to zero
        assert libm.fesetround(mode) == 0
        found = attention(q, k, v, scale=0.125)
        kept = libm.fegetround()
        libm.fesetround(0)
        assert kept == mode, (kept, mode)
        assert found.output.tobytes() == expected.output.tobytes(), mode
        assert found.statistics.entropy.tobytes() == expected.statistics.entropy.tobytes(), mode
    # A row of so many keys is computed in parts, which are put together after the threads have ended.
    one, many = q[2:3, :1], np.random.default_rng(1).standard_normal((1, 2000, 64)).astype(np.float32)
    expected = attention(one, many, many)
    for mode in (0x400, 0x800, 0xC00):
        libm.fesetround(mode)
        found = attention(one, many, many, scale=0.125)
        libm.fesetround(0)
        assert found.output.tobytes() == expected.output.tobytes(), mode
        assert found.statistics.entropy.tobytes() == expected.statistics.entropy.tobytes(), mode
    libm.feenableexcept(0x04)  # division by zero stops the process
    attention(one, many, many)
    libm.fedisableexcept(0x04)
    output = np.empty_like(q)
    call = Call(q, k, v, factor=0.125)
    arguments = (sys.argv[1], threads, 0, *pack(call, 2, 0, call.arrays), output, None, None)
    every_flag = 0x3D
    libm.feclearexcept(every_flag)
    _kernel.forward(*arguments)
    assert libm.fetestexcept(every_flag) == 0, hex(libm.fetestexcept(every_flag))
    libm.feraiseexcept(0x04)  # division by zero, the caller's own
    _kernel.forward(*arguments)
    assert libm.fetestexcept(every_flag) == 0x04
"""


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of rounding modes are those of x86")
def test_the_floating_point_environment_neither_matters_nor_changes(native):
    run_python(ENVIRONMENT, native)


FLUSHED = """
import sys
import numpy as np, torch
from sqrtdk import attention, backends
v = np.full((8, 40, 8), 3e-39, np.float32)
q = k = np.random.default_rng(0).standard_normal((8, 40, 8)).astype(np.float32)
many, small = np.ones((1, 2000, 8), np.float32), np.full((1, 2000, 8), 3e-39, np.float32)
for level in sys.argv[1:]:
    with backends.use(level):
        expected = attention(q, k, v).output
        assert (expected != 0).all(), level
        assert torch.set_flush_denormal(True)
        found = attention(q, k, v).output
        still = bool(torch.tensor(1e-38) * 0.1 == 0)
        torch.set_flush_denormal(False)
        assert found.tobytes() == expected.tobytes(), level
        assert still, f"{level} switched flushing off"
        expected = attention(q[:1, :1], many, small).output
        torch.set_flush_denormal(True)
        found = attention(q[:1, :1], many, small).output
        torch.set_flush_denormal(False)
        assert (expected != 0).all(), level
        assert found.tobytes() == expected.tobytes(), level
"""


# One process tries every level, because loading torch takes longer than the calls.
@pytest.mark.slow
@pytest.mark.parametrize("native", NATIVE[:1], indirect=True, scope="module")
def test_flush_to_zero_of_the_caller_neither_matters_nor_changes():
    pytest.importorskip("torch")
    run_python(FLUSHED, *NATIVE)


INTERRUPTED = """
import sys, time
import numpy as np
from sqrtdk import attention, backends
backends.use(sys.argv[1])
backends.use_threads(2)
q = np.ones((16, 16384, 128), np.float32)
small = np.random.default_rng(0).standard_normal((3, 2, 64, 32)).astype(np.float32)
before = attention(*small)
print("started", flush=True)
try:
    for _ in range(100):
        attention(q, q, q)
except KeyboardInterrupt:
    print("interrupted", flush=True)
after = attention(*small)
assert after.output.tobytes() == before.output.tobytes()
print("usable", flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_is_honoured_within_half_a_second_and_leaves_the_library_usable(native):
    waited = []
    for _ in range(3):  # a busy machine may be late once
        with subprocess.Popen([sys.executable, "-c", INTERRUPTED, native], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline() == "started\n"
            time.sleep(0.7)
            start = time.monotonic()
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "interrupted\n"
            waited.append(time.monotonic() - start)
            assert child.stdout.readline() == "usable\n"
            assert child.wait() == 0
        if waited[-1] < 0.5:
            break
    assert min(waited) < 0.5


DAEMONS = """
import sys, threading, time
import numpy as np
from sqrtdk import attention, backends
backends.use(sys.argv[1])
backends.use_threads(2)
q = np.ones((1, int(sys.argv[2]), 64), np.float32)
started = threading.Barrier(4)
def work():
    started.wait()
    while True:
        attention(q, q, q)
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
started.wait()
time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [300, 6000])
def test_the_interpreter_ends_in_peace_while_daemon_threads_compute(native, rows):
    """Short calls are met as they come back for the GIL, long ones as they look for Ctrl-C."""
    run_python(DAEMONS, native, str(rows))

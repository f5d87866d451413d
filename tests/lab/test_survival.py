"""Faults injected into sweeps: whatever ends or breaks, the next start leaves the table of an uninterrupted sweep."""

import errno
import mmap
import os
import random
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import warnings

import pytest

from sqrtdk.errors import SqrtdkError
from sqrtdk.lab import AblationSpec, Lab, Processes, RunSpec, Store, ablate, worker
from sqrtdk.lab.checkpoints import Checkpoints, read_state

SPECS = [
    RunSpec(d_model=16, d_k=8, batch=2, steps=10, record_every=4, scale="sqrt"),
    RunSpec(d_model=16, d_k=8, batch=2, steps=5, record_every=4, scale="learned", start_scale="none", start_steps=5),
    RunSpec(d_model=16, d_k=8, batch=2, steps=10, lr=1e30),
    RunSpec(d_model=16, d_k=8, batch=2, steps=10, record_every=4, task="text", task_parameters={"context": 8}),
]
pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Every step is reported, shown in the store and followed by a checkpoint."""
    for name in ("_REPORT_SECONDS", "_CURVES_SECONDS", "_CHECKPOINT_SECONDS", "_CHECKPOINT_PAUSE"):
        monkeypatch.setattr(worker, name, 0.0)


def numbers(records):
    return [({k: v for k, v in one.row.items() if k != "seconds"}, dict(one.curves), one.maps) for one in records]


def sweep(path):
    with Lab(path, Processes(1)) as lab:
        return numbers(lab.run(SPECS))


@pytest.fixture(scope="module")
def truth():
    return sweep(None)


class Crossings:
    """Counts the points at which a process could end, before and after each change of a file; one has a fault.

    Its counters lie in memory that a forked child shares: points passed, and the last step of each run that is safe.
    """

    def __init__(self):
        self.shared = mmap.mmap(-1, 64)
        self.fault, self.at = None, None

    def get(self, slot):
        return struct.unpack_from("q", self.shared, 8 * slot)[0]

    def set(self, slot, value):
        struct.pack_into("q", self.shared, 8 * slot, value)

    def cross(self):
        passed = self.get(0)
        self.set(0, passed + 1)
        if passed == self.at:
            self.fault()

    def around(self, function):
        def crossing(*arguments, **named):
            self.cross()
            result = function(*arguments, **named)
            self.cross()
            return result

        return crossing

    def install(self, fault=None, at=None):
        """Count in this process from here on; it is a child, and never lives without."""
        self.fault, self.at = fault, at
        put, keys = Checkpoints.put, [spec.key for spec in SPECS]

        def put_and_note(checkpoints, key, content):
            put(checkpoints, key, content)
            self.set(1 + keys.index(key), read_state(content, key)["step"])

        os.replace, os.fsync = self.around(os.replace), self.around(os.fsync)
        Checkpoints.put = put_and_note
        Store._insert, Store.put = self.around(Store._insert), self.around(Store.put)
        Checkpoints.drop = self.around(Checkpoints.drop)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work):
    """Do something in a fork of this warm process; return how it ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            warnings.simplefilter("ignore")
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def sweep_with_fault(path, crossings, fault, at):
    def work():
        crossings.install(fault, at)
        sweep(path)

    return in_child(work)


def count_points(folder):
    crossings = Crossings()
    assert sweep_with_fault(folder / "counted.sqlite", crossings, None, None) == 0
    return crossings.get(0)


def finish_and_compare(path, truth, monkeypatch, safe=(0, 0, 0, 0)):
    """Go on in this process: the table is complete and right, runs began where they were safe, nothing is left."""
    from sqrtdk.lab import train

    real, began = train.train, {}

    def noting(spec, report, checkpoint, maps):
        began[spec.key] = 0 if checkpoint is None else read_state(checkpoint, spec.key)["step"]
        return real(spec, report, checkpoint, maps)

    with Store(path) as store:
        finished = {spec.key: record for spec in SPECS if (record := store.get(spec)) is not None}
    monkeypatch.setattr(train, "train", noting)
    assert sweep(path) == truth
    monkeypatch.setattr(train, "train", real)
    assert not finished.keys() & began.keys(), "a finished run is not trained again"
    for spec, step in zip(SPECS, safe, strict=True):
        assert spec.key in finished or began[spec.key] >= step
    with Store(path, read_only=True) as store:
        assert len(store) == len(SPECS)
        assert store.running(10) == []
        for key, record in finished.items():
            assert store.runs(1, [key])[0]["row"] == record.row  # its seconds too: never written again
    assert not path.with_name(f"{path.name}.lock").exists()
    assert not path.with_suffix(".checkpoints").exists()


@pytest.mark.timeout(1200)
def test_a_kill_at_every_point_of_a_sweep_loses_nothing(tmp_path, truth, monkeypatch):
    """One child for each point, more than 300."""
    points = count_points(tmp_path)
    assert points >= 300
    began = sum(os.times()[:4])
    for at in range(points):
        path, crossings = tmp_path / f"{at}.sqlite", Crossings()
        assert os.WTERMSIG(sweep_with_fault(path, crossings, die, at)) == signal.SIGKILL
        safe = [crossings.get(1 + index) for index in range(len(SPECS))]
        finish_and_compare(path, truth, monkeypatch, safe)
    assert (sum(os.times()[:4]) - began) / points < 1.0, "seconds of CPU time, of children too"


@pytest.mark.parametrize("seed", range(10))
def test_kills_upon_kills_lose_nothing(tmp_path, truth, monkeypatch, seed):
    """Every start gets a little further, or dies where the one before died."""
    rng, path = random.Random(seed), tmp_path / "runs.sqlite"
    for _ in range(6):
        sweep_with_fault(path, Crossings(), die, rng.randrange(60))
    finish_and_compare(path, truth, monkeypatch)


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_checkpoint_is_said_and_costs_steps_alone(tmp_path, truth, monkeypatch, seed):
    rng, path = random.Random(seed), tmp_path / "runs.sqlite"
    sweep_with_fault(path, Crossings(), die, 30 + rng.randrange(60))
    files = sorted((tmp_path / "runs.checkpoints").glob("*[0-9a-f].safetensors"))
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        if seed % 2:
            content = content[: rng.randrange(len(content))]
        else:
            content[8 + rng.randrange(len(content) - 8)] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    with pytest.warns(UserWarning, match="cannot be used"):
        finish_and_compare(path, truth, monkeypatch)


def refuse():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("at", range(4, 64, 4))
def test_a_disk_that_is_full_for_a_moment_costs_nothing_that_is_finished(tmp_path, truth, monkeypatch, at):
    """While a checkpoint is written the run goes on; while a run is kept the sweep ends, and the next start goes on."""
    path = tmp_path / "runs.sqlite"
    sweep_with_fault(path, Crossings(), refuse, at)
    finish_and_compare(path, truth, monkeypatch)


def test_a_full_disk_of_the_store_is_one_error_and_the_next_start_goes_on(tmp_path, truth, monkeypatch):
    path = tmp_path / "runs.sqlite"
    with Lab(path, Processes(1)) as lab:
        pages = lab.store._connection.execute("PRAGMA page_count").fetchone()[0]
        lab.store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(SqrtdkError, match="make room and start again"):
            lab.run(SPECS)
    finish_and_compare(path, truth, monkeypatch)


LINE = "ablate --scale none,sqrt --seeds 3 --steps 400 --d-model 32 --d-k 16"
GRID = AblationSpec(scales=("none", "sqrt"), seeds=3, steps=400, d_model=32, d_ks=(16,))
# The command of a terminal, with checkpoints every tenth of a second instead of every four.
COMMAND = (
    "import sys\n"
    "from sqrtdk.commands.cli import main\n"
    "from sqrtdk.lab import worker\n"
    "worker._REPORT_SECONDS = worker._CHECKPOINT_SECONDS = 0.02\n"
    "if __name__ == '__main__':\n"
    "    main(sys.argv[1:])\n"
)


def start(folder, path, workers, line=LINE):
    script = folder / "command.py"
    script.write_text(COMMAND)
    arguments = [*line.split(), "--workers", str(workers), "--store", str(path)]
    return subprocess.Popen(
        [sys.executable, str(script), *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def count_safe(path):
    """Return the runs that are kept, and the latest change of a checkpoint."""
    changes = [file.stat().st_mtime_ns for file in path.with_suffix(".checkpoints").glob("*") if file.exists()]
    try:
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=30)
        try:
            return connection.execute("SELECT COUNT(*) FROM runs").fetchone()[0], max(changes, default=0)
        finally:
            connection.close()
    except sqlite3.OperationalError:
        return 0, max(changes, default=0)


def wait_for_change(path, process, before):
    deadline = time.monotonic() + 120
    while process.poll() is None and count_safe(path) == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def compare_with_uninterrupted(path):
    with Lab(path, Processes(1)) as lab, Lab(None, Processes(1)) as fresh:
        kept = lab.store.records("ablation")
        assert len(lab.store) == 6
        again, whole = ablate(GRID, lab), ablate(GRID, fresh)
    for record in (*kept, again):
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in record.tables["runs"]]
        assert rows == [{k: v for k, v in row.items() if k != "seconds"} for row in whole.tables["runs"]]
        assert {k: v for k, v in record.tables.items() if k != "runs"} == {
            k: v for k, v in whole.tables.items() if k != "runs"
        }
        assert record.curves == whole.curves


@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [1, 2])
def test_ten_real_kills_of_the_command_leave_the_table_of_an_uninterrupted_one(tmp_path, workers):
    """Twenty in all. Each comes soon after the next run or checkpoint is on the disk."""
    rng, path = random.Random(workers), tmp_path / "runs.sqlite"
    for _ in range(10):
        process, before = start(tmp_path, path, workers), count_safe(path)
        wait_for_change(path, process, before)
        time.sleep(rng.random() / 10)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it must not have come to its end before"
    process = start(tmp_path, path, workers)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    compare_with_uninterrupted(path)
    assert not path.with_suffix(".checkpoints").exists()


def on_this_machine(seconds):
    """Return a limit for a machine that may have more to do than its processors can."""
    return seconds * max(1.0, os.getloadavg()[0] / os.cpu_count())


SLOW = "ablate --scale none,sqrt --seeds 2 --steps 100000 --d-model 32 --d-k 16"


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_writes_a_checkpoint_and_leaves_within_five_seconds(tmp_path, workers):
    path = tmp_path / "runs.sqlite"
    process = start(tmp_path, path, workers, SLOW)
    folder = path.with_suffix(".checkpoints")

    def list_latest():
        return [file for file in folder.glob("*.safetensors") if ".before" not in file.name]

    try:
        while process.poll() is None and len(list_latest()) < workers:
            time.sleep(0.01)
        before, began = count_safe(path)[1], time.time_ns()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (time.time_ns() - began) / 1e9 < on_this_machine(5.0)
    assert process.returncode == 130, err
    assert count_safe(path)[1] >= max(before, began - 10**8)
    assert len(list_latest()) == workers
    assert all(read_state(file.read_bytes(), file.stem)["step"] > 0 for file in list_latest())


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_twice_leaves_within_a_second(tmp_path, workers):
    """Steps of this model take long: the first Ctrl-C waits for one, the second does not."""
    path = tmp_path / "runs.sqlite"
    process = start(tmp_path, path, workers, "ablate --scale sqrt --seeds 2 --steps 1000 --d-model 512 --batch 256")
    try:
        wait_for_change(path, process, (0, 0))
        time.sleep(0.5)  # a write that waits for the disk holds signals back: two would arrive as one
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        began = time.monotonic()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=60)  # workers end with their step, and hold the pipes until then
        assert time.monotonic() - began < on_this_machine(1.0)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130


def test_a_second_command_on_a_store_is_refused_at_once_and_names_the_first(tmp_path):
    path = tmp_path / "runs.sqlite"
    first = start(tmp_path, path, 1, SLOW)
    try:
        wait_for_change(path, first, (0, 0))
        second = start(tmp_path, path, 1, SLOW)
        _, err = second.communicate(timeout=60)
        assert second.returncode == 2
        assert f"--store {path} is in use by process {first.pid} on " in err
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()

"""Sweeps: nothing finished is lost, by a failure, a dead worker, an interrupt or a kill."""

import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from sqrtdk.children import interrupts_held
from sqrtdk.errors import InvalidTypeError, InvalidValueError, MissingExtraError, SqrtdkError, SqrtdkWarning
from sqrtdk.lab import AblationSpec, Lab, Processes, Store, ablate, laboratory, processes, swap_scale, worker
from sqrtdk.lab import RunSpec as Spec
from sqrtdk.lab.outcomes import choose_best
from sqrtdk.lab.store import RunRecord
from sqrtdk.lab.sweep import Report, Sweep
from sqrtdk.operation import cpus
from sqrtdk.report import figure_for

SMALL = {"d_model": 16, "steps": 10, "batch": 4}


def grid(count, **changes):
    return [Spec(**{**SMALL, **changes}, seed=seed) for seed in range(count)]


def make_lab(path=None, workers=1, progress=None):
    return Lab(path, Processes(workers), progress)


def losses(records):
    return [record.row["final_loss"] for record in records]


def test_records_come_in_the_order_of_the_specs_and_are_reused():
    specs = grid(3)
    with make_lab() as lab:
        first = lab.run(specs)
        assert [record.row["seed"] for record in first] == [0, 1, 2]
        told = []
        lab.progress = told.append
        again = lab.run(specs[::-1] + specs[:1])
    assert again == [*first[::-1], first[0]]
    assert [(state.done, state.total, state.reused) for state in told] == [(3, 3, 3)]
    assert told[0].remaining == 0.0


def test_progress_counts_up_to_the_end(monkeypatch):
    monkeypatch.setattr(worker, "_REPORT_SECONDS", 0.0)
    specs = grid(3)
    with make_lab() as lab:
        lab.run(specs[:1])
        told = []
        lab.progress = told.append
        lab.run(specs)
    assert (told[0].done, told[0].total, told[0].reused, told[0].remaining) == (1, 3, 1, None)
    assert told[0].fraction == pytest.approx(1 / 3)
    assert (told[-1].done, told[-1].fraction, told[-1].remaining) == (3, 1.0, 0.0)
    fractions = [state.fraction for state in told]
    assert fractions == sorted(fractions)
    assert len(set(fractions)) > 10, "progress inside a run must be told too"
    assert all(state.remaining is not None and state.remaining >= 0.0 for state in told[1:])


def test_a_failing_run_does_not_lose_the_others(monkeypatch):
    from sqrtdk.lab import train

    real = train.train

    def breaking(spec, *more):
        if spec.seed == 1:
            raise RuntimeError("out of paper")
        return real(spec, *more)

    monkeypatch.setattr(train, "train", breaking)
    with make_lab() as lab:
        records = lab.run(grid(3))
        assert [record.row["status"] for record in records] == ["done", "failed", "done"]
        assert records[1].row["message"] == "RuntimeError: out of paper"
        monkeypatch.undo()
        assert [record.row["status"] for record in lab.run(grid(3))] == ["done"] * 3


def test_a_run_that_was_trained_twice_is_kept_once():
    """The first that finishes counts, and late reports of the other do not."""
    (spec,) = grid(1)
    with make_lab() as lab:
        (record,) = lab.run([spec])
        sweep = Sweep(grid(1, lr=2e-3), lab.store, None)
        other = sweep.take().spec
        sweep.finish(other, record)
        sweep.finish(other, RunRecord({"status": "done"}))
        sweep.advance(other, Report(3, {"step": [3]}))
        assert lab.store.get(other) == sweep.records[other.key] == record
        assert not sweep.running
        assert lab.store.running(10) == []


@pytest.mark.parametrize(("workers", "error"), [(0, InvalidValueError), (1.5, InvalidTypeError)])
def test_bad_workers_are_refused(workers, error):
    with pytest.raises(error, match="workers must be"):
        Processes(workers)


def test_workers_obey_the_quota_of_the_cgroup(monkeypatch):
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(cpus, "read_cgroup_quota", lambda: 2.5)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads of a process, not processes
    assert Processes().workers == 3
    monkeypatch.setattr(cpus, "read_cgroup_quota", lambda: None)
    assert Processes().workers == 16


@pytest.mark.slow
def test_a_finished_ablation_is_in_the_store_and_drawn_from_there(tmp_path):
    spec = AblationSpec(**SMALL, seeds=2)
    with make_lab(tmp_path / "runs.sqlite") as lab:
        record = ablate(spec, lab)
        ablate(spec, lab)
    with Store(tmp_path / "runs.sqlite") as store:
        assert store.records("ablation") == [record]
        assert store.records("swap") == []
        assert figure_for(store.records()[0]) == figure_for(record)


def test_without_torch_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(laboratory.importlib.util, "find_spec", lambda name: None)
    with make_lab() as lab, pytest.raises(MissingExtraError, match=r"sqrtdk\[torch\]"):
        lab.run(grid(1))


@pytest.mark.slow
def test_ablation_record_is_complete():
    record = ablate(AblationSpec(**SMALL, seeds=2, lrs=(1e-3, 3e-3), selection=3), make_lab())
    assert record.kind == "ablation"
    assert {name: len(rows) for name, rows in record.tables.items()} == {
        "runs": 6,
        "summary": 3,
        "best": 3,
        "comparisons": 2,
        "selection": 6,
        "selection_runs": 18,
    }
    chosen = choose_best(record.tables["selection"])
    assert [(row["scale"], row["lr"]) for row in record.tables["best"]] == [(row["scale"], row["lr"]) for row in chosen]
    assert [(row["lrs"], row["at_edge"]) for row in record.tables["best"]] == [(2, True)] * 3
    assert {row["seed"] for row in record.tables["runs"]} == {0, 1}
    assert {row["seed"] for row in record.tables["selection_runs"]} == {1000, 1001, 1002}
    curves = record.curves["runs"]
    assert len(curves) == 6
    assert {"scale", "seed", "init", "lr", "d_k", "step", "loss", "grad_q", "jacobian_trace"} <= set(curves[0])
    assert any("solved by 0 of 2 seeds" in sentence for sentence in record.reading)
    assert {"runs", "summary", "curves", "reading", "spec_hash"} <= set(record.as_json())


@pytest.mark.slow
def test_ablation_of_scales_that_learn():
    names = ("sqrt", "learned", "query", "position", "qk_norm")
    record = ablate(AblationSpec(**{**SMALL, "scales": names}, seeds=2), make_lab())
    summary = {row["scale"]: row for row in record.tables["summary"]}
    assert summary["sqrt"]["temperature_median"] is None
    for name in names[1:]:
        least, largest = summary[name]["temperature_range"]
        assert least < summary[name]["temperature_median"] < largest
        assert any(text.startswith(name) and "τ/√dₖ went from 1 to" in text for text in record.reading)
    assert {row["scale"] for row in record.tables["comparisons"]} == set(names[1:])


@pytest.mark.slow
def test_swap_record_holds_the_stages_side_by_side():
    base = Spec(d_model=16, batch=4)
    record = swap_scale(base, seeds=2, start_steps=8, steps=5, lab=make_lab())
    alone = ablate(AblationSpec(d_model=16, batch=4, scales=("sqrt",), seeds=2, steps=8), make_lab())
    scratch = ablate(AblationSpec(d_model=16, batch=4, scales=("none",), seeds=2, steps=5), make_lab())
    rows = record.tables["swap"]
    assert [row["trained_loss"] for row in rows] == [row["final_loss"] for row in alone.tables["runs"]]
    assert [row["scratch_loss"] for row in rows] == [row["final_loss"] for row in scratch.tables["runs"]]
    assert [row["stage"] for row in record.tables["summary"]] == ["trained", "swapped", "continued", "scratch"]
    middle = record.tables["summary"][1]
    assert middle["loss_median"] == pytest.approx(sum(row["swapped_loss"] for row in rows) / 2)
    assert middle["meaning"] == "the same weights, no scaling in place of 1/√dₖ"


def test_a_diverged_seed_counts_as_unsolved_in_a_swap():
    record = swap_scale(Spec(d_model=16, batch=4, lr=1e30), seeds=2, start_steps=5, steps=5, lab=make_lab())
    for row in record.tables["summary"]:
        assert (row["n"], row["diverged"], row["failed"]) == (2, 2, 0)
        assert row["solved_fraction"] == 0.0
        assert row["loss_median"] is None
    assert "∞" in record.headline
    assert "solved by 0 of 2 seeds" in record.reading[1]


@pytest.mark.slow
def test_processes_give_the_same_numbers_as_one(tmp_path):
    specs = grid(4)
    with make_lab() as alone, make_lab(tmp_path / "runs.sqlite", workers=2) as shared:
        here = alone.run(specs)
        there = shared.run(specs)
    assert losses(here) == losses(there)
    assert not multiprocessing.active_children()


@pytest.mark.long
def test_workers_stay_for_the_next_sweep_and_one_that_died_meanwhile_is_replaced():
    with make_lab(workers=2) as lab:
        lab.run(grid(2))
        first = sorted(child.pid for child in multiprocessing.active_children())
        assert len(first) == 2
        lab.run(grid(2, lr=2e-3))
        assert sorted(child.pid for child in multiprocessing.active_children()) == first
        os.kill(first[0], signal.SIGKILL)
        wait_until(lambda: len(multiprocessing.active_children()) == 1, 30)
        records = lab.run(grid(4, lr=3e-3))
        assert [record.row["status"] for record in records] == ["done"] * 4
        second = {child.pid for child in multiprocessing.active_children()}
        assert len(second) == 2
        assert second & set(first) == {first[1]}
    assert not multiprocessing.active_children()


@pytest.mark.long
def test_workers_that_were_prepared_are_used():
    with make_lab(workers=2) as lab:
        lab.prepare()
        prepared = {child.pid for child in multiprocessing.active_children()}
        assert len(prepared) == 2
        records = lab.run(grid(3))
        assert [record.row["status"] for record in records] == ["done"] * 3
        assert {child.pid for child in multiprocessing.active_children()} == prepared
    with make_lab(workers=1) as lab:
        lab.prepare()
        assert not multiprocessing.active_children()


def kill_workers(times):
    """Return a callback that kills a worker whenever a run has gone on, so many times, and the list of those killed."""
    killed = []

    def kill(state):
        if 0.0 < state.fraction < 1.0 and len(killed) < times:
            victim = next((child for child in multiprocessing.active_children() if child.pid not in killed), None)
            if victim is not None:
                killed.append(victim.pid)
                os.kill(victim.pid, signal.SIGKILL)

    return kill, killed


@pytest.mark.long
def test_the_run_of_a_dead_worker_goes_on_in_another():
    kill, killed = kill_workers(2)
    specs = grid(5, steps=600)
    with make_lab(workers=2, progress=kill) as lab:
        records = lab.run(specs)
    assert len(killed) == 2
    with make_lab() as alone:
        assert losses(records) == losses(alone.run(specs))


class DeadAtStart:
    """A worker's process that ended with an exit code before it was ready."""

    def __init__(self, code):
        self.end = lambda: code


def test_workers_that_are_killed_while_they_start_are_replaced_twice():
    with make_lab() as lab:
        sweep = Sweep(grid(1), lab.store, None)
        for _ in range(2):
            processes._note_death(sweep, processes._Worker(DeadAtStart(-9)))
        with pytest.raises(SqrtdkError, match=r"exit code -9 before its first run; memory may be short: give fewer"):
            processes._note_death(sweep, processes._Worker(DeadAtStart(-9)))
        with pytest.raises(
            SqrtdkError, match=r'exit code 1 before its first run; call this .* `if __name__ == "__main'
        ):
            processes._note_death(Sweep(grid(1), lab.store, None), processes._Worker(DeadAtStart(1)))


def test_steps_of_a_checkpoint_count_as_done_but_not_for_the_pace(tmp_path):
    from sqrtdk.lab.train import train

    (spec,), made, told = grid(1), {}, []
    train(spec, lambda step, curves, make, maps: made.update({step: make()}))
    with make_lab(tmp_path / "runs.sqlite") as lab:
        lab.store.checkpoints.put(spec.key, made[5])
        sweep = Sweep([spec], lab.store, told.append)
        assert sweep.take().checkpoint == made[5]
        sweep.tell()
        sweep.advance(spec, Report(6))
    assert (told[0].fraction, told[0].remaining) == (0.5, None)
    assert told[1].fraction == 0.6
    assert told[1].remaining == pytest.approx(4 * told[1].elapsed)


def test_a_run_whose_workers_die_three_times_has_failed():
    (spec,) = grid(1)
    with make_lab() as lab:
        sweep = Sweep([spec], lab.store, None)
        for _ in range(2):
            assert sweep.take().spec == spec
            sweep.lose(spec, "the worker process ended with exit code -9")
        assert list(sweep.pending) == [spec]
        assert not sweep.records
        sweep.take()
        sweep.lose(spec, "the worker process ended with exit code -9")
        assert not sweep.pending
        assert sweep.records[spec.key].row["message"] == "the worker process ended with exit code -9, for the 3rd time"


@pytest.mark.long
def test_an_interrupt_stops_the_workers_and_keeps_what_is_done(tmp_path):
    def interrupt(state):
        if state.done == 1:
            raise KeyboardInterrupt

    path = tmp_path / "runs.sqlite"
    with make_lab(path, workers=2, progress=interrupt) as lab, pytest.raises(KeyboardInterrupt):
        lab.run(grid(6, steps=100))
    assert not multiprocessing.active_children()
    with Store(path) as store:
        assert len(store) == 1


SCRIPT = """
import sys
import threading
from pathlib import Path
from sqrtdk.lab import AblationSpec, Lab, Processes, ablate

if __name__ == "__main__":
    spec = AblationSpec(scales=("none", "sqrt"), seeds=int(sys.argv[2]), steps=int(sys.argv[3]), d_model=16, batch=4)
    with Lab(Path(sys.argv[1]), Processes(2)) as lab:
        ablate(spec, lab)
"""


def start_sweep(folder, path, seeds, steps):
    script = folder / "sweep_script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen([sys.executable, str(script), str(path), str(seeds), str(steps)])


def count_runs(path):
    if not path.exists():
        return 0
    connection = sqlite3.connect(path, timeout=30)
    try:
        return connection.execute("SELECT COUNT(*) FROM runs").fetchone()[0]
    except sqlite3.OperationalError:
        return 0
    finally:
        connection.close()


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as listing:
        return [int(child) for child in listing.read().split()]


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
def test_a_killed_sweep_keeps_its_runs_leaves_no_orphans_and_goes_on(tmp_path):
    path = tmp_path / "runs.sqlite"
    sweep = start_sweep(tmp_path, path, seeds=20, steps=120)
    try:
        wait_until(lambda: count_runs(path) >= 3, 90)
        children = children_of(sweep.pid)
        assert len(children) >= 2
    finally:
        sweep.send_signal(signal.SIGKILL)
        sweep.wait()
    wait_until(lambda: not any(os.path.exists(f"/proc/{child}") for child in children), 20)
    kept = count_runs(path)
    assert 3 <= kept < 40, "the kill must come in the middle"

    spec = AblationSpec(scales=("none", "sqrt"), seeds=20, steps=120, d_model=16, batch=4)
    told = []
    with make_lab(path, progress=told.append) as lab:
        record = ablate(spec, lab)
    assert told[0].reused == kept
    assert [row["status"] for row in record.tables["runs"]] == ["done"] * 40
    with make_lab() as fresh:
        again = fresh.run(spec.runs()[:2])
    assert losses(again) == [row["final_loss"] for row in record.tables["runs"][:2]]


@pytest.mark.slow
def test_an_unguarded_script_is_told_so(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    command = [sys.executable, str(script), str(tmp_path / "runs.sqlite"), "2", "5"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode != 0
    assert "guarded by" in result.stderr


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.5, 1.5])
def test_ctrl_c_while_workers_start_is_one_line(tmp_path, delay):
    """The interrupt of a terminal reaches every process of the group, also those that are still importing."""
    line = "ablate --steps 100000 --seeds 4 --workers 2"
    command = [sys.executable, "-m", "sqrtdk", *line.split(), "--store", str(tmp_path / "runs.sqlite")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_until(lambda: len(children_of(process.pid)) >= 2, 60)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    lines = [line for line in err.splitlines() if "training" not in line]  # progress
    assert lines == ["sqrtdk: interrupted; finished runs are in the store if one was given"]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals of single threads are a matter of POSIX")
def test_an_interrupt_that_another_thread_receives_waits_until_a_worker_has_started():
    steps = []
    started = threading.Event()
    go_on = threading.Event()

    def receive():
        started.set()
        go_on.wait(30)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def start_a_worker():
        with interrupts_held():
            steps.append("before")
            go_on.set()
            thread.join()
            steps.append("after")

    thread = threading.Thread(target=receive)
    thread.start()
    assert started.wait(30)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        start_a_worker()
    assert steps == ["before", "after"]
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.slow
def test_runs_show_their_curves_in_the_store_while_they_train(tmp_path, monkeypatch):
    monkeypatch.setattr("sqrtdk.lab.worker._REPORT_SECONDS", 0.0)
    monkeypatch.setattr("sqrtdk.lab.worker._CURVES_SECONDS", 0.0)
    shown, so_far = [], []
    path = tmp_path / "runs.sqlite"

    class Watched(Store):
        def put_running(self, spec, step, curves, maps):
            super().put_running(spec, step, curves, maps)
            shown.append((step, {name: list(values) for name, values in curves.items()}))
            so_far.append(self.maps([spec.key])[spec.key]["steps"])

    monkeypatch.setattr("sqrtdk.lab.laboratory.Store", Watched)
    spec = Spec(steps=12, record_every=5, d_model=16, d_k=8, batch=2)
    with Lab(path, Processes(1)) as lab:
        (record,) = lab.run([spec])
    assert [step for step, _ in shown] == list(range(1, 13))
    assert shown[-1][1] == record.curves
    assert so_far == [list(range(step)) for step in range(1, 13)]
    assert record.maps["steps"] == list(range(13))
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT COUNT(*) FROM running").fetchone() == (0,)


@pytest.mark.slow
def test_a_lab_writes_the_curves_of_newly_trained_runs_with_their_keys(tmp_path):
    path, calls = tmp_path / "runs.jsonl", []

    def broken(step, entry):
        calls.append(step)
        raise OSError("disk full")

    specs = grid(2)
    with Lab(None, Processes(1), to=path) as lab:
        records = lab.run(specs)
        lab.run(specs)  # reused: written once
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for spec, record in zip(specs, records, strict=True):
        own = [line for line in lines if line["run"] == spec.key]
        assert [line["step"] for line in own] == list(record.curves["step"])
        assert [line["scalars"]["loss"] for line in own] == list(record.curves["loss"])
        assert {line["spec"]["seed"] for line in own} == {spec.seed}
    assert len(lines) == sum(len(record.curves["step"]) for record in records) > 0
    with Lab(None, Processes(1), to=broken) as lab, pytest.warns(SqrtdkWarning, match="is stored, but .* disk full"):
        assert losses(lab.run(specs[:1])) == losses(records[:1])
    assert len(calls) == 1
    with pytest.raises(InvalidTypeError, match="to must be a path"):
        Lab(to=3)

"""Ray: the table of a cluster is the local one, to the bit, while nodes die and come and the driver is killed."""

import importlib.util
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import pytest

from sqrtdk.commands.cli import main
from sqrtdk.errors import InvalidTypeError, InvalidValueError, MissingExtraError, SqrtdkError, SqrtdkWarning
from sqrtdk.lab import Lab, Processes, Ray, RunRecord, RunSpec, choose_executor
from sqrtdk.lab.checkpoints import describe_machine
from sqrtdk.lab.ray_cluster import _Mailbox
from sqrtdk.lab.sweep import Report

HAS_RAY = importlib.util.find_spec("ray") is not None


def needs_ray(test):
    """Mark a test for `make test-long`, which installs Ray."""
    return pytest.mark.long(pytest.mark.skipif(not HAS_RAY, reason="the extra ray is not installed")(test))


def with_cluster(test):
    """Mark a test that starts a cluster."""
    # Ray leaves files and sockets open when its processes are killed.
    return needs_ray(pytest.mark.timeout(600)(pytest.mark.filterwarnings("ignore")(test)))


SPECS = [RunSpec(d_model=16, d_k=8, batch=4, steps=400, seed=seed) for seed in range(6)]


def numbers(records):
    return [({k: v for k, v in one.row.items() if k != "seconds"}, dict(one.curves), one.maps) for one in records]


def list_children(pid, name):
    listed = subprocess.run(["ps", "-wwo", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True)
    return {int(line.split()[0]) for line in listed.stdout.splitlines() if name in line}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"ray is not installed; it comes with: pip install \"sqrtdk\[ray\]\""):
        Lab(on="ray")


def test_an_executor_and_a_place_exclude_each_other():
    with pytest.raises(InvalidValueError, match="on must not be given beside an executor, got 'ray'"):
        Lab(executor=Processes(1), on="ray")
    with pytest.raises(InvalidValueError, match="num_gpus must go with a cluster"):
        choose_executor(None, 1, num_gpus=1.0)


@needs_ray
def test_bad_options_are_refused():
    for options, error in (
        ({"num_cpus": 0}, InvalidValueError),
        ({"num_gpus": "many"}, InvalidTypeError),
        ({"memory": 0}, InvalidValueError),
        ({"workers": 0}, InvalidValueError),
        ({"on": "auto", "workers": 2}, InvalidValueError),
    ):
        with pytest.raises(error, match=next(reversed(options))):
            Ray(**options)


@needs_ray
@pytest.mark.parametrize("place", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}"])
def test_an_address_where_no_cluster_answers_is_one_line_within_ten_seconds(capsys, place):
    address = place.format(port=free_port())
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main(["ablate", "--steps", "1", "--seeds", "1", "--on", address])
    assert time.monotonic() - began < 10.0
    assert ended.value.code == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith(f"sqrtdk: --on {address}: no Ray cluster answers (")
    assert "start one with `ray start --head`" in err


@needs_ray
@pytest.mark.parametrize("address", ["nonsense", "host:", ":80", "host:port"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InvalidValueError, match=rf"on must be ray, auto, or an address host:port, got '{address}'"):
        Ray(address).prepare()


@needs_ray
@pytest.mark.filterwarnings("default")
def test_other_versions_of_a_node_are_said_once_and_recorded():
    executor, record = Ray(), RunRecord({"status": "done"}, {})
    here = describe_machine()
    assert executor._compare(record, here, "near") == record
    with pytest.warns(SqrtdkWarning, match=r"trained on far with level abacus, torch 1\.0, where the driver has level"):
        changed = executor._compare(record, {**here, "torch": "1.0", "level": "abacus"}, "far")
    assert changed.row["trained_with"] == "level abacus, torch 1.0 on far"
    assert executor._compare(record, {**here, "torch": "1.0", "level": "abacus"}, "far") == changed


def test_the_mailbox_keeps_the_latest_of_everything_until_it_is_collected():
    mailbox = _Mailbox()
    assert mailbox.tell("a", Report(1, {"step": [0]}, b"one")) is False
    mailbox.tell("a", Report(2))
    assert mailbox.collect() == {"a": Report(2, {"step": [0]}, b"one")}
    assert mailbox.collect() == {}
    mailbox.stop()
    assert mailbox.tell("a", Report(3)) is True


@pytest.fixture(scope="module")
def truth():
    with Lab(None, Processes(1)) as lab:
        return numbers(lab.run(SPECS))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home of its own for what Ray writes there; nothing is told to anybody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield


@pytest.fixture
def cluster(home):
    """Two nodes of one CPU each beside a head that has none."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.nodes_for_runs = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


@with_cluster
def test_a_cluster_of_this_machines_own_gives_the_local_table_and_ends(home, truth, tmp_path):
    import ray

    told, folder = [], os.path.dirname(ray.__file__)
    with Lab(tmp_path / "runs.sqlite", Ray("ray", workers=2), told.append) as lab:
        assert numbers(lab.run(SPECS)) == truth
        assert numbers(lab.run(SPECS)) == truth  # from the store
        assert len(list_children(os.getpid(), folder)) == 2  # its state and its scheduler, and no part without use
    assert not ray.is_initialized()
    assert not list_children(os.getpid(), folder)
    assert told[-1].done == len(SPECS)


@with_cluster
def test_workers_of_one_sweep_serve_the_next(home):
    with Lab(None, Ray("ray", workers=2)) as lab:
        lab.run(SPECS[:4])
        time.sleep(3.0)  # by default Ray ends an idle worker after one second
        (raylet,) = list_children(os.getpid(), "raylet/raylet")
        before = list_children(raylet, "ray::")
        lab.run([replace(spec, seed=spec.seed + 100) for spec in SPECS[:4]])
        assert list_children(raylet, "ray::") == before


@with_cluster
def test_a_node_that_is_killed_and_one_that_comes_late_do_not_change_the_table(cluster, truth, tmp_path):
    disturbed = []

    def disturb(state):
        if state.done >= 1 and not disturbed:
            disturbed.append("killed")
            cluster.remove_node(cluster.nodes_for_runs[0], allow_graceful=False)
        elif state.done >= 2 and len(disturbed) == 1:
            disturbed.append("added")
            cluster.add_node(num_cpus=1)

    with Lab(tmp_path / "runs.sqlite", Ray(cluster.address), disturb) as lab:
        assert numbers(lab.run(SPECS)) == truth
        assert len(lab.store) == len(SPECS)
    assert disturbed == ["killed", "added"]


@with_cluster
def test_a_node_that_differs_is_said_before_runs_go_there_and_recorded(home, tmp_path):
    from ray.cluster_utils import Cluster

    package = tmp_path / "packages" / "numpy-0.1.dist-info"  # the first that the node's Python finds
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.1\n")
    other = {"PYTHONPATH": f"{package.parent}:{os.environ.get('PYTHONPATH', '')}", "SQRTDK_BACKEND": "reference"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    odd = cluster.add_node(num_cpus=1, env_vars=other)
    cluster.wait_for_nodes()
    seen, joined = [], []

    def follow(state):
        seen.append((state.done, [str(one.message) for one in caught]))
        if state.done == 1 and not joined:
            joined.append(cluster.add_node(num_cpus=1, env_vars={"SQRTDK_BACKEND": "reference"}))

    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            Lab(tmp_path / "runs.sqlite", Ray(cluster.address), follow) as lab,
        ):
            warnings.simplefilter("always", SqrtdkWarning)
            records = lab.run([RunSpec(d_model=16, d_k=8, batch=4, steps=1500, seed=seed) for seed in range(8)])
            (kept,) = lab.store.records("nodes")
    finally:
        cluster.shutdown()
    told = [str(one.message) for one in caught if issubclass(one.category, SqrtdkWarning)]
    assert told[0].startswith(f"node {odd.node_id[:8]} ({socket.gethostname()}) has level reference, numpy 0.1, where ")
    assert told[0] in seen[1][1]  # the first report of a run; the one before it is that of the start
    assert [re.sub(" .*", "", message) for message in told] == ["node", "node"]  # and no second time when runs end
    assert [row["node"] for row in kept.tables["nodes"]] == [odd.node_id, joined[0].node_id]
    assert [row["differs"] for row in kept.tables["nodes"]] == ["level reference, numpy 0.1", "level reference"]
    trained = {record.row.get("trained_with") for record in records}
    assert f"level reference, numpy 0.1 on {socket.gethostname()}" in trained
    assert None in trained


DRIVER = """
import sys
from sqrtdk.lab import Lab, Ray, RunSpec, worker

if __name__ == "__main__":
    specs = [RunSpec(d_model=16, d_k=8, batch=4, steps=400, seed=seed) for seed in range(6)]
    with Lab(sys.argv[1], Ray(sys.argv[2])) as lab:
        lab.run(specs)
"""


@with_cluster
def test_a_driver_that_is_killed_goes_on_when_it_is_started_again(cluster, truth, tmp_path):
    path, script = tmp_path / "runs.sqlite", tmp_path / "driver.py"
    script.write_text(DRIVER)
    command = [sys.executable, str(script), str(path), cluster.address]
    driver = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 240
        while count_runs(path) < 2:
            assert driver.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    kept = count_runs(path)
    assert 2 <= kept < len(SPECS)
    told = []
    with Lab(path, Ray(cluster.address), told.append) as lab:
        assert numbers(lab.run(SPECS)) == truth
    assert told[0].reused >= kept


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


@with_cluster
def test_ctrl_c_brings_checkpoints_home(home, monkeypatch, tmp_path):
    from sqrtdk.lab import ray_cluster

    monkeypatch.setattr(ray_cluster, "_STOP_SECONDS", 60.0)  # the way is tested, not the speed of a busy machine
    path = tmp_path / "runs.sqlite"
    interrupted = []

    def interrupt(state):
        if state.fraction > 0.0 and not interrupted:
            interrupted.append(state)
            os.kill(os.getpid(), signal.SIGINT)

    specs = [RunSpec(d_model=16, d_k=8, batch=4, steps=100_000, seed=seed) for seed in range(2)]
    with Lab(path, Ray("ray", workers=2), interrupt) as lab:
        with pytest.raises(KeyboardInterrupt):
            lab.run(specs)
        kept = [lab.store.checkpoints.get(spec.key) for spec in specs]
    assert any(checkpoint is not None for checkpoint in kept)


@with_cluster
def test_a_node_that_cannot_train_is_one_error(home, monkeypatch, tmp_path):
    from sqrtdk.lab import ray_cluster

    def lack(job, mailbox):
        raise ModuleNotFoundError("No module named 'sqrtdk'")

    monkeypatch.setattr(ray_cluster, "_train", lack)
    with Lab(None, Ray("ray", workers=1)) as lab, pytest.raises(SqrtdkError, match=r"install sqrtdk\[torch\] of this"):
        lab.run(SPECS[:1])

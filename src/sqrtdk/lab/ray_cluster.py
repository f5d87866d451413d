"""Training on a Ray cluster: one plain task per run; the driver alone writes the store."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from sqrtdk import checks
from sqrtdk.children import interrupts_asked
from sqrtdk.errors import InvalidValueError, SqrtdkError, missing_extra
from sqrtdk.lab.checkpoints import describe_machine
from sqrtdk.lab.cluster_nodes import NodeVersions, compare_machine
from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.store import RunRecord
from sqrtdk.lab.sweep import Job, Report, Sweep
from sqrtdk.lab.worker import train_guarded
from sqrtdk.operation.cpus import count_cpus

_LOOK_SECONDS = 0.5
_STOP_SECONDS = 3.0
_ANSWER_SECONDS = 5.0
# For the versions of all nodes, before the first run is sent: a worker starts there and loads sqrtdk without torch.
_VERSIONS_SECONDS = 10.0
# Starts of what a cluster of one machine and one driver has no use for, and `ray.init` no option: the autoscaler, the
# dashboard's server (it starts without a page too) and the log monitor.
_UNUSED_PARTS = ("start_monitor", "start_api_server", "start_log_monitor")


class Ray:
    """Trains on a Ray cluster. The numbers are those of `Processes`, to the bit, on nodes of the same CPU level.

    A run whose worker or node dies goes on elsewhere from its last checkpoint. Nodes may come and go. Each node needs
    sqrtdk with the extra `torch`, installed there or brought by `runtime_env`. Versions and CPU level of a node are
    compared with those of the driver at the start, or as the node joins. A difference is warned of once and kept: in
    the store as a record of kind ``"nodes"``, and in the rows of runs that were trained there as `trained_with`.

    Args:
        on: ``"ray"`` for a cluster of this machine's own, started and ended with the executor; ``"auto"`` for the one
            that runs on this machine or that `RAY_ADDRESS` names; or an address, ``"host:port"``.
        workers: CPUs of a cluster that is started here; None: all that this process may use.
        num_cpus: CPUs that a run occupies.
        num_gpus: GPUs that a run occupies; None: none.
        memory: bytes of memory that a run occupies; None: not counted.
        runtime_env: Ray's description of what the nodes install for the runs.

    Raises:
        MissingExtraError: Ray is not installed.
        InvalidValueError: a number is out of range, or `workers` is given for a cluster that exists.
    """

    def __init__(
        self,
        on: str = "ray",
        *,
        workers: int | None = None,
        num_cpus: float = 1.0,
        num_gpus: float | None = None,
        memory: int | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise missing_extra("ray", "ray")
        if workers is not None and on != "ray":
            raise InvalidValueError("workers", f"must not be given for a cluster that exists ({on!r}), got {workers}")
        self.on = on
        self.workers = count_cpus() if workers is None else checks.integer("workers", workers, 1)
        self._options: dict[str, Any] = {
            "num_cpus": checks.number("num_cpus", num_cpus, above=0.0),
            "max_retries": 0,  # the driver itself tries again, from the last checkpoint
        }
        if num_gpus is not None:
            self._options["num_gpus"] = checks.number("num_gpus", num_gpus, above=0.0)
        if memory is not None:
            self._options["memory"] = checks.integer("memory", memory, 1)
        self._runtime_env = dict(runtime_env or {})
        self._is_connected = False
        self._nodes = NodeVersions(num_cpus)
        self._mailbox: Any = None  # one sweep's serves the next: a new one would take a worker that has loaded torch

    def prepare(self) -> None:
        """Connect to the cluster, or start it.

        Raises:
            SqrtdkError: no cluster answers at the address.
        """
        import ray

        if self._is_connected or ray.is_initialized():
            return
        _require_answer(self.on)
        settings: dict[str, Any] = {"address": "local" if self.on == "ray" else self.on}
        if self.on == "ray":
            # Nothing is told to anybody, and no page is served.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # Ray ends workers beyond one per CPU after a second without a run, and the mailbox is one of them: the next
            # sweep would load torch again. A higher limit would make Ray start a worker per waiting run, up to it.
            # Ray's workers give way to all other processes (nice 15) unless told otherwise.
            as_processes = {"idle_worker_killing_time_threshold_ms": 3_600_000, "worker_niceness": 0}
            settings |= {"num_cpus": self.workers, "include_dashboard": False, "_system_config": as_processes}
        if self._runtime_env:
            settings["runtime_env"] = self._runtime_env
        try:
            with _unused_parts_left_out():
                ray.init(**settings, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _unanswered(self.on, error) from None
        self._is_connected = True

    def execute(self, sweep: Sweep) -> None:
        """Train what is pending. Ctrl-C lets every run send a checkpoint first, a second one is raised at once.

        Raises:
            SqrtdkError: no cluster answers, or its nodes lack sqrtdk.
        """
        if not sweep.pending:
            return
        import ray

        self.prepare()
        mailbox, self._mailbox = self._mailbox or _open_mailbox(), None
        train = ray.remote(_train).options(**self._options)
        running: dict[Any, RunSpec] = {}
        try:
            with interrupts_asked() as is_stopped:
                self._compare_nodes(sweep, _VERSIONS_SECONDS)
                while (sweep.pending or running) and not is_stopped():
                    while (job := sweep.take()) is not None:
                        running[train.remote(job, mailbox)] = job.spec
                    self._collect(sweep, running, mailbox)
                if is_stopped():
                    self._stop(sweep, running, mailbox)
                    raise KeyboardInterrupt
            _hear(sweep, (), mailbox)  # what is left there is of this sweep
            self._mailbox = mailbox if self._is_connected else None
        finally:
            for task in running:
                ray.cancel(task, force=True)
            if self._mailbox is None:
                ray.kill(mailbox)

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        if self._is_connected:
            import ray

            ray.shutdown()
            self._is_connected, self._mailbox = False, None

    def _collect(self, sweep: Sweep, running: dict[Any, RunSpec], mailbox: Any) -> None:
        """Keep what has finished or was reported; runs whose worker or node died are pending again."""
        import ray

        self._compare_nodes(sweep)
        _hear(sweep, running.values(), mailbox)
        finished, _ = ray.wait(list(running), num_returns=len(running), timeout=_LOOK_SECONDS)
        for task in finished:
            spec = running.pop(task)
            try:
                answer = ray.get(task)
            except ray.exceptions.NodeDiedError:
                sweep.pending.append(spec)
            except ray.exceptions.RayTaskError as error:
                raise SqrtdkError(
                    f"a node cannot train ({error.cause!r}); install sqrtdk[torch] of this version on every node, or "
                    "give Ray(runtime_env=) what installs it"
                ) from None
            except ray.exceptions.RayError as error:
                sweep.lose(spec, f"its worker died ({type(error).__name__})")
            else:
                if answer is not None:  # else it was stopped
                    sweep.finish(spec, self._compare(*answer))

    def _compare(self, record: RunRecord, machine: Mapping[str, str], host: str) -> RunRecord:
        """Return a record that says where it was not trained as it would have been here."""
        difference = compare_machine(machine)
        if difference is None:
            return record
        self._nodes.say(difference, host, f"runs were trained on {host} with")
        return replace(record, row={**record.row, "trained_with": f"{difference.theirs} on {host}"})

    def _compare_nodes(self, sweep: Sweep, seconds: float = 0.0) -> None:
        """Ask new nodes for their versions, and keep a record of the differences heard within some seconds."""
        self._nodes.ask()
        if self._nodes.hear(seconds):
            sweep.store.put_record(self._nodes.as_record(self.on))

    def _stop(self, sweep: Sweep, running: dict[Any, RunSpec], mailbox: Any) -> None:
        mailbox.stop.remote()
        stopped = list(running.values())
        deadline = time.monotonic() + _STOP_SECONDS
        while running and time.monotonic() < deadline:
            self._collect(sweep, running, mailbox)
            sweep.pending.clear()
        _hear(sweep, stopped, mailbox)  # the last checkpoints come just before their tasks end


def _hear(sweep: Sweep, specs: Iterable[RunSpec], mailbox: Any) -> None:
    """Note the reports of these runs since the last time. Reports may be lost: the next say as much."""
    import ray

    known = {spec.key: spec for spec in specs}
    with suppress(ray.exceptions.RayError):
        for key, report in ray.get(mailbox.collect.remote(), timeout=_ANSWER_SECONDS).items():
            if key in known:
                sweep.advance(known[key], report)


class _Mailbox:
    """Latest report of each run. Its loss costs nothing: a run goes on, and its next report says as much."""

    def __init__(self) -> None:
        self._reports: dict[str, Report] = {}
        self._is_stopped = False

    def tell(self, key: str, report: Report) -> bool:
        """Note a report; whether the run shall stop is the answer."""
        before = self._reports.get(key, Report(0))
        brought = {name: value for name, value in report._asdict().items() if value}
        self._reports[key] = before._replace(**brought)
        return self._is_stopped

    def collect(self) -> dict[str, Report]:
        """Hand over the reports since the last time."""
        reports, self._reports = self._reports, {}
        return reports

    def stop(self) -> None:
        """Let the next answers say that runs shall stop."""
        self._is_stopped = True


def _open_mailbox() -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    beside_driver = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(_Mailbox).options(num_cpus=0, max_restarts=-1, scheduling_strategy=beside_driver).remote()


def _train(job: Job, mailbox: Any) -> tuple[RunRecord, dict[str, str], str] | None:
    """Train a run on a node; None if it was stopped."""
    import ray

    answers: list[Any] = []
    stopped = False

    def is_stopped() -> bool:
        nonlocal stopped
        with suppress(ray.exceptions.RayError):
            if answers and ray.wait(answers, timeout=0)[0]:
                stopped = ray.get(answers.pop())
        return stopped

    def report(content: Report) -> None:
        # One report is on its way at a time, unless it brings a checkpoint.
        if not answers or content.checkpoint is not None:
            answers[:] = [mailbox.tell.remote(job.spec.key, content)]

    try:
        return train_guarded(job, report, is_stopped), describe_machine(), socket.gethostname()
    except KeyboardInterrupt:
        if answers:
            ray.wait(answers, timeout=_ANSWER_SECONDS)
        return None


@contextmanager
def _unused_parts_left_out() -> Iterator[None]:
    """Let `ray.init` start a cluster without the unused parts; with them, in seconds more, if Ray has renamed them."""
    from unittest import mock

    nothing: dict[str, Any] = dict.fromkeys(_UNUSED_PARTS, lambda node, **options: None)
    with ExitStack() as stack:
        with suppress(ImportError, AttributeError):
            stack.enter_context(mock.patch.multiple("ray._private.node.Node", **nothing))
        yield


def _require_answer(on: str) -> None:
    """Refuse an address where nobody listens, at once: Ray itself would wait for minutes.

    Raises:
        SqrtdkError: nobody does.
    """
    if on in ("ray", "auto"):
        return
    host, _, port = on.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise InvalidValueError("on", f"must be ray, auto, or an address host:port, got {on!r}")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _unanswered(on, error) from None


def _unanswered(on: str, error: Exception) -> SqrtdkError:
    reason = " ".join(str(error).split())[:200]
    return SqrtdkError(
        "on",
        f"{on}: no Ray cluster answers ({reason}); start one with `ray start --head`, give the address that it prints, "
        "or give ray for a cluster of this machine's own",
    )

"""Node versions of a Ray cluster: each node is asked once, at the start or as it joins, and compared to the driver."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqrtdk.errors import warn
from sqrtdk.lab.checkpoints import describe_machine
from sqrtdk.records.record import Record

__all__ = ["NodeVersions", "compare_machine"]

_LOOK_SECONDS = 2.0


class Difference(NamedTuple):
    """Versions and CPU level of a node or a run where they are not the driver's, in words, and those of the driver."""

    theirs: str
    ours: str


def compare_machine(machine: Mapping[str, str]) -> Difference | None:
    """Return how a machine differs from the one that asks; None if it does not.

    >>> compare_machine(describe_machine()) is None
    True
    >>> compare_machine({**describe_machine(), "torch": "1.0"}).theirs
    'torch 1.0'
    """
    here = describe_machine()
    others = [name for name in sorted({*machine, *here}) if here.get(name) != machine.get(name)]
    if not others:
        return None
    theirs, ours = (", ".join(f"{name} {of.get(name, 'missing')}" for name in others) for of in (machine, here))
    return Difference(theirs, ours)


class NodeVersions:
    """Asks every node of the cluster, those that join later too, for its versions, and says once what differs.

    A question is a task without CPUs that is pinned to its node. A question that is lost costs nothing: each run brings
    the versions of the machine that trained it.

    Args:
        num_cpus: CPUs of a run; a node that has fewer trains nothing and is not asked.
    """

    def __init__(self, num_cpus: float) -> None:
        self._num_cpus = num_cpus
        self._asked: set[str] = set()
        self._questions: dict[Any, str] = {}
        self._looked = -_LOOK_SECONDS
        self._said: set[tuple[str, str]] = set()
        self.rows: list[dict[str, str]] = []

    def ask(self) -> None:
        """Ask the nodes that have not been asked; looks for new nodes every two seconds at most."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        for node in ray.nodes():
            name = node["NodeID"]
            if node["Alive"] and name not in self._asked and node["Resources"].get("CPU", 0.0) >= self._num_cpus:
                self._asked.add(name)
                pinned = NodeAffinitySchedulingStrategy(name, soft=False)
                question = ray.remote(_describe_node).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned)
                self._questions[question.remote()] = name
        self._looked = time.monotonic()

    def hear(self, seconds: float = 0.0) -> bool:
        """Take the answers that come within some seconds, and tell whether a node among them differs."""
        import ray

        differed = len(self.rows)
        if self._questions:
            answered, _ = ray.wait(list(self._questions), num_returns=len(self._questions), timeout=seconds)
            for question in answered:
                name = self._questions.pop(question)
                try:
                    machine, host = ray.get(question)
                except ray.exceptions.RayError:  # the node is gone, or lacks sqrtdk, as its first run will say
                    continue
                difference = compare_machine(machine)
                if difference is not None:
                    about = {"differs": difference.theirs, "driver": difference.ours}
                    self.rows.append({"node": name, "host": host, **about})
                    self.say(difference, host, f"node {name[:8]} ({host}) has")
        return len(self.rows) > differed

    def say(self, difference: Difference, host: str, beginning: str) -> None:
        """Warn of a difference on a host, unless that was done before."""
        if (difference.theirs, host) not in self._said:
            self._said.add((difference.theirs, host))
            warn(
                f"{beginning} {difference.theirs}, where the driver has {difference.ours}: the bits of runs there may "
                "differ"
            )

    def as_record(self, on: str) -> Record:
        """Return the nodes that differ as a record of kind ``"nodes"``."""
        reading = [
            f"Node {row['node'][:8]} ({row['host']}) has {row['differs']}, the driver {row['driver']}."
            for row in self.rows
        ]
        return Record("nodes", {"on": on, "driver": describe_machine()}, {"nodes": self.rows}, reading=reading)


def _describe_node() -> tuple[dict[str, str], str]:
    return describe_machine(), socket.gethostname()

"""Simulated machine with scripted speeds for benchmark tests, and measurements made on it."""

from benchmarks.cases import Case
from benchmarks.probes import Probe, Prober
from benchmarks.timing import Measurement

FULL = Case("test", "full", 2, 2, 9, 8)
GOOD, BAD = Probe(100.0, 100.0, 10.0), Probe(50.0, 100.0, 10.0)


class Script(Prober):
    """Machine with scripted speeds; after the script it keeps the last speed."""

    def __init__(self, *speeds):
        self._speeds = list(speeds)
        self.results = []

    @staticmethod
    def settle():
        """Do nothing: no contender ran before."""

    def probe(self, *, reading=False):
        self.results.append(self._speeds.pop(0) if len(self._speeds) > 1 else self._speeds[0])
        return self.results[-1]


def measured(seconds, probes=None, case=FULL):
    count = len(next(iter(seconds.values())))
    none = dict.fromkeys(seconds, 1e-7)
    return Measurement(case, 1, seconds, probes or [GOOD] * (count + 1), none, {})

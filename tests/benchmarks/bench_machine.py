"""A machine for tests of the benchmark whose speed is written down, and measurements made up on it."""

from benchmarks.cases import Case
from benchmarks.probes import Probe, Prober
from benchmarks.timing import Measurement

FULL = Case("test", "full", 2, 2, 9, 8)
GOOD, BAD = Probe(100.0, 100.0, 10.0), Probe(50.0, 100.0, 10.0)


class Script(Prober):
    """A machine whose speed is written down; it stays as it was last."""

    def __init__(self, *speeds):
        self._speeds = list(speeds)
        self.results = []

    @staticmethod
    def settle():
        """Nobody ran here."""

    def probe(self, *, reading=False):
        self.results.append(self._speeds.pop(0) if len(self._speeds) > 1 else self._speeds[0])
        return self.results[-1]


def measured(seconds, probes=None, case=FULL):
    count = len(next(iter(seconds.values())))
    none = dict.fromkeys(seconds, 1e-7)
    return Measurement(case, 1, seconds, probes or [GOOD] * (count + 1), none, {})

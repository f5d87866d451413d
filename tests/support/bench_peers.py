"""Contenders for tests of guests, by name: one is right, the others refuse, fail, die, hang or are wrong."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

import sqrtdk
from benchmarks.contender import Contender, NotForThisCaseError
from benchmarks.task import ContenderResult

SECONDS = 0.01


def _attend(case, inputs, threads):
    def run():
        time.sleep(SECONDS)
        return sqrtdk.attention(*inputs[:3], statistics=False, **case.options()).output

    return run


def _refuse(case, inputs, threads):
    raise NotForThisCaseError("no such mask")


def _fail(case, inputs, threads):
    raise OSError("no such\nlibrary")


def _after(calls, act):
    """Return a `prepare` whose calls are right for the first `calls` calls, then run `act`."""

    def prepare(case, inputs, threads):
        run, left = _attend(case, inputs, threads), iter(range(calls))

        def run_or_act():
            if next(left, None) is None:
                act()
            return run()

        return run_or_act

    return prepare


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _exit():
    raise SystemExit("out of luck")


PREPARE = {
    "sqrtdk.torch": _attend,
    "right": _attend,
    "refuses": _refuse,
    "fails": _fail,
    "dies": _after(8, _die),
    "exits": _after(0, _exit),
    "hangs": _after(8, lambda: time.sleep(600)),
    "wrong": lambda case, inputs, threads: lambda: np.zeros_like(inputs.q),
}


def find_contender(name):
    return Contender(name, (), PREPARE[name], ContenderResult)

"""`python -m tests.support.fuzzing --seed S --case I` repeats one call; without `--case` it checks cases of a seed."""

from __future__ import annotations

import argparse
import time
from collections import Counter

from .hunt import hunt, serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.fuzzing", description=__doc__)
    parser.add_argument("--seed", type=int, help="default: the clock, so a fresh one")
    parser.add_argument("--case", type=int, help="run only this case")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--stream", action="store_true", help="run the cases in this process, events as JSON lines")
    given = parser.parse_args()
    seed = int(time.time()) if given.seed is None else given.seed
    if given.stream:
        serve(seed, given.first, given.cases)
        return 0
    first, count = (given.first, given.cases) if given.case is None else (given.case, 1)
    print(f"seed {seed}, cases {first} to {first + count - 1}", flush=True)
    started = time.monotonic()
    names: Counter[str] = Counter()
    wrong = 0
    for result in hunt(seed, first, count):
        names.update(result.mismatches.keys())
        wrong += 1
        print(result, flush=True)
    print(f"{wrong} wrong of {count} cases, {time.monotonic() - started:.0f} s")
    for name, number in names.most_common():
        print(f"{number:6} {name}")
    return bool(names)


raise SystemExit(main())

"""Seeded faults: each is still where `make mutants` would plant it, and the tests that must find it exist."""

from pathlib import Path

import pytest

from tests import mutants

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted(mutant):
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.original) == 1
    assert all((ROOT / test).is_file() for test in mutant.tests)

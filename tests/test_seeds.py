"""One variable shifts every seed of the suite."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


SEEDED = [
    "np.random.default_rng(1).normal()",
    "np.random.default_rng([1, 2]).normal()",
    "np.random.SeedSequence(1).generate_state(2)",
    "np.random.default_rng(np.random.SeedSequence(1).spawn(2)[1]).normal()",
    "np.random.default_rng(np.uint64(2**64 - 1)).normal()",
]


def draws_with(shift):
    """Return what a process draws whose seeds are shifted as pytest does it."""
    environment = os.environ | {
        "GRADMATCH_SEED_SHIFT": str(shift),
        "PYTHONPATH": str(ROOT / "tests" / "seeds"),
    }
    code = f"import numpy as np; print({', '.join(SEEDED)}, sep='\\n')"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    return dict(zip(SEEDED, ran.stdout.splitlines(), strict=True))


@pytest.fixture(scope="module")
def drawn():
    """Return draws without a shift, and with two."""
    return [draws_with(shift) for shift in range(3)]


@pytest.mark.parametrize("seeded", SEEDED)
def test_one_variable_shifts_every_integer_seed(seeded, drawn):
    """Assert it of generators and seed sequences, in processes that are started from here."""
    assert len({draws[seeded] for draws in drawn}) == len(drawn)


def test_a_shift_repeats_its_draws_and_none_has_those_of_numpy(drawn):
    assert draws_with(1) == drawn[1]
    assert float(drawn[0][SEEDED[0]]) == pytest.approx(0.345584192064786, rel=1e-12)

"""What hangs on the machine, on caches and on seeds: densities, verdicts, the suite itself."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pymc as pm
import pytest
import xarray as xr

import pymc_gradmatch as gm
from pymc_gradmatch.checks import grid

ROOT = Path(__file__).parents[1]


def fits_of_made_up_draws(asked):
    """Return a stand-in for gm.sample: the quantiles of a normal as draws, shuffled."""

    def sample(draws, *, chains, model, **_):
        asked.append(draws)
        rng = np.random.default_rng(1)
        n = chains * draws
        z = np.array([NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)])
        z = rng.permuted(z).reshape(chains, draws)
        times = np.array(model.coords["time"], dtype=float)
        x = np.broadcast_to(z[..., None, None], (*z.shape, len(times), 1))
        return xr.DataTree.from_dict(
            {
                "posterior": xr.Dataset(
                    {
                        "rate": (("chain", "draw"), z),
                        "x": (("chain", "draw", "time", "state"), x),
                    },
                    coords={"time": times},
                )
            }
        )

    return sample


@pytest.mark.slow
@pytest.mark.parametrize(("draws", "asked_for"), [(10, [10, 10, 40, 40]), (500, [500, 500])])
def test_grid_check_draws_more_where_it_cannot_tell(monkeypatch, draws, asked_for):
    asked: list[int] = []
    monkeypatch.setattr(grid, "sample", fits_of_made_up_draws(asked))
    ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t = np.linspace(0, 4, 9)
    gp = gm.StateGP(t, np.exp(-t)[:, None], [pm.gp.cov.ExpQuad(1, ls=1.0)], sigma=0.05)
    check = gm.grid_check(
        ode, t, gp.y, priors={"rate": pm.HalfNormal.dist(2)}, preset="fgpgm", gp=gp, grid=1,
        draws=draws, progressbar=False,
    )  # fmt: skip
    assert asked == asked_for
    assert check.is_fine_enough is True
    assert check.idata["posterior"].sizes["draw"] == asked_for[-1]


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

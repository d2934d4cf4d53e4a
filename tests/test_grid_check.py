"""Refine and compare: what a finer grid does to a posterior, told from Monte Carlo noise."""

import warnings

import numpy as np
import pandas as pd
import pymc as pm
import pytest
import xarray as xr

import pymc_gradmatch as gm
from pymc_gradmatch.checks.grid import compare_draws, judge
from pymc_gradmatch.model import DoubtWarning

T = np.linspace(0, 4, 9)
REPEATABLE = {"cores": 1, "random_seed": 1, "progressbar": False}


@pytest.fixture(scope="module")
def decay():
    return gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])


@pytest.fixture(scope="module")
def y():
    return np.exp(-T)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))


@pytest.fixture(scope="module")
def priors():
    return {"rate": pm.HalfNormal.dist(2)}


@pytest.fixture(scope="module")
def smooth(decay, y, priors):
    return gm.grid_check(decay, T, y, priors=priors, grid=4, draws=2_000, chains=4, **REPEATABLE)


@pytest.fixture(scope="module")
def spiking():
    """Return the check of a grid that is far too coarse for FitzHugh-Nagumo's jumps.

    Of some data refine ends far from the truth on such a grid, and says so.
    """
    system = gm.systems.fitzhugh_nagumo
    data = system.simulate("snr100", t=np.linspace(0, 10, 25), random_seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DoubtWarning)
        return gm.grid_check(
            system.ode,
            data.t,
            data.y,
            priors={name: pm.HalfNormal.dist(5) for name in system.ode.params},
            grid=1,
            finer=4,
            draws=200,
            tune=200,
            chains=2,
            **REPEATABLE,
        )


@pytest.mark.slow
def test_four_steps_are_enough_for_a_decay(smooth):
    assert smooth.is_fine_enough
    assert smooth.idata["posterior"].sizes["time"] == 33
    assert smooth.finer["posterior"].sizes["time"] == 65
    assert repr(smooth).startswith("The grid is fine enough: from 33 times to 65 the means move")
    assert (smooth.moved["moved"].abs() < 0.3).all()
    assert list(smooth.moved.index) == ["rate", "x0[mass]", "sigma[mass]"]


@pytest.mark.slow
def test_the_table_is_of_the_draws_that_are_returned(smooth):
    draws = smooth.finer["posterior"]
    assert smooth.moved["finer_mean"]["rate"] == pytest.approx(float(draws["rate"].mean()))
    start = draws["x"].isel(time=0, state=0)
    assert smooth.moved["finer_sd"]["x0[mass]"] == pytest.approx(float(start.std(ddof=1)))


@pytest.mark.slow
def test_one_step_per_observation_is_too_coarse_for_fitzhugh_nagumo(spiking):
    """Assert that theta moves by far, towards the truth, and that the verdict says what to do."""
    truth = pd.Series(gm.systems.fitzhugh_nagumo.theta)
    moved = spiking.moved.loc[truth.index]
    assert spiking.is_fine_enough is False
    assert (moved["moved"].abs() - 4 * moved["moved_error"] > 1).all()
    assert ((moved["finer_mean"] - truth).abs() < (moved["mean"] - truth).abs()).all()
    assert spiking.verdict.startswith("The grid is not fine enough: from 25 times to 97")
    assert f"{spiking.moved['moved'].abs().idxmax()} by " in spiking.verdict
    assert "Take the finer grid" in spiking.verdict


def draws_around(mean, sd, n, seed):
    values = mean + sd * np.random.default_rng(seed).normal(size=(4, n))
    return xr.Dataset({"rate": (("chain", "draw"), values)})


@pytest.mark.parametrize(
    ("mean", "sd", "n", "verdict"),
    [
        (0.0, 1.0, 1_000, True),
        (0.2, 1.1, 1_000, True),
        (0.5, 1.0, 1_000, False),
        (0.0, 1.4, 1_000, False),
        (0.0, 0.7, 1_000, False),
    ],
)
def test_what_is_clear_is_told_from_draws(mean, sd, n, verdict):
    table, _ = compare_draws(draws_around(0, 1, n, 1), draws_around(mean, sd, n, 2))
    assert judge(table) is verdict


@pytest.mark.parametrize(
    ("moved", "moved_error", "sd_ratio", "ratio_error", "verdict"),
    [
        (0.25, 0.02, 1.0, 0.01, True),
        (0.25, 0.03, 1.0, 0.01, None),
        (-0.35, 0.02, 1.0, 0.01, False),
        (-0.35, 0.03, 1.0, 0.01, None),
        (0.0, 0.02, 1.15, 0.02, True),
        (0.0, 0.02, 0.85, 0.03, None),
        (0.0, 0.02, 0.75, 0.02, False),
        (0.5, 0.2, 1.0, 0.1, None),
    ],
)
def test_noise_is_not_mistaken_for_movement(moved, moved_error, sd_ratio, ratio_error, verdict):
    """Assert that a change within two of its errors of a limit is neither small nor large."""
    numbers = {
        "moved": [moved],
        "moved_error": [moved_error],
        "sd_ratio": [sd_ratio],
        "ratio_error": [ratio_error],
    }
    assert judge(pd.DataFrame(numbers, index=["rate"])) is verdict


@pytest.mark.slow
def test_errors_are_what_repetition_gives():
    """Assert moved_error and ratio_error against the scatter over 200 pairs of independent runs."""
    tables = [
        compare_draws(draws_around(0, 1, 100, 2 * i), draws_around(0.3, 1.2, 100, 2 * i + 1))[0]
        for i in range(200)
    ]
    rows = pd.concat(tables)
    for value, error in (("moved", "moved_error"), ("sd_ratio", "ratio_error")):
        assert rows[value].std() == pytest.approx(rows[error].mean(), rel=0.2)


@pytest.mark.slow
def test_where_the_posterior_need_not_settle_the_advice_is_the_refined_preset(decay, y, priors):
    gp = gm.StateGP(T, y, [pm.gp.cov.ExpQuad(1, ls=1.5)], sigma=0.05)
    check = gm.grid_check(
        decay,
        T,
        y,
        priors=priors,
        preset="fgpgm",
        gp=gp,
        finer=4,
        draws=500,
        chains=2,
        **REPEATABLE,
    )
    assert check.is_fine_enough is False
    assert check.moved["sd_ratio"]["rate"] < 0.8
    assert "Take preset='refined'" in check.verdict


@pytest.mark.slow
def test_a_finer_grid_has_more_times(decay, y, priors):
    with pytest.raises(ValueError, match="finer grid has 17 times and the grid 17; expected more"):
        gm.grid_check(decay, T, y, priors=priors, grid=2, finer=2)


def test_it_is_called_outside_of_a_model(decay, y, priors):
    with pm.Model(), pytest.raises(ValueError, match="builds two models of its own"):
        gm.grid_check(decay, T, y, priors=priors)

"""Modes in a frequency, of which few and noisy data leave several."""

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from scipy import stats

import pymc_gradmatch as gm

NOISE, LOW, HIGH = 0.6, 0.5, 20.0
OSCILLATOR = gm.ODE(lambda t, x, theta: [theta.w * x.v, -theta.w * x.q], ["q", "v"], ["w"])


def measured():
    """Return fourteen irregular times and positions."""
    rng = np.random.default_rng(102)
    t = np.append(0.0, np.sort(rng.uniform(0, 10, 13)).round(3))
    w, q, v = rng.uniform(1, 20), rng.normal(), rng.normal()
    y = q * np.cos(w * t) + v * np.sin(w * t)
    return t, y + NOISE * np.random.default_rng(2).normal(size=t.size)


def share_below(bound, t, y):
    """Return the share of frequencies below a bound by quadrature; starts enter linearly."""
    grid = np.linspace(LOW, HIGH, 4_001)
    log_density = np.empty_like(grid)
    for place, w in enumerate(grid):
        design = np.stack([np.cos(w * t), np.sin(w * t)], axis=1)
        covariance = NOISE**2 * np.eye(len(t)) + design @ design.T
        log_density[place] = stats.multivariate_normal(cov=covariance).logpdf(y)
    weights = np.exp(log_density - log_density.max())
    return weights[grid < bound].sum() / weights.sum()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 1_000_002])
def test_slow_frequencies_have_their_share_beside_fast_ones(seed):
    """Assert it of data and seeds with which a fit once missed them, with a k below zero."""
    t, y = measured()
    fit = gm.fit(
        OSCILLATOR,
        t,
        pd.DataFrame({"q": y}),
        priors={"w": pm.Uniform.dist(LOW, HIGH)},
        start={"q": pm.Normal.dist(0, 1), "v": pm.Normal.dist(0, 1)},
        sigma=NOISE,
        random_seed=seed,
        progressbar=False,
    )
    assert fit.is_exact
    expected = share_below(2, t, y)
    w = fit.idata["posterior"]["w"].to_numpy()
    error = np.sqrt(expected * (1 - expected) / fit.n_effective)
    assert np.mean(w < 2) == pytest.approx(expected, abs=5 * error)

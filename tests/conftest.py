"""Shared fixtures: seeded data, fast compilation for graph tests."""

import importlib
import logging
import os
import sys

import matplotlib as mpl
import numpy as np
import pymc as pm
import pytensor
import pytest
from scipy import stats

import pymc_gradmatch as gm
from benchmarks.paper import systems

mpl.use("Agg")


def pytest_runtest_setup(item):
    """Skip what needs packages that are not there; `make test-jax`, which has them, skips none."""
    skips = not os.environ.get("GRADMATCH_SKIPS_NOTHING")
    for package in [name for marker in item.iter_markers("jax") for name in marker.args]:
        (pytest.importorskip if skips else importlib.import_module)(package)


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    """Close what a test has drawn: twenty that stay open are a warning in some later test."""
    yield
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close("all")


@pytest.fixture(autouse=True)
def the_level_of_the_log_stays():
    """Put back what a study's command has set: tests after it read the log."""
    logger = logging.getLogger("pymc")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def rng():
    return np.random.default_rng(20190416)


@pytest.fixture(scope="session")
def even_noise():
    """Return noise of unit variance that no seed moves, where a claim is about one data set.

    Quantiles of the normal, in the order of the golden ratio's multiples.
    """

    def noise(*shape):
        share = np.arange(1, np.prod(shape) + 1) * (np.sqrt(5) - 1) / 2 % 1
        return stats.norm.ppf(share).reshape(shape)

    return noise


@pytest.fixture
def fast_compile():
    """Compile graphs quickly and run them in Python: right for values, not for sampling."""
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        yield


@pytest.fixture(scope="session")
def lotka_volterra():
    """Return the paper's first system, the one most tests use."""
    return systems.lotka_volterra


@pytest.fixture(scope="session")
def data(lotka_volterra):
    return lotka_volterra.simulate("low", random_seed=1)


@pytest.fixture(scope="session")
def gp(data):
    return gm.fit_gp(data.t, data.y, cov="ExpQuad", shared=True, random_seed=1)


@pytest.fixture(scope="session")
def decay_model():
    """Return a function that makes a model of one decaying state, small enough for any sampler."""

    def make(n_time, lengthscale, gamma):
        ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
        t = np.linspace(0, 2, n_time)
        y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.1, (n_time, 1))
        gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=lengthscale)], sigma=0.1)
        return gm.build_model(
            ode,
            t,
            y,
            priors={"rate": pm.HalfNormal.dist(2)},
            gp=gp,
            gamma=gamma,
            sigma="fixed",
            preset="fgpgm",
        )

    return make


@pytest.fixture(scope="session")
def predictive_draws():
    """Return a function that makes draws of a model's data, the prior's and a posterior's.

    The prior's draws of the parameters stand in for a posterior.
    """

    def draw(model, draws):
        quick = {"compile_kwargs": {"mode": "FAST_COMPILE"}}
        with model:
            idata = pm.sample_prior_predictive(draws=draws, random_seed=1, **quick)
            idata["posterior"] = idata["prior"]
            posterior = pm.sample_posterior_predictive(
                idata, random_seed=2, progressbar=False, **quick
            )
        return idata["prior_predictive"], posterior["posterior_predictive"]

    return draw


@pytest.fixture(scope="session")
def two_kernel_gp(data):
    """Return a GP whose states have different kernels, so that mixing them up shows."""
    covs = [
        1.5 * pm.gp.cov.ExpQuad(1, ls=np.float64(0.61)),
        0.7 * pm.gp.cov.Matern52(1, ls=np.float64(0.83)),
    ]
    return gm.StateGP(data.t, data.y, covs, sigma=[0.1, 0.2], nugget=[1e-4, 3e-4])

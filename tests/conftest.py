"""Shared fixtures: seeded data, fast compilation for graph tests."""

import matplotlib as mpl
import numpy as np
import pymc as pm
import pytensor
import pytest

import pymc_gradmatch as gm

mpl.use("Agg")


@pytest.fixture
def rng():
    return np.random.default_rng(20190416)


@pytest.fixture
def fast_compile():
    """Compile graphs quickly and run them in Python: right for values, not for sampling."""
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        yield


@pytest.fixture(scope="session")
def lotka_volterra():
    """Return the paper's first system, the one most tests use."""
    return gm.systems.lotka_volterra


@pytest.fixture(scope="session")
def data(lotka_volterra):
    return lotka_volterra.simulate("low", random_seed=1)


@pytest.fixture(scope="session")
def gp(data):
    return gm.fit_gp(data.t, data.y, cov="ExpQuad", shared=True, random_seed=1)


@pytest.fixture(scope="session")
def two_kernel_gp(data):
    """Return a GP whose states have different kernels, so that mixing them up shows."""
    covs = [
        1.5 * pm.gp.cov.ExpQuad(1, ls=np.float64(0.61)),
        0.7 * pm.gp.cov.Matern52(1, ls=np.float64(0.83)),
    ]
    return gm.StateGP(data.t, data.y, covs, sigma=[0.1, 0.2])

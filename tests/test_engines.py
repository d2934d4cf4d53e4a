"""Inference engines other than nutpie sample, or approximate, the same posterior."""

import arviz as az
import numpy as np
import pymc as pm
import pytest
from pymc.blocking import DictToArrayBijection
from scipy.optimize import minimize


@pytest.fixture(scope="module")
def model(decay_model):
    """Return a decay with 8 times: one rate and 8 states, which every engine does in seconds."""
    return decay_model(8, 1.0, 0.1)


def sample(model, engine):
    with model:
        return pm.sample(
            2_000,
            chains=2,
            cores=1,
            nuts_sampler=engine,
            random_seed=1,
            progressbar=False,
            quiet=True,
        )


@pytest.fixture(scope="module")
def nutpie(model):
    return sample(model, "nutpie")


def moments(idata, name):
    """Return mean and standard deviation over all draws."""
    draws = idata["posterior"][name]
    return draws.mean(["chain", "draw"]).values, draws.std(["chain", "draw"]).values


def assert_same_moments(idata, reference):
    """Assert means and sds of the rate and of all states within five Monte Carlo standard errors.

    Five, not four, since SMC's particles share ancestors: between runs its means vary up to 1.3
    times as much as their effective sample size says.  The sds matter: doubling gamma leaves the
    means where they are.
    """
    for name in ("rate", "x"):
        pairs = zip(moments(idata, name), moments(reference, name), strict=True)
        for statistic, (here, there) in zip(("mean", "sd"), pairs, strict=True):
            errors = [
                az.mcse(draws, var_names=[name], method=statistic)[name].values
                for draws in (idata, reference)
            ]
            assert np.abs((here - there) / np.hypot(*errors)).max() < 5, (name, statistic)


@pytest.mark.slow
def test_pymcs_own_nuts_has_nutpies_moments(model, nutpie):
    assert_same_moments(sample(model, "pymc"), nutpie)


@pytest.mark.slow
@pytest.mark.jax("numpyro")
def test_numpyro_has_nutpies_moments(model, nutpie):
    assert_same_moments(sample(model, "numpyro"), nutpie)


@pytest.mark.slow
@pytest.mark.jax("blackjax")
def test_blackjax_has_nutpies_moments(model, nutpie):
    """Assert it with BlackJAX below 1.6, which PyMC 6.4 needs for any model (pymc issue 8367)."""
    assert_same_moments(sample(model, "blackjax"), nutpie)


@pytest.mark.slow
def test_smc_has_nutpies_moments(model, nutpie):
    with model:
        idata = pm.sample_smc(2_000, chains=2, cores=1, random_seed=1, progressbar=False)
    assert_same_moments(idata, nutpie)


@pytest.mark.slow
def test_find_map_finds_the_mode(model):
    """Assert a zero gradient, and the height that another optimiser reaches from another start.

    The density is that of the rate itself: without the Jacobian of its logarithm.
    """
    with model:
        idata = pm.find_MAP(
            progressbar=False,
            jitter=False,
            return_inferencedata=True,
            idata_kwargs={"include_transformed": True},
        )
    logp, dlogp = model.compile_logp(jacobian=False), model.compile_dlogp(jacobian=False)
    found = idata["posterior"].isel(chain=0, draw=0)
    point = {variable.name: found[variable.name].values for variable in model.value_vars}
    np.testing.assert_allclose(dlogp(point), 0, atol=1e-2)

    start = DictToArrayBijection.map({name: np.ones_like(value) for name, value in point.items()})

    def at(function, vector):
        return function(DictToArrayBijection.rmap(start._replace(data=vector)))

    reference = minimize(lambda v: -at(logp, v), start.data, jac=lambda v: -at(dlogp, v))
    assert logp(point) > -reference.fun - 1e-6


@pytest.mark.slow
def test_advi_has_nutpies_means_and_is_too_sure(model, nutpie):
    """Assert means within 0.3 posterior sds, and the narrowness that mean field is known for.

    Independent normals cannot follow states that are correlated in time, so their sds come out at
    0.3 to 0.6 of the posterior's.  The means have no such bias here: over seeds they vary by up to
    0.17 sds, the jitter of the optimiser's last step.
    """
    with model:
        approximation = pm.fit(
            20_000, obj_optimizer=pm.adam(learning_rate=0.01), random_seed=1, progressbar=False
        )
    idata = approximation.sample(4_000, random_seed=1)
    for name in ("rate", "x"):
        mean, sd = moments(nutpie, name)
        advi_mean, advi_sd = moments(idata, name)
        assert (np.abs(advi_mean - mean) < 0.3 * sd).all(), name
        assert (advi_sd < 0.8 * sd).all(), name

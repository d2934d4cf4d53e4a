"""A random seed is the same in all public functions: an int, a NumPy generator or None."""

import inspect

import numpy as np
import pymc as pm
import pytest

import pymc_gradmatch as gm

T = np.linspace(0, 2, 8)
Y = np.exp(-T)[:, None] + np.random.default_rng(1).normal(0, 0.05, (8, 1))
DECAY = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
PRIORS = {"rate": pm.HalfNormal.dist(2)}
QUIET = {"progressbar": False}
SEEDED = {
    name: value
    for name, value in {
        **{n: getattr(gm, n) for n in gm.__all__},
        "predict of Fit": gm.Fit.predict,
    }.items()
    if callable(value) and "random_seed" in inspect.signature(value).parameters
}


@pytest.fixture(scope="module")
def fitted():
    return gm.fit(DECAY, T, Y, priors=PRIORS, n_draws=1_000, random_seed=1, **QUIET)


@pytest.mark.parametrize("name", SEEDED)
def test_a_random_seed_is_an_int_a_generator_or_none(name):
    seed = inspect.signature(SEEDED[name]).parameters["random_seed"]
    assert seed.default is None
    assert seed.annotation == int | np.random.Generator | None


CALLS = {
    "fit_gp": lambda _, seed: gm.fit_gp(T, Y, cov="Matern52", random_seed=seed).sigma,
    "check_ode": lambda _, seed: gm.check_ode(DECAY, T, [1.0], PRIORS, random_seed=seed).trajectory,
    "predict": lambda fitted, seed: fitted.predict(random_seed=seed)["posterior_predictive"]["y"],
    "fit_many": lambda _, seed: gm.fit_many(
        DECAY, T, Y[None], priors=PRIORS, exact=True, n_jobs=1, random_seed=seed, **QUIET
    )["rate"],
}


@pytest.mark.parametrize("call", CALLS)
def test_equal_seeds_give_equal_results(fitted, call):
    for make in (int, np.random.default_rng):
        one, same = (np.asarray(CALLS[call](fitted, make(3))) for _ in range(2))
        np.testing.assert_array_equal(one, same)


@pytest.mark.parametrize("seed", ["one", 1.5, np.random.SeedSequence(1)])
def test_any_other_seed_of_fit_many_is_refused(seed):
    with pytest.raises(TypeError, match=r"random_seed is a \w+; expected an int, a numpy Gen"):
        gm.fit_many(DECAY, T, Y[None], priors=PRIORS, exact=True, random_seed=seed, **QUIET)

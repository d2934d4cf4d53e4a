"""Posteriors with modes that fit alike: which of them climbs come to is chance, all must count."""

import re

import numpy as np
import pandas as pd
import pymc as pm
import pytest

import pymc_gradmatch as gm
from pymc_gradmatch.exact.posterior import ExactPosterior

T = np.linspace(0, 10, 21)
CHAIN = gm.ODE(
    lambda t, x, theta: [-theta.k1 * x.a, theta.k1 * x.a - theta.k2 * x.b, theta.k2 * x.b],
    ["a", "b", "c"],
    ["k1", "k2"],
)
RATES = np.array([2.0, 0.4])
QUIET = {"random_seed": 1, "progressbar": False}


@pytest.fixture(scope="module")
def only_c():
    """Return the end of a chain of reactions, whose two rates nobody can tell apart."""
    c = CHAIN.solve(T, x0=[1.0, 0.0, 0.0], theta=RATES)[:, 2]
    return pd.DataFrame({"c": c + np.random.default_rng(0).normal(0, 0.02, len(T))}, T)


@pytest.fixture(scope="module")
def model(only_c):
    priors = {name: pm.LogNormal.dist(0, 1) for name in CHAIN.params}
    start = {"a": 1.0, "b": 0.0, "c": 0.0}
    return gm.build_model(CHAIN, T, only_c, priors=priors, start=start, preset="refined", **QUIET)


def assert_both_have_half(first, second, n_effective, width):
    """Assert that two unknowns change places in half of the draws."""
    error = 5 / np.sqrt(n_effective)
    assert (first > second).mean() == pytest.approx(0.5, abs=0.5 * error)
    for ours, other in [(first, second), (second, first)]:
        assert abs(ours.mean() - other.mean()) < 2 * error * width
        assert ours.std() == pytest.approx(other.std(), rel=2 * error)
        assert ours.std() > width / 2


def test_rates_that_can_change_places_do_so_in_one_call(model):
    fit = gm.fit(model=model, **QUIET)
    assert fit.is_exact
    assert "It has 2 modes" in repr(fit)
    assert fit.unidentified.empty  # each mode tells the rates well
    draws = fit.idata["posterior"].dataset
    assert_both_have_half(*(draws[k].to_numpy() for k in CHAIN.params), fit.n_effective, 0.7)
    np.testing.assert_allclose(fit.modes["k1"], fit.modes["k2"][::-1], rtol=1e-2)


def test_turns_that_another_state_sees_are_no_aliases():
    """Assert it of a state that was seen for a while alone, beside one that turns as often."""
    t = np.linspace(0, 30, 61)
    y = ROTATION.solve(t, x0=[1.0, 0.0], theta=[2.0])
    y += np.random.default_rng(0).normal(0, 0.05, y.shape)
    for hidden in (slice(12, None), np.arange(61) % 10 > 0):
        seen = y.copy()
        seen[hidden, 1] = np.nan
        fit = gm.fit(ROTATION, t, seen, priors={"w": pm.LogNormal.dist(0.7, 0.3)}, **QUIET)
        assert fit.is_exact


@pytest.mark.parametrize("known", ["abc", "b"])
def test_rates_of_several_experiments_do_so_too(known):
    """Assert it of starts that are known, and of such as each experiment has to find."""
    rng, experiments = np.random.default_rng(0), {}
    for name, dose in [("one", 1.0), ("two", 2.0)]:
        c = CHAIN.solve(T, x0=[dose, 0.0, 0.0], theta=RATES)[:, 2]
        seen = pd.DataFrame({"c": c + rng.normal(0, 0.02, len(T))}, T)
        start = {state: dose if state == "a" else 0.0 for state in known}
        experiments[name] = gm.Experiment(T, seen, start=start)
    priors = {name: pm.LogNormal.dist(0, 1) for name in CHAIN.params}
    fit = gm.fit(CHAIN, experiments=experiments, priors=priors, **QUIET)
    assert fit.is_exact
    assert "It has 2 modes" in repr(fit)
    draws = fit.idata["posterior"].dataset
    assert_both_have_half(*(draws[k].to_numpy() for k in CHAIN.params), fit.n_effective, 0.7)
    mirrored = fit.modes.iloc[::-1].rename(columns={"k1": "k2", "k2": "k1"})[[*fit.modes]]
    mirrored = mirrored.drop(columns="weight").to_numpy()
    np.testing.assert_allclose(fit.modes.drop(columns="weight"), mirrored, rtol=0.02, atol=2e-3)


def test_an_experiments_own_rates_change_places_by_themselves():
    """Assert it of eight modes, two for each of three experiments."""
    rng, experiments = np.random.default_rng(0), {}
    for name, dose in [("one", 1.0), ("two", 1.5), ("three", 2.0)]:
        start = {"a": dose, "b": 0.0, "c": 0.0}
        c = CHAIN.solve(T, x0=[*start.values()], theta=RATES)[:, 2]
        seen = pd.DataFrame({"c": c + rng.normal(0, 0.02, len(T))}, T)
        experiments[name] = gm.Experiment(T, seen, start=start)
    priors = {name: pm.LogNormal.dist(0, 1, shape=3) for name in CHAIN.params}
    fit = gm.fit(CHAIN, experiments=experiments, priors=priors, **QUIET)
    assert fit.is_exact
    assert "It has 8 modes" in repr(fit)
    first, second = (fit.idata["posterior"][k].to_numpy()[0].T for k in CHAIN.params)
    for one, other in zip(first, second, strict=True):
        assert_both_have_half(one, other, fit.n_effective, 0.7)


def test_a_chain_that_knows_one_order_of_the_rates_learns_of_the_other(model):
    """Assert it of draws around one mode, as NUTS returns them, with nothing to warn of."""
    target = ExactPosterior(model)
    start = target.start_point()
    width = 0.05 * np.random.default_rng(1).normal(size=(1_000, len(start)))
    drawn = target.idata(start + width, np.random.default_rng(1))
    check = gm.integrate_check(drawn, model=model, random_seed=1)
    assert check.is_exact
    assert "It has 2 modes" in check.verdict
    assert "So far away there may be several modes" not in check.verdict
    draws = check.idata["posterior"].dataset
    assert_both_have_half(*(draws[k].to_numpy() for k in CHAIN.params), check.n_effective, 0.7)


def test_hidden_states_that_can_change_places_do():
    """Assert it of two decays of which the sum is seen."""
    ode = gm.ODE(
        lambda t, x, theta: [-theta.k1 * x.a, -theta.k2 * x.b], ["a", "b"], [*CHAIN.params]
    )
    t = np.linspace(0, 6, 25)
    y = 5 * np.exp(-2 * t) + 3 * np.exp(-0.3 * t) + np.random.default_rng(0).normal(0, 0.05, 25)

    def likelihood(x, theta):
        pm.Normal("y", x.a + x.b, pm.HalfNormal("noise", 1), observed=y)

    fit = gm.fit(
        ode, t, priors={name: pm.LogNormal.dist(0, 1) for name in ode.params},
        likelihood=likelihood, start={k: pm.HalfNormal.dist(5) for k in ode.states}, **QUIET,
    )  # fmt: skip
    assert fit.is_exact
    draws = fit.idata["posterior"].dataset
    assert_both_have_half(*(draws[k].to_numpy() for k in ode.params), fit.n_effective, 0.8)
    assert_both_have_half(*draws["x0"].to_numpy()[0].T, fit.n_effective, 1.0)


def test_modes_of_a_prior_have_the_shares_of_quadrature():
    t, noise = np.linspace(0, 2, 15), 0.25
    y = 3 * np.exp(-1.85 * t)
    prior = pm.NormalMixture.dist([0.5, 0.5], mu=[1.0, 3.0], sigma=[0.1, 0.1])
    ode = gm.ODE(lambda t, x, theta: [-theta.k * x.mass], ["mass"], ["k"])
    start = {"mass": pm.Normal.dist(3, 1)}
    fit = gm.fit(ode, t, y[:, None], priors={"k": prior}, sigma=noise, start=start, **QUIET)
    assert fit.is_exact

    k, x0 = np.linspace(0.5, 4, 701)[:, None], np.linspace(0, 6, 601)
    away = y - x0[:, None] * np.exp(-k[..., None] * t)
    log_density = -((away / noise) ** 2).sum(axis=-1) / 2 - (x0 - 3) ** 2 / 2
    log_density += np.logaddexp(-(((k - 1) / 0.1) ** 2) / 2, -(((k - 3) / 0.1) ** 2) / 2)
    density = np.exp(log_density - log_density.max())
    share = (density * (k < 2)).sum() / density.sum()
    error = np.sqrt(share * (1 - share) / fit.n_effective)
    assert (fit.idata["posterior"]["k"] < 2).mean().item() == pytest.approx(share, abs=5 * error)


ROTATION = gm.ODE(lambda t, x, theta: [x.v, -(theta.w**2) * x.x], ["x", "v"], ["w"])


@pytest.mark.parametrize(
    ("width", "t", "is_sealed"),
    [
        (10.0, np.linspace(0, 11, 12), False),
        (1.0, np.linspace(0, 11, 12), True),
        (10.0, np.sort(np.random.default_rng(1).uniform(0, 11, 12)), True),
    ],
)
def test_frequencies_that_equal_gaps_cannot_tell_are_named(width, t, is_sealed):
    """Assert that a narrower prior, or unequal gaps, are the cure that the verdict says."""
    y = ROTATION.solve(t, x0=[1.0, 0.0], theta=[1.3])
    y += np.random.default_rng(0).normal(0, 0.1, y.shape)
    table = pd.DataFrame({"x": y[:, 0]})
    fit = gm.fit(ROTATION, t, table, priors={"w": pm.HalfNormal.dist(width)}, **QUIET)
    assert fit.is_exact == is_sealed
    said = re.search(r"'x' with (\d+) turning points in 11 equal gaps. Such aliases", fit.verdict)
    assert (said is not None and int(said.group(1)) > 11) == (not is_sealed)

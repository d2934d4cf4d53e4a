"""Hidden states: an ODE's states without a column."""

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from scipy import stats
from scipy.special import logsumexp

import pymc_gradmatch as gm
from benchmarks.paper import systems
from pymc_gradmatch.gp import Data, unfitted
from pymc_gradmatch.model import constraints
from pymc_gradmatch.model.gauss_newton import Problem
from pymc_gradmatch.model.likelihood import NormalLikelihood
from pymc_gradmatch.model.priors import parameters_of
from pymc_gradmatch.model.start import Start
from pymc_gradmatch.model.starting_points import scaled_by_solutions, solutions_of_prior

PAIR = gm.ODE(
    lambda t, x, theta: [-theta.rate * x.a, theta.rate * (x.a - x.b)], ["a", "b"], ["rate"]
)
PRIOR = {"rate": pm.HalfNormal.dist(2)}
T = np.linspace(0, 6, 13)
COV = [pm.gp.cov.ExpQuad(1, ls=1.2)] * 2


@pytest.fixture(scope="module")
def table():
    """Return the second state alone, which the first drives."""
    b = PAIR.solve(T, [5.0, 1.0], [0.7])[:, 1]
    return pd.DataFrame({"b": b + np.random.default_rng(2).normal(0, 0.05, len(T))})


@pytest.fixture(scope="module")
def fitted(table):
    return gm.fit(PAIR, T, table, priors=PRIOR, sigma="fixed", random_seed=1)


def quadrature(y, sigmas, weights=1.0):
    """Return mean and sd of the rate; solutions are linear in x(t0), which is integrated out.

    Over what sigma may be too, with weights: its prior, on a grid of equal steps.
    """
    rates, sigmas = np.linspace(0.05, 3, 2_000), np.atleast_1d(sigmas)
    heights = []
    for rate in rates:
        fall = np.exp(-rate * T)
        design = np.stack([rate * T * fall, fall], axis=1)
        start, *_ = np.linalg.lstsq(design, y)
        misfit = np.square(y - design @ start).sum()
        # Of both starts, sigma squared over the root of the determinant.
        log_sigma = (2 - len(y)) * np.log(sigmas)
        height = logsumexp(log_sigma - misfit / (2 * sigmas**2), b=weights)
        heights.append(height - np.linalg.slogdet(design.T @ design).logabsdet / 2)
    log_density = np.array(heights) + stats.halfnorm.logpdf(rates, scale=2)
    weights = np.exp(log_density - logsumexp(log_density))
    mean = weights @ rates
    return mean, np.sqrt(weights @ np.square(rates - mean))


@pytest.mark.slow
def test_a_hidden_state_has_the_posterior_of_quadrature(fitted, table):
    assert fitted.is_exact
    [constraint] = constraints(fitted.model)
    mean, sd = quadrature(table["b"].to_numpy(), constraint.gp.sigma[1])
    error = 6 / np.sqrt(fitted.n_effective)
    assert fitted.table.loc["rate", "mean"] == pytest.approx(mean, abs=error * sd)
    assert fitted.table.loc["rate", "sd"] == pytest.approx(sd, rel=2 * error)
    assert fitted.plot().viz["plot"].sizes["state"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.3, 20.0])
def test_the_scale_that_a_user_gives_matters_to_the_search_alone(fitted, table, size):
    other = gm.fit(PAIR, T, table, priors=PRIOR, scales={"a": size}, sigma="fixed", random_seed=1)
    assert other.is_exact
    one, two = (fit.table.loc["rate"] for fit in (fitted, other))
    assert one["mean"] == pytest.approx(two["mean"], abs=0.2 * one["sd"])


@pytest.mark.slow
def test_a_hidden_state_has_no_noise(table):
    model = gm.build_model(PAIR, T, table, priors=PRIOR, preset="refined", random_seed=1)
    assert model.named_vars_to_dims["sigma"] == ("observed_state",)
    assert model.coords["observed_state"] == ("b",)
    assert model.coords["observation"][0] == "b[0.0]"
    idata = gm.sample(500, chains=2, model=model, random_seed=1, progressbar=False)
    check = gm.integrate_check(idata, model=model, n_draws=4_000, random_seed=1)
    assert check.is_exact
    sigmas = np.linspace(0.01, 0.3, 300)
    [constraint] = constraints(model)
    of_prior = stats.halfnorm.pdf(sigmas, scale=constraint.gp.scale[1])
    mean, sd = quadrature(table["b"].to_numpy(), sigmas, of_prior)
    error = 6 / np.sqrt(check.n_effective)
    assert check.moved.loc["rate", "exact_mean"] == pytest.approx(mean, abs=error * sd)
    assert check.moved.loc["rate", "exact_sd"] == pytest.approx(sd, rel=error)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_recovery_of_fitzhugh_nagumo_is_never_seen(seed):
    """Assert trajectories within a fifth of a standard deviation of the states.

    Of the seal nothing: k was 0.34 to 0.64 in six fits, near its limit.
    """
    system = systems.fitzhugh_nagumo
    t = np.linspace(0, 10, 40)
    data = system.simulate("snr100", t=t, random_seed=seed)
    priors = {name: pm.HalfNormal.dist(5) for name in system.ode.params}
    table = pd.DataFrame({"V": data.y[:, 0]})
    fit = gm.fit(system.ode, t, table, priors=priors, random_seed=1)
    x = fit.idata["posterior"]["x"].sel(time=t, method="nearest").mean(["chain", "draw"])
    error = np.sqrt(np.square(x.to_numpy() - data.x).mean(axis=0))
    assert (error < 0.2 * data.x.std(axis=0)).all()


@pytest.mark.slow
def test_what_the_data_do_not_tell_is_said_beside_the_prior():
    """Assert it for two rates of which the data determine the sum."""
    ode = gm.ODE(lambda t, x, theta: [-(theta.k + theta.m) * x.a], ["a"], ["k", "m"])
    t = np.linspace(0, 2, 9)
    y = 3 * np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))
    priors = {"k": pm.Beta.dist(3, 3), "m": pm.Uniform.dist(0, 2)}
    fit = gm.fit(ode, t, y, priors=priors, random_seed=1)
    assert list(fit.unidentified.index) == ["k"]
    row = fit.unidentified.loc["k"]
    expected = np.ptp(stats.beta(3, 3).ppf([0.25, 0.75]))
    assert row["prior_width"] == pytest.approx(expected, rel=0.2)
    assert "The data say little about k (the middle half of its draws is 0." in repr(fit)


@pytest.mark.filterwarnings("ignore:state 'b'. the estimate of")
def test_gaussian_processes_of_hidden_states_take_a_scale(table):
    gp = gm.fit_gp(T, table, cov="Matern52", states=PAIR.states, scales={"a": 4.0}, random_seed=1)
    assert gp.states == PAIR.states
    assert gp.scale[0] == 4.0
    np.testing.assert_array_equal(gp.posterior_mean()[:, 0], 0)
    np.testing.assert_array_equal(gp.observations, table["b"])
    C = gp.operators().C
    np.testing.assert_allclose(C[0], C[1], rtol=1e-3)  # the kernel that suits what was seen
    assert gp.log_marginal_likelihood()[0] == 0
    assert gp.sigma[0] / 4.0 == pytest.approx(gp.sigma[1] / gp.scale[1], rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"fewer than 3 observations of the states \['a'\].*scales=\{'a': 1.0\}"),
        ({"scales": {"c": 1.0}}, r"scales are \{'c': 1.0\}; expected a positive number for some"),
        ({"scales": {"a": -1.0}}, r"scales are \{'a': -1.0\}; expected a positive number"),
    ],
)
def test_scales_that_are_missing_or_wrong_are_named(table, settings, message):
    with pytest.raises(ValueError, match=message):
        gm.StateGP(T, table, COV, 0.1, states=PAIR.states, **settings)


def test_data_that_say_nothing_are_refused(table):
    with pytest.raises(ValueError, match=r"states \['b'\] are neither observed, nor do they enter"):
        gm.build_model(PAIR, T, table.rename(columns={"b": "a"}), priors=PRIOR, preset="fgpgm")
    with pytest.raises(ValueError, match=r"no observation at all"):
        gm.build_model(PAIR, T, np.full((13, 2), np.nan), priors=PRIOR, preset="fgpgm")
    with pytest.raises(ValueError, match=r"no observation at all"):
        gm.fit_gp(T, np.full((13, 2), np.nan), cov="Matern52")


@pytest.mark.parametrize(
    ("prior", "preset"), [(pm.Normal.dist(5, 0.1), "fgpgm"), (pm.Uniform.dist(4, 6), "refined")]
)
def test_what_is_hidden_has_the_size_that_the_prior_of_its_start_says(prior, preset):
    """Assert it where the size of what is seen says nothing of it."""
    ode = gm.ODE(lambda t, x, theta: [-theta.k * x.a, theta.k * x.a - x.b], ["a", "b"], ["k"])
    y = ode.solve(T, [5.0, 0.03], [0.01]) + np.random.default_rng(1).normal(0, 0.001, (len(T), 2))
    model = gm.build_model(
        ode, T, pd.DataFrame({"b": y[:, 1]}), priors={"k": pm.LogNormal.dist(-5, 1)},
        start={"a": prior}, preset=preset, random_seed=1, progressbar=False,
    )  # fmt: skip
    [constraint] = constraints(model)
    assert 4 < constraint.gp.mean[0] < 6


def test_solutions_start_where_priors_of_starts_allow_it_and_are_weighed_by_these(table):
    """Assert their order, also for an observed state whose smoothed data are excluded."""
    gp = gm.StateGP(T, np.column_stack([np.full(len(T), np.nan), table["b"]]), COV, 0.05,
                    scales={0: 1.0})  # fmt: skip
    priors = {"a": pm.Normal.dist(5, 0.3), "b": pm.Uniform.dist(2, 3)}
    known, log_likelihood = Start.of(PAIR, priors), NormalLikelihood(gp)
    parameters = parameters_of(PRIOR, PAIR.params)
    problem = Problem.of(PAIR, gp, parameters, likelihood=log_likelihood, start=known)
    found = solutions_of_prior(problem, np.random.default_rng(1))
    starts = np.array([x[0] for _, x in found])
    assert abs(starts[:, 0].mean() - 5) < 0.1
    np.testing.assert_allclose(starts[:, 1], 2.5)
    log_densities = [log_likelihood(parameters.natural(u)[0], x).log_density for u, x in found]
    log_densities += stats.norm.logpdf(starts[:, 0], 5, 0.3)
    assert len(found) > 400
    assert (np.diff(log_densities) < 1e-9).all()


def test_only_what_lacks_a_scale_takes_that_of_solutions(table):
    """Assert a given scale, whose unseen state takes its mean alone, and one with both."""
    ode = gm.ODE(
        lambda t, x, theta: [-theta.rate * x.a, theta.rate * (x.a - x.b), -x.c + x.a],
        ["a", "b", "c"], ["rate"],
    )  # fmt: skip
    data = Data.of(T, table, states=ode.states, scales={"a": 123.0})
    parameters, gp = parameters_of(PRIOR, ode.params), unfitted(data)
    problem, rng = Problem.of(ode, gp, parameters), np.random.default_rng(1)
    scaled = scaled_by_solutions(problem, data, rng)
    assert scaled.scale[0] == 123
    assert scaled.mean[0] != 0
    assert (scaled.mean[1], scaled.scale[1]) == (data.mean[1], data.scale[1])
    assert 0 < scaled.scale[2] < 100
    with_means = data.with_scale(np.array([7.0, 8.0, 9.0]), data.scale)
    of_others = scaled_by_solutions(problem, with_means, rng)
    assert of_others.mean[:2].tolist() == [7, 8]


def test_a_rate_above_its_prior_is_told_if_its_ratio_is():
    """Assert it of 10 +- 1.6, whose range is that of a log-normal prior around one."""
    ode = gm.ODE(lambda t, x, theta: [-theta.k * x.a], ["a"], ["k"])
    t = np.linspace(0, 0.3, 7)
    y = 3 * np.exp(-10 * t)[:, None] + np.random.default_rng(1).normal(0, 0.2, (7, 1))
    fit = gm.fit(ode, t, y, priors={"k": pm.LogNormal.dist(0, 1)}, random_seed=1)
    assert fit.table.loc["k", "sd"] > 1.2
    assert fit.unidentified.empty

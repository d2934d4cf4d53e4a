"""Known, constrained and uncertain starts, in the matched model and in the exact posterior."""

import numpy as np
import pymc as pm
import pytest
from scipy import stats
from scipy.optimize import approx_fprime
from scipy.special import logsumexp

import pymc_gradmatch as gm
from pymc_gradmatch.exact import ExactPosterior
from pymc_gradmatch.model import constraints
from pymc_gradmatch.model.gauss_newton import Problem, Theorem1
from pymc_gradmatch.model.priors import parameters_of
from pymc_gradmatch.model.start import Start

T = np.linspace(0, 4, 9)
NOISE = 0.5
DECAY = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
CHAIN = gm.ODE(
    lambda t, x, theta: (
        -theta.k * x.a,
        theta.k * x.a - theta.m * x.b,
        theta.m * x.b,
    ),
    ["a", "b", "c"],
    ["k", "m", "total"],
)
PRIORS = {
    "k": pm.LogNormal.dist(0, 0.5),
    "m": pm.LogNormal.dist(-1, 0.5),
    "total": pm.LogNormal.dist(2.3, 0.2),
}
LAW = {"a": lambda theta, x0: theta.total - x0.b - x0.c, "c": 0.0}


@pytest.fixture(scope="module")
def y():
    x = 20.0 * np.exp(-0.5 * T)[:, None]
    return x + np.random.default_rng(1).normal(0, NOISE, x.shape)


@pytest.fixture(scope="module")
def chain_data():
    x = CHAIN.solve(T, [9.0, 1.0, 0.0], [1.0, 0.4, 10.0])
    return x + np.random.default_rng(2).normal(0, 0.2, x.shape)


@pytest.fixture(scope="module")
def chain_gp(chain_data):
    return gm.StateGP(T, chain_data, [pm.gp.cov.Matern52(1, ls=2.0)] * 3, sigma=0.2)


def posterior(y, log_prior, noise):
    """Return mean and sd of the rate by quadrature over rate and start, with sigma known."""
    rate, start = np.linspace(0.2, 0.9, 701)[:, None, None], np.linspace(10, 30, 801)[:, None]
    x = start * np.exp(-rate * T)
    height = stats.norm.logpdf(y[:, 0], x, noise).sum(axis=-1)
    height += stats.halfnorm.logpdf(rate[..., 0], scale=2) + log_prior(start[:, 0])
    marginal = logsumexp(height, axis=1)
    weights = np.exp(marginal - logsumexp(marginal))
    mean = weights @ rate[:, 0, 0]
    return mean, np.sqrt(weights @ (rate[:, 0, 0] - mean) ** 2)


def exactly(start):
    """Return a prior so narrow that it is a number."""
    return lambda x0: stats.norm.logpdf(x0, start, 0.02)


STARTS = {
    "free": (None, lambda x0: 0 * x0),
    "number": ({"mass": 20.0}, exactly(20.0)),
    "prior": ({"mass": pm.Normal.dist(19.0, 0.2)}, lambda x0: stats.norm.logpdf(x0, 19, 0.2)),
    "function": ({"mass": lambda theta: 40.0 * theta.rate}, None),
}


def model_of(y, start, **settings):
    return gm.build_model(
        DECAY, T, y, priors={"rate": pm.HalfNormal.dist(2)}, start=start, preset="refined",
        random_seed=1, progressbar=False, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("case", STARTS)
def test_the_exact_posterior_knows_the_start(y, case):
    start, log_prior = STARTS[case]
    model = model_of(y, start, sigma="fixed")
    noise = constraints(model)[0].gp.sigma[0]
    target = ExactPosterior(model)
    known = case in ("number", "function")
    assert target.names == (["rate_log__"] if known else ["rate_log__", "x0[mass]"])
    fit = gm.fit(model=model, random_seed=1, progressbar=False)
    assert fit.is_exact
    x0 = fit.idata["posterior"]["x0"].to_numpy().ravel()
    rate = fit.idata["posterior"]["rate"].to_numpy().ravel()
    if case == "function":
        np.testing.assert_allclose(x0, 40 * rate, rtol=1e-10)
        grid = np.linspace(0.2, 0.9, 7001)
        x = 40 * grid[:, None] * np.exp(-grid[:, None] * T)
        height = stats.norm.logpdf(y[:, 0], x, noise).sum(axis=-1)
        height += stats.halfnorm.logpdf(grid, scale=2)
        weights = np.exp(height - logsumexp(height))
        mean = weights @ grid
        sd = np.sqrt(weights @ (grid - mean) ** 2)
    else:
        mean, sd = posterior(y, log_prior, noise)
    if case == "number":
        np.testing.assert_array_equal(x0, 20.0)
    error = 5 / np.sqrt(fit.n_effective)
    assert rate.mean() == pytest.approx(mean, abs=(error + 0.02) * sd)
    assert rate.std() == pytest.approx(sd, rel=error + 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("case", STARTS)
def test_matched_draws_know_the_start_too(y, case):
    """Assert the exact posterior within a third of its width, and the known start within sigma."""
    model = model_of(y, STARTS[case][0])
    fit = gm.fit(model=model, random_seed=1, progressbar=False)
    matched = gm.sample(1000, model=model, random_seed=1, progressbar=False)
    draws = matched["posterior"]
    mean, sd = fit.table.loc["rate", ["mean", "sd"]]
    assert abs(draws["rate"].mean() - mean) < 0.33 * sd
    assert 0.8 < draws["rate"].std() / sd < 1.25
    assert set(matched["observed_data"].data_vars) == {"y"}
    x0 = draws["x"].isel(time=0, state=0)
    if case == "number":
        assert abs(x0 - 20).max() < 0.1
    if case == "function":
        assert abs(x0 - 40 * draws["rate"]).max() < 0.1
    check = gm.integrate_check(matched, model=model, random_seed=1)
    assert check.is_exact
    assert np.isfinite(check.moved.to_numpy()).all()


@pytest.mark.slow
def test_the_papers_preset_knows_the_start(y):
    model = gm.build_model(
        DECAY, T, y, priors={"rate": pm.HalfNormal.dist(2)}, start={"mass": 20.0}, gamma=0.01,
        random_seed=1, sigma="fixed", preset="fgpgm",
    )  # fmt: skip
    draws = gm.sample(500, model=model, random_seed=1, progressbar=False)["posterior"]
    assert abs(draws["x"].isel(time=0) - 20).max() < 0.1


def test_a_conservation_law_holds_in_every_draw(chain_data):
    fit = gm.fit(CHAIN, T, chain_data, priors=PRIORS, start=LAW, random_seed=1, progressbar=False)
    assert fit.pareto_k < 0.7
    draws = fit.idata["posterior"]
    np.testing.assert_allclose(
        draws["x"].sum("state") - draws["total"].broadcast_like(draws["x"].isel(state=0)),
        0,
        atol=1e-6,
    )
    assert (draws["x0"].sel(state="c") == 0).all()
    for name, truth in {"k": 1.0, "m": 0.4, "total": 10.0}.items():
        mean, sd = fit.table.loc[name, ["mean", "sd"]]
        assert abs(mean - truth) < 5 * sd
    later = gm.predict(fit.idata, model=fit.model, t=[0.0, 8.0])["posterior_predictive"]["x"]
    np.testing.assert_allclose(later.isel(time=1).sum("state"), draws["total"], rtol=1e-6)


def test_gradient_and_hessian_of_theorem_1_count_what_is_known(chain_gp, chain_data):
    """Assert differences of the value, with a width as large as sigma."""
    start = Start.of(CHAIN, LAW | {"b": pm.Normal.dist(1.0, 0.3)})
    parameters = parameters_of(PRIORS, CHAIN.params)
    gp = chain_gp.with_sigma(10.0)
    gamma = np.full(3, 0.1)
    problem, without = (
        Theorem1(Problem.of(CHAIN, gp, parameters, gamma, start=known)) for known in (start, None)
    )
    rng = np.random.default_rng(1)
    point = problem.flat(np.array([0.1, -0.8, 2.2]), gp.posterior_mean())
    point += rng.normal(0, 0.01, len(point))
    added = problem.value(point)[0] - without.value(point)[0]
    theta = np.exp(point[:3])
    a, b, c = problem.states(point)[0]
    expected = np.square((a - theta[2] + b) / 0.1) / 2 + np.square(c / 0.1) / 2
    assert added == pytest.approx(expected - stats.norm.logpdf(b, 1, 0.3), rel=1e-9)
    slope = approx_fprime(point, lambda p: problem.value(p)[0], 1e-7)
    np.testing.assert_allclose(problem.value(point)[1], slope, rtol=2e-4, atol=2e-2)
    step = 1e-5 * np.eye(len(point))
    difference = [
        (problem.value(point + h)[1] - without.value(point + h)[1])
        - (problem.value(point - h)[1] - without.value(point - h)[1])
        for h in step
    ]
    hessian = problem.hessian(point) - without.hessian(point)
    curved = np.array(difference) / 2e-5
    # total = exp(u): the second derivative of a residual is left out, as that of f is.
    curved[2, 2] = hessian[2, 2]
    np.testing.assert_allclose(hessian, curved, rtol=1e-4, atol=1e-3)


def test_circles_are_refused():
    with pytest.raises(ValueError, match=r"starts of \['a', 'b'\] depend on each other"):
        Start.of(CHAIN, {"a": lambda theta, x0: 1 - x0.b, "b": lambda theta, x0: 1 - x0.a})


def test_one_known_start_may_be_written_by_another():
    start = Start.of(CHAIN, {"a": lambda theta, x0: 3 * x0.b, "b": lambda theta: theta.k})
    filled = start.with_known(np.array([2.0, 1.0, 1.0]), np.array([0.0, 0.0, 5.0]))
    np.testing.assert_allclose(filled, [6.0, 2.0, 5.0])


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        ({"prey": 3.0}, ValueError, r"start is given for \['prey'\]; expected .*\['mass'\]"),
        ({"mass": "20"}, TypeError, "the start of 'mass' is '20'; expected a number"),
        ({"mass": np.nan}, TypeError, "the start of 'mass' is nan"),
        ([20.0], TypeError, "start is a list; expected a mapping"),
        ({"mass": lambda a, b, c: 1}, TypeError, "function of 3 arguments"),
        ({"mass": lambda theta: [1.0, 2.0]}, ValueError, r"'mass' has shape \(2,\)"),
        ({"mass": pm.Normal.dist(shape=2)}, ValueError, "has 1 dimensions; expected a scalar"),
        ({"mass": 20_000.0}, ValueError, "20000, but .* was observed at t = 0"),
        (
            {"mass": pm.Normal.dist(pm.HalfNormal.dist(1), 0.1)},
            ValueError,
            "start of 'mass' depends on random variables that are not in the model",
        ),
    ],
)
def test_starts_that_cannot_be_used_are_refused(y, start, error, message):
    with pytest.raises(error, match=message):
        model_of(y, start)


def test_a_prior_on_the_start_is_a_potential_of_states_and_a_prior_of_the_exact_model(y):
    model = model_of(y, {"mass": pm.Normal.dist(19.0, 0.2)})
    assert [potential.name for potential in model.potentials] == ["start_prior"]
    exact = gm.exact_model(model)
    assert exact.potentials == []
    assert "x0_mass ~ Normal(19, 0.2)" in exact.str_repr()


def test_starts_with_positive_priors_are_searched_for_as_logarithms(chain_gp, chain_data):
    """Assert it, and the density by hand, for one such start beside others."""
    rest = {"b": lambda theta, x0: theta.total - x0.a - x0.c}
    start = {"a": pm.Normal.dist(9, 1), "c": pm.LogNormal.dist(-1, 1)} | rest
    model = gm.build_model(
        CHAIN,
        T,
        chain_data,
        priors=PRIORS,
        gp=chain_gp,
        start=start,
        gamma=0.1,
        sigma="fixed",
        preset="fgpgm",
    )
    target = ExactPosterior(model)
    there = target.start_point({}, [np.array([9.0, 1.0, 0.2])])
    phi = np.array([there, there, there])
    phi[[1, 2], [target.names.index(f"x0[{state}]") for state in "ac"]] += 0.7
    a, b, c = (target.scalars(phi)[f"x0[{state}]"] for state in "abc")
    np.testing.assert_allclose(a, 9 + np.array([0, 0.7, 0]) * chain_gp.scale[0])
    np.testing.assert_allclose(c, 0.2 * np.exp([0, 0, 0.7]))
    theta = [target.scalars(there[None])[name][0] for name in CHAIN.params]
    x = np.array([CHAIN.solve(T, x0, theta) for x0 in zip(a, b, c, strict=True)])
    expected = stats.norm.logpdf(chain_data, x, 0.2).sum(axis=(1, 2))
    expected += stats.norm.logpdf(a, 9, 1) + stats.norm.logpdf(np.log(c), -1, 1)
    np.testing.assert_allclose(np.diff(target(phi)), np.diff(expected), rtol=1e-4)


def test_a_potential_of_a_trajectory_is_no_prior_of_its_start(chain_gp, chain_data):
    """Assert coordinates in the data's units where a whole trajectory is kept above zero."""
    rest = {"b": lambda theta, x0: theta.total - x0.a - x0.c}
    model = gm.build_model(
        CHAIN,
        T,
        chain_data,
        priors=PRIORS,
        gp=chain_gp,
        start=rest,
        gamma=0.1,
        sigma="fixed",
        preset="fgpgm",
    )
    with model:
        pm.Potential("above", pm.math.switch(model["x"][:, 2].min() > 0, 0.0, -np.inf))
    target = ExactPosterior(model)
    there = target.start_point({}, [np.array([9.0, 1.0, 0.2])])
    phi = np.array([there, there])
    phi[1, target.names.index("x0[c]")] += 0.7
    np.testing.assert_allclose(np.diff(target.scalars(phi)["x0[c]"]), 0.7 * chain_gp.scale[2])


def test_a_start_whose_prior_excludes_the_first_observation_is_optimised_from_within(chain_gp):
    start = Start.of(CHAIN, {"c": pm.LogNormal.dist(-1, 1)})
    x = chain_gp.posterior_mean()
    x[0, 2] = -0.5
    moved = start.within_support(x)
    assert moved[0, 2] > 0
    np.testing.assert_array_equal(np.delete(moved, 2, axis=1), np.delete(x, 2, axis=1))


def test_a_start_whose_prior_depends_on_a_variable_is_optimised_given_its_initial_value():
    with pm.Model():
        middle = pm.Normal("middle", 0, 1, initval=3.0)
        start = Start.of(DECAY, {"mass": pm.Normal.dist(middle, 2.0)})
        kept = Start.of(DECAY, {"mass": pm.Uniform.dist(middle, middle + 2)})
    told = start.evaluated(np.array([1.0]), np.array([5.0]))
    assert told.log_prior == pytest.approx(stats.norm.logpdf(5, 3, 2))
    np.testing.assert_allclose(told.gradient, [-0.5])
    np.testing.assert_allclose(kept.within_support(np.zeros((2, 1)))[0], [4.0])


@pytest.mark.slow
def test_the_one_call_hands_the_starts_of_a_users_model_on(chain_data, chain_gp):
    """Assert the posterior of start=, from a model with the paper's settings."""
    model = gm.build_model(
        CHAIN,
        T,
        chain_data,
        priors=PRIORS,
        gp=chain_gp,
        start=LAW,
        gamma=0.1,
        sigma="fixed",
        preset="fgpgm",
    )
    one = gm.fit(model=model, random_seed=1, progressbar=False)
    other = gm.fit(
        CHAIN, T, chain_data, priors=PRIORS, start=LAW, sigma=0.2,
        random_seed=1, progressbar=False,
    )  # fmt: skip
    assert one.is_exact
    assert other.is_exact
    apart = one.table.loc[["k", "m"], "mean"] - other.table.loc[["k", "m"], "mean"]
    assert (apart.abs() < 0.3 * other.table.loc[["k", "m"], "sd"]).all()

"""The mode of Theorem 1, and re-centring the prior mean on the ODE's solution."""

from itertools import count

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy.optimize import least_squares
from scipy.stats import norm

import pymc_gradmatch as gm
from benchmarks import levers
from pymc_gradmatch.model import gauss_newton, refinement
from pymc_gradmatch.model import priors as prior_densities
from pymc_gradmatch.model.gauss_newton import Mode, Problem, Theorem1, optimise
from pymc_gradmatch.model.likelihood import GraphLikelihood, NormalLikelihood
from pymc_gradmatch.model.priors import parameters_of
from pymc_gradmatch.model.starting_points import optimise_from_prior

GAMMA = np.array([0.05, 0.2])
PRIORS = {
    "half normal": pm.HalfNormal.dist(3.0),
    "log normal": pm.LogNormal.dist(0.3, 0.7),
    "uniform": pm.Uniform.dist(-1.0, 4.0),
    "normal": pm.Normal.dist(1.0, 2.0),
    "gamma": pm.Gamma.dist(3.0, 2.0),
}


@pytest.fixture(scope="module")
def priors(lotka_volterra):
    """Return priors of several supports, so that mixing up coordinates shows."""
    return dict(
        zip(
            lotka_volterra.ode.params,
            [
                pm.HalfNormal.dist(5),
                pm.LogNormal.dist(0, 1),
                pm.Uniform.dist(0, 9),
                pm.Normal.dist(),
            ],
            strict=True,
        )
    )


@pytest.fixture(scope="module")
def model_and_gp(lotka_volterra, two_kernel_gp, priors):
    """Return the model, and its Gauss-Newton twin, on a grid with a trajectory as prior mean."""
    ode = lotka_volterra.ode
    gp = two_kernel_gp.with_grid(2).with_amplitude([4.0, 2.0])
    solution = ode.solve(gp.t, lotka_volterra.x0, lotka_volterra.theta)
    slope, *_ = ode.linearised(gp.t, solution, np.array([*lotka_volterra.theta.values()]))
    gp = gp.with_mean(solution + 0.1, slope)
    model = gm.build_model(
        ode, gp.t_observed, gp.y, priors=priors, gp=gp, gamma=GAMMA, sigma="fixed", preset="fgpgm"
    )
    return gp, model, parameters_of(priors, ode.params)


def as_point(model, gp, u, x):
    """Return a point of the model from unconstrained parameters and states."""
    *values, states = (variable.name for variable in model.value_vars)
    return dict(zip(values, u, strict=True)) | {states: (x - gp.prior_mean) / gp.scale}


@pytest.mark.parametrize("name", PRIORS)
def test_unconstrained_parameters_are_those_of_pymc(name):
    """Assert density, natural values and derivatives against a PyMC model of the same prior."""
    parameters = parameters_of({"a": PRIORS[name]}, ["a"])
    with pm.Model() as model:
        model.register_rv(
            PRIORS[name].owner.clone().outputs[PRIORS[name].owner.outputs.index(PRIORS[name])], "a"
        )
    [value] = model.value_vars
    logp = model.compile_logp(mode="FAST_COMPILE")
    natural = model.compile_fn(model.replace_rvs_by_values([model["a"]])[0], mode="FAST_COMPILE")
    h = 1e-4
    for u in (-1.3, 0.2, 0.9):
        low, here, high = (float(logp({value.name: u + step})) for step in (-h, 0, h))
        density, gradient, curvature = parameters.log_prior(np.array([u]))
        assert density == pytest.approx(here, rel=1e-12)
        assert gradient == pytest.approx((high - low) / (2 * h), rel=1e-6, abs=1e-7)
        assert curvature == pytest.approx((high - 2 * here + low) / h**2, rel=1e-5, abs=1e-6)
        low, here, high = (float(natural({value.name: u + step})) for step in (-h, 0, h))
        theta, slope = parameters.natural(np.array([u]))
        assert theta == pytest.approx(here, rel=1e-12)
        assert slope == pytest.approx((high - low) / (2 * h), rel=1e-6)


def test_parameters_keep_to_themselves(priors, lotka_volterra):
    """Assert sums of densities, a diagonal Hessian and names in order, for mixed supports."""
    names = lotka_volterra.ode.params
    together = parameters_of(priors, names)
    u = np.array([0.3, -0.2, 0.7, -1.1])
    alone = [parameters_of({name: priors[name]}, [name]) for name in names]
    density, gradient, curvature = together.log_prior(u)
    singles = [one.log_prior(u[[i]]) for i, one in enumerate(alone)]
    assert density == pytest.approx(sum(float(single[0]) for single in singles))
    np.testing.assert_allclose(gradient, [single[1][0] for single in singles])
    np.testing.assert_allclose(curvature, [single[2][0] for single in singles])
    expected = [one.natural(u[[i]])[0][0] for i, one in enumerate(alone)]
    assert together.by_name(u) == pytest.approx(dict(zip(names, expected, strict=True)))


def test_priors_that_differ_in_numbers_are_compiled_once_and_keep_their_own(monkeypatch):
    def of(*sds):
        given = {f"p{k}": pm.Normal.dist(sd, float(sd)) for k, sd in enumerate(sds)}
        return parameters_of(given, list(given))

    of(1.3)
    monkeypatch.setattr(prior_densities, "in_numpy", None)
    value, gradient, curvature = of(2.7, 3.1).log_prior(np.array([1.0, 2.0]))
    expected = norm.logpdf([1.0, 2.0], [2.7, 3.1], [2.7, 3.1]).sum()
    assert value == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient, [1.7 / 2.7**2, 1.1 / 3.1**2], rtol=1e-12)
    np.testing.assert_allclose(curvature, [-1 / 2.7**2, -1 / 3.1**2], rtol=1e-12)


def test_draws_of_parameters_are_those_of_the_prior():
    parameters = parameters_of(
        {"a": pm.Uniform.dist(2, 3), "b": pm.Normal.dist(9, 0.1)}, ["b", "a"]
    )
    draws = np.array([parameters.natural(parameters.draw(seed))[0] for seed in range(400)])
    assert draws.mean(axis=0) == pytest.approx([9, 2.5], abs=0.06)
    assert draws.std(axis=0) == pytest.approx([0.1, 1 / np.sqrt(12)], rel=0.2)
    np.testing.assert_array_equal(parameters.draw(7), parameters.draw(7))


@pytest.mark.slow
def test_a_variable_that_depends_on_another_has_its_prior_given_the_others_start():
    with pm.Model() as model:
        width = pm.LogNormal("width", 0, 1, initval=2.5)
        rate = pm.HalfNormal("rate", width)
        parameters = parameters_of({"rate": rate}, ["rate"])
    expected = parameters_of({"rate": pm.HalfNormal.dist(np.float64(2.5))}, ["rate"])
    u = np.array([0.4])
    np.testing.assert_allclose(parameters.log_prior(u)[0], expected.log_prior(u)[0], rtol=1e-12)
    assert list(model.named_vars) == ["width", "rate"]


def test_objective_is_minus_the_models_log_density(model_and_gp, lotka_volterra, rng):
    """Assert one constant across random points, and the gradient, against the PyMC graph."""
    gp, model, parameters = model_and_gp
    problem = Theorem1(Problem.of(lotka_volterra.ode, gp, parameters, GAMMA))
    logp, dlogp = (f(mode="FAST_COMPILE") for f in (model.compile_logp, model.compile_dlogp))
    totals = []
    for _ in range(4):
        u, x = rng.normal(0.3, 0.4, 4), gp.prior_mean + rng.normal(0, 0.3, gp.prior_mean.shape)
        value, gradient = problem.value(problem.flat(u, x))
        point = as_point(model, gp, u, x)
        totals.append(value + logp(point))
        theirs = -dlogp(point)
        ours = np.append(gradient[:4], gradient[4:].reshape(2, -1).T.ravel())
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max())
        np.testing.assert_allclose(problem.states(problem.flat(u, x)), x, rtol=1e-12)
    np.testing.assert_allclose(totals, totals[0], rtol=1e-8)


def written(gp, log_density):
    """Return a log density of the states on the grid as a likelihood, of four parameters."""
    x = pt.matrix("x", shape=gp.prior_mean.shape)
    return GraphLikelihood(log_density(x), x, [pt.scalar(name) for name in "abcd"], gp=gp)


def test_optimisation_survives_a_hessian_that_rounding_has_made_singular(
    lotka_volterra, model_and_gp, monkeypatch
):
    gp, _, parameters = model_and_gp
    problem = Problem.of(lotka_volterra.ode, gp, parameters, GAMMA)
    start = Mode(np.zeros(4), gp.prior_mean, np.ones(4))
    theorem = Theorem1(problem)
    n = len(theorem.flat(start.u, start.x))
    monkeypatch.setattr(Theorem1, "hessian", lambda *_: np.ones((n, n)))
    monkeypatch.setattr(Theorem1, "sd", lambda *_: np.ones(4))
    [top] = gauss_newton.optimise([problem], [start])
    heights = [-theorem.value(theorem.flat(one.u, one.x))[0] for one in (start, top)]
    assert heights[1] > heights[0] + 1


@pytest.fixture(scope="module")
def counted(lotka_volterra, model_and_gp, priors):
    """Return a model of counts, and what they say of the states."""
    gp, *_ = model_and_gp
    counts = np.random.default_rng(1).poisson(10 * gp.y.clip(0.1))

    def counting(x):
        return pm.Poisson.dist(10 * pm.math.log1pexp(gp.at_observations(x)))

    with pm.Model() as model:
        theta = {
            name: model.register_rv(prior.owner.clone().outputs[1], name)
            for name, prior in priors.items()
        }
        x = gp.prior("x")
        pm.Poisson("y", 10 * pm.math.log1pexp(gp.at_observations(x)), observed=counts)
        gm.GradientMatchingODE("g", lotka_volterra.ode, x, theta, gp=gp, gamma=GAMMA)
    return model, written(gp, lambda x: pm.logp(counting(x), counts).sum())


@pytest.mark.slow
def test_optimisation_takes_any_likelihood_of_the_states(
    model_and_gp, counted, lotka_volterra, rng
):
    """Assert the model's density, up to a constant, and its gradient, for Poisson counts."""
    gp, _, parameters = model_and_gp
    model, likelihood = counted
    problem = Theorem1(Problem.of(lotka_volterra.ode, gp, parameters, GAMMA, likelihood))
    logp, dlogp = (f(mode="FAST_COMPILE") for f in (model.compile_logp, model.compile_dlogp))
    totals = []
    for _ in range(3):
        u, x = rng.normal(0.3, 0.4, 4), gp.prior_mean + rng.normal(0, 0.3, gp.prior_mean.shape)
        value, gradient = problem.value(problem.flat(u, x))
        point = as_point(model, gp, u, x)
        totals.append(value + logp(point))
        theirs = -dlogp(point)
        ours = np.append(gradient[:4], gradient[4:].reshape(2, -1).T.ravel())
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max())
    np.testing.assert_allclose(totals, totals[0], rtol=1e-8)
    problem = Problem.of(lotka_volterra.ode, gp, parameters, GAMMA, likelihood)
    [top] = optimise([problem], [Mode(u, x, np.ones(len(u)))])
    gradient = dlogp(as_point(model, gp, top.u, top.x))
    assert np.abs(gradient[:4] * top.sd).max() < 1e-2


def test_curvature_of_a_likelihood_is_that_of_differences(model_and_gp, counted, rng):
    gp, *_ = model_and_gp
    _, likelihood = counted
    x = gp.prior_mean + rng.normal(0, 0.3, gp.prior_mean.shape)
    theta, step = np.ones(4), 1e-5
    curvature = likelihood.curvature(theta, x)
    assert not curvature[:4].any()
    for entry in rng.choice(x.size, 6, replace=False):
        state, time = divmod(int(entry), len(x))
        move = np.zeros_like(x)
        move[time, state] = step
        ahead, behind = (likelihood(theta, x + s * move).by_states for s in (1, -1))
        expected = ((behind - ahead) / (2 * step)).T.ravel()
        np.testing.assert_allclose(curvature[4 + entry, 4:], expected, rtol=1e-4, atol=1e-6)


def test_the_normal_likelihood_is_the_one_of_its_graph(model_and_gp, rng):
    gp, *_ = model_and_gp
    other = written(
        gp, lambda x: pm.logp(pm.Normal.dist(gp.at_observations(x), gp.sigma), gp.y).sum()
    )
    x, theta = gp.prior_mean + rng.normal(0, 0.3, gp.prior_mean.shape), np.ones(4)
    one = NormalLikelihood(gp)
    np.testing.assert_allclose(one(theta, x).by_states, other(theta, x).by_states, rtol=1e-9)
    whole = np.zeros((4 + x.size,) * 2)
    places = [4 + k * len(x) + row for k in range(x.shape[1]) for row in one.rows]
    whole[np.ix_(places, places)] = one.curvature(theta, x)[4:, 4:]
    np.testing.assert_allclose(whole, other.curvature(theta, x), rtol=1e-9, atol=1e-8)
    np.testing.assert_allclose(other.around(theta, x).sigma, gp.sigma, rtol=1e-9)


@pytest.mark.slow
def test_the_point_reached_is_stationary_in_the_models_density(model_and_gp, lotka_volterra):
    """Assert a gradient of the PyMC graph that is small against the posterior's widths."""
    gp, model, parameters = model_and_gp
    sought = Problem.of(lotka_volterra.ode, gp, parameters, GAMMA)
    start = optimise_from_prior(sought, gp.posterior_mean(), np.random.default_rng(1))
    [top] = optimise([sought], [start])
    gradient = model.compile_dlogp(mode="FAST_COMPILE")(as_point(model, gp, top.u, top.x))
    assert np.abs(gradient[:4] * top.sd).max() < 1e-3
    problem = Theorem1(Problem.of(lotka_volterra.ode, gp, parameters, GAMMA))
    covariance = np.linalg.inv(problem.hessian(problem.flat(top.u, top.x)))
    flat = np.append(gradient[:4], gradient[4:].reshape(-1, 2).T.ravel())
    assert np.sqrt(flat @ covariance @ flat) < 1e-3  # the Newton step, in posterior sds
    theta = parameters.by_name(top.u)
    for name, truth in lotka_volterra.theta.items():
        assert theta[name] == pytest.approx(truth, rel=0.2)


@pytest.fixture(scope="module")
def decay():
    """Return a decay with a floor, its data, and the exact least-squares estimate with its sds."""
    ode = gm.ODE(
        lambda t, x, theta: [theta.floor - theta.rate * x.mass], ["mass"], ["rate", "floor"]
    )
    t = np.linspace(0, 4, 15)
    y = (0.3 + 1.7 * np.exp(-t))[:, None] + np.random.default_rng(3).normal(0, 0.05, (15, 1))

    def residuals(p):
        rate, floor, x0 = p
        return (floor / rate + (x0 - floor / rate) * np.exp(-rate * t)) - y[:, 0]

    fit = least_squares(residuals, [1.0, 0.3, 2.0], xtol=1e-12, ftol=1e-12)
    variance = 2 * fit.cost / (len(t) - 3)
    sd = np.sqrt(variance * np.diag(np.linalg.inv(fit.jac.T @ fit.jac)))
    # Without a transform: the most probable point is then that of the likelihood.
    priors = {"rate": pm.Normal.dist(0, 100), "floor": pm.Normal.dist(0, 100)}
    gp = gm.fit_gp(t, y, cov="Matern52", random_seed=1).with_grid(4).with_amplitude(100.0)
    return ode, gp, priors, fit.x, sd, np.sqrt(variance)


@pytest.fixture(scope="module")
def recentred(decay):
    ode, gp, priors, *_ = decay
    return levers.recentred(ode, gp, priors, 1e-6, 1)


def test_recentring_ends_at_the_least_squares_estimate(decay, recentred):
    """Assert theta and sigma of a decay whose solution is known, within a tenth of an sd."""
    *_, estimate, sd, sigma = decay
    error = np.array([*recentred.theta.values()]) - estimate[:2]
    assert (np.abs(error) < 0.1 * sd[:2]).all()
    assert np.abs(recentred.gp.prior_mean[0, 0] - estimate[2]) < 0.1 * sd[2]
    assert recentred.gp.sigma[0] == pytest.approx(sigma, rel=1e-2)
    assert recentred.moves[-1] < 0.1
    assert len(recentred.moves) < 10


@pytest.mark.parametrize(
    ("reached_limit", "rounds"), [([], 10), ([0, 1], 2), ([0, 2, 4, 5], 6), ([8, 9], 10)]
)
def test_recentring_ends_after_two_optimisations_at_their_step_limit(
    decay, recentred, monkeypatch, reached_limit, rounds
):
    """Assert it for steps that move theta by its standard deviation for ever."""
    ode, gp, priors, *_ = decay
    numbers = count()

    def keep_moving(problems, starts, shared):
        [(u, x, *_)] = starts
        return [Mode(u + 1e-3, x, np.full(len(u), 1e-3), next(numbers) in reached_limit)]

    monkeypatch.setattr(refinement, "optimise", keep_moving)
    found = levers.recentred(ode, gp, priors, 1e-6, 1)
    np.testing.assert_allclose(found.moves, np.ones(rounds), rtol=1e-6)


def test_an_optimisation_at_its_step_limit_says_so(decay, recentred, monkeypatch):
    ode, _, priors, *_ = decay
    gp, (mean, slope) = recentred.gp, (recentred.gp.prior_mean, recentred.gp.prior_slope)
    away = gp.with_mean(1.1 * mean, 1.1 * slope)
    at = parameters_of(priors, ode.params)
    problem = Problem.of(ode, away, at, np.array([1e-6]))
    start = Mode(np.array([2.0, 1.0]), away.prior_mean, np.ones(2))
    [whole] = optimise([problem], [start])
    monkeypatch.setattr(gauss_newton, "MAX_STEPS", 2)
    [cut] = optimise([problem], [start])
    assert (whole.reached_limit, cut.reached_limit) == (False, True)
    [again] = optimise([problem], [whole])
    assert not again.reached_limit


def test_prior_mean_is_a_solution_of_the_ode(decay, recentred):
    """Assert the solution, its slope, and theta at which it was made, a last move away."""
    ode, gp, _, _, sd, _ = decay
    centred = recentred.gp
    rate, floor = recentred.theta.values()
    mean, slope = centred.prior_mean, centred.prior_slope
    np.testing.assert_allclose(slope, floor - rate * mean, atol=0.1 * sd.max() * np.abs(mean).max())
    # By the solution alone: x' is linear in x, exactly.
    fitted = np.polyfit(mean[:, 0], slope[:, 0], 1)
    np.testing.assert_allclose(np.polyval(fitted, mean[:, 0]), slope[:, 0], atol=1e-9)
    theta = {"rate": -fitted[0], "floor": fitted[1]}
    np.testing.assert_allclose(ode.solve(centred.t, mean[0], theta), mean, rtol=1e-6)
    np.testing.assert_allclose([*theta.values()], [rate, floor], atol=0.1 * sd.max())
    for mine, theirs in zip(centred.operators(), gp.operators(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_another_seed_finds_the_same(decay, recentred):
    ode, gp, priors, _, sd, _ = decay
    other = levers.recentred(ode, gp, priors, 1e-6, 8)
    difference = np.subtract([*other.theta.values()], [*recentred.theta.values()])
    assert (np.abs(difference) < 0.05 * sd[:2]).all()


@pytest.mark.slow
def test_an_ode_that_cannot_be_integrated_warns_and_leaves_the_mean(decay):
    """Assert it for a right-hand side that explodes as soon as it is followed for long."""
    _, gp, *_ = decay
    ode = gm.ODE(lambda t, x, theta: [theta.a * x.mass**4 + 50.0], ["mass"], ["a"])
    priors = {"a": pm.LogNormal.dist(3.0, 0.1)}
    with pytest.warns(
        UserWarning, match=r"could not be integrated at the estimate \{'a': .*another"
    ):
        found = levers.recentred(ode, gp, priors, 10.0, 1)
    np.testing.assert_array_equal(found.gp.prior_mean, gp.prior_mean)
    np.testing.assert_array_equal(found.gp.sigma, gp.sigma)
    assert found.moves == []
    assert np.isfinite(found.theta["a"])


def test_no_finite_start_is_an_error(decay):
    _, gp, *_ = decay
    ode = gm.ODE(lambda t, x, theta: [pm.math.log(x.mass - theta.a)], ["mass"], ["a"])
    priors = {"a": pm.Uniform.dist(1e3, 1e4)}
    with pytest.raises(ValueError, match=r"finite for none of 8 draws .*check the priors"):
        levers.recentred(ode, gp, priors, 0.1, 1)


def test_parameters_that_are_computed_are_an_error(decay):
    ode, gp, priors, *_ = decay
    with pm.Model() as model:
        rate = pm.Deterministic("rate", pm.math.exp(pm.Normal("log_rate")))
        for prior in (rate, 1.5):
            with pytest.raises(
                TypeError, match=r"prior of 'rate' is a .* not drawn; expected a dis"
            ):
                gm.refine(ode, gp, priors=priors | {"rate": prior})
    given = {"priors": priors | {"rate": rate}, "gp": gp, "preset": "refined"}
    with pytest.raises(TypeError, match=r"prior of 'rate' is a TensorVariable"):
        gm.build_model(ode, gp.t_observed, gp.y, **given)  # of another model
    assert list(model.named_vars) == ["log_rate", "rate"]

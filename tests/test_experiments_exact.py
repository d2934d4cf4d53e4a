"""The exact posterior of several experiments, beside closed forms and single fits."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

import pymc_gradmatch as gm
from pymc_gradmatch.exact import ExactPosterior
from pymc_gradmatch.exact.experiments import Nested, Separate, leading_to
from pymc_gradmatch.exact.modes import climb_in_arrow
from pymc_gradmatch.model import constraints
from pymc_gradmatch.ode import Solver

SIGMA = 0.03
DECAY = gm.ODE(lambda t, x, theta: [-theta.k * x.mass], ["mass"], ["k"])


def observing(y):
    return lambda x, theta: pm.Normal("y", x.mass, SIGMA, observed=y[:, 0])


def decays(rates, seed=1):
    """Return experiments whose noise is known, of other starts, times and lengths."""
    rng = np.random.default_rng(seed)
    made = {}
    for number, k in enumerate(rates):
        t = np.linspace(0, 2 + 0.3 * number, 7 + number % 3)
        y = DECAY.solve(t, x0=[1 + 0.5 * number], theta=[k])
        y += rng.normal(0, SIGMA, y.shape)
        made[f"e{number}"] = gm.Experiment(t, y, likelihood=observing(y))
    return made


def fitted(experiments, priors, **settings):
    return gm.fit(
        DECAY,
        experiments=experiments,
        priors=priors,
        random_seed=1,
        progressbar=False,
        **settings,
    )


def moments(grid, log_density):
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = weights @ grid
    return mean, np.sqrt(weights @ (grid - mean) ** 2)


def log_marginal(one, k):
    """Return log p(y | k) of a decay: x(0), of flat prior, integrated in closed form."""
    shape = np.exp(-k * one.t)
    precision = shape @ shape
    x0 = shape @ one.y[:, 0] / precision
    misfit = np.square(one.y[:, 0] - x0 * shape).sum()
    return -0.5 * misfit / SIGMA**2 - 0.5 * np.log(precision)


@pytest.fixture(scope="module")
def shared():
    experiments = decays([0.8, 0.8, 0.8])
    return experiments, fitted(experiments, {"k": pm.HalfNormal.dist(2)})


def test_a_shared_parameter_has_the_posterior_of_the_closed_form(shared):
    experiments, fit = shared
    grid = np.linspace(0.6, 1.0, 2001)
    log_density = np.array([sum(log_marginal(e, k) for e in experiments.values()) for k in grid])
    mean, sd = moments(grid, log_density - grid**2 / 8)
    assert fit.is_exact
    assert abs(fit.table.loc["k", "mean"] - mean) < 5 * sd / np.sqrt(fit.n_effective)
    assert fit.table.loc["k", "sd"] == pytest.approx(sd, rel=5 / np.sqrt(fit.n_effective))


def test_a_single_experiment_has_the_posterior_of_the_closed_form():
    experiments = decays([0.8])
    priors = {"k": pm.TruncatedNormal.dist(1, 2, lower=0)}
    fit = fitted(experiments, priors)
    grid = np.linspace(0.01, 4, 4_000)
    height = [log_marginal(experiments["e0"], k) - 0.5 * ((k - 1) / 2) ** 2 for k in grid]
    mean, sd = moments(grid, np.array(height))
    assert fit.is_exact
    error = 5 / np.sqrt(fit.n_effective)
    assert fit.table.loc["k", "mean"] == pytest.approx(mean, abs=error * sd)
    assert fit.table.loc["k", "sd"] == pytest.approx(sd, rel=error)


@pytest.mark.slow
def test_a_single_experiment_with_a_long_gap_is_fitted_as_by_itself():
    """Assert it within Monte Carlo error: a gap lets gm.fit look for other modes."""
    prey_and_predators = gm.systems.lotka_volterra
    data = prey_and_predators.simulate("low", random_seed=1)
    seen = (data.t < 0.5) | (data.t > 1.3)
    t, y = data.t[seen], data.y[seen]
    priors = {name: pm.HalfNormal.dist(5) for name in prey_and_predators.ode.params}
    alone, one = (
        gm.fit(prey_and_predators.ode, priors=priors, random_seed=1, progressbar=False, **data)
        for data in ({"t": t, "y": y}, {"experiments": {"a": gm.Experiment(t, y)}})
    )
    assert one.is_exact
    errors = alone.table["sd"] * np.sqrt(1 / alone.n_effective + 1 / one.n_effective)
    for name in prey_and_predators.ode.params:
        difference = one.table.loc[name, "mean"] - alone.table.loc[name, "mean"]
        assert abs(difference) < 5 * errors[name]


def test_experiments_that_follow_other_equations_get_no_seal():
    """Assert that what a common solution leaves of all is looked at, as of a single one."""
    t = np.linspace(0, 4, 17)
    rng = np.random.default_rng(1)
    waves = 2 + np.cos(3 * t[:, None] + rng.uniform(0, 6, 3)) + rng.normal(0, SIGMA, (17, 3))
    waves = {f"e{k}": gm.Experiment(t, wave[:, None]) for k, wave in enumerate(waves.T)}
    fit = fitted(waves, {"k": pm.Normal.dist(0, 1)})
    assert not fit.is_exact
    assert "leaves much of 'mass' unexplained" in fit.verdict


def test_starts_are_of_each_experiment(shared):
    experiments, fit = shared
    x0 = fit.idata["posterior"]["x0"]
    assert x0.dims == ("chain", "draw", "experiment", "state")
    assert x0["experiment"].to_numpy().tolist() == list(experiments)
    truth = 1 + 0.5 * np.arange(3)
    away = (x0.mean(["chain", "draw"]) - truth[:, None]) / x0.std(["chain", "draw"])
    assert np.abs(away).max() < 4


def test_a_fit_draws_each_experiment_on_its_own_times(shared):
    experiments, fit = shared
    pc = fit.plot()
    for name, one in experiments.items():
        panel = pc.get_target("x", {"state": f"{name}: mass"})
        mean = panel.get_lines()[0].get_ydata()
        assert np.nanmax(abs(mean)) == pytest.approx(one.y.max(), abs=5 * SIGMA)
        assert panel.get_lines()[0].get_xdata()[np.isfinite(mean)][-1] == one.t[-1]


def test_data_are_drawn_and_weighed_experiment_by_experiment(shared):
    experiments, fit = shared
    for name, one in experiments.items():
        assert fit.idata["posterior_predictive"][f"{name}::y"].shape[2:] == one.t.shape
        assert fit.idata["log_likelihood"][f"{name}::y"].shape[2:] == one.t.shape


def test_the_parts_of_the_density_add_up_to_it(shared):
    _, fit = shared
    target = Separate(fit.model)
    phi = target.coordinates(fit.idata["posterior"].dataset)[:50]
    target.separate(phi[0])
    np.testing.assert_allclose(target.each(phi).sum(axis=1), ExactPosterior(fit.model)(phi))
    assert target.shared.tolist() == [0]
    assert target.own.tolist() == [[1], [2], [3]]
    for number in range(3):
        np.testing.assert_allclose(target.one(number, phi), target.each(phi)[:, number])


@pytest.mark.parametrize("is_first", [True, False])
def test_a_bound_is_its_experiment_s_however_it_is_written(is_first):
    """Assert it of comparisons, one of which does not notice that states are lost."""
    model = gm.build_model(
        DECAY, experiments=decays([0.8, 0.8]), priors={"k": pm.HalfNormal.dist(2)},
        preset="refined", random_seed=1, progressbar=False,
    )  # fmt: skip
    with model:
        x0 = model["x"][:, 0, 0]
        bound = pt.switch(x0 > 4, -np.inf, 0.0) if is_first else pt.switch(x0 <= 4, 0.0, -np.inf)
        pm.Potential("bounded", bound)
    target = Separate(model)
    phi = target.starting_at({"k": 0.8}, [np.array([[1.0], [1.5]])])
    target.separate(phi)
    other = target.starting_at({"k": 0.8}, [np.array([[1.0], [5.0]])])
    assert np.isinf(target.each(np.stack([phi, other]))).tolist() == [
        [False] * 3,
        [False, True, False],
    ]


def test_the_marginal_density_is_that_of_the_closed_form(shared):
    experiments, fit = shared
    target, rng = Separate(fit.model), np.random.default_rng(1)
    phi = target.coordinates(fit.idata["posterior"].dataset)
    nested = Nested(target, phi.mean(axis=0), rng)
    points = phi[:8, :1]
    k = np.exp(points[:, 0])
    exact = [sum(log_marginal(e, one) for e in experiments.values()) for one in k]
    exact = np.array(exact) - k**2 / 8 + points[:, 0]  # prior and Jacobian
    found, _ = nested.complete(points, n_inner=2_048)
    np.testing.assert_allclose(found - found[0], exact - exact[0], atol=0.1)


def test_forecasts_of_experiments_that_begin_at_different_times_are_their_solutions():
    times = {"early": np.linspace(0, 2, 7), "late": np.linspace(1, 3, 7)}
    cov = pm.gp.cov.ExpQuad(1, ls=1.2)
    gps = gm.StateGPs({n: gm.StateGP(t, np.exp(-t)[:, None], [cov], 0.1) for n, t in times.items()})
    with pm.Model(coords={"experiment": gps.names}) as model:
        k = pm.HalfNormal("k", 2, dims="experiment")
        x = gps.prior("x")
        pm.Normal("y", gps.at_observations(x), 0.1, observed=gps.observations)
        gm.GradientMatchingODE("gradient_match", DECAY, x, {"k": k}, gp=gps, gamma=0.3)
    prior = pm.sample_prior_predictive(5, model=model, random_seed=1)
    ahead = gm.predict(prior, model=model, t=[1.0, 2.0, 5.0])["prior_predictive"]["x"][0, ..., 0]
    start, rate = prior["prior"]["x"][0, :, :, :1, 0], prior["prior"]["k"][0].to_numpy()[..., None]
    since = np.array([[1.0, 2.0, 5.0], [0.0, 1.0, 4.0]])
    np.testing.assert_allclose(ahead, start.to_numpy() * np.exp(-rate * since), atol=1e-8)


def test_experiments_of_the_same_times_are_solved_at_once_to_the_last_bit(monkeypatch):
    given = decays([0.8, 0.8])
    model = gm.build_model(
        DECAY, experiments=given | {"again": given["e0"]}, priors={"k": pm.HalfNormal.dist(2)},
        random_seed=1, progressbar=False,
    )  # fmt: skip
    target, calls = ExactPosterior(model), []
    starts, rates = np.array([[[1.0], [2.0], [4.0]]]), np.full((1, 3, 1, 1), 0.8)
    one_by_one = [target.solve_one(k, starts[:, k], rates[:, k]) for k in range(3)]
    solve = Solver.__call__
    monkeypatch.setattr(
        Solver, "__call__", lambda *given: calls.append(len(given[2])) or solve(*given)
    )
    [solved] = target.solve([starts], [rates])
    np.testing.assert_array_equal(solved, np.stack(one_by_one, axis=1))
    assert calls == [2, 1]


def test_laplaces_approximation_is_the_integral_where_own_unknowns_are_normal(shared):
    """Assert it of heights themselves: searches hold one against the other."""
    _, fit = shared
    target = Separate(fit.model)
    phi = target.coordinates(fit.idata["posterior"].dataset)
    nested = Nested(target, phi.mean(axis=0), np.random.default_rng(1))
    np.testing.assert_allclose(
        nested.roughly(phi[:8, :1]), nested.complete(phi[:8, :1], n_inner=2_048)[0], atol=0.05
    )


def test_climbs_in_an_arrow_end_at_the_mode_and_know_its_covariance(rng):
    """Assert it of a normal of three experiments with two unknowns each, and three shared."""
    n_experiments, n_own, n_shared = 3, 2, 3
    root = rng.normal(size=(n_experiments, 8, n_own + n_shared))
    center = rng.normal(size=n_own + n_shared)

    def density(shared, own):
        point = np.concatenate([own, np.repeat(shared[:, None], n_experiments, axis=1)], axis=-1)
        return -0.5 * np.square(np.einsum("eij,pej->pei", root, point - center)).sum(axis=-1)

    start = rng.normal(size=(4, n_experiments, n_own)), rng.normal(size=(4, n_shared))
    ends = climb_in_arrow(
        density, start[1], start[0], np.eye(n_shared), np.tile(np.eye(n_own), (3, 1, 1))
    )
    assert ends.has_arrived.all()
    np.testing.assert_allclose(ends.shared, np.tile(center[n_own:], (4, 1)), atol=1e-3)
    np.testing.assert_allclose(ends.own, np.tile(center[:n_own], (4, 3, 1)), atol=1e-3)
    a, b, c = (
        np.einsum("eij,eik->ejk", root[..., i], root[..., j])
        for i, j in [
            (slice(n_own),) * 2,
            (slice(n_own), slice(n_own, None)),
            (slice(n_own, None),) * 2,
        ]
    )
    complement = c.sum(axis=0) - (b.mT @ np.linalg.solve(a, b)).sum(axis=0)
    for width, factor in zip(ends.width, ends.factor, strict=True):
        np.testing.assert_allclose(width @ width.T, np.linalg.inv(complement), rtol=1e-4)
        np.testing.assert_allclose(factor @ factor.mT, np.linalg.inv(a), rtol=1e-4)


PINNED = gm.ODE(lambda t, x, p: [p.b - p.k * x.mass], ["mass"], ["k", "b"])


def test_local_parameters_are_those_of_separate_fits():
    experiments = decays([0.6, 1.0])
    b = pm.Normal.dist(0, 1e-6)
    together = gm.fit(
        PINNED,
        experiments=experiments,
        priors={"k": pm.HalfNormal.dist(2, shape=2), "b": b},
        random_seed=1,
        progressbar=False,
    )
    assert together.is_exact
    grid = np.linspace(0.3, 1.4, 3001)
    for number, one in enumerate(experiments.values()):
        mean, sd = moments(grid, np.array([log_marginal(one, k) - k**2 / 8 for k in grid]))
        row = together.table.loc[f"k[e{number}]"]
        assert abs(row["mean"] - mean) < 5 * sd / np.sqrt(together.n_effective)
        assert row["sd"] == pytest.approx(sd, rel=5 / np.sqrt(together.n_effective))


def population():
    mean, spread = pm.Normal("mean", -0.5, 1), pm.HalfNormal("spread", 0.5)
    return {"k": pm.LogNormal("k", mean, spread, dims="experiment")}


@pytest.fixture(scope="module")
def hierarchy():
    rng = np.random.default_rng(5)
    experiments = decays(np.exp(rng.normal(-0.4, 0.3, 6)))
    return experiments, fitted(experiments, population)


@pytest.mark.slow
def test_the_marginal_density_has_the_same_slopes_near_and_far(hierarchy):
    _, fit = hierarchy
    target = Separate(fit.model)
    phi = target.coordinates(fit.idata["posterior"].dataset).mean(axis=0)
    nested = Nested(target, phi, np.random.default_rng(1))
    assert nested.n_steps == 1
    at = nested.home.at
    steps = 10.0 ** -np.arange(2, 7)[:, None, None] * np.eye(len(at))
    heights = [nested(at + sign * steps.reshape(-1, len(at))) for sign in (1, -1)]
    slopes = (heights[0] - heights[1]) / (2 * steps.max(axis=-1).ravel())
    far, *near = slopes.reshape(len(steps), -1)
    np.testing.assert_allclose(near, np.tile(far, (len(near), 1)), atol=0.1)


@pytest.mark.slow
def test_a_search_starts_from_a_population_with_the_spread_of_its_members(hierarchy):
    _, fit = hierarchy
    start = leading_to(fit.model, *constraints(fit.model))
    members = np.log(start["k"])
    assert start["mean"] == pytest.approx(members.mean(), abs=0.05)
    assert start["spread"] == pytest.approx(members.std(), rel=0.2)


@pytest.mark.slow
def test_a_hierarchy_has_the_posterior_that_nuts_finds_in_the_closed_form(hierarchy):
    experiments, fit = hierarchy
    assert fit.is_exact
    with pm.Model(coords={"experiment": list(experiments)}):
        k = population()["k"]
        x0 = pm.Flat("x0", shape=6)
        for number, one in enumerate(experiments.values()):
            x = x0[number] * pm.math.exp(-k[number] * one.t)
            pm.Normal(f"y{number}", x, SIGMA, observed=one.y[:, 0])
        reference = pm.sample(
            2_000, tune=1_000, chains=2, cores=1, target_accept=0.95, random_seed=1,
            progressbar=False, initvals={"x0": np.ones(6)},
        )["posterior"]  # fmt: skip
    for name in ("mean", "spread"):
        draws = reference[name].to_numpy().ravel()
        row = fit.table.loc[name]
        assert abs(row["mean"] - draws.mean()) < 0.2 * draws.std()
        assert row["sd"] == pytest.approx(draws.std(), rel=0.2)


def test_experiments_that_share_nothing_are_refused():
    experiments = decays([0.6, 1.0])
    with pytest.raises(ValueError, match="share nothing"):
        fitted(experiments, {"k": pm.HalfNormal.dist(2, shape=2)})


def test_a_term_that_connects_experiments_is_refused():
    experiments = decays([0.6, 1.0])

    def connected():
        k = pm.HalfNormal("k", 2, dims="experiment")
        pm.Potential("alike", -pm.math.sqr(k[0] - k[1]))
        return {"k": k}

    with pytest.raises(ValueError, match=r"\['alike'\] depend on several experiments"):
        fitted(experiments, connected)


def test_a_comparison_that_connects_experiments_is_refused():
    model = gm.build_model(
        DECAY, experiments=decays([0.8, 0.8]), priors={"k": pm.HalfNormal.dist(2)},
        preset="refined", random_seed=1, progressbar=False,
    )  # fmt: skip
    with model:
        pm.Potential("bounded", pt.switch(model["x"][:, 0, 0].sum() > 4, -np.inf, 0.0))
    with pytest.raises(ValueError, match=r"\['bounded'\] depend on several experiments"):
        gm.fit(model=model, random_seed=1, progressbar=False)

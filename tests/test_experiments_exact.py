"""The exact posterior of several experiments, beside closed forms and single fits."""

import numpy as np
import pymc as pm
import pytest
from scipy import stats
from scipy.special import logsumexp

import pymc_gradmatch as gm
from benchmarks.paper import systems
from pymc_gradmatch.exact import ExactPosterior, find_modes
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
    prey_and_predators = systems.lotka_volterra
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
        random_seed=1, progressbar=False, preset="fgpgm",
    )  # fmt: skip
    target, calls = ExactPosterior(model), []
    starts, rates = np.array([[[1.0], [2.0], [4.0]]]), np.full((1, 3, 1, 1), 0.8)
    [gps] = (constraint.gp for constraint in target.constraints)
    one_by_one = [DECAY.solve(t, starts[0, k], rates[0, k, 0]) for k, t in enumerate(gps.t)]
    solve = Solver.__call__
    monkeypatch.setattr(
        Solver, "__call__", lambda *given: calls.append(len(given[2])) or solve(*given)
    )
    [solved] = target.solve([starts], [rates])
    np.testing.assert_array_equal(solved[0], np.stack(one_by_one))
    assert calls == [2, 1]


PINNED = gm.ODE(lambda t, x, p: [p.b - p.k * x.mass], ["mass"], ["k", "b"])


def assert_single(together, experiments):
    grid = np.linspace(0.3, 1.4, 3001)
    for number, one in enumerate(experiments.values()):
        mean, sd = moments(grid, np.array([log_marginal(one, k) - k**2 / 8 for k in grid]))
        row = together.table.loc[f"k[e{number}]"]
        assert abs(row["mean"] - mean) < 5 * sd / np.sqrt(together.n_effective)
        assert row["sd"] == pytest.approx(sd, rel=5 / np.sqrt(together.n_effective))


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
    assert_single(together, experiments)


def population():
    mean, spread = pm.Normal("mean", -0.5, 1), pm.HalfNormal("spread", 0.5)
    return {"k": pm.LogNormal("k", mean, spread, dims="experiment")}


@pytest.fixture(scope="module")
def hierarchy():
    rng = np.random.default_rng(5)
    experiments = decays(np.exp(rng.normal(-0.4, 0.3, 6)))
    return experiments, fitted(experiments, population)


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


@pytest.mark.slow
def test_a_hierarchy_is_sampled_by_chains(hierarchy):
    _, fit = hierarchy
    assert fit.diagnostics.method == "NUTS"
    assert fit.diagnostics.r_hat < 1.01
    assert fit.diagnostics.n_effective == fit.n_effective >= 400
    assert fit.idata["searches"].sizes["search"] == 4


def test_the_spread_of_a_population_stays_where_it_is_while_climbs_go_on():
    """Assert it of a mode that is one of all else, given the prior's median of the spread."""
    experiments = decays(np.exp([-0.7, -0.4, -0.1]))
    model = gm.build_model(
        DECAY,
        experiments=experiments,
        priors=population,
        random_seed=1,
        progressbar=False,
        preset="fgpgm",
    )
    target = ExactPosterior(model)
    held = [name for name, is_held in zip(target.names, target.is_fixed, strict=True) if is_held]
    assert held == ["spread_log__"]
    *_, found = find_modes(target, np.random.default_rng(1))
    mode, median = found.maxima.point[0], stats.halfnorm(scale=0.5).ppf(0.5)
    assert np.exp(mode[target.is_fixed]) == pytest.approx(median, rel=0.1)
    slopes = target.value_and_gradient(mode[None], found.widths)[1][0]
    sds = np.sqrt(np.diagonal(found.maxima.covariance[0]))
    assert np.abs(slopes * sds)[~target.is_fixed].max() < 0.2


def test_experiments_that_share_nothing_have_the_posteriors_of_single_fits():
    experiments = decays([0.6, 1.0])
    together = fitted(experiments, {"k": pm.HalfNormal.dist(2, shape=2)})
    assert together.is_exact
    assert_single(together, experiments)


def test_a_term_that_connects_experiments_counts():
    """Assert two rates that are drawn together against quadrature over both."""
    experiments = decays([0.6, 1.0])

    def connected():
        k = pm.HalfNormal("k", 2, dims="experiment")
        pm.Potential("alike", -0.5 * pm.math.sqr((k[0] - k[1]) / 0.05))
        return {"k": k}

    fit = fitted(experiments, connected)
    assert fit.is_exact
    grid = np.linspace(0.4, 1.3, 601)
    first, second = (
        [log_marginal(one, k) - k**2 / 8 for k in grid] for one in experiments.values()
    )
    both = np.add.outer(first, second) - 0.5 * np.square(np.subtract.outer(grid, grid) / 0.05)
    for number, axis in enumerate((1, 0)):
        mean, sd = moments(grid, logsumexp(both, axis=axis))
        row = fit.table.loc[f"k[e{number}]"]
        assert abs(row["mean"] - mean) < 5 * sd / np.sqrt(fit.n_effective)
        assert row["sd"] == pytest.approx(sd, rel=5 / np.sqrt(fit.n_effective))

"""NUTS in Laplace coordinates: the same posterior as PyMC's, from a good start, in any model."""

import arviz as az
import numpy as np
import pymc as pm
import pytest
from scipy.optimize import approx_fprime

import pymc_gradmatch as gm
from benchmarks.cases import ACCURACY, named
from benchmarks.paper import systems
from pymc_gradmatch.numerics import laplace, optimise
from pymc_gradmatch.sampling.posterior import compile_posterior, fixed_variables

QUIET = {"cores": 1, "random_seed": 1, "progressbar": False}


def decay_model():
    """Return a small model with everything that makes coordinates hard.

    A bounded and a positive parameter, random sigma and gamma, a deterministic with dims.
    """
    ode = gm.ODE(
        lambda t, x, theta: [theta.floor - theta.rate * x.mass], ["mass"], ["rate", "floor"]
    )
    t = np.linspace(0, 3, 8)
    # Of other noise sigma may be nearly zero: a neck in which chains stay for long.
    noise = [0.035, 0.082, 0.033, -0.13, 0.091, 0.045, -0.054, 0.058]
    y = (2 * np.exp(-t) + noise)[:, None]
    gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=np.float64(1.5))], sigma=0.1)
    with pm.Model(coords={"state": ode.states}) as model:
        theta = {"rate": pm.HalfNormal("rate", 2), "floor": pm.Uniform("floor", -1, 1)}
        x = gp.prior("x")
        sigma = pm.HalfNormal("sigma", 0.3)
        gamma = pm.HalfNormal("gamma", 0.5)
        pm.Normal("y", x, sigma, observed=y)
        pm.Deterministic("double", 2 * x, dims=("time", "state"))
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=gamma)
    return model


@pytest.fixture(scope="module")
def model():
    return decay_model()


@pytest.fixture(scope="module")
def ours(model):
    """Return draws by shorter steps than usual: at 0.9 some draws in a thousand diverge."""
    return gm.sample(4_000, chains=4, target_accept=0.95, model=model, **QUIET)


@pytest.fixture(scope="module")
def theirs(model):
    with model:
        return pm.sample(2_000, chains=4, quiet=True, **QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rate", "floor", "sigma", "gamma", "x", "double"])
def test_draws_are_those_of_pymc(ours, theirs, name):
    """Assert means and standard deviations within five Monte Carlo standard errors."""
    for statistic in ("mean", "sd"):
        one, other = ours["posterior"][name], theirs["posterior"][name]
        error = np.hypot(*(az.mcse(draws, method=statistic) for draws in (one, other)))
        compute = {"mean": "mean", "sd": "std"}[statistic]
        dims = ["chain", "draw"]
        difference = getattr(one, compute)(dims) - getattr(other, compute)(dims)
        assert float(np.abs(difference / error).max()) < 5


@pytest.mark.slow
def test_result_has_the_groups_dims_and_coords_of_pymc(ours, theirs):
    for group in ("posterior", "observed_data", "constant_data"):
        one, other = ours[group].dataset, theirs[group].dataset
        # gm.sample counts the constraint, which is observed at zero, among no data.
        names = [n for n in other.data_vars if not n.endswith("__") and n != "gradient_match"]
        assert {name: one[name].dims for name in one.data_vars} == {
            name: other[name].dims for name in names
        }
    assert list(ours["posterior"].coords["state"].values) == ["mass"]
    assert {"diverging", "n_steps"} <= set(ours["sample_stats"].data_vars)


@pytest.mark.slow
def test_chains_have_an_r_hat_below_1_01(ours):
    assert float(az.rhat(ours).dataset.to_array().max()) < 1.01


@pytest.mark.slow
def test_a_seed_fixes_the_draws(model):
    first, second, other = (
        gm.sample(50, tune=50, chains=1, cores=1, random_seed=s, progressbar=False, model=model)
        for s in (3, 3, 4)
    )
    assert first["posterior"]["rate"].equals(second["posterior"]["rate"])
    assert not first["posterior"]["rate"].equals(other["posterior"]["rate"])


@pytest.mark.slow
def test_compiled_density_is_that_of_pymc(model):
    """Assert value and gradient at a random point, and the way back to the model's variables."""
    posterior = compile_posterior(model)
    u = posterior.draw_start(1) + np.random.default_rng(2).normal(0, 0.1, posterior.native.n)
    value, gradient = posterior.density(u)
    point = dict(
        zip(
            (model.rvs_to_values[rv].name for rv in model.free_RVs),
            np.split(u, np.cumsum([1, 1, 8, 1])),
            strict=True,
        )
    )
    point = {name: part.reshape((8, 1) if len(part) == 8 else ()) for name, part in point.items()}
    assert value == pytest.approx(float(model.compile_logp()(point)), rel=1e-12)
    numeric = approx_fprime(u, lambda v: posterior.density(v)[0], 1e-7)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-4)
    variables = posterior.variables(u)
    assert variables["rate"] == pytest.approx(np.exp(point["rate_log__"]))
    np.testing.assert_allclose(variables["double"], 2 * variables["x"])


@pytest.mark.slow
def test_variances_are_not_climbed(model):
    """Assert that sigma and gamma keep their start, while states and parameters reach a mode."""
    posterior = compile_posterior(model)
    held = posterior.roles.is_fixed
    assert held.sum() == 2
    mode = posterior.find_mode(np.random.default_rng(1))
    start = posterior.draw_start(0)
    np.testing.assert_array_equal(mode.location[held], start[held])
    np.testing.assert_allclose((mode.factor.T @ posterior.density(mode.location)[1])[~held], 0,
                               atol=1e-4)  # fmt: skip


def assert_one_mode_near(posterior, theta, n_seeds):
    """Assert that optimisations of all seeds end at one mode, near the truth."""
    modes = [posterior.find_mode(np.random.default_rng(seed)) for seed in range(n_seeds)]
    heights = [mode.log_density for mode in modes]
    np.testing.assert_allclose(heights, heights[0], atol=1e-3)
    variables = posterior.variables(modes[0].location)
    for name, truth in theta.items():
        assert abs(variables[name] - truth) < 0.25 * truth + 0.05


@pytest.mark.slow
def test_fitzhugh_nagumo_ends_in_the_right_mode_from_prior_starts(even_noise):
    """Assert the mode near the truth for ten seeds of the starts; one start in nine is a trap."""
    system = systems.fitzhugh_nagumo
    data = system.simulate("snr100", t=np.linspace(0, 10, 25))
    y = data.x + data.sigma * even_noise(*data.x.shape)
    priors = {name: pm.HalfNormal.dist(5) for name in system.ode.params}
    model = gm.build_model(
        system.ode,
        data.t,
        y,
        priors=priors,
        cov="Matern52",
        gamma=3e-4,
        random_seed=0,
        sigma="fixed",
        preset="fgpgm",
    )
    assert_one_mode_near(compile_posterior(model), system.theta, n_seeds=10)


@pytest.mark.slow
def test_an_exact_model_ends_in_the_right_mode_whatever_the_seed():
    """Assert the mode near the truth; draws of the prior alone end in another for seed 1."""
    case = named(ACCURACY, "FHN SNR 10")
    quiet = {"random_seed": 1, "progressbar": False}
    model = case.model(case.simulate(1), preset="fgpgm", **quiet)
    exact = compile_posterior(gm.exact_model(model, rtol=1e-6))
    assert_one_mode_near(exact, case.theta, n_seeds=5)


@pytest.mark.slow
def test_find_map_is_at_least_as_good_as_pymc(lotka_volterra, data, gp):
    priors = {name: pm.HalfNormal.dist(5) for name in lotka_volterra.ode.params}
    model = gm.build_model(
        lotka_volterra.ode,
        data.t,
        data.y,
        priors=priors,
        gp=gp,
        gamma=0.3,
        sigma="fixed",
        preset="fgpgm",
    )
    found = gm.find_MAP(model=model, random_seed=1)
    assert found["x"].shape == data.y.shape
    posterior = compile_posterior(model)
    mode = posterior.find_mode(np.random.default_rng(1))
    np.testing.assert_allclose(posterior.variables(mode.location)["x"], found["x"], rtol=1e-6)
    with model:
        reference = pm.find_MAP(progressbar=False, return_inferencedata=True, jitter=False)
    point = reference["posterior"].isel(chain=0, draw=0)
    states = (point["x"].to_numpy() - gp.mean) / gp.scale
    theirs = np.append([np.log(point[name]) for name in lotka_volterra.ode.params], states)
    assert mode.log_density >= posterior.density(theirs)[0] - 1e-6


def test_discrete_variables_are_refused():
    with pm.Model() as model:
        pm.Poisson("count", 3)
    with pytest.raises(ValueError, match=r"'count'.*discrete.*pm\.sample"):
        gm.sample(model=model)


def test_laplace_of_a_normal_is_exact_whatever_its_scales(rng):
    scales = 10.0 ** np.arange(-3, 3)
    root = rng.normal(size=(6, 6)) * scales
    precision = np.linalg.inv(root.T @ root)
    center = rng.normal(size=6) * scales

    def density(u):
        return -0.5 * (u - center) @ precision @ (u - center), -precision @ (u - center)

    fit = laplace(density, center + scales)
    np.testing.assert_allclose(fit.factor.T @ precision @ fit.factor, np.eye(6), atol=1e-3)
    np.testing.assert_allclose((fit.location - center) / scales, 0, atol=1e-3)


def test_an_optimisation_returns_from_where_the_density_is_zero():
    """Assert it of a wall just behind the mode, which the first step jumps over."""

    def density(u):
        value = -50 * np.square(u - 0.1).sum() if (u < 0.2).all() else -np.inf
        return value, -100 * (u - 0.1)

    np.testing.assert_allclose(optimise(density, np.zeros(3)), 0.1, atol=1e-4)


@pytest.mark.slow
def test_climbing_without_a_finite_start_says_so():
    with pm.Model() as model:
        pm.Potential("never", pm.math.switch(pm.Normal("a") > 1e9, 0.0, -np.inf))
    with pytest.raises(ValueError, match=r"not finite at any start.*initval"):
        gm.find_MAP(model=model, progressbar=False)


def test_variables_that_are_the_same_in_every_draw_keep_their_shape(ours):
    """Assert that constants and data among the deterministics cost no draws."""
    model = decay_model()
    with model:
        doses = pm.Deterministic("doses", 2 * pm.Data("d", np.arange(3.0)))
        pm.Deterministic("table", doses[:, None] + np.zeros(2))
    idata = gm.sample(20, tune=50, chains=2, model=model, random_seed=1, progressbar=False)
    assert idata["posterior"]["table"].shape == (2, 20, 3, 2)
    np.testing.assert_array_equal(idata["posterior"]["doses"][1, -1], [0, 2, 4])


def test_points_of_another_length_are_refused(model):
    compiled = compile_posterior(model)
    n = len(compiled.roles.is_state)
    with pytest.raises(ValueError, match=f"{n + 1} coordinates; expected {n}"):
        compiled.density(np.zeros((2, n + 1)))


def test_tuning_of_no_draws_is_refused(model):
    with pytest.raises(ValueError, match="tune is 0; expected at least one"):
        gm.sample(20, tune=0, model=model)


@pytest.mark.slow
def test_an_exact_model_is_sampled_from_where_the_fit_was():
    """Assert the draws of gm.fit, within five Monte Carlo errors of both."""
    decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t = np.linspace(0, 2, 9)
    y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))
    priors = {"rate": pm.HalfNormal.dist(2)}
    fit = gm.fit(decay, t, y, priors=priors, random_seed=1, progressbar=False)
    exact = fit.exact_model
    start = exact.initial_point()
    np.testing.assert_allclose(np.exp(start["rate_log__"]), fit.starts[0]["rate"])
    idata = gm.sample(500, tune=500, model=exact, random_seed=1, cores=1, progressbar=False)
    summary = az.summary(idata, var_names=["rate", "x0", "sigma"], round_to="none")
    assert summary["r_hat"].max() < 1.01
    assert int(idata["sample_stats"]["diverging"].sum()) == 0
    for name in summary.index:
        mean, sd, error = summary.loc[name, ["mean", "sd", "mcse_mean"]]
        apart = abs(mean - fit.table.loc[name, "mean"])
        assert apart < 5 * np.hypot(error, sd / np.sqrt(fit.n_effective))


def test_the_spread_of_a_population_stays_where_it_starts_in_the_climb_of_an_exact_model():
    """Assert it of the spread alone: the joint density grows without bound as it goes to zero."""
    decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t, rng = np.linspace(0, 2, 5), np.random.default_rng(1)
    y = np.exp(-rng.lognormal(0, 0.2, (6, 1)) * t) + rng.normal(0, 0.05, (6, 5))
    with pm.Model() as model:
        center, spread = pm.Normal("center", 0, 1), pm.HalfNormal("spread", 0.5)
        rate = pm.LogNormal("rate", center, spread, shape=6)
        x = decay.solve(t, [1.0], {"rate": rate})
        pm.Normal("y", x[..., 0], pm.HalfNormal("sigma", 1), observed=y)
    assert fixed_variables(model) == {spread}
    mode = compile_posterior(model).find_mode(rng)
    assert mode.location[1] == np.log(0.5)
    idata = gm.sample(200, chains=2, model=model, **QUIET)
    assert 0.05 < idata["posterior"]["spread"].mean() < 0.6


def test_noise_starts_at_the_center_of_its_prior_where_states_are_solutions():
    """Assert it of one noise for each state, which nothing draws beside the parameters."""
    decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t, y = np.linspace(0, 2, 9), np.exp(-np.linspace(0, 2, 9))[:, None]
    gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=np.float64(1.5))], sigma=0.1)
    sigma = pm.HalfNormal.dist(np.array([0.3]))
    model = gm.build_model(
        decay, t, y, priors={"rate": pm.HalfNormal.dist(2)}, gp=gp, sigma=sigma, preset="fgpgm"
    )
    posterior = compile_posterior(gm.exact_model(model))
    names = [rv.name for rv in posterior.model.free_RVs]
    starts = np.array([posterior.draw_start(seed) for seed in range(3)])
    assert np.ptp(starts[:, names.index("rate")]) > 0
    np.testing.assert_allclose(starts[:, names.index("sigma")], np.log(0.3))

"""The refined preset: the estimate of numerical integration, without integrating while sampling."""

import warnings

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from scipy.optimize import least_squares

import pymc_gradmatch as gm
from benchmarks.paper import systems
from pymc_gradmatch.model import DoubtWarning
from pymc_gradmatch.model.gauss_newton import Problem
from pymc_gradmatch.model.layout import noise_of_all_data
from pymc_gradmatch.model.likelihood import NormalLikelihood
from pymc_gradmatch.model.priors import parameters_of
from pymc_gradmatch.model.starting_points import optimise_from_prior


def priors_of(system):
    return {name: pm.HalfNormal.dist(5) for name in system.ode.params}


def integrated(system, data, sigma):
    """Find the most probable theta and x(0) by numerical integration; also the sds of theta.

    In the coordinates that samplers see, log theta, under the priors above.
    """
    n_params = len(system.ode.params)

    def residuals(p):
        return ((data.y - system.ode.solve(data.t, p[n_params:], p[:n_params])) / sigma).ravel()

    def with_prior(p):
        theta = np.maximum(p[:n_params], 1e-9)
        # Half its square is minus the log prior, up to a constant that keeps it positive.
        most = n_params * (np.log(5) - 0.5)
        log_prior = (np.log(theta) - np.square(theta / 5) / 2).sum()
        return np.append(residuals(p), np.sqrt(2 * (most - log_prior)))

    truth = np.array([*system.theta.values(), *system.x0])
    scale = {"x_scale": np.maximum(np.abs(truth), 0.1), "jac": "3-point", "diff_step": 1e-4}
    fit = least_squares(residuals, truth, **scale)
    sd = np.sqrt(np.diag(np.linalg.inv(fit.jac.T @ fit.jac)))
    top = least_squares(with_prior, fit.x, **scale).x
    return top[:n_params], top[n_params:], sd[:n_params]


def refined(system, data, **settings):
    with warnings.catch_warnings():
        # On steps and plateaus the first fit may end at a bound: only its sigma counts.
        warnings.filterwarnings("ignore", "state", UserWarning)
        gp = gm.fit_gp(data.t, data.y, cov="Matern52", random_seed=1)
    return gm.refine(system.ode, gp, priors=priors_of(system), random_seed=1, **settings)


@pytest.fixture(scope="module")
def lv_fit(lotka_volterra, data):
    return refined(lotka_volterra, data)


@pytest.fixture(scope="module")
def lv_exact(lotka_volterra, data, lv_fit):
    return integrated(lotka_volterra, data, lv_fit.gp.sigma)


@pytest.mark.slow
def test_estimate_is_that_of_numerical_integration(lotka_volterra, data, lv_fit, lv_exact):
    """Assert a tenth of a posterior sd, where the paper's settings are far off."""
    theta, _, sd = lv_exact
    error = (np.array([*lv_fit.theta.values()]) - theta) / sd
    assert np.abs(error).max() < 0.1
    assert lv_fit.moves[-1] < 0.1
    ode = lotka_volterra.ode
    gp = gm.fit_gp(data.t, data.y, cov="ExpQuad", random_seed=1)
    parameters = parameters_of(priors_of(lotka_volterra), ode.params)
    gamma, rng = np.full(2, 0.3), np.random.default_rng(1)
    problem = Problem.of(ode, gp, parameters, gamma)
    paper = optimise_from_prior(problem, gp.posterior_mean(), rng)
    bias = (parameters.natural(paper.u)[0] - theta) / sd
    assert np.abs(bias).max() > 10 * np.abs(error).max()


@pytest.mark.slow
def test_the_seed_of_the_starts_does_not_matter(lotka_volterra, data, lv_fit, lv_exact):
    gp = gm.fit_gp(data.t, data.y, cov="Matern52", random_seed=2)
    other = gm.refine(lotka_volterra.ode, gp, priors=priors_of(lotka_volterra), random_seed=2)
    difference = np.subtract([*other.theta.values()], [*lv_fit.theta.values()])
    assert (np.abs(difference) < 0.1 * lv_exact[2]).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["even", 0, 1, 2, 3])
def test_a_start_that_noise_hides_comes_out_above_zero(seed, even_noise):
    """Assert an epidemic at about the right time from one infected person in ten thousand.

    In half of such data the most probable states begin below zero, where none can be integrated.
    The refined rule has its doubts, since some noise asks for a start so small that it comes much
    later; even noise does not, and the exact posterior has the right time of any.
    """

    def epidemic(t, x, theta):
        infected, recovered = theta.beta * x.S * x.I, theta.gamma * x.I
        return [-infected, infected - recovered, recovered]

    ode, t = gm.ODE(epidemic, ["S", "I", "R"], ["beta", "gamma"]), np.linspace(0, 120, 41)
    truth = ode.solve(t, x0=[0.9999, 1e-4, 0.0], theta=[0.3, 0.1])
    is_even, seed = seed == "even", 0 if seed == "even" else seed
    drawn = np.random.default_rng(seed).normal(size=truth.shape)
    y = truth + 0.05 * truth.std(axis=0) * (even_noise(*truth.shape) if is_even else drawn)
    gp = gm.fit_gp(t, y, cov="Matern52", random_seed=seed)
    priors = {"beta": pm.HalfNormal.dist(5), "gamma": pm.HalfNormal.dist(5)}

    def is_in_time(mean):
        return (np.abs(mean[:: len(mean) // 40] - truth) < truth.std(axis=0)).all()

    with warnings.catch_warnings(record=True) as doubts:
        warnings.simplefilter("always")
        found = gm.refine(ode, gp, priors=priors, random_seed=seed)
    fit = gm.fit(ode, t, y, priors=priors, random_seed=seed, progressbar=False)
    matched = found.gp.back_transform(found.gp.prior_mean)
    assert matched[0, 1] > 0
    assert all(doubt.category is DoubtWarning for doubt in doubts)
    assert doubts or is_in_time(matched)
    assert is_in_time(matched) or not is_even
    assert is_in_time(fit.idata["posterior"]["x"].mean(["chain", "draw"]).to_numpy())
    assert fit.is_exact
    np.testing.assert_allclose(list(found.theta.values()), [0.3, 0.1], rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "noise", "steps"),
    [
        (systems.lotka_volterra, "high", 4),
        (systems.fitzhugh_nagumo, "snr100", 8),
        (systems.protein_transduction, "low", 4),
    ],
    ids=["LV", "FHN", "PT"],
)
def test_other_systems_end_at_numerical_integrations_estimate_too(system, noise, steps):
    """Assert it for much noise, for jumps, and for irregular times, and so for the prior mean.

    Beside a jump of FitzHugh-Nagumo the usual grid, of four steps, may be a little coarse.
    """
    data = system.simulate(noise, random_seed=1)
    found = refined(system, data, grid=None if steps == 4 else steps)
    assert_end_where_integration_does(found, system, data)
    assert [len(found.gp.t), len(found.gp.covs)] == [steps * (len(data.t) - 1) + 1, data.y.shape[1]]


@pytest.mark.slow
def test_four_steps_are_enough_for_most_jumps(even_noise):
    system = systems.fitzhugh_nagumo
    data = system.simulate("snr100")
    data = data._replace(y=data.x + data.sigma * even_noise(*data.x.shape))
    found = refined(system, data)
    assert len(found.gp.t) == 4 * len(data.t) - 3
    assert_end_where_integration_does(found, system, data)


def assert_end_where_integration_does(found, system, data):
    """Assert a tenth of a standard deviation for theta, and 0.3 sigma for states at any time."""
    theta, x0, sd = integrated(system, data, found.gp.sigma)
    assert (np.abs(np.array([*found.theta.values()]) - theta) < 0.1 * sd).all()
    solution = system.ode.solve(found.gp.t, x0, theta)
    assert (np.abs(found.gp.prior_mean - solution) < 0.3 * found.gp.sigma).all()


@pytest.mark.slow
def test_noise_that_was_taken_for_motion_leads_to_no_lesser_mode(lotka_volterra):
    """Assert the estimate that follows from the right sigma, where the first fit has next to none.

    Smoothed data then follow every observation of the prey, and lead to three turns, not one.
    """
    data = lotka_volterra.simulate("high", random_seed=1)
    gp = gm.fit_gp(data.t, data.y, cov="Matern52", random_seed=1)
    priors = priors_of(lotka_volterra)
    misled = gp.with_sigma([3e-4 * gp.scale[0], gp.sigma[1]])
    found = gm.refine(lotka_volterra.ode, misled, priors=priors, random_seed=1)
    assert_end_where_integration_does(found, lotka_volterra, data)


def test_an_ode_that_does_not_explain_the_data_is_warned_of(decay):
    ode, priors = decay
    t = np.linspace(0, 4, 17)
    gp = gm.StateGP(t, 2 + np.sin(3 * t)[:, None], [pm.gp.cov.Matern52(1, ls=1.0)], sigma=0.1)
    with pytest.warns(
        UserWarning, match="leaves much of 'mass' unexplained, and the residuals are not noise"
    ):
        gm.refine(ode, gp, priors=priors, random_seed=1)


def test_the_rule_is_what_its_docstring_says(data, lv_fit):
    gp = lv_fit.gp
    step = 2 / 76
    np.testing.assert_array_equal(gp.t_observed, data.t)
    np.testing.assert_allclose(np.diff(gp.t), step)
    unit = pm.gp.cov.ExpQuad(1, ls=np.float64(2 * step))(gp.t[:, None]).eval()
    variance = (30 * gp.sigma / gp.scale) ** 2
    expected = variance[:, None, None] * (unit + 1e-9 * np.eye(77))
    np.testing.assert_allclose(gp.operators().C, expected, rtol=1e-9, atol=1e-12 * variance.max())
    np.testing.assert_allclose(lv_fit.gamma, 1e-6 * variance / (2 * step) ** 2, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("n_times", "steps"), [(10, 7), (15, 4), (41, 4), (60, 3), (120, 1)])
def test_short_series_have_more_steps_per_gap_and_long_ones_fewer(decay, n_times, steps):
    ode, priors = decay
    t = np.linspace(0, 4, n_times)
    y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.02, (n_times, 1))
    gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=2.0)], sigma=0.02)
    found = gm.refine(ode, gp, priors=priors, random_seed=1)
    assert len(found.gp.t) == steps * (n_times - 1) + 1
    # Six standard errors of least squares with ten times, the fewest.
    assert found.theta["rate"] == pytest.approx(1.0, abs=0.2)


@pytest.fixture(scope="module")
def decay():
    ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    return ode, {"rate": pm.HalfNormal.dist(5)}


@pytest.mark.slow
def test_changing_units_changes_nothing_but_units():
    """Assert it for data in thousandths and time in minutes."""
    ode = gm.ODE(lambda t, x, theta: [theta.a - theta.b * x.mass], ["mass"], ["a", "b"])
    t = np.array([0, 0.3, 0.7, 1, 2, 3, 5, 8, 9, 10])
    y = (0.4 + np.exp(-0.7 * t))[:, None] + np.random.default_rng(2).normal(0, 0.03, (10, 1))
    found = []
    for unit, minute in ((1, 1), (1000, 60)):
        priors = {
            "a": pm.HalfNormal.dist(np.float64(2 * unit / minute)),
            "b": pm.HalfNormal.dist(np.float64(2 / minute)),
        }
        gp = gm.fit_gp(minute * t, unit * y, cov="Matern52", random_seed=1)
        found.append(gm.refine(ode, gp, priors=priors, random_seed=1))
    one, other = found
    assert other.theta["a"] == pytest.approx(one.theta["a"] * 1000 / 60, rel=1e-3)
    assert other.theta["b"] == pytest.approx(one.theta["b"] / 60, rel=1e-3)
    np.testing.assert_allclose(other.gp.prior_mean, 1000 * one.gp.prior_mean, rtol=1e-3)
    np.testing.assert_allclose(other.gp.sigma, 1000 * one.gp.sigma, rtol=1e-3)
    np.testing.assert_allclose(other.gamma, one.gamma / 60**2, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise",
    [(0.05, 0.2), (0.03, 0.4)],
)
def test_each_state_has_its_own_noise(lotka_volterra, data, rng, noise):
    noisy = data._replace(y=data.x + rng.normal(0, noise, size=data.x.shape))
    found = refined(lotka_volterra, noisy)
    # Within four standard deviations of an estimate from about 17 degrees of freedom.
    np.testing.assert_allclose(found.gp.sigma, noise, rtol=4 / np.sqrt(2 * 17))
    theta, _, sd = integrated(lotka_volterra, noisy, found.gp.sigma)
    assert (np.abs(np.array([*found.theta.values()]) - theta) < 0.2 * sd).all()


@pytest.fixture(scope="module")
def lv_model(lotka_volterra, data):
    """Return the refined model of a table, built among variables of the user's."""
    table = pd.DataFrame(data.y, columns=["prey", "predator"])
    with pm.Model() as model:
        width = pm.HalfNormal("width", 5)
        alpha = pm.HalfNormal("alpha", width)
        priors = priors_of(lotka_volterra) | {"alpha": alpha}
        returned = gm.build_model(
            lotka_volterra.ode, data.t, table, priors=priors, preset="refined", random_seed=1
        )
    assert returned is model
    return model


@pytest.mark.slow
def test_refined_model_is_the_four_lines_with_sigma(lv_model, lv_exact, data):
    names = ["width", "alpha", "beta", "gamma", "delta", "x", "sigma"]
    assert [rv.name for rv in lv_model.free_RVs] == names
    assert [rv.name for rv in lv_model.observed_RVs] == ["y", "gradient_match"]
    dims = lv_model.named_vars_to_dims
    assert dims["x"] == dims["gradient_match"] == ("time", "state")
    assert dims["y"] == ("time_observed", "state")
    assert dims["sigma"] == ("state",)
    assert lv_model.coords["state"] == ("prey", "predator")
    assert len(lv_model.coords["time"]) == 77
    np.testing.assert_array_equal(lv_model.coords["time_observed"], data.t)


@pytest.mark.slow
def test_samplers_start_at_the_estimate(lv_model, lv_exact):
    """Assert it for parameters that the preset adds; a variable of the user's starts as it did."""
    theta, _, sd = lv_exact
    start = lv_model.initial_point()
    for i, name in enumerate(["beta", "gamma", "delta"], start=1):
        assert np.exp(start[f"{name}_log__"]) == pytest.approx(theta[i], abs=0.3 * sd[i])
    with pm.Model() as other:
        pm.HalfNormal("alpha", pm.HalfNormal("width", 5))
    assert start["alpha_log__"] == other.initial_point()["alpha_log__"]
    np.testing.assert_allclose(start["x_standardized__"], 0, atol=1e-12)
    assert np.isfinite(lv_model.compile_logp(mode="FAST_COMPILE")(start))


def test_predictive_draws_of_the_refined_model(lv_model, data, predictive_draws):
    for group in predictive_draws(lv_model, 3):
        assert group["y"].shape == (1, 3, *data.y.shape)
        assert np.isfinite(group["y"]).all()


def test_states_of_a_fine_grid_are_plotted_with_data_at_their_own_times(lv_model, data):
    quick = {"compile_kwargs": {"mode": "FAST_COMPILE"}, "random_seed": 1}
    with lv_model:
        idata = pm.sample_prior_predictive(draws=20, **quick)
    pc = gm.plot_states(idata, group="prior")
    for k, state in enumerate(["prey", "predator"]):
        axes = pc.get_target("x", {"state": state})
        [mean] = axes.get_lines()
        np.testing.assert_array_equal(mean.get_xdata(), lv_model.coords["time"])
        _, points = axes.collections
        np.testing.assert_allclose(points.get_offsets(), np.stack([data.t, data.y[:, k]], axis=1))


@pytest.mark.slow
@pytest.mark.usefixtures("fast_compile")
def test_settings_that_are_given_replace_the_rules(lotka_volterra, data, gp):
    """Assert it for grid, gamma and sigma; the estimate stays."""

    def built(**settings):
        return gm.build_model(
            lotka_volterra.ode,
            data.t,
            data.y,
            priors=priors_of(lotka_volterra),
            preset="refined",
            gp=gp,
            random_seed=1,
            **settings,
        )

    rule, coarse, fixed = built(), built(grid=2), built(sigma="fixed", gamma=[1e-3, 2e-3])
    assert len(coarse.coords["time"]) == 39
    assert "sigma" not in fixed.named_vars
    assert rule["x"].type.shape == fixed["x"].type.shape == (77, 2)
    here, there = rule.point_logps(), fixed.point_logps()
    assert here["gradient_match"] != there["gradient_match"]
    assert {here[n] == there[n] for n in ("alpha", "beta", "gamma", "delta", "x", "y")} == {True}


def test_refine_names_what_does_not_fit(lotka_volterra, gp, data):
    ode, priors = lotka_volterra.ode, priors_of(lotka_volterra)
    with pytest.raises(ValueError, match=r"missing for \['delta'\]"):
        gm.refine(ode, gp, priors={n: p for n, p in priors.items() if n != "delta"})
    with pytest.raises(ValueError, match=r"ODE has 5 states"):
        gm.refine(systems.protein_transduction.ode, gp, priors={})
    centred = gp.with_mean(gp.y, gp.y)
    with pytest.raises(ValueError, match=r"prior mean is a trajectory"):
        gm.refine(ode, centred, priors=priors)


@pytest.mark.slow
def test_refine_takes_nothing_but_sigma_and_data_from_the_first_fit(lotka_volterra, gp):
    """Assert the same result from other kernels, nuggets and grids."""
    priors = priors_of(lotka_volterra)
    other = gp.with_grid(3).with_amplitude(7.0).with_covs([pm.gp.cov.Matern32(1, ls=1.0)] * 2)
    one, two = (
        gm.refine(lotka_volterra.ode, fit, priors=priors, random_seed=1)
        for fit in (gp, other.with_nugget(1e-2))
    )
    assert one.theta == pytest.approx(two.theta, rel=1e-6)
    np.testing.assert_allclose(one.gp.operators().C, two.gp.operators().C, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_long_gap_in_which_the_solution_moves_on_is_divided(lotka_volterra, seed):
    """Assert numerical integration's estimate across half a cycle without data."""
    t = np.concatenate([np.linspace(0, 0.5, 7), np.linspace(1.5, 2, 7)])
    data = lotka_volterra.simulate("low", t=t, random_seed=seed)
    found = refined(lotka_volterra, data)
    theta, _, sd = integrated(lotka_volterra, data, found.gp.sigma)
    assert (np.abs(np.array([*found.theta.values()]) - theta) < 0.1 * sd).all()
    inside = ((found.gp.t > 0.5) & (found.gp.t < 1.5)).sum()
    assert inside > 0.3 * len(found.gp.t)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cycles_that_no_data_saw_are_found(lotka_volterra, seed):
    """Assert the sigma of a solution that fits, across two cycles without data."""
    t = np.concatenate([np.linspace(0, 1, 11), np.linspace(6, 7, 11)])
    data = lotka_volterra.simulate("low", t=t, random_seed=seed)
    found = refined(lotka_volterra, data)
    # Of 22 observations each, less four parameters and starts: five standard deviations wide.
    assert (np.abs(found.gp.sigma / 0.1 - 1) < 5 / np.sqrt(2 * 18)).all()
    theta, _, sd = integrated(lotka_volterra, data, found.gp.sigma)
    assert (np.abs(np.array([*found.theta.values()]) - theta) < 0.2 * sd).all()


@pytest.mark.slow
@pytest.mark.parametrize(("end", "seed"), [(3, 1), (6, 1), (6, 2)])
def test_the_one_call_ends_in_the_right_mode_after_a_long_gap(lotka_volterra, end, seed):
    """Assert truth within five standard deviations across one and two cycles without data."""
    t = np.concatenate([np.linspace(0, 1, 11), np.linspace(end, end + 1, 11)])
    data = lotka_volterra.simulate("low", t=t, random_seed=seed)
    fit = gm.fit(
        lotka_volterra.ode, t, data.y, priors=priors_of(lotka_volterra), random_seed=1,
        progressbar=False,
    )  # fmt: skip
    assert fit.is_exact
    found = fit.table.loc[[*lotka_volterra.theta]]
    assert (np.abs(found["mean"] - [*lotka_volterra.theta.values()]) < 5 * found["sd"]).all()


@pytest.mark.slow
def test_modes_that_fit_alike_after_a_long_gap_all_have_their_share(lotka_volterra, even_noise):
    """Assert two of different numbers of cycles: with noise the data do not tell them apart."""
    t = np.concatenate([np.linspace(0, 1, 11), np.linspace(6, 7, 11)])
    data = lotka_volterra.simulate("high", t=t)
    y = data.x + data.sigma * even_noise(*data.x.shape)
    fit = gm.fit(
        lotka_volterra.ode, t, y, priors=priors_of(lotka_volterra), random_seed=1,
        progressbar=False,
    )  # fmt: skip
    prey = fit.idata["posterior"]["x"].sel(state="prey").to_numpy()[0]
    grid = fit.idata["posterior"]["time"].to_numpy()
    inside = prey[:, (grid > 1) & (grid < 6)]
    middle = prey.mean(axis=1, keepdims=True)
    cycles = (np.diff(inside > middle, axis=1) != 0).sum(axis=1)
    shares = np.unique_counts(cycles).counts / len(cycles)
    assert (shares > 0.05).sum() >= 2


def test_data_of_one_state_determine_another_by_the_ode():
    """Assert the closed form for one rate: a state that is the integral of another."""
    ode = gm.ODE(lambda t, x, theta: [theta.k * 0 * x.a, x.a], ["a", "b"], ["k"])
    t, noise = np.linspace(0, 3, 7), np.array([2.0, 0.1])
    y = np.random.default_rng(1).normal(size=(7, 2))
    gp = gm.StateGP(t, y, [pm.gp.cov.ExpQuad(1, ls=1.0)] * 2, sigma=noise)
    found = noise_of_all_data(ode, gp, np.array([1.0]), NormalLikelihood(gp))
    later = [t[t >= s] - s for s in t]
    count = sum(map(len, later))
    squares = sum(np.square(span).sum() for span in later)
    expected = [(1 / 4 + squares / count / 0.01) ** -0.5, 0.1]
    np.testing.assert_allclose(found, expected, rtol=1e-10)

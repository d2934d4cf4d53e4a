"""The exact posterior's density, the comparison with it, and predictions."""

import logging
import re

import numpy as np
import pymc as pm
import pytest
import xarray as xr
from scipy import stats
from scipy.optimize import minimize

import pymc_gradmatch as gm
from pymc_gradmatch import numpy_graphs
from pymc_gradmatch.exact import ExactPosterior, compare_quickly, comparison
from pymc_gradmatch.model import layout, unfitted_model

T = np.linspace(0, 2, 9)
DECAY = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
RATE, START = 1.0, 30.0
TRUTH = START * np.exp(-RATE * T)[:, None]
QUICK = {"compile_kwargs": {"mode": "FAST_COMPILE"}}


@pytest.fixture(scope="module")
def y():
    return TRUTH + np.random.default_rng(1).normal(0, 1.0, TRUTH.shape)


def a_gp(y, t=T):
    return gm.StateGP(t, y, [pm.gp.cov.ExpQuad(1, ls=1.0)], sigma=1.0)


def made_up(gp, n=2_000, sd=0.1, center=RATE, states=("x",), **others):
    """Return draws around the truth: rates log-normal, starts normal, states the solutions."""
    rng = np.random.default_rng(2)
    rate = center * np.exp(sd * rng.normal(size=(2, n // 2)))
    variables = {"rate": (("chain", "draw"), rate)}
    for k, name in enumerate(states):
        start = START + rng.normal(size=(2, n // 2))
        x = start[..., None] * np.exp(-rate[..., None] * gp.t)
        dims = ("chain", "draw", f"t{k}", f"s{k}")
        variables[name] = (dims, x[..., None])
    for name, median in others.items():
        variables[name] = (("chain", "draw"), median * np.exp(0.1 * rng.normal(size=rate.shape)))
    return xr.DataTree.from_dict({"posterior": xr.Dataset(variables)})


def four_lines(gp, likelihood, name="x"):
    """Write the four lines with a likelihood of the user's own."""
    with pm.Model() as model:
        rate = pm.HalfNormal("rate", 2)
        x = gp.prior(name)
        likelihood(x)
        gm.GradientMatchingODE("gradient_match", DECAY, x, [rate], gp=gp, gamma=0.1)
    return model


def solutions(target, phi):
    """Return rates and trajectories at points, in closed form."""
    scalars = target.scalars(phi)
    rate, start = scalars["rate"][:, None], scalars["x0[mass]"][:, None]
    return rate[:, 0], start * np.exp(-rate * T)


def of_start(gp, start):
    """Return the log density of x(t0), as that of a standardised one: the default prior."""
    return stats.norm.logpdf(start, gp.y[0], 5 * gp.scale) + np.log(gp.scale)


def assert_density(model, idata, log_likelihood):
    """Assert the exact density against the priors and a likelihood in scipy."""
    target = ExactPosterior(model)
    phi = target.coordinates(idata["posterior"].dataset)[:20]
    rate, x = solutions(target, phi)
    expected = stats.halfnorm.logpdf(rate, scale=2) + np.log(rate) + log_likelihood(x)
    expected += of_start(target.constraints[0].gp, x[:, 0])
    np.testing.assert_allclose(target(phi), expected, rtol=1e-6)


POSTERIORS = {
    "other data": {"shift": 1.0},
    "another prior": {"width": 0.6},
    "another family of priors": {"prior": pm.Gamma},
    "known noise": {"sigma": 0.7},
    "other known noise": {"sigma": 1.1},
    "another prior of the noise": {"sigma": pm.HalfNormal.dist(0.8)},
    "a dose": {"dose": 2.0},
    "another dose": {"dose": 3.0},
    "a missing value": {"missing": 3},
    "another missing value": {"missing": 5},
    "a likelihood of the user's": {"nu": 4.3},
    "another number in it": {"nu": 5.7},
}


def a_posterior(
    y, width=0.4, prior=pm.LogNormal, shift=0.0, dose=None, missing=None, nu=None, **of
):
    """Return an exact posterior, points of its prior, and all that is evaluated there."""
    ode, seen = DECAY, y + shift
    if dose is not None:
        ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"], inputs=[])
        of["inputs"] = {"mass": gm.Input([0.6], [dose], kind="dose")}
    if missing is not None:
        seen[missing] = np.nan
    if nu is not None:
        given, seen = seen, None
        of["likelihood"] = lambda x, theta: pm.StudentT(
            "z", nu=nu, mu=x.mass, sigma=1.0, observed=given[:, 0]
        )
        of["scales"] = {"mass": 10.0}
    settings = {name: of.pop(name) for name in [*of] if name == "sigma"}
    model = unfitted_model(
        ode, T, seen, priors={"rate": prior.dist(0.3, width)}, settings=settings, random_seed=1,
        progressbar=False, **of,
    )  # fmt: skip
    target, rng = ExactPosterior(model), np.random.default_rng(1)
    phi = target.draw_prior(20, rng)
    groups = target.idata(phi, rng)
    names = ("posterior_predictive", "log_likelihood")
    found = [groups[name].dataset.to_array().to_numpy() for name in names]
    at = phi[np.isfinite(target(phi))]
    return [phi, target(phi), *target.expand(at, np.ones(phi.shape[1])), *found]


def test_graphs_of_an_earlier_model_leave_nothing_of_it(y):
    """Assert that models written after others, in any order, are the same as on their own."""
    alone = {}
    for name, changed in POSTERIORS.items():
        numpy_graphs._rewritten.cache_clear()
        alone[name] = a_posterior(y, **changed)
    for name in [*POSTERIORS, *reversed(POSTERIORS)]:
        for one, other in zip(alone[name], a_posterior(y, **POSTERIORS[name]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-6, err_msg=name)


def test_a_posterior_of_other_data_is_not_rewritten(y):
    a_posterior(y)
    before = numpy_graphs._rewritten.cache_info().misses
    a_posterior(y, shift=1.0)
    a_posterior(y, width=0.6)
    assert numpy_graphs._rewritten.cache_info().misses == before


# 1. integrate_check judges the model's own likelihood.


@pytest.mark.slow
def test_outliers_of_a_student_t_weigh_as_they_do_in_the_model(y):
    model = four_lines(a_gp(y), lambda x: pm.StudentT("y", nu=2, mu=x, sigma=1.0, observed=y))
    assert_density(model, made_up(a_gp(y)), lambda x: stats.t.logpdf(y[:, 0], 2, x).sum(axis=1))


@pytest.mark.slow
def test_counts_are_poisson_and_impossible_draws_have_weight_zero(y):
    counts = np.random.default_rng(3).poisson(TRUTH)
    model = four_lines(a_gp(y), lambda x: pm.Poisson("y", x, observed=counts))
    idata = made_up(a_gp(y))
    assert_density(model, idata, lambda x: stats.poisson.logpmf(counts[:, 0], x).sum(axis=1))
    target = ExactPosterior(model)
    below = target.coordinates(idata["posterior"].dataset)[:3].copy()
    below[1, -1] = -10.0  # starts below zero
    assert list(np.isneginf(target(below))) == [False, True, False]


@pytest.mark.slow
def test_a_known_start_stays_known(y):
    def likelihood(x):
        pm.Normal("y", x, 1.0, observed=y)
        pm.Normal("start", x[0, 0], 0.01, observed=START)

    model = four_lines(a_gp(y), likelihood)
    check = gm.integrate_check(made_up(a_gp(y)), model=model, n_draws=3_000, random_seed=1)
    assert check.is_exact
    assert check.moved["exact_sd"]["x0[mass]"] == pytest.approx(0.01, rel=0.2)
    assert check.moved["exact_mean"]["x0[mass]"] == pytest.approx(START, abs=0.01)


def test_two_experiments_count_both(y):
    other = TRUTH + np.random.default_rng(4).normal(0, 1.0, TRUTH.shape)
    one, two = a_gp(y), a_gp(other, T + 0.1)
    with pm.Model() as model:
        rate = pm.HalfNormal("rate", 2)
        for gp, data, name, dims in (
            (one, y, "x", ("time", "state")),
            (two, other, "z", ("time2", "state")),
        ):
            x = gp.prior(name, dims=dims)
            pm.Normal(f"y_{name}", x, 1.0, observed=data)
            gm.GradientMatchingODE(f"match_{name}", DECAY, x, [rate], gp=gp, gamma=0.1)
    idata = made_up(one, states=("x", "z"))
    target = ExactPosterior(model)
    assert target.names == ["rate_log__", "x0[mass]", "z0[mass]"]
    phi = target.coordinates(idata["posterior"].dataset)[:5]
    scalars = target.scalars(phi)
    expected = stats.halfnorm.logpdf(scalars["rate"], scale=2) + np.log(scalars["rate"])
    for start, data, gp in (("x0[mass]", y, one), ("z0[mass]", other, two)):
        x = scalars[start][:, None] * np.exp(-scalars["rate"][:, None] * T)
        expected += of_start(gp, x[:, 0])
        expected += stats.norm.logpdf(data[:, 0], x, 1.0).sum(axis=1)
    np.testing.assert_allclose(target(phi), expected, rtol=1e-6)


def test_replaced_data_are_the_data(y):
    with pm.Model() as model:
        data = pm.Data("data", y)
    with model:
        rate = pm.HalfNormal("rate", 2)
        x = a_gp(y).prior("x")
        pm.Normal("y", x, 1.0, observed=data)
        gm.GradientMatchingODE("gradient_match", DECAY, x, [rate], gp=a_gp(y), gamma=0.1)
        pm.set_data({"data": y + 1})
    assert_density(
        model, made_up(a_gp(y)), lambda x: stats.norm.logpdf(y[:, 0] + 1, x, 1.0).sum(axis=1)
    )


@pytest.mark.slow
def test_replaced_data_do_not_fail_for_the_old_ones(y):
    """Assert that a solution which explains the new data is not asked to explain the old."""
    other = START * np.exp(-2.5 * T)[:, None] + np.random.default_rng(2).normal(0, 1.0, y.shape)
    with pm.Model() as model:
        rate, x = pm.HalfNormal("rate", 2), a_gp(y).prior("x")
        pm.Normal("y", x, pm.HalfNormal("sigma", 2), observed=pm.Data("data", y))
        gm.GradientMatchingODE("gradient_match", DECAY, x, [rate], gp=a_gp(y), gamma=0.1)
        pm.set_data({"data": other})
    fit = gm.fit(model=model, random_seed=1, progressbar=False)
    assert fit.is_exact
    mean, sd = fit.table.loc["rate", ["mean", "sd"]]
    assert abs(mean - 2.5) < 4 * sd


def test_labels_of_a_vector_are_its_own_and_not_those_of_states(y):
    """Assert it of two rates where there are two states."""
    two = gm.ODE(lambda t, x, th: [-th.p * x.a, -th.q * x.b], ["a", "b"], ["p", "q"])
    gp = gm.StateGP(T, np.tile(y, 2), [pm.gp.cov.ExpQuad(1, ls=1.0)] * 2, sigma=[1.0, 1.0])
    with pm.Model(coords={"enzyme": ["one", "two"], "state": ["a", "b"]}) as model:
        rates = pm.LogNormal("rates", dims="enzyme")
        others = pm.Normal("others", shape=2)
        x = gp.prior("x")
        pm.Normal("y", x, 1.0, observed=np.tile(y, 2))
        pm.Normal("z", others * x[0], 1.0, observed=np.ones(2))
        gm.GradientMatchingODE("match", two, x, [rates[0], rates[1]], gp=gp, gamma=0.1)
    names = ["rates_log__[one]", "rates_log__[two]", "others[0]", "others[1]", "x0[a]", "x0[b]"]
    assert ExactPosterior(model).names == names


def test_potentials_of_the_states_count(y):
    def likelihood(x):
        pm.Normal("y", x, 1.0, observed=y)
        pm.Potential("last", -0.5 * x[-1, 0] ** 2)

    assert_density(
        four_lines(a_gp(y), likelihood),
        made_up(a_gp(y)),
        lambda x: stats.norm.logpdf(y[:, 0], x, 1.0).sum(axis=1) - 0.5 * x[:, -1] ** 2,
    )


def test_a_likelihood_of_other_gaussian_process_variables_is_refused(y):
    gp = a_gp(np.log(np.maximum(y, 0.1)))
    with pm.Model() as model:
        rate = pm.HalfNormal("rate", 2)
        z = gp.prior("z")
        x = pm.Deterministic("x", pm.math.exp(z))
        pm.Normal("y", z, 0.1, observed=gp.y)
        gm.GradientMatchingODE("gradient_match", DECAY, x, [rate], gp=gp, gamma=0.1)
    idata = made_up(gp, states=("x", "z"))
    with pytest.raises(ValueError, match=r"\['y'\] depend on \['z'\] and not only on the states"):
        gm.integrate_check(idata, model=model)


def test_states_without_a_name_are_refused(y):
    gp = a_gp(y)
    with pm.Model() as model:
        rate = pm.HalfNormal("rate", 2)
        x = pm.math.exp(pm.math.log(gp.prior("z") ** 2 + 1))
        pm.Normal("y", x, 1.0, observed=y)
        gm.GradientMatchingODE("gradient_match", DECAY, x, [rate], gp=gp, gamma=0.1)
    with pytest.raises(ValueError, match="an expression without a name"):
        gm.integrate_check(made_up(gp, states=("z",)), model=model)


def test_a_model_that_observes_no_states_is_refused(y):
    model = four_lines(a_gp(y), lambda x: None)
    with pytest.raises(ValueError, match=r"no likelihood depends on the states \['x'\]"):
        gm.integrate_check(made_up(a_gp(y)), model=model)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (lambda x: x[0, 0], "parameters of 'gradient_match' depend on the states"),
        (lambda _: pm.Normal("at", shape=9), "of 'gradient_match' have one value per time"),
        (lambda _: pm.Poisson("n", 3), r"the free variables \['n'\] are discrete"),
    ],
)
def test_parameters_with_which_no_ode_is_integrated_are_refused(y, added, message):
    gp = a_gp(y)
    with pm.Model() as model:
        rate, x = pm.HalfNormal("rate", 2), gp.prior("x")
        pm.Normal("y", x, 1.0, observed=y)
        gm.GradientMatchingODE("gradient_match", DECAY, x, [rate + added(x)], gp=gp, gamma=0.1)
    with pytest.raises(ValueError, match=message):
        gm.integrate_check(made_up(gp), model=model)


# 4. Matched states that are no solution of the ODE.


@pytest.mark.slow
def test_refine_warns_where_matched_states_are_no_solution(monkeypatch):
    """Assert it for data that no solution follows, with a constraint that allows for that."""
    y = np.cos(4 * T)[:, None] + 2
    gp = gm.StateGP(T, y, [pm.gp.cov.Matern52(1, ls=1.0)], sigma=0.05)
    monkeypatch.setattr(layout, "TOLERANCE", 10.0)
    with (
        pytest.warns(UserWarning, match="leaves much of 'mass' unexplained"),
        pytest.warns(UserWarning, match="differ in state 'mass' by .*gm.integrate_check"),
    ):
        gm.refine(DECAY, gp, priors={"rate": pm.HalfNormal.dist(2)}, random_seed=1)


# 5. Widths.


@pytest.fixture(scope="module")
def gaussian_model(y):
    return four_lines(a_gp(y), lambda x: pm.Normal("y", x, 1.0, observed=y))


@pytest.fixture(scope="module")
def exact(gaussian_model, y):
    check = gm.integrate_check(made_up(a_gp(y)), model=gaussian_model, n_draws=4_000, random_seed=1)
    assert check.is_exact
    return check


def test_draws_of_the_exact_posterior_raise_no_suspicion(exact, gaussian_model):
    seen = compare_quickly(gaussian_model, exact.idata["posterior"].dataset)
    assert not seen.is_suspicious
    assert "no more was checked" in seen.text


@pytest.fixture(scope="module")
def at_the_mode(y):
    """Return mode and sds of (log rate, start) in the model, from the density written by hand."""

    def height(phi):
        rate = np.exp(phi[0])
        prior = stats.halfnorm.logpdf(rate, scale=2) + phi[0]
        return prior + stats.norm.logpdf(y[:, 0], phi[1] * np.exp(-rate * T)).sum()

    settings = {"method": "Nelder-Mead", "options": {"xatol": 1e-6, "fatol": 1e-9}}
    mode = minimize(lambda phi: -height(phi), [np.log(RATE), START], **settings).x
    a, b = np.diag([1e-3, 1e-2])

    def curvature(u, v):
        corners = height(mode + u + v) - height(mode + u - v) - height(mode - u + v)
        return (corners + height(mode - u - v)) / (4 * np.abs(u).max() * np.abs(v).max())

    information = -np.array([[curvature(u, v) for v in (a, b)] for u in (a, b)])
    return mode, np.sqrt(np.diag(np.linalg.inv(information)))


@pytest.mark.parametrize("unknown", [0, 1])
@pytest.mark.parametrize(
    ("away", "width", "said"),
    [
        *[(0.95 * side, 1.0, None) for side in (-1, 1)],
        *[(1.05 * side, 1.0, "its mean is away") for side in (-1, 1)],
        *[(0.0, width, None) for width in (0.7, 1.43)],
        *[(0.0, width, "its standard deviations are other") for width in (0.63, 1.57)],
    ],
)
def test_an_sd_away_or_half_as_wide_again_raises_suspicion(
    at_the_mode, gaussian_model, unknown, away, width, said
):
    """Assert the limits to five per cent: a mean one sd away, sds of 2 / 3 and 3 / 2."""
    mode, sd = at_the_mode
    z = np.random.default_rng(2).normal(size=(2_000, 2))
    z = (z - z.mean(axis=0)) / z.std(axis=0)
    z[:, unknown] = away + width * z[:, unknown]
    log_rate, start = (mode + sd * z).T.reshape(2, 2, -1)
    x = (start[..., None] * np.exp(-np.exp(log_rate)[..., None] * T))[..., None]
    variables = {"rate": (("chain", "draw"), np.exp(log_rate))}
    variables["x"] = (("chain", "draw", "time", "state"), x)
    seen = compare_quickly(gaussian_model, xr.Dataset(variables))
    assert seen.is_suspicious == (said is not None)
    if said:
        name = ["rate_log__", "x0[mass]"][unknown]
        assert re.search(rf"{said}.*{re.escape(name)}.*gm\.integrate_check", seen.text)


def test_more_unknowns_than_the_quick_comparison_takes_are_not_compared(
    gaussian_model, y, monkeypatch
):
    monkeypatch.setattr(comparison, "MAX_COORDINATES", 1)
    seen = compare_quickly(gaussian_model, made_up(a_gp(y))["posterior"].dataset)
    assert not seen.is_suspicious
    assert "was not compared with the exact one: it has 2 unknowns" in seen.text
    assert "gm.integrate_check" in seen.text


def test_draws_whose_mean_cannot_be_integrated_raise_suspicion(y):
    gp = a_gp(y)
    explosive = gm.ODE(lambda t, x, theta: [theta.rate * x.mass**2], ["mass"], ["rate"])
    with pm.Model() as model:
        rate, x = pm.HalfNormal("rate", 2), gp.prior("x")
        pm.Normal("y", x, 1.0, observed=y)
        gm.GradientMatchingODE("gradient_match", explosive, x, [rate], gp=gp, gamma=0.1)
    seen = compare_quickly(model, made_up(gp)["posterior"].dataset)
    assert seen.is_suspicious
    assert "ODE cannot be integrated from the mean of the gradient-matching posterior" in seen.text


@pytest.mark.slow
def test_a_sample_has_the_result_of_its_comparison(decay_model, caplog):
    """Assert the attribute and the log line for the paper's settings, which smooth."""
    with caplog.at_level(logging.WARNING, logger="pymc.gradmatch"):
        idata = gm.sample(
            draws=200,
            tune=200,
            chains=2,
            model=decay_model(9, 2.0, 10.0),
            random_seed=1,
            progressbar=False,
        )
    seen = idata["posterior"].attrs["exactness"]
    assert seen.startswith("The gradient-matching posterior is not the exact one")
    assert seen in caplog.messages


# 7. Predictions integrate the ODE.


def test_predictions_are_solutions_with_the_models_noise(gaussian_model, y):
    idata = made_up(a_gp(y), n=400)
    predicted = gm.predict(idata, model=gaussian_model, random_seed=1)["posterior_predictive"]
    rate = idata["posterior"]["rate"].to_numpy()[..., None]
    start = idata["posterior"]["x"].to_numpy()[..., :1, 0]
    np.testing.assert_allclose(predicted["x"][..., 0], start * np.exp(-rate * T), rtol=1e-6)
    noise = predicted["y"].to_numpy() - predicted["x"].to_numpy()
    assert noise.std() == pytest.approx(1.0, abs=4 / np.sqrt(2 * noise.size))


def test_an_intervention_on_theta_moves_the_prediction(gaussian_model):
    """Assert it where PyMC's own prior predictive draws the same states for every theta."""
    prior = pm.sample_prior_predictive(100, model=gaussian_model, random_seed=1, **QUICK)
    fast = prior["prior"].dataset.assign(rate=prior["prior"]["rate"] * 0 + 50.0)
    predicted = gm.predict(
        xr.DataTree.from_dict({"prior": fast}), model=gaussian_model, random_seed=1
    )
    states = predicted["prior_predictive"]["x"]
    assert float(np.abs(states.isel(time=-1)).max()) < 1e-6
    assert float(np.abs(prior["prior"]["x"].isel(time=-1)).max()) > 1


def test_pm_do_replaces_draws(exact, gaussian_model):
    done = pm.do(gaussian_model, {"rate": 3.0})
    predicted = gm.predict(exact.idata, model=done, t=[0.0, 1.0])["posterior_predictive"]["x"]
    start = exact.idata["posterior"]["x0"].to_numpy()
    np.testing.assert_allclose(predicted[..., 1, :], start * np.exp(-3.0), rtol=1e-6)
    data = gm.predict(exact.idata, model=done, random_seed=1)["posterior_predictive"]
    away = float((data["y"] - data["x"].to_numpy()).std())
    assert away == pytest.approx(1.0, abs=5 / np.sqrt(2 * data["y"].size))


def test_functions_of_a_fixed_variable_are_computed_again(y):
    """Assert it of a rate that is another one's double, and that a child's draws are refused."""
    gp = a_gp(y)
    with pm.Model() as model:
        half = pm.HalfNormal("half", 2)
        rate, x = pm.Deterministic("rate", 2 * half), gp.prior("x")
        pm.Normal("y", x, 1.0, observed=y)
        gm.GradientMatchingODE("gradient_match", DECAY, x, [rate], gp=gp, gamma=0.1)
    idata = made_up(gp, n=20, half=0.5)
    done = pm.do(model, {"half": 1.5})
    predicted = gm.predict(idata, model=done, random_seed=1)["posterior_predictive"]["x"]
    start = idata["posterior"]["x"].to_numpy()[..., :1, 0]
    np.testing.assert_allclose(predicted[..., 0], start * np.exp(-3.0 * T), rtol=1e-6)
    with pm.Model() as model:
        rate, x = pm.LogNormal("rate", pm.Normal("half"), 0.1), gp.prior("x")
        pm.Normal("y", x, 1.0, observed=y)
        gm.GradientMatchingODE("gradient_match", DECAY, x, [rate], gp=gp, gamma=0.1)
    with pytest.raises(ValueError, match=r"draws of \['rate'\] are from before pm.do fixed"):
        gm.predict(idata, model=pm.do(model, {"half": 1.5}))


def test_predictions_are_solutions_where_only_a_potential_has_the_data(y):
    def likelihood(x):
        pm.Potential("y", -0.5 * pm.math.sqr(x - y).sum())

    predicted = gm.predict(made_up(a_gp(y), n=20), model=four_lines(a_gp(y), likelihood))
    assert list(predicted.children) == ["posterior_predictive"]
    assert predicted["posterior_predictive"]["x"].sizes["time"] == len(T)


def test_a_fit_instead_of_its_draws_is_refused(gaussian_model):
    with pytest.raises(TypeError, match=r"idata is a dict; expected a DataTree"):
        gm.predict({"rate": 1.0}, model=gaussian_model)


def test_forecasts_go_beyond_the_data(exact, gaussian_model):
    forecast = gm.predict(exact.idata, model=gaussian_model, t=[0.5, 8.0])["posterior_predictive"]
    assert forecast["x"].sizes["time"] == 2
    posterior = exact.idata["posterior"].dataset
    expected = posterior["x0"] * np.exp(-8.0 * posterior["rate"])
    np.testing.assert_allclose(
        forecast["x"].sel(time=8.0).transpose(*expected.dims), expected, rtol=1e-6
    )
    with pytest.raises(ValueError, match="none before 0"):
        gm.predict(exact.idata, model=gaussian_model, t=[-1.0, 0.0])
    with pytest.raises(ValueError, match=r"not increasing after t\[1\]"):
        gm.predict(exact.idata, model=gaussian_model, t=[0.0, 2.0, 1.0])


def test_a_draw_that_cannot_be_integrated_is_nan_and_stops_no_other(y):
    explosive = gm.ODE(lambda t, x, theta: [theta.rate * x.mass**2], ["mass"], ["rate"])
    gp = a_gp(y)
    with pm.Model() as model:
        rate = pm.HalfNormal("rate", 2)
        x = gp.prior("x")
        pm.Poisson("y", pm.math.abs(x), observed=np.abs(y).round().astype(int))
        gm.GradientMatchingODE("gradient_match", explosive, x, [rate], gp=gp, gamma=0.1)
    idata = made_up(gp, n=10)
    idata["posterior"] = idata["posterior"].dataset.assign(
        rate=(("chain", "draw"), np.where(np.arange(10).reshape(2, 5) % 2, 1e-6, 10.0))
    )
    predicted = gm.predict(idata, model=model, random_seed=1)["posterior_predictive"]
    failed = predicted["y"].isnull().all(["y_dim_0", "y_dim_1"]).to_numpy()
    assert failed.sum() == 5
    assert predicted["y"].to_numpy()[~failed].min() >= 0

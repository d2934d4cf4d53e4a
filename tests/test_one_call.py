"""gm.fit: from data, or from a model of one's own, to draws of the exact posterior."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm
import pytest
from scipy import stats
from scipy.special import logsumexp

import pymc_gradmatch as gm
from pymc_gradmatch.exact.diagnostics import residuals
from pymc_gradmatch.exact.posterior import ExactPosterior
from pymc_gradmatch.gp import poorly_fitted
from pymc_gradmatch.sampling import engine

T = np.linspace(0, 4, 9)
START, RATE = 20.0, 0.5
TRUTH = START * np.exp(-RATE * T)[:, None]
NOISE = 0.5
DECAY = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])


@pytest.fixture(scope="module")
def y():
    return TRUTH + np.random.default_rng(1).normal(0, NOISE, TRUTH.shape)


@pytest.fixture(scope="module")
def gp(y):
    return gm.fit_gp(T, y, cov="Matern52", random_seed=1)


@pytest.fixture(scope="module")
def fitted(y):
    return gm.fit(DECAY, T, y, priors={"rate": pm.HalfNormal.dist(2)}, random_seed=1)


def four_lines(gp, likelihood):
    with pm.Model() as model:
        rate = pm.HalfNormal("rate", 2)
        x = gp.prior("x")
        likelihood(x)
        gm.GradientMatchingODE("gradient_match", DECAY, x, {"rate": rate}, gp=gp, gamma=0.1)
    return model


def quadrature(log_likelihood):
    """Return mean and standard deviation of the rate, x(t0) having a flat prior, on a grid."""
    rate, start = np.linspace(0.05, 1.5, 581)[:, None, None], np.linspace(5, 45, 401)[:, None]
    x = start * np.exp(-rate * T)
    height = log_likelihood(x).sum(axis=-1) + stats.halfnorm.logpdf(rate[..., 0], scale=2)
    log_density = logsumexp(height, axis=1)
    weights = np.exp(log_density - logsumexp(log_density))
    mean = weights @ rate[:, 0, 0]
    return mean, np.sqrt(weights @ (rate[:, 0, 0] - mean) ** 2)


def assert_rate(fit, mean, sd):
    assert fit.is_exact
    draws = fit.idata["posterior"]["rate"].to_numpy()
    error = 5 / np.sqrt(fit.n_effective)
    assert draws.mean() == pytest.approx(mean, abs=error * sd)
    assert draws.std() == pytest.approx(sd, rel=error)


@pytest.mark.parametrize("error", [KeyboardInterrupt, gm.exact.OutOfTimeError])
def test_a_fit_that_is_stopped_before_its_first_mode_has_the_mode_all_the_same(
    y, fitted, monkeypatch, error
):
    """Assert that the highest point that it came to is handed back, and climbed on from."""

    def stopped(target, rng, near):
        target(target.draw_prior(50, rng))
        raise error
        yield

    monkeypatch.setattr(engine, "find_modes", stopped)
    settings = {"priors": {"rate": pm.HalfNormal.dist(2)}, "random_seed": 1, "progressbar": False}
    fit = gm.fit(DECAY, T, y, **settings)
    assert not fit.is_exact
    assert not fit.diagnostics.conditions["finished"].passed
    for name in ("rate", "x0", "sigma"):
        np.testing.assert_allclose(fit.mode[name], fitted.mode[name], rtol=0.01)


def test_a_search_that_ended_in_time_is_not_lost_after_it(y, monkeypatch):
    """Assert draws and verdict where the time is over while the draws are being made."""
    run = engine.ExactSearch.run

    def just_in_time(search):
        run(search)
        search.target.deadline = 0.0

    monkeypatch.setattr(engine.ExactSearch, "run", just_in_time)
    priors = {"rate": pm.HalfNormal.dist(2)}
    fit = gm.fit(DECAY, T, y, priors=priors, max_seconds=1e3, random_seed=1, progressbar=False)
    assert fit.is_exact


def test_a_summary_is_arviz_s_of_the_unknowns(fitted):
    shown = fitted.summary(kind="stats", ci_prob=0.5)
    expected = az.summary(
        fitted.idata, var_names=["rate", "x0", "sigma"], kind="stats", ci_prob=0.5
    )
    pd.testing.assert_frame_equal(shown, expected)
    assert [*shown.index] == [*fitted.table.index]
    assert [*fitted.summary(var_names=["rate"]).index] == ["rate"]


def test_modes_are_reported_with_their_weights(fitted):
    """Assert a single one where there is one, and what is said where there are two."""
    assert [*fitted.modes.columns] == ["rate", "x0[mass]", "sigma[mass]", "weight"]
    [mode] = fitted.modes.itertuples()
    assert mode.weight == pytest.approx(1)
    mean, sd = fitted.table.loc["rate", ["mean", "sd"]]
    assert mode.rate == pytest.approx(mean, abs=0.5 * sd)
    assert "modes, of weights" not in repr(fitted)
    two = pd.concat([fitted.modes.assign(weight=weight) for weight in (0.7, 0.3)])
    assert "It has 2 modes, of weights 0.70, 0.30." in repr(replace(fitted, modes=two))


def test_normal_data_have_the_posterior_of_quadrature(gp, y):
    model = four_lines(gp, lambda x: pm.Normal("y", x, NOISE, observed=y))
    fit = gm.fit(model=model, random_seed=1)
    assert fit.model is model
    assert_rate(fit, *quadrature(lambda x: stats.norm.logpdf(y[:, 0], x, NOISE)))


def test_counts_go_the_same_way(gp):
    counts = np.random.default_rng(3).poisson(TRUTH)
    model = four_lines(gp, lambda x: pm.Poisson("y", x, observed=counts))
    fit = gm.fit(model=model, random_seed=1)
    assert_rate(fit, *quadrature(lambda x: stats.poisson.logpmf(counts[:, 0], x)))
    posterior = fit.idata["posterior"].dataset
    x = posterior["x"].isel(draw=slice(20))[..., 0].to_numpy()
    pointwise = fit.idata["log_likelihood"]["y"].isel(draw=slice(20))[..., 0]
    np.testing.assert_allclose(pointwise, stats.poisson.logpmf(counts[:, 0], x), rtol=1e-6)
    drawn = fit.idata["posterior_predictive"]["y"].to_numpy()[0, ..., 0]
    expected = posterior["x"][0, ..., 0].to_numpy()
    error = 5 * np.sqrt(drawn.var(axis=0) / len(drawn))
    assert (np.abs(drawn.mean(axis=0) - expected.mean(axis=0)) < error).all()
    variance = expected.mean(axis=0) + expected.var(axis=0)  # Poisson's, and that of its rate
    np.testing.assert_allclose(drawn.var(axis=0), variance, rtol=5 * np.sqrt(3 / len(drawn)))


def test_the_result_is_what_arviz_expects_of_a_fit(fitted, y):
    assert list(fitted.idata.children) == [
        "posterior",
        "posterior_predictive",
        "log_likelihood",
        "observed_data",
        "searches",
    ]
    posterior = fitted.idata["posterior"]
    assert dict(posterior["rate"].sizes) == {"chain": 1, "draw": 4_000}
    assert posterior["x0"].dims == ("chain", "draw", "state")
    assert posterior["x"].dims == ("chain", "draw", "time", "state")
    assert posterior["x"].coords["state"].to_numpy().tolist() == ["mass"]
    np.testing.assert_array_equal(fitted.idata["observed_data"]["y"], y)
    for group in ("posterior_predictive", "log_likelihood"):
        assert fitted.idata[group]["y"].dims == ("chain", "draw", "time_observed", "state")
    assert len(fitted.weights) == fitted.idata["searches"].sizes["weighted_draw"]
    assert fitted.weights.sum() == pytest.approx(1)


def test_it_prints_the_verdict_and_a_row_for_each_unknown(fitted):
    text = repr(fitted)
    assert text.startswith("These are draws from the exact posterior: 2 independent searches agree")
    assert "A solution that none of the searches found cannot be ruled out." in text
    assert [*fitted.table.index] == ["rate", "x0[mass]", "sigma[mass]"]


def test_it_is_where_integrate_check_ends_after_sampling(fitted):
    idata = gm.sample(model=fitted.model, chains=2, random_seed=1, progressbar=False)
    check = gm.integrate_check(idata, model=fitted.model, random_seed=1)
    error = 5 * np.hypot(1 / np.sqrt(fitted.n_effective), 1 / np.sqrt(check.n_effective))
    there, sd = check.moved["exact_mean"], check.moved["exact_sd"]
    away = (fitted.table["mean"] - there[fitted.table.index]) / sd[fitted.table.index]
    assert (away.abs() < error).all()


def test_it_plots_the_states_over_the_data(fitted):
    panels = fitted.plot(labels=("time", "mass"))
    assert panels.viz["plot"].sizes["state"] == 1


READ = """
import json, pickle, sys
with open(sys.argv[1], "rb") as file:
    fit = pickle.load(file)
import pymc_gradmatch as gm
ahead = fit.predict(t=[0.0, 1.0, 8.0])["posterior_predictive"]["x"]
fit.plot().savefig(sys.argv[2])
print(json.dumps([repr(fit), float(fit.mode["rate"]), ahead[0, :3, :, 0].values.tolist(),
    sorted(vars(fit)), [rv.name for rv in fit.exact_model.free_RVs], len(fit.model.free_RVs)]))
"""


@pytest.mark.slow
def test_a_fit_with_a_lambda_is_stored_by_pickle_and_whole_in_another_process(fitted, tmp_path):
    stored, picture = tmp_path / "fit.pkl", tmp_path / "states.png"
    stored.write_bytes(pickle.dumps(fitted))
    env = os.environ | {"PYTHONPATH": str(Path(gm.__file__).parents[1]), "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", READ, str(stored), str(picture)]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, check=True)
    text, mode, ahead, fields, free, n_free = json.loads(run.stdout.splitlines()[-1])
    assert text == repr(fitted)
    assert mode == pytest.approx(float(fitted.mode["rate"]), rel=1e-6)
    here = fitted.predict(t=[0.0, 1.0, 8.0])["posterior_predictive"]["x"]
    np.testing.assert_allclose(ahead, here[0, :3, :, 0], rtol=1e-9)
    assert {field.name for field in dataclasses.fields(fitted)} <= {*fields}
    assert free == [rv.name for rv in fitted.exact_model.free_RVs]
    assert n_free == len(fitted.model.free_RVs)
    assert picture.stat().st_size > 0
    again = pickle.loads(stored.read_bytes())
    assert again.idata.identical(fitted.idata)
    pd.testing.assert_frame_equal(again.table, fitted.table)


def test_a_seed_fixes_the_draws(fitted, y):
    again = gm.fit(DECAY, T, y, priors={"rate": pm.HalfNormal.dist(2)}, random_seed=1)
    np.testing.assert_array_equal(
        again.idata["posterior"]["rate"], fitted.idata["posterior"]["rate"]
    )


def test_what_does_not_go_together_is_refused(y, fitted):
    priors = {"rate": pm.HalfNormal.dist(2)}
    with pytest.raises(TypeError, match=r"not given .*; expected an ODE, t, y and priors.* model="):
        gm.fit(DECAY, T, y)
    with pytest.raises(TypeError, match="expected either model= or ode"):
        gm.fit(DECAY, T, y, priors=priors, model=fitted.model)
    with pytest.raises(TypeError, match="no argument 'chains' or 'draws': n_draws is"):
        gm.fit(DECAY, T, y, priors=priors, draws=500, chains=4)
    with pytest.raises(ValueError, match="n_draws is 10; expected at least 1000"):
        gm.fit(DECAY, T, y, priors=priors, n_draws=10)


def test_a_density_that_is_zero_at_the_start_says_where(gp, y):
    def likelihood(x):
        pm.Normal("y", x, NOISE, observed=y)
        pm.Potential("never", pm.math.switch(x[0, 0] > 1e6, 0.0, -np.inf))

    with pytest.raises(ValueError, match=r"The likelihood is zero at never\. Check"):
        gm.fit(model=four_lines(gp, likelihood), random_seed=1)


def test_a_prior_that_is_nan_at_its_own_draws_is_named(y):
    """Assert it of one that PyMC 6.4 computes in integers of 8 bits."""
    priors = {"rate": pm.HalfStudentT.dist(nu=3, sigma=50)}
    with pytest.raises(ValueError, match=r"prior density of rate is zero or NaN .* as floats"):
        gm.fit(DECAY, T, y, priors=priors, random_seed=1)


@pytest.mark.parametrize(
    ("start", "rate", "states"),
    [(3.0, 10.0, ["mass"]), (3.0, 1.5, ["mass"]), (3.0, 0.6, []), (0.0, 10.0, [])],
    ids=["explains nothing", "explains a half", "explains nearly all", "mere noise"],
)
def test_noise_in_the_place_of_motion_gets_no_seal(start, rate, states, even_noise):
    """Assert it of a decay at half a unit a time, by solutions that decay faster.

    Of mere noise around a constant a solution may leave everything.
    """
    t = np.linspace(0, 4, 17)
    data = start * np.exp(-t / 2)[:, None] + 0.05 * even_noise(17, 1)
    gp = gm.StateGP(t, data, [pm.gp.cov.Matern52(1, ls=1.0)], states=["mass"], sigma=0.1)
    model = gm.build_model(
        DECAY,
        t,
        data,
        priors={"rate": pm.HalfNormal.dist(20)},
        gp=gp,
        sigma="fixed",
        preset="fgpgm",
    )
    target = ExactPosterior(model)
    over = target.start_point({"rate": rate}, [np.array([start])])
    assert poorly_fitted(residuals(target, over)) == states


def test_of_a_model_of_ones_own_the_verdict_alone_says_what_is_unexplained():
    """Assert that refine, on the way there, does not warn of the same: warnings are errors."""
    t = np.linspace(0, 4, 17)
    data = 2 + np.cos(3 * t)[:, None] + np.random.default_rng(1).normal(0, 0.03, (17, 1))
    gp = gm.StateGP(t, data, [pm.gp.cov.Matern52(1, ls=1.0)], sigma=0.05)
    model = four_lines(gp, lambda x: pm.Normal("y", x, pm.HalfNormal("sigma", 1), observed=data))
    fit = gm.fit(model=model, random_seed=1, progressbar=False)
    assert not fit.is_exact
    assert "leaves much of 'mass' unexplained" in fit.verdict


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_one_datum_far_off_is_an_outlier(off, even_noise):
    """Assert it of a decay: a mode that has a jump on the wrong side of one time leaves such."""
    t = np.linspace(0, 4, 17)
    data = 3 * np.exp(-t / 2)[:, None] + 0.05 * even_noise(17, 1)
    data[8] += off
    gp = gm.StateGP(t, data, [pm.gp.cov.Matern52(1, ls=1.0)], states=["mass"], sigma=0.1)
    model = gm.build_model(
        DECAY,
        t,
        data,
        priors={"rate": pm.HalfNormal.dist(20)},
        gp=gp,
        sigma="fixed",
        preset="fgpgm",
    )
    target = ExactPosterior(model)
    [left] = residuals(target, target.start_point({"rate": 0.5}, [np.array([3.0])]))
    assert left.have_outlier == bool(off)
    assert not left.is_autocorrelated


@pytest.mark.slow
@pytest.mark.parametrize("mu", [10.0, 20.0])
def test_jumps_between_two_times_are_found_from_the_prior(mu):
    """Assert it of Van der Pol's equation, whose jumps no Gaussian process can see there.

    Gradient matching leads to a mode with noise in the place of the jumps, a hundred below the
    data's in log density.
    """
    van_der_pol = gm.ODE(
        lambda t, x, theta: [x.v, theta.mu * (1 - x.x**2) * x.v - x.x], ["x", "v"], ["mu"]
    )
    period = (3 - 2 * np.log(2)) * mu + 2 * np.pi / (1 + mu)
    t = np.linspace(0, 2 * period, 41)
    x = van_der_pol.solve(t, x0=[2.0, 0.0], theta=[mu])
    y = x + np.random.default_rng(2).normal(0, 0.05 * x.std(axis=0), x.shape)
    fit = gm.fit(van_der_pol, t, y, priors={"mu": pm.HalfNormal.dist(5 * mu)}, random_seed=2)
    found = fit.table.loc["mu"]
    assert fit.is_exact
    assert abs(found["mean"] - mu) < 4 * found["sd"]


def test_priors_that_cannot_be_drawn_from_stop_nothing(gp, y):
    """Assert that a flat prior and one with infinite draws give the posterior all the same."""

    def likelihood(x):
        sigma = pm.HalfFlat("sigma", initval=0.1)
        offset = pm.Gamma("offset", 0.001, 0.001)
        pm.Normal("known", offset, 0.1, observed=0.5)
        pm.Normal("y", x, sigma, observed=y)

    model = four_lines(gp, likelihood)
    fit = gm.fit(model=model, random_seed=1, progressbar=False)
    assert fit.is_exact
    assert "sigma" not in fit.unidentified.index
    target = ExactPosterior(model)
    points = target.draw_prior(300, np.random.default_rng(1))
    assert points.shape == (300, len(target.names))
    assert np.isfinite(points).all()


@pytest.mark.parametrize("kind", ["uniform", "student", "beta"])
def test_priors_whose_own_parameters_may_be_impossible_stop_nothing(gp, y, kind):
    with pm.Model() as model:
        if kind == "uniform":
            rate = pm.Uniform("rate", 0, pm.Normal("most", 5, 2))
        elif kind == "student":
            rate = pm.StudentT("rate", nu=pm.Normal("nu", 5, 2), mu=1, sigma=1)
        else:
            rate = pm.Beta("rate", pm.Gamma("shape", 0.001, 0.001), 1)
        x = gp.prior("x")
        pm.Normal("y", x, NOISE, observed=y)
        gm.GradientMatchingODE("gradient_match", DECAY, x, [rate], gp=gp, gamma=0.3)
    fit = gm.fit(model=model, random_seed=1, progressbar=False)
    assert fit.table.loc["rate", "mean"] == pytest.approx(RATE, abs=0.1)


def test_parameters_that_are_entries_of_a_variable_cross_a_long_gap():
    t = np.concatenate([np.linspace(0, 1, 6), np.linspace(3, 4, 6)])
    ode = gm.ODE(lambda t, x, theta: [theta.m - theta.k * x.mass], ["mass"], ["k", "m"])
    y = ode.solve(t, x0=[2.0], theta=[1.0, 0.3])
    y += np.random.default_rng(1).normal(0, 0.03, y.shape)
    gp = gm.StateGP(t, y, [pm.gp.cov.ExpQuad(1, ls=1.0)], sigma=0.03, states=ode.states)
    with pm.Model() as model:
        k = pm.HalfNormal("k", 1, shape=2)
        x = gp.prior("x")
        pm.Normal("y", x, 0.03, observed=y)
        gm.GradientMatchingODE("gradient_match", ode, x, [k[0], k[1]], gp=gp, gamma=0.3)
    fit = gm.fit(model=model, random_seed=1, progressbar=False)
    assert fit.is_exact
    priors = {name: pm.HalfNormal.dist(1) for name in ode.params}
    alone = gm.fit(ode, t, y, priors=priors, sigma=0.03, random_seed=1, progressbar=False)
    for entry, name in [("k[0]", "k"), ("k[1]", "m")]:
        mean, sd = alone.table.loc[name, ["mean", "sd"]]
        error = 5 * sd / np.sqrt(min(fit.n_effective, alone.n_effective) / 2)
        assert fit.table.loc[entry, "mean"] == pytest.approx(mean, abs=error)


@pytest.mark.parametrize("are_apart", [False, True])
def test_data_that_were_set_anew_are_no_other_mode(gp, are_apart):
    """Assert it of data in one ``pm.Data``, and of such for each half of the times."""
    with pm.Model() as model:
        rate, x = pm.HalfNormal("rate", 2), gp.prior("x")
        halves = [slice(0, 4), slice(4, None)] if are_apart else [slice(None)]
        for n, half in enumerate(halves):
            pm.Normal(f"y{n}", x[half], NOISE, observed=pm.Data(f"data{n}", gp.y[half]))
        gm.GradientMatchingODE("gradient_match", DECAY, x, [rate], gp=gp, gamma=0.3)
    target = ExactPosterior(model)
    point = target.start_point({"rate": 3 * RATE}, [np.array([START])])
    assert poorly_fitted(residuals(target, point)) == ["mass"]
    with model:
        pm.set_data({f"data{n}": gp.y[half] / 2 for n, half in enumerate(halves)})
    assert residuals(ExactPosterior(model), point) == []


def test_another_preset_is_refused(y):
    with pytest.raises(TypeError, match="has no argument preset"):
        gm.fit(DECAY, T, y, priors={"rate": pm.HalfNormal.dist(2)}, preset="fgpgm")

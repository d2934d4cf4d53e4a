"""What new users tried: fits inside a model, vectors of parameters, shared unknowns."""

import re
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pymc as pm
import pytest
import rich.console

import pymc_gradmatch as gm
from pymc_gradmatch import reporting
from pymc_gradmatch.exact import MAX_STARTS, multistart
from pymc_gradmatch.model import constraints, fixed_noise
from pymc_gradmatch.sampling import engine, one_call

QUIET = {"random_seed": 1, "progressbar": False}
T = np.linspace(0, 3, 9)
DECAY = gm.ODE(lambda t, x, theta: [-theta.k * x.a], ["a"], ["k"])
Y = np.exp(-T)[:, None] + np.random.default_rng(1).normal(0, 0.03, (9, 1))


def priors():
    return {"k": pm.HalfNormal.dist(2)}


@pytest.fixture(scope="module")
def fit():
    return gm.fit(DECAY, T, Y, priors=priors(), **QUIET)


def inside(call):
    """Return what a call adds to the model of the block that it stands in."""
    with pm.Model(coords={"group": ["one", "other"]}) as model:
        pm.Normal("intercept", 0, 1)
        call()
    return {*model.named_vars} - {"intercept"} | {*model.coords} - {"group"}


CALLS = {
    "fit": lambda fit: gm.fit(DECAY, T, Y, priors=priors(), **QUIET),
    "fit, fixed noise": lambda fit: gm.fit(DECAY, T, Y, priors=priors(), sigma="fixed", **QUIET),
    "fit.model": lambda fit: gm.fit(DECAY, T, Y, priors=priors(), **QUIET).model,
    "fit.exact_model": lambda fit: fit.exact_model,
    "fit.mode": lambda fit: fit.mode,
    "fit.predict": lambda fit: fit.predict(t=T, start={"a": 2.0}, random_seed=1),
    "fit_many, exact": lambda fit: gm.fit_many(
        DECAY, T, [Y, Y], priors=priors(), exact=True, n_jobs=1, **QUIET
    ),
    "fit_many": lambda fit: gm.fit_many(
        DECAY, T, [Y, Y], priors=priors(), preset="fgpgm", gamma=0.3, draws=50, n_jobs=1, **QUIET
    ),
    "predict": lambda fit: gm.predict(fit.idata, model=fit.model, t=T),
    "integrate_check": lambda fit: gm.integrate_check(fit.idata, model=fit.model, **QUIET),
    "refine": lambda fit: gm.refine(
        DECAY, gm.fit_gp(T, Y, cov="Matern52", states=["a"], random_seed=1), priors=priors(),
        **QUIET,
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_call_inside_a_model_adds_nothing_to_it(call, fit):
    assert not inside(lambda: CALLS[call](fit))


def test_priors_may_be_variables_of_the_surrounding_model_which_stays_as_it_is(fit):
    """A likelihood of one's own may read them, too."""
    with pm.Model() as model:
        log_k = pm.Normal("log_k", 0, 1)
        k = pm.Deterministic("k", pm.math.exp(log_k))
        sigma = pm.HalfNormal("sigma", 0.1)

        def likelihood(x, theta):
            pm.Normal("y", x.a, sigma, observed=Y[:, 0])

        found = gm.fit(DECAY, T, priors={"k": k}, likelihood=likelihood, **QUIET)
    assert [*model.named_vars] == ["log_k", "k", "sigma"]
    assert found.is_exact
    assert {"log_k", "k", "sigma"} <= {*found.table.index}
    for name, ours in {"k": "k", "sigma": "sigma[a]"}.items():
        mean, sd = found.table.loc[name, ["mean", "sd"]]
        assert abs(mean - fit.table.loc[ours, "mean"]) < 0.5 * sd


CHAIN = gm.ODE(
    lambda t, x, theta: [-theta.k * x.a, theta.k * x.a - theta.c * x.b], ["a", "b"], ["k", "c"]
)
CHAIN_Y = CHAIN.solve(T, x0=[2.0, 0.5], theta=[1.0, 0.5])
CHAIN_Y = CHAIN_Y + np.random.default_rng(1).normal(0, 0.05, CHAIN_Y.shape)


def together():
    """Return rates with one prior for both, a correlated one."""
    covariance = [[1.0, 0.8], [0.8, 1.0]]
    z = pm.MvNormal("z", np.zeros(2), covariance)
    return {"k": pm.math.exp(z[0]), "c": pm.math.exp(z[1])}


@pytest.mark.slow
def test_priors_made_together_by_a_function_are_those_of_a_model_written_by_hand():
    """Two points differ by the same in both, whatever the constants."""
    fit = gm.fit(CHAIN, T, CHAIN_Y, priors=together, start={"a": 2.0, "b": 0.5}, **QUIET)
    assert fit.is_exact
    with pm.Model() as by_hand:
        theta = together()
        x = CHAIN.solve(T, [2.0, 0.5], theta)
        sigma = pm.HalfNormal("sigma", CHAIN_Y.std(axis=0), shape=2)
        pm.Normal("y", x, sigma, observed=CHAIN_Y)
    point = by_hand.initial_point()
    at = {"z": np.array([0.1, -0.6]), "sigma_log__": np.log([0.05, 0.07])}
    exact = fit.exact_model
    here, there = (m.compile_logp(mode="FAST_COMPILE") for m in (exact, by_hand))
    difference = here(exact.initial_point() | at) - there(point | at)
    moved = at | {"z": np.array([0.3, -0.9])}
    again = here(exact.initial_point() | moved) - there(point | moved)
    assert difference == pytest.approx(again, abs=1e-6)


@pytest.mark.parametrize("preset", ["fgpgm", "refined"])
def test_a_function_of_priors_serves_every_preset(preset):
    model = gm.build_model(CHAIN, T, CHAIN_Y, priors=together, preset=preset, **QUIET)
    assert {"z", "k", "c"} <= {*model.named_vars}
    assert np.isfinite(model.compile_logp(mode="FAST_COMPILE")(model.initial_point()))


NOISY = gm.ODE(lambda t, x, theta: [-theta.k * x.a], ["a"], ["k", "s"])
OTHER_Y = 2 * np.exp(-T)[:, None] + np.random.default_rng(2).normal(0, 0.03, (9, 1))


def lines_of(y, noise):
    def likelihood(x, theta):
        pm.Normal("y", x.a, noise(theta), observed=y[:, 0])

    return likelihood


def shared_priors():
    return {"k": pm.HalfNormal("k", 2), "s": pm.HalfNormal("s", 0.1)}


SHARED = {
    "a parameter": lambda theta: theta.s,
    "by its name in the model": lambda theta: pm.modelcontext(None)["s"],
}


def pair(noise):
    ys = {"one": Y, "other": OTHER_Y}
    return {n: gm.Experiment(T, y, likelihood=lines_of(y, noise)) for n, y in ys.items()}


@pytest.mark.slow
@pytest.mark.parametrize("noise", SHARED)
def test_experiments_share_an_unknown_of_their_likelihoods(noise):
    """A parameter that enters no equation is what the default's shared sigma is."""
    fit = gm.fit(NOISY, experiments=pair(SHARED[noise]), priors=shared_priors, **QUIET)
    assert fit.is_exact
    with pm.Model() as by_hand:
        theta = shared_priors()
        for number, y in enumerate([Y, OTHER_Y]):
            x = DECAY.solve(T, pm.Normal(f"x0_{number}", 0, 10, shape=1), [theta["k"]])
            pm.Normal(f"y_{number}", x[:, 0], theta["s"], observed=y[:, 0])
    expected = pm.sample(
        500, model=by_hand, chains=2, cores=1, random_seed=1, progressbar=False, quiet=True
    )["posterior"]
    for name in ("k", "s"):
        mean, sd = fit.table.loc[name, ["mean", "sd"]]
        assert abs(mean - float(expected[name].mean())) < 0.3 * sd
        assert sd == pytest.approx(float(expected[name].std()), rel=0.2)


def test_an_unknown_that_each_experiment_draws_for_itself_is_warned_of():
    experiments = pair(lambda theta: pm.HalfNormal("s", 0.1))
    said = r"draw \['s'\]: each experiment has one of its own, such as 'one::s'.*params of gm.ODE"
    with pytest.warns(UserWarning, match=said):
        gm.build_model(DECAY, experiments=experiments, priors=priors(), **QUIET, preset="fgpgm")


@pytest.mark.slow
def test_known_noise_of_experiments_is_that_of_likelihoods_with_these_numbers():
    """One standard deviation for all of one experiment, one for each observation of the other."""
    each = np.linspace(0.02, 0.2, 9)[:, None]
    hole = OTHER_Y.copy()
    hole[4] = np.nan
    seen = ~np.isnan(hole[:, 0])
    known = {
        "one": gm.Experiment(T, Y, sigma=0.03),
        "other": gm.Experiment(T, hole, sigma=each),
    }

    def other(x, theta):
        pm.Normal("y", x.a[seen], each[seen, 0], observed=hole[seen, 0])

    lines = {
        "one": gm.Experiment(T, Y, likelihood=lines_of(Y, lambda theta: 0.03)),
        "other": gm.Experiment(T, hole, likelihood=other),
    }
    by_numbers, by_lines = (
        gm.fit(DECAY, experiments=given, priors=priors(), **QUIET) for given in (known, lines)
    )
    assert by_numbers.is_exact
    assert "sigma" not in by_numbers.idata["posterior"]
    at = {"k_log__": np.log(1.1), "x0_scaled__": np.array([[0.1], [-0.2]])}
    densities = []
    for exact in (by_numbers.exact_model, by_lines.exact_model):
        density, point = exact.compile_logp(mode="FAST_COMPILE"), exact.initial_point()
        assert {*point} == {*at}
        values = at
        moved = values | {"k_log__": np.log(0.9)}
        densities.append(float(density(values) - density(moved)))
    assert densities[0] == pytest.approx(densities[1], rel=1e-6)
    shared = gm.fit(
        DECAY, experiments={"one": known["one"], "other": gm.Experiment(T, OTHER_Y)},
        priors=priors(), sigma=0.03, **QUIET,
    )  # fmt: skip
    assert shared.table.loc["k", "sd"] < by_numbers.table.loc["k", "sd"]


def test_known_noise_of_some_experiments_alone_is_refused():
    some = {"one": gm.Experiment(T, Y, sigma=0.03), "other": gm.Experiment(T, OTHER_Y)}
    with pytest.raises(ValueError, match=r"known, that of 'other' or .* sigma= for each"):
        gm.build_model(DECAY, experiments=some, priors=priors(), **QUIET, preset="fgpgm")


@pytest.mark.slow
def test_a_noise_that_is_fixed_is_said_with_its_number(fit):
    said = "The noise of y is fixed, at 0.05."
    assert said in repr(gm.fit(DECAY, T, Y, priors=priors(), sigma=0.05, **QUIET))
    assert "is fixed" not in repr(fit)
    gp = gm.StateGP(T, Y, [pm.gp.cov.ExpQuad(1, ls=1.0)], sigma=0.05, states=["a"])
    checks = []
    for sigma in (0.05, None):
        with pm.Model(coords={"state": ["a"]}) as model:
            theta = {"k": pm.HalfNormal("k", 2)}
            x = gp.prior("x")
            noise = pm.HalfNormal("sigma", 1, initval=gp.sigma, dims="state") if not sigma else 0.05
            pm.Normal("y", x, noise, observed=Y, dims=("time", "state"))
            gm.GradientMatchingODE("match", DECAY, x, theta, gp=gp, gamma=0.1)
            idata = gm.sample(250, chains=4, cores=1, **QUIET)
        assert (said in idata["posterior"].attrs["exactness"]) == bool(sigma)
        checks.append(gm.integrate_check(idata, model=model, **QUIET))
    assert [said in check.verdict for check in checks] == [True, False]
    for name in ("mean", "sd"):  # with sigma unknown they are those of the one call
        ours = float(checks[1].moved.loc["k", f"exact_{name}"])
        assert ours == pytest.approx(fit.table.loc["k", name], rel=0.1)


@pytest.mark.parametrize("preset", ["fgpgm", "refined"])
def test_the_noise_is_an_unknown_that_starts_at_its_estimate(preset):
    model = gm.build_model(DECAY, T, Y, priors=priors(), preset=preset, **QUIET)
    [constraint] = constraints(model)
    start = np.exp(model.initial_point()["sigma_log__"])
    np.testing.assert_allclose(start, constraint.gp.sigma)
    assert not fixed_noise(model)


@pytest.mark.slow
def test_the_matched_model_of_the_pelts_leads_to_the_posterior_of_the_one_call():
    """With sigma at the process's estimate the standard deviation of alpha was half as wide."""
    pelts, species = gm.datasets.lynx_hare().pelts, ["hare", "lynx"]

    def predator_prey(t, x, theta):
        births, deaths = theta.alpha - theta.beta * x.lynx, theta.gamma - theta.delta * x.hare
        return births * x.hare, -deaths * x.lynx

    ode = gm.ODE(predator_prey, species, ["alpha", "beta", "gamma", "delta"], positive=species)
    widths = dict(zip(ode.params, [1, 0.1, 1, 0.1], strict=True))
    given = {"priors": {n: pm.HalfNormal.dist(width) for n, width in widths.items()}}
    fit = gm.fit(ode, pelts.index, pelts, **given, **QUIET)
    model = gm.build_model(ode, pelts.index, pelts, **given, gamma=0.01, **QUIET, preset="fgpgm")
    idata = gm.sample(500, chains=2, cores=1, model=model, **QUIET)
    check = gm.integrate_check(idata, model=model, **QUIET)
    assert fit.is_exact
    assert check.is_exact
    for name in ode.params:
        mean, sd = fit.table.loc[name, ["mean", "sd"]]
        assert check.moved.loc[name, "exact_mean"] == pytest.approx(mean, abs=0.2 * sd)
        assert check.moved.loc[name, "exact_sd"] == pytest.approx(sd, rel=0.15)


@pytest.mark.slow
def test_progress_says_how_many_starts_were_done_of_how_many(monkeypatch):
    said = []

    @contextmanager
    def listening(doing, *, enabled):
        said.append(doing)
        yield said.append

    monkeypatch.setattr(one_call, "reporting", listening)
    gm.fit(DECAY, T, Y, priors=priors(), random_seed=1)
    climbs = [re.search(r"(\d+) of (\d+) starts at most, to a mode", words) for words in said]
    counts = [tuple(map(int, found.groups())) for found in climbs if found]
    assert counts
    assert all(0 < n <= most == MAX_STARTS for n, most in counts)


def test_what_is_withheld_says_that_the_solution_is_told_where_parameters_are_not(monkeypatch):
    """Four rates of which the data determine the sum alone, and searches that are stopped."""

    def stopped(*args, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "run_searches", stopped)
    ode = gm.ODE(lambda t, x, theta: [-sum(theta.k[i] for i in range(4)) * x.a], ["a"], {"k": 4})
    fit = gm.fit(ode, T, Y, priors={"k": pm.Normal.dist(0.25, 1, shape=4)}, **QUIET)
    assert not fit.is_exact
    assert [*fit.unidentified.index] == [f"k[{i}]" for i in range(4)]
    said = "But they determine the solution: among these draws it differs by at most 0.0"
    assert said in repr(fit)


@pytest.mark.slow
def test_a_neural_term_of_nine_weights_ends_with_the_curve_and_no_passed_verdict(monkeypatch):
    """The units may be exchanged and their signs turned: 48 modes that are one solution.

    From 32 starts; from 256, of which all find other modes, it takes some ten minutes.
    """
    monkeypatch.setattr(multistart, "MAX_STARTS", 32)

    def neural(t, x, theta):
        w, v, u = theta
        return [sum(w[i] * pm.math.tanh(v[i] * x.a + u[i]) for i in range(3))]

    t = np.linspace(0, 10, 21)
    curve = 1 / (1 + 9 * np.exp(-0.8 * t))
    y = curve[:, None] + np.random.default_rng(1).normal(0, 0.02, (21, 1))
    names = ["out", "slope", "shift"]
    ode = gm.ODE(neural, ["a"], dict.fromkeys(names, 3))
    weights = {name: pm.Normal.dist(0, 1, shape=3) for name in names}
    fit = gm.fit(ode, t, y, priors=weights, **QUIET)
    assert not fit.is_exact
    assert fit.diagnostics.n_rounds <= 36
    best = ode.solve(t, fit.mode["x0"], {name: fit.mode[name] for name in names})
    assert np.abs(best[:, 0] - curve).max() < 0.03


def test_a_withheld_verdict_says_that_the_solution_is_told_where_parameters_are_not():
    t = np.linspace(0, 3, 16)
    y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.01, (16, 1))
    ode = gm.ODE(lambda t, x, theta: [-(theta.k + theta.m) * x.a], ["a"], ["k", "m"])
    either = {name: pm.Uniform.dist(0, 1) for name in ode.params}  # their sum is 1.00 +- 0.02
    fit = gm.fit(ode, t, y, priors=either, **QUIET)
    assert [*fit.unidentified.index] == ["k", "m"]
    said = "But they determine the solution: among these draws it differs by at most 0.0"
    assert said in repr(replace(fit, is_exact=False))
    assert said not in repr(replace(fit, is_exact=True))


def test_a_notebook_without_ipywidgets_shows_words_and_no_warnings(monkeypatch, capsys):
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setattr(reporting, "find_spec", lambda name: None)
    begun = time.monotonic()
    with reporting.reporting("climbing", enabled=True):  # warnings are errors
        while "climbing" not in (shown := capsys.readouterr().err):
            assert time.monotonic() < begun + 5
            time.sleep(0.05)
    assert time.monotonic() - begun < 1
    assert "climbing" in shown


FORGETFUL = gm.ODE(
    lambda t, x, theta: [-theta.k * x.a + x.b / 100, -50 * (x.b - 100)], ["a", "b"], ["k"]
)
LEVELS = FORGETFUL.solve(T, x0=[1.0, 2.0], theta=[0.7])
LEVELS = LEVELS + np.random.default_rng(1).normal(0, 0.05, LEVELS.shape)
LEVELS[:, 1] = np.nan


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_a_start_that_is_forgotten_at_once_is_called_unidentified(several):
    """Its posterior is its prior, which is narrow beside what the state passes through."""
    data = {"experiments": {n: gm.Experiment(T, LEVELS) for n in "pq"}} if several else {}
    given = () if several else (T, LEVELS)
    start = {"b": pm.Normal.dist(0, 3)}
    fit = gm.fit(FORGETFUL, *given, **data, priors=priors(), start=start, **QUIET)
    expected = {"x0[p, b]", "x0[q, b]"} if several else {"x0[b]"}
    assert {*fit.unidentified.index} == expected
    for name in expected:
        prior, posterior = fit.unidentified.loc[name]
        assert prior == pytest.approx(3 * 1.349, rel=0.1)
        assert posterior == pytest.approx(prior, rel=0.2)
    known = gm.fit(FORGETFUL, *given, **data, priors=priors(), start={"b": 3.0}, **QUIET)
    assert known.unidentified.empty


@pytest.mark.slow
def test_replicates_are_experiments_that_share_a_start():
    """Two curves of the same times say what one likelihood of both says."""
    again = Y + np.random.default_rng(5).normal(0, 0.03, Y.shape)
    ode = gm.ODE(lambda t, x, theta: [-theta.k * x.a], ["a"], ["k", "a0"])
    start = {"a": lambda theta: theta.a0}
    widths = priors() | {"a0": pm.HalfNormal.dist(3)}

    def both(x, theta):
        sigma = pm.HalfNormal("sigma", Y.std())
        for name, y in {"one": Y, "other": again}.items():
            pm.Normal(name, x.a, sigma, observed=y[:, 0])

    repeats = {"one": gm.Experiment(T, Y), "other": gm.Experiment(T, again)}
    fit = gm.fit(ode, experiments=repeats, priors=widths, start=start, **QUIET)
    by_lines = gm.fit(ode, T, priors=widths, likelihood=both, start=start, **QUIET)
    for name in ("k", "a0"):
        mean, sd = by_lines.table.loc[name, ["mean", "sd"]]
        assert abs(fit.table.loc[name, "mean"] - mean) < 0.15 * sd
        assert fit.table.loc[name, "sd"] == pytest.approx(sd, rel=0.15)
    with pytest.raises(ValueError, match=r"repeats the time 0 .* as experiments.*theta"):
        gm.fit(ode, np.sort([*T, *T]), np.repeat(Y, 2, axis=0), priors=widths, **QUIET)

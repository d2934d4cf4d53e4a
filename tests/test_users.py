"""What new users tried: fits inside a model, vectors of parameters, shared unknowns."""

import re
import time
from contextlib import contextmanager

import numpy as np
import pymc as pm
import pytest
import rich.console

import pymc_gradmatch as gm
from pymc_gradmatch import reporting
from pymc_gradmatch.exact import MOST_CLIMBS
from pymc_gradmatch.sampling import one_call

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
        DECAY, T, [Y, Y], priors=priors(), gamma=0.3, draws=50, n_jobs=1, **QUIET
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
        gm.build_model(DECAY, experiments=experiments, priors=priors(), **QUIET)


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
        gm.build_model(DECAY, experiments=some, priors=priors(), **QUIET)


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
        checks.append(gm.integrate_check(idata, model=model, **QUIET))
    assert [said in check.verdict for check in checks] == [True, False]
    for name in ("mean", "sd"):  # with sigma unknown they are those of the one call
        ours = float(checks[1].moved.loc["k", f"exact_{name}"])
        assert ours == pytest.approx(fit.table.loc["k", name], rel=0.1)


def test_progress_says_how_many_climbs_were_done_of_how_many(monkeypatch):
    said = []

    @contextmanager
    def listening(doing, *, enabled):
        said.append(doing)
        yield said.append

    monkeypatch.setattr(one_call, "reporting", listening)
    gm.fit(DECAY, T, Y, priors=priors(), random_seed=1)
    climbs = [re.search(r"(\d+) of (\d+) climbs at most, to a mode", words) for words in said]
    counts = [tuple(map(int, found.groups())) for found in climbs if found]
    assert counts
    assert all(0 < n <= most == MOST_CLIMBS for n, most in counts)


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

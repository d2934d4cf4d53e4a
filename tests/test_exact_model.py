"""The exact model: a plain PyMC model, whose density is that of the exact posterior."""

from functools import partial

import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytest

import pymc_gradmatch as gm
from benchmarks.cases import ACCURACY, BREADTH, MESSY, named
from pymc_gradmatch.exact import ExactPosterior
from pymc_gradmatch.exact.model import default_prior
from pymc_gradmatch.ode import solve as solving

QUICK = {"random_seed": 1, "progressbar": False}
T = np.linspace(0, 3, 9)
DECAY = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
CHAIN = gm.ODE(
    lambda t, x, theta: [-theta.k * x.a, theta.k * x.a - theta.m * x.b], ["a", "b"], ["k", "m"]
)
PRIORS = {"k": pm.LogNormal.dist(0, 0.5), "m": pm.LogNormal.dist(0, 0.5)}
DOSE = {"b": gm.Input([1.0], [2.0], kind="dose")}


def chain_data(ode=CHAIN, x0=(3.0, 0.2), seed=1, sigma=0.05):
    x = ode.solve(T, x0, [1.0, 0.4])
    return x * np.exp(sigma * np.random.default_rng(seed).normal(size=x.shape))


def quick_gp(ode, t, y):
    """Return Gaussian processes that are not fitted: the exact model uses only their data."""
    covs = [pm.gp.cov.Matern52(1, ls=1.0)] * y.shape[1]
    positive = ode.is_positive if ode.positive else False
    return gm.StateGP(t, y, covs, sigma=0.1, states=ode.states, positive=positive)


def built(ode=CHAIN, start=None, **settings):
    y = chain_data(ode)
    gp = quick_gp(ode, T, y)
    settings = {"preset": "fgpgm", "gamma": 0.1, "sigma": "fixed"} | settings
    return gm.build_model(ode, T, y, priors=PRIORS, gp=gp, start=start, **settings)


def experiments(start=None, other=None):
    return {
        "rich": gm.Experiment(T, chain_data(), start=start),
        "poor": gm.Experiment(T, chain_data(x0=(1.0, 0.2), seed=2), start=other or start),
        "later": gm.Experiment(T + 1, chain_data(seed=3), start=start),
    }


def together(**given):
    priors = PRIORS | {"k": pm.LogNormal.dist(0, 0.5, shape=3)}
    return gm.build_model(
        CHAIN, experiments=experiments(**given), priors=priors, preset="refined", **QUICK
    )


def breadth(name):
    case = named([*BREADTH, *ACCURACY], name)
    data = case.simulate(0)
    return case.model(data, gp=quick_gp(case.ode, data.t, data.y), gamma=0.1, preset="fgpgm")


def messy(name):
    case = named(MESSY, name)
    arguments = case.arguments(case.simulate(0))
    return gm.build_model(case.ode, case.t, preset="refined", **arguments, **QUICK)


POSITIVE = gm.ODE(CHAIN.rhs, CHAIN.states, CHAIN.params, positive=["a", "b"])
ONE_POSITIVE = gm.ODE(CHAIN.rhs, CHAIN.states, CHAIN.params, positive=["b"])
MODELS = {
    **{name: lambda name=name: breadth(name) for name in ("Van der Pol", "SEIR", "Robertson")},
    **{name: lambda name=name: messy(name) for name in ("FHN, R hidden", "SIR, new cases")},
    "positive": lambda: built(POSITIVE),
    "one positive": lambda: built(ONE_POSITIVE),
    "dose": lambda: built(CHAIN.with_inputs(DOSE)),
    "known": lambda: built(start={"b": 0.2}),
    "function": lambda: built(start={"b": lambda theta, x0: theta.m - 0.1 * x0.a}),
    "prior": lambda: built(start={"b": pm.LogNormal.dist(-1, 1)}),
    "experiments": together,
    "experiments with known starts": lambda: together(start={"b": lambda theta: 0.2 * theta.k}),
    "experiments with priors": lambda: together(
        start={"b": pm.LogNormal.dist(-1, 1)}, other={"b": pm.Uniform.dist(0, 1)}
    ),
}


OTHERS = {
    **{case.name: partial(breadth, case.name) for case in [*ACCURACY, *BREADTH]},
    **{case.name: partial(messy, case.name) for case in MESSY},
}
OTHERS = {
    name: pytest.param(case, marks=pytest.mark.slow, id=name)
    for name, case in OTHERS.items()
    if name not in MODELS
}


def at_points(exact, target, phi):
    """Return the exact model's log density at points of the exact posterior, one by one."""
    found, values = target.idata(phi, np.random.default_rng(0))["posterior"].dataset, []
    free = exact.free_RVs
    graphs = [exact.rvs_to_transforms[rv].forward(rv, *rv.owner.inputs) for rv in free]
    forward = pytensor.function(free, graphs, mode="FAST_COMPILE", on_unused_input="ignore")
    logp = exact.compile_logp(mode="FAST_COMPILE")
    names = [exact.rvs_to_values[rv].name for rv in free]
    for draw in range(len(phi)):
        natural = [found[rv.name].to_numpy()[0, draw] for rv in free]
        values.append(float(logp(dict(zip(names, forward(*natural), strict=True)))))
    return values


ALL = [pytest.param(case, id=name) for name, case in MODELS.items()] + [*OTHERS.values()]


def test_points_that_were_evaluated_are_not_solved_again(rng):
    """Assert it of points in another order, and of one that is new."""
    target = ExactPosterior(built())
    phi = target.start_point() + 0.01 * rng.normal(size=(4, len(target.names)))
    target(phi[:3])
    again = phi[[2, 0, 3, 2]]
    found, fresh = target.posterior(again), ExactPosterior(target.model).posterior(again)
    assert target.n_solutions == 4
    for name in found.data_vars:
        np.testing.assert_array_equal(found[name], fresh[name])


@pytest.mark.parametrize("build", ALL)
def test_its_density_is_that_of_the_exact_posterior(build, rng):
    """Assert it at random points, to the solver's tolerance, Jacobians included."""
    model = build()
    exact, target = gm.exact_model(model), ExactPosterior(model)
    there = target.start_point()
    phi = there + 0.02 * rng.normal(size=(4, len(there)))
    ours = target(phi)
    assert np.ptp(ours) > 0.01
    np.testing.assert_allclose(at_points(exact, target, phi), ours, rtol=1e-6, atol=1e-5)


def test_its_tolerance_can_be_chosen():
    model = built()
    exact, rough = gm.exact_model(model), gm.exact_model(model, rtol=1e-4)
    there = exact.initial_point()
    logp, roughly = (one.compile_logp(mode="FAST_COMPILE")(there) for one in (exact, rough))
    assert 0 < abs(logp - roughly) < 0.1


def test_its_variables_are_the_models_own_and_the_start():
    model = built(gamma=pm.HalfNormal.dist(0.3), sigma=pm.HalfNormal.dist(0.5))
    exact = gm.exact_model(model)
    assert [rv.name for rv in exact.free_RVs] == ["k", "m", "sigma", "x0"]
    assert [rv.name for rv in exact.observed_RVs] == ["y"]
    assert exact.potentials == []
    dims = exact.named_vars_to_dims
    assert dims["x0"] == ("state",)
    assert dims["x"] == ("time", "state")
    assert "gamma" in model.named_vars  # which stays as it is


def test_starts_of_different_kinds_have_a_variable_each():
    exact = gm.exact_model(built(start={"a": 3.0, "b": pm.LogNormal.dist(-1, 1)}))
    assert [rv.name for rv in exact.free_RVs] == ["k", "m", "x0_b"]
    text = exact.str_repr()
    assert "x0_b ~ LogNormal(-1, 1)" in text
    np.testing.assert_allclose(
        pm.draw(pm.do(exact, {"x0_b": 0.5})["x0"], mode="FAST_COMPILE"), [3.0, 0.5]
    )
    exact = gm.exact_model(together(start={"b": pm.LogNormal.dist(-1, 1)}))
    assert exact.named_vars_to_dims["x0_b"] == ("experiment",)
    assert exact.named_vars_to_dims["x0"] == ("experiment", "state")


def test_priors_of_starts_may_depend_on_variables():
    with pm.Model() as model:
        middle = pm.Normal("middle", 0, 1)
        y = chain_data()
        gm.build_model(
            CHAIN, T, y, priors=PRIORS, gp=quick_gp(CHAIN, T, y), gamma=0.1,
            start={"b": pm.Normal.dist(middle, 0.1)}, sigma="fixed", preset="fgpgm",
        )  # fmt: skip
    exact = gm.exact_model(model)
    assert "middle" in [rv.name for rv in exact.free_RVs]
    far = pm.do(exact, {"middle": 50.0})
    assert pm.draw(far["x0"], random_seed=1, mode="FAST_COMPILE")[1] == pytest.approx(50, abs=1)
    again = gm.exact_model(pm.do(model, {"middle": -50.0}))
    assert pm.draw(again["x0"], random_seed=1, mode="FAST_COMPILE")[1] < -49


def test_everything_else_that_is_written_stays():
    """Assert it of a hierarchy, a deterministic, a potential, other data and an initial value."""
    y = chain_data()
    with pm.Model() as model:
        location = pm.Normal("location", 0, 1, initval=0.3)
        k = pm.LogNormal("k", location, 0.5)
        gm.build_model(
            CHAIN,
            T,
            y,
            priors=PRIORS | {"k": k},
            gp=quick_gp(CHAIN, T, y),
            gamma=0.1,
            sigma="fixed",
            preset="fgpgm",
        )
        pm.Deterministic("total", model["x"].sum(axis=-1))
        pm.Potential("bounded", pm.math.switch(model["x"].max() < 100, 0.0, -np.inf))
        measured = pm.Data("measured", 1.1)
        pm.Normal("k_again", k, 0.1, observed=measured)
    exact = gm.exact_model(model)
    assert [rv.name for rv in exact.free_RVs] == ["location", "k", "m", "x0"]
    assert [rv.name for rv in exact.observed_RVs] == ["y", "k_again"]
    assert [potential.name for potential in exact.potentials] == ["bounded"]
    assert exact.initial_point()["location"] == 0.3
    values = {"k": 1.0, "m": 0.4, "x0": np.array([3.0, 0.2])}
    fixed = pm.do(exact, values)
    x = CHAIN.solve(T, [3.0, 0.2], [1.0, 0.4])
    np.testing.assert_allclose(
        pm.draw(fixed["total"], mode="FAST_COMPILE"), x.sum(axis=1), atol=1e-6
    )
    with exact:
        pm.set_data({"measured": 3.0})
    assert float(model["measured"].get_value()) == 1.1


@pytest.mark.filterwarnings("ignore:The effect of Potentials")
def test_it_is_drawn_from_and_drawn():
    model = together(start={"b": lambda theta: 0.2 * theta.k})
    exact = gm.exact_model(model)
    quick = {"compile_kwargs": {"mode": "FAST_COMPILE"}, "random_seed": 1}
    with exact:
        prior = pm.sample_prior_predictive(5, **quick)
    x = prior["prior"]["x"]
    assert x.dims == ("chain", "draw", "experiment", "time", "state")
    assert np.isfinite(x).all()
    k = prior["prior"]["k"].to_numpy()
    np.testing.assert_allclose(x.isel(time=0, state=1), 0.2 * k, rtol=1e-6)
    graph = pm.model_to_graphviz(exact).source
    assert "x0" in graph
    assert "gradient_match" not in graph
    unseen = pm.observe(pm.do(exact, {"m": 0.4}), {"k": [1.0, 1.0, 1.0]})
    assert {rv.name for rv in unseen.free_RVs} == {"sigma", "x0_a"}


def test_one_call_has_draws_for_it():
    """Assert predictive draws of the exact model from the draws of a fit."""
    fit = gm.fit(CHAIN, T, chain_data(), priors=PRIORS, start={"b": 0.2}, **QUICK)
    exact = fit.exact_model
    assert exact is fit.exact_model
    few = fit.idata.isel(draw=slice(0, 20))
    with exact:
        data = pm.sample_posterior_predictive(
            few, var_names=["y", "x"], random_seed=1, progressbar=False,
            compile_kwargs={"mode": "FAST_COMPILE"},
        )  # fmt: skip
    np.testing.assert_allclose(
        data["posterior_predictive"]["x"], few["posterior"]["x"], rtol=1e-5, atol=1e-6
    )
    assert "x0_a" not in fit.table.index
    assert "x0[a]" in fit.table.index


@pytest.mark.parametrize("first", [0, 2, None], ids=["at the first time", "later", "never"])
@pytest.mark.parametrize("is_positive", [False, True])
def test_the_default_prior_is_wide(first, is_positive):
    """Assert location and width, for states that are observed at the start, later or never."""
    ode = POSITIVE if is_positive else CHAIN
    y = chain_data(ode)
    y[:first, 0] = np.nan
    covs = [pm.gp.cov.Matern52(1, ls=1.0)] * 2
    known = {"states": ode.states, "scales": {"a": 0.3}, "positive": is_positive}
    gp = gm.StateGP(T, y, covs, sigma=0.1, **known)
    mean, sd = default_prior(gp)
    levels = np.log(y) if is_positive else y
    assert mean[0] == pytest.approx(gp.mean[0] if first is None else levels[first, 0])
    least = 5 * 0.5 if is_positive else 20 * max(0.3, abs(mean[0]))
    assert sd[0] == pytest.approx(5 * 0.3 if first == 0 else least)
    assert sd[1] == pytest.approx(5 * gp.scale[1])
    assert mean[1] == pytest.approx(levels[0, 1])


def matched(hidden=False, **priors):
    y = CHAIN.solve(T, (3.0, 0.2), [1.0, 0.4])
    y[2:, 1] = np.nan if hidden else y[2:, 1]
    covs = [pm.gp.cov.Matern52(1, ls=1.0)] * 2
    scales = {"b": 0.5} if hidden else None
    gp = gm.StateGP(T, y, covs, sigma=0.05, states=CHAIN.states, scales=scales)
    settings = {"preset": "fgpgm", "gamma": 0.1, "sigma": "fixed"}
    return gm.build_model(CHAIN, T, y, priors=PRIORS | priors, gp=gp, **settings)


def rates_at_start(model):
    start = model.initial_point()
    return np.exp([start["k_log__"], start["m_log__"]])


def test_parameters_start_where_slopes_match_the_smoothed_data():
    exact = gm.exact_model(matched(k=pm.LogNormal.dist(3, 2)))
    np.testing.assert_allclose(rates_at_start(exact), [1.0, 0.4], rtol=0.2)


def test_a_parameter_with_an_initial_value_keeps_it_and_slopes_match_given_it():
    model = matched()
    model.set_initval(model["k"], 2.0)
    k, m = rates_at_start(gm.exact_model(model))
    assert k == pytest.approx(2.0)
    assert m > 0.6


def test_rates_of_hidden_states_start_where_their_prior_says():
    model = matched(hidden=True)
    np.testing.assert_array_equal(rates_at_start(gm.exact_model(model)), rates_at_start(model))


def test_each_member_of_a_population_starts_at_its_own_rate_and_the_spread_at_its_prior():
    rates, rng = np.array([0.5, 1.0, 2.0]), np.random.default_rng(1)
    given = {
        f"of {k}": gm.Experiment(T, DECAY.solve(T, [2.0], [k]) + rng.normal(0, 0.02, (9, 1)))
        for k in rates
    }

    def population():
        center, spread = pm.Normal("center", 0, 1), pm.HalfNormal("spread", 0.5)
        return {"rate": pm.LogNormal("rate", center, spread, dims="experiment")}

    model = gm.build_model(DECAY, experiments=given, priors=population, preset="fgpgm", **QUICK)
    start = gm.exact_model(model).initial_point()
    np.testing.assert_allclose(np.exp(start["rate_log__"]), rates, rtol=0.2)
    assert np.exp(start["spread_log__"]) == pytest.approx(0.5)


def test_what_cannot_be_an_exact_model_is_refused():
    with pytest.raises(ValueError, match=r"expected a gm\.GradientMatchingODE among these"):
        gm.exact_model(pm.Model())
    y = chain_data()
    with pm.Model() as model:
        x = quick_gp(CHAIN, T, y).prior("x")
        theta = {"k": pm.HalfNormal("k", 1), "m": x[0, 0]}
        pm.Normal("y", x, 0.1, observed=y)
        gm.GradientMatchingODE("match", CHAIN, x, theta, gp=quick_gp(CHAIN, T, y), gamma=0.1)
    with pytest.raises(ValueError, match="parameters of 'match' depend on the states"):
        gm.exact_model(model)


APART = gm.ODE(lambda t, x, theta: [-theta.k * x.a, -theta.m * x.b], ["a", "b"], ["k", "m"])


@pytest.mark.parametrize("prior", [pm.Flat, pm.HalfFlat])
@pytest.mark.parametrize("state", ["a", "b"])
def test_a_flat_prior_is_improper_where_no_data_determine_the_start(prior, state):
    """Assert it of a start that is observed, and of one that is not, nor drives what is."""
    y = chain_data(APART, x0=(3.0, 1.0))
    y[:, 1] = np.nan
    covs = [pm.gp.cov.Matern52(1, ls=1.0)] * 2
    gp = gm.StateGP(T, y, covs, sigma=0.1, states=APART.states, scales={"b": 1.0})
    start = {"b": pm.Normal.dist(1, 1)} | {state: prior.dist()}
    target = ExactPosterior(
        gm.build_model(
            APART, T, y, priors=PRIORS, gp=gp, start=start, gamma=0.1, sigma="fixed", preset="fgpgm"
        )
    )
    point = target.start_point({"k": 1.0}, [np.array([3.0, 1.0])])
    assert target.improper_coordinates(point, np.full(len(point), 0.3)) == (
        ["x0[b]"] if state == "b" else []
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # draws go to 1e150
def test_an_improper_posterior_is_named():
    y = chain_data(APART, x0=(3.0, 1.0))
    y[:, 1] = np.nan
    fit = gm.fit(
        APART, T, y, priors=PRIORS, start={"b": pm.Flat.dist()}, scales={"b": 1.0}, **QUICK
    )
    assert not fit.is_exact
    assert "does not fall off along x0[b], of flat prior" in fit.verdict
    assert fit.default_starts == ["x0[a]"]
    assert "x0[a] has a wide default prior" in repr(fit)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_positive_state_that_was_not_measured_at_first_is_found(seed):
    """Assert it where a flat prior of the logarithm gave draws down to 1e-13."""
    t = np.linspace(0, 6, 13)
    x = POSITIVE.solve(t, [3.0, 0.2], [1.0, 0.4])
    y = x * np.exp(0.1 * np.random.default_rng(seed).normal(size=x.shape))
    y[0, 1] = np.nan
    priors = {name: pm.LogNormal.dist(0, 1) for name in POSITIVE.params}
    fit = gm.fit(POSITIVE, t, y, priors=priors, random_seed=seed, progressbar=False)
    assert fit.is_exact
    start = fit.idata["posterior"]["x0"].sel(state="b").to_numpy()
    assert start.min() > 1e-6
    low, high = np.quantile(start, [0.025, 0.975])
    assert low < 0.2 < high


HIDDEN_SWING = gm.ODE(
    lambda t, x, theta: [-theta.k * x.y + 1e-4 * x.u, theta.w * x.v, -theta.w * x.u],
    ["y", "u", "v"],
    ["k", "w"],
)


def fit_of_swing(rng, fastest):
    """Fit data that hardly depend on a state whose frequency is unknown."""
    t = np.linspace(0, 4, 13)
    x = HIDDEN_SWING.solve(t, [1.0, 1.0, 0.0], {"k": 0.5, "w": 1.0})
    y = pd.DataFrame({"y": x[:, 0] + rng.normal(0, 0.02, 13)})
    priors = {"k": pm.HalfNormal.dist(1), "w": pm.Uniform.dist(0, fastest)}
    return gm.fit(
        HIDDEN_SWING, t, y, priors=priors, start={"u": 1.0, "v": 0.0}, random_seed=1,
        progressbar=False,
    )  # fmt: skip


@pytest.mark.slow
def test_what_takes_many_steps_is_as_likely_as_it_is(rng):
    """Assert the prior's share above 500 of w up to 2 000, within five Monte Carlo errors."""
    fit = fit_of_swing(rng, 2_000)
    share = float((fit.idata["posterior"]["w"] > 500).mean())
    assert fit.is_exact
    assert abs(share - 0.75) < 5 * np.sqrt(0.75 * 0.25 / fit.n_effective)


@pytest.mark.slow
def test_the_verdict_reports_draws_that_run_out_of_steps(rng, monkeypatch):
    monkeypatch.setattr(solving, "MAX_STEPS", 500)
    fit = fit_of_swing(rng, 500)
    assert not fit.is_exact
    assert "of the solutions of draws of the prior were out of steps" in fit.verdict
    assert "narrower priors" in fit.verdict
    assert fit.failures["out of steps"] > 1e-3 * fit.n_solutions

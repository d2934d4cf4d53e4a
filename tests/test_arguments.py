"""Refused arguments, names, labels, data and priors, and their messages."""

import warnings

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest
import scipy.stats
from pytensor.graph.traversal import ancestors

import pymc_gradmatch as gm
from pymc_gradmatch.ode import Solver


@pytest.mark.parametrize(
    ("rhs", "message"),
    [
        (lambda y, t, p: [p[0] * y[0], y[1]], "indexes t"),
        (lambda y, t, p: [p.k * y, y], "second argument .* called t, but is given the states"),
        (lambda x, t, p: [p.k, 1.0], "second argument .* called t, but is given the states"),
        (lambda u, p, t: [u, u], "third argument .* called t, but is given the parameters"),
        (lambda t, x, theta: [x.a * (t - t[0]), x.b], "indexes t"),
        (lambda t, x, theta: [x.a / x.a[0], x.b], "indexes state 'a'"),
    ],
)
def test_a_right_hand_side_in_another_order_or_of_single_times_is_refused(rhs, message):
    with pytest.raises(ValueError, match=rf"{message}.*\(t, x, theta\).*odeint"):
        gm.ODE(rhs, ["a", "b"], ["k"])


@pytest.mark.parametrize(
    "rhs",
    [
        lambda t, x, theta: [pt.sum(pt.stack([x.a, x.b])), x.b],
        lambda t, x, theta: [x.a / pm.math.max(x.a), x.b],
        lambda t, x, theta: [pt.dot(x.a, x.b), x.b],
        lambda t, x, theta: [x.a - t.mean(), x.b],
        lambda t, x, theta: [pt.cumsum(x.a) * theta.k, x.b],
    ],
)
def test_a_right_hand_side_that_mixes_times_is_refused_with_what_x_is(rhs):
    with pytest.raises(
        ValueError, match=r"'a' .* x\.a holds the state at all times.* x\.a \+ x\.b"
    ):
        gm.ODE(rhs, ["a", "b"], ["k"])


def test_an_input_that_is_summed_over_times_is_refused():
    with pytest.raises(ValueError, match="at other times"):
        gm.ODE(lambda t, x, theta, u: [u.dose.sum() - x.a], ["a"], ["k"], inputs=["dose"])


@pytest.mark.parametrize(
    "of_all",
    [
        lambda x: x.a + x.b,
        lambda x: pt.sum(pt.stack(x), axis=0),
        lambda x: pt.dot(np.ones(2), pt.tanh(pt.stack(x))),
    ],
)
def test_sums_over_states_are_accepted(of_all):
    gm.ODE(lambda t, x, theta: [theta.k * of_all(x), -x.b], ["a", "b"], ["k"])


def test_a_right_hand_side_that_changes_with_calls_or_with_the_number_of_times_is_refused():
    calls = iter(range(10**9))
    for rhs in (
        lambda t, x, theta: [theta.k * x.a * next(calls)],
        lambda t, x, theta: [theta.k * x.a * x.a.shape[0]],
    ):
        with pytest.raises(ValueError, match=r"how many times there are.* from call to call"):
            gm.ODE(rhs, ["a"], ["k"])


def test_a_failing_call_in_odeints_order_is_told_the_order():
    def rhs(y, t, p):
        a, b = y
        return [p.k * a, b]

    with pytest.raises(TypeError, match=r"too many values.*not \(x, t, theta\), as for odeint"):
        gm.ODE(rhs, ["a", "b"], ["k"])


def test_time_without_a_state_warns_unless_an_argument_is_named_t():
    with pytest.warns(UserWarning, match=r"time enters .* none of the states \['a'\] does"):
        gm.ODE(lambda y, s, p: [-p.k * y], ["a"], ["k"])


@pytest.mark.parametrize(
    "rhs",
    [
        lambda t, x, theta: [theta.k],
        lambda t, x, theta: [theta.k * pm.math.sin(t)],
        lambda time, x, theta: [1.0 + time],
        lambda a, b, c: [c.k],
        lambda _, x, t: [t.k * x.a],  # parameters called t
        lambda t, x, theta: [theta.k * t[:] * (x.a[..., None] * np.ones(2)).sum(-1)],
        lambda *arguments: [arguments[2].k * arguments[1].a],
    ],
)
def test_correct_models_do_not_warn(rhs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm.ODE(rhs, ["a"], ["k"])


@pytest.fixture(scope="module")
def growth():
    """Return an ODE without a state in it."""
    return gm.ODE(lambda t, x, theta: [theta.k], ["a"], ["k"])


def test_an_ode_without_a_state_in_it_is_integrated(growth):
    t = np.array([0.0, 1.0, 3.0])
    np.testing.assert_allclose(growth.solve(t, [1.0], [2.0])[:, 0], 1 + 2 * t)
    batch = Solver(growth.equations(), t)(np.ones((2, 1)), np.array([[2.0], [-1.0]])).x
    np.testing.assert_allclose(batch[..., 0], [1 + 2 * t, 1 - t], atol=1e-9)


@pytest.mark.slow
def test_an_ode_without_a_state_in_it_is_fitted(growth, rng):
    t = np.linspace(0, 3, 9)
    y = (1 + 2 * t + rng.normal(0, 0.1, 9))[:, None]
    model = gm.build_model(
        growth, t, y, priors={"k": pm.Normal.dist(0, 5)}, preset="refined", random_seed=1
    )
    found = gm.find_MAP(model=model, random_seed=1)
    assert abs(found["k"] - 2) < 0.3  # five standard errors of a line's slope are 0.19


TIMES = np.linspace(0, 4, 9)


@pytest.fixture(scope="module")
def exchange():
    return gm.ODE(lambda t, x, theta: [-theta.r * x.b, -theta.r * x.a], ["a", "b"], ["r"])


@pytest.fixture(scope="module")
def two():
    """Return observations of two states that cannot be told by their size alone."""
    return np.stack([np.exp(-TIMES), 2 * np.exp(-TIMES) + 0.1 * TIMES], axis=1)


def process(y, t=TIMES, sigma=0.05):
    return gm.StateGP(t, y, [pm.gp.cov.ExpQuad(1, ls=2.0)] * np.shape(y)[1], sigma=sigma)


def four_lines(ode, gp, y, *, theta, gamma=lambda: 0.1, coords=None, **prior):
    """Write the four lines; theta and gamma are functions, called inside of the model."""
    with pm.Model(coords=coords) as model:
        x = gp.prior("x", **prior)
        pm.Normal("y", x, gp.sigma, observed=y)
        gm.GradientMatchingODE("gradient_match", ode, x, theta(), gp=gp, gamma=gamma())
    return model


def half_normal():
    return {"r": pm.HalfNormal("r")}


def test_swapped_labels_of_states_are_refused_whoever_makes_the_states(exchange, two):
    gp, coords = process(two), {"state": ["b", "a"]}
    message = r"coord 'state' is \['b', 'a'\], the states of the ODE are \['a', 'b'\]"
    for parameterization in ("centered", "whitened"):
        with pytest.raises(ValueError, match=message):
            four_lines(
                exchange, gp, two,
                theta=half_normal, coords=coords, parameterization=parameterization,
            )  # fmt: skip
    with pm.Model(coords=coords | {"time": TIMES}):
        x, theta = pm.Normal("mine", shape=(9, 2), dims=("time", "state")), half_normal()
        with pytest.raises(ValueError, match=message):
            gm.GradientMatchingODE("match", exchange, x, theta, gp=gp, gamma=0.1)
    with pm.Model(coords=coords) as model, pytest.raises(ValueError, match=message):
        gm.build_model(
            exchange, TIMES, two, priors={"r": pm.HalfNormal.dist()}, gp=gp, preset="fgpgm"
        )
    assert not model.named_vars


def test_states_without_labels_get_those_of_the_ode(exchange, two):
    gp = process(two)
    by_hand = four_lines(exchange, gp, two, theta=half_normal)
    built = gm.build_model(
        exchange,
        TIMES,
        two,
        priors={"r": pm.HalfNormal.dist()},
        gp=gp,
        sigma="fixed",
        preset="fgpgm",
    )
    for model in (by_hand, built):
        assert model.coords["state"] == ("a", "b")
        draws = pm.sample_prior_predictive(
            2, model=model, random_seed=1, compile_kwargs={"mode": "FAST_COMPILE"}
        )
        x = draws["prior"]["x"]
        np.testing.assert_array_equal(x.sel(state="a"), x[..., 0])
    numbered = four_lines(exchange, gp, two, theta=half_normal, coords={"state": [0, 1]})
    assert numbered.coords["state"] == (0, 1)


@pytest.fixture(scope="module")
def experiments(rng_of_module):
    """Return one model of two experiments, with times of their own and one rate."""
    decay = gm.ODE(lambda t, x, theta: [-theta.r * x.a], ["a"], ["r"])
    with pm.Model() as model:
        theta = {"r": pm.HalfNormal("r", 2)}
        for name, t, start in [("1", np.linspace(0, 2, 9), 1.0), ("2", np.linspace(0, 3, 12), 2.0)]:
            y = start * np.exp(-t)[:, None] + rng_of_module.normal(0, 0.03, (len(t), 1))
            gp, dims = process(y, t, sigma=0.03), (f"time{name}", "state")
            x = gp.prior(f"x{name}", dims=dims)
            pm.Normal(f"y{name}", x, gp.sigma, observed=y, dims=dims)
            gm.GradientMatchingODE(f"match{name}", decay, x, theta, gp=gp, gamma=0.01)
    return model


@pytest.fixture(scope="module")
def rng_of_module():
    return np.random.default_rng(20190416)


def test_two_experiments_have_times_of_their_own_in_one_model(experiments):
    dims = experiments.named_vars_to_dims
    for name, n_times in {"1": 9, "2": 12}.items():
        assert dims[f"x{name}"] == dims[f"match{name}"] == (f"time{name}", "state")
        assert len(experiments.coords[f"time{name}"]) == n_times
    assert experiments.coords["state"] == ("a",)


@pytest.mark.slow
def test_two_experiments_are_sampled_by_pymc_and_by_us(experiments):
    ours = gm.sample(500, chains=2, model=experiments, random_seed=1, progressbar=False)
    with experiments:
        theirs = pm.sample(
            500, tune=500, chains=2, cores=1, random_seed=1, progressbar=False, quiet=True
        )
    rates = [idata["posterior"]["r"] for idata in (ours, theirs)]
    # Both have the mean 0.84 with an sd of 0.022; each alone, which smooths, 0.82 and 0.89.
    for statistic in ("mean", "std"):
        one, other = (float(getattr(rate, statistic)()) for rate in rates)
        method = {"mean": "mean", "std": "sd"}[statistic]
        errors = [float(az.mcse(rate, method=method)) for rate in rates]
        assert abs(one - other) < 5 * np.hypot(*errors), statistic
    for idata in (ours, theirs):
        assert idata["posterior"]["x2"].dims == ("chain", "draw", "time2", "state")


def test_times_of_another_length_are_told_how_to_be_named(two):
    gp = process(two)
    with (
        pm.Model(coords={"time": np.arange(20)}) as model,
        pytest.raises(ValueError, match=r"'time' has 20 values.*gp\.prior\(\"x2\", dims="),
    ):
        gp.prior("x")
    assert list(model.coords) == ["time"]
    with pm.Model(), pytest.raises(ValueError, match=r"dims are 'time'; expected the names of 2"):
        gp.prior("x", dims="time")


@pytest.fixture(scope="module")
def decay():
    return gm.ODE(lambda t, x, theta: [-theta.r * x.a], ["a"], ["r"])


@pytest.fixture(scope="module")
def one():
    return np.exp(-TIMES)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))


@pytest.fixture(scope="module")
def gp_of_one(one):
    return process(one)


PRIORS = {"r": pm.HalfNormal.dist(1)}


@pytest.mark.slow
@pytest.mark.parametrize("road", ["four lines", "build_model"])
def test_pm_data_are_fitted_and_stay_what_is_observed(decay, one, road):
    with pm.Model() as model:
        t, y = pm.Data("t", TIMES), pm.Data("pelts", one)
        gp = gm.fit_gp(t, y, cov="ExpQuad", random_seed=1)
        if road == "build_model":
            gm.build_model(decay, t, y, priors=PRIORS, gp=gp, preset="fgpgm")
        else:
            x = gp.prior("x")
            pm.Normal("y", x, gp.sigma, observed=y)
            gm.GradientMatchingODE("match", decay, x, half_normal(), gp=gp, gamma=0.1)
    np.testing.assert_array_equal(gp.y, one)
    assert model["pelts"] in ancestors([model.rvs_to_values[model["y"]]])
    logp = model.compile_logp(model["y"], mode="FAST_COMPILE")
    point = model.initial_point()
    before = logp(point)
    with model:
        pm.set_data({"pelts": one + 0.1})
    assert logp(point) < before - 1
    with pytest.warns(UserWarning, match=r"pm.Data \['pelts'\] were set after .* Build the model"):
        gm.find_MAP(model=model, random_seed=1)


@pytest.mark.slow
def test_data_that_were_not_set_anew_are_no_reason_to_warn(decay, one, gp_of_one):
    with pm.Model() as model:
        y = pm.Data("pelts", one)
        pm.Data("other", one[:3])
        gm.build_model(decay, TIMES, y, priors=PRIORS, gp=gp_of_one, preset="fgpgm")
        pm.set_data({"other": one[:3] + 1})
    gm.find_MAP(model=model, random_seed=1)  # warnings are errors


def test_symbols_without_a_value_are_no_data(one):
    with pytest.raises(TypeError, match="y is a symbolic TensorVariable; expected numbers, or pm"):
        gm.fit_gp(TIMES, pt.matrix("y"), cov="ExpQuad")


CLASHING = ["sigma", "x", "y", "x0", "gamma", "gradient_match"]


@pytest.fixture(scope="module")
def clashing():
    """Return an ODE whose parameters have all names that build_model uses."""

    def rhs(t, state, p):
        return [-sum(p) * state.x]

    return gm.ODE(rhs, ["x"], CLASHING)


@pytest.mark.slow
def test_names_of_parameters_take_precedence(clashing, one):
    priors = dict.fromkeys(CLASHING, pm.HalfNormal.dist(0.3))
    model = gm.build_model(
        clashing, TIMES, one, priors=priors, gp=process(one),
        sigma="random", gamma=pm.HalfNormal.dist(0.1), preset="fgpgm",
    )  # fmt: skip
    names = ["x_", "sigma_", "gamma_", "y_", "gradient_match_"]
    assert sorted(model.named_vars) == sorted(CLASHING + names)
    assert model.named_vars_to_dims["x_"] == ("time", "state")
    found = gm.find_MAP(model=model, random_seed=1)
    assert found["x_"].shape == (9, 1)
    assert found["x"].shape == ()


@pytest.mark.slow
def test_parameters_with_our_names_are_refined_and_fitted_many_times(clashing, one):
    priors = dict.fromkeys(CLASHING, pm.HalfNormal.dist(0.3))
    settings = {"draws": 50, "tune": 50, "progressbar": False, "random_seed": 1}
    fits = gm.fit_many(
        clashing, TIMES, [one], priors=priors, preset="refined", chains=1, n_jobs=1, **settings
    )
    assert fits["failure"].item() == ""
    assert {"sigma", "sigma_", "x", "x_"} <= set(fits)
    assert fits["x"].dims == ("replicate", "chain", "draw")


@pytest.mark.slow
def test_parameters_with_our_names_are_moved_by_metropolis(clashing, one):
    priors = dict.fromkeys(CLASHING, pm.HalfNormal.dist(0.3))
    model = gm.build_model(
        clashing, TIMES, one, priors=priors, gp=process(one), sigma="random", preset="fgpgm"
    )
    chain = gm.sample_fgpgm(model, 5, burn_in=5, progressbar=False, random_seed=1)
    assert {"sigma", "sigma_", "x", "x_"} <= set(chain["posterior"])


@pytest.mark.slow
def test_renamed_states_and_data_are_plotted(one):
    ode = gm.ODE(lambda t, state, p: [-p.x * p.y * state.mass], ["mass"], ["x", "y"])
    known = {"x": pm.HalfNormal.dist(2), "y": pm.LogNormal.dist(0, 0.1)}
    fit = gm.fit(ode, TIMES, one, priors=known, n_draws=1_000, random_seed=1, progressbar=False)
    pc = fit.plot()
    assert pc.viz["plot"].sizes["state"] == 1
    assert "data" in pc.viz


@pytest.mark.parametrize("name", ["chain", "draw", "time", "state", "time_observed"])
def test_reserved_names_are_refused_before_anything_is_added(one, gp_of_one, name):
    ode = gm.ODE(lambda t, x, theta: [-theta[0] * x.a], ["a"], [name])
    message = rf"reserved names: '{name}' \(.*Expected other names than \['chain', 'draw'"
    with pm.Model() as model:
        with pytest.raises(ValueError, match=message):
            gm.build_model(
                ode, TIMES, one, priors={name: PRIORS["r"]}, gp=gp_of_one, preset="fgpgm"
            )
        assert not model.named_vars
        assert not model.coords
        # Under another name in the model it is welcome.
        theta = {name: pm.HalfNormal("other")}
        gm.build_model(ode, TIMES, one, priors=theta, gp=gp_of_one, preset="fgpgm")


def test_a_variable_that_arviz_would_lose_is_refused_in_the_four_lines(decay, one, gp_of_one):
    with pytest.raises(ValueError, match=r"reserved names: 'draw' \(a dim of draws in ArviZ\)"):
        four_lines(decay, gp_of_one, one, theta=lambda: {"r": pm.HalfNormal("draw")})


def test_fit_many_refuses_no_data_and_names_of_its_result(decay, one):
    for nothing in ([], np.empty((0, 9, 1)), None):
        with pytest.raises(ValueError, match=r"no data sets; expected shape \(replicate, time"):
            gm.fit_many(decay, TIMES, nothing, priors=PRIORS)
    ode = gm.ODE(lambda t, x, theta: [-theta.failure * x.a], ["a"], ["failure"])
    with pytest.raises(ValueError, match="reserved names: 'failure'"):
        gm.fit_many(ode, TIMES, [one], priors={"failure": PRIORS["r"]})


def test_a_prior_of_gamma_becomes_a_variable(decay, one, gp_of_one):
    model = gm.build_model(
        decay,
        TIMES,
        one,
        priors=PRIORS,
        gp=gp_of_one,
        gamma=pm.HalfNormal.dist(0.3),
        sigma="fixed",
        preset="fgpgm",
    )
    assert [rv.name for rv in model.free_RVs] == ["r", "x", "gamma"]
    assert np.isfinite(model.compile_logp(mode="FAST_COMPILE")(model.initial_point()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "prior",
    [
        pm.Mixture.dist([0.2, 0.8], [pm.LogNormal.dist(0, 0.1), pm.LogNormal.dist(1, 0.1)]),
        pm.NormalMixture.dist([0.2, 0.8], mu=[0, 1], sigma=[0.1, 0.1]),
        pm.Truncated.dist(pm.Normal.dist(1, 1), lower=0),
    ],
)
@pytest.mark.parametrize("preset", ["fgpgm", "refined"])
def test_distributions_made_of_others_are_priors(decay, one, preset, prior):
    settings = {"preset": preset, "random_seed": 1, "progressbar": False}
    model = gm.build_model(decay, TIMES, one, priors={"r": prior}, **settings, sigma="fixed")
    assert np.isfinite(model.compile_logp(mode="FAST_COMPILE")(model.initial_point()))
    assert 0 < gm.find_MAP(model=model, progressbar=False)["r"] < 3


def test_distributions_outside_of_the_model_are_refused_in_the_four_lines(decay, one, gp_of_one):
    with pytest.raises(ValueError, match=r"gamma or sigma depend on 1 random .* not in the model"):
        four_lines(decay, gp_of_one, one, theta=half_normal, gamma=lambda: pm.HalfNormal.dist(0.3))


FROZEN = scipy.stats.halfnorm(scale=2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gamma": FROZEN}, TypeError, "gamma is a rv_continuous_frozen.*a positive number"),
        ({"gamma": "auto"}, TypeError, "gamma is a str, 'auto'; expected a positive number"),
        ({"sigma": FROZEN}, TypeError, "sigma is a .*expected 'fixed', 'random', a prior"),
        ({"sigma": 0}, ValueError, r"sigma is 0 at t = 0, state .*; expected positive numbers"),
        ({"priors": None}, TypeError, r"priors are a NoneType; expected a mapping .*\['r'\]"),
        ({"priors": "normal"}, TypeError, "priors are a str; expected a mapping"),
        ({"priors": {"r": FROZEN}}, TypeError, "prior of 'r' is a rv_continuous_frozen; expected"),
        ({"priors": {"r": None}}, TypeError, "prior of 'r' is a NoneType; expected a distribution"),
        ({"priors": {"r": "normal"}}, TypeError, "prior of 'r' is a str; expected a distribution"),
        (
            {"priors": {"r": pm.Poisson.dist(3)}, "preset": "refined"},
            TypeError,
            "prior of 'r' is discrete; expected a continuous one",
        ),
        (
            {"priors": {"r": pm.HalfFlat.dist()}, "preset": "refined"},
            ValueError,
            "cannot be drawn from .*Expected proper distributions",
        ),
        (
            {"priors": {"r": pm.HalfNormal.dist(pm.HalfNormal.dist())}},
            ValueError,
            "1 random variables that are not in the model",
        ),
        ({"preset": ["fgpgm"]}, ValueError, r"preset is \['fgpgm'\]; expected one of"),
        ({"parameterization": "round"}, ValueError, "parameterization is 'round'; expected"),
    ],
)
def test_unusable_arguments_are_refused_and_leave_the_model_unchanged(
    decay, one, gp_of_one, change, error, message
):
    with pm.Model() as model:
        pm.Normal("mine")
        with pytest.raises(error, match=message):
            gm.build_model(
                decay, TIMES, one, **{"priors": PRIORS, "gp": gp_of_one, "preset": "fgpgm"} | change
            )
    assert list(model.named_vars) == ["mine"]
    assert not model.coords


def test_a_failed_build_leaves_the_model_unchanged(decay, one, gp_of_one):
    for name in ("x", "y", "gradient_match", "r"):
        with pm.Model() as model:
            pm.Normal(name)
            with pytest.raises(ValueError, match=rf"already has variables .*called \['{name}'\]"):
                gm.build_model(decay, TIMES, one, priors=PRIORS, gp=gp_of_one, preset="fgpgm")
        assert list(model.named_vars) == [name]
        assert not model.coords
    for coords in ({"time": [0, 1, 2]}, {"state": ["a", "b"]}, {"state": ["b"]}):
        with pm.Model(coords=coords) as model, pytest.raises(ValueError, match="the model's coord"):
            gm.build_model(decay, TIMES, one, priors=PRIORS, gp=gp_of_one, preset="fgpgm")
        assert not model.named_vars
        assert set(model.coords) == set(coords)


@pytest.mark.slow
def test_a_prior_that_cannot_be_drawn_from_needs_a_start(decay, one, gp_of_one):
    model = gm.build_model(
        decay,
        TIMES,
        one,
        priors={"r": pm.HalfFlat.dist()},
        gp=gp_of_one,
        sigma="fixed",
        preset="fgpgm",
    )
    with pytest.raises(ValueError, match=r"cannot be drawn from its prior .*`initval`"):
        gm.sample(model=model)
    started = four_lines(decay, gp_of_one, one, theta=lambda: {"r": pm.HalfFlat("r", initval=1.0)})
    assert abs(gm.find_MAP(model=started, random_seed=1)["r"] - 1) < 0.5


@pytest.mark.slow
def test_values_that_are_not_numbers_are_refused(decay, one, gp_of_one):
    with pytest.raises(TypeError, match=r"sigma is a rv_continuous_frozen.*expected one number"):
        process(one, sigma=FROZEN)
    with pytest.raises(TypeError, match="nugget is a str, 'small'; expected one number"):
        gm.fit_gp(TIMES, one, cov="ExpQuad", nugget="small")
    with pytest.raises(TypeError, match=r"n_starts is 2\.5; expected a whole number"):
        gm.fit_gp(TIMES, one, cov="ExpQuad", n_starts=2.5)
    with pytest.raises(TypeError, match=r"y is a .*; expected numbers"):
        gm.fit_gp(TIMES, [["a"]] * 9, cov="ExpQuad")


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ({"draws": 0}, ValueError, "draws is 0; expected at least one"),
        ({"draws": "many"}, TypeError, "draws is 'many'; expected a whole number"),
        ({"chains": 0}, ValueError, "chains is 0; expected at least one"),
        ({"tune": -1}, ValueError, "tune is -1; expected at least one"),
    ],
)
def test_counts_are_checked_before_anything_is_compiled(
    decay, one, gp_of_one, counts, error, message
):
    model = gm.build_model(
        decay, TIMES, one, priors=PRIORS, gp=gp_of_one, sigma="fixed", preset="fgpgm"
    )
    with pytest.raises(error, match=message):
        gm.sample(model=model, **counts)
    with pytest.raises(error, match=message):
        gm.fit_many(decay, TIMES, [one], priors=PRIORS, **counts)
    with pytest.raises(ValueError, match="burn_in is -1; expected at least zero"):
        gm.sample_fgpgm(model, burn_in=-1)


def test_a_kernel_that_is_the_same_at_all_times_is_refused(one):
    message = r"the kernel Constant\(.* is constant in time"
    with pytest.raises(ValueError, match=message):
        gm.StateGP(TIMES, one, [pm.gp.cov.Constant(1.0)], sigma=0.1)
    with pytest.raises(ValueError, match=message):
        gm.fit_gp(TIMES, one, cov=pm.gp.cov.Constant, bounds={"c": (0.1, 2.0)})
    gm.StateGP(TIMES, one, [pm.gp.cov.Constant(1.0) + pm.gp.cov.ExpQuad(1, ls=2.0)], sigma=0.1)


def test_a_start_whose_gradient_is_nan_is_refused(gp_of_one, one):
    """Assert it for x ** k, whose derivative by k has log x: at x < 0 and a whole k, NaN."""
    ode = gm.ODE(lambda t, x, theta: [-((x.a - 2.0) ** theta.r)], ["a"], ["r"])
    with pytest.raises(ValueError, match="is finite, but its derivative by r is not"):
        four_lines(ode, gp_of_one, one, theta=lambda: {"r": pm.Normal("r", 2, 1)})
    with pm.Model() as model, pytest.raises(ValueError, match="its derivative by r is not"):
        gm.build_model(
            ode, TIMES, one, priors={"r": pm.Normal.dist(2, 1)}, gp=gp_of_one, preset="fgpgm"
        )
    assert not model.named_vars
    four_lines(ode, gp_of_one, one, theta=lambda: {"r": 2.0})  # known: no slope is needed


def test_estimates_inside_their_bounds_are_not_called_at_them_however_small(even_noise):
    """Assert it for times in units so small that all bounds are below 1e-8."""
    y = np.exp(-TIMES)[:, None] + 0.05 * even_noise(len(TIMES), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm.fit_gp(1e-10 * TIMES, y, cov="ExpQuad", random_seed=1)


def table_of_two() -> pd.DataFrame:
    """Return data of a state that decays into another, at uneven times."""
    times = np.array([0, 0.4, 0.9, 1.7, 2.1, 3.6])
    a = np.exp(-times)
    return pd.DataFrame({"a": a, "b": 1 - a}, index=times)


RATE = {"k": pm.HalfNormal.dist(2)}
TWO = gm.ODE(lambda t, x, theta: [-theta.k * x.a, theta.k * x.a], ["a", "b"], ["k"])


@pytest.mark.parametrize("kind", ["Int64", "pyarrow", "object"])
def test_pandas_missing_values_are_missing(kind):
    table = (table_of_two() * 10).round()
    with_nan = table.mask(table["a"] == 7.0, np.nan)
    as_kind = with_nan.astype("int64[pyarrow]" if kind == "pyarrow" else kind)
    if kind == "object":
        as_kind = as_kind.where(with_nan.notna(), pd.NA)
    assert as_kind.isna().any(axis=None)
    members = [
        gm.build_model(TWO, y.index, y, priors=RATE, preset="fgpgm") for y in (with_nan, as_kind)
    ]
    one, other = (model.rvs_to_values[model["y"]].eval() for model in members)
    np.testing.assert_array_equal(one, other)


def test_text_in_a_table_is_refused_with_how_to_read_it():
    table = table_of_two().astype(object)
    table.iloc[3, 0] = "<0.5"
    with pytest.raises(TypeError, match=r"'a' is '<0\.5' in row 3; .*pd\.to_numeric.*decimal=','"):
        gm.fit(TWO, table.index, table, priors=RATE)


def test_columns_that_are_no_states_are_refused_with_how_to_mend_them():
    table = table_of_two().rename(columns={"a": "A (mM)"})
    with pytest.raises(ValueError, match=r"unknown \['A \(mM\)'\].*y\.rename\(columns=.*y\[\["):
        gm.fit(TWO, table.index, table, priors=RATE)


@pytest.mark.parametrize(
    ("times", "order"),
    [(np.arange(6.0), slice(None)), (None, [1, 0, 2, 3, 4, 5])],
    ids=["rows counted", "times sorted, rows not"],
)
def test_a_table_with_other_times_than_t_is_refused(times, order):
    table = table_of_two()
    t = table.index if times is None else times
    with pytest.raises(ValueError, match=r"its index is not t in any unit.* t = y\.index"):
        gm.fit(TWO, t, table.iloc[order], priors=RATE)


@pytest.mark.parametrize(
    ("times_of", "index"),
    [
        (lambda table: table.index / 60 + 7, None),
        (lambda table: table.index, range(6)),
        (lambda table: table.index, [3, 1, 4, 2, 9, 5]),
    ],
    ids=["another unit and zero", "rows", "rows of a longer table"],
)
def test_a_table_in_another_unit_of_time_or_with_rows_as_index_is_taken(times_of, index):
    table = table_of_two()
    t = times_of(table)
    if index is not None:
        table.index = index
    assert "y" in gm.build_model(TWO, np.asarray(t), table, priors=RATE, preset="fgpgm").named_vars


def test_a_series_is_a_table_of_one_column():
    table = table_of_two()
    as_table, as_series = (
        gm.build_model(TWO, table.index, y, priors=RATE, preset="fgpgm")
        for y in (table[["b"]], table["b"])
    )
    one, other = (model.rvs_to_values[model["y"]].eval() for model in (as_table, as_series))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "rhs",
    [
        lambda t, x, theta: [-theta["k"] * x["a"], x.b],
        lambda t, x, k: [-k * x.a, x.b],
        lambda t, x, k, m: [-k * x.a, m * x.b],
    ],
    ids=["as a dict", "theta is a number", "parameters as arguments"],
)
def test_a_right_hand_side_that_misreads_theta_is_told_what_it_is(rhs):
    with pytest.raises(TypeError, match=r"named tuples: write x\.state and theta\.parameter"):
        gm.ODE(rhs, ["a", "b"], ["k"])


def test_counts_whose_mean_starts_at_zero_are_refused():
    counted = [3, 2, 5, 6, 7, 9]

    def seen(x, theta):
        pm.Poisson("seen", x.b, observed=counted)

    with pytest.raises(ValueError, match=r"zero at seen\[0\] = 3 .*prior, or .*maximum"):
        gm.fit(
            TWO, range(6), likelihood=seen, priors=RATE, start={"a": 9.0, "b": 0.0},
            progressbar=False, random_seed=1,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "lacks"),
    [
        ({"ode": TWO, "t": [0, 1, 2], "priors": {}}, "y"),
        ({"ode": TWO, "t": [0, 1, 2], "y": table_of_two()}, "priors"),
        ({"ode": TWO, "priors": {}, "likelihood": print}, "t"),
        ({}, "ode, priors, t, y"),
    ],
)
def test_missing_arguments_of_fit_are_named(given, lacks):
    with pytest.raises(TypeError, match=f"gm.fit was not given {lacks}; expected"):
        gm.fit(**given)


@pytest.mark.parametrize("several", [False, True])
def test_data_in_y_that_a_likelihood_leaves_out_are_warned_of(several):
    table, quiet = table_of_two(), {"priors": RATE, "random_seed": 1, "progressbar": False}

    def of_b(x, theta):
        pm.Normal("seen", x.b, 0.1, observed=table["b"])

    def fit_of(y):
        if several:
            one = gm.Experiment(table.index, y, likelihood=of_b)
            return gm.fit(TWO, experiments={"first": one, "second": one}, **quiet)
        return gm.fit(TWO, table.index, y, likelihood=of_b, **quiet)

    with pytest.warns(UserWarning, match=r"y has data of \['a'\] that no line .* leave them out"):
        fit_of(table)
    fit_of(table[["b"]])


def test_a_potential_may_be_of_any_data():
    table = table_of_two()

    def of_both(x, theta):
        pm.Potential("told", -50 * pm.math.sum((x.a - x.b - table["a"] + table["b"]) ** 2))

    gm.fit(
        TWO, table.index, table, likelihood=of_both, priors=RATE, random_seed=1, progressbar=False
    )  # fmt: skip

"""build_model: the four lines in one call, its coords, its settings and its messages."""

import numpy as np
import pandas as pd
import pymc as pm
import pytest

import pymc_gradmatch as gm
from benchmarks.paper.systems import keep_within
from pymc_gradmatch.model import constraints


@pytest.fixture
def priors(lotka_volterra):
    return {name: pm.HalfNormal.dist(5) for name in lotka_volterra.ode.params}


@pytest.mark.slow
@pytest.mark.usefixtures("fast_compile")
def test_one_call_is_the_four_lines(lotka_volterra, data, gp, priors):
    ode = lotka_volterra.ode
    with pm.Model() as by_hand:
        theta = {name: pm.HalfNormal(name, 5) for name in ode.params}
        x = gp.prior("x")
        pm.Normal("y", x, gp.sigma, observed=data.y)
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=0.3)
    model = gm.build_model(
        ode,
        data.t,
        data.y,
        priors=priors,
        cov="ExpQuad",
        shared=True,
        gamma=0.3,
        random_seed=1,
        sigma="fixed",
        preset="fgpgm",
    )
    point = by_hand.initial_point()
    here, there = model.point_logps(point), by_hand.point_logps(point)
    assert here == pytest.approx(there, abs=0.01)
    assert model.compile_logp()(point) == pytest.approx(by_hand.compile_logp()(point), rel=1e-10)


def test_the_default_preset_is_the_refined_one():
    ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t = np.linspace(0, 2, 6)
    y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.02, (6, 1))
    given = {"priors": {"rate": pm.HalfNormal.dist(1)}, "random_seed": 1, "progressbar": False}
    default, named = (
        constraints(gm.build_model(ode, t, y, **given, **preset))[0].gp
        for preset in ({}, {"preset": "refined"})
    )
    np.testing.assert_array_equal(default.t, named.t)
    np.testing.assert_array_equal(default.prior_mean, named.prior_mean)


def test_names_dims_and_coords_are_stable(lotka_volterra, data, gp, priors):
    model = gm.build_model(
        lotka_volterra.ode, data.t, data.y, priors=priors, gp=gp, sigma="fixed", preset="fgpgm"
    )
    assert [rv.name for rv in model.free_RVs] == ["alpha", "beta", "gamma", "delta", "x"]
    assert [rv.name for rv in model.observed_RVs] == ["y", "gradient_match"]
    assert model.coords["state"] == ("prey", "predator")
    np.testing.assert_array_equal(model.coords["time"], data.t)
    for name in ("x", "y", "gradient_match"):
        assert model.named_vars_to_dims[name] == ("time", "state")


def test_inside_a_model_it_adds_to_it(lotka_volterra, data, gp):
    with pm.Model() as model:
        rate = pm.Exponential("rate", 1)
        shared_prior = pm.HalfNormal.dist(rate)
        priors = dict.fromkeys(lotka_volterra.ode.params, shared_prior) | {"beta": rate}
        returned = gm.build_model(
            lotka_volterra.ode, data.t, data.y, priors=priors, gp=gp, sigma="fixed", preset="fgpgm"
        )
    assert returned is model
    assert [rv.name for rv in model.free_RVs] == ["rate", "alpha", "gamma", "delta", "x"]


def test_one_prior_for_all_parameters_gives_independent_draws(lotka_volterra, data, gp):
    priors = dict.fromkeys(lotka_volterra.ode.params, pm.HalfNormal.dist(5))
    models = [
        gm.build_model(
            lotka_volterra.ode, data.t, data.y, priors=priors, gp=gp, sigma="fixed", preset="fgpgm"
        )
        for _ in range(2)
    ]
    for model in models:
        variables = [model[name] for name in lotka_volterra.ode.params]
        draws = pm.draw(variables, random_seed=1, mode="FAST_COMPILE")
        assert len(np.unique(draws)) == 4
    assert models[0]["alpha"] is not models[1]["alpha"]


@pytest.mark.slow
def test_preset_is_the_papers_settings(lotka_volterra, data, priors):
    gp = gm.fit_gp(data.t, data.y, cov="ExpQuad", random_seed=1)
    with pytest.raises(
        ValueError, match=r"preset is 'fast'; expected one of \['fgpgm', 'refined'\]"
    ):
        gm.build_model(lotka_volterra.ode, data.t, data.y, priors=priors, preset="fast")
    preset = gm.build_model(
        lotka_volterra.ode,
        data.t,
        data.y,
        priors=priors,
        preset="fgpgm",
        random_seed=1,
        sigma="fixed",
    )
    explicit = gm.build_model(
        lotka_volterra.ode,
        data.t,
        data.y,
        priors=priors,
        gp=gp,
        gamma=0.3,
        sigma="fixed",
        preset="fgpgm",
    )
    point = explicit.initial_point()
    logps = [model.compile_logp(mode="FAST_COMPILE")(point) for model in (preset, explicit)]
    assert logps[0] == pytest.approx(logps[1], rel=1e-10)


def test_the_papers_box_forbids_states_outside(lotka_volterra, data, gp, priors):
    model = gm.build_model(
        lotka_volterra.ode, data.t, data.y, priors=priors, gp=gp, sigma="fixed", preset="fgpgm"
    )
    keep_within(model, 3.0)
    logp = model.compile_logp(mode="FAST_COMPILE")
    point = model.initial_point()
    assert np.isfinite(logp(point))
    point["x_standardized__"][3, 1] = 3.01
    assert logp(point) == -np.inf


def test_table_must_have_the_odes_columns(lotka_volterra, data, priors):
    table = pd.DataFrame(data.y, columns=["prey", "cat"])
    with pytest.raises(ValueError, match=r"columns of y are \['prey', 'cat'\]"):
        gm.build_model(
            lotka_volterra.ode, data.t, table, priors=priors, random_seed=1, preset="fgpgm"
        )


def test_data_with_other_columns_than_the_ode_fail_before_the_fit(lotka_volterra, data, priors):
    with pytest.raises(ValueError, match=r"ODE has 2 states .* the data 1"):
        gm.build_model(lotka_volterra.ode, data.t, data.y[:, :1], priors=priors, preset="fgpgm")


def test_unusable_gamma_leaves_the_users_model_as_it_was(lotka_volterra, data, gp, priors):
    with pm.Model() as model:
        pm.Normal("mine")
        with pytest.raises(ValueError, match="gamma is -1"):
            gm.build_model(
                lotka_volterra.ode, data.t, data.y, priors=priors, gp=gp, gamma=-1.0, preset="fgpgm"
            )
    assert list(model.named_vars) == ["mine"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"alpha": None}, TypeError, r"prior of 'alpha' is a NoneType; expected a distribution"),
        ({"alpha": 2.0}, TypeError, r"prior of 'alpha' is a float; expected a distribution"),
        (
            {"alpha": pm.Normal.dist(shape=2)},
            ValueError,
            r"'alpha' has 1 dimensions; expected a sc",
        ),
        (
            {"zeta": pm.Normal.dist()},
            ValueError,
            r"are given for unknown \['zeta'\]; .*alpha",
        ),
    ],
)
def test_unusable_priors_are_named(lotka_volterra, data, gp, priors, change, error, message):
    with pytest.raises(error, match=message):
        gm.build_model(
            lotka_volterra.ode, data.t, data.y, priors=priors | change, gp=gp, preset="fgpgm"
        )


def test_missing_prior_is_named(lotka_volterra, data, gp, priors):
    del priors["delta"]
    with pytest.raises(ValueError, match=r"missing for \['delta'\]; expected one"):
        gm.build_model(lotka_volterra.ode, data.t, data.y, priors=priors, gp=gp, preset="fgpgm")


def test_given_gp_must_be_of_the_same_data_and_alone(lotka_volterra, data, gp, priors):
    with pytest.raises(ValueError, match="gp was made from other data"):
        gm.build_model(lotka_volterra.ode, data.t, data.y + 1, priors=priors, gp=gp, preset="fgpgm")
    with pytest.raises(ValueError, match="gp is given, and so is cov or shared"):
        gm.build_model(
            lotka_volterra.ode, data.t, data.y, priors=priors, gp=gp, cov="ExpQuad", preset="fgpgm"
        )

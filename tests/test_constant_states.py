"""States that stay where they start: a drug that is not given, a species that is absent."""

import numpy as np
import pymc as pm
import pytest

import pymc_gradmatch as gm

TRUTH = {"r": 0.8, "K": 10.0, "kill": 0.6}
T = np.linspace(0, 10, 15)
QUIET = {"random_seed": 1, "progressbar": False}


def growth(t, x, theta):
    killed = theta.kill * x.drug * x.a
    return [theta.r * x.a * (1 - x.a / theta.K) - killed, -x.drug / 2]


ODE = gm.ODE(growth, ["a", "drug"], [*TRUTH])


def priors():
    widths = {"r": 1, "K": 20, "kill": 1}
    return {name: pm.HalfNormal.dist(width) for name, width in widths.items()}


def measured(dose, seed):
    """Return data of one arm; where no drug is given, it is written down as zero."""
    noise = np.random.default_rng(seed).normal(0, [0.2, 0.02 * dose], (len(T), 2))
    return ODE.solve(T, x0=[1.0, dose], theta=[*TRUTH.values()]) + noise


CONTROL, TREATED = measured(0.0, 1), measured(1.0, 2)


def arms(seen, absent=0.0):
    """Return both arms, in which the drug was measured or not."""
    hide = [1, 1 if seen else np.nan]
    return {
        "control": gm.Experiment(T, CONTROL * hide, start={"a": 1.0, "drug": absent}),
        "treated": gm.Experiment(T, TREATED * hide, start={"a": 1.0, "drug": 1.0}),
    }


@pytest.fixture(scope="module")
def nearly_absent():
    """Return the posterior with a trace of the drug, never measured, in the place of none."""
    return gm.fit(ODE, priors=priors(), experiments=arms(False, 1e-9), **QUIET)


@pytest.mark.parametrize("seen", [True, False])
def test_an_arm_without_the_drug_is_the_limit_of_an_arm_with_a_trace_of_it(seen, nearly_absent):
    """Zeros that were written down are no measurements: sigma of the drug is the treated arm's."""
    fit = gm.fit(ODE, priors=priors(), experiments=arms(seen), **QUIET)
    assert fit.is_exact
    for name, value in TRUTH.items():
        mean, sd = fit.table.loc[name, ["mean", "sd"]]
        assert abs(mean - value) < 4 * sd
        assert abs(mean - nearly_absent.table.loc[name, "mean"]) < 0.2 * sd
    if seen:
        assert fit.table.loc["sigma[drug]", "mean"] == pytest.approx(0.02, rel=0.5)


def test_the_order_of_experiments_does_not_decide_the_size_of_an_absent_state():
    scales = []
    for names in (["control", "treated"], ["treated", "control"]):
        both = {name: arms(False)[name] for name in names}
        model = gm.build_model(ODE, priors=priors(), experiments=both, preset="fgpgm", **QUIET)
        [constraint] = [rv for rv in model.observed_RVs if rv.name == "gradient_match"]
        scales.append(dict(zip(names, constraint.owner.op.gp.scale[:, 1], strict=True)))
    for one in scales:
        assert one["control"] == one["treated"] > 0


@pytest.mark.parametrize(
    ("y", "settings"),
    [
        (CONTROL, {"start": {"drug": 0.0}}),
        (CONTROL * [1, np.nan], {"start": {"drug": 0.0}}),
        (CONTROL, {"start": {"drug": 0.0}, "sigma": [0.2, 0.02]}),
        (CONTROL, {"sigma": [0.2, 0.02]}),
    ],
)
def test_a_single_data_set_may_have_a_state_that_never_moves(y, settings):
    fit = gm.fit(ODE, T, y, priors=priors(), **settings, **QUIET)
    assert fit.is_exact
    for name in ("r", "K"):
        assert abs(fit.table.loc[name, "mean"] - TRUTH[name]) < 4 * fit.table.loc[name, "sd"]
    assert abs(fit.table.loc["x0[drug]", "mean"]) < 0.02


@pytest.mark.parametrize("preset", ["fgpgm", "refined"])
@pytest.mark.parametrize("seen", [True, False])
def test_both_presets_write_the_model_of_a_state_that_never_moves(preset, seen):
    """The refined one starts from the solution, where it stays."""
    y, given = CONTROL * [1, 1 if seen else np.nan], {"preset": preset, "start": {"drug": 0.0}}
    model = gm.build_model(ODE, T, y, priors=priors(), **given, **QUIET)
    assert np.isfinite(model.compile_logp(jacobian=False)(model.initial_point()))
    if preset == "refined":
        np.testing.assert_allclose(model["gradient_match"].owner.op.gp.prior_mean[:, 1], 0)


def test_a_state_rests_that_only_resting_states_feed_and_one_that_a_dose_moves_does_not():
    def cascade(t, x, theta):
        return [-x.gut, x.gut - theta.k * x.blood, x.blood * x.cells, 37.0 * 0 * x.skin]

    ode = gm.ODE(cascade, ["gut", "blood", "cells", "skin"], ["k"])
    start = gm.model.Start.of(ode, {"gut": 0.0, "blood": 0.0, "skin": 37.0})
    np.testing.assert_array_equal(start.constant_values(ode, T), [0, 0, np.nan, 37])
    dosed = ode.with_inputs({"gut": gm.Input([5.0], [1.0], kind="dose")})
    np.testing.assert_array_equal(start.constant_values(dosed, T), [np.nan, np.nan, np.nan, 37])


def test_an_input_that_comes_late_moves_a_state():
    ode = gm.ODE(lambda t, x, theta, u: [u.flow - x.a], ["a"], ["k"], inputs=["flow"])
    late = gm.Input([0.0, 8.1, 8.2], [0.0, 1.0, 0.0], kind="previous")
    start = gm.model.Start.of(ode, {"a": 0.0})
    assert np.isnan(start.constant_values(ode.with_inputs({"flow": late}), T)).all()


def test_data_without_any_noise_that_nobody_knows_are_named_with_what_to_do():
    """A solution through all of them has no largest density: that of sigma goes to zero."""
    with pytest.raises(ValueError, match=r"\['drug'\] are the same.*sigma.*start=\{'drug': 0\}"):
        gm.fit(ODE, T, CONTROL, priors=priors(), **QUIET)


def test_an_absent_state_is_not_called_positive():
    ode = gm.ODE(growth, ["a", "drug"], [*TRUTH], positive=["a", "drug"])
    y = np.abs(CONTROL) * [1, np.nan]
    with pytest.raises(ValueError, match="leave 'drug' out of positive="):
        gm.fit(ode, T, y, priors=priors(), start={"drug": 0.0}, **QUIET)


@pytest.mark.parametrize("exact", [True, False])
def test_stacks_have_states_that_never_move(exact):
    more = measured(0.0, 3)
    fits = gm.fit_many(
        ODE, T, np.stack([CONTROL, more]), priors=priors(), start={"drug": 0.0}, draws=1_000,
        exact=exact, n_jobs=1, **QUIET, **({} if exact else {"preset": "refined"}),
    )  # fmt: skip
    assert (fits["failure"] == "").all()
    np.testing.assert_allclose(fits["K"].mean(["chain", "draw"]), TRUTH["K"], rtol=0.05)

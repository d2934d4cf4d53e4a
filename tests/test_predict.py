"""Predictions: under other inputs, doses and starts, with what is computed from the solutions."""

import numpy as np
import pymc as pm
import pytest
import xarray as xr

import pymc_gradmatch as gm

QUIET = {"random_seed": 1, "progressbar": False}
T = np.linspace(0, 4, 9)
AHEAD = np.array([0.0, 1.0, 2.5, 6.0])


def rhs(t, x, theta, u):
    return [u.feed - theta.k * x.a, theta.k * x.a - u.cooling * x.b]


ODE = gm.ODE(rhs, ["a", "b"], ["k"], inputs=["feed", "cooling"])
GIVEN = {
    "feed": gm.Input([0.0, 2.0], [1.0, 0.0], kind="previous"),
    "cooling": lambda t: 0.5 + 0.0 * t,
    "a": gm.Input([1.5], [0.5], kind="dose"),
}
TRUTH = ODE.solve(T, x0=[2.0, 0.5], theta=[1.0], inputs=GIVEN)
DATA = TRUTH.sum(axis=1) + np.random.default_rng(1).normal(0, 0.05, len(T))


def summed(x, theta):
    total = pm.Deterministic("total", x.a + x.b)
    pm.Normal("y", total, pm.HalfNormal("noise", 1), observed=DATA)


def with_new_data(x, theta):
    total = pm.Deterministic("total", x.a + x.b)
    pm.Normal("y", total, pm.HalfNormal("noise", 1))
    pm.Deterministic("half_life", np.log(2) / theta.k)


@pytest.fixture(scope="module")
def fit():
    return gm.fit(
        ODE, T, likelihood=summed, inputs=GIVEN, start={"a": 2.0},
        priors={"k": pm.HalfNormal.dist(2)}, n_draws=1_000, **QUIET,
    )  # fmt: skip


def solved_at(fit, draw, inputs, t=AHEAD, **start):
    one = fit.idata["posterior"].dataset.isel(chain=0, draw=draw)
    x0 = dict(zip(ODE.states, one["x0"].to_numpy(), strict=True)) | start
    return ODE.solve(t, x0=x0, theta=[float(one["k"])], inputs=inputs)


def test_other_inputs_take_the_place_of_those_of_their_names(fit):
    """Assert solutions at single draws: a schedule and the doses are others, cooling stays."""
    feed = gm.Input([0.0, 3.0], [0.0, 2.0], kind="previous")
    dose = gm.Input([0.5, 5.0], [1.0, 2.0], kind="dose")
    ahead = fit.predict(t=AHEAD, inputs={"feed": feed, "a": dose})["posterior_predictive"]["x"]
    changed = GIVEN | {"feed": feed, "a": dose}
    for draw in (0, 17):
        expected = solved_at(fit, draw, changed)
        np.testing.assert_allclose(ahead[0, draw], expected, rtol=1e-7)
    before = fit.predict(t=AHEAD)["posterior_predictive"]["x"]
    np.testing.assert_allclose(before[0, 17], solved_at(fit, 17, GIVEN), rtol=1e-7)


def test_doses_can_be_left_out(fit):
    none = {"a": gm.Input([1.0], [0.0], kind="dose")}
    ahead = fit.predict(t=AHEAD, inputs=none)["posterior_predictive"]["x"]
    without = {name: GIVEN[name] for name in ("feed", "cooling")}
    np.testing.assert_allclose(ahead[0, 3], solved_at(fit, 3, without), rtol=1e-7)


def test_other_starts_are_numbers_functions_or_distributions_and_the_rest_stay(fit):
    posterior = fit.idata["posterior"].dataset
    start = {"a": 7.0}
    ahead = fit.predict(t=AHEAD, start=start)["posterior_predictive"]["x"]
    for draw in (0, 17):
        expected = solved_at(fit, draw, GIVEN, **start)
        np.testing.assert_allclose(ahead[0, draw], expected, rtol=1e-7)
    made = {"a": lambda theta, x0: 3.0 * theta.k + x0.b}
    begun = fit.predict(t=AHEAD, start=made)["posterior_predictive"]["x"][..., 0, :]
    b0 = posterior["x0"].sel(state="b")
    np.testing.assert_allclose(begun.sel(state="a"), 3 * posterior["k"] + b0, rtol=1e-12)
    np.testing.assert_allclose(begun.sel(state="b"), b0, rtol=1e-12)
    prior = {"b": pm.Normal.dist(4.0, 0.3)}
    drawn = fit.predict(t=AHEAD, start=prior, random_seed=1)["posterior_predictive"]["x"]
    b = drawn.isel(time=0).sel(state="b")
    assert float(b.mean()) == pytest.approx(4.0, abs=5 * 0.3 / np.sqrt(b.size))
    assert float(b.std()) == pytest.approx(0.3, rel=5 / np.sqrt(2 * b.size))


def test_data_and_deterministics_of_the_model_are_those_of_the_new_solutions(fit):
    none = {"feed": gm.Input([0.0], [0.0], kind="previous")}
    ahead = fit.predict(inputs=none, random_seed=1)
    assert ahead["observed_data"]["y"].shape == T.shape
    there = ahead["posterior_predictive"].dataset
    at_data = solved_at(fit, 5, GIVEN | none, T).sum(axis=1)
    np.testing.assert_allclose(there["total"][0, 5], at_data, rtol=1e-7)
    away = there["y"].to_numpy() - there["total"].to_numpy()
    noise = fit.idata["posterior"]["noise"].to_numpy()
    ratio = np.mean(away**2) / np.mean(noise**2)
    assert ratio == pytest.approx(1, abs=5 * np.sqrt(2 / away.size) * 2)


def test_draws_of_what_was_computed_from_the_matched_states_are_not_taken_for_new_ones(fit):
    draws = fit.idata["posterior"].dataset
    old = xr.DataTree.from_dict({"posterior": draws.assign(total=draws["total"] + 100)})
    there = gm.predict(old, model=fit.solved, random_seed=1)["posterior_predictive"]
    assert float(abs(there["y"] - there["total"].to_numpy()).max()) < 2
    assert float(there["total"].max()) < 20


def test_at_other_times_lines_of_pymc_say_what_is_computed_and_observed(fit):
    ahead = fit.predict(t=AHEAD, likelihood=with_new_data, random_seed=1)
    there, draws = ahead["posterior_predictive"].dataset, fit.idata["posterior"].dataset
    assert "observed_data" not in ahead.children
    assert there["total"].dims == ("chain", "draw", "time")
    np.testing.assert_array_equal(there["total"]["time"], AHEAD)
    np.testing.assert_allclose(there["total"], there["x"].sum("state"), rtol=1e-12)
    np.testing.assert_allclose(there["half_life"], np.log(2) / draws["k"], rtol=1e-12)
    away = (there["y"] - there["total"]) / draws["noise"]
    assert float(away.std()) == pytest.approx(1, abs=5 / np.sqrt(2 * away.size))
    assert float(abs(away.mean())) < 5 / np.sqrt(away.size)
    assert "noise" not in there


def test_gm_predict_is_what_a_fit_predicts_by(fit):
    given = {"t": AHEAD, "start": {"b": 0.0}, "likelihood": with_new_data, "random_seed": 3}
    by_fit = fit.predict(**given)["posterior_predictive"]
    by_hand = gm.predict(fit.idata, model=fit.solved, **given)["posterior_predictive"]
    assert by_fit.dataset.equals(by_hand.dataset)


DECAY = gm.ODE(lambda t, x, theta: [-theta.k * x.mass], ["mass"], ["k"])


@pytest.fixture(scope="module", params=["experiment", None])
def batches(request):
    """Return a model of two experiments with draws of its prior, k shared or one for each."""
    times = {"plain": np.linspace(0, 2, 7), "dosed": np.linspace(0, 3, 7)}
    cov = pm.gp.cov.ExpQuad(1, ls=1.2)
    members = {n: gm.StateGP(t, np.exp(-t)[:, None], [cov], 0.1) for n, t in times.items()}
    gps = gm.StateGPs(members)
    with pm.Model(coords={"experiment": gps.names}) as model:
        k = pm.HalfNormal("k", 2, dims=request.param)
        x = gps.prior("x")
        pm.Normal("y", gps.at_observations(x), 0.1, observed=gps.observations)
        gm.GradientMatchingODE("gradient_match", DECAY, x, {"k": k}, gp=gps, gamma=0.3)
    return pm.sample_prior_predictive(5, model=model, random_seed=1), model


def test_experiments_have_inputs_and_starts_for_all_or_of_their_own(batches):
    prior, model = batches
    dose = {"mass": gm.Input([1.0], [2.0], kind="dose")}

    def doubled(x, theta):
        pm.Deterministic("double", 2 * x.mass * theta.k)

    ahead = gm.predict(
        prior, model=model, t=AHEAD, inputs={"dosed": dose}, start={"mass": 1.0},
        likelihood=doubled,
    )["prior_predictive"]  # fmt: skip
    rates = np.broadcast_to(prior["prior"]["k"][0].to_numpy().reshape(5, -1), (5, 2))
    for draw in range(5):
        for number, inputs in enumerate([None, dose]):
            k = rates[draw, number]
            expected = DECAY.solve(AHEAD, x0=[1.0], theta=[k], inputs=inputs)
            np.testing.assert_allclose(ahead["x"][0, draw, number], expected, rtol=1e-7)
            name = ["plain::double", "dosed::double"][number]
            np.testing.assert_allclose(ahead[name][0, draw], 2 * k * expected[:, 0], rtol=1e-7)
    apart = gm.predict(prior, model=model, t=AHEAD, start={"plain": {"mass": 3.0}})
    begun = apart["prior_predictive"]["x"][0, :, :, 0, 0]
    np.testing.assert_allclose(begun[:, 0], 3.0)
    np.testing.assert_allclose(begun[:, 1], prior["prior"]["x"][0, :, 1, 0, 0])


def test_what_does_not_fit_a_prediction_is_said(fit, batches):
    with pytest.raises(ValueError, match=r"expected one for each of \['feed', 'cooling'\]"):
        fit.predict(t=AHEAD, inputs={"fed": lambda t: t})
    with pytest.raises(ValueError, match=r"doses are given to \['c'\]"):
        fit.predict(t=AHEAD, inputs={"c": gm.Input([1.0], [1.0], kind="dose")})
    short = gm.Input([0.0, 3.0], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"'feed' is known from 0 to 3, and asked for"):
        fit.predict(t=AHEAD, inputs={"feed": short})
    with pytest.raises(ValueError, match=r"start is given for \['c'\]; expected some of"):
        fit.predict(t=AHEAD, start={"c": 1.0})
    with pytest.raises(TypeError, match=r"start is a list; expected a mapping"):
        fit.predict(t=AHEAD, start=[1.0, 2.0])
    with fit.solved, pytest.raises(ValueError, match=r"own parameters are random"):
        fit.predict(t=AHEAD, start={"a": pm.Normal.dist(0, fit.solved["noise"])})
    with pytest.raises(ValueError, match=r"adds no new variable.*pm\.Deterministic"):
        fit.predict(t=AHEAD, likelihood=lambda x, theta: None)
    with pytest.raises(ValueError, match=r"experiments \['one'\]; expected none of a single"):
        fit.predict(t=AHEAD, start={"one": {"a": 1.0}})
    prior, model = batches
    with pytest.raises(ValueError, match=r"experiments \['late'\]; expected some of \['plain'"):
        gm.predict(prior, model=model, start={"late": {"mass": 1.0}})

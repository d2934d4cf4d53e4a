"""Unusable data, starts and likelihoods are refused before sampling."""

import re

import numpy as np
import pandas as pd
import pymc as pm
import pytest
import xarray as xr

import pymc_gradmatch as gm
from pymc_gradmatch.model.start import Start

T = np.linspace(0, 4, 9)
DECAY = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
# The second state is driven by the first, and drives nothing.
PAIR = gm.ODE(lambda t, x, theta: [-theta.rate * x.a, x.a - x.b], ["a", "b"], ["rate"])
PRIOR = {"rate": pm.HalfNormal.dist(2)}
COUNTS = np.round(30 * np.exp(-0.5 * T))


@pytest.fixture(scope="module")
def y():
    x = 20.0 * np.exp(-0.5 * T)[:, None]
    return x + np.random.default_rng(1).normal(0, 0.5, x.shape)


@pytest.fixture(scope="module")
def gp(y):
    return gm.StateGP(T, y, [pm.gp.cov.Matern52(1, ls=2.0)], sigma=0.5)


def built(gp, likelihood=None, ode=DECAY, priors=PRIOR, **settings):
    return gm.build_model(
        ode,
        T,
        gp.y,
        priors=priors,
        gp=gp,
        likelihood=likelihood,
        gamma=0.1,
        **settings,
        preset="fgpgm",
    )


def counted(observed, distribution=pm.Poisson):
    """Return a likelihood of counts."""

    def likelihood(x, theta):
        distribution("counts", 1.5 * pm.math.abs(x.mass), observed=observed)

    return likelihood


def censored(name, mu, observed):
    pm.Censored(name, pm.Poisson.dist(mu), lower=0, upper=40, observed=observed)


@pytest.mark.parametrize("distribution", [pm.Poisson, censored])
@pytest.mark.parametrize(
    ("index", "value", "words"),
    [(3, 2.5, "is 2.5, not a whole number"), (4, -1.0, "is -1, negative")],
)
def test_counts_that_are_negative_or_not_whole_are_named(gp, distribution, index, value, words):
    observed = np.where(np.arange(9) == index, value, COUNTS)
    with pytest.raises(ValueError, match=rf"counts\[{index}\] {words}; expected counts"):
        built(gp, counted(observed, distribution))


def test_counts_of_fewer_times_than_the_states_are_refused_by_their_shape(gp):
    with pytest.raises(ValueError, match=r"'counts' observes has shape \(2,\).*one observation"):
        built(gp, counted(np.array([3, 2])))


@pytest.mark.parametrize("start", [gm.find_MAP, gm.fit])
def test_data_of_another_shape_in_a_model_written_by_hand_are_named(gp, start):
    with pm.Model() as model:
        rate = pm.HalfNormal("rate", 2)
        x = gp.prior("x")
        pm.Poisson("counts", 1.5 * pm.math.abs(x[:, 0]), observed=[3, 2])
        gm.GradientMatchingODE("match", DECAY, x, [rate], gp=gp, gamma=0.1)
    with pytest.raises(ValueError, match=r"'counts' observes has shape \(2,\).*one observation"):
        start(model=model, progressbar=False)


def test_whole_numbers_of_any_type_are_counts(gp, fast_compile):
    for observed in (COUNTS, COUNTS.astype(int), COUNTS.tolist()):
        assert np.isfinite(built(gp, counted(observed)).point_logps()["counts"])


def test_differences_may_be_negative_where_their_distribution_allows_it(gp):
    def likelihood(x, theta):
        pm.DiscreteUniform("change", -50, 50, observed=np.diff(COUNTS))
        pm.Normal("y", x.mass, 1, observed=COUNTS)

    assert "change" in built(gp, likelihood).named_vars


@pytest.mark.parametrize(
    "distribution", [pm.Poisson, lambda n, x, observed: pm.Normal(n, x, 1, observed=observed)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_missing_values_in_a_likelihood_are_not_imputed(gp, distribution, masked):
    observed = np.where(np.arange(9) == 2, np.nan, COUNTS)
    observed = np.ma.masked_invalid(observed) if masked else observed
    with pytest.raises(ValueError, match=r"'counts' observes is missing \(NaN\) at 2; .*y\[seen\]"):
        built(gp, counted(observed, distribution))


def uniform(x, theta):
    pm.Uniform("near", x.mass - 3, x.mass + 3, observed=np.where(T == 1, 99.0, 20 * np.exp(-T / 2)))


def test_a_likelihood_that_is_zero_at_the_start_names_the_observation(gp):
    model = built(gp, uniform)
    with pytest.raises(ValueError, match=r"zero at near\[2\] = 99 where the model starts"):
        gm.find_MAP(model=model, random_seed=1, progressbar=False)
    with pytest.raises(ValueError, match=r"zero at near\[2\] = 99, at the states' posterior"):
        gm.refine(DECAY, gp, priors=PRIOR, likelihood=uniform, random_seed=1, progressbar=False)


def test_zero_likelihood_of_a_handwritten_model_names_the_observation(gp):
    with pm.Model() as model:
        theta, x = {"rate": pm.HalfNormal("rate", 2)}, gp.prior("x")
        uniform(*DECAY.by_name(x, theta))
        gm.GradientMatchingODE("gradient_match", DECAY, x, theta, gp=gp, gamma=0.1)
    with pytest.raises(ValueError, match=r"zero at near\[2\] = 99 where the model starts"):
        gm.find_MAP(model=model, random_seed=1, progressbar=False)


def test_a_state_that_no_likelihood_reaches_is_named():
    def first_alone(x, theta):
        pm.Normal("y", x.a, 1, observed=T)

    with pytest.raises(ValueError, match=r"states \['b'\] are neither observed, nor do they enter"):
        gm.build_model(PAIR, T, priors=PRIOR, likelihood=first_alone, preset="refined")


@pytest.mark.parametrize(
    "start",
    [
        {"b": 0.0},
        {"b": lambda theta: theta.rate},
        {"b": pm.Normal.dist(0, 1)},
        {"a": lambda theta, x0: 3 * x0.b},  # the data tell it by the law
    ],
)
def test_a_state_that_drives_nothing_may_have_a_known_start(start):
    y = np.stack([3 * np.exp(-T), np.full(9, np.nan)], axis=1)
    covs = [pm.gp.cov.Matern52(1, ls=2.0)] * 2
    gp = gm.StateGP(T, y, covs, sigma=0.1, scales={"b": 1.0}, states=PAIR.states)
    model = built(gp, ode=PAIR, start=start, scales={"b": 1.0})
    assert "start" in model.named_vars or "start_prior" in model.named_vars


@pytest.mark.slow
def test_an_undetermined_start_is_named_also_in_a_handwritten_model():
    x = PAIR.solve(T, [3.0, 1.0], [0.7])
    y = x + np.random.default_rng(1).normal(0, 0.05, x.shape)
    gp = gm.StateGP(T, y, [pm.gp.cov.Matern52(1, ls=2.0)] * 2, sigma=0.05)
    with pm.Model() as model:
        theta, states = {"rate": pm.HalfNormal("rate", 2)}, gp.prior("x")
        pm.Normal("y", states[:, 0], 0.05, observed=y[:, 0])
        gm.GradientMatchingODE("gradient_match", PAIR, states, theta, gp=gp, gamma=0.1)
    fit = gm.fit(model=model, random_seed=1, progressbar=False)
    assert fit.is_exact
    assert "x0[b]" in fit.unidentified.index
    mean, sd = fit.table.loc["x0[b]", ["mean", "sd"]]
    assert mean == pytest.approx(y[0, 1], abs=0.1 * sd)  # its prior
    assert sd == pytest.approx(5 * gp.scale[1], rel=0.1)


def test_a_parameter_that_nothing_depends_on_is_named(gp):
    ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate", "typo", "begin"])
    priors = dict.fromkeys(ode.params, pm.HalfNormal.dist(2))
    with pytest.warns(UserWarning, match=r"parameters \['typo', 'begin'\] enter neither"):
        built(gp, ode=ode, priors=priors)
    with pytest.warns(UserWarning, match=r"parameters \['typo'\] enter neither"):
        built(gp, ode=ode, priors=priors, start={"mass": lambda theta: theta.begin})

    def noisy(x, theta):
        pm.Normal("y", x.mass, theta.typo, observed=gp.y[:, 0])

    with pytest.warns(UserWarning, match=r"parameters \['begin'\] enter neither"):
        built(gp, noisy, ode, priors)


def test_times_without_an_observation_are_logged_but_for_the_first(y, caplog):
    caplog.set_level("INFO", logger="pymc.gradmatch")
    empty = y.copy()
    empty[0] = np.nan
    settings = {"priors": PRIOR, "random_seed": 1, "gamma": 0.1, "start": {"mass": 20.0}}
    gm.build_model(DECAY, T, empty, **settings, preset="fgpgm")
    assert not caplog.messages
    empty[[2, 5]] = np.nan
    gm.build_model(DECAY, T, empty, **settings, preset="fgpgm")
    [said] = caplog.messages
    assert said.startswith("nothing was observed at t = 1, 2.5: ")


def test_a_known_start_far_from_the_first_observation_is_named(gp):
    """An error if it is impossible, a warning if it is unlikely given sigma."""
    with pytest.raises(ValueError, match=re.escape("start of 'mass' is 2000, but")):
        built(gp, start={"mass": 2000.0})
    with pytest.warns(UserWarning, match=r"start of 'mass' is 8, but .* 2\d times the noise"):
        built(gp, start={"mass": 8.0})
    assert "start" in built(gp, start={"mass": 20.0}).named_vars


def test_a_variable_of_a_model_is_no_start():
    with pm.Model():
        first = pm.HalfNormal("first", 5)
        for value in (first, 2 * first):
            with pytest.raises(ValueError, match=r"start of 'mass' is the variable .*lambda theta"):
                Start.of(DECAY, {"mass": value})


@pytest.mark.parametrize("share", [2.0, 0, -0.1, np.nan, 1.0])
def test_target_accept_outside_zero_to_one_is_refused(share):
    with pytest.raises(ValueError, match=r"target_accept is .*; expected a number between 0 and 1"):
        gm.sample(target_accept=share)
    with pytest.raises(TypeError, match=r"target_accept is '0.9'"):
        gm.sample(target_accept="0.9")


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (["2", "<0.1", None], "'b' is '<0.1' in row 1; expected numbers."),
        (["1", "-", "nd"], "'b' is '-' in row 1 and no number in 1 more; expected numbers."),
        (pd.to_datetime(["2020-01-01"] * 3), "'b' is Timestamp('2020-01-01 00:00:00') in row 0 "),
    ],
)
def test_an_entry_of_a_table_that_is_no_number_is_named(column, said):
    table = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": column})
    with pytest.raises(
        TypeError, match="^" + re.escape(f"y is a table, of which not all are numbers: {said}")
    ):
        gm.fit_gp(np.arange(3.0), table, cov="ExpQuad")


def test_a_list_in_a_message_is_not_empty():
    t, y = np.arange(3.0), pd.DataFrame(np.ones((3, 2)), columns=["a", "a"])
    with pytest.raises(ValueError, match=r"are \['a', 'a'\] \(repeated \['a'\]\); expected states"):
        gm.fit_gp(t, y, cov="ExpQuad", states=["a", "b"])
    y.columns = ["a", "c"]
    with pytest.raises(ValueError, match=r"are \['a', 'c'\] \(unknown \['c'\]\); expected states"):
        gm.fit_gp(t, y, cov="ExpQuad", states=["a", "b"])


def test_times_that_nearly_coincide_are_times_like_others():
    """Assert it where the refined clock is a hundred times as fast in one gap as in the next."""
    t = np.array([0.67, 1.79, 2.64, 2.96, 4.5, 5.53, 7.28, 8.519, 8.527, 9.456, 9.483, 10.61])
    y = 20 * np.exp(-0.5 * (t - t[0])) + np.random.default_rng(1).normal(0, 0.5, len(t))
    fit = gm.fit(DECAY, t, y[:, None], priors=PRIOR, random_seed=1, progressbar=False)
    assert fit.is_exact
    assert abs(fit.table.loc["rate", "mean"] - 0.5) < 5 * fit.table.loc["rate", "sd"]


def test_names_of_whatever_is_labelled_count_in_any_order():
    a, b = np.exp(-T), 2 - np.exp(-T)
    covs = [pm.gp.cov.Matern52(1, ls=1.0)] * 2
    axes = {"dims": ("time", "state"), "coords": {"time": T, "state": ["b", "a"]}}
    for y in [pd.DataFrame({"b": b, "a": a}), xr.DataArray(np.stack([b, a], axis=1), **axes)]:
        noise = pd.Series({"b": 0.2, "a": 0.1})
        gp = gm.StateGP(T, y, covs, noise, states=PAIR.states, nugget=noise)
        assert gp.states == PAIR.states
        np.testing.assert_array_equal(gp.y, np.stack([a, b], axis=1))
        np.testing.assert_array_equal(gp.sigma, [0.1, 0.2])
        np.testing.assert_array_equal(gp.processes.nugget, [0.1, 0.2])
        for sigma in [noise, xr.DataArray(noise.to_numpy(), coords={"state": ["b", "a"]})]:
            model = gm.build_model(
                PAIR, T, y, priors=PRIOR, gp=gp, sigma=sigma, gamma=0.1, preset="fgpgm"
            )
            told = model["y"].owner.inputs[-1].eval()
            np.testing.assert_array_equal(np.unique(told.reshape(-1, 2), axis=0), [[0.1, 0.2]])
    with pytest.raises(ValueError, match=r"of sigma are \['a', 'c'\] \(unknown \['c'\]\); "):
        gp.with_sigma(pd.Series({"a": 0.1, "c": 0.2}))

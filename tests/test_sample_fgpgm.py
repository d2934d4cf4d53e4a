"""Sampling end to end: NUTS and the paper's chain on one density, with fixed proposals."""

import arviz as az
import numpy as np
import pymc as pm
import pytest

import pymc_gradmatch as gm
from pymc_gradmatch.sampling import metropolis as chain


@pytest.fixture(scope="module")
def model(lotka_volterra, data, gp):
    priors = {name: pm.HalfNormal.dist(5) for name in lotka_volterra.ode.params}
    return gm.build_model(
        lotka_volterra.ode,
        data.t,
        data.y,
        priors=priors,
        gp=gp,
        gamma=0.3,
        sigma="fixed",
        preset="fgpgm",
    )


@pytest.fixture(scope="module")
def nuts(model):
    return gm.sample(3_000, chains=2, cores=1, random_seed=1, progressbar=False, model=model)


@pytest.fixture(scope="module")
def decay(decay_model):
    """Return a model so small that Metropolis converges: one state, six times."""
    return decay_model(6, 0.3, 1.0)


@pytest.fixture(scope="module")
def metropolis(decay):
    return gm.sample_fgpgm(
        decay,
        draws=40_000,
        burn_in=1_000,
        state_step=0.3,
        param_step=0.8,
        random_seed=1,
        progressbar=False,
    )


@pytest.mark.slow
def test_nuts_converges_without_tuning_by_the_user(nuts, lotka_volterra):
    params = list(lotka_volterra.ode.params)
    assert float(az.rhat(nuts, var_names=params).dataset.to_array().max()) < 1.01
    assert float(az.ess(nuts, var_names=params).dataset.to_array().min()) > 3_000
    assert int(nuts["sample_stats"]["diverging"].sum()) < 0.01 * 6_000


@pytest.mark.slow
def test_metropolis_and_nuts_sample_the_same_posterior(decay, metropolis):
    """Assert means and sds within five Monte Carlo standard errors, all effective sizes large."""
    with decay:
        nuts = pm.sample(4000, chains=2, cores=1, random_seed=1, progressbar=False, quiet=True)
    for name in ("rate", "x"):
        assert float(az.ess(metropolis, var_names=[name])[name].min()) > 200
        for statistic in ("mean", "sd"):
            here, there = (
                getattr(idata["posterior"][name], "std" if statistic == "sd" else "mean")(
                    ["chain", "draw"]
                )
                for idata in (nuts, metropolis)
            )
            errors = [
                az.mcse(idata, var_names=[name], method=statistic)[name]
                for idata in (nuts, metropolis)
            ]
            assert float(np.abs((here - there) / np.hypot(*errors)).max()) < 5, (name, statistic)


@pytest.mark.slow
def test_chain_has_dims_coords_and_the_datas_units(metropolis, decay):
    x = metropolis["posterior"]["x"]
    assert x.dims == ("chain", "draw", "time", "state")
    assert x.shape == (1, 40_000, 6, 1)
    np.testing.assert_array_equal(x["state"], ["mass"])
    within = np.abs(x.mean(["chain", "draw"]) - np.exp(-x["time"])) < 4 * x.std(["chain", "draw"])
    assert within.all()


def test_widths_stay_fixed_also_where_pymc_tunes_a_single_stepper(data, gp):
    """Assert it without parameters: there pm.sample switches tuning on behind `tune=False`."""
    with pm.Model() as model:
        x = gp.prior("x")
        pm.Normal("y", x, gp.sigma, observed=gp.y)
    idata = gm.sample_fgpgm(
        model, draws=50, burn_in=400, state_step=1.0, random_seed=1, progressbar=False
    )
    np.testing.assert_array_equal(idata["sample_stats"]["scaling"], 1.0)


@pytest.mark.slow
def test_proposals_have_the_given_widths(model):
    """Assert it on accepted moves of a tight chain, where nearly every proposal is accepted."""
    step = 1e-4
    idata = gm.sample_fgpgm(
        model,
        draws=1_500,
        burn_in=0,
        state_step=step,
        param_step=3 * step,
        random_seed=2,
        progressbar=False,
    )
    moves = idata["posterior"].dataset.diff("draw")
    scale = model["x"].owner.inputs[3].data
    # The sd of n normal increments has a relative error of 1 / sqrt(2 n).
    for sd, width, n in [
        (float((moves["x"] / scale).std()), step, 1_500 * 40),
        (float(moves["alpha"].std()), 3 * step, 1_500),
    ]:
        assert sd == pytest.approx(width, rel=4 / np.sqrt(2 * n) + 0.01)


@pytest.mark.slow
def test_same_seed_gives_the_same_chain_and_widths_can_be_tuned(model):
    chains = [
        gm.sample_fgpgm(model, draws=20, burn_in=300, random_seed=3, progressbar=False)
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*(chain["posterior"]["x"] for chain in chains))
    assert not np.any(chains[0]["sample_stats"]["scaling"] == 1.0)


def test_the_users_model_keeps_its_initial_values(lotka_volterra, data, gp):
    with pm.Model() as model:
        theta = {name: pm.HalfNormal(name, 5, initval=1.0) for name in lotka_volterra.ode.params}
        x = gp.prior("x")
        gm.GradientMatchingODE("g", lotka_volterra.ode, x, theta, gp=gp, gamma=0.3)
    before = model.initial_point()
    plain = chain._with_plain_parameters(model)
    assert {value.name for value in plain.value_vars} == {
        *lotka_volterra.ode.params,
        "x_standardized__",
    }
    after = model.initial_point()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


@pytest.mark.slow
def test_a_chain_starts_at_the_initial_states_and_at_what_is_most_probable_there(decay):
    """Assert it of the first draw by steps of next to nothing, from states that the user gave."""
    model = decay.copy()
    start = 2 * np.exp(-model.coords["time"][0] - np.linspace(0, 1, 6))[:, None]
    model.set_initval(model["x"], start)
    settings = {"draws": 1, "burn_in": 0, "state_step": 1e-12, "param_step": 1e-12}
    first = gm.sample_fgpgm(model, random_seed=1, progressbar=False, **settings)
    posterior = first["posterior"].isel(chain=0, draw=0)
    np.testing.assert_allclose(posterior["x"], start, rtol=1e-9)
    point = model.initial_point()
    logp = model.compile_logp(jacobian=False, mode="FAST_COMPILE")
    heights = [
        logp(point | {"rate_log__": np.log(float(posterior["rate"])) + away})
        for away in (-0.05, 0, 0.05)
    ]
    assert heights[1] > max(heights[0], heights[2])


def test_whitened_states_cannot_be_moved_one_by_one(lotka_volterra, data, gp):
    priors = {name: pm.HalfNormal.dist(5) for name in lotka_volterra.ode.params}
    model = gm.build_model(
        lotka_volterra.ode,
        data.t,
        data.y,
        priors=priors,
        gp=gp,
        parameterization="whitened",
        sigma="fixed",
        preset="fgpgm",
    )
    with pytest.raises(ValueError, match=r"'x_whitened_'.*parameterization=\"centered\""):
        gm.sample_fgpgm(model)


@pytest.mark.parametrize("name", ["state_step", "param_step"])
def test_steps_must_be_positive(model, name):
    with pytest.raises(ValueError, match=rf"{name} is 0; expected a positive number"):
        gm.sample_fgpgm(model, **{name: 0})

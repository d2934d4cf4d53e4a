"""Coordinates of hierarchies for chains: the same posterior, and how far members are centred."""

import numpy as np
import pymc as pm
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm

import pymc_gradmatch as gm
from pymc_gradmatch.exact import ExactPosterior
from pymc_gradmatch.sampling.coordinates import (
    centre_in_part,
    log_volume,
    members,
    shares_of_data,
)

N_MEMBERS = 5


def population(member) -> pm.Model:
    """Return a model in which data of each member have an error of 0.3."""
    with pm.Model() as model:
        center, spread = pm.Normal("center", 0.2, 1), pm.HalfNormal("spread", 1)
        each = member("each", center, spread, shape=N_MEMBERS)
        pm.Normal("y", each, 0.3, observed=np.linspace(0.5, 2, N_MEMBERS))
    return model


@pytest.mark.parametrize("member", [pm.Normal, pm.LogNormal])
def test_the_density_is_that_of_the_centred_model_but_for_the_volume_of_z(member):
    model, other = population(member), population(member)
    centred = np.linspace(0, 1, N_MEMBERS)
    centre_in_part(other, {"each": centred})
    rng = np.random.default_rng(1)
    center, spread = rng.normal(), np.exp(rng.normal())
    level = rng.normal(size=N_MEMBERS)
    z = (level - center) * spread ** (centred - 1) + centred * center
    name = model.rvs_to_values[model["each"]].name
    shared = {"center": center, "spread_log__": np.log(spread)}
    before = model.compile_logp()(shared | {name: level})
    after = other.compile_logp()(shared | {"each_partly_centred__": z})
    assert after - before == pytest.approx(log_volume(centred, spread).eval().sum(), rel=1e-10)


@pytest.mark.parametrize("member", [pm.Normal, pm.LogNormal])
def test_z_is_a_standard_normal_number_where_nothing_is_centred(member):
    model = population(member)
    centre_in_part(model, {"each": np.zeros(N_MEMBERS)})
    prior = model.compile_logp(vars=[model["each"]], sum=False)
    z = np.random.default_rng(1).normal(size=N_MEMBERS)
    [density] = prior({"center": 3.0, "spread_log__": -2.0, "each_partly_centred__": z})
    np.testing.assert_allclose(density, norm.logpdf(z), rtol=1e-10)


def test_members_are_those_of_which_a_spread_is_unknown():
    with pm.Model() as model:
        spread = pm.HalfNormal("spread", 1)
        pm.Normal("told", 0, 1)
        pm.Normal("some", 0, 2 * spread, shape=3)
        pm.LogNormal("others", 0, spread, shape=3)
        pm.Gamma("no normal ones", 2, spread, shape=3)
    assert [rv.name for rv in members(model, {spread})] == ["some", "others"]


def test_the_share_of_the_data_is_that_at_the_likeliest_spread():
    rng, errors, center = np.random.default_rng(2), np.array([0.1, 0.2, 0.4, 0.8] * 5), 0.7
    seen = center + 0.5 * rng.normal(size=20) + errors * rng.normal(size=20)

    def apart(spread: float) -> float:
        return -norm.logpdf(seen, center, np.hypot(spread, errors)).sum()

    likeliest = minimize_scalar(apart, bounds=(0.01, 2), method="bounded").x
    held = 1.3
    variance = 1 / (errors**-2 + held**-2)
    mode = variance * (seen / errors**2 + center / held**2)
    shares = shares_of_data(mode, variance, np.array(center), np.array(held))
    np.testing.assert_allclose(shares, 1 / (1 + errors**2 / likeliest**2), rtol=1e-4)


def test_members_that_are_all_alike_are_not_centred():
    shares = shares_of_data(np.zeros(8), np.full(8, 1 / (1 / 0.09 + 1)), *np.array([0.0, 1.0]))
    assert shares.max() < 0.1


def test_a_spread_is_held_at_one_value_for_all_climbs():
    decay = gm.ODE(lambda t, x, theta: [-theta.k * x.m], ["m"], ["k"])
    t = np.linspace(0, 3, 7)
    tubes = {f"tube {n}": gm.Experiment(t, np.exp(-t)[:, None] + 0.01 * n) for n in range(3)}

    def priors():
        spread = pm.HalfNormal("spread", 1)
        return {"k": pm.LogNormal("k", 0, spread, dims="experiment")}

    model = gm.build_model(
        decay,
        experiments=tubes,
        priors=priors,
        preset="fgpgm",
        random_seed=1,
        progressbar=False,
        sigma="fixed",
    )
    target = ExactPosterior(model)
    rng = np.random.default_rng(1)
    drawn = np.concatenate([target.draw_prior(50, rng), target.draw_prior(50, rng)])
    assert target.spreads == ["spread"]
    assert np.ptp(drawn, axis=0)[target.is_fixed] == 0
    assert (np.ptp(drawn, axis=0)[~target.is_fixed] > 0).all()

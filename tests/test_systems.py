"""The benchmark systems: the paper's equations, settings and noise."""

import numpy as np
import pymc as pm
import pytest

from benchmarks.paper import systems

NAMES = ["lotka_volterra", "protein_transduction", "fitzhugh_nagumo"]


@pytest.fixture(params=NAMES)
def system(request):
    return getattr(systems, request.param)


def test_orders_of_parameters_and_states_are_the_contract():
    lv, pt, fhn = (getattr(systems, name) for name in NAMES)
    assert lv.theta == {"alpha": 2, "beta": 1, "gamma": 4, "delta": 1}
    assert lv.ode.states == ("prey", "predator")
    assert pt.ode.params == ("k1", "k2", "k3", "k4", "V", "Km")
    assert pt.ode.states == ("S", "dS", "R", "RS", "Rpp")
    assert fhn.ode.params == ("alpha", "beta", "phi")
    assert fhn.ode.states == ("V", "R")
    assert [len(s.t) for s in (lv, pt, fhn)] == [20, 15, 20]


def test_lotka_volterra_conserves_its_invariant():
    system = systems.lotka_volterra
    prey, predator = system.ode.solve(np.linspace(0, 10, 200), system.x0, system.theta).T
    invariant = prey - 4 * np.log(prey) + predator - 2 * np.log(predator)
    np.testing.assert_allclose(invariant, invariant[0], rtol=1e-6)


def test_protein_transduction_conserves_its_totals():
    system = systems.protein_transduction
    x = system.ode.solve(system.t, system.x0, system.theta)
    S, dS, R, RS, Rpp = x.T
    np.testing.assert_allclose(R + RS + Rpp, 1, rtol=1e-6)
    # Bound substrate is released or used up: S + dS + RS falls by what became Rpp.
    assert ((S + dS + RS)[:-1] >= (S + dS + RS)[1:] - 1e-9).all()


def test_fitzhugh_nagumo_spikes():
    """Assert relaxation oscillations: V swings between about -2 and 2 more than once."""
    system = systems.fitzhugh_nagumo
    V = system.ode.solve(np.linspace(0, 20, 400), system.x0, system.theta)[:, 0]
    assert V.min() < -1.8
    assert V.max() > 1.8
    assert np.sum(np.diff(np.sign(V)) != 0) >= 3


def test_simulation_is_truth_plus_noise_of_the_stated_size(system):
    t = np.linspace(system.t[0], system.t[-1], 2000)
    for noise in system.noise:
        data = system.simulate(noise, t=t, random_seed=1)
        sd = (data.y - data.x).std(axis=0)
        # A standard deviation from n draws has a relative error of 1 / sqrt(2 n).
        np.testing.assert_allclose(sd, data.sigma, rtol=5 / np.sqrt(2 * len(t)))


def test_signal_to_noise_ratio_is_of_variances():
    data = systems.fitzhugh_nagumo.simulate("snr10", random_seed=1)
    np.testing.assert_allclose(data.x.var(axis=0) / data.sigma**2, 10)


def test_same_seed_same_data_and_unknown_noise_is_named(system):
    first, second, third = (
        system.simulate(next(iter(system.noise)), random_seed=seed).y for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, second)
    assert not np.allclose(first, third)
    with pytest.raises(ValueError, match=rf"'loud'; {system.name} has the levels"):
        system.simulate("loud")


def test_priors_are_the_references_box(system):
    low, high = system.paper.theta_box
    for prior in system.priors().values():
        outside = pm.logp(prior, np.array([low - 1e-3, high + 1e-3])).eval(mode="FAST_COMPILE")
        np.testing.assert_array_equal(outside, -np.inf)

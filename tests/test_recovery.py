"""Recovery of known truths: simulated Lotka-Volterra, and the lynx and hare reference."""

import numpy as np
import pytest

import pymc_gradmatch as gm
from benchmarks.demo import compare, fit_lynx_hare, log_lotka_volterra
from benchmarks.foundation import recovery
from benchmarks.paper import systems


def test_the_demos_equations_for_logarithms_have_the_solution_of_lotka_volterra():
    ode = gm.ODE(log_lotka_volterra, ["hare", "lynx"], ["alpha", "beta", "gamma", "delta"])
    known, theta = systems.lotka_volterra, [2.0, 1.0, 4.0, 1.0]
    t, x0 = np.linspace(0, 2, 9), np.array([5.0, 3.0])
    expected = known.ode.solve(t, x0, theta)
    np.testing.assert_allclose(np.exp(ode.solve(t, np.log(x0), theta)), expected, rtol=1e-4)


@pytest.mark.slow
def test_lotka_volterra_is_recovered_over_ten_seeds():
    """Assert the median trajectory RMSE from the true start, with the paper's settings."""
    assert recovery(seeds=10) <= 0.07


@pytest.mark.slow
def test_lynx_and_hare_agree_with_the_published_exact_posterior():
    """Assert the demo's claim: means within one reference sd for all four parameters."""
    data = gm.datasets.lynx_hare()
    table = compare(fit_lynx_hare(data, progressbar=False), data.reference)
    assert list(table.index) == ["alpha", "beta", "gamma", "delta"]
    assert (table["distance in reference sd"].abs() < 1).all()

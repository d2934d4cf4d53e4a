"""The solution as a node: differentiable, in any PyMC model."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import pymc_gradmatch as gm
from benchmarks.cases import ACCURACY, BREADTH

DECAY = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
T = np.array([0.0, 0.5, 1.0, 3.0])


def values_of(case):
    """Return starts and parameters of a case, ten of them around the truth, as one array."""
    truth = np.array([*case.x0.values(), *case.theta.values()])
    return truth * np.exp(0.05 * np.random.default_rng(1).normal(size=(10, len(truth))))


def function_of(ode, t, n_states):
    """Return states and their derivatives as a function of one vector, compiled by numba."""
    u = pt.vector("u", dtype="float64")
    names = [*ode.states, *ode.params]
    given = dict(zip(names, [u[k] for k in range(len(names))], strict=True))
    x = ode.solve(
        t, {name: given[name] for name in ode.states}, {name: given[name] for name in ode.params}
    )
    weights = pt.matrix("weights", dtype="float64")
    gradient = pytensor.grad((weights * x).sum(), u)
    return pytensor.function([u, weights], [x, gradient], mode="NUMBA")


CASES = {case.name: case for case in [*ACCURACY, *BREADTH]}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_differences(name):
    """Assert it to a millionth of the largest, at ten points, for a random sum of all states."""
    case = CASES[name]
    evaluate = function_of(case.ode, case.t, len(case.x0))
    rng = np.random.default_rng(2)
    for u in values_of(case):
        x, _ = evaluate(u, np.zeros((len(case.t), len(case.x0))))
        weights = rng.normal(size=x.shape) / np.abs(x).max(axis=0)
        _, gradient = evaluate(u, weights)
        steps = np.diag(3e-4 * u)
        n = len(case.x0)

        def total(u, n=n, weights=weights):
            x = case.ode.solve(case.t, u[:, :n], u[:, n:], rtol=1e-11)
            return (weights * x).sum(axis=(1, 2))

        points = [u + factor * steps for factor in (2, 1, -1, -2)]
        two, one, minus_one, minus_two = map(total, points)
        by_steps = (8 * (one - minus_one) - (two - minus_two)) / 12
        scale = np.abs(by_steps).max()
        np.testing.assert_allclose(3e-4 * u * gradient, by_steps, rtol=0, atol=1e-5 * scale)

"""Ways to go astray at the door: arguments, names, labels, data and priors."""

import warnings

import numpy as np
import pymc as pm
import pytest

import pymc_gradmatch as gm
from pymc_gradmatch.batched import BatchedSolver


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


def test_a_failing_call_in_odeints_order_is_told_the_order():
    def rhs(y, t, p):
        a, b = y
        return [p.k * a, b]

    with pytest.raises(TypeError, match="too many values.*not \\(x, t, theta\\), as for odeint"):
        gm.ODE(rhs, ["a", "b"], ["k"])


def test_time_without_a_state_is_doubted_where_no_argument_is_called_t():
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
def test_a_right_model_is_neither_refused_nor_doubted(rhs):
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
    batch = BatchedSolver(growth)(t, np.ones((2, 1)), np.array([[2.0], [-1.0]]))
    np.testing.assert_allclose(batch[..., 0], [1 + 2 * t, 1 - t], atol=1e-9)


def test_an_ode_without_a_state_in_it_is_fitted(growth, rng):
    t = np.linspace(0, 3, 9)
    y = (1 + 2 * t + rng.normal(0, 0.1, 9))[:, None]
    model = gm.build_model(
        growth, t, y, priors={"k": pm.Normal.dist(0, 5)}, preset="refined", random_seed=1
    )
    found = gm.find_map(model=model, random_seed=1)
    assert abs(found["k"] - 2) < 0.3  # five standard errors of a line's slope are 0.19

"""Stiff draws are integrated with all the others, accurately and in a bounded number of steps."""

from types import SimpleNamespace

import numpy as np
import pymc as pm
import pytest
from numba import njit
from scipy.integrate import solve_ivp

import pymc_gradmatch as gm
from pymc_gradmatch.ode import RHS, batched_solver
from pymc_gradmatch.ode import solve as solving


def _robertson(t, x, theta):
    a, b, c = x
    k1, k2, k3 = theta
    first, second, third = k1 * a, k2 * b * b, k3 * b * c
    return [third - first, first - second - third, second]


def _enzyme(t, x, theta):
    e, s, c, _ = x
    kf, kr, kc = theta
    return [(kr + kc) * c - kf * e * s, kr * c - kf * e * s, kf * e * s - (kr + kc) * c, kc * c]


def _van_der_pol(t, x, theta):
    u, v = x
    return [v, theta[0] * (1 - u * u) * v - u]


CASES = {
    "Robertson": SimpleNamespace(
        rhs=_robertson,
        x0=[1.0, 0.0, 0.0],
        theta=[0.04, 3e7, 1e4],
        t=np.linspace(0, 40, 41),
    ),
    "Robertson, log times": SimpleNamespace(
        rhs=_robertson,
        x0=[1.0, 0.0, 0.0],
        theta=[0.04, 3e7, 1e4],
        t=np.append(0.0, np.geomspace(4.0, 4e6, 13)),
    ),
    "enzyme": SimpleNamespace(
        rhs=_enzyme,
        x0=[0.2, 1.0, 0.0, 0.0],
        theta=[1000.0, 500.0, 1.0],
        t=np.linspace(0, 15, 20),
    ),
    "Van der Pol": SimpleNamespace(  # one fast jump, at 807
        rhs=_van_der_pol,
        x0=[2.0, 0.0],
        theta=[1000.0],
        t=np.append(np.linspace(0, 800, 9), [1000.0, 1200.0]),
    ),
}


@pytest.fixture(scope="module")
def solver_of():
    """Return solvers by right-hand side, each compiled once."""
    solvers = {}

    def solver_of(rhs, n_states, n_params):
        if rhs not in solvers:
            states = [f"x{k}" for k in range(n_states)]
            solvers[rhs] = batched_solver(gm.ODE(rhs, states, [f"p{k}" for k in range(n_params)]))
        return solvers[rhs]

    return solver_of


@pytest.fixture(scope="module")
def tracking():
    """Return the solver of Prothero and Robinson's problem, whose solution is cos(t)."""
    rhs = lambda t, x, theta: [-theta.rate * (x.x - pm.math.cos(t)) - pm.math.sin(t)]  # noqa: E731
    return batched_solver(gm.ODE(rhs, ["x"], ["rate"]))


@pytest.fixture(scope="module")
def growing():
    """Return the solver of a stiff pair of which one goes to infinity at t = 1 / b(0)."""
    rhs = lambda t, x, theta: [theta.rate * (x.b - x.a), theta.growth * x.b**2]  # noqa: E731
    return batched_solver(gm.ODE(rhs, ["a", "b"], ["rate", "growth"]))


def _reference(case):
    def f(t, x):
        return np.array(case.rhs(t, x, case.theta))

    solution = solve_ivp(
        f, (case.t[0], case.t[-1]), case.x0, "Radau", case.t, rtol=1e-10, atol=1e-16
    )
    assert solution.success
    return solution.y.T


def _draws(case, n_draws, rng):
    theta = np.array(case.theta)
    theta = theta * np.exp(0.2 * rng.normal(size=(n_draws, len(theta))))
    return np.tile(case.x0, (n_draws, 1)), theta


def _predator_prey(t, x, theta):
    prey, predator = x
    a, b, c, d = theta
    return [prey * (a - b * predator), predator * (c * prey - d)]


def test_draws_that_step_side_by_side_are_those_that_step_alone(solver_of):
    """Assert it bit for bit, of more draws than there are lanes, which end at different steps."""
    rng = np.random.default_rng(3)
    solve = solver_of(_predator_prey, 2, 4)
    n_draws = 2 * solving.N_LANES + 5
    t = np.linspace(0, 3, 13)
    x0 = np.exp(0.5 * rng.normal(size=(n_draws, 2)))
    theta = np.exp(rng.normal(size=(n_draws, 4)))
    theta[7] = 1e300  # which fails, and leaves its lane to another
    together, steps = solve.piece(t, x0, theta)
    alone = [solve.piece(t, *draw) for draw in zip(x0[:, None], theta[:, None], strict=True)]
    np.testing.assert_array_equal(together, np.concatenate([states for states, _ in alone]))
    np.testing.assert_array_equal(steps, np.concatenate([count for _, count in alone]))
    assert len(np.unique(steps[:, 0])) > 5


@njit(RHS)
def _growth(t, x, theta, f):
    f[:] = x


@njit(RHS)
def _nowhere(t, x, theta, f):
    f[:] = np.nan


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_stiff_solutions_are_those_of_radau(name, solver_of):
    """Assert 1e-7 of each state's size; LSODA at its tolerance of 1e-8 is up to 6e-6 off."""
    case = CASES[name]
    solve = solver_of(case.rhs, len(case.x0), len(case.theta))
    solution = solve(case.t, [case.x0], [case.theta])[0]
    expected = _reference(case)
    scale = np.abs(expected).max(axis=0)
    np.testing.assert_allclose(solution / scale, expected / scale, rtol=0, atol=1e-7)


def test_a_stiff_forced_decay_follows_its_known_solution(tracking):
    """Assert cos(t), on which and off which draws start."""
    t = np.linspace(0, 10, 11)
    rate = np.array([[1e3], [1e4], [1e6], [1e8]])
    solution = tracking(t, [[1.0], [1.5], [0.0], [1.0]], rate)[..., 0]
    np.testing.assert_allclose(solution[:, 1:], np.tile(np.cos(t[1:]), (4, 1)), atol=1e-8)


@pytest.mark.slow
def test_errors_follow_the_tolerance(solver_of, monkeypatch):
    """Assert it for a jump of Van der Pol's oscillator, with steps that no output time cuts."""
    case = CASES["Van der Pol"]
    solve = solver_of(case.rhs, 2, 1)
    expected = _reference(case)[-1]
    errors = []
    for tolerance in (1e-4, 1e-6, 1e-9):
        monkeypatch.setattr(solving, "RTOL", tolerance)
        solution = solve(case.t[[0, -1]], [case.x0], [case.theta])[0, -1]
        errors.append(np.abs(solution / expected - 1).max())
        assert errors[-1] < 10 * tolerance
    assert errors[0] > 10 * errors[1]
    assert errors[1] > 10 * errors[2]


def _step(width, slope):
    """Return x after one step of x' = x from 1, and its error, with some other Jacobian."""
    x = np.empty(1)
    at, theta, absolute = (0.0, np.ones(1), width), np.zeros((1, 0)), np.ones(1)
    scratch = np.empty((solving.implicit_rows(1), 1))
    error = solving.implicit_step(
        _growth, np.full((1, 1), slope), *at, theta, absolute, solving.RTOL, scratch, x
    )
    return x[0], error


@pytest.mark.parametrize("slope", [0.3, 0.0], ids=["wrong", "zero"])
def test_the_implicit_step_has_order_nine_whatever_the_jacobian(slope):
    """Assert that a step half as wide has about 2 to the ten less error."""
    wide, narrow = (abs(_step(width, slope)[0] - np.exp(width)) for width in (2.0, 1.0))
    assert 2**9 < wide / narrow < 2**11


def test_differences_are_the_jacobian_and_zero_where_there_is_none(rng):
    case = CASES["Robertson"]
    ode = gm.ODE(case.rhs, ["a", "b", "c"], ["k1", "k2", "k3"])
    x = np.abs(rng.normal(1, 0.1, (5, 3))) * [0.7, 3e-5, 0.3]
    theta, t = np.tile(case.theta, (5, 1)), np.zeros(5)
    _, by_state, _ = ode.linearised(t, x, np.array(case.theta))
    each_difference = solving.compiled(solving.each_difference)
    found, nowhere = np.empty((2, 5, 3, 3))
    each_difference(ode.machine_code, t, x, theta, 1e-11 * x, solving.RTOL, found)
    np.testing.assert_allclose(found, by_state, rtol=1e-5, atol=1e-6)
    each_difference(_nowhere, t, x, theta, 1e-11 * x, solving.RTOL, nowhere)
    assert (nowhere == 0).all()


@pytest.mark.slow
def test_a_draw_in_a_mixed_batch_is_the_same_as_alone(solver_of, rng):
    case = CASES["enzyme"]
    solve = solver_of(case.rhs, 4, 3)
    x0, theta = _draws(case, 6, rng)
    theta[::2] /= [1000, 1000, 1]  # not stiff
    together = solve(case.t, x0, theta)
    alone = np.concatenate([solve(case.t, x0[[k]], theta[[k]]) for k in range(6)])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-8)


def test_stiff_draws_change_the_road_early_and_the_others_never(solver_of, rng):
    case = CASES["Robertson"]
    x0, theta = _draws(case, 20, rng)
    trajectories, n_steps = solver_of(case.rhs, 3, 3).piece(case.t, np.array(x0), theta)
    assert np.isfinite(trajectories).all()
    explicit, implicit = n_steps.T
    assert explicit.max() < 300
    assert 40 < implicit.min() <= implicit.max() < 300
    lotka_volterra = gm.systems.lotka_volterra
    theta = np.array([[*lotka_volterra.theta.values()]])
    solve = batched_solver(lotka_volterra.ode)
    _, n_steps = solve.piece(lotka_volterra.t, np.array([lotka_volterra.x0]), theta)
    assert n_steps[0, 1] == 0


def test_draws_that_blow_up_are_nan_after_few_steps(growing):
    """Assert that the draw beside them goes on."""
    t, x0 = np.linspace(0, 3, 7), np.full((3, 2), 0.5)
    theta = np.array([[1e5, 1.0], [1.0, 1.0], [1e5, -1.0]])
    solution = growing(t, x0, theta)
    assert np.isnan(solution[:2]).all()
    np.testing.assert_allclose(solution[2, -1], 0.2, atol=1e-4)
    _, n_steps = growing.piece(t, x0, theta)
    assert n_steps.sum(axis=1).max() < 1200


def test_no_draw_takes_more_steps_than_allowed(monkeypatch):
    """Assert that ten thousand swings, on which no method can save steps, are given up."""
    monkeypatch.setattr(solving, "MAX_STEPS", 100)
    monkeypatch.setattr(solving, "MAX_IMPLICIT_STEPS", 50)
    swing = gm.ODE(lambda t, x, theta: [x.v, -theta.k * x.u], ["u", "v"], ["k"])
    solve = batched_solver(swing)
    t, x0 = np.linspace(0, 62832, 5), np.array([[1.0, 0.0], [0.0, 0.0]])
    solution = solve(t, x0, [[1.0], [1.0]])
    assert np.isnan(solution[0]).all()
    np.testing.assert_array_equal(solution[1], 0)
    _, n_steps = solve.piece(t, x0, np.ones((2, 1)))
    np.testing.assert_array_equal(n_steps[0], [105, 55])


def test_a_small_difference_of_large_states_does_not_stop_the_integration():
    """Assert x' = 1e5 (a - b - x) with a = b, which rounding alone keeps from zero."""
    ode = gm.ODE(
        lambda t, x, theta: [-0.1 * x.a, -0.1 * x.b, theta.rate * (x.a - x.b - x.x)],
        ["a", "b", "x"],
        ["rate"],
    )
    t = np.linspace(0, 10, 11)
    solution = batched_solver(ode)(t, [[1.0, 1.0, 1e-9]], [[1e5]])[0]
    np.testing.assert_allclose(solution[:, 0], np.exp(-0.1 * t), atol=1e-9)
    np.testing.assert_allclose(solution[1:, 2], 0, atol=1e-9)


def test_a_step_whose_matrix_is_singular_fails():
    """Assert it for x' = x at h = 1, where I - h J is zero, and not beside it."""
    assert np.isnan(_step(2.0, slope=1.0)[1])
    np.testing.assert_allclose(_step(0.5, slope=1.0)[0], np.exp(0.5), rtol=1e-9)


@pytest.mark.parametrize("n", [1, 4, 12])
def test_small_matrices_are_inverted_as_numpy_does(n, rng):
    matrix, inverse = rng.normal(size=(n, n)), np.empty((n, n))
    matrix[0, 0] = 0 if n > 1 else 2  # so that rows change places
    expected = np.linalg.inv(matrix)
    assert solving.invert(matrix.copy(), inverse)
    np.testing.assert_allclose(inverse, expected, rtol=1e-9, atol=1e-12)
    assert not solving.invert(np.zeros((n, n)), inverse)


def test_output_times_between_steps_are_as_accurate_as_the_steps(solver_of):
    """Lotka-Volterra is solved in some forty steps; the times asked for are many more."""
    lotka_volterra = gm.systems.lotka_volterra
    t = np.linspace(0, 10, 2001)
    start, theta = lotka_volterra.x0, [lotka_volterra.theta[n] for n in lotka_volterra.ode.params]
    exact = solve_ivp(
        lambda t, x: lotka_volterra.ode.on_arrays(np.float64(t), x, np.array(theta)),
        (0, 10), start, method="DOP853", rtol=3e-14, atol=1e-14, t_eval=t,
    ).y.T  # fmt: skip
    solve = batched_solver(lotka_volterra.ode)
    draws = solve(t, [start, np.multiply(start, 2)], [theta, theta])
    np.testing.assert_allclose(draws[0], exact, rtol=1e-7)
    coarse = solve(t[::500], [start, np.multiply(start, 2)], [theta, theta])
    np.testing.assert_allclose(draws[:, ::500], coarse, rtol=1e-7)


def test_comparisons_are_added_as_pytensor_adds_them():
    ode = gm.ODE(
        lambda t, x, theta: [theta.k * ((x.a > 1) + (x.a > 2)) * ((x.a > 1) * (x.a > 0)) + 1],
        ["a"],
        ["k"],
    )
    t = np.arange(4.0)
    expected = ode.solve(t, [0.5], [1.0])
    np.testing.assert_allclose(batched_solver(ode)(t, [[0.5]], [[1.0]])[0], expected, rtol=1e-3)


def test_negative_powers_of_zero_are_infinite():
    ode = gm.ODE(lambda t, x, theta: [-theta.k * x.a, (1 + x.a**-2) ** -1 - x.b], ["a", "b"], ["k"])
    t, starts, rates = np.array([0.0, 1.0]), [[0.0, 0.0], [1.0, 0.0]], [[1.0], [1.0]]
    solved = batched_solver(ode)(t, starts, rates)
    np.testing.assert_allclose(solved[0], 0, atol=1e-12)
    np.testing.assert_allclose(solved[1], ode.solve(t, starts[1], rates[1]), rtol=1e-6)

"""Stiff draws are integrated with all the others, accurately and in a bounded number of steps."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pymc as pm
import pytest
from numba import njit
from scipy.integrate import solve_ivp

import pymc_gradmatch as gm
from benchmarks.cases import ACCURACY, BREADTH
from benchmarks.paper import systems
from pymc_gradmatch.ode import Solver, explicit, implicit
from pymc_gradmatch.ode import solve as solving
from pymc_gradmatch.ode.solver_data import setup_at


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


def solved(ode, t, x0, theta, **settings):
    """Return the solutions of an ODE, and how many steps they took."""
    x, _, _, n_steps = Solver(ode.equations(), t, **settings)(x0, theta)
    return x, n_steps


def of_case(case):
    """Return the ODE of a case."""
    states = [f"x{k}" for k in range(len(case.x0))]
    return gm.ODE(case.rhs, states, [f"p{k}" for k in range(len(case.theta))])


@pytest.fixture(scope="module")
def tracking():
    """Return Prothero and Robinson's problem, whose solution is cos(t)."""
    rhs = lambda t, x, theta: [-theta.rate * (x.x - pm.math.cos(t)) - pm.math.sin(t)]  # noqa: E731
    return gm.ODE(rhs, ["x"], ["rate"])


@pytest.fixture(scope="module")
def growing():
    """Return a stiff pair of which one goes to infinity at t = 1 / b(0)."""
    rhs = lambda t, x, theta: [theta.rate * (x.b - x.a), theta.growth * x.b**2]  # noqa: E731
    return gm.ODE(rhs, ["a", "b"], ["rate", "growth"])


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


def test_draws_that_step_side_by_side_are_those_that_step_alone():
    """Assert it bit for bit, of more draws than there are lanes, which end at different steps."""
    rng = np.random.default_rng(3)
    ode = gm.ODE(_predator_prey, ["prey", "predator"], ["a", "b", "c", "d"])
    n_draws = 2 * explicit.N_LANES + 5
    t = np.linspace(0, 3, 13)
    x0 = np.exp(0.5 * rng.normal(size=(n_draws, 2)))
    theta = np.exp(rng.normal(size=(n_draws, 4)))
    theta[7] = 1e300  # which fails, and leaves its lane to another
    together, steps = solved(ode, t, x0, theta)
    alone = [solved(ode, t, *draw) for draw in zip(x0[:, None], theta[:, None], strict=True)]
    np.testing.assert_array_equal(together, np.concatenate([states for states, _ in alone]))
    np.testing.assert_array_equal(steps, np.concatenate([count for _, count in alone]))
    assert len(np.unique(steps[:, 0])) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_stiff_solutions_are_those_of_radau(name):
    """Assert 1e-7 of each state's size; LSODA at its tolerance of 1e-8 is up to 6e-6 off."""
    case = CASES[name]
    solution = of_case(case).solve(case.t, case.x0, case.theta)
    expected = _reference(case)
    scale = np.abs(expected).max(axis=0)
    np.testing.assert_allclose(solution / scale, expected / scale, rtol=0, atol=1e-7)


@pytest.mark.parametrize("fastest", [3.0, 3e5], ids=["explicit", "implicit"])
def test_sensitivities_in_groups_are_those_of_a_few_at_a_time(fastest):
    """Assert it of a chain with a dose and a reset, by starts and rates."""
    n = 12
    names = [f"x{k}" for k in range(n)]

    def rhs(t, x, theta):
        flows = [theta[k] * x[k] for k in range(n)]
        return [(flows[k - 1] if k else 0) - flows[k] for k in range(n)]

    ode = gm.ODE(rhs, names, [f"k{k}" for k in range(n)]).with_inputs(
        {"x0": gm.Input([0.4], [2.0], kind="dose"), "x11": gm.Input([0.7], [0.1], kind="reset")}
    )
    t = np.linspace(0, 1, 6)
    x0, theta = np.linspace(1, 2, n), np.append(fastest, np.linspace(1, 3, n - 1))
    together = Solver(ode.equations((True,) * 2 * n), t)
    assert together.equations.code.n_groups > 1
    x, sensitivities, _, n_steps = together([x0], [theta])
    assert (n_steps[0, 1] > 0) == (fastest > 1e3)
    for few in np.split(np.arange(2 * n), 3):
        apart = Solver(ode.equations(tuple(np.isin(np.arange(2 * n), few).tolist())), t)
        assert apart.equations.code.n_groups == 1
        expected = apart([x0], [theta])
        size = np.abs(expected.sensitivities).max(axis=(0, 1, 2))
        np.testing.assert_allclose(x, expected.x, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(
            sensitivities[..., few] / size, expected.sensitivities / size, rtol=0, atol=1e-6
        )


def test_a_stiff_forced_decay_follows_its_known_solution(tracking):
    """Assert cos(t), on which and off which draws start."""
    t = np.linspace(0, 10, 11)
    rate = np.array([[1e3], [1e4], [1e6], [1e8]])
    solution = tracking.solve(t, [[1.0], [1.5], [0.0], [1.0]], rate)[..., 0]
    np.testing.assert_allclose(solution[:, 1:], np.tile(np.cos(t[1:]), (4, 1)), atol=1e-8)


def test_a_small_stiff_state_among_larger_ones_follows_its_known_solution():
    """Assert it of one of size 1e-14 with the fastest rate and two of 1e5, of linear equations."""
    ode = gm.ODE(
        lambda t, x, theta: [
            -0.1 * x.slow,
            theta.rate * (x.slow - x.large),
            9e4 * (1e-19 * x.large - x.small),
        ],
        ["slow", "large", "small"],
        ["rate"],
    )
    t = np.array([0.0, 5.0, 15.0])
    slow = 1e5 * np.exp(-0.1 * t[1:])
    large = slow / (1 - 0.1 / 1e4)
    small = 1e-19 * large / (1 - 0.1 / 9e4)
    solution = ode.solve(t, [1e5, 1e5, 0.0], [1e4])[1:]
    np.testing.assert_allclose(solution, np.stack([slow, large, small], axis=1), rtol=1e-8)


@pytest.mark.slow
def test_errors_follow_the_tolerance():
    """Assert it for a jump of Van der Pol's oscillator, with steps that no output time cuts."""
    case = CASES["Van der Pol"]
    ode, expected = of_case(case), _reference(case)[-1]
    errors = []
    for tolerance in (1e-4, 1e-6, 1e-9):
        solution = ode.solve(case.t[[0, -1]], case.x0, case.theta, rtol=tolerance)[-1]
        errors.append(np.abs(solution / expected - 1).max())
        assert errors[-1] < 10 * tolerance
    assert errors[0] > 10 * errors[1]
    assert errors[1] > 10 * errors[2]


def _step(width, slope):
    """Return x after one step of x' = k x from 1, and its error, with some other Jacobian."""
    growth = gm.ODE(lambda t, x, theta: [theta.k * x.x], ["x"], ["k"])
    solver = Solver(growth.equations(), np.array([0.0, 1.0]))
    memory, after = np.empty(100), np.empty(1)
    arrays = np.ones(1), np.array([slope]), np.ones(1), np.ones(1), memory, after
    error = _implicit_step(solver.plan, width, *arrays)
    return after[0], error


@njit
def _implicit_step(plan, width, x, jacobian, theta, absolute, memory, after):
    return implicit.implicit_step(
        setup_at(plan.ctypes), 0.0, width, x.ctypes, jacobian.ctypes, theta.ctypes, absolute.ctypes,
        memory.ctypes, after.ctypes,
    )  # fmt: skip


@njit
def _invert(matrix, inverse):
    return implicit.invert(len(matrix), matrix.ctypes, inverse.ctypes)


@pytest.mark.parametrize("slope", [0.3, 0.0], ids=["wrong", "zero"])
def test_the_implicit_step_has_order_nine_whatever_the_jacobian(slope):
    """Assert that a step half as wide has about 2 to the ten less error."""
    wide, narrow = (abs(_step(width, slope)[0] - np.exp(width)) for width in (2.0, 1.0))
    assert 2**9 < wide / narrow < 2**11


def test_the_jacobian_of_stiff_steps_is_zero_where_it_is_not_finite():
    ode = gm.ODE(
        lambda t, x, theta: [theta.k * x.a * x.b, pm.math.sqrt(x.a - 1) * theta.k],
        ["a", "b"],
        ["k"],
    )
    equations, found = ode.equations(), np.empty(4)
    jacobian = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 5)(
        equations.code.jacobian
    )
    for a, expected in {5.0: [6, 10, 0.5, 0], 1.0: [6, 2, 0, 0]}.items():
        arrays = np.zeros(1), np.array([a, 3.0]), np.array([2.0]), equations.tables, found
        jacobian(1, 1, *(array.ctypes.data for array in arrays))
        np.testing.assert_allclose(found, expected)


@pytest.mark.slow
def test_a_draw_in_a_mixed_batch_is_the_same_as_alone(rng):
    case = CASES["enzyme"]
    ode = of_case(case)
    x0, theta = _draws(case, 6, rng)
    theta[::2] /= [1000, 1000, 1]  # not stiff
    together = ode.solve(case.t, x0, theta)
    alone = np.stack([ode.solve(case.t, x0[k], theta[k]) for k in range(6)])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-8)


def test_stiff_draws_switch_to_the_implicit_method_early_and_others_never(rng):
    case = CASES["Robertson"]
    x0, theta = _draws(case, 20, rng)
    trajectories, n_steps = solved(of_case(case), case.t, x0, theta)
    assert np.isfinite(trajectories).all()
    explicit, implicit = n_steps.T
    assert explicit.max() < 300
    assert 40 < implicit.min() <= implicit.max() < 300
    lotka_volterra = systems.lotka_volterra
    theta = np.array([[*lotka_volterra.theta.values()]])
    _, n_steps = solved(lotka_volterra.ode, lotka_volterra.t, [lotka_volterra.x0], theta)
    assert n_steps[0, 1] == 0


def test_draws_that_blow_up_are_nan_after_few_steps(growing):
    """Assert that another draw of the batch is solved."""
    t, x0 = np.linspace(0, 3, 7), np.full((3, 2), 0.5)
    theta = np.array([[1e5, 1.0], [1.0, 1.0], [1e5, -1.0]])
    solution, n_steps = solved(growing, t, x0, theta)
    assert np.isnan(solution[:2]).all()
    np.testing.assert_allclose(solution[2, -1], 0.2, atol=1e-4)
    assert n_steps.sum(axis=1).max() < 1200


def test_no_draw_takes_more_steps_than_allowed(monkeypatch):
    """Assert that ten thousand swings, on which no method can save steps, are given up."""
    monkeypatch.setattr(solving, "MAX_STEPS", 100)
    swing = gm.ODE(lambda t, x, theta: [x.v, -theta.k * x.u], ["u", "v"], ["k"])
    t, x0 = np.linspace(0, 62832, 5), np.array([[1.0, 0.0], [0.0, 0.0]])
    solution, n_steps = solved(swing, t, x0, [[1.0], [1.0]])
    assert np.isnan(solution[0]).all()
    np.testing.assert_array_equal(solution[1], 0)
    np.testing.assert_array_equal(n_steps[0], [104, 0])


def test_a_small_difference_of_large_states_does_not_stop_the_integration():
    """Assert x' = 1e5 (a - b - x) with a = b, which rounding alone keeps from zero."""
    ode = gm.ODE(
        lambda t, x, theta: [-0.1 * x.a, -0.1 * x.b, theta.rate * (x.a - x.b - x.x)],
        ["a", "b", "x"],
        ["rate"],
    )
    t = np.linspace(0, 10, 11)
    solution = ode.solve(t, [1.0, 1.0, 1e-9], [1e5])
    np.testing.assert_allclose(solution[:, 0], np.exp(-0.1 * t), atol=1e-9)
    np.testing.assert_allclose(solution[1:, 2], 0, atol=1e-9)


def test_a_step_whose_matrix_is_singular_fails():
    """Assert it for x' = x at h = 1, where I - h J is zero, and not at another h."""
    assert np.isnan(_step(2.0, slope=1.0)[1])
    np.testing.assert_allclose(_step(0.5, slope=1.0)[0], np.exp(0.5), rtol=1e-9)


@pytest.mark.parametrize("n", [1, 4, 12])
def test_small_matrices_are_inverted_as_numpy_does(n, rng):
    matrix, inverse = rng.normal(size=(n, n)), np.empty((n, n))
    matrix[0, 0] = 0 if n > 1 else 2  # so that rows change places
    expected = np.linalg.inv(matrix)
    assert _invert(matrix.copy(), inverse)
    np.testing.assert_allclose(inverse, expected, rtol=1e-9, atol=1e-12)
    assert not _invert(np.zeros((n, n)), inverse)


def test_output_times_between_steps_are_as_accurate_as_the_steps():
    """Lotka-Volterra is solved in some forty steps; the times asked for are many more."""
    lotka_volterra = systems.lotka_volterra
    t = np.linspace(0, 10, 2001)
    start, theta = lotka_volterra.x0, [lotka_volterra.theta[n] for n in lotka_volterra.ode.params]
    exact = solve_ivp(
        lambda t, x: lotka_volterra.ode.slopes(t, x, theta),
        (0, 10), start, method="DOP853", rtol=3e-14, atol=1e-14, t_eval=t,
    ).y.T  # fmt: skip
    solve = lotka_volterra.ode.solve
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
    rhs = lambda t, a: (int(a[0] > 1) or int(a[0] > 2)) * (a > 1) * (a > 0) + 1.0  # noqa: E731
    expected = solve_ivp(rhs, (0, 3), [0.5], t_eval=t, rtol=1e-8).y.T
    np.testing.assert_allclose(ode.solve(t, [0.5], [1.0]), expected, rtol=1e-3)


def test_negative_powers_of_zero_are_infinite():
    ode = gm.ODE(lambda t, x, theta: [-theta.k * x.a, (1 + x.a**-2) ** -1 - x.b], ["a", "b"], ["k"])
    t, starts, rates = np.array([0.0, 1.0]), [[0.0, 0.0], [1.0, 0.0]], [[1.0], [1.0]]
    x = ode.solve(t, starts, rates)
    np.testing.assert_allclose(x[0], 0, atol=1e-12)
    one = solve_ivp(lambda t, x: ode.slopes(t, x, [1.0]), (0, 1), [1.0, 0.0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(x[1, -1], one.y[:, -1], rtol=1e-6)


@pytest.mark.parametrize("case", [*ACCURACY, *BREADTH], ids=lambda case: case.name)
def test_equations_of_the_literature_are_straight_line_code(case):
    """Assert that nothing in them, or in their derivatives, has to be compiled otherwise."""
    n = len(case.ode.states) + len(case.ode.params)
    for wrt in (None, (True,) * n):
        assert len(case.ode.transformed.equations(wrt).code.owners) == 1

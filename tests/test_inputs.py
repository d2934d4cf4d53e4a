"""Explicit time and known inputs: in graphs, in solvers across kinks and jumps, and in models."""

import pickle
from itertools import pairwise

import numpy as np
import pymc as pm
import pytest
from scipy.integrate import solve_ivp

import pymc_gradmatch as gm
from pymc_gradmatch.ode import Solver

TIMES, VALUES = np.array([0.0, 1.3, 2.0, 4.1]), np.array([1.0, 5.0, 0.0, 2.0])


def _rhs(t, x, theta, u):
    # Stiff where the rate is large; explicit time beside the input.
    return [
        u.u * (1 + 0.1 * pm.math.sin(t)) - theta.rate * x.a + x.b,
        theta.slow * (x.a - x.b) + u.w,
    ]


@pytest.fixture(scope="module")
def forced():
    return gm.ODE(_rhs, ["a", "b"], ["rate", "slow"], inputs=["u", "w"])


def _piecewise(kind, rate, slow, t):
    """Integrate by Radau between the times of the input alone, each piece with its own line."""

    def line(i):
        slope = 0.0
        if kind == "linear" and i + 1 < len(TIMES):
            slope = (VALUES[i + 1] - VALUES[i]) / (TIMES[i + 1] - TIMES[i])
        return lambda time: VALUES[i] + slope * (time - TIMES[i])

    x, found = np.array([1.0, 0.0]), {}
    edges = [*TIMES, 6.0] if kind == "previous" else TIMES
    for i in range(len(edges) - 1):
        u = line(i)

        def f(time, x, u=u):
            return [
                u(time) * (1 + 0.1 * np.sin(time)) - rate * x[0] + x[1],
                slow * (x[0] - x[1]) + np.cos(time),
            ]

        inside = t[(t >= edges[i]) & (t <= edges[i + 1])]
        at = np.union1d(inside, edges[i : i + 2])
        piece = solve_ivp(f, (edges[i], edges[i + 1]), x, "Radau", at, rtol=1e-11, atol=1e-13)
        assert piece.success
        found |= dict(zip(piece.t, piece.y.T, strict=True))
        x = piece.y[:, -1]
    return np.array([found[time] for time in t])


@pytest.mark.parametrize("kind", ["linear", "previous"])
@pytest.mark.parametrize("rate", [0.7, 3e4], ids=["soft", "stiff"])
@pytest.mark.parametrize("at_jumps", [False, True])
def test_solvers_step_to_kinks_and_jumps(forced, kind, rate, at_jumps):
    """Assert scipy's solution of every piece by itself, whether or not a jump is an output time."""
    t = np.array([0.0, 0.9, 1.7, 3.0, 4.1] if kind == "linear" else [0.0, 0.9, 1.7, 3.0, 5.5])
    t = np.union1d(t, TIMES) if at_jumps else t
    ode = forced.with_inputs({"u": gm.Input(TIMES, VALUES, kind), "w": lambda t: pm.math.cos(t)})
    expected = _piecewise(kind, rate, 0.4, t)
    scale = np.abs(expected).max(axis=0)
    one = ode.solve(t, [1.0, 0.0], [rate, 0.4])
    np.testing.assert_allclose(one / scale, expected / scale, rtol=0, atol=3e-6)
    many = Solver(ode.equations(), t)([[1.0, 0.0]] * 2, [[rate, 0.4], [1.0, 1.0]]).x[0]
    np.testing.assert_allclose(many / scale, expected / scale, rtol=0, atol=3e-8)


def test_a_short_pulse_between_output_times_is_not_missed():
    ode = gm.ODE(lambda t, x, theta, u: [u.dose - theta.k * x.c], ["c"], ["k"], inputs=["dose"])
    pulse = gm.Input([0, 50, 50.001], [0.0, 1e3, 0.0], kind="previous")
    dosed = ode.with_inputs({"dose": pulse})
    expected = (1 - np.exp(-0.001 * 0.1)) * 1e4 * np.exp(-0.1 * (100 - 50.001))
    for solution in [
        dosed.solve([0.0, 100.0], [0.0], [0.1])[-1, 0],
        Solver(dosed.equations(), [0.0, 100.0])([[0.0]], [[0.1]]).x[0, -1, 0],
    ]:
        np.testing.assert_allclose(solution, expected, rtol=1e-7)


@pytest.mark.parametrize("kind", ["linear", "previous"])
def test_the_graph_of_an_input_is_its_interpolation(kind, fast_compile):
    t = np.append(np.linspace(0, 4.05, 83) + 1e-9, TIMES)
    values = gm.Input(TIMES, VALUES, kind)(t).eval()
    previous = VALUES[np.searchsorted(TIMES, t, side="right") - 1]
    expected = np.interp(t, TIMES, VALUES) if kind == "linear" else previous
    np.testing.assert_allclose(values, expected, atol=1e-12)


def test_of_the_two_sides_of_a_jump_the_graph_has_the_later(fast_compile):
    ode = gm.ODE(lambda t, x, theta, u: [u.u], ["x"], ["k"], inputs=["u"])
    stepped = ode.with_inputs({"u": gm.Input([0, 1], [2.0, 7.0], "previous")})
    f = stepped(np.array([0.0, 1 - 1e-9, 1.0]), np.zeros((3, 1)), [0.0]).eval()
    np.testing.assert_array_equal(f[:, 0], [2, 2, 7])


def test_an_ode_with_inputs_can_be_pickled(forced):
    ode = forced.with_inputs({"u": gm.Input(TIMES, VALUES), "w": gm.Input([0, 9], [0, 0])})
    again = pickle.loads(pickle.dumps(ode))
    x = [ode.solve([0.0, 2.0], [1.0, 0.0], [0.7, 0.4]) for ode in (ode, again)]
    np.testing.assert_array_equal(*x)
    assert (
        repr(again)
        == repr(forced)
        == ("ODE(states=['a', 'b'], params=['rate', 'slow'], inputs=['u', 'w'])")
    )


def test_inputs_given_to_solve_are_those_of_with_inputs(forced):
    inputs = {"u": gm.Input(TIMES, VALUES), "w": lambda t: 0 * t}
    arguments = [0.0, 2.0], [1.0, 0.0], [0.7, 0.4]
    given = forced.solve(*arguments, inputs=inputs)
    np.testing.assert_array_equal(given, forced.with_inputs(inputs).solve(*arguments))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gm.Input([0, 1], [0, 1, 2]), ValueError, r"shapes \(2,\) and \(3,\)"),
        (lambda: gm.Input([0], [0]), ValueError, "at least 2"),
        (lambda: gm.Input([0, 1, 1], [0, 1, 2]), ValueError, "not increasing"),
        (lambda: gm.Input([0, 1], [0, np.nan]), ValueError, "no finite value at time 1"),
        (lambda: gm.Input([0, 1], [0, 1], kind="next"), ValueError, "expected one of"),
    ],
)
def test_an_input_that_cannot_be_used_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"u": gm.Input(TIMES, VALUES)}, ValueError, r"missing for \['w'\]"),
        ({"u": 3.0, "w": gm.Input(TIMES, VALUES)}, TypeError, "'u' is a float; expected gm.Input"),
        ({"u": np.sin, "w": lambda t: t[:2]}, ValueError, "'w' has shape"),
        ({"u": lambda: 1, "w": lambda t: t}, TypeError, "calling the input 'u'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(forced, inputs, error, message):
    with pytest.raises(error, match=message):
        forced.with_inputs(inputs)


def test_an_input_must_cover_the_times(forced):
    ode = forced.with_inputs({"u": gm.Input(TIMES, VALUES), "w": lambda t: t})
    with pytest.raises(ValueError, match=r"'u' is known from 0 to 4.1, and asked .* to 5"):
        ode.solve([0.0, 5.0], [1.0, 0.0], [0.7, 0.4])


def test_inputs_that_were_not_given_are_asked_for(forced):
    with pytest.raises(ValueError, match=r"\['u', 'w'\] of the ODE were not given"):
        forced.solve([0.0, 5.0], [1.0, 0.0], [0.7, 0.4])
    plain = gm.ODE(lambda t, x, theta: [x.a], ["a"], ["k"])
    with pytest.raises(ValueError, match="the ODE has none"):
        plain.with_inputs({"u": gm.Input(TIMES, VALUES)})


def test_a_right_hand_side_that_picks_a_time_of_an_input_is_refused():
    with pytest.raises(ValueError, match="indexes input 'u'"):
        gm.ODE(lambda t, x, theta, u: [u.u[0] * x.a], ["a"], ["k"], inputs=["u"])


def _slow_broken(cov, edges, t1, t2):
    """Return the covariance of a sum of increments, one independent process after the other."""
    total = 0.0
    for j, (start, end) in enumerate(pairwise(edges)):
        a, b = np.clip(t1, start, end), np.clip(t2, start, end)
        total += cov(a, b)
        if j > 0:
            total += cov(start, start) - cov(a, start) - cov(start, b)
    return total


def test_a_broken_kernel_is_that_of_a_sum_of_increments():
    t, edges = np.linspace(0, 5, 11), [-np.inf, 1.2, 3.0, np.inf]
    kernel = gm.kernels.Broken(pm.gp.cov.ExpQuad(1, ls=0.8), edges[1:-1])
    expected = [
        [_slow_broken(lambda a, b: np.exp(-((a - b) ** 2) / 1.28), edges, a, b) for b in t]
        for a in t
    ]
    np.testing.assert_allclose(kernel(t[:, None]).eval(), expected, atol=1e-12)
    np.testing.assert_allclose(kernel(t[:, None], diag=True).eval(), np.diag(expected), atol=1e-12)


def test_slopes_of_a_broken_kernel_are_differences_to_the_right():
    t, h = np.array([0.5, 1.0, 2.0, 2.5]), 1e-4
    kernel = gm.kernels.Broken(pm.gp.cov.Matern52(1, ls=0.8), [1.0, 2.0])
    blocks = gm.derivatives.evaluate_blocks(kernel, t)
    both = np.concatenate([t, t + h])
    k = kernel(both[:, None]).eval()
    ahead, here = k[4:], k[:4]
    np.testing.assert_allclose(blocks.dk_dt1, (ahead - here)[:, :4] / h, atol=1e-3)
    change = (ahead - here) / h
    np.testing.assert_allclose(blocks.d2k, (change[:, 4:] - change[:, :4]) / h, atol=1e-2)


@pytest.fixture(scope="module")
def tank():
    """Return an ODE, its input with two jumps, and data; one jump is no time of the data."""
    ode = gm.ODE(
        lambda t, x, theta, u: [theta.b * u.flow - theta.k * x.level],
        ["level"],
        ["k", "b"],
        inputs=["flow"],
    )
    flow = gm.Input([0, 3.1, 6.0], [0.5, 3.0, 0.0], kind="previous")
    t = np.linspace(0, 10, 21)
    x = ode.solve(t, [2.0], [0.6, 1.3], inputs={"flow": flow})
    y = x + np.random.default_rng(1).normal(0, 0.05, x.shape)
    return ode, {"flow": flow}, t, y


PRIORS = {"k": pm.HalfNormal.dist(3), "b": pm.HalfNormal.dist(3)}


def test_the_grid_has_the_jumps_and_the_states_a_kink_there(tank):
    ode, inputs, t, y = tank
    gp = gm.fit_gp(t, y, cov="ExpQuad", random_seed=1).with_breaks(ode.with_inputs(inputs).jumps)
    np.testing.assert_array_equal(gp.breaks, [3.1, 6.0])
    assert {3.1, 6.0} <= set(gp.t)
    assert len(gp.t) == len(t) + 3
    again = gp.with_grid(2).with_breaks([3.1])
    np.testing.assert_array_equal(again.breaks, gp.breaks)
    np.testing.assert_array_equal(again.at_observations(again.t[:, None])[:, 0], t)
    # D maps a line with a kink to its slopes, those to the right at the kinks.
    kinked = np.interp(gp.t, [0, 3.1, 6, 10], [0, 1, -2, 0])
    slope = gp.with_covs([pm.gp.cov.ExpQuad(1, ls=2.0)]).operators().D[0] @ kinked
    assert abs(slope[gp.t == 3.1][0] + 3 / 2.9) < 0.2
    assert abs(slope[np.flatnonzero(gp.t == 3.1)[0] - 1] - 1 / 3.1) < 0.2


def test_a_smooth_process_at_a_jump_is_refused_in_the_four_lines(tank):
    ode, inputs, t, y = tank
    ode, gp = ode.with_inputs(inputs), gm.fit_gp(t, y, cov="ExpQuad", random_seed=1)
    with pm.Model():
        theta = {name: pm.HalfNormal(name, 3) for name in ode.params}
        x = gp.prior("x")
        with pytest.raises(ValueError, match=r"jump at t = 3.1, 6, .*gp.with_breaks\(ode.jumps\)"):
            gm.GradientMatchingODE("match", ode, x, theta, gp=gp, gamma=0.1)


def test_the_four_lines_are_the_built_model_with_inputs(tank):
    ode, inputs, t, y = tank
    fitted = gm.fit_gp(t, y, cov="ExpQuad", random_seed=1)
    built = gm.build_model(
        ode, t, y, priors=PRIORS, inputs=inputs, gp=fitted, gamma=0.1, sigma="fixed", preset="fgpgm"
    )
    ode = ode.with_inputs(inputs)
    gp = fitted.with_breaks(ode.jumps)
    with pm.Model() as model:
        theta = {name: pm.HalfNormal(name, 3) for name in ode.params}
        x = gp.prior("x")
        pm.Normal("y", gp.at_observations(x), gp.sigma, observed=y)
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=0.1)
    points = [m.point_logps(round_vals=12) for m in (model, built)]
    assert points[0] == pytest.approx(points[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["previous", "linear"])
def test_refined_draws_across_jumps_and_kinks_are_those_of_the_exact_posterior(tank, kind):
    """Assert means within a third of a standard deviation and widths within 15 %."""
    ode, inputs, t, _ = tank
    flow = inputs["flow"]
    if kind == "linear":
        flow = gm.Input([0, 3.1, 3.3, 6.0, 6.2, 10], [0.5, 0.5, 3.0, 3.0, 0.0, 0.0])
    inputs = {"flow": flow}
    x = ode.solve(t, [2.0], [0.6, 1.3], inputs=inputs)
    y = x + np.random.default_rng(2).normal(0, 0.05, x.shape)
    fit = gm.fit(ode, t, y, priors=PRIORS, inputs=inputs, random_seed=1, progressbar=False)
    assert fit.is_exact
    matched = gm.sample(1000, model=fit.model, random_seed=1, progressbar=False)["posterior"]
    for name, truth in [("k", 0.6), ("b", 1.3)]:
        mean, sd = fit.table.loc[name, ["mean", "sd"]]
        assert abs(mean - truth) < 5 * sd
        assert abs(matched[name].mean() - mean) < 0.33 * sd
        assert 0.85 < matched[name].std() / sd < 1.15
    later = gm.predict(fit.idata, model=fit.model, t=[0.0, 6.1, 10.0])["posterior_predictive"]["x"]
    away = later.mean(("chain", "draw")).to_numpy() - ode.solve(
        [0, 6.1, 10.0], [2.0], [0.6, 1.3], inputs=inputs
    )
    assert np.abs(away).max() < 0.15


@pytest.mark.slow
def test_a_right_hand_side_of_explicit_time_is_fitted_exactly():
    ode = gm.ODE(
        lambda t, x, theta: [theta.b * pm.math.exp(-t) - theta.k * x.level], ["level"], ["k", "b"]
    )
    t = np.linspace(0, 6, 15)
    x = ode.solve(t, [0.5], [0.6, 1.3])
    y = x + np.random.default_rng(1).normal(0, 0.02, x.shape)
    fit = gm.fit(ode, t, y, priors=PRIORS, random_seed=1, progressbar=False)
    assert fit.is_exact
    matched = gm.sample(1000, model=fit.model, random_seed=1, progressbar=False)["posterior"]
    for name, truth in [("k", 0.6), ("b", 1.3)]:
        mean, sd = fit.table.loc[name, ["mean", "sd"]]
        assert abs(mean - truth) < 5 * sd
        assert abs(matched[name].mean() - mean) < 0.33 * sd

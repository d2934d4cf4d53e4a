"""What check_ode says of right-hand sides with one thing wrong, and of sound ones."""

import numpy as np
import pymc as pm
import pytest

import pymc_gradmatch as gm
from benchmarks.paper import systems

T = np.linspace(0, 4, 11)


def checked(rhs, states=("x",), params=("a",), x0=(1.0,), theta=(0.4,), **others):
    return gm.check_ode(gm.ODE(rhs, states, params), T, x0, theta, **others)


@pytest.mark.parametrize(
    "system",
    [systems.lotka_volterra, systems.protein_transduction, systems.fitzhugh_nagumo],
)
def test_the_paper_s_systems_are_sound(system):
    check = gm.check_ode(system.ode, system.t, system.x0, system.theta)
    assert check.is_sound
    assert check.verdict.startswith("Nothing is wrong")
    np.testing.assert_allclose(
        check.trajectory, system.ode.solve(system.t, system.x0, system.theta)
    )


def test_what_enters_is_what_is_written():
    check = checked(
        lambda t, x, theta: [-theta.a * x.x, theta.a * x.x],
        states=["x", "seen"],
        params=["a", "forgotten"],
        x0={"seen": 0.0, "x": 1.0},
        theta={"forgotten": 2.0, "a": 1.0},
    )
    assert check.states["enters"].to_list() == ["x, seen", ""]
    assert check.params["enters"].to_list() == ["x, seen", ""]
    assert not check.is_sound
    assert "forgotten enters no derivative" in check.verdict
    assert "seen acts on no state" in check.verdict


def test_effects_are_those_of_the_solution():
    """Exponential decay x = exp(-a t): its range is 1 - exp(-4 a), a dx/da = -a t exp(-a t)."""
    check = checked(lambda t, x, theta: [-theta.a * x.x], theta=[0.5])
    exact = np.abs(0.5 * T * np.exp(-0.5 * T)).max() / (1 - np.exp(-0.5 * 4))
    assert check.params.loc["a", "effect"] == pytest.approx(exact, rel=1e-3)
    assert check.states.loc["x", "time"] == pytest.approx((1 - np.exp(-2)) / 0.5, rel=1e-6)


def test_a_parameter_without_effect_is_named():
    check = checked(lambda t, x, theta: [-theta.a * x.x], x0=[0.0])
    assert not check.is_sound
    assert "a moved no state" in check.verdict


def test_a_sum_over_times_is_found_also_where_it_counts_beyond_a_threshold():
    """What gm.ODE cannot see of it: it looks at a few states of the size of one."""
    rhs = lambda t, x, theta: [pm.math.switch(x.x > 1e9, -theta.a * pm.math.sum(x.x), -x.x)]  # noqa: E731
    check = checked(rhs, x0=[1e12])
    assert not check.is_sound
    assert "x at one time alone is another than among all times" in check.verdict


def test_a_function_that_changes_from_call_to_call_is_found():
    """From the fourth call on: gm.ODE calls it three times."""
    calls = iter(range(1, 10**9))
    check = checked(lambda t, x, theta: [-theta.a * x.x * max(3, next(calls))])
    assert not check.is_sound
    assert "changes from call to call" in check.verdict


def test_a_slope_that_rounding_hides_is_found():
    check = checked(lambda t, x, theta: [-theta.a * pm.math.floor(4 * x.x)])
    assert not check.is_sound
    assert "The slope of dx/dt by x, which every fit needs, is 0" in check.verdict


def test_a_slope_that_is_not_finite_is_found():
    check = checked(lambda t, x, theta: [theta.a - pm.math.sqrt(x.x)], x0=[0.0])
    assert not check.is_sound
    assert "by x, which every fit needs, is not finite at time 0, where x = 0" in check.verdict


def test_a_solution_that_diverges_is_found_with_the_time_it_reaches():
    """X' = a x^2 from 1 is 1 / (1 - a t): at a = 0.4 infinite at 2.5."""
    check = checked(lambda t, x, theta: [theta.a * x.x**2])
    assert not check.is_sound
    assert "from x = 1 ends at t = 2.5, " in check.verdict
    assert len(check.trajectory) == 1


def test_draws_of_the_prior_that_diverge_are_counted():
    """A sixth of Uniform(0, 0.3) lies above 0.25, where the solution is infinite before 4."""
    prior = pm.Uniform.dist(0, 0.3)
    check = checked(lambda t, x, theta: [theta.a * x.x**2], theta={"a": prior}, random_seed=1)
    n = int(check.verdict.split("From ")[1].split(" of 50")[0])
    share = 1 / 6
    assert abs(n / 50 - share) < 5 * np.sqrt(share * (1 - share) / 50)
    assert check.is_sound


def test_a_stiff_system_is_called_stiff():
    """Robertson's, by its textbook rates, and the same a thousand times slower in its fast part."""
    rhs = lambda t, x, th: [  # noqa: E731
        -th.a * x.A + th.b * x.B * x.C,
        th.a * x.A - th.b * x.B * x.C - th.c * x.B**2,
        th.c * x.B**2,
    ]
    names = {"states": ["A", "B", "C"], "params": ["a", "b", "c"], "x0": [1.0, 0.0, 0.0]}
    assert "The ODE is stiff" in checked(rhs, **names, theta=[0.04, 1e4, 3e7]).verdict
    assert "stiff" not in checked(rhs, **names, theta=[0.04, 1.0, 1.0]).verdict


def test_times_too_far_apart_are_named():
    fast = checked(lambda t, x, theta: [-theta.a * x.x], theta=[5.0])
    slow = checked(lambda t, x, theta: [-theta.a * x.x], theta=[0.5])
    assert "x would cross all of its range" in fast.verdict
    assert "cross" not in slow.verdict


def test_inputs_are_given_to_it():
    ode = gm.ODE(lambda t, x, theta, u: [u.dose - theta.a * x.x], ["x"], ["a"], inputs=["dose"])
    dose = gm.Input([0.0, 1.0], [1.0, 0.0], kind="previous")
    check = gm.check_ode(ode, T, [0.0], [0.4], inputs={"dose": dose})
    assert check.is_sound
    assert check.trajectory.loc[4.0, "x"] == pytest.approx(
        (1 - np.exp(-0.4)) / 0.4 * np.exp(-0.4 * 3), rel=1e-6
    )


@pytest.mark.parametrize(
    ("x0", "theta", "message"),
    [
        ([1.0, 2.0], [0.4], r"x0 has shape \(2,\)"),
        ({"y": 1.0}, [0.4], r"missing for \['x'\]"),
        ([1.0], {"b": 1.0}, r"missing for \['a'\]"),
        ([1.0], [pm.HalfNormal.dist(1, shape=2)], "several values"),
    ],
)
def test_what_does_not_fit_is_refused(x0, theta, message):
    with pytest.raises(ValueError, match=message):
        checked(lambda t, x, theta: [-theta.a * x.x], x0=x0, theta=theta)


def test_the_verdict_shows_itself_with_both_tables():
    check = checked(lambda t, x, theta: [-theta.a * x.x])
    for shown in (repr(check), check._repr_html_()):
        assert check.verdict in shown
        assert "effect" in shown
        assert "largest" in shown

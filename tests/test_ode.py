"""ODE: the symbolic right-hand side, numerical integration, and messages."""

import math

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest

import pymc_gradmatch as gm
from benchmarks.paper import systems


def test_tuple_list_and_dict_are_the_same_right_hand_side(fast_compile):
    forms = [
        lambda t, x, theta: (theta.r * x.a, x.b - x.a),
        lambda t, x, theta: [theta.r * x[0], x[1] - x[0]],
        lambda t, x, theta: {"b": x.b - x.a, "a": theta.r * x.a},
    ]
    x = np.arange(8.0).reshape(4, 2)
    values = [gm.ODE(f, ["a", "b"], ["r"])(np.arange(4.0), x, {"r": 3.0}).eval() for f in forms]
    for value in values:
        np.testing.assert_array_equal(value, np.stack([3 * x[:, 0], x[:, 1] - x[:, 0]], axis=1))


def test_constants_and_time_broadcast_to_every_time(fast_compile):
    ode = gm.ODE(lambda t, x, theta: (1, theta.r, pm.math.sin(t)), ["a", "b", "c"], ["r"])
    t = np.linspace(0, 1, 4)
    value = ode(t, np.zeros((2, 4, 3)), [0.5]).eval()
    assert value.shape == (2, 4, 3)
    np.testing.assert_allclose(
        value[1], np.stack([np.ones(4), 0.5 * np.ones(4), np.sin(t)], axis=1)
    )


def test_batch_equals_loop(fast_compile, lotka_volterra, rng):
    x = rng.uniform(1, 5, size=(3, 4, 2))
    theta = rng.uniform(0.5, 2, size=(3, 4))
    t = np.arange(4.0)
    batch = lotka_volterra.ode(t, x, list(theta.T[:, :, None])).eval()
    for i in range(3):
        np.testing.assert_allclose(batch[i], lotka_volterra.ode(t, x[i], theta[i]).eval())


@pytest.fixture(scope="module")
def oscillator():
    return gm.ODE(lambda t, x, theta: (x.v, -(theta.w**2) * x.q), ["q", "v"], ["w"])


def test_solution_is_the_closed_form(oscillator):
    t = np.linspace(0, 6, 13)
    x = oscillator.solve(t, [1.0, 0.5], {"w": 2.0})
    exact = np.cos(2 * t) + 0.25 * np.sin(2 * t)
    np.testing.assert_allclose(x[:, 0], exact, atol=2e-6)


def test_solution_starts_at_the_first_time(oscillator):
    late = oscillator.solve([3.0, 4.0], [1.0, 0.0], [2.0])
    np.testing.assert_allclose(late, oscillator.solve([0.0, 1.0], [1.0, 0.0], [2.0]), rtol=1e-6)


def test_stiff_system_is_solved():
    """Assert Robertson's problem at t = 40 (Hairer and Wanner 1996, page 144)."""
    robertson = gm.ODE(
        lambda t, x, theta: (
            -0.04 * x.a + 1e4 * x.b * x.c,
            0.04 * x.a - 1e4 * x.b * x.c - theta.k * x.b**2,
            theta.k * x.b**2,
        ),
        ["a", "b", "c"],
        ["k"],
    )
    x = robertson.solve([0.0, 0.4, 40.0], [1.0, 0.0, 0.0], [3e7])
    np.testing.assert_allclose(x[2], [0.7158271, 9.185535e-6, 0.2841637], rtol=1e-5)


def test_states_may_start_at_zero_and_differ_in_size():
    ode = gm.ODE(
        lambda t, x, theta: (theta.k * (1 - x.u), -theta.k * x.big, -theta.k * x.small),
        ["u", "big", "small"],
        ["k"],
    )
    t = np.linspace(0, 3, 7)
    u, big, small = ode.solve(t, [0.0, 1e6, 1e-6], [1.0]).T
    for solution, exact in [
        (u, 1 - np.exp(-t)),
        (big, 1e6 * np.exp(-t)),
        (small, 1e-6 * np.exp(-t)),
    ]:
        np.testing.assert_allclose(solution, exact, rtol=1e-6, atol=1e-300)


def test_draws_equal_a_loop(oscillator):
    t = np.linspace(0, 2, 5)
    w = np.array([1.0, 2.0, 3.0])
    by_name = oscillator.solve(t, [1.0, 0.0], {"w": w})
    by_array = oscillator.solve(t, np.tile([1.0, 0.0], (3, 1)), w[:, None])
    loop = [oscillator.solve(t, [1.0, 0.0], [value]) for value in w]
    np.testing.assert_array_equal(by_name, loop)
    np.testing.assert_array_equal(by_array, loop)


def test_failed_draws_are_nan_and_counted_once():
    explosion = gm.ODE(lambda t, x, theta: [theta.r * x.u**2], ["u"], ["r"])
    rates = np.array([[0.1], [1.0], [0.2], [2.0]])  # u = 1 / (1 - r t) ends at t = 1 / r
    with pytest.warns(UserWarning, match="2 of 4 draws failed") as caught:
        u = explosion.solve([0.0, 1.0, 2.0], [1.0], rates)
    assert len(caught) == 1
    assert np.isnan(u[[1, 3]]).all()
    np.testing.assert_allclose(u[[0, 2], -1, 0], [1 / 0.8, 1 / 0.6], rtol=1e-6)


@pytest.mark.parametrize(
    ("rhs", "error", "message"),
    [
        (lambda t, x, theta: [x.a], ValueError, r"returns 1 expressions; expected 2.*\['a', 'b'\]"),
        (
            lambda t, x, theta: {"a": x.a, "c": x.b},
            ValueError,
            r"missing for \['b'\].*unknown \['c'\]",
        ),
        (
            lambda t, x, theta: x.a,
            TypeError,
            r"shape \(7,\); expected a vector with an entry for each",
        ),
        (lambda t, x, theta: [x.a, x.q], TypeError, r"no attribute 'q'.*x = \(a, b\).*Use these"),
        (lambda t, x, theta: [x.a, theta.s], TypeError, r"no attribute 's'.*theta = \(r\).*these"),
        (lambda t, x, theta: [x.a, np.ones(3) * theta.r], ValueError, r"'b' has shape \(3,\)"),
        (lambda t, x, theta: [x.a, "fast"], TypeError, r"'b' is a str; expected a number"),
        (lambda t, x, theta: [np.where(x.a > 0, 1, 0), 1], TypeError, r"pm\.math.*numpy's"),
        (lambda t, x, theta: [math.exp(x.a), 1], TypeError, r"pm\.math.*math's"),
        (lambda t, x, theta: [np.maximum(x.a, 0), 1], TypeError, r"pm\.math"),
        (lambda t, x, theta: [x.a if x.a > 0 else 0, 1], TypeError, r"pm\.math\.switch"),
    ],
)
def test_wrong_right_hand_side_is_refused_at_construction(rhs, error, message):
    with pytest.raises(error, match=message):
        gm.ODE(rhs, ["a", "b"], ["r"])


def test_pandas_rows_and_tables_go_by_name():
    ode = gm.ODE(lambda t, x, theta: [-theta.a * x.q + theta.b], ["q"], ["a", "b"])
    expected = ode.solve([0.0, 1.0], [1.0], [1.0, 5.0])
    row, start = pd.Series({"b": 5.0, "a": 1.0}), pd.Series({"q": 1.0})
    np.testing.assert_array_equal(ode.solve([0.0, 1.0], start, row), expected)
    table = pd.DataFrame({"b": [5.0, 5.0], "a": [1.0, 1.0]})
    np.testing.assert_array_equal(ode.solve([0.0, 1.0], {"q": 1.0}, table), [expected] * 2)


@pytest.mark.parametrize("names", ["ab", {"a", "b"}])
def test_names_without_an_order_are_refused(names):
    with pytest.raises(TypeError, match="expected a list of names, in their order"):
        gm.ODE(lambda t, x, theta: list(x), names, ["r"])


@pytest.mark.parametrize("what", ["positive", "inputs"])
@pytest.mark.parametrize("names", [True, "a", 1])
def test_what_is_no_list_of_names_is_refused(what, names):
    with pytest.raises(TypeError, match=f"{what} is {names!r}; expected a list of names"):
        gm.ODE(lambda t, x, theta: list(x), ["a"], ["r"], **{what: names})


@pytest.mark.parametrize(
    ("states", "params", "message"),
    [
        (["a", "a"], ["r"], r"states are \['a', 'a'\].*names \(repeated \['a'\]\)\.$"),
        (["a", "b-c"], ["r"], r"names \(unusable \['b-c'\]\)\.$"),
        (["a", "b"], ["lambda"], r"params are \['lambda'\].*\(unusable \['lambda'\]\)\.$"),
        ([], ["r"], r"states are \[\]"),
    ],
)
def test_unusable_names_are_refused(states, params, message):
    with pytest.raises(ValueError, match=message):
        gm.ODE(lambda t, x, theta: list(x), states, params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.0, 1.0], [1.0], [2.0]), r"x0 has shape \(1,\); expected \(2,\) or \(draw, 2\)"),
        (([0.0, 1.0], [1.0, 0.0], [2.0, 1.0]), r"theta has shape \(2,\); expected \(1,\)"),
        (([0.0, 1.0], [1.0, 0.0], {"v": 2.0}), r"missing for \['w'\].*unknown \['v'\]"),
        (([1.0, 0.0], [1.0, 0.0], [2.0]), r"strictly increasing"),
        (
            ([0.0, 1.0], np.ones((2, 2)), np.ones((3, 1))),
            r"shapes .*; expected the same number of draws",
        ),
    ],
)
def test_unusable_arguments_of_solve_are_named(oscillator, arguments, message):
    with pytest.raises(ValueError, match=message):
        oscillator.solve(*arguments)


def test_symbolic_and_numerical_right_hand_sides_agree(fast_compile):
    """Assert that a solution's finite differences are the right-hand side, in all systems."""
    for name in ("lotka_volterra", "protein_transduction", "fitzhugh_nagumo"):
        system = getattr(systems, name)
        t = np.linspace(0, 1, 2001)
        x = system.ode.solve(t, system.x0, system.theta)
        slopes = np.gradient(x, t, axis=0, edge_order=2)
        f = system.ode(t, pt.as_tensor(x), system.theta).eval()
        np.testing.assert_allclose(slopes[5:-5], f[5:-5], atol=1e-4)


def forced(t, x, theta):
    """Return a right-hand side in which time, a state and a parameter are each missing once."""
    return [theta.a * pm.math.sin(theta.b * t) - x.p * x.q, theta.a * t, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ode",
    [
        systems.lotka_volterra.ode,
        systems.protein_transduction.ode,
        gm.ODE(forced, ["p", "q", "r"], ["a", "b"]),
    ],
    ids=["LV", "PT", "forced"],
)
def test_linearised_is_finite_differences(ode, rng):
    t = np.linspace(0.1, 3, 6)
    x, theta = rng.uniform(0.5, 2, (6, len(ode.states))), rng.uniform(0.5, 2, len(ode.params))
    f, df_dx, df_dtheta = ode.linearised(t, x, theta)

    def derivatives(x, theta):
        return ode(t, x, list(theta)).eval(mode="FAST_COMPILE")

    h = 1e-6
    np.testing.assert_allclose(f, derivatives(x, theta), rtol=1e-12)
    for k, step in enumerate(h * np.eye(len(ode.states))):
        ahead, behind = (derivatives(x + sign * step, theta) for sign in (1, -1))
        np.testing.assert_allclose(df_dx[..., k], (ahead - behind) / (2 * h), atol=1e-7)
    for i, step in enumerate(h * np.eye(len(ode.params))):
        ahead, behind = (derivatives(x, theta + sign * step) for sign in (1, -1))
        np.testing.assert_allclose(df_dtheta[..., i], (ahead - behind) / (2 * h), atol=1e-7)


def kinetics(t, x, theta):
    return {"a": -theta.k * x.a / (1 + x.b**2) + t, "b": theta.k * x.a - 0.5 * x.b}


def saturating(t, x, theta):
    return [-theta.k * pm.math.tanh(x.a) + t, 0 * x.b + 1]


def forced(t, x, theta, u):
    return [u.feed - theta.k * x.a, u.light * x.a - pt.sqrt(x.b)]


MACHINE = {
    "arithmetic": gm.ODE(kinetics, ["a", "b"], ["k"]),
    "functions": gm.ODE(saturating, ["a", "b"], ["k"]),
    "numbers": gm.ODE(lambda t, x, theta: [x.b, 1], ["a", "b"], ["k"]),
    "vectors": gm.ODE(
        lambda t, x, theta: [pt.stack([x.a, x.b * theta.k]).sum(axis=0), -x.a], ["a", "b"], ["k"]
    ),
    "inputs": gm.ODE(forced, ["a", "b"], ["k"], inputs=["feed", "sun", "light"]).with_inputs(
        {
            "light": gm.Input([0.0, 1.3, 3.0], [1.0, 2.0, 0.5]),
            "sun": lambda t: pm.math.sin(t),
            "feed": gm.Input([0.0, 1.2], [1.0, 3.0], kind="previous"),
        }
    ),
    "logarithms": gm.ODE(kinetics, ["a", "b"], ["k"], positive=["a"]).transformed,
}


@pytest.mark.parametrize("name", MACHINE)
def test_machine_code_is_the_graph(name, rng):
    """Assert it whether the right-hand side is of numbers alone or of vectors of all times."""
    ode = MACHINE[name]
    t, x, theta = rng.uniform(0, 3, 5), rng.uniform(1, 2, (5, 2)), rng.uniform(1, 2, 1)
    graph = ode(t, x, theta).eval(mode="FAST_COMPILE")
    np.testing.assert_allclose(ode.slopes(t, x, theta), graph, rtol=1e-13)


@pytest.mark.parametrize(
    ("written", "formula"),
    [
        (lambda x, th: -th.k1 * x.a, r"-k_{1}\,a"),
        (lambda x, th: th.k1 - (x.a - th.beta), r"k_{1} - \left(a - \beta\right)"),
        (lambda x, th: th.k1 - -2.5 * x.a, r"k_{1} - \left(-2.5\,a\right)"),
        (lambda x, th: (x.a + 1) ** 2, r"{\left(a + 1\right)}^{2}"),
        (lambda x, th: x.a**th.k1 / (1 + x.a), r"\frac{{a}^{k_{1}}}{1 + a}"),
        (lambda x, th: x.a * (th.k1 * -th.beta), r"a\,k_{1}\,\left(-\beta\right)"),
        (lambda x, th: pm.math.exp(-x.a) + 1e-7, r"\exp\left(-a\right) + 10^{-7}"),
        (
            lambda x, th: pm.math.switch(x.a > 1, 0, x.a),
            r"\operatorname{switch}\left(a > 1, 0, a\right)",
        ),
        (lambda x, th: pm.math.sqrt(abs(x.a)), r"\sqrt{\left|a\right|}"),
    ],
)
def test_a_right_hand_side_is_shown_as_it_was_written(written, formula):
    ode = gm.ODE(lambda t, x, theta: [written(x, theta)], ["a"], ["k1", "beta"])
    assert rf"\dot{{a}} &= {formula} " in ode._repr_html_()


def test_a_right_hand_side_without_a_formula_is_shown_as_text():
    ode = gm.ODE(lambda t, x, theta: [pt.cumsum(pt.stack(x), axis=0)[0] * theta.k], ["a"], ["k"])
    assert ode._repr_html_() is None
    assert repr(ode) == "ODE(states=['a'], params=['k'])"

"""Steady states: where solutions end, with the derivatives of the implicit function theorem."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

import pymc_gradmatch as gm


def made_and_lost(t, x, theta, u):
    """Messenger and protein: m* = a s / b, p* = m* / c."""
    return [theta.a * u.s - theta.b * x.m, x.m - theta.c * x.p]


@pytest.fixture(scope="module")
def expression():
    return gm.ODE(made_and_lost, ["m", "p"], ["a", "b", "c"], inputs=["s"])


def stepped(*levels):
    return {"s": gm.Input([0.0, 1.0][: len(levels)], levels, kind="previous")}


@pytest.fixture(scope="module")
def exchange():
    """Two forms of a total that stays: a* = n k / (1 + k)."""

    def rhs(t, x, theta):
        back = theta.k * x.b
        return [back - x.a, x.a - back]

    return gm.ODE(rhs, ["a", "b"], ["k"])


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e12])
def test_it_is_the_closed_form_in_whatever_unit_of_time(unit):
    def rhs(t, x, theta):
        return [(theta.a - theta.b * x.m) * unit, (x.m - theta.c * x.p) * unit]

    ode = gm.ODE(rhs, ["m", "p"], ["a", "b", "c"])
    found = ode.steady_state([0.0, 9.0], [1.5, 0.8, 1e-4])
    np.testing.assert_allclose(found, [1.5 / 0.8, 1.5 / 0.8 / 1e-4], rtol=1e-8)


@pytest.mark.parametrize("k", [1e-5, 0.25, 1e5])
def test_totals_are_those_of_the_start_and_so_are_derivatives(exchange, k):
    theta, start = pt.dscalar("k"), pt.dscalar("a0")
    rest = exchange.steady_state([start, 0.5], {"k": theta})
    slopes = [pytensor.grad(rest[place], [theta, start]) for place in (0, 1)]
    value, *by = pytensor.function([theta, start], [rest, *slopes[0], *slopes[1]])(k, 1.0)
    np.testing.assert_allclose(value, [1.5 * k / (1 + k), 1.5 / (1 + k)], rtol=1e-7)
    by_k, by_start = 1.5 / (1 + k) ** 2, k / (1 + k)
    np.testing.assert_allclose(by, [by_k, by_start, -by_k, 1 - by_start], rtol=1e-5, atol=1e-12)


def test_a_saddle_is_left_and_the_stable_state_is_reached():
    logistic = gm.ODE(lambda t, x, theta: [theta.r * x.n * (1 - x.n)], ["n"], ["r"])
    assert logistic.steady_state([1e-9], [2.0])[0] == pytest.approx(1.0)
    assert logistic.steady_state([0.0], [2.0])[0] == 0.0


def test_time_and_inputs_are_fixed_at_a_time(expression):
    ramp = {"s": gm.Input([0.0, 5.0], [3.0, 9.0], kind="linear")}
    rest = expression.steady_state([0.0, 0.0], [1.0, 0.5, 2.0], inputs=ramp, t=2.5)
    np.testing.assert_allclose(rest, [12.0, 6.0], rtol=1e-8)
    fading = gm.ODE(lambda t, x, theta: [pm.math.exp(-t) - theta.k * x.m], ["m"], ["k"])
    rest = fading.steady_state([0.0], [2.0], t=1.0)
    np.testing.assert_allclose(rest, [np.exp(-1.0) / 2], rtol=1e-8)
    smooth = {"s": lambda t: pm.math.exp(-t)}
    rest = expression.steady_state([0.0, 0.0], [1.0, 0.5, 2.0], inputs=smooth, t=1.0)
    np.testing.assert_allclose(rest, np.exp(-1.0) * np.array([2.0, 1.0]), rtol=1e-8)


def test_levels_of_an_input_may_be_random(expression):
    level = pt.dscalar("level")
    inputs = {"s": gm.Input([0.0, 1.0], pt.stack([level, 2 * level]), kind="previous")}
    rest = expression.steady_state([0.0, 0.0], [1.0, 0.5, 2.0], inputs=inputs, t=1.5)
    value, slope = pytensor.function([level], [rest, pytensor.grad(rest[1], level)])(3.0)
    np.testing.assert_allclose(value, [12.0, 6.0], rtol=1e-8)
    assert slope == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize(
    "rhs", [lambda t, x, k: [k.k + 0 * x.a, -x.b], lambda t, x, k: [k.k * x.b, -x.a]]
)
def test_what_grows_or_oscillates_has_none_and_this_is_said(rhs):
    ode = gm.ODE(rhs, ["a", "b"], ["k"])
    with pytest.warns(UserWarning, match="reached no steady state"):
        assert np.isnan(ode.steady_state([0.0, 1.0], [2.0])).all()


def test_many_draws_reach_their_steady_states_at_once(exchange):
    k = np.geomspace(1e-3, 1e3, 50)
    rest = exchange.steady_state([1.0, 0.0], {"k": k})
    np.testing.assert_allclose(rest[:, 0], k / (1 + k), rtol=1e-7)


def test_infinite_times_of_solve_are_sent_to_steady_state(exchange):
    with pytest.raises(ValueError, match="steady_state"):
        exchange.solve([0.0, np.inf], [1.0, 0.0], [1.0])


def test_an_exact_model_starts_in_the_steady_state_with_the_gradient_of_the_closed_form(expression):
    t, theta = np.linspace(0, 4, 5), {"a": 1.5, "b": 0.8, "c": 0.4}
    inputs = stepped(1.0, 3.0)
    y = np.random.default_rng(1).normal(2, 1, (5, 2))
    priors = {name: pm.LogNormal.dist(0, 1) for name in theta}

    def by_hand(theta):
        m = theta.a / theta.b
        return {"m": m, "p": m / theta.c}

    gp = gm.StateGP(t, y, [pm.gp.cov.ExpQuad(1, ls=1.0)] * 2, sigma=0.1)
    densities = []
    for start in ("steady state", by_hand):
        model = gm.build_model(
            expression,
            t,
            y,
            priors=priors,
            inputs=inputs,
            start=start,
            gp=gp,
            sigma="fixed",
            preset="fgpgm",
        )
        exact = gm.exact_model(model)
        point = {f"{name}_log__": np.log(value) for name, value in theta.items()}
        densities.append([exact.compile_logp()(point), exact.compile_dlogp()(point)])
    for ours, theirs in zip(*densities, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_total_that_stays_is_named_where_no_start_says_it(exchange):
    t = np.linspace(0, 1, 4)
    with pytest.raises(ValueError, match=r"a total of \['a', 'b'\] is conserved"):
        gm.build_model(
            exchange, t, np.ones((4, 2)), priors={"k": pm.HalfNormal.dist(1)},
            start="steady state", preset="fgpgm",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("start", "message"),
    [("rest", "expected 'steady state'"), (lambda theta: [theta.k], "one start for each")],
)
def test_other_words_and_functions_are_refused(exchange, start, message):
    t = np.linspace(0, 1, 4)
    with pytest.raises(ValueError, match=message):
        gm.build_model(
            exchange,
            t,
            np.ones((4, 2)),
            priors={"k": pm.HalfNormal.dist(1)},
            start=start,
            preset="fgpgm",
        )


@pytest.mark.slow
def test_one_call_fits_from_a_steady_state_and_predicts_from_another(expression):
    theta, t, rng = [1.5, 0.8, 0.4], np.linspace(0, 6, 13), np.random.default_rng(1)
    before, inputs = [1.5 / 0.8, 1.5 / 0.8 / 0.4], stepped(1.0, 3.0)
    y = expression.solve(t, before, theta, inputs=inputs) + rng.normal(0, 0.1, (13, 2))
    fit = gm.fit(
        expression, t, y, priors={name: pm.LogNormal.dist(0, 1) for name in "abc"},
        inputs=inputs, start="steady state", random_seed=1, progressbar=False,
    )  # fmt: skip
    assert fit.is_exact
    for name, truth in zip("abc", theta, strict=True):
        row = fit.table.loc[name]
        assert abs(row["mean"] - truth) < 4 * row["sd"]
    other = fit.predict(t=[0.0, 2.0], inputs=stepped(2.0), start="steady state")
    x, draws = (other["posterior_predictive"]["x"], fit.idata["posterior"])
    m = 2 * draws["a"] / draws["b"]
    np.testing.assert_allclose(x.isel(time=0, state=0), m, rtol=1e-6)
    np.testing.assert_allclose(x.isel(time=1, state=1), m / draws["c"], rtol=1e-6)


def test_a_likelihood_that_contains_a_steady_state_is_fitted():
    """Assert moments by quadrature: m = a / b (1 - exp(-b t)), at the end a / b."""
    filling = gm.ODE(lambda t, x, theta: [theta.a - theta.b * x.m], ["m"], ["a", "b"])
    t, y, at_end, sd = np.array([0.0, 0.5, 1.0]), np.array([0.55, 0.85]), 1.6, 0.1

    def likelihood(x, theta):
        rest = filling.steady_state([0.0], [theta.a, theta.b])[0]
        pm.Normal("early", x.m[1:], sd, observed=y)
        pm.Normal("late", rest, sd, observed=at_end)

    fit = gm.fit(
        filling,
        t,
        priors={name: pm.LogNormal.dist(0, 1) for name in "ab"},
        likelihood=likelihood,
        start={"m": 0.0},
        random_seed=1,
        progressbar=False,
    )
    log_a, log_b = np.meshgrid(np.linspace(-2, 2, 801), np.linspace(-3, 2, 801), indexing="ij")
    a, b = np.exp(log_a), np.exp(log_b)
    early = (a / b)[..., None] * (1 - np.exp(-b[..., None] * t[1:]))
    away = np.square((early - y) / sd).sum(axis=-1) + np.square((a / b - at_end) / sd)
    weight = np.exp(-0.5 * (away + log_a**2 + log_b**2))
    assert fit.is_exact, fit.verdict
    for name, values in {"a": a, "b": b}.items():
        mean = np.average(values, weights=weight)
        spread = np.sqrt(np.average(np.square(values - mean), weights=weight))
        assert fit.table.loc[name, "mean"] == pytest.approx(mean, abs=0.1 * spread)
        assert fit.table.loc[name, "sd"] == pytest.approx(spread, rel=0.1)

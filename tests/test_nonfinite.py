"""Messages where a right-hand side is not finite: the state, the time, its value, what to do."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pytensor.graph import Apply, Op

import pymc_gradmatch as gm
from pymc_gradmatch.model.likelihood import GraphLikelihood

T = np.linspace(0, 10, 15)
QUIET = {"random_seed": 1, "progressbar": False}
ADVICE = r"pm\.math\.maximum\(x\.{0}, 1e-9\).*positive=\['{0}'\]"


def tank(t, x, theta):
    """Torricelli's law: the level is (sqrt(a0) - k t / 2)^2 until it is empty."""
    return [-theta.k * pm.math.sqrt(x.a)]


ODE = gm.ODE(tank, ["a"], ["k"])
LEVELS = np.maximum(1 - 0.25 * T, 0)[:, None] ** 2
Y = LEVELS + np.random.default_rng(1).normal(0, 0.05, (15, 1))


def priors():
    return {"k": pm.HalfNormal.dist(1)}


def test_a_solution_that_leaves_the_domain_says_when_it_did():
    """From 1 with k = 1 the tank is empty at t = 2."""
    with pytest.warns(
        UserWarning,
        match=r"from a = 1 ends at t = (1\.99|2).*left the domain.*" + ADVICE.format("a"),
    ):
        ODE.solve(T, [1.0], [1.0])


def test_a_solution_that_cannot_begin_says_where():
    with pytest.warns(UserWarning, match=r"'a' is not finite at t = 0, where a = -1 and k = 0\.5"):
        ODE.solve(T, [-1.0], [0.5])


def test_a_solution_that_blows_up_is_told_no_maximum():
    """1 / (1 - k t) ends at t = 2."""
    ode = gm.ODE(lambda t, x, theta: [theta.k * x.a**2], ["a"], ["k"])
    with pytest.warns(UserWarning, match=r"ends at t = (1\.99|2).*blew up.*narrower priors"):
        ode.solve(T, [1.0], [0.5])


def test_where_samplers_start_the_state_has_its_value():
    with pytest.raises(
        ValueError, match=r"state 'a' is nan at t = .* There a = -.*" + ADVICE.format("a")
    ):
        gm.build_model(ODE, T, Y, priors=priors(), **QUIET, preset="fgpgm")


@pytest.mark.parametrize(
    "call", [gm.fit, lambda *a, **k: gm.build_model(*a, preset="refined", **k)]
)
def test_data_below_zero_are_named_where_a_root_is_taken_of_them(call):
    words = r"'a' is not finite at t = 0, where a = -(0\.98|1).* k = .*" + ADVICE.format("a")
    with pytest.raises(ValueError, match=words):
        call(ODE, T, Y - 2, priors=priors(), **QUIET)


def test_a_hidden_state_that_starts_below_zero_is_the_one_to_mend():
    def fed(t, x, theta):
        return [-theta.k * pm.math.sqrt(x.b), -x.b]

    ode = gm.ODE(fed, ["a", "b"], ["k"])
    y = np.column_stack([Y, np.full(15, np.nan)])
    with pytest.raises(
        ValueError, match=r"'a' is not finite at t = 0, .* b = -1 .*" + ADVICE.format("b")
    ):
        gm.fit(ode, T, y, priors=priors(), start={"b": -1.0}, **QUIET)


def test_the_cure_that_is_named_cures():
    """With the maximum the tank stays empty, and k = 0.5 is found."""

    def mended(t, x, theta):
        return [-theta.k * pm.math.sqrt(pm.math.maximum(x.a, 1e-9))]

    ode = gm.ODE(mended, ["a"], ["k"])
    fit = gm.fit(ode, T, Y, priors=priors(), start={"a": 1.0}, **QUIET)
    assert abs(fit.table.loc["k", "mean"] - 0.5) < 4 * fit.table.loc["k", "sd"]


FROM_ONE = np.exp(-np.linspace(0, 3, 9))[:, None]
ROOT = gm.ODE(lambda t, x, theta: [-theta.k * pm.math.sqrt(x.a)], ["a"], ["k"])
PLAIN = gm.ODE(lambda t, x, theta: [-theta.k * x.a], ["a"], ["k"])


def steep(x, theta):
    pm.Potential("steep", -pm.math.sqrt(pm.math.maximum(x.a - 1, 0)).sum())


@pytest.mark.parametrize(
    ("ode", "given", "said"),
    [
        (ROOT, {"y": 0.1 * (FROM_ONE - 1), "start": {"a": 0.0}},
         r"no finite derivatives at prior draws.* 'a' has no finite slope by 'a' at t = 0, "
         r"where a = 0 and k = .*pm\.math\.maximum\(x\.a, 1e-9\).*positive=\['a'\]"),
        (PLAIN, {"likelihood": steep, "start": {"a": 1.0}, "scales": {"a": 1.0}},
         r"no finite derivatives .* The likelihood has no finite derivative by the states"),
    ],
)  # fmt: skip
def test_where_no_climb_can_begin_the_message_names_what_has_no_slope(ode, given, said):
    with pytest.raises(ValueError, match=said):
        gm.fit(
            ode, np.linspace(0, 3, 9), priors={"k": pm.HalfNormal.dist(1)}, random_seed=1,
            progressbar=False, **given,
        )  # fmt: skip


def test_a_sampler_that_cannot_start_names_state_time_and_value():
    below = gm.ODE(lambda t, x, theta: [-theta.k * pm.math.sqrt(x.a - 5)], ["a"], ["k"])
    with pm.Model() as model:
        x = below.solve(np.linspace(0, 3, 9), {"a": 1.0}, {"k": pm.HalfNormal("k", 1)})
        pm.Normal("y", x, 0.1, observed=FROM_ONE)
    said = r"not finite at any start\. .* derivative of 'a' is not finite at t = 0, where a = 1 and"
    with pytest.raises(ValueError, match=said):
        gm.sample(10, model=model, chains=1, random_seed=1, progressbar=False)


def square(n_derivatives):
    """Return x^2 of positive x as an operation that can be differentiated so many times."""

    class Square(Op):
        __props__ = ()

        def make_node(self, x):
            return Apply(self, [x], [x.type()])

        def perform(self, node, inputs, outputs):
            outputs[0][0] = inputs[0] ** 2

        def pullback(self, inputs, outputs, cotangents):
            if not n_derivatives:
                raise NotImplementedError
            return [cotangents[0] * 2 * pt.sqrt(square(n_derivatives - 1)(inputs[0]))]

    return Square()


@pytest.mark.parametrize(
    ("n_derivatives", "said"),
    [
        (0, r"the likelihood has no derivative .* differentiate: the search for modes and NUTS"),
        (1, r"has a gradient, but no second derivatives .* differentiate twice\. Without refine"),
    ],
)
def test_which_derivatives_of_a_likelihood_are_missing_is_said(n_derivatives, said):
    x, k = pt.matrix("x", dtype="float64"), pt.scalar("k", dtype="float64")
    y, theta = np.linspace(1, 2, 5)[:, None], np.ones(1)
    gp = gm.StateGP(np.arange(5.0), y, [pm.gp.cov.ExpQuad(1, ls=1.0)], sigma=0.1)
    likelihood = GraphLikelihood(-k * square(n_derivatives)(x).sum(), x, [k], gp=gp)
    if n_derivatives:
        np.testing.assert_allclose(likelihood(theta, y).by_states, -2 * y)
    with pytest.raises(ValueError, match=said):
        likelihood.curvature(theta, y)

"""The solution as a node: differentiable, in any PyMC model."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors

import pymc_gradmatch as gm
from benchmarks.cases import ACCURACY, BREADTH
from pymc_gradmatch.ode import Solve

DECAY = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
T = np.array([0.0, 0.5, 1.0, 3.0])


def values_of(case):
    """Return starts and parameters of a case, ten of them around the truth, as one array."""
    truth = np.array([*case.x0.values(), *case.theta.values()])
    return truth * np.exp(0.05 * np.random.default_rng(1).normal(size=(10, len(truth))))


def function_of(ode, t):
    """Return states, and derivatives of a weighted sum, as a function of one vector, by numba."""
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
    """Assert it at ten points, for a random sum of all states, to 1e-5 of the largest."""
    case = CASES[name]
    assert_gradients_are_differences(case.ode, case.t, values_of(case))


def assert_gradients_are_differences(ode, t, points):
    evaluate, n = function_of(ode, t), len(ode.states)
    rng = np.random.default_rng(2)
    for u in points:
        x = ode.solve(t, u[:n], u[n:])
        weights = rng.normal(size=x.shape) / np.abs(x).max(axis=0)
        value, gradient = evaluate(u, weights)
        np.testing.assert_allclose(value, x, rtol=1e-6, atol=1e-9 * np.abs(x).max())
        steps = np.diag(3e-4 * u)

        def total(u, weights=weights):
            x = ode.solve(t, u[:, :n], u[:, n:], rtol=1e-11)
            return (weights * x).sum(axis=(1, 2))

        far, near, near_back, far_back = (total(u + k * steps) for k in (2, 1, -1, -2))
        by_steps = (8 * (near - near_back) - (far - far_back)) / 12
        scale = np.abs(by_steps).max()
        np.testing.assert_allclose(3e-4 * u * gradient, by_steps, rtol=0, atol=1e-5 * scale)


def in_two_rooms(t, x, theta, u):
    return [u.feed * theta.k + u.sun - theta.loss * x.a, theta.loss * x.a - x.b * pm.math.sqrt(t)]


INPUTS = {
    "feed": gm.Input([0.0, 1.0, 2.5], [0.0, 2.0, 0.5], kind="previous"),
    "sun": gm.Input([0.0, 1.3, 4.0], [1.0, 2.0, 0.5]),
}
DOSES = {
    "a": gm.Input([1.5, 2.0], [3.0, 1.0], kind="dose"),
    "b": gm.Input([2.0], [0.7], kind="reset"),
}
NAMES = ["a", "b"], ["k", "loss"]


@pytest.mark.parametrize("positive", [(), ("a",), ("a", "b")], ids=len)
def test_gradients_go_through_inputs_doses_and_resets(positive):
    ode = gm.ODE(in_two_rooms, *NAMES, inputs=["feed", "sun"], positive=positive)
    points = np.array([[1.0, 2.0, 0.8, 0.5], [0.3, 0.1, 1.5, 2.0]])
    t = np.array([0.0, 0.7, 1.5, 1.9, 2.0, 2.5, 4.0])
    assert_gradients_are_differences(ode.with_inputs(INPUTS | DOSES), t, points)


EPIDEMIC = gm.ODE(
    lambda t, x, th, u: [
        u.import_ - u.beta * x.s * x.i,
        u.beta * x.s * x.i - th.g * x.i + u.import_,
    ],
    ["s", "i"],
    ["g"],
    inputs=["import_", "beta"],
    positive=["i"],
)


@pytest.mark.parametrize("kind", ["linear", "previous"])
def test_values_of_inputs_may_be_tensors(kind):
    """Assert values and differences, beside another input and a dose."""
    t, knots, v = np.linspace(0, 10, 11), [0.0, 3.0, 6.0, 10.0], np.array([0.8, 1.2, 0.4, 0.6])
    others = {
        "import_": gm.Input([0.0, 2.0], [0.01, 0.0], kind="previous"),
        "s": gm.Input([5.0], [0.2], kind="dose"),
    }

    def solved(values):
        inputs = others | {"beta": gm.Input(knots, values, kind=kind)}
        return EPIDEMIC.solve(t, [0.99, 0.01], {"g": 0.3}, inputs=inputs)

    values = pt.vector("values", dtype="float64", shape=(4,))
    x = solved(values)
    evaluate = pytensor.function([values], [x, pytensor.grad(x[-1, 1], values)], mode="NUMBA")
    found, gradient = evaluate(v)
    np.testing.assert_allclose(found, solved(v), rtol=1e-9)
    steps = 1e-4 * np.eye(4)
    by_steps = [(solved(v + h)[-1, 1] - solved(v - h)[-1, 1]) / 2e-4 for h in steps]
    np.testing.assert_allclose(gradient, by_steps, rtol=1e-5, atol=1e-8)


def test_where_tensors_cannot_be_values_of_inputs_it_is_said_so():
    values = pt.vector("values", dtype="float64", shape=(3,))
    with pytest.raises(ValueError, match=r"2 times and values of shape \(3,\)"):
        gm.Input([0.0, 1.0], values)
    with pytest.raises(TypeError, match=r"values of a dose are a tensor; expected numbers"):
        gm.Input([0.0, 1.0, 2.0], values, kind="dose")
    given = EPIDEMIC.with_inputs({"import_": lambda t: 0 * t, "beta": gm.Input([0, 1, 2], values)})
    with pytest.raises(TypeError, match=r"a tensor for its values; expected numbers"):
        given.slopes(0.0, [1.0, 1.0], [1.0])


def test_gradients_of_what_is_written_for_vectors_are_differences():
    """Assert it of the larger of two states, which is no function of numbers alone."""
    ode = gm.ODE(
        lambda t, x, theta: [-theta.k * pt.stack([x.a, x.b]).max(axis=0), theta.k * x.a - x.b],
        ["a", "b"],
        ["k"],
    )
    assert_gradients_are_differences(ode, T, np.array([[3.0, 1.0, 0.5]]))


def test_sensitivities_grow_where_a_state_stands_still():
    """Assert dx/dx0 = exp(k t) at x = 0, of which the states themselves know nothing."""
    growth = gm.ODE(lambda t, x, theta: [theta.k * x.a], ["a"], ["k"])
    x0 = pt.scalar("x0", dtype="float64")
    x = growth.solve(T, [x0], {"k": 2.0})
    slope = pytensor.function([x0], pytensor.grad(x[-1, 0], x0), mode="NUMBA")
    np.testing.assert_allclose(slope(0.0), np.exp(6.0), rtol=1e-5)


def test_a_tensor_is_returned_as_soon_as_one_value_is_a_tensor():
    rate = pt.scalar("rate", dtype="float64")
    assert isinstance(DECAY.solve(T, [1.0], {"rate": 0.5}), np.ndarray)
    expected = np.exp(-0.5 * T)[:, None]
    for x0, theta in (
        ({"mass": 1.0}, {"rate": rate}),
        ([1.0], [rate]),
        (pt.ones(1) * rate / rate, {"rate": 0.5}),
        ([rate / 0.5], [0.5]),
    ):
        x = DECAY.solve(T, x0, theta)
        assert x.type.shape == (4, 1)
        found = x.eval({rate: 0.5}, on_unused_input="ignore")
        np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_axes_of_starts_and_parameters_broadcast(rng):
    """Assert it of patients in groups, each with a start and all of a group with a rate."""
    starts, rates = rng.uniform(1, 2, (3, 4)), rng.uniform(0.1, 1, (3, 1))
    x0, rate = pt.matrix("x0", dtype="float64"), pt.tensor("rate", dtype="float64", shape=(None, 1))
    x = DECAY.solve(T, {"mass": x0}, {"rate": rate})
    values = pytensor.function([x0, rate], [x, *pytensor.grad(x.sum(), [x0, rate])], mode="NUMBA")
    found, by_start, by_rate = values(starts, rates)
    expected = starts[..., None] * np.exp(-rates[..., None] * T)
    np.testing.assert_allclose(found[..., 0], expected, rtol=1e-8)
    np.testing.assert_allclose(by_start, (expected / starts[..., None]).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(by_rate[:, 0], -(T * expected).sum((-1, -2)), rtol=1e-5)
    np.testing.assert_allclose(DECAY.solve(T, {"mass": starts}, {"rate": rates}), found, rtol=1e-8)


def test_graphs_with_a_solution_vectorize(rng):
    rate, rates = pt.scalar("rate", dtype="float64"), rng.uniform(0.1, 1, (5, 2))
    x = DECAY.solve(T, [2.0], [rate])
    given = pt.matrix("given", dtype="float64")
    many = vectorize_graph([x, pytensor.grad(x.sum(), rate)], {rate: given})
    found, slopes = pytensor.function([given], many, mode="FAST_COMPILE")(rates)
    expected = 2 * np.exp(-rates[..., None] * T)
    np.testing.assert_allclose(found[..., 0], expected, rtol=1e-8)
    np.testing.assert_allclose(slopes, -(T * expected).sum(-1), rtol=1e-5)


def test_solutions_of_unknown_length_vectorize(rng):
    rates = pt.vector("rates", dtype="float64")
    x = DECAY.solve(T, {"mass": 2.0}, {"rate": rates})
    given, values = pt.matrix("given", dtype="float64"), rng.uniform(0.1, 1, (5, 2))
    many = vectorize_graph(x, {rates: given})
    found = pytensor.function([given], many, mode="FAST_COMPILE")(values)
    np.testing.assert_allclose(found[..., 0], 2 * np.exp(-values[..., None] * T), rtol=1e-8)


def solved_in(graphs):
    """Return the nodes of solutions in graphs."""
    nodes = {v.owner for v in ancestors(graphs) if v.owner}
    return [node for node in nodes if isinstance(node.op, Solve)]


def test_value_and_gradient_come_from_one_solution():
    rate = pt.scalar("rate", dtype="float64")
    x = DECAY.solve(T, [2.0], [rate])
    outputs = [x, pytensor.grad(x.sum(), rate)]
    assert len(solved_in(outputs)) == 2
    function = pytensor.function([rate], outputs, mode="NUMBA")
    [node] = solved_in(function.maker.fgraph.outputs)
    assert node.op.has_sensitivities


def test_derivatives_are_taken_of_what_varies_alone():
    """Assert that numbers cost nothing: one sensitivity of four."""
    rate = pt.scalar("rate", dtype="float64")
    chain = gm.ODE(lambda t, x, th: [-th.k * x.a, th.k * x.a - th.m * x.b], ["a", "b"], ["k", "m"])
    x = chain.solve(T, [1.0, 0.0], {"k": rate, "m": 0.1})
    [node] = solved_in([x])
    assert node.op.wrt == (False, False, True, False)
    gradient = pytensor.function([rate], pytensor.grad(x[-1, 0], rate), mode="NUMBA")(0.5)
    np.testing.assert_allclose(gradient, -3 * np.exp(-1.5), rtol=1e-5)


def test_second_derivatives_are_refused_in_words():
    rate = pt.scalar("rate", dtype="float64")
    slope = pytensor.grad(DECAY.solve(T, [2.0], [rate]).sum(), rate)
    with pytest.raises(NotImplementedError, match=r"first derivatives only.*Gauss-Newton"):
        pytensor.grad(slope, rate)


def test_times_that_are_tensors_are_refused_in_words():
    with pytest.raises(TypeError, match=r"t is a tensor; expected the times .* as numbers"):
        DECAY.solve(pt.vector("t"), [1.0], [0.5])


GROWTH = gm.ODE(lambda t, x, theta: [theta.k * x.a**2], ["a"], ["k"])
FALL = gm.ODE(lambda t, x, theta: [-theta.k * pm.math.sqrt(x.a)], ["a"], ["k"])


def test_failures_are_known_by_draw_and_reason():
    t = [0.0, 3.0]
    assert GROWTH.failures(t, [1.0], {"k": [0.1, 0.2]}) == {}
    starts = {"a": [1.0, 1.0, np.nan]}
    found = GROWTH.failures(t, starts, {"k": [0.1, 0.6, 0.1]})
    assert {why: draws.tolist() for why, draws in found.items()} == {
        "blew up": [1],
        "the right-hand side is not finite at the start": [2],
    }
    [why] = FALL.failures(t, {"a": [1.0, 1.0]}, {"k": [0.1, 2.0]})
    assert why == "left the domain of the right-hand side"
    with pytest.warns(UserWarning, match=r"1 of 2 draws failed \(1 blew up\); their"):
        x = GROWTH.solve(t, [1.0], {"k": [0.1, 0.6]})
    assert np.isnan(x[1]).all()
    assert np.isfinite(x[0]).all()


def test_out_of_steps_is_not_impossible():
    """Assert that 1 273 swings are solved, and that a million are given up by that name."""
    swing = gm.ODE(lambda t, x, theta: [theta.w * x.v, -theta.w * x.u], ["u", "v"], ["w"])
    x = swing.solve([0.0, 4.0], [1.0, 0.0], {"w": 2000.0})
    np.testing.assert_allclose(x[-1], [np.cos(8000), -np.sin(8000)], atol=1e-4)
    assert [*swing.failures([0.0, 4.0], [1.0, 0.0], {"w": [2e6]})] == ["out of steps"]


def test_where_there_is_no_solution_a_model_has_no_density():
    with pm.Model() as model:
        k = pm.Uniform("k", 0, 1)
        x = GROWTH.solve([0.0, 3.0], [1.0], {"k": k})
        pm.Normal("y", x[-1, 0], 0.1, observed=1.5)
    logp = model.compile_logp(jacobian=False)
    assert np.isfinite(logp({"k_interval__": -3.0}))
    assert not np.isfinite(logp({"k_interval__": 3.0}))


@pytest.mark.slow
def test_a_node_can_be_pickled_and_finds_its_code_in_another_process(tmp_path):
    rate = pt.scalar("rate", dtype="float64")
    ode = gm.ODE(pickled_rhs, ["mass"], ["rate"], positive=["mass"])
    path = tmp_path / "graph"
    path.write_bytes(pickle.dumps([rate, ode.solve(T, [2.0], [rate])]))
    code = (
        "import pickle, sys, numpy as np\n"
        "rate, x = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert np.allclose(x.eval({rate: 0.5})[:, 0], 2 * np.exp(-0.5 * np.array([0, .5, 1, 3])))"
    )
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, env=os.environ | here)


def pickled_rhs(t, x, theta):
    return [-theta.rate * x.mass]


@pytest.fixture(scope="module")
def decaying():
    """Return a model of a decay with a rate that depends on a covariate, and its truth."""
    rng, dose = np.random.default_rng(1), np.linspace(-1, 1, 6)
    rates = np.exp(-0.5 + 0.8 * dose)
    y = 3 * np.exp(-rates[:, None] * T) + rng.normal(0, 0.05, (6, 4))
    with pm.Model(coords={"patient": range(6), "time": T}) as model:
        base, slope = pm.Normal("base", 0, 1), pm.Normal("slope", 0, 1)
        rate = pm.Deterministic("rate", pm.math.exp(base + slope * dose), dims="patient")
        x = DECAY.solve(T, {"mass": 3.0}, {"rate": rate})
        mass = pm.Deterministic("mass", x[..., 0], dims=("patient", "time"))
        pm.Normal("y", mass, 0.05, observed=y, dims=("patient", "time"))
    return model, {"base": -0.5, "slope": 0.8}


def assert_recovered(posterior, truth):
    for name, value in truth.items():
        assert abs(posterior[name].mean() - value) < 5 * posterior[name].std()
        assert posterior[name].std() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["nutpie", "pymc"])
def test_nuts_samples_a_model_with_a_solution_in_it(decaying, sampler):
    model, truth = decaying
    with model:
        idata = pm.sample(
            200, tune=300, chains=2, cores=1, nuts_sampler=sampler, progressbar=False,
            compute_convergence_checks=False, random_seed=1,
        )  # fmt: skip
    assert_recovered(idata["posterior"].dataset, truth)
    assert int(idata["sample_stats"]["diverging"].sum()) == 0


@pytest.mark.slow
def test_other_engines_of_pymc_take_a_model_with_a_solution_in_it(decaying):
    model, truth = decaying
    with model:
        prior = pm.sample_prior_predictive(20, random_seed=1)
        start = pm.find_MAP(progressbar=False, jitter=False, return_inferencedata=True)
        faster = pm.adam(learning_rate=0.02)
        normal = pm.fit(3_000, obj_optimizer=faster, progressbar=False, random_seed=1).sample(400)
        smc = pm.sample_smc(300, chains=1, cores=1, progressbar=False, random_seed=1)
    assert prior["prior_predictive"]["y"].shape == (1, 20, 6, 4)
    assert {n: round(start["posterior"][n].item(), 1) for n in truth} == truth
    assert_recovered(normal["posterior"].dataset, truth)
    assert_recovered(smc["posterior"].dataset, truth)


def test_interventions_reach_the_solution(decaying):
    model, _ = decaying
    fixed = pm.do(model, {"slope": 0.0})
    seen = pm.observe(pm.do(model, {"slope": 0.0}), {"base": 0.0})
    assert [rv.name for rv in fixed.free_RVs] == ["base"]
    found = pm.draw(seen["mass"], mode="FAST_COMPILE", random_seed=1)
    assert found.shape == (6, 4)
    assert "mass" in pm.model_to_graphviz(model).source


@pytest.mark.parametrize("rtol", [1e-9, 1e-5])
@pytest.mark.parametrize("begins", ["jump", "bend"])
def test_gradients_of_what_has_no_effect_until_a_time(begins, rtol):
    begin, end, rate = 3.4, 12.0, 2.0
    later = end - begin
    effects = {
        "jump": (lambda t: pt.switch(t < begin, 0.0, 1.0), later),
        "bend": (lambda t: pt.maximum(t - begin, 0.0), later**2 / 2),
    }
    effect, integral = effects[begins]
    ode = gm.ODE(lambda t, x, theta: [theta.rate * effect(t)], ["mass"], ["rate"])
    given = pt.scalar("rate", dtype="float64")
    mass = ode.solve([0.0, 6.0, end], {"mass": 1.0}, {"rate": given}, rtol=rtol)[-1, 0]
    value, slope = pytensor.function([given], [mass, pytensor.grad(mass, given)])(rate)
    assert value == pytest.approx(1 + rate * integral, rel=10 * rtol)
    assert slope == pytest.approx(integral, rel=1e3 * rtol)


@pytest.mark.parametrize("later", [9.0, 11.5, 20.0])
def test_gradients_by_a_pulse_long_after_a_start_at_zero(later):
    """Assert the mass of a pulse of which the first slope is below 1e-195, denormal, or zero."""
    ode = gm.ODE(
        lambda t, x, theta: [theta.dose * pt.exp(-0.5 * ((t - theta.tau) / 0.3) ** 2)],
        ["mass"],
        ["dose", "tau"],
    )
    given = pt.vector("given", shape=(2,), dtype="float64")
    hours = np.arange(0, 25.0)
    mass = ode.solve(hours, {"mass": 0.0}, {"dose": given[0], "tau": given[1]})[-1, 0]
    value, slopes = pytensor.function([given], [mass, pytensor.grad(mass, given)])([10.0, later])
    whole = 0.3 * np.sqrt(2 * np.pi)
    assert value == pytest.approx(10 * whole, rel=1e-7)
    assert slopes[0] == pytest.approx(whole, rel=1e-5)
    assert abs(slopes[1]) < 1e-4


@pytest.mark.parametrize("fast", [1e3, 1e6])
@pytest.mark.parametrize("constant", [1e-3, 0.37, 1e5])
def test_rounding_that_a_fast_exchange_amplifies_is_no_error_of_a_gradient(constant, fast):
    """Assert the limit of a fast exchange, of which no drug is there to shift the balance."""

    def slopes(t, x, theta):
        exchange = fast * (x.a * theta.constant / (theta.constant + theta.dose) - x.b)
        return [-exchange - theta.rate * x.a, exchange]

    ode = gm.ODE(slopes, ["a", "b"], ["rate", "constant", "dose"])
    theta = pt.vector("theta", shape=(3,), dtype="float64")
    end = ode.solve([0.0, 50.0], [1.0, 1.0], [theta[0], theta[1], theta[2]])[-1, 0]
    value, by = pytensor.function([theta], [end, pytensor.grad(end, theta)])([0.02, constant, 0.0])
    assert value == pytest.approx(np.exp(-0.5), rel=1e-5)  # half of both is a, which decays
    by_log = by * [1, constant, constant]
    expected = np.exp(-0.5) * np.array([-25, 0, 0.25])  # a dose moves a / (a + b) by d / (4 K)
    np.testing.assert_allclose(by_log, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("stiff", [False, True])
@pytest.mark.parametrize("constant", [1e-3, 0.37, 1e5])
def test_gradients_by_what_has_no_effect_but_for_rounding(constant, stiff):
    """Assert them of rate constant / (constant + dose) without a dose: x(1) = exp(-rate)."""
    fast = 1e5 if stiff else 1.0
    ode = gm.ODE(
        lambda t, x, theta: [
            -theta.rate * x.a * theta.constant / (theta.constant + theta.dose),
            fast * (x.a - x.b),
        ],
        ["a", "b"],
        ["rate", "constant", "dose"],
    )
    theta = pt.vector("theta", shape=(3,), dtype="float64")
    end = ode.solve([0.0, 1.0], [1.0, 1.0], [theta[0], theta[1], theta[2]])[-1, 0]
    value, slopes = pytensor.function([theta], [end, pytensor.grad(end, theta)])(
        [3.3, constant, 0.0]
    )
    expected = np.exp(-3.3) * np.array([-1, 0, 3.3 / constant])
    np.testing.assert_allclose(value, np.exp(-3.3), rtol=1e-9)
    np.testing.assert_allclose(
        slopes * [1, constant, constant], expected * [1, constant, constant], atol=1e-7
    )

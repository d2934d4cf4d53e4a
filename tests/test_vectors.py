"""Parameters that are vectors, right-hand sides that return one, and what they are made of."""

import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from scipy.linalg import expm

import pymc_gradmatch as gm
from pymc_gradmatch.model import unfitted_model
from pymc_gradmatch.ode import Solver
from pymc_gradmatch.ode.scalarize import elements

N = 8
NAMES = [f"s{k}" for k in range(N)]
RATES = np.linspace(0.5, 1.5, N)
T = np.linspace(0, 8, 17)
X0 = np.eye(N)[0]
QUIET = {"random_seed": 1, "progressbar": False}
UNFITTED = {"settings": {}} | QUIET


def flows(t, x, theta):
    flow = theta.k * pt.stack(x)
    return pt.concatenate([[0.0], flow[:-1]]) - flow


def one_by_one(t, x, theta):
    rates = theta.k if hasattr(theta, "k") else theta
    return [(rates[k - 1] * x[k - 1] if k else 0) - rates[k] * x[k] for k in range(N)]


def matrix(t, x, theta):
    return (pt.eye(N, k=-1) - pt.eye(N)) @ pt.diag(theta.k) @ pt.stack(x)


VECTORS = {"flows": flows, "a matrix": matrix, "by number": one_by_one}
PLAIN = gm.ODE(one_by_one, NAMES, [f"k_{k}" for k in range(N)])


def by_exponential(rates):
    A = np.diag(rates[:-1], -1) - np.diag(rates)
    return np.stack([expm(A * t) @ X0 for t in T])


@pytest.mark.parametrize("rhs", VECTORS)
def test_a_chain_of_eight_compartments_is_the_exponential_of_its_matrix(rhs):
    ode = gm.ODE(VECTORS[rhs], NAMES, {"k": N})
    assert repr(ode) == f"ODE(states={NAMES}, params={{'k': 8}})"
    x = ode.solve(T, X0, {"k": RATES})
    np.testing.assert_allclose(x, by_exponential(RATES), atol=1e-9)
    draws = ode.solve(T, X0, {"k": np.stack([RATES, 2 * RATES])})
    np.testing.assert_allclose(draws[1], by_exponential(2 * RATES), atol=1e-9)
    again = cloudpickle.loads(cloudpickle.dumps(ode)).solve(T, X0, {"k": RATES})
    np.testing.assert_array_equal(again, x)


@pytest.mark.parametrize("rhs", VECTORS)
def test_what_is_zero_in_a_matrix_is_no_dependence(rhs):
    ode = gm.ODE(VECTORS[rhs], NAMES, {"k": N})
    np.testing.assert_array_equal(ode.jacobian_pattern, np.eye(N) + np.eye(N, k=-1) > 0)
    x = by_exponential(RATES)
    for one, other in zip(ode.linearised(T, x, RATES), PLAIN.linearised(T, x, RATES), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_sensitivities_that_begin_like_a_high_power_of_time_do_not_stop_the_solver():
    """Assert it of a chain's last rate, whose effect begins like the eighth power."""
    wrt = (False,) * N + (True,) * N
    found = Solver(PLAIN.equations(wrt), T)(X0[None], RATES[None])
    assert not found.ended.any()
    step = 1e-6 * np.eye(N)
    by_differences = [
        (by_exponential(RATES + one) - by_exponential(RATES - one)) / 2e-6 for one in step
    ]
    expected = np.moveaxis(by_differences, 0, -1)
    np.testing.assert_allclose(found.sensitivities[0], expected, atol=1e-7)


def test_a_solution_of_a_vector_is_a_node_with_its_gradient():
    ode, k = gm.ODE(flows, NAMES, {"k": N}), pt.vector("k", shape=(N,))
    last = ode.solve(T, X0, {"k": k})[-1, -1]
    by = pt.grad(last, k).eval({k: RATES})
    one = 1e-6 * np.eye(N)[3]
    change = by_exponential(RATES + one)[-1, -1] - by_exponential(RATES - one)[-1, -1]
    assert by[3] == pytest.approx(change / 2e-6, rel=1e-4)


def measured():
    return by_exponential(RATES) + np.random.default_rng(1).normal(0, 0.01, (len(T), N))


@pytest.mark.slow
def test_the_posterior_of_a_vector_is_that_of_its_entries():
    """Assert it of the exact models' densities, at two points."""
    start, y = dict(zip(NAMES, X0, strict=True)), measured()
    vector = gm.ODE(flows, NAMES, {"k": N})
    given = {"start": start, **UNFITTED}
    models = [
        unfitted_model(vector, T, y, priors={"k": pm.LogNormal.dist(0, 0.5, shape=N)}, **given),
        unfitted_model(PLAIN, T, y, priors={n: pm.LogNormal.dist(0, 0.5) for n in PLAIN.params},
                       **given),
    ]  # fmt: skip
    densities = []
    for model in map(gm.exact_model, models):
        density, start_at = model.compile_logp(mode="FAST_COMPILE"), model.initial_point()
        of_each = []
        for logs in (np.log(RATES), np.log(RATES) + 0.1 * np.arange(N)):
            own = {"k_log__": logs} | {f"k_{k}_log__": logs[k] for k in range(N)}
            of_each.append(float(density({n: own.get(n, value) for n, value in start_at.items()})))
        densities.append(of_each)
    assert densities[0] == pytest.approx(densities[1], rel=1e-9)


def chain_of_three():
    def likelihood(x, theta):
        pm.Normal("seen", x[2], theta.s[0], observed=of_three[:, 2])

    ode = gm.ODE(lambda t, x, theta: flows(t, x, theta), ["a", "b", "c"], {"k": 3, "s": 1})
    of_three = ode.solve(T, [1.0, 0, 0], {"k": [0.5, 1, 0.2], "s": [0.01]})
    of_three = of_three + np.random.default_rng(2).normal(0, 0.01, of_three.shape)
    return ode, of_three, likelihood


@pytest.mark.slow
def test_a_fit_has_a_vector_under_its_name_and_its_dim():
    ode, _, likelihood = chain_of_three()
    start = {"a": 1.0, "b": 0.0, "c": lambda theta, x0: x0.b * theta.k[0]}
    with pm.Model(coords={"step": ["first", "second", "third"]}) as model:
        fit = gm.fit(
            ode, T, likelihood=likelihood, start=start, **QUIET,
            priors=lambda: {
                "k": pm.LogNormal("k", np.log([0.5, 1.0, 0.2]), 0.3, dims="step"),
                "s": pm.HalfNormal("s", 0.05, shape=1),
            },
        )  # fmt: skip
    assert fit.is_exact
    assert not model.named_vars
    assert fit.idata["posterior"]["k"].dims == ("chain", "draw", "step")
    assert {"k[first]", "k[second]", "k[third]", "s[0]"} == {*fit.table.index} - {"x0[a]"} - {
        name for name in fit.table.index if name.startswith("x0")
    }
    mean, sd = fit.table.loc["k[third]", ["mean", "sd"]]
    assert abs(mean - 0.2) < 4 * sd < 0.4
    ahead = fit.predict(
        t=[0.0, 10.0], likelihood=lambda x, theta: pm.Deterministic("f", theta.k * 2)
    )
    f = ahead["posterior_predictive"]["f"].to_numpy()[0]
    np.testing.assert_allclose(f, 2 * fit.idata["posterior"]["k"].to_numpy()[0])


def test_experiments_share_a_vector_or_have_one_each():
    ode = gm.ODE(flows, ["a", "b"], {"k": 2})
    y = ode.solve(T, [1.0, 0.0], {"k": [0.5, 1.0]})
    y = y + np.random.default_rng(3).normal(0, 0.02, y.shape)
    experiments = {"one": gm.Experiment(T, y), "other": gm.Experiment(T[:9], y[:9])}
    for shape in ((2,), (2, 2)):
        model = unfitted_model(
            ode, experiments=experiments, priors={"k": pm.LogNormal.dist(0, 1, shape=shape)},
            **UNFITTED,
        )  # fmt: skip
        exact = gm.exact_model(model)
        assert exact["k"].type.shape == shape
        assert np.isfinite(exact.compile_logp(mode="FAST_COMPILE")(exact.initial_point()))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: gm.ODE(flows, NAMES, {"k": 0}), r"'k' has the length 0; expected how many"),
        (lambda: gm.ODE(flows, NAMES, {"k": 7}), r"raised ValueError"),
        (lambda: gm.ODE(lambda t, x, theta: pt.stack(x)[:2], ["a", "b", "c"], ["k"]),
         r"returns 2 expressions; expected 3"),
        (lambda: gm.ODE(lambda t, x, theta: theta.k[:, None] * pt.stack(x), NAMES, {"k": N}),
         r"a tensor of shape \(8, 8\); expected a vector .* numbers of one time"),
        (lambda: gm.ODE(lambda t, x, theta: pt.cumsum(pt.stack(x)), ["a", "b"], ["k"]),
         r"Cumsum\{axis=0\} is not supported; expected elementwise"),
        (lambda: gm.ODE(flows, NAMES, {"k": N}).solve(T, X0, {"k": RATES[:3]}),
         r"'k' has shape \(3,\); expected \(\.\.\., 8\)"),
        (lambda: gm.build_model(gm.ODE(flows, NAMES, {"k": N}), T, measured(),
                                priors={"k": pm.LogNormal.dist(0, 1)}, preset="fgpgm"),
         r"'k' has shape \(\); expected \(\.\.\., 8\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_words(call, said):
    with pytest.raises((ValueError, TypeError), match=said):
        call()


A, B = pt.scalars("a", "b")
K = pt.stack([A, B])
FORMS = {
    "stacks": pt.stack([pt.concatenate([K, K])[1], K[::-1][0]]),
    "indices": K[[1, 0]] * K,
    "sums": pt.stack([K.sum(), pt.prod(K), pt.max(K), K.mean()]),
    "products": pt.outer(K, K) @ K + pt.dot(K, K),
    "diagonals": pt.diag(K) @ pt.tril(pt.outer(K, K)) @ K,
    "what is set": pt.set_subtensor(pt.zeros(3)[1], A),
    "rolls": pt.roll(K, 1),
    "einsum": pt.einsum("ij,j->i", pt.diag(K), K),
    "functions": pm.math.exp(-K) + pm.math.switch(K > 1, K, 0.0),
}


@pytest.mark.parametrize("form", FORMS)
def test_entries_are_those_of_the_vector(form):
    at = {A: 0.7, B: 1.9}
    expected = pytensor.function([A, B], FORMS[form], on_unused_input="ignore")(*at.values())
    found = pytensor.function(
        [A, B], [*map(pt.as_tensor, elements(FORMS[form], [A, B]))], on_unused_input="ignore"
    )
    np.testing.assert_allclose(found(*at.values()), expected)

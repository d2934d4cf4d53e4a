"""The solution as a node where PyTensor compiles for JAX: what machine code says, to 1e-6."""

import subprocess
import sys

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

import pymc_gradmatch as gm
from benchmarks.paper import systems
from pymc_gradmatch.ode import in_jax

pytestmark = pytest.mark.jax("jax", "diffrax", "numpyro")

ENZYME = gm.ODE(
    lambda t, x, theta: [
        (theta.kr + theta.kc) * x.c - theta.kf * x.e * x.s,
        theta.kr * x.c - theta.kf * x.e * x.s,
        theta.kf * x.e * x.s - (theta.kr + theta.kc) * x.c,
        theta.kc * x.c,
    ],
    ["e", "s", "c", "p"],
    ["kf", "kr", "kc"],
)
TANK = gm.ODE(
    lambda t, x, theta, u: [u.flow * u.tide - theta.leak * x.level + 0.1 * pm.math.sin(t)],
    ["level"],
    ["leak"],
    inputs=["flow", "tide"],
).with_inputs(
    {
        "flow": gm.Input([0, 1, 3], [0.5, 2.0, 0.0], kind="previous"),
        "tide": gm.Input([0, 2, 4], [1.0, 1.5, 0.2]),
    }
)
DRUG = {
    "states": ["gut", "blood"],
    "params": ["ka", "k"],
    "rhs": lambda t, x, theta: [-theta.ka * x.gut, theta.ka * x.gut - theta.k * x.blood],
}
GIVEN = {
    "gut": gm.Input([1.0, 2.5], [2.0, 1.0], kind="dose"),
    "blood": gm.Input([2.0], [0.3], kind="reset"),
}
T = np.array([0.0, 0.7, 1.0, 1.6, 2.5, 3.3, 4.0])


def of(ode, t, *values):
    """Return states, and a gradient, as functions of starts and parameters, by numba and JAX."""
    given = [pt.tensor(dtype="float64", shape=np.shape(value)) for value in values]
    n = len(ode.states)
    x = ode.solve(t, dict(zip(ode.states, given[:n], strict=True)), given[n:])
    weights = pt.cos(pt.arange(x.size)).reshape(x.shape)
    outputs = [x, *pytensor.grad((weights * x).sum(), given)]
    return [pytensor.function(given, outputs, mode=mode) for mode in ("NUMBA", "JAX")]


@pytest.mark.parametrize(
    ("ode", "t", "values"),
    [
        pytest.param(
            systems.lotka_volterra.ode,
            np.linspace(0, 5, 8),
            ([5.0, 4.0, 5.5], 3.0, 2.0, [1.0, 1.1, 0.9], 4.0, 1.0),
            id="Lotka-Volterra, three draws",
        ),
        pytest.param(ENZYME, np.linspace(0, 15, 6), (0.2, 1, 0, 0, 1e3, 500, 1), id="stiff"),
        pytest.param(TANK, T, (0.4, 0.8), id="inputs that jump and have kinks"),
        pytest.param(
            gm.ODE(**DRUG).with_inputs(GIVEN), T, (0.5, 0.1, 1.2, 0.4), id="doses and a reset"
        ),
        pytest.param(
            gm.ODE(**DRUG, positive=["gut", "blood"]).with_inputs(GIVEN),
            T,
            (0.5, 0.1, 1.2, 0.4),
            id="the same of logarithms",
        ),
    ],
)
def test_states_and_gradients_are_those_of_machine_code(ode, t, values):
    values = [np.asarray(value, dtype=float) for value in values]
    in_numba, by_jax = of(ode, t, *values)
    expected, *gradient = in_numba(*values)
    x, *by = by_jax(*values)
    scale = np.abs(expected).max(axis=-2, keepdims=True)
    np.testing.assert_allclose(x / scale, expected / scale, rtol=0, atol=1e-7)
    shares, found = (
        np.concatenate([np.ravel(one * value) for one, value in zip(them, values, strict=True)])
        for them in (gradient, by)
    )
    np.testing.assert_allclose(found, shares, rtol=0, atol=2e-6 * np.abs(shares).max())


def test_what_stability_bounds_has_right_gradients_though_it_arrives_by_explicit_steps():
    """Assert it where sensitivities that steps do not see grow to 1e30."""
    rhs = lambda t, x, theta: [-theta.rate * (x.x - pm.math.cos(t)), x.x - x.z]  # noqa: E731
    ode = gm.ODE(rhs, ["x", "z"], ["rate"])
    values = [np.asarray(value) for value in (0.0, 0.0, 2e3)]
    in_numba, by_jax = of(ode, np.linspace(0, 1, 4), *values)
    for one, other in zip(by_jax(*values), in_numba(*values), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_solution_that_fails_is_nan_and_the_one_beside_it_is_not():
    growth = gm.ODE(lambda t, x, theta: [theta.k * x.a**2], ["a"], ["k"])
    values = np.float64(1.0), np.array([0.1, 0.6])  # with 0.6 it blows up before 2
    in_numba, by_jax = of(growth, np.array([0.0, 1.0, 2.0]), *values)
    x, by_start, by_k = by_jax(*values)
    np.testing.assert_array_equal(np.isnan(x).all(axis=(1, 2)), [False, True])
    for one, other in zip((x, by_start, by_k), in_numba(*values), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_numpyro_recovers_a_rate():
    decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t = np.linspace(0, 3, 10)
    y = np.exp(-0.7 * t) + np.random.default_rng(1).normal(0, 0.02, len(t))
    with pm.Model():
        rate, mass = pm.HalfNormal("rate", 2), pm.HalfNormal("mass", 2)
        x = decay.solve(t, {"mass": mass}, {"rate": rate}, rtol=1e-6)
        pm.Normal("y", x[:, 0], 0.02, observed=y)
        idata = pm.sample(
            300, tune=300, chains=1, nuts_sampler="numpyro", random_seed=1, progressbar=False
        )
    draws = idata["posterior"]["rate"].to_numpy()
    assert 0.005 < draws.std() < 0.05
    assert abs(draws.mean() - 0.7) < 3 * draws.std()


def test_what_is_missing_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffrax", None)
    with pytest.raises(ImportError, match=r'diffrax .*pip install "pymc-gradmatch\[jax\]"'):
        in_jax.packages()


def test_the_package_imports_neither_jax_nor_diffrax():
    check = "import sys, pymc_gradmatch.ode; assert not {'jax', 'diffrax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)

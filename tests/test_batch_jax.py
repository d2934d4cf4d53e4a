"""fit_many(backend="jax"): densities, derivatives and verdicts are those of machine code."""

import sys

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pytensor.graph import Apply, Op

import pymc_gradmatch as gm
from benchmarks.many import problem
from pymc_gradmatch.exact.batch import Request
from pymc_gradmatch.sampling.batched_fits import ExactFits
from tests.test_batch import chain

pytestmark = pytest.mark.jax("jax", "diffrax")

T = np.linspace(0, 4, 9)


def rates():
    return {"k": pm.LogNormal.dist(0, 0.5), "m": pm.LogNormal.dist(0, 0.5)}


def counted(x, theta, y):
    pm.Poisson("counted", 20 * pt.maximum(x.b, 1e-3), observed=y)


def enzyme():
    """Return a fast equilibrium before a slow reaction: explicit steps would be thousands."""

    def rhs(t, x, theta):
        bound = 1e4 * x.e * x.s - theta.back * x.c
        made = theta.kc * x.c
        return [made - bound, -bound, bound - made, made]

    priors = {"back": pm.LogNormal.dist(np.log(5e3), 0.2), "kc": pm.LogNormal.dist(0, 0.3)}
    return gm.ODE(rhs, ["e", "s", "c", "p"], ["back", "kc"]), priors


def both(ode, priors, ys, **settings):
    """Return the posteriors of data sets by machine code, and by JAX."""
    found = []
    for backend in ("numba", "jax"):
        fits = ExactFits(ode, priors, 1_000, settings, backend)
        checked = [fits._check(T, y) for y in ys]
        posterior = fits._write((T, ys[0], 1), checked[0])
        rng = np.random.default_rng(1)
        posterior.batch.set_data_sets([posterior.data_set(one, rng) for one in checked])
        found.append(posterior.batch)
    return found


ENZYME, OF_ENZYME = enzyme()
NEAR = np.stack([1 + np.exp(-T), np.exp(-T / 2)], axis=-1)
MADE = np.full((9, 4), np.nan)
MADE[:, 3] = 0.9 - 0.9 * np.exp(-T / 6)
DOSE = {"a": gm.Input([1.0, 2.5], [2.0, 1.0], kind="dose")}


@pytest.mark.parametrize(
    ("ode", "priors", "ys", "settings"),
    [
        pytest.param(
            ENZYME, OF_ENZYME, [MADE, MADE + 0.01],
            {"start": {"e": 0.2, "s": 1.0, "c": 0.0, "p": 0.0}, "sigma": 0.02}, id="stiff",
        ),
        pytest.param(
            chain(positive=["a", "b"]), rates(), [np.arange(9), 9 - np.arange(9)],
            {"likelihood": counted, "inputs": DOSE,
             "start": {"a": 1.0, "b": lambda theta, x0: 0.1 * theta.k}},
            id="counts, of logarithms with doses",
        ),
    ],
)  # fmt: skip
def test_density_and_derivatives_are_those_of_machine_code(ode, priors, ys, settings):
    """Assert it; Hessians of machine code are differences of gradients, by 1e-4 of the axes."""
    batches = both(ode, priors, ys, **settings)
    rng, n_each = np.random.default_rng(2), 20
    phi = [batches[0].written.draw_prior(n_each, rng) for _ in ys]
    n = phi[0].shape[1]
    factor = 0.1 * np.eye(n) + 0.01 * rng.normal(size=(n_each, n, n))
    arguments = {
        "_evaluate": (), "value_and_gradient": (np.ones((n_each, n)),), "expand_along": (factor,)
    }  # fmt: skip
    before = batches[1].n_solutions
    for method, others in arguments.items():
        requests = [Request(method, (points, *others)) for points in phi]
        for one, other in zip(*(b.respond(requests, [0, 1]) for b in batches), strict=True):
            assert np.isfinite(one.values[0]).all()
            np.testing.assert_array_equal(other.ended, one.ended)
            for value, expected in zip(other.values, one.values, strict=True):
                scale = np.abs(expected).max(axis=tuple(range(1, expected.ndim)), keepdims=True)
                atol = 5e-4 if value.ndim == 3 and method != "_evaluate" else 1e-5
                np.testing.assert_allclose(value / scale, expected / scale, rtol=0, atol=atol)
    assert batches[1].n_solutions == before  # of machine code


def test_what_diffrax_does_not_find_has_the_ending_of_machine_code():
    growth = gm.ODE(lambda t, x, theta: [theta.k * x.a**2], ["a"], ["k"])
    start = {"a": lambda theta, x0: 1.0 + 0 * theta.k}
    y = 1 / (1 - 0.1 * T)[:, None]
    batches = both(growth, {"k": pm.LogNormal.dist(-2, 1)}, [y], sigma=0.1, start=start)
    phi = np.log([[0.1], [0.6], [0.2], [np.inf]])  # the second blows up before 4
    with np.errstate(invalid="ignore"):
        [one], [other] = (b.respond([Request("_evaluate", (phi,))], [0]) for b in batches)
    np.testing.assert_array_equal(other.ended, one.ended)
    np.testing.assert_allclose(other.values[0], one.values[0], rtol=1e-6)
    assert np.isfinite(one.values[0]).tolist() == [True, False, True, False]


def test_fits_and_verdicts_are_those_of_machine_code():
    ode, t, ys, settings = problem("LV low", 3)
    by = {
        backend: gm.fit_many(
            ode, t, ys, exact=True, draws=4_000, backend=backend, n_jobs=1, random_seed=1,
            progressbar=False, **settings,
        )
        for backend in ("numba", "jax")
    }  # fmt: skip
    assert by["jax"]["is_exact"].all()
    assert by["numba"]["is_exact"].all()
    names = list(ode.params)
    mean, other = (fits[names].mean("draw") for fits in by.values())
    apart = (mean - other) / by["numba"][names].std("draw")
    assert float(np.abs(apart.to_array()).max()) < 0.15


class Thrice(Op):
    """An operation without a form in JAX."""

    __props__ = ()

    def make_node(self, x):
        """Return the node."""
        x = pt.as_tensor(x)
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, output_storage):
        """Evaluate it."""
        output_storage[0][0] = 3 * inputs[0]

    def pullback(self, inputs, outputs, cotangents):
        """Return the gradient."""
        return [3 * cotangents[0]]


def many(**settings):
    given = {"priors": rates(), "n_jobs": 1, "progressbar": False, "exact": True} | settings
    return gm.fit_many(chain(), T, [NEAR], **given)


def test_what_has_no_form_in_jax_is_named():
    def odd(x, theta, y):
        pm.Normal("odd", Thrice()(x.b), 0.1, observed=y[:, 1])

    with pytest.raises(NotImplementedError, match=r"no form in JAX: .*Thrice.* backend=\"numba\""):
        many(backend="jax", likelihood=odd)


def test_a_backend_that_is_unknown_not_used_or_not_installed_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"backend is 'torch'; expected one of \['numba', 'jax'\]"):
        many(backend="torch")
    with pytest.raises(ValueError, match="needs exact=True"):
        many(backend="jax", exact=False)
    monkeypatch.setitem(sys.modules, "diffrax", None)
    with pytest.raises(ImportError, match=r'pip install "pymc-gradmatch\[jax\]"'):
        many(backend="jax")

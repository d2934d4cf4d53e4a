"""The reference implementation's numbers: prior, observation and gradient terms, D x, A.

Values computed with the code published with Wenk et al. (2019), see the note
in the file.  It drops all constants, so terms are compared as differences
from the first point.
"""

import json
from pathlib import Path

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

import pymc_gradmatch as gm
from benchmarks.paper import systems
from pymc_gradmatch import numerics as algebra

GOLDEN = json.loads((Path(__file__).parent / "data" / "fgpgm_golden.json").read_text("utf-8"))
SYSTEMS = {
    "lv_low": systems.lotka_volterra,
    "pt_low": systems.protein_transduction,
    "fhn_snr100_n25": systems.fitzhugh_nagumo,
}
KERNELS = {
    "RBF": lambda v, ls: v * pm.gp.cov.ExpQuad(1, ls=ls),
    "Matern52": lambda v, ls: v * pm.gp.cov.Matern52(1, ls=ls),
    "Sigmoid": lambda v, a, b: v * gm.kernels.Sigmoid(a, b),
}


def reference_protein_transduction(t, x, theta):
    """Return the right-hand side with the 1e-6 that only the reference code has."""
    guarded = theta._replace(Km=theta.Km + 1e-6)
    return systems.protein_transduction.ode.rhs(t, x, guarded)


@pytest.fixture(scope="module", params=list(SYSTEMS))
def case(request):
    return request.param, GOLDEN["cases"][request.param]


@pytest.fixture(scope="module")
def reference_gp(case):
    _, golden = case
    hyperparameters = np.array(golden["hyperparameters"])
    build = KERNELS[golden["kernel"]]
    return gm.StateGP(
        golden["t"],
        golden["y"],
        covs=[build(*(pt.constant(value) for value in row)) for row in hyperparameters],
        sigma=np.array(golden["sigma"]) * golden["y_std"],
        nugget=golden["nugget"],
    )


def states(gp, x):
    return np.reshape(x, (len(gp.states), len(gp.t))).T


def test_standardisation_and_operators_match(case, reference_gp):
    _, golden = case
    gp = reference_gp
    np.testing.assert_allclose(gp.scale, golden["y_std"], rtol=1e-12)
    np.testing.assert_allclose(gp.mean, golden["y_mean"], rtol=1e-12)
    C, D, A = gp.operators()
    np.testing.assert_allclose(C[:, 0], golden["first_row_C"], rtol=1e-9)
    np.testing.assert_allclose(np.diagonal(A, axis1=1, axis2=2), golden["diag_A"], rtol=1e-6)
    np.testing.assert_allclose(np.linalg.slogdet(C)[1], golden["logdet_C"], rtol=1e-8)
    total = A + golden["gamma"] * np.eye(len(gp.t))
    np.testing.assert_allclose(
        np.linalg.slogdet(total)[1], golden["logdet_A_plus_gamma"], rtol=1e-6
    )
    for point in golden["points"]:
        slopes = algebra.multiply(D, states(gp, point["x"])).T
        size = np.abs(point["Dx"]).max()
        np.testing.assert_allclose(slopes, point["Dx"], rtol=1e-6, atol=1e-6 * size)


def test_references_start_follows_from_our_covariance(case, reference_gp):
    """Assert C (C + sigma I)^-1 y, which the reference starts at, with its sigma unsquared."""
    _, golden = case
    gp = reference_gp
    C = gp.operators().C
    sigma = np.array(golden["sigma"])
    start = [
        C[k] @ np.linalg.solve(C[k] + sigma[k] * np.eye(len(gp.t)), golden["y_standardised"][k])
        for k in range(len(gp.states))
    ]
    np.testing.assert_allclose(np.ravel(start), golden["gp_init_x"], rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("fast_compile")
def test_factors_of_theorem_1_match(case, reference_gp):
    name, golden = case
    gp = reference_gp
    ode = SYSTEMS[name].ode
    if name == "pt_low":
        ode = gm.ODE(reference_protein_transduction, ode.states, ode.params)
    with pm.Model() as model:
        theta = {p: pm.HalfFlat(p, initval=t) for p, t in SYSTEMS[name].theta.items()}
        x = gp.prior("x")
        pm.Normal("y", x, gp.sigma, observed=gp.y)
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=golden["gamma"])
    terms = model.compile_fn(model.logp(vars=[x, model["y"], model["gradient_match"]], sum=False))

    def evaluate(point):
        logs = {f"{p}_log__": np.log(v) for p, v in zip(ode.params, point["theta"], strict=True)}
        values = terms(logs | {"x_standardized__": states(gp, point["x"])})
        return [float(np.sum(value)) for value in values]

    first = golden["points"][0]
    at_first = evaluate(first)
    for point in golden["points"][1:]:
        keys = ("prior", "observation", "gradient")
        for key, here, there in zip(keys, evaluate(point), at_first, strict=True):
            expected = point[key] - first[key]
            assert here - there == pytest.approx(expected, rel=1e-6, abs=1e-6), (point["name"], key)


@pytest.mark.slow
def test_fit_is_at_least_as_likely_as_the_references(case, reference_gp):
    name, golden = case
    paper = SYSTEMS[name].paper
    settings = {"cov": paper.cov, "shared": paper.shared, "random_seed": 1}
    if name == "pt_low":
        with pytest.warns(UserWarning, match="sigma ended at its low bound"):
            gp = gm.fit_gp(golden["t"], golden["y"], **settings)
    else:
        gp = gm.fit_gp(golden["t"], golden["y"], **settings)
        np.testing.assert_allclose(gp.sigma, reference_gp.sigma, rtol=1e-3)
        np.testing.assert_allclose(gp.operators().C, reference_gp.operators().C, atol=2e-3)
    gain = gp.log_marginal_likelihood() - reference_gp.log_marginal_likelihood()
    assert gain.sum() > -1e-5

"""Kernel derivatives: against closed forms, finite differences and each other's symmetries."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import pymc_gradmatch as gm
from pymc_gradmatch.gp.derivatives import covariance_blocks, evaluate_blocks
from pymc_gradmatch.gp.kernels import Separate, Sigmoid, describe

T = np.array([0.0, 0.3, 0.45, 1.1, 2.0])
LAG = T[:, None] - T[None, :]

KERNELS = {
    "ExpQuad": 1.7 * pm.gp.cov.ExpQuad(1, ls=np.float64(0.7)),
    "Matern52": 1.7 * pm.gp.cov.Matern52(1, ls=np.float64(0.7)),
    "Matern32": pm.gp.cov.Matern32(1, ls=np.float64(0.7)),
    "RatQuad": pm.gp.cov.RatQuad(1, ls=np.float64(0.7), alpha=np.float64(1.3)),
    "Periodic": pm.gp.cov.Periodic(1, period=np.float64(3.1), ls=np.float64(0.9)),
    "Sigmoid": 2.0 * Sigmoid(np.float64(0.3), np.float64(1.9)),
    "sum": pm.gp.cov.ExpQuad(1, ls=np.float64(0.7)) + pm.gp.cov.Linear(1, c=np.float64(0.2)),
    "product": pm.gp.cov.ExpQuad(1, ls=np.float64(0.7)) * Sigmoid(np.float64(1), np.float64(0.5)),
}


@pytest.fixture(params=list(KERNELS))
def cov(request):
    return KERNELS[request.param]


def exp_quad(lengthscale, variance):
    k = variance * np.exp(-0.5 * (LAG / lengthscale) ** 2)
    slope = LAG / lengthscale**2
    return k, -slope * k, slope * k, (1 / lengthscale**2 - slope**2) * k


def matern52(lengthscale, variance):
    r = np.sqrt(5) * np.abs(LAG) / lengthscale
    decay = variance * np.exp(-r)
    first = -5 / (3 * lengthscale**2) * LAG * (1 + r) * decay
    second = 5 / (3 * lengthscale**2) * (1 + r - r**2) * decay
    return (1 + r + r**2 / 3) * decay, first, -first, second


@pytest.mark.parametrize(
    ("cov", "closed_form", "tolerance"),
    [
        (KERNELS["ExpQuad"], exp_quad(0.7, 1.7), 1e-14),
        # PyMC keeps 1e-12 under the square root of the squared distance.
        (KERNELS["Matern52"], matern52(0.7, 1.7), 3e-8),
    ],
    ids=["ExpQuad", "Matern52"],
)
def test_blocks_match_closed_forms(cov, closed_form, tolerance):
    for block, expected in zip(evaluate_blocks(cov, T), closed_form, strict=True):
        np.testing.assert_allclose(block, expected, atol=tolerance)


@pytest.mark.slow
def test_derivatives_match_finite_differences(cov):
    t1, t2 = pt.vectors("t1", "t2")
    evaluate = pytensor.function([t1, t2], covariance_blocks(cov, t1, t2), mode="FAST_COMPILE")
    other = T + 0.123  # away from the kink of a Matern kernel's second derivative
    h = 1e-5
    k, dk_dt1, dk_dt2, d2k = evaluate(T, other)
    np.testing.assert_allclose(
        dk_dt1, (evaluate(T + h, other)[0] - evaluate(T - h, other)[0]) / (2 * h), atol=1e-8
    )
    np.testing.assert_allclose(
        dk_dt2, (evaluate(T, other + h)[0] - evaluate(T, other - h)[0]) / (2 * h), atol=1e-8
    )
    np.testing.assert_allclose(
        d2k, (evaluate(T, other + h)[1] - evaluate(T, other - h)[1]) / (2 * h), atol=1e-8
    )
    np.testing.assert_allclose(k, cov(T[:, None], other[:, None]).eval(), rtol=1e-12)


def test_joint_covariance_of_state_and_derivative_is_symmetric_and_positive(cov):
    k, dk_dt1, dk_dt2, d2k = evaluate_blocks(cov, T)
    joint = np.block([[k, dk_dt2], [dk_dt1, d2k]])
    np.testing.assert_allclose(joint, joint.T, atol=1e-8)
    assert np.linalg.eigvalsh(joint).min() > -1e-7 * np.linalg.eigvalsh(joint).max()


@pytest.mark.slow
@seed(np.random.SeedSequence(1).entropy)  # the integer, shifted as NumPy's are
@given(lengthscale=st.floats(0.05, 5), offset=st.floats(-50, 50))
@settings(max_examples=15, deadline=None, database=None)
def test_variance_of_the_derivative_does_not_depend_on_the_origin_of_time(lengthscale, offset):
    """PyMC clips distances; d2k at zero distance must be 1 / lengthscale^2."""
    cov = pm.gp.cov.ExpQuad(1, ls=np.float64(lengthscale))
    d2k = evaluate_blocks(cov, T + offset).d2k
    np.testing.assert_allclose(np.diagonal(d2k), lengthscale**-2, rtol=1e-9)


def test_compiled_and_interpreted_graphs_give_the_same_derivatives():
    """A negative rounding error of a zero distance is harmless under numba."""
    t = np.linspace(0, 2, 20)
    cov = pm.gp.cov.ExpQuad(1, ls=np.float64(0.5045))
    t1, t2 = pt.vectors("t1", "t2")
    compiled = pytensor.function([t1, t2], covariance_blocks(cov, t1, t2).d2k)
    np.testing.assert_allclose(compiled(t, t), evaluate_blocks(cov, t).d2k, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "kernel",
    [
        lambda h: pm.gp.cov.ExpQuad(1, ls=h),
        lambda h: pm.gp.cov.ExpQuad(1, ls_inv=h),
        lambda h: pm.gp.cov.RatQuad(1, alpha=h, ls=1.0),
        lambda h: pm.gp.cov.Periodic(1, period=h, ls=1.0),
        lambda h: h * pm.gp.cov.Matern52(1, ls=2.0),
        lambda h: 2.0 * pm.gp.cov.Matern32(1, ls=2.0) + pm.gp.cov.Constant(h),
        lambda h: pm.gp.cov.ExpQuad(1, ls=pt.exp(h)) ** 2,
        lambda h: pm.gp.cov.WarpedInput(1, pm.gp.cov.ExpQuad(1, ls=1.0), pt.mul, (h,)),
        lambda h: Sigmoid(1.0, h),
        lambda h: Separate(pm.gp.cov.ExpQuad(1, ls=h), [1.0]),
    ],
)
def test_variable_hyperparameters_are_refused(kernel):
    for free in (pm.HalfNormal.dist(1), pt.scalar("free")):
        with pytest.raises(ValueError, match=r"hyperparameters that are variables.*gm\.fit_gp"):
            gm.StateGP(T, np.sin(T)[:, None], [kernel(free)], sigma=0.1)
    for number in (1.5, pt.as_tensor(1.5)):
        gm.StateGP(T, np.sin(T)[:, None], [kernel(number)], sigma=0.1)


def test_sigmoid_is_the_papers_formula():
    a, b = 0.3, 1.9
    norm = np.sqrt(a + b * T**2 + 1)
    expected = np.arcsin((a + b * np.outer(T, T)) / np.outer(norm, norm))
    sigmoid = gm.kernels.Sigmoid(np.float64(a), np.float64(b))
    np.testing.assert_allclose(sigmoid(T[:, None]).eval(), expected, rtol=1e-14)
    np.testing.assert_allclose(sigmoid(T[:, None], diag=True).eval(), np.diag(expected), rtol=1e-14)


@pytest.mark.parametrize("name", ["Matern12", "Exponential"])
@pytest.mark.parametrize("lengthscale", [0.1, 1.0, 100.0])
def test_rough_kernels_are_refused_with_the_names_of_kernels_that_work(name, lengthscale):
    cov = getattr(pm.gp.cov, name)(1, ls=lengthscale)
    with pytest.raises(ValueError, match=rf"{name}.*not differentiable at zero.*Matern52"):
        evaluate_blocks(cov, T)


def test_white_noise_is_refused():
    cov = pm.gp.cov.ExpQuad(1, ls=1.0) + pm.gp.cov.WhiteNoise(0.1)
    with pytest.raises(ValueError, match=r"white noise.*`sigma`.*`nugget`"):
        evaluate_blocks(cov, T)


def test_description_names_kernel_and_hyperparameters():
    cov = 2.5 * pm.gp.cov.RatQuad(1, ls=0.5, alpha=3.0) * pm.gp.cov.Periodic(1, period=2.0, ls=1.0)
    assert describe(cov) == "2.5 * RatQuad(ls=0.5, alpha=3) * Periodic(ls=1, period=2)"
    assert describe(Sigmoid(0.5, 2.0) ** 2) == "Sigmoid(a=0.5, b=2) ** 2"

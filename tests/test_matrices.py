"""Long series: block low-rank matrices give the results of dense matrices."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from scipy.stats import multivariate_normal

import pymc_gradmatch as gm
from pymc_gradmatch import numerics as algebra
from pymc_gradmatch.gp import StatePrior, state_space
from pymc_gradmatch.model.constraint import GradientMatchingODERV
from pymc_gradmatch.sampling.posterior import compiled_for, fixed_variables

GAMMA = 0.3
N_TIME = state_space.LONG_SERIES
THETA = {"alpha": 1.7, "beta": 0.9, "gamma": 3.5, "delta": 1.1}
KERNELS = {"Matern52": pm.gp.cov.Matern52, "ExpQuad": pm.gp.cov.ExpQuad}


def times(n_time, irregular):
    if irregular:
        return 0.05 * (np.arange(n_time) + 0.4 * np.sin(np.arange(n_time) ** 2))
    return 0.05 * np.arange(n_time)


def long_gp(lotka_volterra, kernel="Matern52", irregular=False, ls=1.0, n_time=N_TIME):
    data = lotka_volterra.simulate("low", t=times(n_time, irregular), random_seed=1)
    covs = [KERNELS[kernel](1, ls=np.float64(ls))] * 2
    return gm.StateGP(data.t, data.y, covs, sigma=0.1)


def constraint(ode, gp, gamma=GAMMA):
    x = gp.posterior_mean()
    return gm.GradientMatchingODE.dist(ode, x, THETA, gp=gp, gamma=gamma)


def basis(rv, n_others):
    return algebra.basis_of(rv.owner.op.dist_params(rv.owner)[n_others:])


@pytest.fixture(params=[False, True], ids=["regular", "irregular"])
def irregular(request):
    return request.param


def test_symbolic_product_and_its_gradient_are_the_numpy_ones_with_a_batch(lotka_volterra, rng):
    D = long_gp(lotka_volterra).processes.slope_operator
    at, weights = rng.normal(size=(2, 3, N_TIME, 2))
    x = pt.tensor("x", shape=(None, N_TIME, 2), dtype="float64")
    product = algebra.multiply(D, x)
    outputs = [product, pt.grad((weights * product).sum(), x)]
    evaluate = pytensor.function([x], outputs, mode="FAST_COMPILE")
    value, gradient = evaluate(at)
    np.testing.assert_allclose(value, algebra.multiply(D, at), rtol=1e-12, atol=1e-12)
    dense = algebra.multiply(D, np.eye(N_TIME)[..., None] * np.ones(2))
    expected = np.einsum("jik,bik->bjk", dense, weights)
    np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_log_density_and_gradient_are_the_eigenbasis_ones(lotka_volterra, rng, irregular):
    gp = long_gp(lotka_volterra, irregular=irregular)
    C, _, A = gp.operators()
    residual = pt.tensor("residual", shape=(N_TIME, 2), dtype="float64")
    innovations = gp.processes.prior_basis, gp.processes.conditional_innovations(np.full(2, GAMMA))
    for triangular, covariance in zip(innovations, (C, A + GAMMA * np.eye(N_TIME)), strict=True):
        at = np.stack([rng.multivariate_normal(np.zeros(N_TIME), c) for c in covariance], axis=1)
        outputs = []
        for chosen in (triangular, algebra.spectrum(covariance)):
            density = algebra.normal_log_density(residual, type(chosen)(*map(pt.as_tensor, chosen)))
            outputs += [density, pt.grad(density, residual)]
        evaluate = pytensor.function([residual], outputs, mode="FAST_COMPILE")
        value, gradient, expected, expected_gradient = evaluate(at)
        np.testing.assert_allclose(value, expected, atol=1e-5)
        size = np.abs(expected_gradient).max()
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5 * size)


@pytest.mark.usefixtures("fast_compile")
def test_posterior_density_is_theorem_1_in_scipy(lotka_volterra, rng, irregular):
    ode, gp = lotka_volterra.ode, long_gp(lotka_volterra, irregular=irregular)
    priors = {name: pm.HalfNormal.dist(5) for name in ode.params}
    model = gm.build_model(
        ode, gp.t, gp.y, priors=priors, gp=gp, gamma=GAMMA, sigma="fixed", preset="fgpgm"
    )
    assert isinstance(basis(model["x"], 3), algebra.Innovations)
    assert isinstance(basis(model["gradient_match"], 3), algebra.Innovations)
    C, D, A = gp.operators()
    logp = model.compile_logp()

    def theorem_1(z):
        x = gp.mean + gp.scale * z
        f = (
            np.stack(
                [
                    THETA["alpha"] * x[:, 0] - THETA["beta"] * x[:, 0] * x[:, 1],
                    -THETA["gamma"] * x[:, 1] + THETA["delta"] * x[:, 0] * x[:, 1],
                ],
                axis=-1,
            )
            / gp.scale
        )
        total = sum(
            np.log(2) + multivariate_normal(cov=25.0).logpdf(value) + np.log(value)
            for value in THETA.values()
        )
        identity = np.eye(N_TIME)
        for k in range(2):
            total += multivariate_normal(cov=C[k]).logpdf(z[:, k])
            total += multivariate_normal(x[:, k], gp.sigma[k] ** 2 * identity).logpdf(gp.y[:, k])
            mismatch = multivariate_normal(D[k] @ z[:, k], A[k] + GAMMA * identity)
            total += mismatch.logpdf(f[:, k])
        return total

    start = (gp.posterior_mean() - gp.mean) / gp.scale
    for z in (start, start + 0.01 * rng.normal(size=start.shape)):
        point = {f"{name}_log__": np.log(value) for name, value in THETA.items()}
        value = logp(point | {"x_standardized__": z})
        np.testing.assert_allclose(value, theorem_1(z), rtol=1e-8, atol=1e-5)


@pytest.mark.slow
def test_draws_have_the_covariance_of_the_states_and_of_the_mismatch(lotka_volterra):
    gp, n_draws = long_gp(lotka_volterra), 3000
    with pm.Model() as model:
        gp.prior("x")
    C, _, A = gp.operators()
    identity = np.eye(N_TIME)
    scale = gp.scale[:, None, None]
    cases = [(model["x"], scale**2 * C), (constraint(lotka_volterra.ode, gp), A + GAMMA * identity)]
    for variable, covariance in cases:
        draws = pm.draw(variable, draws=n_draws, random_seed=1, mode="FAST_COMPILE")
        for k in range(2):
            sd = np.sqrt(np.diagonal(covariance[k]))
            error = (np.cov(draws[..., k].T) - covariance[k]) / np.outer(sd, sd)
            # Monte Carlo: sd of a covariance is at most sqrt(2), over sqrt(n).
            assert np.abs(error).max() < 5 * np.sqrt(2 / n_draws)


@pytest.mark.usefixtures("fast_compile")
def test_predictive_draws_of_a_long_series(lotka_volterra, predictive_draws):
    ode, gp = lotka_volterra.ode, long_gp(lotka_volterra)
    priors = {name: pm.HalfNormal.dist(5) for name in ode.params}
    model = gm.build_model(
        ode, gp.t, gp.y, priors=priors, gp=gp, gamma=GAMMA, sigma="fixed", preset="fgpgm"
    )
    for group in predictive_draws(model, 3):
        assert group["gradient_match"].shape == (1, 3, N_TIME, 2)
        assert np.isfinite(group["gradient_match"]).all()


@pytest.mark.usefixtures("fast_compile")
def test_batch_of_states_equals_loop(lotka_volterra, rng):
    gp = long_gp(lotka_volterra)
    x = gp.y + rng.normal(0, 0.2, size=(3, *gp.y.shape))
    g = gm.GradientMatchingODE.dist(lotka_volterra.ode, x, THETA, gp=gp, gamma=GAMMA)
    assert g.type.shape == (3, *gp.y.shape)
    loop = [
        pm.logp(
            gm.GradientMatchingODE.dist(lotka_volterra.ode, one, THETA, gp=gp, gamma=GAMMA),
            np.zeros_like(one),
        ).eval()
        for one in x
    ]
    np.testing.assert_allclose(pm.logp(g, np.zeros_like(x)).eval(), loop, rtol=1e-9)


@pytest.mark.usefixtures("fast_compile")
def test_random_gamma_stays_in_the_eigenbasis_and_gives_the_same_number(lotka_volterra):
    gp = long_gp(lotka_volterra)
    gamma = pt.scalar("gamma", dtype="float64")
    fixed, free = (constraint(lotka_volterra.ode, gp, g) for g in (GAMMA, gamma))
    assert isinstance(basis(fixed, 3), algebra.Innovations)
    assert isinstance(basis(free, 3), algebra.Spectrum)
    zero = np.zeros_like(gp.y)
    expected = pm.logp(free, zero).eval({gamma: GAMMA})
    np.testing.assert_allclose(pm.logp(fixed, zero).eval(), expected, rtol=1e-8, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "ls", "n_time"),
    [("Matern52", 1.0, N_TIME - 1), ("ExpQuad", 0.25, N_TIME)],
    ids=["short", "another kernel"],
)
def test_short_series_and_other_kernels_stay_dense(lotka_volterra, kernel, ls, n_time):
    gp = long_gp(lotka_volterra, kernel, ls=ls, n_time=n_time)
    with pm.Model() as model:
        gp.prior("x")
    assert isinstance(basis(model["x"], 3), algebra.Spectrum)
    assert isinstance(basis(constraint(lotka_volterra.ode, gp), 3), algebra.Spectrum)
    assert gp.processes.slope_operator is gp.operators().D


@pytest.mark.usefixtures("fast_compile")
def test_a_random_tolerance_is_found_in_both_bases(lotka_volterra):
    ode, gp = lotka_volterra.ode, long_gp(lotka_volterra)
    for random in (False, True):
        with pm.Model() as model:
            theta = {name: pm.HalfNormal(name, 5) for name in ode.params}
            gamma = pm.HalfNormal("tolerance", 1.0) if random else GAMMA
            gm.GradientMatchingODE("g", ode, gp.prior("x"), theta, gp=gp, gamma=gamma)
        assert isinstance(model["g"].owner.op, GradientMatchingODERV)
        held = fixed_variables(model)
        assert held == ({gamma} if random else set())


@pytest.mark.usefixtures("fast_compile")
def test_size_gives_a_batch_of_long_series(lotka_volterra):
    gp = long_gp(lotka_volterra)
    x = StatePrior.dist(gp.prior_mean, gp.scale, gp.y, *gp.processes.prior_basis, size=(3,))
    assert pm.draw(x, random_seed=1).shape == (3, *gp.y.shape)
    single = StatePrior.dist(gp.prior_mean, gp.scale, gp.y, *gp.processes.prior_basis)
    density = pm.logp(x, np.stack([gp.y] * 3)).eval()
    np.testing.assert_allclose(density, [pm.logp(single, gp.y).eval()] * 3, rtol=1e-12)


@pytest.mark.slow
def test_data_sets_whose_matrices_differ_in_shape_are_compiled_apart():
    unit = algebra.Spectrum(vectors=np.eye(3)[None], variances=np.ones((1, 3)))

    def model(numbers):
        with pm.Model() as model:
            x = StatePrior("x", [0.0], [1.0], np.zeros((3, 1)), *unit)
            pm.Normal("y", x[0], observed=numbers)
        return model

    compiled = []
    for numbers in ([0.1, 0.2], [0.1, 0.2, 0.3], [1.3, 0.2]):
        value, _ = compiled_for(model(numbers), compiled).density(np.zeros(3))
        expected = multivariate_normal(cov=np.eye(3 + len(numbers))).logpdf([0, 0, 0, *numbers])
        np.testing.assert_allclose(value, expected)
    assert len(compiled) == 2

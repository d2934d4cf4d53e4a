"""Matrices of long series from state-space models equal the dense matrices."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

import pymc_gradmatch as gm
from pymc_gradmatch import numerics as algebra
from pymc_gradmatch.gp import derivatives, processes, state_space
from pymc_gradmatch.gp.state_space import StateSpace
from pymc_gradmatch.model import constraints
from pymc_gradmatch.model.gauss_newton import Mode, Problem, optimise
from pymc_gradmatch.model.priors import parameters_of

N_TIME = state_space.LONG_SERIES
GAMMA = np.array([0.3, 1e-4])
NUGGET = np.array([1e-4, 1e-3])


def matern52(variance, lengthscale):
    return np.float64(variance) * pm.gp.cov.Matern52(1, ls=np.float64(lengthscale))


WARPED = pm.gp.cov.WarpedInput(1, matern52(2.0, 0.7), lambda t: t + t**2 / 80)
COVS = [matern52(3.0, 2.0), 0.5 * WARPED]


@pytest.fixture(params=["even", "uneven"])
def t(request, rng):
    even = np.linspace(0, 20, N_TIME)
    return even if request.param == "even" else np.sort(even + rng.uniform(0, 0.09, N_TIME))


def dense(matrix):
    """Return the product with every unit vector, ``(state, time, time)``."""
    columns = np.eye(N_TIME)[..., None] * np.ones(len(COVS))
    return np.moveaxis(algebra.multiply(matrix, columns), 0, -1).swapaxes(0, 1)


def covariance(basis):
    factor = dense(algebra.BlockLowRank(*basis[4:]))
    np.testing.assert_allclose(
        factor @ dense(algebra.BlockLowRank(*basis[1:4])), [np.eye(N_TIME)] * 2, atol=1e-10
    )
    return factor * basis.variances[:, None] @ factor.mT


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("size", [4, 5, 23])
def test_compressed_recursion_equals_the_recursion(rng, size, backward):
    n_state, n_time, rank = 2, 23, 3
    transition = 0.4 * rng.normal(size=(n_state, n_time, rank, rank))
    entering, leaving = rng.normal(size=(2, n_state, n_time, rank))
    direct, u = rng.normal(size=(n_state, n_time)), rng.normal(size=(n_time, n_state))
    matrix = algebra.compress_recursion(
        transition, entering, leaving, direct, size, backward=backward
    )
    expected = np.empty_like(u)
    for k in range(n_state):
        a = np.zeros(rank)
        for i in reversed(range(n_time)) if backward else range(n_time):
            expected[i, k] = leaving[k, i] @ a + direct[k, i] * u[i, k]
            a = transition[k, i] @ a + entering[k, i] * u[i, k]
    np.testing.assert_allclose(algebra.multiply(matrix, u), expected, rtol=1e-10, atol=1e-10)


def test_the_matrices_of_theorem_1(t):
    model = StateSpace.of(COVS, t)
    C, D, A = derivatives.conditional_operators(derivatives.state_blocks(COVS, t), NUGGET)
    tolerant = A + GAMMA[:, None, None] * np.eye(N_TIME)
    for found, expected in [
        (covariance(model.innovations(NUGGET)), C),
        (dense(model.slope_operator(NUGGET)), D),
        (covariance(model.conditional_innovations(NUGGET, GAMMA)), tolerant),
    ]:
        np.testing.assert_allclose(found, expected, atol=1e-8 * np.abs(expected).max())


def test_a_tiny_nugget_costs_fewer_digits_than_a_matrix_does():
    """Against 80 bit arithmetic: D of the kernel with a nugget of 1e-9, on a fine grid."""
    t = np.arange(60, dtype=np.longdouble) / 10
    d = np.sqrt(np.longdouble(5)) * (t[:, None] - t) / 2
    k = (1 + abs(d) + d**2 / 3) * np.exp(-abs(d)) + np.longdouble(1e-9) * np.eye(60)
    slope = -np.sqrt(np.longdouble(5)) / 2 * d * (1 + abs(d)) * np.exp(-abs(d)) / 3
    lower = np.zeros_like(k)
    for j in range(60):
        lower[j:, j] = k[j:, j] - lower[j:, :j] @ lower[j, :j]
        lower[j:, j] /= np.sqrt(lower[j, j])
    half = slope.T.copy()
    for j in range(60):
        half[j] = (half[j] - lower[j, :j] @ half[:j]) / lower[j, j]
    for j in reversed(range(60)):
        half[j] = (half[j] - lower[j + 1 :, j] @ half[j + 1 :]) / lower[j, j]
    exact = half.T

    cov, nugget = pm.gp.cov.Matern52(1, ls=np.float64(2.0)), np.array([1e-9])
    blocks = derivatives.state_blocks([cov], t.astype(float))
    dense_D = derivatives.conditional_operators(blocks, nugget).D[0]
    operator = StateSpace.of([cov], t.astype(float)).slope_operator(nugget)
    state_space_D = np.stack(
        [algebra.multiply(operator, one[:, None])[:, 0] for one in np.eye(60)], axis=1
    )
    error, of_matrices = (float(abs(D - exact).max()) for D in (state_space_D, dense_D))
    assert error < 0.1 * of_matrices
    assert error < 1e-8 * float(abs(exact).max())


@pytest.mark.parametrize("is_observed", ["everywhere", "here and there"])
def test_regression_equals_the_dense_one(t, rng, monkeypatch, is_observed):
    y = np.stack([np.sin(t), np.cos(t)], axis=1) + rng.normal(0, 0.1, (N_TIME, 2))
    if is_observed != "everywhere":
        y[3:9] = y[-1] = y[::7, 0] = np.nan
    found = {}
    for how, long in [("state space", N_TIME), ("dense", 10 * N_TIME)]:
        monkeypatch.setattr(state_space, "LONG_SERIES", long)
        gp = gm.StateGP(t, y, COVS, sigma=[0.1, 0.3], nugget=1e-3)
        finer = gp.with_grid(2)
        assert (finer.processes.state_space is not None) == (how == "state space")
        found[how] = [
            each
            for one in (gp, finer)
            for each in (one.posterior_mean(), one.posterior_sd(), one.log_marginal_likelihood())
        ]
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-7)


@pytest.mark.usefixtures("fast_compile")
def test_the_density_of_a_model_makes_no_matrix_of_all_times(lotka_volterra, rng, monkeypatch):
    ode, t = lotka_volterra.ode, np.linspace(0, 2, N_TIME)
    y = ode.solve(t, [5.0, 3.0], [2.0, 1.0, 4.0, 1.0]) + rng.normal(0, 0.1, (N_TIME, 2))
    priors = {name: pm.HalfNormal.dist(5) for name in ode.params}

    def log_density():
        gp = gm.StateGP(t, y, [matern52(1.0, 0.5)] * 2, sigma=0.1)
        model = gm.build_model(
            ode, t, y, priors=priors, gp=gp, gamma=0.3, sigma="fixed", preset="fgpgm"
        )
        point = model.initial_point()
        point["x_standardized__"] = (
            point["x_standardized__"] + 0.01 * np.sin(np.arange(N_TIME))[:, None]
        )
        return model.compile_logp()(point), model

    with monkeypatch.context() as patch:
        patch.setattr(state_space, "LONG_SERIES", 10 * N_TIME)
        expected, _ = log_density()

    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(processes, "state_blocks", refuse)
    monkeypatch.setattr(processes, "conditional_operators", refuse)
    found, model = log_density()
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    with model:
        drawn = pm.sample_prior_predictive(3, random_seed=1)
    assert np.isfinite(drawn["prior"]["x"]).all()


@pytest.mark.usefixtures("fast_compile")
def test_whitened_states_of_a_long_series_have_the_prior_of_centred_ones(rng):
    t = np.linspace(0, 20, N_TIME)
    gp = gm.StateGP(t, rng.normal(size=(N_TIME, 2)), COVS, sigma=0.1)
    with pm.Model() as centred:
        x = gp.prior("x")
    with pm.Model() as whitened:
        states = gp.prior("x", "whitened")
    coordinates = rng.normal(size=(2, N_TIME, 2))
    [of_values] = whitened.replace_rvs_by_values([states])
    density, there = [], whitened.compile_fn(of_values, inputs=whitened.value_vars)
    log_prior, log_white = centred.compile_logp(jacobian=False), whitened.compile_logp()
    name, white = centred.value_vars[0].name, whitened.value_vars[0].name
    for z in coordinates:
        standardised = (there({white: z}) - gp.prior_mean) / gp.scale
        density.append(log_prior({name: standardised}) - log_white({white: z}))
    np.testing.assert_allclose(density[0], density[1], rtol=1e-9)  # a volume, the same anywhere
    assert x.type.shape == states.type.shape == (N_TIME, 2)


@pytest.mark.parametrize(
    "cov",
    [
        pm.gp.cov.Matern32(1, ls=1.0),
        pm.gp.cov.Matern52(1, ls=1.0) + pm.gp.cov.Constant(1.0),
        pm.gp.cov.Matern52(1, ls=1.0) * pm.gp.cov.Matern52(1, ls=2.0),
        pm.gp.cov.Matern52(1, ls=1.0) * pm.gp.cov.Constant(2.0),
        pm.gp.cov.WarpedInput(1, pm.gp.cov.ExpQuad(1, ls=1.0), lambda t: t**2),
    ],
    ids=["Matern32", "sum", "product", "constant kernel", "warped"],
)
def test_other_kernels_have_no_state_space_form(cov):
    assert StateSpace.of([COVS[0], cov], np.arange(5.0)) is None


@pytest.mark.parametrize(
    "warp",
    [lambda t: -t - t**2 / 80, lambda t: pt.sin(t / 4)],
    ids=["runs back", "turns"],
)
def test_a_warp_that_does_not_increase_has_no_state_space_form(rng, monkeypatch, warp):
    cov = pm.gp.cov.WarpedInput(1, matern52(1.0, 1.0), warp)
    t = np.linspace(0, 20, N_TIME)
    y = np.sin(t)[:, None] + rng.normal(0, 0.1, (N_TIME, 1))
    evidence = []
    for long in (N_TIME, 10 * N_TIME):
        monkeypatch.setattr(state_space, "LONG_SERIES", long)
        evidence += [*gm.StateGP(t, y, [cov], sigma=0.1).log_marginal_likelihood()]
    assert evidence[0] == pytest.approx(evidence[1], rel=1e-9)


def test_factors_of_a_kernel_multiply_its_variance(t):
    one = StateSpace.of([2.0 * (np.float64(1.5) * pm.gp.cov.Matern52(1, ls=np.float64(0.7)))], t)
    np.testing.assert_array_equal(one.added, StateSpace.of([matern52(3.0, 0.7)], t).added)


def test_kernels_with_breaks_are_dense(rng):
    t = np.linspace(0, 20, N_TIME)
    gp = gm.StateGP(t, rng.normal(size=(N_TIME, 2)), COVS, sigma=0.1)
    assert gp.processes.state_space is not None
    assert gp.with_breaks([10.0]).processes.state_space is None


def test_thinned_data_keep_every_nth_observation_of_each_state():
    t = np.arange(1000.0)
    y = np.sin(t)[:, None] * np.ones(3)
    y[1::2, 0], y[np.arange(1000) % 90 != 7, 1], y[:, 2] = np.nan, np.nan, np.nan
    data = gm.StateGP(t, y, [COVS[0]] * 3, sigma=1.0, scales={2: 1.0}, standardize=False).data
    fewer = data.thinned(100)
    assert {0.0, 999.0} < set(fewer.t)
    np.testing.assert_array_equal(np.diff(fewer.t[fewer.is_observed[:, 0]])[:5], 10)
    assert fewer.is_observed.sum(axis=0).tolist()[1:] == [data.is_observed[:, 1].sum(), 0]
    assert len(fewer.t) < 120


@pytest.mark.slow
def test_a_long_series_whose_noise_is_known_is_refined_with_it(rng):
    """Noise per observation, tiny in three of four."""
    decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t = np.linspace(0, 4, 900)
    noise = np.where(np.arange(900) % 4, 0.01, 3.0)[:, None]
    y = 5 * np.exp(-0.7 * t)[:, None] + rng.normal(0, noise)
    settings = {"priors": {"rate": pm.HalfNormal.dist(2)}, "random_seed": 1, "progressbar": False}
    fit = gm.fit(decay, t, y, sigma=noise, **settings)
    rate = fit.table.loc["rate"]
    assert fit.is_exact
    assert abs(rate["mean"] - 0.7) < 4 * rate["sd"] < 0.004


@pytest.fixture(scope="module")
def long_fit(lotka_volterra):
    """Return the right-hand side, priors, true parameters and a fit of 450 times."""
    ode, t = lotka_volterra.ode, np.linspace(0, 10, 450)
    truth = np.array([2.0, 1.0, 4.0, 1.0])
    y = ode.solve(t, [5.0, 3.0], truth) + np.random.default_rng(1).normal(0, 0.3, (450, 2))
    priors = {name: pm.HalfNormal.dist(5) for name in ode.params}
    return ode, priors, truth, gm.fit(ode, t, y, priors=priors, random_seed=1)


@pytest.mark.slow
def test_a_long_series_is_fitted_without_a_matrix_of_all_times(long_fit):
    ode, _, truth, fit = long_fit
    [constraint] = constraints(fit.model)
    assert constraint.gp.processes.state_space is not None
    assert "operators" not in vars(constraint.gp.processes)
    found = fit.table.loc[list(ode.params)]
    assert fit.is_exact
    assert (np.abs(found["mean"] - truth) < 4 * found["sd"]).all()


@pytest.mark.slow
def test_theorem_1_of_a_long_series_is_close_to_the_exact_posterior(long_fit):
    """Its mode within 0.3 sd, its sd within 10 %."""
    ode, priors, _, fit = long_fit
    [constraint] = constraints(fit.model)
    gp, parameters = constraint.gp, parameters_of(priors, ode.params)
    found = fit.table.loc[list(ode.params)]
    problem = Problem.of(ode, gp, parameters, 1e-6 * gp.slope_variance())
    start = Mode(np.log(found["mean"]), gp.prior_mean, np.ones(2))
    [matched] = optimise([problem], [start])
    theta, slope = parameters.natural(matched.u)
    assert (np.abs(theta - found["mean"]) < 0.3 * found["sd"]).all()
    np.testing.assert_allclose(matched.sd * slope, found["sd"], rtol=0.1)

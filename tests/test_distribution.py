"""GradientMatchingODE: Theorem 1's last factor, its draws, its place in PyMC, and messages."""

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.distributions.distribution import support_point
from scipy.stats import multivariate_normal

import pymc_gradmatch as gm
from benchmarks.paper import systems
from pymc_gradmatch.model.constraint import residuals

GAMMA = 0.3
THETA = {"alpha": 1.7, "beta": 0.9, "gamma": 3.5, "delta": 1.1}


def four_line_model(ode, gp, gamma=GAMMA, parameterization="centered"):
    with pm.Model() as model:
        theta = {name: pm.HalfNormal(name, 5) for name in ode.params}
        x = gp.prior("x", parameterization=parameterization)
        pm.Normal("y", x, gp.sigma, observed=gp.y)
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=gamma)
    return model


def right_hand_side(x, theta):
    prey, predator = x[..., 0], x[..., 1]
    return np.stack(
        [
            theta["alpha"] * prey - theta["beta"] * prey * predator,
            -theta["gamma"] * predator + theta["delta"] * prey * predator,
        ],
        axis=-1,
    )


def constraint(gp, x, theta, gamma):
    """Evaluate log N(f(x, theta) | D x, A + gamma I) with scipy, per state, standardised."""
    _, D, A = gp.operators()
    standardised = (x - gp.mean) / gp.scale
    f = right_hand_side(x, theta) / gp.scale
    return sum(
        multivariate_normal(D[k] @ standardised[:, k], A[k] + gamma * np.eye(len(gp.t))).logpdf(
            f[:, k]
        )
        for k in range(2)
    )


@pytest.fixture
def states(two_kernel_gp, rng):
    return two_kernel_gp.y + rng.normal(0, 0.2, size=two_kernel_gp.y.shape)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("gamma", [1.0, 0.3, 1e-3])
def test_density_is_scipys_multivariate_normal(lotka_volterra, two_kernel_gp, states, gamma):
    g = gm.GradientMatchingODE.dist(
        lotka_volterra.ode, states, THETA, gp=two_kernel_gp, gamma=gamma
    )
    np.testing.assert_allclose(
        pm.logp(g, np.zeros_like(states)).eval(),
        constraint(two_kernel_gp, states, THETA, gamma),
        rtol=1e-9,
    )


@pytest.mark.usefixtures("fast_compile")
def test_four_lines_are_theorem_1_written_as_one_expression(lotka_volterra, two_kernel_gp, states):
    gp = two_kernel_gp
    model = four_line_model(lotka_volterra.ode, gp)
    point = {f"{name}_log__": np.log(value) for name, value in THETA.items()}
    point["x_standardized__"] = (states - gp.mean) / gp.scale
    prior = multivariate_normal(cov=25.0)
    theorem_1 = (
        sum(np.log(2) + prior.logpdf(value) + np.log(value) for value in THETA.values())
        + sum(
            multivariate_normal(cov=gp.operators().C[k]).logpdf(point["x_standardized__"][:, k])
            for k in range(2)
        )
        + sum(
            multivariate_normal(states[:, k], gp.sigma[k] ** 2 * np.eye(len(gp.t))).logpdf(
                gp.y[:, k]
            )
            for k in range(2)
        )
        + constraint(gp, states, THETA, GAMMA)
    )
    np.testing.assert_allclose(model.compile_logp()(point), theorem_1, rtol=1e-9)


@pytest.mark.usefixtures("fast_compile")
def test_gradient_of_the_density_is_finite_differences(lotka_volterra, two_kernel_gp, rng):
    model = four_line_model(lotka_volterra.ode, two_kernel_gp)
    logp, dlogp = model.compile_logp(), model.compile_dlogp()
    point = model.initial_point()
    gradient = dlogp(point)
    sizes = [np.size(point[value.name]) for value in model.value_vars]
    for _ in range(3):
        direction = {
            value.name: rng.normal(size=np.shape(point[value.name])) for value in model.value_vars
        }
        h = 1e-6
        ahead, behind = (
            logp({name: point[name] + sign * h * direction[name] for name in point})
            for sign in (1, -1)
        )
        flat = np.concatenate([np.ravel(direction[value.name]) for value in model.value_vars])
        assert len(flat) == sum(sizes)
        np.testing.assert_allclose(gradient @ flat, (ahead - behind) / (2 * h), rtol=1e-5)


@pytest.mark.usefixtures("fast_compile")
def test_permuting_the_states_changes_nothing(lotka_volterra, two_kernel_gp, states):
    gp = two_kernel_gp
    swapped_gp = gm.StateGP(
        gp.t, gp.y[:, ::-1], gp.covs[::-1], gp.sigma[::-1], nugget=gp.nugget[::-1]
    )

    def swapped(t, x, theta):
        prey, predator = lotka_volterra.ode.rhs(t, (x.prey, x.predator), theta)
        return predator, prey

    ode = gm.ODE(swapped, ["predator", "prey"], lotka_volterra.ode.params)
    here = gm.GradientMatchingODE.dist(lotka_volterra.ode, states, THETA, gp=gp, gamma=GAMMA)
    there = gm.GradientMatchingODE.dist(ode, states[:, ::-1], THETA, gp=swapped_gp, gamma=GAMMA)
    zero = np.zeros_like(states)
    np.testing.assert_allclose(pm.logp(here, zero).eval(), pm.logp(there, zero).eval(), rtol=1e-12)


@pytest.mark.usefixtures("fast_compile")
def test_rescaling_data_and_parameters_together_changes_nothing(
    lotka_volterra, two_kernel_gp, states
):
    gp = two_kernel_gp
    unit = 1000.0
    scaled_gp = gm.StateGP(gp.t, unit * gp.y, gp.covs, unit * gp.sigma, nugget=gp.nugget)
    scaled_theta = THETA | {"beta": THETA["beta"] / unit, "delta": THETA["delta"] / unit}
    ode = lotka_volterra.ode
    here = gm.GradientMatchingODE.dist(ode, states, THETA, gp=gp, gamma=GAMMA)
    there = gm.GradientMatchingODE.dist(ode, unit * states, scaled_theta, gp=scaled_gp, gamma=GAMMA)
    zero = np.zeros_like(states)
    np.testing.assert_allclose(pm.logp(here, zero).eval(), pm.logp(there, zero).eval(), rtol=1e-10)


@pytest.mark.usefixtures("fast_compile")
def test_batch_equals_loop(lotka_volterra, two_kernel_gp, rng):
    gp = two_kernel_gp
    x = gp.y + rng.normal(0, 0.2, size=(3, *gp.y.shape))
    theta = {name: value * rng.uniform(0.8, 1.2, size=3) for name, value in THETA.items()}
    batched = {name: value[:, None] for name, value in theta.items()}
    g = gm.GradientMatchingODE.dist(lotka_volterra.ode, x, batched, gp=gp, gamma=GAMMA)
    assert g.type.shape == (3, *gp.y.shape)
    density = pm.logp(g, np.zeros_like(x)).eval()
    loop = [
        constraint(gp, x[i], {name: value[i] for name, value in theta.items()}, GAMMA)
        for i in range(3)
    ]
    np.testing.assert_allclose(density, loop, rtol=1e-9)


@pytest.mark.usefixtures("fast_compile")
def test_gamma_may_be_random_because_the_determinant_is_there(
    lotka_volterra, two_kernel_gp, states
):
    gamma = pt.scalar("gamma")
    g = gm.GradientMatchingODE.dist(
        lotka_volterra.ode, states, THETA, gp=two_kernel_gp, gamma=gamma
    )
    density = pm.logp(g, np.zeros_like(states))
    for value in (0.5, 0.01):
        np.testing.assert_allclose(
            density.eval({gamma: value}),
            constraint(two_kernel_gp, states, THETA, value),
            rtol=1e-9,
        )
    with pytest.raises(pm.logprob.utils.ParameterValueError, match="gamma > 0"):
        density.eval({gamma: -1.0})


@pytest.mark.usefixtures("fast_compile")
def test_gamma_with_a_prior_is_part_of_the_model(lotka_volterra, two_kernel_gp):
    gp = two_kernel_gp
    with pm.Model() as model:
        theta = {name: pm.HalfNormal(name, 5) for name in lotka_volterra.ode.params}
        x = gp.prior("x")
        tolerance = pm.HalfNormal("tolerance", 1.0)
        gm.GradientMatchingODE("g", lotka_volterra.ode, x, theta, gp=gp, gamma=tolerance)
    logp = model.compile_logp(vars=[model["g"]])
    point = model.initial_point()
    theta = {name: np.exp(point[f"{name}_log__"]) for name in lotka_volterra.ode.params}
    for value in (0.5, 0.01):
        point["tolerance_log__"] = np.log(value)
        expected = constraint(gp, gp.posterior_mean(), theta, value)
        np.testing.assert_allclose(logp(point), expected, rtol=1e-9)


def test_states_of_unknown_shape_are_an_error(lotka_volterra, gp):
    with pm.Model():
        x = pm.Data("x", gp.y)
        with pytest.raises(ValueError, match=r"x has the shape \(None, None\), unknown"):
            gm.GradientMatchingODE("g", lotka_volterra.ode, x, THETA, gp=gp, gamma=GAMMA)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_compile")
def test_gamma_is_a_variance_per_time_squared(data, lotka_volterra, two_kernel_gp, states):
    """Assert that counting time in minutes divides gamma by 60^2 and keeps the density."""
    gp, unit = two_kernel_gp, 60.0
    covs = [
        1.5 * pm.gp.cov.ExpQuad(1, ls=np.float64(0.61 * unit)),
        0.7 * pm.gp.cov.Matern52(1, ls=np.float64(0.83 * unit)),
    ]
    slow_gp = gm.StateGP(unit * data.t, data.y, covs, gp.sigma, nugget=gp.nugget)
    slow_theta = {name: value / unit for name, value in THETA.items()}
    ode = lotka_volterra.ode
    here = gm.GradientMatchingODE.dist(ode, states, THETA, gp=gp, gamma=GAMMA)
    there = gm.GradientMatchingODE.dist(ode, states, slow_theta, gp=slow_gp, gamma=GAMMA / unit**2)
    zero = np.zeros_like(states)
    jacobian = states.size * np.log(unit)
    np.testing.assert_allclose(
        pm.logp(there, zero).eval(), pm.logp(here, zero).eval() + jacobian, rtol=1e-7
    )


def test_draws_are_the_replicated_mismatch(lotka_volterra, two_kernel_gp, states):
    gp, n_draws = two_kernel_gp, 4000
    g = gm.GradientMatchingODE.dist(lotka_volterra.ode, states, THETA, gp=gp, gamma=GAMMA)
    draws = pm.draw(g, draws=n_draws, random_seed=2, mode="FAST_COMPILE")
    _, D, A = gp.operators()
    for k in range(2):
        covariance = A[k] + GAMMA * np.eye(len(gp.t))
        sd = np.sqrt(np.diag(covariance))
        f = right_hand_side(states, THETA)[:, k] / gp.scale[k]
        mean = f - D[k] @ ((states[:, k] - gp.mean[k]) / gp.scale[k])
        # Monte Carlo: sd of a mean is 1, of a covariance at most sqrt(2), over sqrt(n).
        error_of_mean = (draws[..., k].mean(axis=0) - mean) / sd
        error_of_cov = (np.cov(draws[..., k].T) - covariance) / np.outer(sd, sd)
        assert np.abs(error_of_mean).max() < 5 / np.sqrt(n_draws)
        assert np.abs(error_of_cov).max() < 5 * np.sqrt(2 / n_draws)


@pytest.mark.usefixtures("fast_compile")
def test_forward_sampling_works_end_to_end(lotka_volterra, two_kernel_gp, predictive_draws):
    model = four_line_model(lotka_volterra.ode, two_kernel_gp)
    for group in predictive_draws(model, 5):
        assert group["gradient_match"].dims == ("chain", "draw", "time", "state")
        assert group["gradient_match"].shape == (1, 5, *two_kernel_gp.y.shape)
        assert np.isfinite(group["gradient_match"]).all()
        assert np.isfinite(group["y"]).all()


def test_model_text_and_graph_show_the_distributions_name(lotka_volterra, two_kernel_gp):
    model = four_line_model(lotka_volterra.ode, two_kernel_gp)
    assert "gradient_match ~ GradientMatchingODE(" in model.str_repr()
    assert "GradientMatchingODE" in pm.model_to_mermaid(model)


@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("size", [(), (4,), (2, 3)])
def test_support_point_and_draws_have_the_full_shape(lotka_volterra, two_kernel_gp, size):
    gp = two_kernel_gp
    at_mean = gp.posterior_mean()
    mismatch = residuals(lotka_volterra.ode(gp.t, at_mean, THETA), at_mean, gp).eval()
    g = gm.GradientMatchingODE.dist(
        lotka_volterra.ode, at_mean, THETA, gp=gp, gamma=GAMMA, size=size
    )
    point = support_point(g).eval()
    np.testing.assert_allclose(point, np.broadcast_to(mismatch, (*size, *gp.y.shape)))
    draws = pm.draw(g, random_seed=1)
    assert draws.shape == (*size, *gp.y.shape)
    assert len(np.unique(draws)) == draws.size


def test_hyperparameters_are_computed_outside_the_graph(lotka_volterra, two_kernel_gp):
    model = four_line_model(lotka_volterra.ode, two_kernel_gp)
    ops = {
        str(node.op) for node in model.compile_logp(mode="FAST_COMPILE").f.maker.fgraph.toposort()
    }
    assert not any("Cholesky" in op or "Solve" in op or "Eigh" in op for op in ops)


@pytest.mark.parametrize(
    ("gamma", "message"),
    [
        (0.0, r"gamma is 0; expected a positive variance"),
        (-0.3, r"gamma is -0.3; expected a positive variance"),
        (np.nan, r"gamma is nan; expected a positive variance"),
        ([0.1, -0.2], r"gamma is -0.2, 0.1; expected a positive variance"),
        (
            [0.1, 0.2, 0.3],
            r"gamma has the shape \(3,\); expected one number, or one for each of the 2",
        ),
        ([[0.1, 0.2]], r"gamma has the shape \(1, 2\); expected one number, or one"),
    ],
)
def test_unusable_gamma_is_an_error_when_the_model_is_built(lotka_volterra, gp, gamma, message):
    with pytest.raises(ValueError, match=message):
        four_line_model(lotka_volterra.ode, gp, gamma=gamma)


def test_singular_conditional_covariance_is_an_error_that_names_gamma(lotka_volterra, gp):
    """Assert it for a kernel so smooth that A has no rank left but by rounding."""
    smooth = gp.with_covs([pm.gp.cov.ExpQuad(1, ls=np.float64(1.5))] * 2)
    with pytest.raises(ValueError, match=r"A \+ gamma I is not positive definite.*larger gamma"):
        four_line_model(lotka_volterra.ode, smooth, gamma=1e-18)


def test_states_of_another_shape_are_an_error(lotka_volterra, gp):
    with pm.Model() as model:
        x = pm.Normal("x", shape=(7, 2))
        message = r"x has shape \(7, 2\); expected .* \(..., 20, 2\)"
        with pytest.raises(ValueError, match=message):
            gm.GradientMatchingODE("g", lotka_volterra.ode, x, THETA, gp=gp, gamma=GAMMA)
    assert model.observed_RVs == []


def test_ode_with_other_states_than_the_data_is_an_error(data, gp):
    three = systems.protein_transduction.ode
    with pytest.raises(ValueError, match=r"the ODE has 5 states .* the data 2"):
        gm.GradientMatchingODE.dist(three, gp.y, {}, gp=gp, gamma=GAMMA)


def test_columns_in_another_order_are_an_error(data, lotka_volterra):
    table = pd.DataFrame(data.y[:, ::-1], columns=["predator", "prey"])
    gp = gm.StateGP(data.t, table, [pm.gp.cov.ExpQuad(1, ls=0.5)] * 2, sigma=0.1)
    with pytest.raises(ValueError, match=r"columns of y are \['predator', 'prey'\].*same order"):
        gm.GradientMatchingODE.dist(lotka_volterra.ode, table, THETA, gp=gp, gamma=GAMMA)


def test_missing_and_unknown_parameters_are_an_error(lotka_volterra, gp):
    theta = {"alpha": 1.0, "beta": 1.0, "gamma": 1.0, "epsilon": 1.0}
    with pytest.raises(ValueError, match=r"missing for \['delta'\].*unknown \['epsilon'\]"):
        gm.GradientMatchingODE.dist(lotka_volterra.ode, gp.y, theta, gp=gp, gamma=GAMMA)


def test_parameters_that_are_not_in_the_model_are_an_error(lotka_volterra, gp):
    with pm.Model():
        theta = {name: pm.HalfNormal.dist(5) for name in lotka_volterra.ode.params}
        x = gp.prior("x")
        with pytest.raises(ValueError, match=r"4 random variables that are not in the model"):
            gm.GradientMatchingODE("g", lotka_volterra.ode, x, theta, gp=gp, gamma=GAMMA)


def test_right_hand_side_that_is_nan_at_the_start_names_state_and_time(data, gp):
    def undefined(t, x, theta):
        return theta.r * x.prey, pm.math.log(x.prey - 1000)

    ode = gm.ODE(undefined, ["prey", "predator"], ["r"])
    message = r"right-hand side of state 'predator' is nan at t = 0 where sampling starts"
    with pm.Model(), np.errstate(invalid="ignore"):
        theta = {"r": pm.HalfNormal("r")}
        x = gp.prior("x")
        with pytest.raises(ValueError, match=message):
            gm.GradientMatchingODE("g", ode, x, theta, gp=gp, gamma=GAMMA)

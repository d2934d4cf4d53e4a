"""Adaptive gradient matching: C, D and A as graphs of random hyperparameters."""

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose
from pytensor.graph.replace import vectorize_graph
from scipy.stats import halfnorm, lognorm, multivariate_normal, norm

import pymc_gradmatch as gm

NUGGET = 1e-4
TIMES = np.linspace(0, 2, 6)
DATA = np.stack([np.exp(-TIMES), 1 - np.exp(-0.5 * TIMES)], axis=1)
ODE = gm.ODE(lambda t, x, theta: [-theta.k * x.a, theta.k * (1 - x.b)], ["a", "b"], ["k"])


@pytest.fixture(scope="module")
def two_decays():
    """Return a function that writes two decays, a lengthscale per state, everything random."""

    def make(parameterization):
        with pm.Model(coords={"state": ODE.states}) as model:
            theta = {"k": pm.HalfNormal("k", 2)}
            variance, gamma = pm.HalfNormal("variance", 2), pm.HalfNormal("gamma", 1)
            lengthscale = pm.LogNormal("lengthscale", 0, 1, shape=2)
            sigma = pm.HalfNormal("sigma", 1, dims="state")
            kernels = [variance * pm.gp.cov.ExpQuad(1, ls=lengthscale[i]) for i in range(2)]
            gp = gm.StateGP(TIMES, DATA, kernels, sigma=sigma, nugget=NUGGET)
            x = gp.prior("x", parameterization)
            pm.Normal("y", x, gp.sigma, observed=DATA, dims=("time", "state"))
            gm.GradientMatchingODE("gradient_match", ODE, x, theta, gp=gp, gamma=gamma)
        return model

    return make


@pytest.fixture(scope="module")
def centered(two_decays):
    return two_decays("centered")


@pytest.fixture(scope="module")
def density_and_gradient(centered):
    """Return the log density in the variables' own units, and its gradient on the samplers'."""
    values = centered.value_vars
    graphs = [centered.logp(jacobian=False), *pt.grad(centered.logp(), values)]
    function = pm.compile(values, graphs, mode="FAST_COMPILE", on_unused_input="ignore")
    return lambda point: function(*(point[value.name] for value in values))


def point_of(k, variance, gamma, lengthscale, sigma, x):
    """Return the point as samplers see it."""
    logs = {"k": k, "variance": variance, "gamma": gamma}
    logs |= {"lengthscale": lengthscale, "sigma": sigma}
    standardised = (x - DATA.mean(axis=0)) / DATA.std(axis=0)
    return {f"{name}_log__": np.log(value) for name, value in logs.items()} | {
        "x_standardized__": standardised
    }


def random_values(rng):
    return {
        "k": rng.uniform(0.2, 2),
        "variance": rng.uniform(0.5, 4),
        "gamma": rng.uniform(0.05, 1),
        "lengthscale": rng.uniform(0.4, 2, size=2),
        "sigma": rng.uniform(0.05, 0.5, size=2),
        "x": DATA + rng.normal(0, 0.1, DATA.shape),
    }


def exp_quad_blocks(variance, lengthscale):
    """Return k and its derivatives in closed form."""
    lag = TIMES[:, None] - TIMES
    k = variance * np.exp(-0.5 * (lag / lengthscale) ** 2)
    dk_dt1 = -lag / lengthscale**2 * k
    return k, dk_dt1, -dk_dt1, (1 - (lag / lengthscale) ** 2) / lengthscale**2 * k


def conditional(variance, lengthscale):
    """Return C, D and A by inverting a matrix."""
    k, dk_dt1, dk_dt2, d2k = exp_quad_blocks(variance, lengthscale)
    C = k + NUGGET * np.eye(len(TIMES))
    D = dk_dt1 @ np.linalg.inv(C)
    return C, D, d2k - D @ dk_dt2


def reference_log_density(k, variance, gamma, lengthscale, sigma, x):
    """Return the log of Theorem 1 with all its determinants, by scipy."""
    total = halfnorm(scale=2).logpdf([k, variance]).sum() + halfnorm.logpdf(gamma)
    total += lognorm(s=1).logpdf(lengthscale).sum() + halfnorm.logpdf(sigma).sum()
    total += norm(x, sigma).logpdf(DATA).sum()
    slopes = np.stack([-k * x[:, 0], k * (1 - x[:, 1])], axis=1)
    for i in range(2):
        mean, scale = DATA[:, i].mean(), DATA[:, i].std()
        C, D, A = conditional(variance, lengthscale[i])
        total += multivariate_normal(np.full(len(TIMES), mean), scale**2 * C).logpdf(x[:, i])
        mismatch = slopes[:, i] / scale - D @ (x[:, i] - mean) / scale
        total += multivariate_normal(cov=A + gamma * np.eye(len(TIMES))).logpdf(mismatch)
    return total


@pytest.mark.slow
def test_log_density_is_theorem_1_with_every_determinant(density_and_gradient, rng):
    for _ in range(5):
        values = random_values(rng)
        assert_allclose(
            density_and_gradient(point_of(**values))[0], reference_log_density(**values), rtol=1e-9
        )


@pytest.mark.slow
def test_gradient_is_the_slope_of_the_log_density(density_and_gradient, centered, rng):
    point = point_of(**random_values(rng))
    with_jacobian = centered.compile_logp(mode="FAST_COMPILE")
    gradients = dict(
        zip(
            [value.name for value in centered.value_vars],
            density_and_gradient(point)[1:],
            strict=True,
        )
    )
    step = 1e-5
    for name, gradient in gradients.items():
        direction = rng.normal(size=np.shape(point[name]))
        forward, backward = (
            with_jacobian(point | {name: point[name] + sign * step * direction}) for sign in (1, -1)
        )
        # Rounding of a density of about 1e2, and the third derivative's step^2.
        assert_allclose(
            (forward - backward) / (2 * step), np.sum(gradient * direction), rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
def test_fixed_and_random_hyperparameters_agree_where_they_are_equal(density_and_gradient, rng):
    values = random_values(rng)
    kernels = [values["variance"] * pm.gp.cov.ExpQuad(1, ls=ls) for ls in values["lengthscale"]]
    gp = gm.StateGP(TIMES, DATA, kernels, sigma=values["sigma"], nugget=NUGGET)
    with pm.Model() as model:
        x = gp.prior("x")
        pm.Normal("y", x, gp.sigma, observed=DATA)
        gm.GradientMatchingODE(
            "gradient_match", ODE, x, {"k": values["k"]}, gp=gp, gamma=values["gamma"]
        )
    point = point_of(**values)
    fixed = model.compile_logp(jacobian=False, mode="FAST_COMPILE")(
        {"x_standardized__": point["x_standardized__"]}
    )
    priors = halfnorm(scale=2).logpdf([values["k"], values["variance"]]).sum()
    priors += halfnorm.logpdf([values["gamma"], *values["sigma"]]).sum()
    priors += lognorm(s=1).logpdf(values["lengthscale"]).sum()
    assert_allclose(density_and_gradient(point)[0], fixed + priors, rtol=1e-9)


@pytest.mark.slow
def test_normaliser_by_brute_force():
    """Integrated over the states, prior times constraint is a normal density of hyperparameters."""
    t, y, k, variance, gamma = np.array([0.0, 0.5, 1.1]), np.arange(3.0)[:, None], 0.8, 1.3, 0.4
    decay = gm.ODE(lambda t, x, theta: [-theta.k * x.a], ["a"], ["k"])
    with pm.Model() as model:
        lengthscale = pm.HalfNormal("lengthscale")
        kernel = variance * pm.gp.cov.ExpQuad(1, ls=lengthscale)
        gp = gm.StateGP(t, y, [kernel], sigma=0.1, nugget=NUGGET, standardize=False)
        x = gp.prior("x")
        gm.GradientMatchingODE("gradient_match", decay, x, {"k": k}, gp=gp, gamma=gamma)
    log_lengthscale, states = model.value_vars
    many = pt.tensor3("many")
    terms = model.logp([x, model["gradient_match"]], jacobian=False)
    density = pm.compile(
        [log_lengthscale, many], vectorize_graph(terms, {states: many}), mode="FAST_COMPILE"
    )
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    grid = np.stack(np.meshgrid(nodes, nodes, nodes), axis=-1).reshape(-1, 3)
    weight = np.prod(np.stack(np.meshgrid(weights, weights, weights)), axis=0).ravel()
    lag = t[:, None] - t
    for ls in (0.7, 1.5):
        prior = variance * np.exp(-0.5 * (lag / ls) ** 2)
        C, cross = prior + NUGGET * np.eye(3), -lag / ls**2 * prior
        D = cross @ np.linalg.inv(C)
        A = (1 - (lag / ls) ** 2) / ls**2 * prior - D @ cross.T
        slope = -k * np.eye(3) - D
        expected = multivariate_normal(cov=slope @ C @ slope.T + A + gamma * np.eye(3))
        # Quadrature under a normal of another width, so that no identity is used.
        factor = np.linalg.cholesky(C / 2)
        points = grid @ factor.T
        under = multivariate_normal(cov=C / 2).logpdf(points)
        values = density(np.log(ls), points[:, :, None])
        integral = np.sum(weight * np.exp(values - under)) / (2 * np.pi) ** 1.5
        assert_allclose(integral, expected.pdf(np.zeros(3)), rtol=1e-5)


@pytest.mark.slow
def test_whitened_states_have_the_same_density(centered, two_decays, rng):
    whitened = two_decays("whitened")
    values = random_values(rng)
    point = point_of(**values)
    factors = [
        np.linalg.cholesky(conditional(values["variance"], ls)[0]) for ls in values["lengthscale"]
    ]
    z = np.stack(
        [
            np.linalg.solve(L, column)
            for L, column in zip(factors, point["x_standardized__"].T, strict=True)
        ],
        axis=1,
    )
    log_jacobian = sum(np.log(np.diag(L)).sum() for L in factors)
    del point["x_standardized__"]
    assert_allclose(
        whitened.compile_logp(mode="FAST_COMPILE")(point | {"x_whitened_": z}) - log_jacobian,
        centered.compile_logp(mode="FAST_COMPILE")(point_of(**values)),
        rtol=1e-8,
    )


def test_samplers_start_at_the_posterior_mean_for_the_hyperparameters_they_start_at(centered):
    start = centered.initial_point()
    kernels = [
        np.exp(start["variance_log__"]) * pm.gp.cov.ExpQuad(1, ls=ls)
        for ls in np.exp(start["lengthscale_log__"])
    ]
    gp = gm.StateGP(TIMES, DATA, kernels, sigma=np.exp(start["sigma_log__"]), nugget=NUGGET)
    assert_allclose(start["x_standardized__"], (gp.posterior_mean() - gp.mean) / gp.scale)


@pytest.mark.slow
def test_nuts_and_metropolis_agree_on_all_that_is_random():
    t = np.linspace(0, 2, 5)
    decay = gm.ODE(lambda t, x, theta: [-theta.k * x.a], ["a"], ["k"])
    with pm.Model() as model:
        theta = {"k": pm.HalfNormal("k", 2)}
        kernel = 2.0 * pm.gp.cov.ExpQuad(1, ls=pm.LogNormal("lengthscale", 0, 0.5))
        sigma, gamma = pm.LogNormal("sigma", -2, 0.5), pm.LogNormal("gamma", -1, 0.5)
        gp = gm.StateGP(t, np.exp(-t)[:, None], [kernel], sigma=sigma, nugget=1e-3)
        x = gp.prior("x")
        pm.Normal("y", x, gp.sigma, observed=gp.y)
        gm.GradientMatchingODE("gradient_match", decay, x, theta, gp=gp, gamma=gamma)
    names = ["k", "lengthscale", "sigma", "gamma"]
    settings = {"random_seed": 1, "progressbar": False}
    nuts = gm.sample(1000, chains=4, model=model, **settings)
    metropolis = gm.sample_fgpgm(model, 60_000, burn_in=3000, **settings)
    one, other = (idata["posterior"].dataset[names] for idata in (nuts, metropolis))
    for name in names:
        a, b = np.log(one[name]), np.log(other[name])
        error = np.hypot(az.mcse(a.to_dataset())[name], az.mcse(b.to_dataset())[name])
        apart = np.abs(a.mean(["chain", "draw"]) - b.mean(["chain", "draw"])) / error
        assert float(apart.max()) < 5


@pytest.mark.parametrize("method", ["slope_variance", "log_marginal_likelihood", "summary"])
def test_what_needs_numbers_says_so(method):
    with pm.Model():
        kernel = pm.gp.cov.ExpQuad(1, ls=pm.HalfNormal("lengthscale"))
        gp = gm.StateGP(TIMES, DATA, [kernel] * 2, sigma=0.1)
    with pytest.raises(ValueError, match=r"needs numbers.*fit_gp"):
        getattr(gp, method)()


@pytest.mark.slow
def test_unusable_random_settings_are_named():
    with pm.Model():
        ls, sigma = pm.HalfNormal("ls"), pm.HalfNormal("sigma", shape=3)
        smooth, rough = pm.gp.cov.ExpQuad(1, ls=ls), pm.gp.cov.Matern12(1, ls=ls)
        with pytest.raises(ValueError, match=r"Matern12\(ls=ls\) is not differentiable"):
            gm.StateGP(TIMES, DATA, [rough] * 2, sigma=0.1)
        with pytest.raises(ValueError, match=r"sigma is a variable of shape \(3,\)"):
            gm.StateGP(TIMES, DATA, [smooth] * 2, sigma=sigma)
        unnamed = pm.gp.cov.ExpQuad(1, ls=pm.HalfNormal.dist())
        gp = gm.StateGP(TIMES, DATA, [unnamed] * 2, sigma=0.1)
        with pytest.raises(ValueError, match=r"kernels depend on 1 random variables that are not"):
            gp.prior("x")


def test_description_names_what_is_random():
    with pm.Model():
        kernel = 2.0 * pm.gp.cov.ExpQuad(1, ls=pm.HalfNormal("lengthscale"))
        gp = gm.StateGP(TIMES, DATA, [kernel] * 2, sigma=pm.HalfNormal("sigma"))
    assert "2 * ExpQuad(ls=lengthscale), sigma random" in repr(gp)

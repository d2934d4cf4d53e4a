"""Any likelihood of the states: lines of PyMC in a function, on every road."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy import stats
from scipy.special import logsumexp

import pymc_gradmatch as gm
from pymc_gradmatch.model.likelihood import graph_likelihood

T = np.linspace(0, 4, 9)
START, RATE = 20.0, 0.5
TRUTH = START * np.exp(-RATE * T)
DECAY = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
PRIOR = {"rate": pm.HalfNormal.dist(2)}
RNG = np.random.default_rng(8)
COUNTS = RNG.poisson(TRUTH)
SPREAD = RNG.negative_binomial(10, 10 / (10 + TRUTH))
LOST = RNG.poisson(TRUTH[:-1] - TRUTH[1:])
SKEWED = TRUTH * np.exp(RNG.normal(0, 0.1 + 0.1 * (T > 2)))
HEAVY = TRUTH + 0.5 * RNG.standard_t(3, len(T))
LIMIT = 5.0
CUT = np.maximum(TRUTH + RNG.normal(0, 0.5, len(T)), LIMIT)
PAIR = gm.ODE(
    lambda t, x, theta: [-theta.rate * x.a, theta.rate * (x.a - x.b)], ["a", "b"], ["rate"]
)


def counts(x, theta):
    pm.Poisson("counts", x.mass, observed=COUNTS)


def overdispersed(x, theta):
    pm.NegativeBinomial("counts", mu=x.mass, alpha=10, observed=SPREAD)


def losses(x, theta):
    pm.Poisson("losses", x.mass[:-1] - x.mass[1:], observed=LOST)


def weighed_losses(x, theta):
    losses(x, theta)
    pm.Normal("weighed", x.mass[0], 5, observed=START)


def weighed_losses_density(x):
    weighed = stats.norm.logpdf(START, x[..., :1], 5)
    return np.concatenate([stats.poisson.logpmf(LOST, x[..., :-1] - x[..., 1:]), weighed], axis=-1)


def log_normal(x, theta):
    pm.LogNormal("y", pm.math.log(x.mass), 0.1 + 0.1 * (T > 2), observed=SKEWED)


def heavy_tailed(x, theta):
    pm.StudentT("y", nu=3, mu=x.mass, sigma=0.5, observed=HEAVY)


def censored(x, theta):
    y = pm.Normal.dist(x.mass, 0.5)
    pm.Censored("y", y, lower=LIMIT, upper=None, observed=CUT)


def below_limit(x):
    inside = stats.norm.logpdf(CUT, x, 0.5)
    return np.where(LIMIT < CUT, inside, stats.norm.logcdf(LIMIT, x, 0.5))


LIKELIHOODS = {
    "counts": (counts, lambda x: stats.poisson.logpmf(COUNTS, x)),
    "negative binomial counts": (
        overdispersed,
        lambda x: stats.nbinom.logpmf(SPREAD, 10, 10 / (10 + x)),
    ),
    "counts of what was lost between times": (weighed_losses, weighed_losses_density),
    "log normal, sigma known per point": (
        log_normal,
        lambda x: stats.norm.logpdf(np.log(SKEWED), np.log(x), 0.1 + 0.1 * (T > 2)),
    ),
    "Student t": (heavy_tailed, lambda x: stats.t.logpdf(HEAVY, 3, x, 0.5)),
    "censored": (censored, below_limit),
}


def quadrature(log_likelihood):
    """Return mean and sd of the rate on a grid, the prior of x(t0) as good as flat."""
    rate, start = np.linspace(0.02, 2.5, 497)[:, None, None], np.linspace(2, 80, 521)[:, None]
    height = log_likelihood(start * np.exp(-rate * T)).sum(axis=-1)
    log_density = logsumexp(height + stats.halfnorm.logpdf(rate[..., 0], scale=2), axis=1)
    weights = np.exp(log_density - logsumexp(log_density))
    mean = weights @ rate[:, 0, 0]
    return mean, np.sqrt(weights @ (rate[:, 0, 0] - mean) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("what", LIKELIHOODS)
def test_one_call_gives_the_posterior_of_quadrature(what):
    """Assert it without any y, so that starts come from solutions of the ODE."""
    likelihood, log_likelihood = LIKELIHOODS[what]
    fit = gm.fit(DECAY, T, priors=PRIOR, likelihood=likelihood, random_seed=1)
    # Where x(t0) is hardly told, one more search may be wanted: the draws are right all the same.
    assert fit.pareto_k < 0.7
    mean, sd = quadrature(log_likelihood)
    error = 6 / np.sqrt(fit.n_effective)
    draws = fit.idata["posterior"]["rate"].to_numpy()
    assert draws.mean() == pytest.approx(mean, abs=error * sd)
    assert draws.std() == pytest.approx(sd, rel=2 * error)


@pytest.mark.slow
@pytest.mark.parametrize("is_steady", [False, True])
def test_where_a_product_alone_is_told_the_prior_of_the_start_ends_the_posterior(is_steady):
    """Assert quadrature where losses tell rate x(t0) alone as the rate goes to zero.

    Under a flat prior the volume over x(t0) is then proportional to 1 / rate, without end.
    """

    def steady(x, theta):
        pm.Poisson("losses", x.mass[:-1] - x.mass[1:], observed=np.full(len(T) - 1, 3))

    likelihood = steady if is_steady else losses
    fit = gm.fit(DECAY, T, priors=PRIOR, likelihood=likelihood, random_seed=1)
    assert fit.is_exact
    observed = np.full(len(T) - 1, 3) if is_steady else LOST
    log_rate, start = np.linspace(-9, 1, 1001)[:, None, None], np.linspace(2, 800, 2001)[:, None]
    x = start * np.exp(-np.exp(log_rate) * T)
    height = stats.poisson.logpmf(observed, x[..., :-1] - x[..., 1:]).sum(axis=-1)
    center, sd = (one.eval() for one in fit.exact_model["x0"].owner.inputs[2:])
    height += log_rate[..., 0] + stats.halfnorm.logpdf(np.exp(log_rate[..., 0]), scale=2)
    height += stats.norm.logpdf(start[:, 0], center, sd)
    weights = np.exp(height - logsumexp(height)).sum(axis=1)
    mean = weights @ log_rate[:, 0, 0]
    spread = np.sqrt(weights @ np.square(log_rate[:, 0, 0] - mean))
    draws = np.log(fit.idata["posterior"]["rate"].to_numpy())
    assert draws.mean() == pytest.approx(mean, abs=6 * spread / np.sqrt(fit.n_effective))
    assert draws.std() == pytest.approx(spread, rel=0.15)


@pytest.fixture(scope="module")
def gp():
    noise = np.random.default_rng(1).normal(0, 0.5, (len(T), 1))
    return gm.StateGP(T, TRUTH[:, None] + noise, [pm.gp.cov.Matern52(1, ls=3.0)], sigma=0.5)


@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("grid", [1, 3])
def test_the_model_is_the_lines_written_by_hand(gp, grid):
    """Assert it for a random variable of the likelihood's own, dims and a finer grid."""

    def scaled(x, theta):
        factor = pm.LogNormal("factor", 0, 1)
        mean = factor * x.mass + 0 * theta.rate
        pm.Poisson("counts", mean, observed=COUNTS, dims="time_observed")

    model = gm.build_model(
        DECAY, T, gp.y, priors=PRIOR, gp=gp, likelihood=scaled, gamma=0.1, grid=grid, preset="fgpgm"
    )
    fine = gp.with_grid(grid)
    with pm.Model() as by_hand:
        rate = pm.HalfNormal("rate", 2)
        x = fine.prior("x")
        factor = pm.LogNormal("factor", 0, 1)
        pm.Poisson("counts", factor * x[::grid, 0], observed=COUNTS)
        gm.GradientMatchingODE("gradient_match", DECAY, x, {"rate": rate}, gp=fine, gamma=0.1)
    assert [rv.name for rv in model.free_RVs] == ["rate", "x", "factor"]
    assert [rv.name for rv in model.observed_RVs] == ["counts", "gradient_match"]
    assert model.named_vars_to_dims["counts"] == ("time_observed",)
    point = model.initial_point() | {"rate_log__": 0.3, "factor_log__": -0.2}
    one, other = (m.compile_logp()(point) for m in (model, by_hand))
    assert one == pytest.approx(other, rel=1e-12)


def test_gradient_and_curvature_are_those_of_differences(rng):
    """Assert them for a likelihood between times, of a parameter, with a random variable held."""
    y = rng.normal(0, 1, (len(T), 2))
    gp = gm.StateGP(T, y, [pm.gp.cov.ExpQuad(1, ls=1.0)] * 2, sigma=1.0).with_grid(2)

    def likelihood(x, theta):
        spread = pm.HalfNormal("spread", 3)
        pm.Normal("step", theta.rate * x.a[1:] - x.b[:-1], spread, observed=y[1:, 0])

    told = graph_likelihood(likelihood, PAIR, gp)
    x, theta, step = rng.normal(size=(17, 2)), np.array([0.7]), 1e-5
    point = np.append(theta, x.T.ravel())

    def at(flat):
        value, by_theta, by_states = told(flat[:1], flat[1:].reshape(2, -1).T)
        return value, np.append(by_theta, by_states.T.ravel())

    moves = step * np.eye(len(point))
    gradient = [(at(point + m)[0] - at(point - m)[0]) / (2 * step) for m in moves]
    np.testing.assert_allclose(at(point)[1], gradient, rtol=1e-6, atol=1e-8)
    hessian = np.array([(at(point + m)[1] - at(point - m)[1]) / (2 * step) for m in moves])
    places = np.append(0, [1 + k * 17 + row for k in range(2) for row in told.rows])
    assert not np.delete(hessian, places, axis=0).any()
    curvature = -hessian[np.ix_(places, places)]
    variances, axes = np.linalg.eigh((curvature + curvature.T) / 2)
    positive = (axes * np.maximum(variances, 0)) @ axes.T
    np.testing.assert_allclose(told.curvature(theta, x), positive, rtol=1e-4, atol=1e-5)
    sigma = told.around(theta, x).estimates()["spread"]
    residual = y[1:, 0] - 0.7 * x[2::2, 0] + x[:-2:2, 1]
    # The mode of log spread, its prior half normal 3.
    slope = -7 + np.square(residual).sum() / sigma**2 - sigma**2 / 9
    assert abs(slope) < 1e-2


@pytest.mark.slow
def test_refine_takes_a_likelihood(gp):
    """Assert the estimate of the normal likelihood of the data, with sigma among the unknowns."""

    def noisy(x, theta):
        sigma = pm.HalfNormal("noise", 5)
        pm.Normal("data", x.mass, sigma, observed=gp.y[:, 0])

    one = gm.refine(DECAY, gp, priors=PRIOR, likelihood=noisy, random_seed=1)
    plain = gm.refine(DECAY, gp, priors=PRIOR, random_seed=1)
    assert one.theta["rate"] == pytest.approx(plain.theta["rate"], abs=0.01)
    np.testing.assert_allclose(one.gp.sigma, one.theta["noise"], rtol=1e-6)


@pytest.mark.slow
def test_a_sum_a_ratio_and_an_estimated_factor(lotka_volterra, data):
    """Assert truth within four standard deviations, from sums and ratios of states alone."""
    rng = np.random.default_rng(5)
    total = 2.5 * data.x.sum(axis=1) + rng.normal(0, 0.1, len(data.t))
    ratio = data.x[:, 0] / data.x[:, 1] * np.exp(rng.normal(0, 0.05, len(data.t)))

    def likelihood(x, theta):
        factor = pm.LogNormal("factor", 1, 0.3)
        pm.Normal("start", x.prey[0], 0.1, observed=5.0)
        pm.Normal("total", factor * (x.prey + x.predator), 0.1, observed=total)
        pm.LogNormal("ratio", pm.math.log(x.prey / x.predator), 0.05, observed=ratio)

    priors = {name: pm.HalfNormal.dist(5) for name in lotka_volterra.ode.params}
    fit = gm.fit(lotka_volterra.ode, data.t, priors=priors, likelihood=likelihood, random_seed=1)
    assert fit.pareto_k < 0.7
    truth = {**lotka_volterra.theta, "factor": 2.5}
    found = fit.table.loc[list(truth)]
    assert (np.abs(found["mean"] - [*truth.values()]) < 4 * found["sd"]).all()
    check = gm.find_MAP(model=fit.model, random_seed=1, progressbar=False)
    assert set(truth) <= set(check)


def test_what_cannot_be_a_likelihood_is_refused(gp):
    def built(likelihood, **settings):
        gm.build_model(
            DECAY,
            T,
            gp.y,
            priors=PRIOR,
            gp=gp,
            likelihood=likelihood,
            gamma=0.1,
            **settings,
            preset="fgpgm",
        )

    with pytest.raises(ValueError, match="likelihood observes nothing"):
        built(lambda x, theta: pm.Deterministic("y", x.mass))
    with pytest.raises(ValueError, match=r"\['which'\] of the likelihood are discrete"):
        built(lambda x, theta: pm.Normal("y", x.mass, pm.Poisson("which", 2), observed=T))
    with pytest.raises(ValueError, match="sigma is given, and so is a likelihood"):
        built(counts, sigma="fixed")
    with pm.Model() as model:
        pm.Normal("counts")
        with pytest.raises(ValueError, match="Variable name counts already exists"):
            built(counts)
    assert [*model.named_vars] == ["counts"]


def test_an_observation_that_cannot_be_is_named(gp):
    impossible = np.where(np.arange(9) == 4, -1, T)

    def likelihood(x, theta):
        pm.Exponential("waits", pt.exp(x.mass / 10), observed=impossible)

    with pytest.raises(ValueError, match=r"is zero at waits\[4\] = -1, at the states"):
        gm.refine(DECAY, gp, priors=PRIOR, likelihood=likelihood, random_seed=1)

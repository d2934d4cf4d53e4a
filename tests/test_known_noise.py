"""A sigma that is known: one for all, one per state, or one for each observation."""

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from scipy import stats
from scipy.special import logsumexp

import pymc_gradmatch as gm
from pymc_gradmatch.model import constraints

T = np.linspace(0, 4, 9)
DECAY = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
PAIR = gm.ODE(
    lambda t, x, theta: [-theta.rate * x.a, theta.rate * (x.a - x.b)], ["a", "b"], ["rate"]
)
PRIOR = {"rate": pm.HalfNormal.dist(2)}
NOISE = np.where(T < 2, 0.05, 0.8)[:, None]


@pytest.fixture(scope="module")
def y():
    truth = 5 * np.exp(-0.5 * T)[:, None]
    return truth + np.random.default_rng(5).normal(size=truth.shape) * NOISE


@pytest.fixture(scope="module")
def pair():
    x = PAIR.solve(T, [3.0, 1.0], [0.7])
    y = x + np.random.default_rng(4).normal(0, 0.1, size=x.shape)
    y[[2, 5], 0] = np.nan
    return pd.DataFrame(y, columns=["a", "b"])


def quadrature(y, noise):
    """Return mean and standard deviation of the rate, x(t0) having a flat prior, on a grid."""
    rate, start = np.linspace(0.3, 0.8, 801)[:, None, None], np.linspace(4, 6, 401)[:, None]
    height = stats.norm.logpdf(y[:, 0], start * np.exp(-rate * T), noise[:, 0]).sum(axis=-1)
    log_density = logsumexp(height + stats.halfnorm.logpdf(rate[..., 0], scale=2), axis=1)
    weights = np.exp(log_density - logsumexp(log_density))
    mean = weights @ rate[:, 0, 0]
    return mean, np.sqrt(weights @ (rate[:, 0, 0] - mean) ** 2)


@pytest.mark.slow
def test_one_call_with_a_sigma_for_each_observation_has_the_posterior_of_quadrature(y):
    fit = gm.fit(DECAY, T, y, priors=PRIOR, sigma=NOISE, random_seed=1, progressbar=False)
    assert fit.is_exact
    assert [*fit.table.index] == ["rate", "x0[mass]"]
    mean, sd = quadrature(y, NOISE)
    error = 5 / np.sqrt(fit.n_effective)
    assert fit.table.loc["rate", "mean"] == pytest.approx(mean, abs=error * sd)
    assert fit.table.loc["rate", "sd"] == pytest.approx(sd, rel=error)


@pytest.mark.slow
def test_the_estimate_of_refine_weighs_observations_by_what_is_known_of_them(y):
    """Assert the mode of weighted least squares, which that of equal weights is far from."""
    y = y + np.where(NOISE > 0.5, 0.8, 0)
    gp = gm.fit_gp(T, y, cov="Matern52", random_seed=1)
    found = gm.refine(DECAY, gp, priors=PRIOR, sigma=NOISE, random_seed=1, progressbar=False)
    mean, sd = quadrature(y, NOISE)
    equal, _ = quadrature(y, np.full_like(NOISE, 0.5))
    assert found.theta["rate"] == pytest.approx(mean, abs=0.3 * sd)
    assert abs(equal - mean) > 2 * sd


@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("preset", ["fgpgm", "refined"])
@pytest.mark.parametrize("sigma", [0.2, [0.1, 0.3], "each", "table"])
def test_the_likelihood_is_that_of_known_noise(pair, preset, sigma):
    each = np.where(np.isnan(pair), np.nan, 0.1 + 0.01 * np.arange(18).reshape(9, 2))
    table = pd.DataFrame(each, columns=["a", "b"])
    given = {"each": each, "table": table[["b", "a"]]}.get(str(sigma), sigma)
    noise = each if isinstance(sigma, str) else np.broadcast_to(sigma, pair.shape)
    model = gm.build_model(
        PAIR, T, pair, priors=PRIOR, preset=preset, sigma=given, random_seed=1, progressbar=False
    )
    assert "sigma" not in model.named_vars
    [single] = model.logp(vars=[model["y"]], sum=False)
    [states] = model.replace_rvs_by_values([model["x"]])
    evaluate = model.compile_fn([states, single], inputs=model.value_vars, on_unused_input="ignore")
    x, density = evaluate(model.initial_point())
    [constraint] = constraints(model)
    x = constraint.gp.at_times(x)
    seen = pair.notna().to_numpy()
    expected = stats.norm.logpdf(pair.to_numpy()[seen], x[seen], noise[seen])
    np.testing.assert_allclose(density, expected, rtol=1e-8)


def test_a_sigma_that_cannot_be_meant_is_named(pair):
    def built(sigma, **settings):
        return gm.build_model(PAIR, T, pair, priors=PRIOR, sigma=sigma, **settings, preset="fgpgm")

    with pytest.raises(ValueError, match=r"sigma has shape \(9,\); expected a number, one for"):
        built(np.full(9, 0.1))
    with pytest.raises(ValueError, match=r"sigma is nan at t = 1, state 'b', where there is"):
        built(np.where(np.arange(18).reshape(9, 2) == 5, np.nan, 0.1))
    with pytest.raises(ValueError, match=r"columns of sigma are \['a', 'c'\] \(unknown \['c'\]\)"):
        built(pd.DataFrame(np.ones((9, 2)), columns=["a", "c"]))
    with pytest.raises(ValueError, match="sigma in the lines of the latter"):
        built(0.1, likelihood=lambda x, theta: pm.Normal("a", x.a, 1, observed=T))

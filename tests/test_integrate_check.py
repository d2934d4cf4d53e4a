"""From matched to exact posteriors: batched integration, weights, verdict."""

import arviz as az
import numpy as np
import pymc as pm
import pytest
import xarray as xr
from scipy import stats

import pymc_gradmatch as gm
from benchmarks.paper import systems
from pymc_gradmatch.exact import ExactPosterior, compare_quickly, comparison
from pymc_gradmatch.exact.importance import Mixture
from pymc_gradmatch.exact.ridges import Ridges
from pymc_gradmatch.ode import Solver

T = np.linspace(0, 2, 9)
PRIOR_SD = 2.0


@pytest.fixture(scope="module")
def decay():
    return gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])


@pytest.fixture(scope="module")
def gp():
    y = np.exp(-T)[:, None] + np.random.default_rng(1).normal(0, 0.1, (9, 1))
    return gm.StateGP(T, y, [pm.gp.cov.ExpQuad(1, ls=1.0)], sigma=0.1)


@pytest.fixture(scope="module")
def model(decay, gp):
    """Return a model with random sigma and gamma, and a parameter with a parent."""
    with pm.Model(coords={"state": ["mass"]}) as model:
        scale = pm.HalfNormal("scale", PRIOR_SD)
        rate = pm.HalfNormal("rate", scale)
        sigma = pm.HalfNormal("sigma", gp.scale, dims="state")
        gamma = pm.HalfNormal("gamma", 0.3)
        x = gp.prior("x")
        pm.Normal("y", x, sigma, observed=gp.y, dims=("time", "state"))
        gm.GradientMatchingODE("gradient_match", decay, x, [rate], gp=gp, gamma=gamma)
    return model


@pytest.fixture(scope="module")
def simple_model(decay, gp):
    priors = {"rate": pm.HalfNormal.dist(PRIOR_SD)}
    return gm.build_model(decay, gp.t, gp.y, priors=priors, gp=gp, sigma="fixed", preset="fgpgm")


def matched(gp, n=2_000, **variables):
    """Return made-up matched draws: parameters as given, states near the data."""
    rng = np.random.default_rng(2)
    x = gp.posterior_mean() + 0.1 * rng.normal(size=(2, n // 2, *gp.prior_mean.shape))
    draws = {
        name: (("chain", "draw", *dims), draw(rng, (2, n // 2, *[len(gp.states)] * len(dims))))
        for name, (dims, draw) in variables.items()
    }
    draws["x"] = (("chain", "draw", "time", "state"), x)
    coords = {"time": gp.t}
    return xr.DataTree.from_dict({"posterior": xr.Dataset(draws, coords=coords)})


def lognormal(median, sd):
    return [], lambda rng, size: median * np.exp(sd * rng.normal(size=size))


def quadrature(gp):
    """Return mean and sd of the exact posterior of (rate, x0), sigma known, on a grid."""
    rate, x0 = np.meshgrid(np.linspace(0.01, 3, 600), np.linspace(0.5, 1.6, 500), indexing="ij")
    x = x0[..., None] * np.exp(-rate[..., None] * gp.t)
    log_density = stats.norm.logpdf(gp.y[:, 0], x, gp.sigma).sum(axis=-1)
    weights = np.exp(log_density - log_density.max()) * stats.halfnorm.pdf(rate, scale=PRIOR_SD)
    weights /= weights.sum()
    means = [(weights * values).sum() for values in (rate, x0)]
    return means, [
        np.sqrt((weights * (values - mean) ** 2).sum())
        for values, mean in zip((rate, x0), means, strict=True)
    ]


@pytest.fixture(scope="module")
def biased(gp):
    """Return matched draws four exact standard deviations off, and too wide."""
    return matched(gp, rate=lognormal(1.8, 0.25))


@pytest.fixture(scope="module")
def check(biased, decay, gp, simple_model):
    return gm.integrate_check(biased, model=simple_model, n_draws=4_000, random_seed=1)


def test_weighted_draws_have_the_moments_of_brute_force_quadrature(check, gp):
    """Assert means and sds within four Monte Carlo errors, though the matched ones are far."""
    means, sds = quadrature(gp)
    assert check.is_exact
    assert abs(check.moved["moved"]["rate"]) > 1
    error = 4 / np.sqrt(check.n_effective)
    for row, mean, sd in zip(["rate", "x0[mass]"], means, sds, strict=True):
        assert check.moved["exact_mean"][row] == pytest.approx(mean, abs=error * sd)
        assert check.moved["exact_sd"][row] == pytest.approx(sd, rel=error)


@pytest.mark.slow
def test_data_on_part_of_the_grid_count_at_their_own_times(decay, gp):
    """Assert the moments of brute force for states on a grid that goes on beyond the data."""
    fine = gp.with_grid(np.append(gp.with_grid(3).t, [2.2, 2.5]))
    priors = {"rate": pm.HalfNormal.dist(PRIOR_SD)}
    model = gm.build_model(decay, gp.t, gp.y, priors=priors, gp=fine, sigma="fixed", preset="fgpgm")
    draws = matched(fine, rate=lognormal(1.4, 0.25))
    check = gm.integrate_check(draws, model=model, n_draws=4_000, random_seed=1)
    means, sds = quadrature(gp)
    error = 4 / np.sqrt(check.n_effective)
    for row, mean, sd in zip(["rate", "x0[mass]"], means, sds, strict=True):
        assert check.moved["exact_mean"][row] == pytest.approx(mean, abs=error * sd)
        assert check.moved["exact_sd"][row] == pytest.approx(sd, rel=error)


def test_resampled_draws_are_the_weighted_ones(check, gp):
    """Assert their means, their trajectories, and that ArviZ and plot_states take them."""
    posterior = check.idata["posterior"].dataset
    assert posterior["rate"].sizes == {"chain": 1, "draw": 4_000}
    error = 4 / np.sqrt(check.n_effective)
    for name, row in (("rate", "rate"), ("x0", "x0[mass]")):
        mean, sd = check.moved.loc[row, ["exact_mean", "exact_sd"]]
        assert float(posterior[name].mean()) == pytest.approx(mean, abs=error * sd)
    x = posterior["x0"] * np.exp(-posterior["rate"] * xr.DataArray(T, dims="time"))
    np.testing.assert_allclose(posterior["x"], x.transpose(*posterior["x"].dims), atol=1e-7)
    np.testing.assert_array_equal(check.idata["observed_data"]["y"], gp.y)
    assert len(az.summary(check.idata, var_names=["rate", "x0"])) == 2
    gm.plot_states(check.idata)


def test_verdict_of_a_reliable_k_names_what_moved(check):
    assert repr(check).startswith("These are draws from the exact posterior: 2 independent")
    assert "most in rate by -" in check.verdict
    assert check.weights.sum() == pytest.approx(1)
    assert check.n_effective == pytest.approx(1 / (check.weights**2).sum())


def test_gamma_is_left_out_and_what_theta_depends_on_is_not(decay, gp, model):
    """Assert the density against scipy's, Jacobians and the parameter's parent included."""
    draws = matched(
        gp,
        n=20,
        rate=lognormal(1.0, 0.1),
        scale=lognormal(2.0, 0.3),
        sigma=(["state"], lambda rng, size: 0.1 * np.exp(0.2 * rng.normal(size=size))),
    )["posterior"].dataset
    target = ExactPosterior(model)
    assert target.names == ["scale_log__", "rate_log__", "sigma_log__[mass]", "x0[mass]"]
    phi = target.coordinates(draws)[:3]
    scale, rate, sigma = np.exp(phi[:, :3]).T
    x0 = gp.mean + gp.scale * phi[:, 3]
    x = x0[:, None] * np.exp(-rate[:, None] * T)
    expected = (
        stats.halfnorm.logpdf(scale, scale=PRIOR_SD)
        + stats.halfnorm.logpdf(rate, scale=scale)
        + stats.halfnorm.logpdf(sigma, scale=gp.scale)
        + phi[:, :3].sum(axis=1)
        + stats.norm.logpdf(gp.y[:, 0], x, sigma[:, None]).sum(axis=1)
        + stats.norm.logpdf(x0, gp.y[0], 5 * gp.scale)
        + np.log(gp.scale)
    )
    np.testing.assert_allclose(target(phi), expected, atol=1e-5)


def test_the_exact_posterior_does_not_know_how_states_were_parameterized(biased, check, decay, gp):
    """Assert the same weights from a model with whitened states and another gamma."""
    priors = {"rate": pm.HalfNormal.dist(PRIOR_SD)}
    other = gm.build_model(
        decay,
        gp.t,
        gp.y,
        priors=priors,
        gp=gp,
        gamma=0.1,
        parameterization="whitened",
        sigma="fixed",
        preset="fgpgm",
    )
    same = gm.integrate_check(biased, model=other, n_draws=4_000, random_seed=1)
    np.testing.assert_allclose(same.weights, check.weights, atol=1e-12)


@pytest.mark.slow
def test_a_further_likelihood_of_theta_counts(biased, decay, gp):
    """Assert that a precise second measurement of the rate decides where it goes."""
    with pm.Model():
        rate = pm.HalfNormal("rate", PRIOR_SD)
        gm.build_model(
            decay, gp.t, gp.y, priors={"rate": rate}, gp=gp, sigma="fixed", preset="fgpgm"
        )
        pm.Normal("measured", rate, 0.001, observed=1.3)
        check = gm.integrate_check(biased, random_seed=1)
    assert check.moved["exact_mean"]["rate"] == pytest.approx(1.3, abs=0.01)


def nowhere(_, modes):
    """Return a ridge that is much narrower than its mode."""
    narrow = Mixture.single(modes.point[0], 1e-4 * modes.covariance[0])
    return Ridges(narrow, 0, modes.log_density[:1])


@pytest.mark.slow
def test_a_target_out_of_reach_gets_a_k_that_says_so(biased, decay, gp, monkeypatch):
    """Assert the other verdict, with starts and a metric, where tails stay too heavy."""
    monkeypatch.setattr("pymc_gradmatch.exact.importance.MAX_ROUNDS", 1)
    monkeypatch.setattr(
        "pymc_gradmatch.exact.search.mixture_of_modes",
        lambda modes: Mixture.single(modes.point[0], 1e-4 * modes.covariance[0]),
    )
    monkeypatch.setattr("pymc_gradmatch.exact.search.follow_ridges", nowhere)
    sharp = gm.StateGP(gp.t, gp.y, gp.covs, sigma=3e-4)
    priors = {"rate": pm.HalfNormal.dist(PRIOR_SD)}
    model = gm.build_model(
        decay, gp.t, gp.y, priors=priors, gp=sharp, sigma="fixed", preset="fgpgm"
    )
    check = gm.integrate_check(biased, model=model, n_draws=3_000, random_seed=1)
    assert not check.is_exact
    assert check.pareto_k > 0.7
    assert check.verdict.startswith("These are not draws from the exact posterior")
    assert {"rate", "x0"} == set(check.starts[0])
    assert list(check.covariance) == ["rate_log__", "x0[mass]"]


@pytest.mark.slow
def test_a_failed_integration_has_weight_zero(gp, rng):
    """Assert it on x' = r x^2, which blows up at t = 1 / (r x0), with draws on both sides."""
    ode = gm.ODE(lambda t, x, theta: [theta.rate * x.mass**2], ["mass"], ["rate"])
    priors = {"rate": pm.Normal.dist(0, 1)}
    model = gm.build_model(ode, gp.t, gp.y, priors=priors, gp=gp, sigma="fixed", preset="fgpgm")
    draws = matched(gp, rate=([], lambda rng, size: rng.normal(0, 0.8, size)))
    target = ExactPosterior(model)
    phi = target.coordinates(draws["posterior"].dataset)
    scalars = target.scalars(phi)
    blown_up = scalars["rate"] * scalars["x0[mass]"] > 1 / T[-1]
    assert 0.1 < blown_up.mean() < 0.9
    np.testing.assert_array_equal(np.isneginf(target(phi)), blown_up)
    check = gm.integrate_check(draws, model=model, random_seed=1)
    assert check.is_exact
    assert np.isfinite(check.idata["posterior"]["x"]).all()


@pytest.mark.parametrize(
    "system", [systems.lotka_volterra, systems.fitzhugh_nagumo], ids=lambda s: s.name
)
def test_batched_integration_is_that_of_solve(system, rng):
    """Assert 1e-6 of each state's size, for parameters twenty per cent around the truth."""
    theta = np.array(list(system.theta.values()))
    theta = theta * np.exp(0.2 * rng.normal(size=(20, len(theta))))
    x0 = np.array(system.x0) + 0.1 * rng.normal(size=(20, 2))
    solution = Solver(system.ode.equations(), system.t)(x0, theta).x
    expected = system.ode.solve(system.t, x0, theta)
    scale = np.abs(expected).max(axis=(0, 1))
    np.testing.assert_allclose(solution / scale, expected / scale, rtol=0, atol=1e-6)


def test_time_enters_batched_integration(rng):
    """Assert x' = r cos(t), whose draws take steps at times of their own."""
    ode = gm.ODE(lambda t, x, theta: [theta.r * pm.math.cos(t)], ["x"], ["r"])
    r = np.linspace(-2, 5, 8)[:, None]
    t = np.array([1.0, 1.5, 4.0, 9.0])
    solution = Solver(ode.equations(), t)(r, r).x
    np.testing.assert_allclose(solution[..., 0], r + r * (np.sin(t) - np.sin(1)), atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"idata": xr.Dataset()}, "with groups .*expected a DataTree"),
        ({"drop": "x"}, r"the draws have no \['x'\]"),
        ({"n_draws": 10}, "at least 1000"),
        ({"drop": "rate"}, r"the draws have no \['rate'\]"),
        ({"few": 4}, "4 draws of 2 coordinates"),
        ({"shape": True}, r"the draws of 'x' have shape \(8, 1\)"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_errors_say_what_does_not_fit(changes, message, biased, simple_model):
    changes = dict(changes)
    dataset = biased["posterior"].dataset
    if "drop" in changes:
        dataset = dataset.drop_vars(changes.pop("drop"))
    if "few" in changes:
        dataset = dataset.isel(draw=slice(changes.pop("few") // 2))
    if changes.pop("shape", False):
        dataset = dataset.isel(time=slice(8))
    idata = changes.pop("idata", xr.DataTree.from_dict({"posterior": dataset}))
    with pytest.raises(ValueError, match=message):
        gm.integrate_check(idata, model=simple_model, **changes)


@pytest.mark.parametrize(
    ("n_draws", "error", "words"),
    [
        (None, TypeError, "n_draws is None"),
        (1000.5, TypeError, "n_draws is 1000.5"),
        (999, ValueError, "at least 1000"),
    ],
)
def test_numbers_of_draws_that_are_none_are_refused(biased, simple_model, n_draws, error, words):
    with pytest.raises(error, match=words):
        gm.integrate_check(biased, model=simple_model, n_draws=n_draws)


def test_draws_without_their_dims_are_refused_in_words(biased, simple_model):
    with pytest.raises(ValueError, match=r"no dim chain; .* isel\(chain=\[0\]\)"):
        gm.integrate_check(biased.isel(chain=0), model=simple_model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, np.linalg.LinAlgError])
def test_a_quick_comparison_that_fails_loses_no_draws(biased, simple_model, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(comparison, "optimise_locally", fail)
    seen = compare_quickly(simple_model, biased["posterior"].dataset)
    assert seen.text.startswith(comparison.NOT_COMPARED)
    assert not seen.is_suspicious

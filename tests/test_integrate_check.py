"""From matched to exact posteriors: batched integration, weights, verdict."""

from functools import partial

import arviz as az
import numpy as np
import pymc as pm
import pytest
import xarray as xr
from scipy import stats
from scipy.special import logsumexp

import pymc_gradmatch as gm
from pymc_gradmatch.exact import ExactPosterior, glance, posterior, verdict
from pymc_gradmatch.exact.importance import (
    Mixture,
    Search,
    adapted,
    reliable_k,
    search,
    weigh,
)
from pymc_gradmatch.exact.modes import (
    Ridges,
    apart_from_ridges,
    joined,
    look_around,
    modes_beside,
    modes_from,
    modes_near,
    newton,
    ridges_from,
)
from pymc_gradmatch.exact.search import FIRST_STEP, TIME, WALKERS, Hamiltonian, cover, walk
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
    return gm.build_model(decay, gp.t, gp.y, priors=priors, gp=gp)


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
    model = gm.build_model(decay, gp.t, gp.y, priors=priors, gp=fine)
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
    assert repr(check).startswith("These are draws from the exact posterior: 3 independent")
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
        decay, gp.t, gp.y, priors=priors, gp=gp, gamma=0.1, parameterization="whitened"
    )
    same = gm.integrate_check(biased, model=other, n_draws=4_000, random_seed=1)
    np.testing.assert_allclose(same.weights, check.weights)


@pytest.mark.slow
def test_a_further_likelihood_of_theta_counts(biased, decay, gp):
    """Assert that a precise second measurement of the rate decides where it goes."""
    with pm.Model():
        rate = pm.HalfNormal("rate", PRIOR_SD)
        gm.build_model(decay, gp.t, gp.y, priors={"rate": rate}, gp=gp)
        pm.Normal("measured", rate, 0.001, observed=1.3)
        check = gm.integrate_check(biased, random_seed=1)
    assert check.moved["exact_mean"]["rate"] == pytest.approx(1.3, abs=0.01)


def normal_around(center, sd):
    return lambda phi: -0.5 * (((phi - center) / sd) ** 2).sum(axis=1)


def test_weights_are_uniform_where_the_proposal_is_the_target(rng):
    """Assert nearly constant weights for a mixture of t distributions that is its own target."""
    factor = np.tril(rng.normal(size=(5, 5))) + 2 * np.eye(5)
    mixture = Mixture.of([Mixture.around(np.arange(5.0) + k, factor @ factor.T) for k in (0, 2)])
    points = mixture.draw(1_000, rng)
    expected = stats.multivariate_t(np.arange(5), factor @ factor.T * 5 / 7, df=7).pdf(points) / 2
    shifted = stats.multivariate_t(np.arange(5) + 2, factor @ factor.T * 5 / 7, df=7).pdf(points)
    np.testing.assert_allclose(mixture.log_density(points), np.log(expected + shifted / 2))
    weighted = weigh(points, np.log(expected + shifted / 2) - mixture.log_density(points))
    assert weighted.n_effective > 999
    assert weighted.log_evidence == pytest.approx(0, abs=1e-9)


def test_a_search_travels_to_a_far_and_narrow_target(rng):
    """Assert moments of a normal ten of its standard deviations away, in eight dimensions."""
    sd, target = 0.3, normal_around(3, 0.3)
    found = search(target, Mixture.around(np.zeros(8), np.eye(8)), 1_000, rng)
    points = found.proposal.draw(4_000, rng)
    weighted = weigh(points, target(points) - found.proposal.log_density(points))
    assert weighted.is_reliable
    error = 4 * sd / np.sqrt(weighted.n_effective)
    np.testing.assert_allclose(weighted.weights @ weighted.points, 3, atol=error)
    assert weighted.log_evidence == pytest.approx(8 * np.log(sd * np.sqrt(2 * np.pi)), abs=0.2)


def banana(bend, width):
    """Return the log density of a ridge along a parabola, of standard deviation 4 along x."""

    def log_density(phi):
        across = (phi[:, 1] - bend * phi[:, 0] ** 2) / width
        return -0.5 * ((phi[:, 0] / 4) ** 2 + across**2 + phi[:, 2] ** 2)

    return log_density


def draws_from_one_end(bend, width, rng):
    x = -4 + 0.2 * rng.normal(size=1_000)
    across = width * rng.normal(size=1_000)
    return np.stack([x, bend * x**2 + across, rng.normal(size=1_000)], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(("bend", "width"), [(0.05, 0.3), (0.5, 0.02)], ids=["wide", "thin"])
def test_a_bent_ridge_is_covered_from_draws_of_a_twentieth_of_it(bend, width, rng):
    """Assert the whole ridge's mean and standard deviation, which k alone would not ask for."""
    draws = draws_from_one_end(bend, width, rng)
    found = cover(banana(bend, width), draws, 12_000, rng)
    assert found.is_reliable
    weights, x = found.weighted.weights, found.weighted.points[:, 0]
    error = 5 / np.sqrt(found.weighted.n_effective)
    assert weights @ x == pytest.approx(0, abs=4 * error)
    assert np.sqrt(weights @ x**2) == pytest.approx(4, rel=error)


def test_walks_stay_on_a_ridge_to_both_of_its_ends(rng):
    """Assert it from one end, for a ridge that turns a hundred times its width aside."""
    bend, width = 0.1, 0.05
    draws = draws_from_one_end(bend, width, rng)
    target, covariance = banana(bend, width), np.cov(draws.T)
    ridges = ridges_from(target, modes_near(target, draws[:2], covariance))
    x, y, _ = ridges.mixture.means.T
    assert x.min() < -12  # three standard deviations
    assert x.max() > 12
    assert np.abs(y - bend * x**2).max() < 6 * width
    assert not ridges.n_unfinished


def rate_near_zero(phi):
    """Return the log density of a rate's log, and of two that hang together and follow it."""
    log_rate, a, b = phi.T
    follows = 0.3 * np.tanh(log_rate + 1.9)
    tail = log_rate - np.square((np.exp(log_rate) - 0.15) / 0.075) / 2
    together, apart = (a + b - follows) / 0.1, (a - b + follows) / 0.02
    return tail - (np.square(together) + np.square(apart)) / 2


def test_walks_go_down_an_exponential_tail_beside_steep_slopes():
    """Assert that they get where one in 3 000 draws is, and are on the ridge wherever they pass."""
    near = np.array([[-2.0, 0.0, 0.0]])
    modes = modes_near(rate_near_zero, near, np.diag([0.3, 0.01, 0.01]))
    means = ridges_from(rate_near_zero, modes).mixture.means
    in_tail = means[means[:, 0] < -3]
    assert in_tail[:, 0].min() < -8
    follows = 0.3 * np.tanh(in_tail[:, 0] + 1.9)
    on_ridge = np.column_stack([in_tail[:, 0], np.zeros_like(follows), follows])
    assert (rate_near_zero(in_tail) > rate_near_zero(on_ridge) - 1).all()


def turning(phi):
    """Return the log density of a ridge that turns, thousands of times as long as wide."""
    x, y, z = phi.T
    tight, loose = y + z - np.logaddexp(0, 3 * x), y - z + np.logaddexp(0, -2 * x)
    return -0.5 * (x**2 + np.square(tight / 3e-4) + np.square(loose / 0.02))


def test_walks_turn_with_a_ridge_and_are_on_it_wherever_they_pass():
    modes = modes_near(turning, np.array([[0.1, 0.0, 0.0]]), np.eye(3))
    ridges = ridges_from(turning, modes)
    x = ridges.mixture.means[:, 0]
    assert x.min() < -3.5
    assert x.max() > 3.5
    assert not ridges.n_unfinished
    across = turning(ridges.mixture.means) + 0.5 * x**2
    assert np.median(across) > -0.5  # others went along the loose one of the two directions
    ahead = np.sort(x[across > -0.5])
    assert np.diff(ahead[(ahead > -3) & (ahead < 3)]).max() < 1.5  # so that parts overlap


def test_parts_along_a_ridge_are_adapted_to_it(rng):
    """Assert a proposal of which a good share counts, where one of a few parts has none.

    The share hangs on the few draws that a search ends with: the median of several tells.
    """
    bend, width = 0.1, 0.05
    target = banana(bend, width)
    shares: dict[str, list[float]] = {"ridge": [], "found": []}
    for _ in range(7):
        draws = draws_from_one_end(bend, width, rng)
        ridge = ridges_from(target, modes_near(target, draws[:2], np.cov(draws.T))).mixture
        found = search(target, ridge, 2_000, rng).proposal
        for name, proposal in {"ridge": ridge, "found": found}.items():
            points = proposal.draw(4_000, rng)
            weighted = weigh(points, target(points) - proposal.log_density(points))
            shares[name].append(weighted.n_effective / 4_000)
            assert weighted.weights @ points[:, 0] == pytest.approx(
                0, abs=5 * 4 / np.sqrt(weighted.n_effective)
            )
    assert np.median(shares["found"]) > max(0.1, np.median(shares["ridge"]))


def test_a_proposal_counts_points_as_often_as_they_are_different(rng):
    mixture = Mixture.of([Mixture.around(np.full(3, at), np.eye(3)) for at in (-1.0, 2.0)])
    points = rng.normal(size=(40, 3))
    once = adapted(mixture, points, len(points))
    repeated = adapted(mixture, np.repeat(points, 50, axis=0), len(points))
    for ours, theirs in zip(repeated, once, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    narrower = adapted(mixture, np.repeat(points, 50, axis=0), 50 * len(points))
    assert np.linalg.det(narrower.shapes).min() < np.linalg.det(once.shapes).min()


def normal(width):
    return lambda phi: -0.5 * np.square(phi / width).sum(axis=1)


def walked(target, proposal, points, rng):
    log_ratio = target(points) - proposal(points)
    parts = np.zeros(len(points), dtype=int)
    return walk(target, weigh(points, log_ratio), log_ratio, proposal, parts, rng)


@pytest.mark.parametrize("width", [1.0, 1.8])  # of the target: light tails of weights, and heavy
def test_walks_stay_where_a_proposal_covers_the_target(rng, width):
    proposal = Mixture.around(np.zeros(4), np.eye(4))
    points = proposal.draw(4_000, rng)
    assert walked(normal(width), proposal.log_density, points, rng).n_leaving == 0


def test_walks_leave_a_proposal_that_ends_where_the_target_goes_on(rng):
    """Assert it where weights are nearly equal, and k sees nothing."""

    def half(phi):
        return np.where(phi[:, 0] < 0, normal(1.1)(phi), -1e3)

    points = 1.1 * rng.normal(size=(4_000, 4))
    points[:, 0] = -np.abs(points[:, 0])
    assert weigh(points, normal(1.0)(points) - half(points)).is_reliable
    walks = walked(normal(1.0), half, points, rng)
    assert walks.n_leaving > WALKERS / 2
    assert (walks.points[:, 0] > 0).any()


def test_leapfrog_steps_conserve_energy_to_their_square(rng):
    """Assert it for a normal density, whose gradients differences tell exactly."""
    dynamics = Hamiltonian(
        normal(np.array([1.0, 2.0, 0.5])), np.broadcast_to(np.eye(3), (500, 3, 3))
    )
    start, momentum = rng.normal(size=(2, 500, 3))
    lost = []
    for step in (0.1, 0.05):
        _, energy = dynamics.trajectory(start, momentum, step, int(0.7 / step))
        lost.append(np.abs(energy[-1] - energy[0]).mean())
    assert lost[0] / lost[1] == pytest.approx(4, rel=0.1)


def test_a_walk_that_runs_away_is_no_walk_that_leaves(rng):
    """Assert it of a normal density that ends in cliffs, far steeper than steps allow."""

    def cliff(phi):
        away = np.abs(phi[:, 0])
        inside = normal(0.9)(phi.clip(-9, 9))
        return np.where(away < 2.5, inside, -np.exp(np.minimum(200 * away, 700)))

    start, momentum = np.array([[[3.0, 0.0]], [[1.0, 0.0]]])
    _, energy = Hamiltonian(cliff, np.eye(2)[None]).trajectory(start, momentum, 0.5, 2)
    assert energy[-1, 0] == np.inf
    points = rng.normal(size=(4_000, 2))
    points = points[np.abs(points[:, 0]) < 2.5]
    assert walked(cliff, normal(1.0), points, rng).n_leaving == 0


@pytest.mark.slow
def test_a_ridge_too_long_for_its_walks_gets_no_seal(rng):
    """Assert it of one as long as a million times its width, on whose end the searches agree."""
    draws = draws_from_one_end(5, 1e-4, rng)
    found = cover(banana(5, 1e-4), draws, 3_000, rng, sizes=[1_500])
    assert found.n_unfinished
    assert not found.is_reliable


def heavy(power):
    """Return the log density of a normal, and of a tail that falls by a power of the distance."""

    def log_density(phi):
        return -(phi[:, 0] ** 2 + power * np.log1p(phi[:, 1] ** 2)) / 2

    return log_density


@pytest.mark.parametrize(("power", "is_unfinished"), [(1, True), (4, False)])
def test_a_tail_without_finite_volume_has_no_end(power, is_unfinished):
    """Assert it of 1 / x, at the end of which another step of the same log holds as much."""
    modes = modes_near(heavy(power), np.array([[0.3, 0.3]]), np.eye(2))
    assert bool(ridges_from(heavy(power), modes).n_unfinished) == is_unfinished


def test_searches_that_end_at_different_modes_disagree(rng, monkeypatch):
    """Assert it with searches that are told where to end; each has a small k for itself."""

    def two_modes(phi):
        return np.logaddexp(normal_around(-5, 1)(phi), normal_around(5, 1)(phi))

    ends = iter([-5.0, 5.0, 5.0] * 3)
    monkeypatch.setattr(
        "pymc_gradmatch.exact.search.search",
        lambda *_: Search(Mixture.around(np.full(2, next(ends)), np.eye(2)), 1),
    )
    found = cover(two_modes, rng.normal(5, 1, size=(500, 2)), 3_000, rng)
    assert found.weighted.is_reliable
    assert not found.agrees
    assert not found.is_reliable


def far_apart(phi):
    """Evaluate three normals, of shares 3 to 1 to almost nothing."""
    parts = [(0.0, 0.0), (40.0, np.log(3)), (-40.0, -20.0)]
    return logsumexp([normal_around(at, 1)(phi) + share for at, share in parts], axis=0)


def test_other_modes_are_found_from_points_near_them_the_highest_first(rng):
    mode = newton(far_apart, np.ones((1, 2)), np.eye(2))
    points = np.repeat([0.0, 40.0, -40.0], 3)[:, None] + rng.normal(size=(9, 2))
    others = modes_beside(far_apart, points, mode)
    np.testing.assert_allclose(others.point, [[40.0, 40.0]], atol=1e-2)
    others = modes_beside(far_apart, points, others)
    np.testing.assert_allclose(others.point, [[0.0, 0.0]], atol=1e-2)


def test_modes_that_are_known_of_have_their_shares(rng):
    draws = rng.normal(size=(500, 2))
    other = newton(far_apart, np.full((1, 2), 39.0), np.eye(2))
    found = cover(far_apart, draws, 3_000, rng, others=partial(joined, other))
    assert found.is_reliable
    error = np.sqrt(0.75 * 0.25 / found.weighted.n_effective)
    share = found.weighted.weights @ (found.weighted.points[:, 0] > 20)
    assert share == pytest.approx(0.75, abs=5 * error)
    np.testing.assert_allclose(found.modes.points, [[40, 40], [0, 0]], atol=1e-2)
    np.testing.assert_allclose(found.modes.shares, [0.75, 0.25], atol=5 * error)


def test_climbs_from_draws_find_six_modes_and_of_one_no_second(rng):
    mode = newton(six_modes, np.zeros((1, 2)), np.eye(2))
    found = modes_from(six_modes, mode, lambda: rng.uniform(-10, 60, size=(1_000, 2)))
    corners = sorted(map(tuple, found.point.round(2).tolist()))
    assert corners == [(x, y) for x in (0.0, 50.0) for y in (0.0, 25.0, 50.0)]
    one = newton(normal(1.0), np.ones((1, 2)), np.eye(2))
    found = modes_from(normal(1.0), one, lambda: rng.uniform(-10, 60, size=(1_000, 2)))
    np.testing.assert_allclose(found.point, [[0.0, 0.0]], atol=1e-6)


def test_no_climb_is_spent_on_draws_of_the_mode_that_is_known(rng):
    """Assert that a lower mode is found where a prior has most of its draws near the higher."""
    higher, lower = np.zeros(2), np.full(2, 20.0)

    def two(phi):
        return np.logaddexp(normal(1.0)(phi - higher) + 3, normal(1.0)(phi - lower))

    mode = newton(two, np.full((1, 2), 0.1), np.eye(2))
    around = np.where(np.arange(1_000)[:, None] < 900, higher, lower)
    found = modes_from(two, mode, lambda: around + rng.normal(size=(1_000, 2)))
    np.testing.assert_allclose(found.point, [higher, lower], atol=1e-2)
    few = modes_from(two, mode, lambda: higher + 0.1 * rng.normal(size=(1_000, 2)))
    assert len(few.height) == 1


def six_modes(phi):
    """Evaluate six normals of equal shares, two by three."""
    centers = [(x, y) for x in (0, 50) for y in (0, 25, 50)]
    return logsumexp([normal(1.0)(phi - np.array(center)) for center in centers], axis=0)


def test_climbs_that_settle_along_a_ridge_are_one_mode(rng):
    def bent(phi):
        across = phi[:, 1] - 0.02 * np.square(phi[:, 0])
        return -0.5 * np.square(phi[:, 0] / 30) - 0.5 * np.square(across / 0.1)

    def draw():
        along = rng.normal(0, 30, size=1_000)
        return np.stack([along, 0.02 * np.square(along) + rng.normal(0, 3, size=1_000)], axis=1)

    mode = newton(bent, np.array([[0.1, 0.0]]), np.diag([1.0, 0.01]))
    likely = sorted(draw(), key=lambda point: -bent(point[None])[0])[:16]
    assert len(modes_beside(bent, np.array(likely), mode).height) > 0
    assert len(modes_from(bent, mode, draw).height) == 1


def test_walks_go_by_the_widths_of_their_own_part(rng):
    """Assert that they need no more steps where one part is a thousand times as narrow."""
    means, widths = np.array([[0.0, 0.0], [100.0, 0.0]]), np.array([1.0, 1e-3])

    def target(phi):
        of_each = [normal(w)(phi - m) - 2 * np.log(w) for m, w in zip(means, widths, strict=True)]
        return logsumexp(of_each, axis=0)

    shapes = np.square(widths)[:, None, None] * np.eye(2)
    proposal = Mixture(np.array([0.5, 0.5]), means, shapes)
    points = proposal.draw(4_000, rng)
    parts = (points[:, 0] > 50).astype(int)
    log_ratio = target(points) - proposal.log_density(points)
    weighted = weigh(points, log_ratio)
    walks = walk(target, weighted, log_ratio, proposal.log_density, parts, rng)
    assert (walks.n_leaving, walks.n_telling) == (0, WALKERS)
    assert len(walks.points) <= WALKERS * TIME / FIRST_STEP


def test_searches_around_a_lesser_mode_begin_anew_around_a_higher_one(rng):
    """Assert it where the lesser mode has a pole, which no proposal covers."""
    top = np.array([400.0, 0.0])

    def target(phi):
        radius = np.linalg.norm(phi, axis=1)
        pole = -0.5 * radius**2 - 1.9 * np.log(radius)
        return np.logaddexp(np.where(radius < 50, pole, -np.inf), normal(0.01)(phi - top) + 900)

    found = cover(
        target,
        rng.normal(size=(500, 2)),
        3_000,
        rng,
        elsewhere=lambda: newton(target, top[None] + 0.01, 1e-4 * np.eye(2)),
    )
    assert found.is_reliable
    np.testing.assert_allclose(found.weighted.weights @ found.weighted.points, top, atol=2e-3)


def test_a_climb_beside_a_wall_takes_a_closer_look_and_goes_on(rng):
    """Assert the mode of a narrow density from where differences reach over its edge."""
    sd, edge = 0.01, 0.05

    def walled(phi):
        return np.where(phi[:, 0] > -edge, normal_around(0, sd)(phi), -np.inf)

    local = newton(walled, np.array([[-0.9 * edge, 3 * sd]]), np.eye(2))
    np.testing.assert_allclose(local.point, 0, atol=0.1 * sd)
    np.testing.assert_allclose(np.sqrt(np.diagonal(local.covariance[0])), sd, rtol=0.05)


def test_a_ridge_too_narrow_for_its_covariance_leads_from_mode_to_mode():
    """Assert it where rounding makes the covariance singular: as many data as unknowns."""
    factor = np.array([[1.0, 0.0], [1.0, 1e-10]])

    def narrow(phi):
        return -0.5 * (np.linalg.solve(factor, phi.T) ** 2).sum(axis=0)

    ends = np.array([[0.0, 0.0], [1.0, 1.0]])
    modes = look_around(narrow, ends, np.repeat(factor[None], 2, axis=0))
    np.testing.assert_array_equal(apart_from_ridges(narrow, modes).point, ends[:1])


def test_draws_of_which_none_is_possible_are_weighed_without_an_error(rng):
    points = rng.normal(size=(1_000, 2))
    weighted = weigh(points, np.full(1_000, -np.inf))
    assert not weighted.is_reliable
    assert (weighted.n_effective, weighted.log_evidence) == (0, -np.inf)
    assert sorted(weighted.resampled(1_000, rng)) == [*range(1_000)]


@pytest.mark.slow
def test_a_target_out_of_reach_gets_a_k_that_says_so(biased, decay, gp, monkeypatch):
    """Assert the other verdict, with starts and a metric, where tails stay too heavy."""
    monkeypatch.setattr("pymc_gradmatch.exact.importance.MAX_ROUNDS", 1)
    monkeypatch.setattr("pymc_gradmatch.exact.importance.ADAPTING_ROUNDS", 1)
    monkeypatch.setattr(
        "pymc_gradmatch.exact.search.ridges_from",
        lambda _, modes: Ridges(
            Mixture.around(modes.point[0], 1e-4 * modes.covariance[0]), 0, modes.height[:1]
        ),
    )
    sharp = gm.StateGP(gp.t, gp.y, gp.covs, sigma=3e-4)
    priors = {"rate": pm.HalfNormal.dist(PRIOR_SD)}
    model = gm.build_model(decay, gp.t, gp.y, priors=priors, gp=sharp)
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
    model = gm.build_model(ode, gp.t, gp.y, priors=priors, gp=gp)
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
    "system", [gm.systems.lotka_volterra, gm.systems.fitzhugh_nagumo], ids=lambda s: s.name
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


def test_a_reliable_k_is_below_seven_tenths_and_less_for_few_draws():
    assert reliable_k(10_000) == 0.7
    assert reliable_k(100) == 0.5


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


def test_a_target_that_is_zero_at_all_draws_is_refused_in_words(rng):
    def nowhere(phi):
        return np.full(len(phi), -np.inf)

    with pytest.raises(ValueError, match="zero at all of 500 draws around the given ones"):
        cover(nowhere, rng.normal(size=(500, 2)), 1_000, rng)


def wide_and_low(points):
    """Return a normal, and one 60 away that is lower and so wide that it holds nearly all."""
    away = points - 60 * np.eye(10)[0]
    near = -0.5 * np.square(points).sum(axis=1)
    return np.logaddexp(near, -12.5 - 0.5 * np.square(away / 5).sum(axis=1))


@pytest.mark.parametrize("start", [0.0, 60.0])
def test_a_mode_far_below_another_counts_where_it_holds_more(start, rng):
    near = newton(wide_and_low, start * np.eye(10)[[0]] + 0.1, np.eye(10))
    ends = np.concatenate(
        [rng.normal(size=(500, 10)), 60 * np.eye(10)[0] + 5 * rng.normal(size=(500, 10))]
    )
    modes = modes_from(wide_and_low, near, lambda: ends)
    np.testing.assert_allclose(modes.point[:, 0], [0, 60], atol=0.1)
    around = Mixture.around(modes.point[0], modes.covariance[0]).draw(1_000, rng)
    weighted = cover(wide_and_low, around, 4_000, rng, partial(joined, modes)).weighted
    share = 1 / (1 + np.exp(12.5) / 5**10)
    mean = weighted.weights @ weighted.points[:, 0]
    assert mean == pytest.approx(60 * share, abs=5 * 13 / np.sqrt(weighted.n_effective))


def test_a_search_whose_draws_are_all_impossible_starts_from_the_ridges(rng):
    """Assert it of twenty unknowns above zero, where a draw five times as wide never lies."""

    def positive(points):
        return np.where((points > 0).all(axis=1), -0.5 * np.square(points - 1).sum(axis=1), -np.inf)

    draws = np.abs(1 + 0.3 * rng.normal(size=(500, 20)))
    with pytest.raises(ValueError, match="zero at all"):
        search(positive, Mixture.around(np.ones(20), 25 * np.eye(20)), 500, rng)
    weighted = cover(positive, draws, 1_000, rng, sizes=(500,)).weighted
    assert (weighted.points[weighted.weights > 0] > 0).all()


def test_densities_around_a_point_are_the_same_in_small_pieces(simple_model, monkeypatch):
    target = ExactPosterior(simple_model)
    points = target.starting_at() + np.array([[0.0], [0.1]])
    moves = np.tile(0.1 * np.eye(points.shape[1]), (2, 1, 1))
    whole = target.around(points, moves)
    monkeypatch.setattr(posterior, "MOST_NUMBERS", 1)
    for one, other in zip(whole, target.around(points, moves), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("error", [KeyboardInterrupt, np.linalg.LinAlgError])
def test_a_glance_that_fails_says_so_and_costs_no_draws(biased, simple_model, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(verdict, "newton", fail)
    seen = glance(simple_model, biased["posterior"].dataset)
    assert seen.text.startswith("The matched posterior was not compared with the exact one")
    assert not seen.is_suspicious


@pytest.mark.slow
def test_where_walks_are_lost_at_once_the_verdict_says_so(rng):
    """Assert it of a ridge thinner than their shortest steps, which is covered all the same."""
    said = []
    for bend, width in ((0.05, 0.3), (0.5, 0.02)):
        draws = draws_from_one_end(bend, width, rng)
        found = cover(banana(bend, width), draws, 12_000, rng)
        assert found.is_reliable
        table = found.disagreement.set_axis([*"abc", "evidence"])
        said.append(
            "walks from them were lost at once" in verdict.in_words(found, table, verdict.Doubts())
        )
    assert said == [False, True]

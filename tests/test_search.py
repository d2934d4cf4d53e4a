"""Searches for densities in closed form: mixtures, weights, ridges, HMC, and agreement."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from pymc_gradmatch.exact.importance import (
    GIVE_UP_AFTER,
    MAX_ROUNDS,
    AdaptiveSearch,
    Mixture,
    Pool,
    adapt_components,
    adaptive_search,
    fit_mixture,
    pareto_smooth,
    reliable_k,
)
from pymc_gradmatch.exact.multistart import optimise_locally
from pymc_gradmatch.exact.ridges import approximate, follow_ridges, without_ridge_connected
from pymc_gradmatch.exact.search import (
    DRAWS_PER_ROUND,
    HMC_STEP,
    HMC_TIME,
    MIN_VALID,
    N_TRAJECTORIES,
    HMCCheck,
    hmc_check,
    leapfrog,
    result_of_chains,
    run_searches,
)
from tests.densities import Density, modes_of, normal, together


def optimised(target, *points, width=1.0):
    """Return the modes that local optimisations from points end at, the highest first."""
    points = np.array(points, dtype=float)
    found = optimise_locally(target, points, np.full(points.shape[1], width))
    return found.select(np.argsort(-found.log_density))


def test_weights_are_uniform_where_the_proposal_is_the_target(rng):
    """Assert nearly constant weights for a mixture of t distributions that is its own target."""
    factor = np.tril(rng.normal(size=(5, 5))) + 2 * np.eye(5)
    mixture = Mixture.combined(
        [Mixture.single(np.arange(5.0) + k, factor @ factor.T) for k in (0, 2)]
    )
    points = mixture.draw(1_000, rng)
    expected = stats.multivariate_t(np.arange(5), factor @ factor.T * 5 / 7, df=7).pdf(points) / 2
    shifted = stats.multivariate_t(np.arange(5) + 2, factor @ factor.T * 5 / 7, df=7).pdf(points)
    np.testing.assert_allclose(mixture.log_density(points), np.log(expected + shifted / 2))
    weighted = pareto_smooth(points, np.log(expected + shifted / 2) - mixture.log_density(points))
    assert weighted.n_effective > 999
    assert weighted.log_evidence == pytest.approx(0, abs=1e-9)


def test_draws_of_density_zero_are_weighted_without_an_error(rng):
    points = rng.normal(size=(1_000, 2))
    weighted = pareto_smooth(points, np.full(1_000, -np.inf))
    assert not weighted.is_reliable
    assert (weighted.n_effective, weighted.log_evidence) == (0, -np.inf)
    assert sorted(weighted.resampled(1_000, rng)) == [*range(1_000)]


def test_a_reliable_k_is_below_seven_tenths_and_less_for_few_draws():
    assert reliable_k(10_000) == 0.7
    assert reliable_k(100) == 0.5


def test_a_search_adapts_to_a_far_and_narrow_target():
    """Assert moments of a normal ten of its standard deviations away, in eight dimensions.

    A third of all searches have too few effective draws when their rounds are used up.
    """
    sd, target, n_there = 0.3, normal(0.3, 3), 0
    start = Mixture.single(np.zeros(8), np.eye(8))
    for seed in range(8):
        weighted = adaptive_search(
            target, start, 1_000, 1_000, np.random.default_rng(seed)
        ).pool.weighted
        if weighted.n_effective < 1_000:
            continue
        n_there += 1
        assert weighted.is_reliable
        error = 4 * sd / np.sqrt(weighted.n_effective)
        np.testing.assert_allclose(weighted.weights @ weighted.points, 3, atol=error)
        evidence = 8 * np.log(sd * np.sqrt(2 * np.pi))
        assert weighted.log_evidence == pytest.approx(evidence, abs=0.2)
    assert n_there >= 4


def test_a_search_keeps_its_draws_and_ends_when_there_are_enough(rng):
    start = Mixture.single(np.zeros(2), np.eye(2))
    one = adaptive_search(normal(1.0), start, 1_000, 500, rng)
    assert len(one.pool.proposals) == 1
    more = adaptive_search(normal(1.0), start, 1_000, 1_500, rng)
    assert 1 < more.pool.n_rounds == len(more.pool.proposals)
    assert len(more.pool.points) == 1_000 * len(more.pool.proposals)
    assert more.pool.weighted.n_effective >= 1_500


def of_copies(points):
    """Return a density of so many narrow modes in ten dimensions that no few parts cover them."""
    return -0.5 * np.square((np.abs(points) - 1) / 0.05).sum(axis=1)


def test_a_search_with_almost_no_effective_draws_is_given_up(rng):
    start, messages = Mixture.single(np.ones(10), np.full(10, 0.05**2) * np.eye(10)), []
    start = Mixture.combined([start, start._replace(means=-start.means)])
    wide = start._replace(shapes=1e4 * start.shapes)
    found = adaptive_search(of_copies, wide, 1_000, 500, rng, gives_up=True, report=messages.append)
    assert found.is_given_up
    assert found.pool.n_rounds == len(messages) == GIVE_UP_AFTER
    assert messages[-1] == f"round {GIVE_UP_AFTER} of {MAX_ROUNDS} at most"
    assert not adaptive_search(of_copies, start, 1_000, 200, rng, gives_up=True).is_given_up


def test_searches_report_what_remains(rng):
    messages = []
    run_searches(
        Density(normal(1.0)), optimised(normal(1.0), [0.0, 0.0]), 1_000, rng, report=messages.append
    )
    assert messages[0] == "following ridges from all modes"
    assert (
        messages[1] == f"attempt 1 of {len(DRAWS_PER_ROUND)}, search 1 of 2, round 1 of 12 at most"
    )
    assert any("search 2 of 2" in words for words in messages)


def test_a_pool_keeps_the_latest_of_its_rounds(rng):
    pool, all_of_them = Pool(2), Pool()
    for at in (5.0, 1.0, 0.0):
        proposal = Mixture.single(np.full(2, at), np.eye(2))
        points = proposal.draw(int(100 + 10 * at), rng)
        for one in (pool, all_of_them):
            one.add(proposal, points, normal(1.0)(points))
    assert (pool.n_rounds, len(pool.proposals)) == (3, 2)
    np.testing.assert_array_equal(pool.points, all_of_them.points[150:])
    expected = normal(1.0)(pool.points) - pool.mixture.log_density(pool.points)
    densities = [one.log_density(pool.points) for one in pool.proposals]
    np.testing.assert_allclose(
        pool.log_ratio, normal(1.0)(pool.points) - logsumexp(densities, axis=0) + np.log(2)
    )
    np.testing.assert_allclose(pool.log_ratio, expected)


def test_draws_of_several_proposals_are_weighted_as_draws_of_their_mixture(rng):
    first, second = (Mixture.single(np.full(2, at), np.eye(2)) for at in (-1.0, 1.0))
    pool = Pool()
    for proposal in (first, second):
        points = proposal.draw(500, rng)
        pool.add(proposal, points, normal(1.0)(points))
    expected = normal(1.0)(pool.points) - pool.mixture.log_density(pool.points)
    np.testing.assert_allclose(pool.log_ratio, expected)


def test_a_target_that_is_zero_at_all_draws_is_refused(rng):
    nowhere = Density(lambda phi: np.full(len(phi), -np.inf))
    start = optimised(normal(1.0), [0.0, 0.0])
    with pytest.raises(ValueError, match="zero at all of 1000 draws around the given ones"):
        run_searches(nowhere, start, 1_000, rng)


def test_a_search_whose_draws_all_have_density_zero_starts_from_the_modes(rng, monkeypatch):
    """Assert it of sixty positive unknowns, where draws twice as wide never are."""
    sd = 0.25

    def positive(points):
        inside = (points > 0).all(axis=1)
        return np.where(inside, -0.5 * np.square((points - 1) / sd).sum(axis=1), -np.inf)

    wide = Mixture.single(np.ones(60), np.square(5 * sd) * np.eye(60))
    with pytest.raises(ValueError, match="zero at all"):
        adaptive_search(positive, wide, 500, 100, rng)
    mode = optimised(normal(sd, 1.0), np.ones(60))
    monkeypatch.setattr("pymc_gradmatch.exact.search.DRAWS_PER_ROUND", (500, 500))
    weighted = run_searches(Density(positive), mode, 1_000, rng).weighted
    assert (weighted.points[weighted.weights > 0] > 0).all()


def banana(bend, width):
    """Return the log density of a ridge along a parabola, of standard deviation 4 along x."""

    def log_density(phi):
        across = (phi[:, 1] - bend * phi[:, 0] ** 2) / width
        return -0.5 * ((phi[:, 0] / 4) ** 2 + across**2 + phi[:, 2] ** 2)

    return Density(log_density, lambda n, rng: rng.normal(size=(n, 3)) * [8, 8, 2])


def on_banana(bend, x):
    return [x, bend * x**2, 0.1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bend", "width", "start"),
    [
        (0.05, 0.3, "its mode"),
        (0.05, 0.3, "one end"),
        (0.05, 0.3, "optimisation"),
        (0.5, 0.02, "optimisation"),
    ],
)
def test_a_bent_ridge_is_covered(bend, width, start, rng):
    """Assert the whole ridge's mean and standard deviation, which k alone does not check.

    No HMC trajectory can move on the thinner one, so its draws, though right, are not reliable.
    """
    target = banana(bend, width)
    for _ in range(4):
        if start == "optimisation":
            modes = modes_of(target, rng).modes
        else:
            modes = optimised(target, on_banana(bend, 0.0 if start == "its mode" else -4.0))
        found = run_searches(target, modes, 12_000, rng)
        assert found.weighted.is_reliable
        assert found.conditions["searches_agree"].passed
        assert found.is_reliable == (width > 0.1)
        assert (found.hmc.n_valid >= MIN_VALID) == (width > 0.1)
        weights, x = found.weighted.weights, found.weighted.points[:, 0]
        error = 5 / np.sqrt(found.weighted.n_effective)
        assert weights @ x == pytest.approx(0, abs=4 * error)
        assert np.sqrt(weights @ x**2) == pytest.approx(4, rel=error)


def test_a_ridge_is_followed_to_both_of_its_ends():
    """Assert it from one end, for a ridge that bends by a hundred times its width."""
    bend, width = 0.1, 0.05
    target = banana(bend, width)
    ridges = follow_ridges(target, optimised(target, on_banana(bend, -4.0)))
    x, y, _ = ridges.mixture.means.T
    assert x.min() < -12  # three standard deviations
    assert x.max() > 12
    assert np.abs(y - bend * x**2).max() < 6 * width
    assert not ridges.n_unfinished


def rate_near_zero(phi):
    """Return the log density of a rate's log, and of two correlated parameters that follow it."""
    log_rate, a, b = phi.T
    follows = 0.3 * np.tanh(log_rate + 1.9)
    tail = log_rate - np.square((np.exp(log_rate) - 0.15) / 0.075) / 2
    together, apart = (a + b - follows) / 0.1, (a - b + follows) / 0.02
    return tail - (np.square(together) + np.square(apart)) / 2


def test_an_exponential_tail_between_steep_slopes_is_followed():
    """Assert points where one in 2 000 draws is, all of them on the ridge."""
    modes = optimised(Density(rate_near_zero), [-2.0, 0.0, 0.0])
    means = follow_ridges(Density(rate_near_zero), modes).mixture.means
    in_tail = means[means[:, 0] < -3]
    assert in_tail[:, 0].min() < -7.5
    follows = 0.3 * np.tanh(in_tail[:, 0] + 1.9)
    on_ridge = np.column_stack([in_tail[:, 0], np.zeros_like(follows), follows])
    assert (rate_near_zero(in_tail) > rate_near_zero(on_ridge) - 1).all()


def test_an_exponential_tail_between_steep_slopes_has_its_share(rng):
    """Assert the share of the tail against quadrature, along the rate alone."""
    target = Density(rate_near_zero)
    grid = np.linspace(-40, 2, 20_001)
    density = np.exp(grid - np.square((np.exp(grid) - 0.15) / 0.075) / 2)
    share = density[grid < -4].sum() / density.sum()
    for _ in range(4):
        found = run_searches(target, optimised(target, [-2.0, 0.0, 0.0]), 4_000, rng)
        assert found.is_reliable
        weights, log_rate = found.weighted.weights, found.weighted.points[:, 0]
        error = np.sqrt(share / found.weighted.n_effective)
        assert weights @ (log_rate < -4) == pytest.approx(share, abs=5 * error)


def turning(phi):
    """Return the log density of a ridge that turns, thousands of times as long as wide."""
    x, y, z = phi.T
    tight, loose = y + z - np.logaddexp(0, 3 * x), y - z + np.logaddexp(0, -2 * x)
    return -0.5 * (x**2 + np.square(tight / 3e-4) + np.square(loose / 0.02))


def test_points_along_a_bent_ridge_are_on_it():
    modes = optimised(Density(turning), [0.1, 0.0, 0.0])
    ridges = follow_ridges(Density(turning), modes)
    x = ridges.mixture.means[:, 0]
    assert x.min() < -3.5
    assert x.max() > 3.5
    assert not ridges.n_unfinished
    across = turning(ridges.mixture.means) + 0.5 * x**2
    assert np.median(across) > -0.5  # others went along the loose one of the two directions
    ahead = np.sort(x[across > -0.5])
    assert np.diff(ahead[(ahead > -3) & (ahead < 3)]).max() < 1.5  # so that parts overlap


@pytest.mark.slow
def test_components_along_a_ridge_are_adapted_to_it(rng):
    """Assert a large effective share of a proposal, where one of few components has none.

    The share depends on few draws: assert the median of several searches.
    """
    bend, width = 0.1, 0.05
    target = banana(bend, width)
    shares: dict[str, list[float]] = {"ridge": [], "found": []}
    for _ in range(7):
        mode = optimised(target, on_banana(bend, 0.0))
        ridge = follow_ridges(target, mode).mixture
        found = adaptive_search(target, ridge, 2_000, np.inf, rng).proposal
        for name, proposal in {"ridge": ridge, "found": found}.items():
            points = proposal.draw(4_000, rng)
            weighted = pareto_smooth(points, target(points) - proposal.log_density(points))
            shares[name].append(weighted.n_effective / 4_000)
            assert weighted.weights @ points[:, 0] == pytest.approx(
                0, abs=5 * 4 / np.sqrt(weighted.n_effective)
            )
    assert np.median(shares["found"]) > max(0.1, np.median(shares["ridge"]))


def test_a_proposal_counts_points_as_often_as_they_are_different(rng):
    mixture = Mixture.combined([Mixture.single(np.full(3, at), np.eye(3)) for at in (-1.0, 2.0)])
    points = rng.normal(size=(40, 3))
    one, fifty = np.ones(len(points), dtype=int), np.full(len(points), 50)
    once = adapt_components(mixture, points, one, len(points))
    repeated = adapt_components(mixture, points, fifty, len(points))
    for ours, theirs in zip(repeated, once, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    narrower = adapt_components(mixture, points, fifty, 50 * len(points))
    assert np.linalg.det(narrower.shapes).min() < np.linalg.det(once.shapes).min()


def checked(target, proposal, points, rng, parts=None):
    log_ratio = target(points) - proposal(points)
    found = SimpleNamespace(
        weighted=pareto_smooth(points, log_ratio),
        modes=SimpleNamespace(nearest=np.zeros(len(points), dtype=int) if parts is None else parts),
        proposal=SimpleNamespace(log_density=proposal),
        log_ratio=log_ratio,
    )
    return hmc_check(target, found, rng)


@pytest.mark.parametrize("width", [1.0, 1.8])  # of the target: light tails of weights, and heavy
def test_trajectories_stay_where_a_proposal_covers_the_target(rng, width):
    proposal = Mixture.single(np.zeros(4), np.eye(4))
    points = proposal.draw(4_000, rng)
    assert checked(normal(width), proposal.log_density, points, rng).n_leaving == 0


def test_trajectories_leave_a_proposal_that_covers_half_of_the_target(rng):
    """Assert it where weights are nearly equal, and k is small."""

    def half(phi):
        return np.where(phi[:, 0] < 0, normal(1.1)(phi), -1e3)

    points = 1.1 * rng.normal(size=(4_000, 4))
    points[:, 0] = -np.abs(points[:, 0])
    assert pareto_smooth(points, normal(1.0)(points) - half(points)).is_reliable
    result = checked(normal(1.0), half, points, rng)
    assert result.n_leaving > N_TRAJECTORIES / 2
    assert (result.points[:, 0] > 0).any()


def test_leapfrog_steps_conserve_energy_to_their_square(rng):
    """Assert it for a normal density, whose gradients differences give exactly."""
    target, factor = normal(np.array([1.0, 2.0, 0.5])), np.broadcast_to(np.eye(3), (500, 3, 3))
    start, momentum = rng.normal(size=(2, 500, 3))
    lost = []
    for step in (0.1, 0.05):
        *_, energy = leapfrog(target, factor, start, momentum, step, int(0.7 / step))
        lost.append(np.abs(energy[-1] - energy[0]).mean())
    assert lost[0] / lost[1] == pytest.approx(4, rel=0.1)


def test_a_divergent_trajectory_does_not_count_as_leaving(rng):
    """Assert it of a normal density that ends in cliffs, far steeper than steps allow."""

    def cliff(phi):
        away = np.abs(phi[:, 0])
        inside = normal(0.9)(phi.clip(-9, 9))
        return np.where(away < 2.5, inside, -np.exp(np.minimum(200 * away, 700)))

    start, momentum = np.array([[[3.0, 0.0]], [[1.0, 0.0]]])
    target = Density(cliff)
    *_, energy = leapfrog(target, np.eye(2)[None], start, momentum, 0.5, 2)
    assert energy[-1, 0] == np.inf
    points = rng.normal(size=(4_000, 2))
    points = points[np.abs(points[:, 0]) < 2.5]
    assert checked(target, normal(1.0), points, rng).n_leaving == 0


def test_trajectories_use_the_widths_of_their_own_mode(rng):
    """Assert that they need no more steps where one part is a thousand times as narrow."""
    means, widths = np.array([[0.0, 0.0], [100.0, 0.0]]), np.array([1.0, 1e-3])
    target = together([(normal(w, m), -2 * np.log(w)) for m, w in zip(means, widths, strict=True)])
    shapes = np.square(widths)[:, None, None] * np.eye(2)
    proposal = Mixture(np.array([0.5, 0.5]), means, shapes)
    points = proposal.draw(4_000, rng)
    parts = (points[:, 0] > 50).astype(int)
    result = checked(target, proposal.log_density, points, rng, parts)
    assert (result.n_leaving, result.n_valid) == (0, N_TRAJECTORIES)
    assert len(result.points) <= N_TRAJECTORIES * HMC_TIME / HMC_STEP


def test_searches_start_again_from_trajectories_that_leave(rng, monkeypatch):
    """Assert it of a mode that only trajectories reached."""
    two = together([(normal(1.0), 0.0), (normal(1.0, 40.0), 0.0)])
    there = iter([HMCCheck(rng.normal(40, 1, size=(500, 2)), N_TRAJECTORIES, N_TRAJECTORIES)])
    monkeypatch.setattr(
        "pymc_gradmatch.exact.search.hmc_check",
        lambda *given: next(there, None) or hmc_check(*given),
    )
    found = run_searches(two, optimised(two, [0.3, 0.3]), 4_000, rng)
    assert_half_is_far_away(found)


def assert_half_is_far_away(found):
    assert found.is_reliable
    error = 0.5 / np.sqrt(found.weighted.n_effective)
    share = found.weighted.weights @ (found.weighted.points[:, 0] > 20)
    assert share == pytest.approx(0.5, abs=5 * error)


@pytest.mark.slow
def test_a_ridge_too_long_to_be_followed_is_not_reliable(rng, monkeypatch):
    """Assert it of one as long as a million times its width."""
    target = banana(5, 1e-4)
    monkeypatch.setattr("pymc_gradmatch.exact.search.DRAWS_PER_ROUND", (1_500, 1_500))
    found = run_searches(target, optimised(target, on_banana(5, -4.0)), 3_000, rng)
    assert found.n_unfinished
    assert not found.is_reliable


@pytest.mark.parametrize(("power", "is_unfinished"), [(1, True), (4, False)])
def test_a_tail_without_finite_volume_has_no_end(power, is_unfinished):
    """Assert it of 1 / x, at the end of which another step of the same log holds as much."""

    def heavy(phi):
        return -(phi[:, 0] ** 2 + power * np.log1p(phi[:, 1] ** 2)) / 2

    modes = optimised(Density(heavy), [0.3, 0.3])
    assert bool(follow_ridges(Density(heavy), modes).n_unfinished) == is_unfinished


@pytest.mark.slow
def test_an_improper_posterior_is_not_reliable(rng):
    def heavy(phi):
        return -(phi[:, 0] ** 2 + np.log1p(phi[:, 1] ** 2)) / 2

    target = Density(heavy)
    assert not run_searches(target, optimised(target, [0.3, 0.3]), 4_000, rng).is_reliable


def test_searches_that_end_at_different_modes_disagree(rng, monkeypatch):
    """Assert it with given results of searches, each with a small k."""
    two_modes = together([(normal(1.0, -5.0), 0.0), (normal(1.0, 5.0), 0.0)])
    ends = iter([-5.0, 5.0] * 3)

    def ended(target, *_, **settings):
        proposal, pool = Mixture.single(np.full(2, next(ends)), np.eye(2)), Pool()
        points = proposal.draw(3_000, rng)
        pool.add(proposal, points, target(points))
        return AdaptiveSearch(pool, proposal)

    monkeypatch.setattr("pymc_gradmatch.exact.search.adaptive_search", ended)
    found = run_searches(two_modes, optimised(two_modes, [5.0, 5.0]), 3_000, rng)
    assert found.weighted.is_reliable
    assert found.disagreement["mean"].max() > 1
    assert not found.conditions["searches_agree"].passed
    assert not found.is_reliable


def test_modes_have_their_shares(rng):
    """Assert it of two, of shares 3 to 1."""
    two = together([(normal(1.0, 0.0), 0.0), (normal(1.0, 40.0), np.log(3))])
    found = run_searches(two, optimised(two, [0.3, 0.3], [39.0, 39.0]), 3_000, rng)
    assert found.is_reliable
    error = np.sqrt(0.75 * 0.25 / found.weighted.n_effective)
    share = found.weighted.weights @ (found.weighted.points[:, 0] > 20)
    assert share == pytest.approx(0.75, abs=5 * error)
    # A climb ends where a thousandth is left to gain.
    np.testing.assert_allclose(found.modes.points, [[40, 40], [0, 0]], atol=np.sqrt(2e-3))
    np.testing.assert_allclose(found.modes.shares, [0.75, 0.25], atol=5 * error)


def test_a_mode_far_below_another_has_its_share_where_it_holds_more(rng):
    """Assert it of a normal in ten dimensions, and of one that is lower and five times as wide."""
    far = 60 * np.eye(10)[0]
    target = together([(normal(1.0), 0.0), (normal(5.0, far), -12.5)])
    weighted = run_searches(target, optimised(target, np.zeros(10), far), 4_000, rng).weighted
    share = 1 / (1 + np.exp(12.5) / 5**10)
    mean = weighted.weights @ weighted.points[:, 0]
    assert mean == pytest.approx(60 * share, abs=5 * 13 / np.sqrt(weighted.n_effective))


def test_draws_of_another_sampler_replace_ridges(rng):
    """Assert it of a mode that only these draws reached."""
    two = together([(normal(1.0), 0.0), (normal(1.0, 40.0), 0.0)])
    chains = np.concatenate([rng.normal(at, 1, size=(500, 2)) for at in (0, 40)])
    around = fit_mixture(chains, rng)
    assert_half_is_far_away(
        run_searches(two, optimised(two, [0.3, 0.3]), 4_000, rng, around=around)
    )


def chains(rng, n=1_000, away=0.0):
    """Return draws of a standard normal; those of the first chain are away from it."""
    draws = rng.normal(size=(4, n, 2))
    draws[0] += away
    return draws, -0.5 * np.square(draws).sum(axis=-1)


def test_chains_are_draws_of_the_target_with_its_moments(rng):
    draws, height = chains(rng)
    found = result_of_chains(normal(1.0), optimised(normal(1.0), [0.3, 0.3]), draws, height, 0)
    assert found.is_reliable
    assert found.weighted.n_effective == pytest.approx(4_000, rel=0.2)
    np.testing.assert_allclose(found.weighted.weights, 1 / 4_000)
    np.testing.assert_allclose(found.covariance, np.eye(2), atol=0.1)
    np.testing.assert_allclose(found.modes.shares, 1)


@pytest.mark.parametrize(
    ("away", "n", "n_divergences"), [(0.3, 1_000, 0), (0.0, 60, 0), (0.0, 1_000, 5)]
)
def test_chains_that_disagree_are_few_or_diverge_are_not_reliable(rng, away, n, n_divergences):
    draws, height = chains(rng, n, away)
    mode = optimised(normal(1.0), [0.3, 0.3])
    assert not result_of_chains(normal(1.0), mode, draws, height, n_divergences).is_reliable


def test_weights_correct_chains_of_another_density(rng):
    """Assert the standard deviation of a target that is a twentieth narrower."""
    draws, height = chains(rng, 20_000)
    target = normal(0.95)
    found = result_of_chains(target, optimised(target, [0.3, 0.3]), draws, height, 0)
    assert 0.9 < found.chains.remaining < 1
    np.testing.assert_allclose(np.sqrt(np.diagonal(found.covariance)), 0.95, rtol=0.01)


def test_a_ridge_too_narrow_for_its_covariance_leads_from_mode_to_mode():
    """Assert it where rounding makes the covariance singular: as many data as unknowns."""
    factor = np.array([[1.0, 0.0], [1.0, 1e-10]])

    def narrow(phi):
        return -0.5 * (np.linalg.solve(factor, phi.T) ** 2).sum(axis=0)

    ends = np.array([[0.0, 0.0], [1.0, 1.0]])
    modes = approximate(Density(narrow), ends, np.repeat(factor[None], 2, axis=0))
    np.testing.assert_array_equal(without_ridge_connected(Density(narrow), modes).point, ends[:1])

"""Independent searches for a density from its modes, and whether they agree.

Weights are blind where no draw is: a ridge that bends away from every proposal goes on unseen,
with a short tail of weights.  So Hamiltonian walks from the draws, which follow the gradient
along it, tell whether they leave what the proposals cover.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats import ess, rhat
from numpy.typing import NDArray

from pymc_gradmatch.exact.importance import (
    PER_COORDINATE,
    ImpossibleError,
    LogDensity,
    Mixture,
    Pool,
    Search,
    Weighted,
    fit_mixture,
    log_sum,
    reliable_k,
    search,
    weigh,
)
from pymc_gradmatch.exact.modes import (
    Differentiable,
    Local,
    apart_from_ridges,
    mixture_of,
    ridges_from,
)
from pymc_gradmatch.reporting import silence

WIDER = 2.0  # of the second search's first proposal, in standard deviations of the whole
DRAWS = (1_000, 6_000, 6_000, 6_000)
EACH = 100  # the same, for each coordinate, if that is more
WORTH = 8  # draws of the result, to one effective draw of each search at least
ERRORS = 4.0  # Monte Carlo standard errors that agreement allows for
CLOSE = 0.15  # standard deviations, or of a log, that do not matter
TINY = 1e-300  # the variance where one draw has all the weight
COARSE = 0.6  # of the same, allowed for: with larger errors agreement says nothing
CONVERGED, EFFECTIVE = 1.01, 400  # R-hat, and effective draws of four chains (Vehtari et al. 2021)
DIVERGING = 1e-3  # share of draws
TAIL = (0.05, 0.95)  # quantiles, of which the effective draws count as well
WORTH_LEFT = 0.9  # share of the draws, by weights for the tolerance; it is 1.00 in all studies

WALKERS = 48
TIME = 6.0  # of a walk: what takes a standard deviation of the draws to be passed is one
MOST_STEPS = 200
FIRST_STEP, SHORTEST_STEP = 0.5, 0.01
KEPT = 0.8  # mean acceptance after two steps
ENERGY = 3.0  # that a walk may lose by its steps
FEWEST_TELLING = 0.9 * WALKERS  # that keep it for a step: all do but where a ridge is too thin
OUTERMOST = 0.01  # share of the draws on each side of a coordinate, from which half of walks start
CHANCE = 1e-3  # that walks within the target are taken for ones that leave
LIGHTEST = 0.1  # tail that weights are taken to have at least
NEAREST = 1.0  # log of a ratio above the largest, at least


class Modes(NamedTuple):
    """Modes that were climbed to.

    Attributes
    ----------
    points : array of float
        Shape ``(mode, n)``, the highest first.
    shares : array of float
        Of the weights, those of draws at which the normal approximation of a mode is
        the highest of all.
    nearest : array of int
        Of which mode that is, for every draw.
    """

    points: NDArray[np.float64]
    shares: NDArray[np.float64]
    nearest: NDArray[np.intp]


class Walks(NamedTuple):
    """Where walks went.

    Attributes
    ----------
    points : array of float
        All points passed, shape ``(point, n)``.
    n_leaving : int
        How many of the walks left what the proposal covers.
    n_telling : int
        How many kept their energy for a step at least: the others say nothing.
    """

    points: NDArray[np.float64]
    n_leaving: int
    n_telling: int


class Proposed(NamedTuple):
    """The mixture of all proposals, and logs of the weights of its draws before smoothing."""

    mixture: Mixture
    log_ratio: NDArray[np.float64]


class Chained(NamedTuple):
    """What chains of NUTS say of themselves.

    Attributes
    ----------
    r_hat : float
        The largest of all coordinates.
    n_divergences, n_draws : int
        How many of how many draws diverged.
    worth : float
        Share of the draws that is left by weights for more exact solutions than the chains had.
    """

    r_hat: float
    n_divergences: int
    n_draws: int
    worth: float

    @property
    def few_diverged(self) -> bool:
        """Whether next to none of the draws diverged."""
        return self.n_divergences <= DIVERGING * self.n_draws


class Coverage(NamedTuple):
    """What the searches found, together and each for itself; or chains, in their place.

    Attributes
    ----------
    weighted : Weighted
        The draws of all searches with the weights that they have together.
    disagreement : pandas.DataFrame
        One row per coordinate and one for the evidence: how far two searches are
        apart at most in its ``mean`` (standard deviations) and in its ``log_sd``, beyond
        four Monte Carlo errors, and these errors, ``mean_allowed`` and
        ``log_sd_allowed``.
    n_searches, n_rounds : int
        How many searches there were, and rounds in all.
    covariance : array of float
        Of the coordinates.
    estimates : dict of str to array of float
        ``mean`` and ``log_sd`` of every coordinate, the evidence last, and their errors,
        each by search, shape ``(search, coordinate + 1)``.
    walks : Walks
        From the draws; none where these are not reliable anyhow, or come of chains.
    modes : Modes
        Of the target.
    n_unfinished : int
        Walks along ridges that had not come to their end.
    proposed : Proposed or None
        What the draws of searches are draws of.
    chained : Chained or None
        What chains say of themselves.
    """

    weighted: Weighted
    disagreement: pd.DataFrame
    n_searches: int
    n_rounds: int
    covariance: NDArray[np.float64]
    estimates: dict[str, NDArray[np.float64]]
    walks: Walks
    modes: Modes
    n_unfinished: int = 0
    proposed: Proposed | None = None
    chained: Chained | None = None

    @property
    def agrees(self) -> bool:
        """Whether the searches agree within their errors."""
        return bool((self.disagreement[["mean", "log_sd"]].to_numpy() <= CLOSE).all())

    @property
    def is_precise(self) -> bool:
        """Whether these errors are small enough for agreement to mean something."""
        return self.largest_error <= COARSE

    @property
    def largest_error(self) -> float:
        """The largest of these errors, in standard deviations."""
        return float(self.disagreement[["mean_allowed", "log_sd_allowed"]].to_numpy().max())

    @property
    def is_reliable(self) -> bool:
        """Whether k is small enough, the searches agree on good evidence, and no walk objects.

        Of chains, whether they have converged.
        """
        if (said := self.chained) is not None:
            converged = said.r_hat < CONVERGED and self.weighted.n_effective >= EFFECTIVE
            return converged and said.few_diverged and said.worth >= WORTH_LEFT
        return (
            self.weighted.is_reliable
            and self.agrees
            and self.is_precise
            and not self.walks.n_leaving
            and self.walks.n_telling >= FEWEST_TELLING
            and not self.n_unfinished
        )


class Gradual(Differentiable, Protocol):
    """A log density that can be expanded, and has a gradient at less cost."""

    def with_gradient(
        self, phi: NDArray[np.float64], widths: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Evaluate it and its gradient at points, around which it is so many widths wide."""
        ...


@np.errstate(over="ignore", invalid="ignore")  # squares, where a posterior goes on for ever
def cover(
    target: Gradual,
    modes: Local,
    n_draws: int,
    rng: np.random.Generator,
    around: Mixture | None = None,
    attempts: int = len(DRAWS),
    say: Callable[[str], None] = silence,
) -> Coverage:
    """Search for a target from its modes, twice, and compare what is found.

    One starts from the modes and the ridges that lead away from them, the other from a single,
    wider distribution.  Where they disagree, or walks from the draws leave what they cover, each
    starts again from all that was found.

    Parameters
    ----------
    target : callable
        Maps points ``(draw, coordinate)`` to log densities, -inf for none.
    modes : Local
        Its modes, the highest first.
    n_draws : int
        Draws of the result, of which a quarter at least should be effective.
    rng : numpy.random.Generator
        Source of the draws.
    around : Mixture, optional
        What to start from in the place of modes and ridges: what draws of the target by another
        sampler were fitted by.
    attempts : int
        At most so many.
    say : callable, optional
        Is told what is being done, and what remains.

    Returns
    -------
    Coverage
        Of the first attempt with a reliable k and searches that agree, else of the last, or that
        of which both searches were given up.
    """
    n_unfinished, n_rounds = 0, 0
    if around is None:
        say("walking along ridges from all of them")
        ridges, modes = ridges_from(target, modes), apart_from_ridges(target, modes, say)
        around, n_unfinished = ridges.mixture, ridges.n_unfinished
    starts = [around.defended(around.as_one(WIDER)), around.as_one(WIDER)]
    n_effective = n_draws / WORTH
    for attempt, least in enumerate(DRAWS[:attempts]):
        n_searching = max(least, EACH * modes.point.shape[1])
        searches = []
        for number, start in enumerate(starts, start=1):
            doing = f"attempt {attempt + 1} of {attempts}, search {number} of 2"
            searches.append(
                _search(
                    target, start, around, n_searching, n_effective, rng,
                    gives_up=attempt > 0, say=lambda words, doing=doing: say(f"{doing}, {words}"),
                )
            )  # fmt: skip
        n_rounds += sum(found.pool.n_rounds for found in searches)
        coverage = _together([one.pool for one in searches], modes, n_unfinished)
        agrees = coverage.is_reliable
        if agrees:
            coverage = coverage._replace(walks=walk(target, coverage, rng))
        ended = [one.proposal for one in searches]
        if coverage.walks.n_leaving:
            ended.append(fit_mixture(coverage.walks.points, rng).stretched())
        elif agrees or attempt >= len(DRAWS) - 2 or all(one.is_given_up for one in searches):
            break
        starts = [Mixture.of(ended).without_the_least()] * len(starts)
    return coverage._replace(n_rounds=n_rounds)


def _search(
    target: LogDensity,
    start: Mixture,
    around: Mixture,
    n_draws: int,
    n_effective: float,
    rng,
    **settings: Any,
) -> Search:
    """Search from a start, or from the modes where the target is zero at all of its draws."""
    try:
        return search(target, start, n_draws, n_effective, rng, **settings)
    except ImpossibleError:
        return search(target, around, n_draws, n_effective, rng, **settings)


def weighed_once(target: LogDensity, modes: Local, rng: np.random.Generator) -> Coverage:
    """Weigh a few draws of the modes' normal approximations, with no search."""
    mixture, pools = mixture_of(modes), [Pool(), Pool()]
    for pool in pools:
        points = mixture.draw(DRAWS[0] // 2, rng)
        pool.add(mixture, points, target(points))
    return _together(pools, modes)._replace(n_rounds=1)


def sampled(
    target: LogDensity,
    modes: Local,
    chains: NDArray[np.float64],
    height: NDArray[np.float64],
    n_divergences: int,
) -> Coverage:
    """Judge chains by how far they agree, each in the place of a search.

    Parameters
    ----------
    target : callable
        Maps points ``(draw, coordinate)`` to log densities.
    modes : Local
        Its modes.
    chains : array of float
        Draws, shape ``(chain, draw, coordinate)``.
    height : array of float
        The log density that they are draws of, ``(chain, draw)``, which may be a little other
        than the target's: weights make up for the difference.
    n_divergences : int
        How many draws diverged.
    """
    points, n_chains = chains.reshape(-1, chains.shape[-1]), len(chains)
    log_ratio = target(points) - height.ravel()
    weights = np.exp(log_ratio - log_ratio.max())
    weights /= weights.sum()
    worth = 1 / np.square(weights).sum() / len(points)
    n_effective = np.minimum(ess(chains), ess(chains, method="tail", prob=TAIL))
    weighted = Weighted(points, weights, np.nan, float(worth * n_effective.min()), np.nan)
    each = n_effective / n_chains
    sd, nothing = chains.std(axis=1), np.full((n_chains, 1), np.nan)
    estimates = {
        "mean": np.hstack([chains.mean(axis=1), nothing]),
        "mean_error": np.hstack([sd / np.sqrt(each), nothing]),
        "log_sd": np.hstack([np.log(sd), nothing]),
        "log_sd_error": np.hstack([np.broadcast_to(1 / np.sqrt(2 * each), sd.shape), nothing]),
    }
    said = Chained(float(np.max(rhat(chains))), n_divergences, len(points), float(worth))
    return Coverage(
        weighted, _disagreement(estimates), n_chains, 0, np.cov(points.T, aweights=weights),
        estimates, Walks(points[:0], 0, WALKERS), _parted(modes, weighted), chained=said,
    )  # fmt: skip


def _together(pools: list[Pool], modes: Local, n_unfinished: int = 0) -> Coverage:
    """Weigh the draws of each search by itself and of all, and compare."""
    counts = np.array([len(pool.points) for pool in pools])
    points = np.concatenate([pool.points for pool in pools])
    # Each draw as one of all proposals: a part that one search lacks has the weight of the other's.
    parts = [
        np.concatenate(
            [one.log_proposal if one is own else own.mixture.log_density(one.points)
             for one in pools]
        )
        for own in pools
    ]  # fmt: skip
    height = np.concatenate([pool.height for pool in pools])
    shares = np.log(counts / counts.sum())
    log_ratio = height - log_sum(np.stack(parts) + shares[:, None])
    weighted = weigh(points, log_ratio)
    enough = np.maximum(weighted.weights, 1e-12)
    covariance = np.atleast_2d(np.cov(points.T, aweights=enough, ddof=0))
    moments = [_moments(pool.weighted) for pool in pools]
    estimates = {name: np.stack([of_run[name] for of_run in moments]) for name in moments[0]}
    return Coverage(
        weighted, _disagreement(estimates), len(pools), 0, covariance, estimates,
        Walks(points[:0], 0, WALKERS), _parted(modes, weighted), n_unfinished,
        Proposed(Mixture.of([pool.mixture for pool in pools], counts / counts.sum()), log_ratio),
    )  # fmt: skip


def _parted(modes: Local, weighted: Weighted) -> Modes:
    """Return modes with the weights of the draws at which theirs is the highest approximation."""
    has_arrived = modes.has_arrived
    modes = modes.only(has_arrived if has_arrived.any() else [0])
    away = weighted.points - modes.point[:, None]
    distances = np.linalg.norm(np.linalg.solve(modes.factor, away.mT), axis=1)
    highest = (modes.height[:, None] - 0.5 * np.square(distances)).argmax(axis=0)
    shares = np.bincount(highest, weighted.weights, len(modes.height))
    return Modes(modes.point, shares, highest)


def _disagreement(estimates: dict[str, NDArray[np.float64]]) -> pd.DataFrame:
    """Return by how much runs differ at most, beyond the errors that they are known to have."""
    columns = {}
    for name in ("mean", "log_sd"):
        values, errors = estimates[name], estimates[f"{name}_error"]
        if name == "mean":
            scale = np.exp(estimates["log_sd"]).mean(axis=0)
            values, errors = values / scale, errors / scale
        with np.errstate(invalid="ignore"):  # two without evidence, which are not apart
            apart = np.nan_to_num(np.abs(values[:, None] - values), nan=0.0, posinf=np.inf)
        allowed = ERRORS * np.hypot(errors[:, None], errors)
        columns[name] = np.max(apart - allowed, axis=(0, 1))
        columns[f"{name}_allowed"] = allowed.max(axis=(0, 1))
    return pd.DataFrame(columns).clip(lower=0)


def _moments(run: Weighted) -> dict[str, NDArray[np.float64]]:
    """Return means and logs of standard deviations, the evidence last, and their errors."""
    weights = run.weights[:, None]
    mean = (weights * run.points).sum(axis=0)
    away = np.square(run.points - mean)
    variance = (weights * away).sum(axis=0)
    mean_error = np.sqrt((weights**2 * away).sum(axis=0))
    variance_error = np.sqrt((weights**2 * np.square(away - variance)).sum(axis=0))
    n = len(run.weights)
    evidence_error = np.sqrt(max(n / max(run.n_effective, 1) - 1, 0) / n)
    return {
        "mean": np.append(mean, run.log_evidence),
        "mean_error": np.append(mean_error, evidence_error),
        "log_sd": np.append(0.5 * np.log(variance + TINY), 0.0),
        "log_sd_error": np.append(0.5 * variance_error / (variance + TINY), 0.0),
    }


def searched(found: Coverage, names: Sequence[str]) -> xr.Dataset:
    """Return what each search found, as the group ``searches`` of a result's draws.

    ``mean`` and ``log_sd`` of every unconstrained coordinate with their Monte Carlo errors,
    dims ``(search, unknown)``, the evidence of each search, the weights, and k.
    """
    by_search = ("search", "unknown")
    columns = {name: (by_search, values[:, :-1]) for name, values in found.estimates.items()}
    evidence = {
        "log_evidence": ("search", found.estimates["mean"][:, -1]),
        "log_evidence_error": ("search", found.estimates["mean_error"][:, -1]),
    }
    weighted = found.weighted
    return xr.Dataset(
        columns | evidence | {"weight": ("weighted_draw", weighted.weights)},
        {
            "search": range(found.n_searches),
            "unknown": [*names],
            "weighted_draw": range(len(weighted.weights)),
        },
        {
            "pareto_k": weighted.pareto_k,
            "reliable_k": reliable_k(len(weighted.weights)),
            "n_effective": weighted.n_effective,
            "errors_allowed": ERRORS,
        },
    )


def walk(target: Gradual, found: Coverage, rng: np.random.Generator) -> Walks:
    r"""Walk from some draws by Hamiltonian dynamics, and tell how many walks leave the proposal.

    Walks from draws of the target stay draws of it [1]_.  With a tail index k of the
    weights :math:`r = p / q`, the part of the target where r is :math:`e^m` times the
    largest of all draws, which has weight w itself, is about

    .. math:: w\, e^{-m (1 / k - 1)},

    so that a margin m follows from the chance that one of the walks comes there.

    Parameters
    ----------
    target : callable
        Maps points ``(draw, coordinate)`` to log densities.
    found : Coverage
        What searches found.  A walk takes its steps by the widths of the mode that its draw
        belongs to.
    rng : numpy.random.Generator
        Source of momenta, and of the choice of draws.

    References
    ----------
    .. [1] Neal, R. M. (2011). MCMC using Hamiltonian dynamics. In *Handbook of Markov Chain
       Monte Carlo*, chapter 5.
    """
    assert found.proposed is not None
    weighted, parts, (proposal, log_ratio) = found.weighted, found.modes.nearest, found.proposed
    weights = weighted.weights
    n_outer = WALKERS // 2
    chosen = rng.choice(len(weights), WALKERS - n_outer, p=weights)
    chosen = np.append(chosen, _outermost(weighted, n_outer, rng))
    start = weighted.points[chosen]
    hamiltonian = Hamiltonian(target, _factors(weighted, parts)[parts[chosen]])
    momentum = rng.normal(size=start.shape)
    step = FIRST_STEP
    while step > SHORTEST_STEP and hamiltonian.acceptance(start, momentum, step) < KEPT:
        step /= 2
    n_steps = min(MOST_STEPS, int(np.ceil(TIME / step)))
    points, height, energy = hamiltonian.trajectory(start, momentum, step, n_steps)
    tail = np.clip(weighted.pareto_k, LIGHTEST, 1 - LIGHTEST)
    margin = np.log(weights.max() * WALKERS / (OUTERMOST * CHANCE)) / (1 / tail - 1)
    kept = energy[1:] - energy[0] < ENERGY
    passed = points[1:][kept]
    leaves = np.zeros_like(kept)
    above = height[1:][kept] - proposal.log_density(passed)
    leaves[kept] = above > np.max(log_ratio) + max(margin, NEAREST)
    return Walks(passed, int(leaves.any(axis=0).sum()), int(kept.any(axis=0).sum()))


def _outermost(weighted: Weighted, n: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return the places of draws from the tails of coordinates, of each side as many."""
    points, weights = weighted.points, weighted.weights
    columns = np.resize(np.repeat(rng.permutation(points.shape[1]), 2), n)
    shares = OUTERMOST * rng.random(n)
    shares[1::2] = 1 - shares[1::2]
    chosen = []
    for column, share in zip(columns, shares, strict=True):
        order = np.argsort(points[:, column])
        until = np.cumsum(weights[order])
        chosen.append(order[np.searchsorted(until, share * until[-1])])
    return np.array(chosen)


def _factors(weighted: Weighted, parts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return Cholesky factors of each part's covariance, of that of all where draws are few."""
    n = weighted.points.shape[1]
    covariances = []
    for part in range(parts.max() + 1):
        weights = np.where(parts == part, weighted.weights, 0)
        few = np.square(weights.sum()) <= PER_COORDINATE * n * np.square(weights).sum()
        covariances.append(np.cov(weighted.points.T, aweights=weighted.weights if few else weights))
    return np.linalg.cholesky(np.reshape(covariances, (-1, n, n)))


class Hamiltonian:
    """Dynamics of many walkers at once, in coordinates of unit width.

    Parameters
    ----------
    target : callable
        Maps points ``(draw, coordinate)`` to log densities.
    factor : array of float
        Of the covariance around each walker, shape ``(walker, n, n)``.
    """

    def __init__(self, target: Gradual, factor: NDArray[np.float64]):
        self.target, self.factor = target, factor
        self.widths = np.sqrt(np.square(factor).sum(axis=2).mean(axis=0))

    def with_gradient(
        self, points: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the log density and its gradient by z; nothing where that is unknown."""
        height, by = self.target.with_gradient(points, self.widths)
        slopes = np.einsum("wij,wi->wj", self.factor, by)
        is_known = np.isfinite(slopes).all(axis=1, keepdims=True)
        return np.where(np.isfinite(height), height, -np.inf), np.where(is_known, slopes, 0.0)

    def trajectory(
        self, points: NDArray[np.float64], momentum: NDArray[np.float64], step: float, n_steps: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return the points of leapfrog steps, and the log density and the energy at each.

        A walk that the steps are too long for runs away; its energy is then infinite.
        """
        height, slopes = self.with_gradient(points)
        passed, heights, momenta = [points], [height], [momentum]
        with np.errstate(over="ignore", invalid="ignore"):
            for _ in range(n_steps):
                half = momentum + step / 2 * slopes
                points = points + step * np.einsum("wij,wj->wi", self.factor, half)
                height, slopes = self.with_gradient(points)
                momentum = half + step / 2 * slopes
                passed.append(points)
                heights.append(height)
                momenta.append(momentum)
            kinetic = 0.5 * np.square(momenta).sum(axis=-1)
        return np.stack(passed), np.stack(heights), kinetic - heights

    def acceptance(self, points, momentum, step: float) -> float:
        """Return the mean probability that Metropolis' rule accepts two steps."""
        *_, energy = self.trajectory(points, momentum, step, 2)
        with np.errstate(invalid="ignore"):
            change = np.nan_to_num(energy[-1] - energy[0], nan=np.inf)
        return float(np.exp(-np.maximum(change, 0)).mean())

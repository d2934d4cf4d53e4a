"""Independent searches for a posterior from its modes, and whether they agree.

Importance weights cannot reveal a region without draws, such as a ridge that bends away from every
proposal.  So HMC trajectories from the draws, which follow the gradient along it, check whether
they leave the region that the proposals cover.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats import ess, rhat
from numpy.typing import NDArray

from pymc_gradmatch.exact.importance import (
    EFFECTIVE_PER_COORDINATE,
    AdaptiveSearch,
    LogDensity,
    Mixture,
    Pool,
    WeightedDraws,
    ZeroDensityError,
    adaptive_search,
    fit_mixture,
    log_sum_exp,
    pareto_smooth,
    reliable_k,
)
from pymc_gradmatch.exact.multistart import LocalApproximation
from pymc_gradmatch.exact.posterior import ExactPosterior
from pymc_gradmatch.exact.ridges import follow_ridges, mixture_of_modes, without_ridge_connected
from pymc_gradmatch.exact.solutions import Array
from pymc_gradmatch.reporting import largest_changes, silence

WIDE_START = 2.0  # width of the second search's first proposal, in standard deviations of the whole
DRAWS_PER_ROUND = (1_000, 6_000, 6_000, 6_000)  # of each attempt, at least
N_ERRORS = 4.0  # Monte Carlo standard errors that agreement allows for
MAX_DISAGREEMENT = 0.15  # in standard deviations, or in their logarithm, beyond these errors
MAX_ERROR = 0.6  # the same, of these errors: with larger ones agreement means nothing
MAX_R_HAT, MIN_EFFECTIVE = 1.01, 400  # of four chains (Vehtari et al. 2021)
MAX_DIVERGING = 1e-3  # share of the draws of chains
MIN_REMAINING = 0.9  # effective share of the draws of chains; it is 1.00 in all studies

N_TRAJECTORIES = 48
MIN_VALID = 0.9 * N_TRAJECTORIES  # that keep their energy: all do, unless a ridge is too thin
HMC_TIME = 6.0  # of a trajectory, in standard deviations of the draws
HMC_STEP = 0.5  # the largest
TAIL_SHARE = 0.01  # of the draws on each side of a coordinate, from which half of them start


class Condition(NamedTuple):
    """One condition of a passed verdict."""

    passed: bool  # whether it holds
    figure: Any  # the float, str, or list of str that it was judged by


class ModeShares(NamedTuple):
    """Modes and the draws that belong to them."""

    points: Array  # shape (mode, n), the highest first
    shares: Array  # of the weights
    nearest: NDArray[np.intp]
    """The mode of each draw: that whose normal approximation is the highest there."""


class HMCCheck(NamedTuple):
    """The result of :func:`hmc_check`."""

    points: Array  # all points of valid trajectories, shape (point, n)
    n_leaving: int  # how many trajectories left the region that the proposals cover
    n_valid: int  # how many kept their energy for a step at least


class ChainDiagnostics(NamedTuple):
    """Convergence of chains of NUTS."""

    r_hat: float  # the largest of all coordinates
    n_divergences: int
    n_draws: int
    remaining: float
    """Effective share of the draws, by weights for a smaller tolerance of the solver."""


class SearchResult(NamedTuple):
    """Weighted draws of several searches, or of chains, and how far these agree."""

    weighted: WeightedDraws  # the draws of all searches, weighted jointly
    disagreement: pd.DataFrame
    """One row per coordinate, and one for the evidence: the largest difference between two searches
    in ``mean`` (standard deviations) and ``log_sd`` beyond four Monte Carlo errors, and these
    errors, ``mean_allowed`` and ``log_sd_allowed``."""
    n_searches: int
    covariance: Array
    estimates: dict[str, Array]
    """``mean`` and ``log_sd`` of each coordinate, and last the evidence, with their errors, by
    search: shape ``(search, coordinate + 1)``."""
    modes: ModeShares
    hmc: HMCCheck = HMCCheck(np.empty((0, 0)), 0, N_TRAJECTORIES)
    n_rounds: int = 0  # of all searches
    n_unfinished: int = 0  # ridges that were not followed to their end
    proposal: Mixture | None = None  # the mixture of all proposals of searches
    log_ratio: Array | None = None  # logs of the importance ratios, before smoothing
    chains: ChainDiagnostics | None = None

    @property
    def is_reliable(self) -> bool:
        """Whether all conditions hold."""
        return all(condition.passed for condition in self.conditions.values())

    @property
    def conditions(self) -> dict[str, Condition]:
        """The conditions of reliable draws, by name: see :class:`Diagnostics`."""
        n_effective = self.weighted.n_effective
        if (chains := self.chains) is not None:
            few_diverge = chains.n_divergences <= MAX_DIVERGING * chains.n_draws
            return {
                "r_hat": Condition(chains.r_hat < MAX_R_HAT, chains.r_hat),
                "effective": Condition(n_effective >= MIN_EFFECTIVE, n_effective),
                "divergences": Condition(few_diverge, chains.n_divergences),
                "tolerance": Condition(chains.remaining >= MIN_REMAINING, chains.remaining),
            }
        differences = self.disagreement[["mean", "log_sd"]]
        error = float(self.disagreement[["mean_allowed", "log_sd_allowed"]].to_numpy().max())
        n_leaving, n_valid = self.hmc.n_leaving, self.hmc.n_valid
        agree = bool((differences.to_numpy() <= MAX_DISAGREEMENT).all())
        return {
            "weights": Condition(self.weighted.is_reliable, self.weighted.pareto_k),
            "searches_agree": Condition(agree, largest_changes(differences.max(axis=1))),
            "errors": Condition(error <= MAX_ERROR, error),
            "walks": Condition(not n_leaving, n_leaving),
            "walks_tell": Condition(n_valid >= MIN_VALID, n_valid),
            "ridges": Condition(not self.n_unfinished, self.n_unfinished),
        }


@np.errstate(over="ignore", invalid="ignore")  # squares, where a posterior is improper
def run_searches(
    target: ExactPosterior,
    modes: LocalApproximation,
    n_draws: int,
    rng: np.random.Generator,
    around: Mixture | None = None,
    attempts: int = len(DRAWS_PER_ROUND),
    report: Callable[[str], None] = silence,
) -> SearchResult:
    """Search twice for a target from its modes, and compare the results.

    One search starts from the modes, the highest first, and the ridges that lead away from them, or
    from ``around``, such as a fit to draws of another sampler; the other from a single, wider
    distribution.  Where they disagree, or HMC trajectories from the draws leave the region that
    they cover, each starts again from all that was found.  A quarter of the ``n_draws`` of the
    result at least should be effective.
    """
    n_rounds, n_unfinished = 0, 0
    if around is None:
        report("following ridges from all modes")
        ridges = follow_ridges(target, modes)
        modes = without_ridge_connected(target, modes, report)
        around, n_unfinished = ridges.mixture, ridges.n_unfinished
    wide = around.moment_matched(WIDE_START)
    starts = [around.defensive(wide), wide]
    for attempt, least in enumerate(DRAWS_PER_ROUND[:attempts]):
        n_per_round = max(least, 100 * modes.point.shape[1])
        searches = []
        for number, start in enumerate(starts, start=1):
            doing = f"attempt {attempt + 1} of {attempts}, search {number} of 2"
            searches.append(
                _search(
                    target, start, around, n_per_round, n_draws / 8, rng, gives_up=attempt > 0,
                    report=lambda words, doing=doing: report(f"{doing}, {words}"),
                )
            )  # fmt: skip
        n_rounds += sum(one.pool.n_rounds for one in searches)
        found = _combined([one.pool for one in searches], modes, n_unfinished)
        weighted = found.weighted
        is_enough = weighted.has_variance and weighted.n_effective >= n_draws / 4
        is_reliable = found.is_reliable and (is_enough or attempt > 0)
        if is_reliable:
            found = found._replace(hmc=hmc_check(target, found, rng))
        proposals = [one.proposal for one in searches]
        if found.hmc.n_leaving:
            proposals.append(fit_mixture(found.hmc.points, rng).stretched())
        elif (
            is_reliable
            or attempt >= len(DRAWS_PER_ROUND) - 2
            or all(one.is_given_up for one in searches)
        ):
            break
        starts = [Mixture.combined(proposals).pruned()] * len(starts)
    return found._replace(n_rounds=n_rounds)


def _search(
    target: LogDensity, start: Mixture, around: Mixture, *given: Any, **settings: Any
) -> AdaptiveSearch:
    """Search from a start, or from the modes where the target is zero at all draws of the start."""
    try:
        return adaptive_search(target, start, *given, **settings)
    except ZeroDensityError:
        return adaptive_search(target, around, *given, **settings)


def weight_normal_approximations(
    target: LogDensity, modes: LocalApproximation, rng: np.random.Generator
) -> SearchResult:
    """Return weighted draws of the normal approximations at modes, without a search."""
    mixture, pools = mixture_of_modes(modes), [Pool(), Pool()]
    for pool in pools:
        points = mixture.draw(DRAWS_PER_ROUND[0] // 2, rng)
        pool.add(mixture, points, target(points))
    return _combined(pools, modes)._replace(n_rounds=1)


def result_of_chains(
    target: LogDensity,
    modes: LocalApproximation,
    chains: Array,
    log_density: Array,
    n_divergences: int,
) -> SearchResult:
    """Return chains, shape ``(chain, draw, coordinate)``, as a result, with their convergence.

    Their own log density, ``(chain, draw)``, may differ slightly from the target's, as by the
    tolerance of a solver, for which weights correct.
    """
    points, n_chains = chains.reshape(-1, chains.shape[-1]), len(chains)
    log_ratio = target(points) - log_density.ravel()
    weights = np.exp(log_ratio - log_ratio.max())
    weights /= weights.sum()
    remaining = 1 / np.square(weights).sum() / len(points)
    n_effective = np.minimum(ess(chains), ess(chains, method="tail", prob=(0.05, 0.95)))
    weighted = WeightedDraws(points, weights, np.nan, float(remaining * n_effective.min()), np.nan)
    per_chain = n_effective / n_chains
    sd, missing = chains.std(axis=1), np.full((n_chains, 1), np.nan)
    estimates = {
        "mean": np.hstack([chains.mean(axis=1), missing]),
        "mean_error": np.hstack([sd / np.sqrt(per_chain), missing]),
        "log_sd": np.hstack([np.log(sd), missing]),
        "log_sd_error": np.hstack([np.broadcast_to(1 / np.sqrt(2 * per_chain), sd.shape), missing]),
    }
    return SearchResult(
        weighted, _disagreement(estimates), n_chains, np.cov(points.T, aweights=weights), estimates,
        _mode_shares(modes, weighted), chains=ChainDiagnostics(
            float(np.max(rhat(chains))), n_divergences, len(points), float(remaining)
        ),
    )  # fmt: skip


def _combined(pools: list[Pool], modes: LocalApproximation, n_unfinished: int = 0) -> SearchResult:
    """Weight the draws of searches jointly, and compare the estimates of each."""
    counts = np.array([len(pool.points) for pool in pools])
    points = np.concatenate([pool.points for pool in pools])
    # Each draw is weighted as one of the mixture of all proposals, so that a region that one search
    # does not cover has the weight of the other's draws.
    proposals = [
        np.concatenate(
            [one.log_proposal if one is own else own.mixture.log_density(one.points)
             for one in pools]
        )
        for own in pools
    ]  # fmt: skip
    log_density = np.concatenate([pool.log_density for pool in pools])
    shares = np.log(counts / counts.sum())
    log_ratio = log_density - log_sum_exp(np.stack(proposals) + shares[:, None])
    weighted = pareto_smooth(points, log_ratio)
    positive = np.maximum(weighted.weights, 1e-12)
    covariance = np.atleast_2d(np.cov(points.T, aweights=positive, ddof=0))
    moments = [_moments(pool.weighted) for pool in pools]
    estimates = {name: np.stack([of_run[name] for of_run in moments]) for name in moments[0]}
    return SearchResult(
        weighted, _disagreement(estimates), len(pools), covariance, estimates,
        _mode_shares(modes, weighted), n_unfinished=n_unfinished, log_ratio=log_ratio,
        proposal=Mixture.combined([pool.mixture for pool in pools], counts / counts.sum()),
    )  # fmt: skip


def _mode_shares(modes: LocalApproximation, weighted: WeightedDraws) -> ModeShares:
    """Assign draws to the modes whose normal approximations are highest there."""
    has_converged = modes.has_converged
    modes = modes.select(has_converged if has_converged.any() else [0])
    away = weighted.points - modes.point[:, None]
    distances = np.linalg.norm(np.linalg.solve(modes.factor, away.mT), axis=1)
    nearest = (modes.log_density[:, None] - 0.5 * np.square(distances)).argmax(axis=0)
    shares = np.bincount(nearest, weighted.weights, len(modes.point))
    return ModeShares(modes.point, shares, nearest)


def _disagreement(estimates: dict[str, Array]) -> pd.DataFrame:
    """Return the largest differences between searches beyond their errors."""
    columns = {}
    for name in ("mean", "log_sd"):
        values, errors = estimates[name], estimates[f"{name}_error"]
        if name == "mean":
            scale = np.exp(estimates["log_sd"]).mean(axis=0)
            values, errors = values / scale, errors / scale
        with np.errstate(invalid="ignore"):  # of two searches without evidence
            apart = np.nan_to_num(np.abs(values[:, None] - values), nan=0.0, posinf=np.inf)
        allowed = N_ERRORS * np.hypot(errors[:, None], errors)
        columns[name] = np.max(apart - allowed, axis=(0, 1))
        columns[f"{name}_allowed"] = allowed.max(axis=(0, 1))
    return pd.DataFrame(columns).clip(lower=0)


def _moments(run: WeightedDraws) -> dict[str, Array]:
    """Return means and logs of standard deviations, the evidence last, and their errors."""
    weights, n = run.weights[:, None], len(run.weights)
    mean = (weights * run.points).sum(axis=0)
    away = np.square(run.points - mean)
    variance = (weights * away).sum(axis=0)
    mean_error = np.sqrt((weights**2 * away).sum(axis=0))
    variance_error = np.sqrt((weights**2 * np.square(away - variance)).sum(axis=0))
    evidence_error = np.sqrt(max(n / max(run.n_effective, 1) - 1, 0) / n)
    variance = variance + 1e-300  # zero where one draw has all the weight
    return {
        "mean": np.append(mean, run.log_evidence),
        "mean_error": np.append(mean_error, evidence_error),
        "log_sd": np.append(0.5 * np.log(variance), 0.0),
        "log_sd_error": np.append(0.5 * variance_error / variance, 0.0),
    }


def searches_dataset(found: SearchResult, names: Sequence[str]) -> xr.Dataset:
    """Return the estimates of each search, as the group ``searches`` of a result's draws.

    ``mean`` and ``log_sd`` of every unconstrained coordinate with their Monte Carlo errors,
    dims ``(search, unknown)``, the evidence of each search, the weights, and k.
    """
    columns = {n: (("search", "unknown"), v[:, :-1]) for n, v in found.estimates.items()}
    weighted = found.weighted
    others = {
        "log_evidence": ("search", found.estimates["mean"][:, -1]),
        "log_evidence_error": ("search", found.estimates["mean_error"][:, -1]),
        "weight": ("weighted_draw", weighted.weights),
    }
    return xr.Dataset(
        columns | others,
        {
            "search": range(found.n_searches),
            "unknown": [*names],
            "weighted_draw": range(len(weighted.weights)),
        },
        {
            "pareto_k": weighted.pareto_k,
            "reliable_k": reliable_k(len(weighted.weights)),
            "n_effective": weighted.n_effective,
            "errors_allowed": N_ERRORS,
        },
    )


def hmc_check(target: ExactPosterior, found: SearchResult, rng: np.random.Generator) -> HMCCheck:
    r"""Run HMC trajectories from some draws, and count those that leave the proposals' region.

    Points of trajectories from draws of the target are draws of it [1]_.  With a tail index k of
    the weights :math:`r = p / q`, the part of the target in which r is :math:`e^m` times the
    largest of all draws, whose weight is w, has a probability of about

    .. math:: w\, e^{-m (1 / k - 1)},

    so a margin m follows from the chance (one in a thousand) that a trajectory enters it.

    References
    ----------
    .. [1] Neal, R. M. (2011). MCMC using Hamiltonian dynamics. In *Handbook of Markov Chain
       Monte Carlo*, chapter 5.
    """
    weighted, parts = found.weighted, found.modes.nearest
    weights = weighted.weights
    n_outer = N_TRAJECTORIES // 2
    chosen = rng.choice(len(weights), N_TRAJECTORIES - n_outer, p=weights)
    chosen = np.append(chosen, _tail_draws(weighted, n_outer, rng))
    start = weighted.points[chosen]
    factor = _covariance_factors(weighted, parts)[parts[chosen]]
    momentum = rng.normal(size=start.shape)
    step = HMC_STEP
    while step > 0.01 and _acceptance(leapfrog(target, factor, start, momentum, step, 2)[2]) < 0.8:
        step /= 2
    n_steps = min(200, int(np.ceil(HMC_TIME / step)))
    points, log_density, energy = leapfrog(target, factor, start, momentum, step, n_steps)
    k = np.clip(weighted.pareto_k, 0.1, 0.9)
    margin = np.log(weights.max() * N_TRAJECTORIES / (TAIL_SHARE * 1e-3)) / (1 / k - 1)
    is_valid = energy[1:] - energy[0] < 3.0
    passed = points[1:][is_valid]
    leaves = np.zeros_like(is_valid)
    assert found.proposal is not None
    assert found.log_ratio is not None
    log_ratio = log_density[1:][is_valid] - found.proposal.log_density(passed)
    leaves[is_valid] = log_ratio > np.max(found.log_ratio) + max(margin, 1.0)
    return HMCCheck(passed, int(leaves.any(axis=0).sum()), int(is_valid.any(axis=0).sum()))


def _tail_draws(weighted: WeightedDraws, n: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return indices of draws from the tails of coordinates, of both sides as many."""
    points, weights = weighted.points, weighted.weights
    columns = np.resize(np.repeat(rng.permutation(points.shape[1]), 2), n)
    shares = TAIL_SHARE * rng.random(n)
    shares[1::2] = 1 - shares[1::2]
    chosen = []
    for column, share in zip(columns, shares, strict=True):
        order = np.argsort(points[:, column])
        cumulative = np.cumsum(weights[order])
        chosen.append(order[np.searchsorted(cumulative, share * cumulative[-1])])
    return np.array(chosen)


def _covariance_factors(weighted: WeightedDraws, parts: NDArray[np.intp]) -> Array:
    """Return Cholesky factors of each part's covariance, or of the whole's where draws are few."""
    n = weighted.points.shape[1]
    covariances = []
    for part in range(parts.max() + 1):
        weights = np.where(parts == part, weighted.weights, 0)
        n_needed = EFFECTIVE_PER_COORDINATE * n
        if np.square(weights.sum()) <= n_needed * np.square(weights).sum():
            weights = weighted.weights
        covariances.append(np.cov(weighted.points.T, aweights=weights))
    return np.linalg.cholesky(np.reshape(covariances, (-1, n, n)))


def leapfrog(
    target: ExactPosterior, factor: Array, points: Array, momentum: Array, step: float, n_steps: int
) -> tuple[Array, Array, Array]:
    """Return points, log densities and energies of trajectories, the first axis by step.

    The factors, shape ``(point, n, n)``, are those of the inverse mass matrices.  The energy of a
    trajectory that diverges is infinite.
    """
    widths = np.sqrt(np.square(factor).sum(axis=2).mean(axis=0))

    def value_and_gradient(points: Array) -> tuple[Array, Array]:
        log_density, by = target.value_and_gradient(points, widths)
        gradient = np.einsum("wij,wi->wj", factor, by)
        is_known = np.isfinite(gradient).all(axis=1, keepdims=True)
        log_density = np.where(np.isfinite(log_density), log_density, -np.inf)
        return log_density, np.where(is_known, gradient, 0.0)

    log_density, gradient = value_and_gradient(points)
    passed, log_densities, momenta = [points], [log_density], [momentum]
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(n_steps):
            half = momentum + step / 2 * gradient
            points = points + step * np.einsum("wij,wj->wi", factor, half)
            log_density, gradient = value_and_gradient(points)
            momentum = half + step / 2 * gradient
            passed.append(points)
            log_densities.append(log_density)
            momenta.append(momentum)
        kinetic = 0.5 * np.square(momenta).sum(axis=-1)
    return np.stack(passed), np.stack(log_densities), kinetic - log_densities


def _acceptance(energy: Array) -> float:
    """Return the mean Metropolis acceptance probability at the end of trajectories."""
    with np.errstate(invalid="ignore"):
        change = np.nan_to_num(energy[-1] - energy[0], nan=np.inf)
    return float(np.exp(-np.maximum(change, 0)).mean())

"""The verdict on draws of the exact posterior, and the conditions that it is made of."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.signal import find_peaks

from pymc_gradmatch.exact.importance import reliable_k
from pymc_gradmatch.exact.multistart import MAX_CHANCE_OF_NEW, ModeSearch
from pymc_gradmatch.exact.posterior import ExactPosterior
from pymc_gradmatch.exact.search import N_TRAJECTORIES, Condition, ModeShares, SearchResult
from pymc_gradmatch.exact.solutions import Array
from pymc_gradmatch.gp import Residuals, StateGP, poorly_fitted
from pymc_gradmatch.model import Constraint, equations
from pymc_gradmatch.ode import ODE

MIN_MODE_WEIGHT = 0.01  # of a mode that is mentioned
MAX_UNSOLVED = 5e-3  # share of the solutions of prior draws, which counts in a posterior, too


def residuals(target: ExactPosterior, point: Array) -> list[Residuals]:
    """Return the residuals at a point of each state with enough data.

    None if :func:`pymc.set_data` has replaced the data of the Gaussian process.
    """
    if target.has_other_data():
        return []
    variables, found = target.variables(point[None]), []
    for name, constraint in zip(target.states, target.constraints, strict=True):
        found += constraint.gp.residuals(variables[name][0], constraint.ode.states)
    return found


def describe_modes(shares: Array) -> str:
    """Return how many modes there are, and their weights, if there are several."""
    weights = [f"{share:.2f}" for share in shares if share > MIN_MODE_WEIGHT]
    if len(weights) < 2:
        return ""
    return f" It has {len(weights)} modes, of weights {', '.join(weights)}."


@dataclass(frozen=True)
class Diagnostics:
    """The figures and conditions that a verdict is made of.

    Attributes
    ----------
    method : str
        ``"importance sampling"`` or ``"NUTS"``.
    pareto_k : float
        Tail index of the importance weights; NaN for NUTS.
    n_effective : float
        One over the sum of the squared weights; for NUTS the smallest bulk or tail effective
        sample size.
    n_weighted : int
        Number of draws before resampling.
    r_hat : float
        The largest of all unconstrained coordinates; NaN for importance sampling.
    n_divergences : int
        Of the chains.
    n_searches, n_rounds : int
        Independent searches, or chains, and rounds of draws in all searches.
    n_climbs : int
        Local optimisations, from draws of the prior and other starts.
    n_walks : int
        HMC trajectories from the draws that kept their energy, of 48.
    n_solutions : int
        Solutions of the ODE, without those of chains.
    n_failed : dict of str to int
        How many of them failed, by reason.
    modes : pandas.DataFrame
        One row each: ``weight``, its share of the posterior, and ``reached``, how many local
        optimisations ended there.
    conditions : dict of str to Condition
        By name, whether each condition of a passed verdict holds, and its figure:

        - ``finished``: nothing stopped the search (what did);

        for importance sampling

        - ``weights``: Pareto k is below the limit for this number of draws;
        - ``searches_agree``: means, standard deviations and evidence of the searches differ by
          no more than their errors (the largest differences);
        - ``errors``: these errors are small (the largest, in standard deviations);
        - ``walks``: no HMC trajectory reaches a region without draws (how many do);
        - ``walks_tell``: at least 44 of 48 HMC trajectories keep their energy (how many do);
        - ``ridges``: less than half a percent of the posterior lies beyond the points to which its
          ridges were followed (at how many ends there is more);

        for NUTS

        - ``r_hat``: it is below 1.01;
        - ``effective``: there are at least 400 effective draws;
        - ``divergences``: at most one in a thousand draws diverged (how many did);
        - ``tolerance``: weights for more exact solutions leave nine tenths of the draws (the share
          that they leave);

        and for both

        - ``modes_repeat``: the end points of local optimisations repeat (the estimated chance,
          below 0.05, that one more would end at a new mode that counts);
        - ``explained``: residuals are neither autocorrelated nor large (states where they are);
        - ``no_aliases``: no state oscillates faster than equally spaced times resolve, unless
          another state or an input confirms it;
        - ``proper``: the density falls off along unknowns of flat prior (those where not);
        - ``solved``: solutions of draws of the prior did not run out of steps (the share that did).
    """

    method: str
    pareto_k: float
    n_effective: float
    n_weighted: int
    r_hat: float
    n_divergences: int
    n_searches: int
    n_rounds: int
    n_climbs: int
    n_walks: int
    n_solutions: int
    n_failed: dict[str, int]
    modes: pd.DataFrame
    conditions: dict[str, Condition]

    @property
    def passed(self) -> bool:
        """Whether all conditions hold."""
        return all(condition.passed for condition in self.conditions.values())

    def __repr__(self) -> str:
        return self.in_words()

    def in_words(self) -> str:
        """Return the verdict: whether draws are from the exact posterior, and if not, why."""
        if self.method == "NUTS":
            searches, agree = f"{self.n_searches} chains of NUTS", "have converged"
            figures = (
                f"R-hat {self.r_hat:.3f}, {self.n_effective:.0f} effective draws of "
                f"{self.n_weighted}, {self.n_divergences} divergences"
            )
        else:
            searches, agree = f"{self.n_searches} independent searches", "agree"
            figures = (
                f"Pareto k {self.pareto_k:.2f} ({reliable_k(self.n_weighted):.2f} is the limit), "
                f"{self.n_effective:.0f} effective draws of {self.n_weighted}, {self.n_rounds} "
                "rounds"
            )
        failed = (n for n in REASONS if n in self.conditions and not self.conditions[n].passed)
        if (name := next(failed, None)) is None:
            return f"These are draws from the exact posterior: {searches} {agree}, {figures}."
        figure = self.conditions[name].figure
        why = REASONS[name].format(
            figure=figure, listed=", ".join(figure) if isinstance(figure, list) else figure,
            figures=figures, searches=searches, agree=agree, walkers=N_TRAJECTORIES,
        )  # fmt: skip
        return f"These are not draws from the exact posterior: {why}."


# Why a verdict is withheld: the first condition that fails gives the reason.
REASONS = {
    "finished": (
        "{figure} before the searches had ended. They are draws of normal approximations at the "
        "modes, weighted: {figures}"
    ),
    "proper": (
        "the density does not fall off along {listed}, of flat prior, as far as the ODE can be "
        "integrated: this posterior has no finite volume, and there are no draws from it; "
        "expected a proper prior: {figures}"
    ),
    "solved": (
        "{figure:.1%} of the solutions of draws of the prior were out of steps: the ODE is too "
        "fast, or too stiff, over the time of the data to be solved there, and how likely such "
        "parameters are is not known; expected narrower priors of the rates that make it so, or a "
        "shorter time: {figures}"
    ),
    "no_aliases": (
        "{figure}. Such aliases fit alike, and there may be more of them; narrower priors rule "
        "them out, or times at unequal gaps: {figures}"
    ),
    "walks": (
        "{figure} of {walkers} Hamiltonian trajectories from the draws of {searches} lead to a "
        "region without draws: {figures}. The posterior extends beyond what they could cover"
    ),
    "walks_tell": (
        "only {figure} of {walkers} Hamiltonian trajectories from the draws, half of which start "
        "in the tails, keep their energy for a step: {figures}. Part of the posterior is a ridge "
        "too thin for their steps, and for the proposals to cover"
    ),
    "ridges": (
        "a ridge extends beyond the point to which it was followed, with a share of the posterior "
        "that matters: {figures}. It is longer than could be covered, or has no finite volume"
    ),
    "weights": "their weights are too uneven: {figures}",
    "searches_agree": (
        "{searches} disagree, beyond their errors most on {figure} (standard deviations): "
        "{figures}. The posterior is wider, or has more parts, than they could cover"
    ),
    "errors": "{searches} agree only because their Monte Carlo errors are large: {figures}",
    "r_hat": "{searches} have not mixed: {figures} (below 1.01 is expected of R-hat)",
    "effective": "{searches} have few effective draws: {figures} (at least 400 are expected)",
    "divergences": (
        "{figure} draws of {searches} diverged: {figures}. Part of the posterior, such as the neck "
        "of a hierarchy, is too narrow for their steps"
    ),
    "tolerance": (
        "{searches} solved the equations too roughly: weights leave {figure:.0%} of them: {figures}"
    ),
    "modes_repeat": (
        "there are more modes than local optimisations found: {figure:.0%} of them ended at one "
        "that no other reached: {figures}"
    ),
    "explained": (
        "{searches} {agree}, {figures}, but on a solution that leaves much of {listed} "
        "unexplained, and what it leaves is no mere noise: this is another mode, or the data "
        "follow other equations"
    ),
}


def diagnose(
    target: ExactPosterior, found: SearchResult, modes: ModeSearch, stopped: str = ""
) -> Diagnostics:
    """Return the diagnostics of draws, from modes by multi-start optimisation.

    ``stopped`` names what stopped the searches early, if anything did.
    """
    weighted, chains, best = found.weighted, found.chains, found.modes.points[0]
    poor_fit = poorly_fitted(residuals(target, best))
    improper = target.improper_coordinates(best, np.sqrt(np.diagonal(found.covariance)))
    aliases = _aliases(target, found.modes)
    chance, unsolved = modes.chance_of_new_mode, target.unsolved
    conditions = {
        "finished": Condition(not stopped, stopped),
        **found.conditions,
        "modes_repeat": Condition(chance <= MAX_CHANCE_OF_NEW, chance),
        "explained": Condition(not poor_fit, [repr(name) for name in poor_fit]),
        "no_aliases": Condition(not aliases, aliases),
        "proper": Condition(not improper, improper),
        "solved": Condition(unsolved <= MAX_UNSOLVED, unsolved),
    }
    return Diagnostics(
        method="importance sampling" if chains is None else "NUTS",
        pareto_k=weighted.pareto_k,
        n_effective=weighted.n_effective,
        n_weighted=len(weighted.weights),
        r_hat=np.nan if chains is None else chains.r_hat,
        n_divergences=0 if chains is None else chains.n_divergences,
        n_searches=found.n_searches,
        n_rounds=found.n_rounds,
        n_climbs=len(modes.end_points.point),
        n_walks=found.hmc.n_valid,
        n_solutions=target.n_solutions,
        n_failed=dict(target.failures),
        modes=pd.DataFrame(
            {"weight": found.modes.shares, "reached": modes.reached_near(found.modes.points)}
        ),
        conditions=conditions,
    )


def _aliases(target: ExactPosterior, modes: ModeShares) -> str:
    """Describe modes at which a state oscillates faster than its equally spaced data resolve.

    Solutions with further oscillations in each gap fit such data equally well.  States of an ODE
    with inputs or doses are not judged: these may cause the oscillations.
    """
    counted = np.flatnonzero(modes.shares > MIN_MODE_WEIGHT)
    times = [_denser(constraint.gp.t) for constraint in target.constraints]
    solutions = target.trajectories(modes.points[counted], times)
    fast = [
        (*one, mode)
        for constraint, t_each, x in zip(target.constraints, times, solutions, strict=True)
        for (ode, gp, by_mode), t in zip(
            _experiments(constraint, x), np.atleast_2d(t_each), strict=True
        )
        if not ode.is_nonautonomous
        for mode, solution in zip(counted, gp.transform_states(by_mode), strict=True)
        for one in _unresolved(gp, t, solution)
    ]
    share = modes.shares[[*{mode for *_, mode in fast}]].sum()
    if share <= MIN_MODE_WEIGHT:
        return ""
    n_turning, n_gaps, state, _ = max(fast)
    return (
        f"at modes with {share:.2f} of the weight states oscillate faster than the times of the "
        f"data resolve, {state!r} with {n_turning} turning points in {n_gaps} equal gaps"
    )


def _unresolved(gp: StateGP, t, solution) -> list[tuple[int, int, str]]:
    """Return turning points, gaps and names of states with more turning points than equal gaps.

    Not if another state, whose data resolve it, has as many.
    """
    observed = {k: times for k, times in enumerate(gp.data.times_of_each) if len(times) > 1}

    def n_turning(k: int, times) -> int:
        return _turning_points(solution[(t >= times[0]) & (t <= times[-1]), k], gp.scale[k])

    turning = {k: n_turning(k, times) for k, times in observed.items()}
    gaps = {k: np.diff(times) for k, times in observed.items()}
    equal = {k: np.isclose(gap, np.median(gap), rtol=1e-3).mean() > 0.5 for k, gap in gaps.items()}
    fast = [k for k, times in observed.items() if turning[k] >= len(times) and equal[k]]
    resolved = [k for k in observed if turning[k] and k not in fast]
    return [
        (turning[k], len(observed[k]) - 1, gp.states[k])
        for k in fast
        if not any(n_turning(other, observed[k]) >= turning[k] - 1 for other in resolved)
    ]


def _experiments(constraint: Constraint, x) -> list[tuple[ODE, StateGP, Array]]:
    """Return ODE, Gaussian process and solutions ``(mode, time, state)`` of each experiment."""
    ode, gp = constraint.ode, constraint.gp
    each = np.moveaxis(x, 1, 0) if gp.names else [x]
    return [*zip(equations(ode, gp), gp.members, each, strict=True)]


def _denser(t: Array) -> Array:
    """Return times with three more in each gap, unequally spaced, to find all turning points."""
    between = t[..., :-1, None] + np.diff(t)[..., None] * np.array([0.0, 0.236, 0.472, 0.764])
    return np.append(between.reshape(*t.shape[:-1], -1), t[..., -1:], axis=-1)


def _turning_points(path: Array, scale: float) -> int:
    """Count extrema with a prominence of 5% of the range, and of the data's scale."""
    if not np.isfinite(path).all():
        return 0
    prominence = 0.05 * max(np.ptp(path), scale)
    return sum(len(find_peaks(side, prominence=prominence)[0]) for side in (path, -path))

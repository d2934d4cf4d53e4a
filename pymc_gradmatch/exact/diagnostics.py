"""What a verdict on draws of the exact posterior is made of."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.signal import find_peaks

from pymc_gradmatch.exact.climb import UNKNOWN, Found
from pymc_gradmatch.exact.importance import reliable_k
from pymc_gradmatch.exact.posterior import ExactPosterior
from pymc_gradmatch.exact.search import (
    CONVERGED,
    EFFECTIVE,
    FEWEST_TELLING,
    WALKERS,
    WORTH_LEFT,
    Chained,
    Coverage,
    Modes,
)
from pymc_gradmatch.gp import Residuals, StateGP, unexplained
from pymc_gradmatch.model import Constraint, equations
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.reporting import furthest

SEARCHED, CHAINED = "importance sampling", "NUTS"
LITTLE = 0.01  # weight of a mode that need not be spoken of
PLACES = np.array([0.0, 0.236, 0.472, 0.764])  # between two times of the grid
LEAST_SWING = 0.05  # of a solution's range and of the data's scale, by which a turn counts
UNSOLVED = 5e-3  # of draws of the prior: a share of the posterior of which this is counts, too


def residuals(target: ExactPosterior, point: NDArray[np.float64]) -> list[Residuals]:
    """Return what the solution at a point leaves of each state with data enough to tell.

    Nothing of data that are not those any more that the Gaussian process was given.
    """
    if target.has_other_data():
        return []
    variables, found = target.variables(point[None]), []
    for name, constraint in zip(target.states, target.constraints, strict=True):
        found += constraint.gp.residuals(variables[name][0], constraint.ode.states)
    return found


def several(shares: NDArray[np.float64]) -> str:
    """Say how many modes there are, and their weights, if more than one counts."""
    counting = [share for share in shares if share > LITTLE]
    if len(counting) < 2:
        return ""
    listed = ", ".join(f"{share:.2f}" for share in counting)
    return f" It has {len(counting)} modes, of weights {listed}."


class Condition(NamedTuple):
    """One condition of a passed verdict.

    Attributes
    ----------
    passed : bool
        Whether it holds.
    figure : float, str, or list of str
        What it was judged by.
    """

    passed: bool
    figure: Any


@dataclass(frozen=True)
class Diagnostics:
    """What a verdict is made of.

    Attributes
    ----------
    method : str
        ``"importance sampling"`` or ``"NUTS"``.
    pareto_k : float
        Tail index of the weights; NaN of NUTS.
    n_effective : float
        One over the sum of the squared weights; of NUTS the least of bulk and tail effective
        sample sizes.
    n_weighted : int
        How many draws there are before they are resampled.
    r_hat : float
        The largest of all unconstrained coordinates; NaN of importance sampling.
    n_divergences : int
        Of the chains.
    n_searches, n_rounds : int
        Independent searches, or chains, and rounds of draws in all searches.
    n_climbs : int
        Climbs to modes, from draws of the prior and others.
    n_walks : int
        Hamiltonian trajectories from the draws that kept their energy, of 48.
    n_solutions : int
        Solutions of the ODE that were computed, but for those of chains.
    n_failed : dict of str to int
        How many of them failed, by what happened.
    modes : pandas.DataFrame
        One row each: ``weight``, its share of the posterior, and ``reached``, how many climbs
        ended there.
    conditions : dict of str to Condition
        By name, whether each condition of a passed verdict holds, and its figure:

        - ``finished``: nothing stopped the search (what did);

        of importance sampling

        - ``weights``: Pareto k is below what is reliable for so many draws;
        - ``searches_agree``: means, standard deviations and evidence of the searches differ by
          no more than their errors (the furthest of them);
        - ``errors``: these errors are small enough for that to mean something (the largest, in
          standard deviations);
        - ``walks``: none of these trajectories reaches a region without draws (how many do);
        - ``walks_tell``: at least 44 of these 48 trajectories keep their energy (how many do);
        - ``ridges``: less than half a percent of the posterior lies beyond the ends to which its
          ridges were followed (at how many ends there is more);

        of NUTS

        - ``r_hat``: it is below 1.01;
        - ``effective``: there are 400 effective draws;
        - ``divergences``: at most one in a thousand draws diverged (how many did);
        - ``tolerance``: weights for more exact solutions leave nine tenths of the draws (the share
          that they leave);

        and of both

        - ``modes_repeat``: ends of climbs repeat (the estimated chance, below 0.05, that
          one more climb would end at another one that counts);
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
        """Say whether draws are from the exact posterior, and if not, why."""
        if self.method == CHAINED:
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
        if self.passed:
            return f"These are draws from the exact posterior: {searches} {agree}, {figures}."
        failed = next(name for name in REASONS if not self._holds(name))
        figure = self.conditions[failed].figure
        listed = ", ".join(figure) if isinstance(figure, list) else figure
        why = REASONS[failed].format(
            figure=figure, listed=listed, figures=figures, searches=searches, agree=agree,
            walkers=WALKERS,
        )  # fmt: skip
        return f"These are not draws from the exact posterior: {why}."

    def _holds(self, name: str) -> bool:
        return name not in self.conditions or self.conditions[name].passed


# Why a verdict is withheld, the first that holds.
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
        "{figure} of {walkers} Hamiltonian trajectories from them lead to a region without draws "
        "of {searches}: {figures}. The posterior extends beyond what they could cover"
    ),
    "walks_tell": (
        "only {figure} of {walkers} Hamiltonian trajectories from them, half of which start in the "
        "tails, keep their energy for a step: {figures}. Part of the posterior is a ridge too thin "
        "for their steps, and for the proposals to cover"
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
        "there are more modes than climbs came to: {figure:.0%} of them ended at one that no "
        "other reached: {figures}"
    ),
    "explained": (
        "{searches} {agree}, {figures}, but on a solution that leaves much of {listed} "
        "unexplained, and what it leaves is no mere noise: this is another mode, or the data "
        "follow other equations"
    ),
}


def diagnosed(
    target: ExactPosterior, found: Coverage, climbed: Found, stopped: str = ""
) -> Diagnostics:
    """Judge draws by all that is known of them.

    Parameters
    ----------
    target : ExactPosterior
        The posterior.
    found : Coverage
        The draws.
    climbed : Found
        Where climbs from draws of the prior led.
    stopped : str
        What stopped the searches before their end, if anything did.
    """
    weighted = found.weighted
    strange = unexplained(residuals(target, found.modes.points[0]))
    sds = np.sqrt(np.diagonal(found.covariance))
    endless = target.endless(found.modes.points[0], sds)
    aliases = _aliases(target, found.modes)
    new, unsolved = climbed.new, target.unsolved
    conditions = {
        "finished": Condition(not stopped, stopped),
        **(_of_searches(found) if found.chained is None else _of_chains(found, found.chained)),
        "modes_repeat": Condition(new <= UNKNOWN, new),
        "explained": Condition(not strange, [repr(name) for name in strange]),
        "no_aliases": Condition(not aliases, aliases),
        "proper": Condition(not endless, endless),
        "solved": Condition(unsolved <= UNSOLVED, unsolved),
    }
    return Diagnostics(
        method=SEARCHED if found.chained is None else CHAINED,
        pareto_k=weighted.pareto_k,
        n_effective=weighted.n_effective,
        n_weighted=len(weighted.weights),
        r_hat=np.nan if found.chained is None else found.chained.r_hat,
        n_divergences=0 if found.chained is None else found.chained.n_divergences,
        n_searches=found.n_searches,
        n_rounds=found.n_rounds,
        n_climbs=len(climbed.ends.height),
        n_walks=found.walks.n_telling,
        n_solutions=target.n_solutions,
        n_failed=dict(target.failures),
        modes=pd.DataFrame(
            {"weight": found.modes.shares, "reached": climbed.near(found.modes.points)}
        ),
        conditions=conditions,
    )


def _of_searches(found: Coverage) -> dict[str, Condition]:
    """Return the conditions of draws of importance sampling."""
    furthest_apart = found.disagreement[["mean", "log_sd"]].max(axis=1)
    n_leaving, n_telling = found.walks.n_leaving, found.walks.n_telling
    return {
        "weights": Condition(found.weighted.is_reliable, found.weighted.pareto_k),
        "searches_agree": Condition(found.agrees, furthest(furthest_apart)),
        "errors": Condition(found.is_precise, found.largest_error),
        "walks": Condition(not n_leaving, n_leaving),
        "walks_tell": Condition(n_telling >= FEWEST_TELLING, n_telling),
        "ridges": Condition(not found.n_unfinished, found.n_unfinished),
    }


def _of_chains(found: Coverage, chained: Chained) -> dict[str, Condition]:
    """Return the conditions of draws of NUTS."""
    n_effective = found.weighted.n_effective
    return {
        "r_hat": Condition(chained.r_hat < CONVERGED, chained.r_hat),
        "effective": Condition(n_effective >= EFFECTIVE, n_effective),
        "divergences": Condition(chained.few_diverged, chained.n_divergences),
        "tolerance": Condition(chained.worth >= WORTH_LEFT, chained.worth),
    }


def _aliases(target: ExactPosterior, modes: Modes) -> str:
    """Tell of modes at which a state turns more often than it was observed, at equal gaps.

    A solution that turns once more in every gap, or twice, fits such data alike: there is no end
    of them.  Of states that known inputs or doses may turn this says nothing.
    """
    counting = np.flatnonzero(modes.shares > LITTLE)
    finer = [_finer(constraint.gp.t) for constraint in target.constraints]
    solutions = target.trajectories(modes.points[counting], finer)
    fast = [
        (*one, mode)
        for constraint, times, x in zip(target.constraints, finer, solutions, strict=True)
        for (ode, gp, by_mode), t in zip(
            _experiments(constraint, x), np.atleast_2d(times), strict=True
        )
        if not ode.is_nonautonomous
        for mode, solution in zip(counting, gp.levels_of(by_mode), strict=True)
        for one in _turning_unseen(gp, t, solution)
    ]
    share = modes.shares[[*{mode for *_, mode in fast}]].sum()
    if share <= LITTLE:
        return ""
    n_turns, n_gaps, state, _ = max(fast)
    return (
        f"at modes with {share:.2f} of the weight states oscillate faster than the times of the "
        f"data resolve, {state!r} with {n_turns} turning points in {n_gaps} equal gaps"
    )


def _turning_unseen(gp: StateGP, t, solution) -> list[tuple[int, int, str]]:
    """Return turns, gaps and names of states that turn more often than equal gaps resolve.

    But for those beside which another one, which is seen more finely, turns as often.
    """
    seen = {k: times for k, times in enumerate(gp.data.times_of_each) if len(times) > 1}

    def n_turns(k: int, times) -> int:
        return _turns(solution[(t >= times[0]) & (t <= times[-1]), k], gp.scale[k])

    turning = {k: n_turns(k, times) for k, times in seen.items()}
    fast = [k for k in seen if turning[k] > len(seen[k]) - 1 and _mostly_equal(seen[k])]
    fine = [k for k in seen if turning[k] and k not in fast]
    return [
        (turning[k], len(seen[k]) - 1, gp.states[k])
        for k in fast
        if not any(n_turns(other, seen[k]) >= turning[k] - 1 for other in fine)
    ]


def _mostly_equal(times) -> bool:
    gaps = np.diff(times)
    return bool(np.isclose(gaps, np.median(gaps), rtol=1e-3).mean() > 0.5)


def _experiments(constraint: Constraint, x) -> list[tuple[ODE, StateGP, NDArray[np.float64]]]:
    """Return ODE, Gaussian process and solutions ``(mode, time, state)`` of each experiment."""
    ode, gp = constraint.ode, constraint.gp
    each = np.moveaxis(x, 1, 0) if gp.names else [x]
    return [*zip(equations(ode, gp), gp.members, each, strict=True)]


def _finer(t: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return times with others between them, at uneven places: no turn hides between these."""
    between = t[..., :-1, None] + np.diff(t)[..., None] * PLACES
    return np.append(between.reshape(*t.shape[:-1], -1), t[..., -1:], axis=-1)


def _turns(path: NDArray[np.float64], scale: float) -> int:
    """Count how often a state turns, by more than a little of its range and the data's scale."""
    if not np.isfinite(path).all():
        return 0
    swing = LEAST_SWING * max(np.ptp(path), scale)
    return sum(len(find_peaks(side, prominence=swing)[0]) for side in (path, -path))

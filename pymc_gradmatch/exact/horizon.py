r"""A growing horizon: climbs to the modes of long series, by way of their first pieces.

The longer a series of an oscillation, or of chaos, the narrower is the mode of its posterior, and
the more others are beside it, of solutions that fall out of step somewhere.  No climb from a draw
of the prior ends at the right one.  Given the data of a first piece alone most do, and the
posterior of a piece tells where that of a longer one is:

.. math::

    p(\phi \mid y_{1:n}) \propto p(\phi)\; p(y_{1:n} \mid \phi), \qquad n = n_1 < n_2 < \dots

so climbs of each piece begin at the modes of the one before, and at those draws of normals around
these that the longer piece likes best, to the end.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray

from pymc_gradmatch._pymc import without_checks
from pymc_gradmatch.exact.climb import NEAR, Found, climb, climbs
from pymc_gradmatch.exact.importance import check_possible
from pymc_gradmatch.exact.modes import Local
from pymc_gradmatch.exact.posterior import ExactPosterior
from pymc_gradmatch.exact.solutions import Wrt, compile_for_draws, with_draws
from pymc_gradmatch.model import log_densities_of, sum_of_entries
from pymc_gradmatch.ode import Solution

GROWTH = 1.3  # of the number of times, from piece to piece
PER_UNKNOWN = 4  # numbers observed in the first piece: some more than could be fitted exactly
FOLLOWED = 8  # modes of a piece
DRAWN, CLIMBED = 300, 16  # around these; the likeliest of them and of these
# By which states are moved to see what depends on them: a comparison sees no small move, and
# nothing else fails to see that a state is lost.
ASIDE = np.array([0.0, 1.0, -1.0, 100.0, -100.0, np.nan])
ROUNDING = 1e-9


class Compiled(NamedTuple):
    """Functions of the values and the states at draws, and of which entries count."""

    entries: Callable
    """Of all terms, whatever counts, and whether or not parameters are in their domain."""
    height: Callable
    """The log density."""
    gradient: Callable
    """The log density, and its gradient by the values and by the states."""


class Piece(ExactPosterior):
    """The posterior given the data at the first times alone, whose ODE is solved no further.

    Of the log density those entries count that no later state has a part in, whatever the
    likelihood is.

    Parameters
    ----------
    whole : ExactPosterior
        The posterior given all data, which counts the solutions.
    share : float
        Of the times.
    compiled : Compiled, optional
        What another piece has compiled.

    Attributes
    ----------
    n_times : list of int
        How many times of each ODE's grid there are.
    counts : list of array of bool
        Which entries of each term count.
    """

    def __init__(self, whole: ExactPosterior, share: float, compiled: Compiled | None = None):
        vars(self).update(vars(whole))  # the same model, which need not be written again
        self._kept = deque()
        self._whole, self._compiled = whole, compiled or self._compile()
        self.n_times = [int(np.ceil(share * c.gp.t.shape[-1])) for c in self.constraints]
        self.counts = self._counting()
        self._log_density = self._given_counts(self._compiled.height)
        self._gradient = self._given_counts(self._compiled.gradient)

    def until(self, share: float) -> "Piece":
        """Return the posterior given the data at another share of the times."""
        return Piece(self._whole, share, self._compiled)

    def _compile(self) -> Compiled:
        # Parameters are checked for all entries at once, which makes none depend on the others.
        terms = [self._exact[name] for name in self.single_terms]
        unchecked = without_checks(self._number.opened(log_densities_of(self._exact, terms)))
        inputs, entries = [*self._values, *self._x], [*self.single_terms.values()]
        counts = [pt.tensor(dtype=bool, shape=entry.type.shape) for entry in entries]
        pairs = zip(counts, entries, strict=True)
        total = sum_of_entries([pt.switch(one, entry, 0.0) for one, entry in pairs])
        gradient: Any = pytensor.grad(total, inputs, disconnected_inputs="ignore")
        return Compiled(
            compile_for_draws(inputs, unchecked),
            compile_for_draws([*inputs, *counts], [total]),
            compile_for_draws([*inputs, *counts], [total, *gradient]),
        )

    @property
    def n_observed(self) -> int:
        """How many entries of the likelihood count."""
        by_name = zip(self.single_terms, self.counts, strict=True)
        return sum(int(counts.sum()) for name, counts in by_name if name in self.likelihood)

    def _counting(self) -> list[NDArray[np.bool_]]:
        """Tell which entries of each term stay as they are where later states are moved."""
        u = self._split(np.repeat(self.starting_at()[None], len(ASIDE), axis=0))
        moved = []
        for constraint, n in zip(self.constraints, self.n_times, strict=True):
            x = constraint.gp.states_of(constraint.gp.prior_mean)
            away = ASIDE.reshape(-1, *(1,) * x.ndim) * (1 + np.abs(x))
            is_later = np.arange(x.shape[-2]) >= n
            moved.append(np.where(is_later[:, None], x + away, x))
        entries = [*self.single_terms.values()]
        values = with_draws(self._compiled.entries(*u, *moved), entries, len(ASIDE))
        return [
            np.isclose(v, v[0], rtol=ROUNDING, atol=ROUNDING, equal_nan=True).all(axis=0)
            for v in values
        ]

    def _given_counts(self, evaluate: Callable) -> Callable:
        counts = self.counts

        def given(*values):
            n_points = len(values[0])
            return evaluate(*values, *(np.broadcast_to(c, (n_points, *c.shape)) for c in counts))

        return given

    def solve(
        self,
        starts: Sequence[NDArray[np.float64]],
        theta: Sequence[NDArray[np.float64]],
        times: Sequence[NDArray[np.float64]] | None = None,
    ) -> list[NDArray[np.float64]]:
        """Integrate as far as the piece goes; later states are as its last."""
        if times is not None:
            return super().solve(starts, theta, times)
        return self._held(super().solve(starts, theta, self._times), axis=-2)

    def linearised(
        self,
        levels: Sequence[NDArray[np.float64]],
        theta: Sequence[NDArray[np.float64]],
        wrt: Wrt,
        times: Sequence[NDArray[np.float64]] | None = None,
    ) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Integrate as far as the piece goes, with derivatives; later ones are as the last."""
        x, slopes = zip(*super().linearised(levels, theta, wrt, times or self._times), strict=True)
        return [*zip(self._held(x, axis=-2), self._held(slopes, axis=-3), strict=True)]

    @property
    def _times(self) -> list[NDArray[np.float64]]:
        return [c.gp.t[..., :n] for c, n in zip(self.constraints, self.n_times, strict=True)]

    def _held(self, solved: Sequence[NDArray], axis: int) -> list[NDArray[np.float64]]:
        """Return what is known up to the horizon on the whole grid, later its last."""
        held = []
        for values, constraint, n in zip(solved, self.constraints, self.n_times, strict=True):
            places = np.minimum(np.arange(constraint.gp.t.shape[-1]), n - 1)
            held.append(np.take(values, places, axis=axis))
        return held

    def _solution(self, *args) -> Solution:
        return self._whole._solution(*args)


def grown(
    target: ExactPosterior, rng: np.random.Generator, known: Found | None = None
) -> Found | None:
    """Climb to the modes of longer and longer pieces, up to the whole.

    Parameters
    ----------
    target : ExactPosterior
        The posterior given all data.
    rng : numpy.random.Generator
        Source of draws.
    known : Found, optional
        What climbs from draws of the prior found.

    Returns
    -------
    Found or None
        What is known, with one climb to each mode that the horizon led to: climbs that begin
        together do not tell how often a mode is reached.  No more than is known where the first
        piece that tells enough is the whole.

    Raises
    ------
    ImpossibleError
        If the density of the first piece is zero at all draws of the prior, or if that of a longer
        one is zero around the modes of a shorter one.
    """
    pieces = pieces_of(target)
    if len(pieces) == 1:
        return known
    *_, found = climbs(pieces[0], rng)
    for piece in pieces[1:]:
        modes = found.maxima.only(found.within(NEAR)[:FOLLOWED])
        near = np.concatenate([modes.point, _drawn_around(modes, rng)])
        heights = piece(near)
        check_possible(heights)
        likeliest = np.argsort(-heights)[: min(CLIMBED, np.isfinite(heights).sum())]
        points = near[likeliest]
        found = Found.of(climb(piece, points, found.widths), found.widths)
    if known is None:
        return Found.of(found.maxima, found.widths)
    return known.with_climbs(target, found.maxima.point)


def pieces_of(target: ExactPosterior) -> list[ExactPosterior]:
    """Return posteriors of longer and longer pieces, the first one of just enough data.

    The last one is of all data.
    """
    least = PER_UNKNOWN * len(target.names)
    pieces: list[ExactPosterior] = [target]
    share = 1 / GROWTH
    piece = Piece(target, share)
    while piece.n_observed >= least:
        pieces.insert(0, piece)
        share /= GROWTH
        piece = piece.until(share)
    return pieces


def _drawn_around(modes: Local, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw from the normals that modes are described by, of each as many."""
    numbers = np.arange(DRAWN) % len(modes.height)
    noise = rng.normal(size=(DRAWN, modes.point.shape[1]))
    return modes.point[numbers] + np.einsum("pij,pj->pi", modes.factor[numbers], noise)

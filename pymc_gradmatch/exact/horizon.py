r"""A growing horizon: modes of long series by way of their first pieces.

The posterior of a long oscillating or chaotic series has a narrow mode among many others, of
solutions that fall out of phase somewhere, and no local optimisation from a draw of the prior ends
at the right one.  Given the first data alone most do, and the posterior of a piece shows where
that of a longer one is:

.. math::

    p(\phi \mid y_{1:n}) \propto p(\phi)\; p(y_{1:n} \mid \phi), \qquad n = n_1 < n_2 < \dots

Starts for each piece are the modes of the one before, and the likeliest draws of their normal
approximations.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray

from pymc_gradmatch._pymc import without_checks
from pymc_gradmatch.exact.importance import check_positive
from pymc_gradmatch.exact.multistart import (
    EVIDENCE_GAP,
    LocalApproximation,
    ModeSearch,
    find_modes,
    optimise_locally,
)
from pymc_gradmatch.exact.posterior import ExactPosterior
from pymc_gradmatch.exact.solutions import Array, Wrt, broadcast_draws, compile_for_draws
from pymc_gradmatch.model import log_densities_of, sum_of_entries
from pymc_gradmatch.ode import Solution

HORIZON_GROWTH = 1.3  # factor of the number of times, from piece to piece
OBSERVED_PER_UNKNOWN = 4  # in the first piece: more than could be fitted exactly
MAX_MODES_FOLLOWED = 8  # from piece to piece


class CompiledTerms(NamedTuple):
    """Functions of values and states at draws, and of which entries of the terms count."""

    entries: Callable  # all entries of all terms, without checks of the parameters' domain
    log_density: Callable
    gradient: Callable  # the log density, and its gradient by the values and by the states


class HorizonPosterior(ExactPosterior):
    """The posterior given the data at a share of the times, whose ODE is solved no further.

    Those entries of the log density count that do not depend on later states, whatever the
    likelihood is.  The posterior given all data counts the solutions.  ``n_times`` are the numbers
    of times of each ODE's grid, ``is_counted`` are masks of the entries of each term that count.
    """

    def __init__(self, whole: ExactPosterior, share: float, compiled: CompiledTerms | None = None):
        vars(self).update(vars(whole))  # the same model and graphs
        self._evaluated = deque()
        self._whole, self._compiled = whole, compiled or self._compile()
        self.n_times = [int(np.ceil(share * c.gp.t.shape[-1])) for c in self.constraints]
        self.is_counted = self._counted_entries()
        self._log_density = self._given_counted(self._compiled.log_density)
        self._gradient = self._given_counted(self._compiled.gradient)

    def until(self, share: float) -> "HorizonPosterior":
        """Return the posterior given the data at another share of the times."""
        return HorizonPosterior(self._whole, share, self._compiled)

    def _compile(self) -> CompiledTerms:
        # A check of parameters is one for all entries, and would make each depend on all states.
        terms = [self._exact[name] for name in self.single_terms]
        unchecked = without_checks(self._number.with_shared(log_densities_of(self._exact, terms)))
        inputs, entries = [*self._values, *self._x], [*self.single_terms.values()]
        counts = [pt.tensor(dtype=bool, shape=entry.type.shape) for entry in entries]
        pairs = zip(counts, entries, strict=True)
        total = sum_of_entries([pt.switch(one, entry, 0.0) for one, entry in pairs])
        gradient: Any = pytensor.grad(total, inputs, disconnected_inputs="ignore")
        return CompiledTerms(
            compile_for_draws(inputs, unchecked),
            compile_for_draws([*inputs, *counts], [total]),
            compile_for_draws([*inputs, *counts], [total, *gradient]),
        )

    @property
    def n_observed(self) -> int:
        """How many entries of the likelihood count."""
        by_name = zip(self.single_terms, self.is_counted, strict=True)
        return sum(int(counted.sum()) for name, counted in by_name if name in self.likelihood)

    def _counted_entries(self) -> list[NDArray[np.bool_]]:
        """Return which entries of each term do not change where later states are changed."""
        # A censored likelihood does not change with small moves, and only NaN always shows.
        moves = np.array([0.0, 1.0, -1.0, 100.0, -100.0, np.nan])
        u = self._split(np.repeat(self.start_point()[None], len(moves), axis=0))
        moved = []
        for constraint, n in zip(self.constraints, self.n_times, strict=True):
            x = constraint.gp.back_transform(constraint.gp.prior_mean)
            move = moves.reshape(-1, *(1,) * x.ndim) * (1 + np.abs(x))
            is_later = np.arange(x.shape[-2]) >= n
            moved.append(np.where(is_later[:, None], x + move, x))
        entries = [*self.single_terms.values()]
        values = broadcast_draws(self._compiled.entries(*u, *moved), entries, len(moves))
        return [
            np.isclose(v, v[0], rtol=1e-9, atol=1e-9, equal_nan=True).all(axis=0) for v in values
        ]

    def _given_counted(self, evaluate: Callable) -> Callable:
        def given(*values):
            n_points = len(values[0])
            counted = (np.broadcast_to(c, (n_points, *c.shape)) for c in self.is_counted)
            return evaluate(*values, *counted)

        return given

    def _integrate(self, transformed, theta, times, wrt: Wrt | None = None):
        """Integrate up to the horizon; later states and sensitivities are set to those there."""
        if times is not None:
            return super()._integrate(transformed, theta, times, wrt)
        pairs = [*zip(self.constraints, self.n_times, strict=True)]
        solved = super()._integrate(transformed, theta, [c.gp.t[..., :n] for c, n in pairs], wrt)
        places = [np.minimum(np.arange(c.gp.t.shape[-1]), n - 1) for c, n in pairs]
        return [
            (np.take(x, at, axis=-2), np.take(sensitivities, at, axis=-3))
            for (x, sensitivities), at in zip(solved, places, strict=True)
        ]

    def _solution(self, *args) -> Solution:
        return self._whole._solution(*args)


def grow_horizon(
    target: ExactPosterior, rng: np.random.Generator, known: ModeSearch | None = None
) -> ModeSearch | None:
    """Find modes of longer and longer pieces, up to the whole series.

    Returns what is known with one more start at each mode that the horizon led to.  (These are not
    independent, so how often they reach a mode means nothing.)  Returns what is known alone if the
    first piece with enough data is the whole.  Raises :class:`ZeroDensityError` if the density of a
    piece is zero at all of its starts.
    """
    first, *longer = horizons_of(target)
    if not longer:
        return known
    *_, found = find_modes(first, rng)
    for piece in longer:
        modes = found.maxima.select(found.within(EVIDENCE_GAP)[:MAX_MODES_FOLLOWED])
        points = np.concatenate([modes.point, _draw_around(modes, rng)])
        log_density = piece(points)
        check_positive(log_density)
        likeliest = np.argsort(-log_density)[: min(16, np.isfinite(log_density).sum())]
        ends = optimise_locally(piece, points[likeliest], found.widths)
        found = ModeSearch.of(ends, found.widths)
    if known is None:
        return ModeSearch.of(found.maxima, found.widths)
    return known.extended(target, found.maxima.point)


def horizons_of(target: ExactPosterior) -> list[ExactPosterior]:
    """Return posteriors of longer and longer pieces, from one of just enough data to the whole."""
    least = OBSERVED_PER_UNKNOWN * len(target.names)
    pieces: list[ExactPosterior] = [target]
    share = 1 / HORIZON_GROWTH
    piece = HorizonPosterior(target, share)
    while piece.n_observed >= least:
        pieces.insert(0, piece)
        share /= HORIZON_GROWTH
        piece = piece.until(share)
    return pieces


def _draw_around(modes: LocalApproximation, rng: np.random.Generator) -> Array:
    """Return 300 draws of the normal approximations of modes, of each as many."""
    indices = np.arange(300) % len(modes.point)
    noise = rng.normal(size=(len(indices), modes.point.shape[1]))
    return modes.point[indices] + np.einsum("pij,pj->pi", modes.factor[indices], noise)

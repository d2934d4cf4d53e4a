"""A model's exact posterior density, its derivatives, and draws of its prior."""

from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import NDArray

from pymc_gradmatch._pymc import (
    at_initial_values,
    compile_draws,
    draw_values,
    gradient,
    hierarchical_scales,
    in_numpy,
    random_ancestors,
)
from pymc_gradmatch.data_values import CONSTANT, DataValues
from pymc_gradmatch.exact.solutions import Array, broadcast_draws, compile_for_draws
from pymc_gradmatch.exact.variables import ModelVariables, single_terms
from pymc_gradmatch.gp import StateGP, sampling_start
from pymc_gradmatch.model import equations, sum_of_entries, where_impossible
from pymc_gradmatch.ode import ODE, OUT_OF_STEPS, explain_failure, explain_nonfinite_slope

MAX_NUMBERS = 4_000_000  # of trajectories in memory at once
MAX_CACHED_NUMBERS = 1_000_000  # of trajectories kept for the result's draws
N_PRIOR = 1_000  # draws that estimate the prior's width
STEP = 1e-4  # of differences, relative to the axes
PRIOR_ERRORS = (RuntimeError, ArithmeticError, ValueError)
"""Raised by drawing from flat or vague priors, or from ones whose parameters, which are drawn, are
outside their domain."""


class Expansion(NamedTuple):
    """A log density to second order at points, ``(point,)``, ``(point, n)``, ``(point, n, n)``."""

    log_density: Array
    gradient: Array
    hessian: Array

    def select(self, chosen) -> Self:
        """Return some of the points."""
        return type(self)(*(values[chosen] for values in self))


class ExactPosterior(ModelVariables):
    r"""The posterior that integrates the ODE, in unconstrained coordinates :math:`\phi`.

    .. math::

        p(\phi \mid y) \propto p(u)\; p\bigl(y \mid x(t; \theta, x_0), u\bigr), \qquad
        \phi = u

    with the value variables u of :func:`~pymc_gradmatch.exact_model`, those of x(t0) last, of all
    that the ODE's parameters and the likelihood depend on, and the present ``pm.Data``.  Many
    points are solved at once.  Unless ``start=`` gives x(t0) another prior, its coordinate is
    :math:`(x_0 - m) / s`, with mean and scale of the data, of the logarithm for positive states.

    ``has_volume=False`` is the density of the constrained variables; ``number`` writes what depends
    on the data, see :meth:`with_data`.

    ``spreads`` are names of the standard deviations of populations, ``is_fixed`` their coordinates,
    which local optimisation does not change: the joint mode with the members is degenerate, at
    zero.  ``highest`` are the highest log density evaluated so far, and its point.
    """

    def __init__(self, model: pm.Model, *, has_volume: bool = True, number: DataValues = CONSTANT):
        super().__init__(model, has_volume, number)
        solved = self._exact
        self._log_density = compile_for_draws(
            [*self._values, *self._x], [*self._checked_terms.values()], derive=total
        )
        self._prior_samplers: dict[int, Callable] = {}
        terms = [solved[name] for name in self.likelihood]
        fixed = hierarchical_scales(solved, [*self._theta_and_starts, *terms])
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        self.spreads = [str(rv.name) for rv in self._free_rvs if rv in fixed]
        self.is_fixed = np.repeat(np.array([rv in fixed for rv in self._free_rvs], bool), sizes)
        self._fixed_at: Array | None = None
        self.highest = -np.inf, self._start
        self._n_screened, self._n_unsolved = 0, 0
        # Which x(t0) and parameters were found to vary with the coordinates, by constraint.
        self._varying = [
            np.zeros(len(c.ode.states) + len(c.ode.params), dtype=bool) for c in self.constraints
        ]
        # And which the solution depends on: the likelihood may have other parameters.
        self._used = [
            np.append(np.ones(len(c.ode.states), dtype=bool), c.ode.used_params)
            for c in self.constraints
        ]

    def with_data(self, gp: StateGP) -> Self:
        """Return the posterior of a data set, whose numbers have been set in the graphs.

        For a model of one constraint and one data set, with data at the same places.  It is valid
        until the numbers of another data set are set.
        """
        _ = self._functions_of_states  # compiled once for all data sets
        other = copy(self)
        other.constraints = [self.constraints[0]._replace(gp=gp)]
        other.n_solutions, other.failures = 0, Counter()
        start, n_of_start = self._start.copy(), len(self._start_entries(self._start_labels))
        if n_of_start:
            values = self._start_coordinates(gp.back_transform(sampling_start(gp))[0])
            own = np.concatenate([value.ravel() for value in values])
            start[-n_of_start:] = np.where(np.isfinite(own), own, start[-n_of_start:])
        vars(other).update(
            _fixed_at=None, _n_screened=0, _n_unsolved=0, _evaluated=deque(),
            _varying=[np.zeros_like(varying) for varying in self._varying],
            _start=start, highest=(-np.inf, start),
        )  # fmt: skip
        return other

    @cached_property
    def _start_coordinates(self) -> Callable:
        """The coordinates of x(t0), a function of it."""
        [constraint] = self.constraints
        x0 = pt.tensor(shape=constraint.gp.mean.shape, dtype="float64")
        graphs = self._coordinate_graphs([x0])[self._n_others :]
        free = random_ancestors(graphs)
        starting = at_initial_values(graphs, free, self.model.rvs_to_initial_values)
        return in_numpy([x0], self._number.with_shared(starting))

    def __call__(self, phi: Array) -> Array:
        """Evaluate the log density at points, shape ``(point, coordinate)``, up to a constant.

        Minus infinity where an integration failed.
        """
        size = sum(x.get_value(borrow=True).size for x in self._x)
        n_chunks = max(1, -(-len(phi) * size // MAX_NUMBERS))
        chunks = []
        for points in np.array_split(phi, n_chunks):
            log_density, *trajectories = self._evaluate(points)
            chunks.append(log_density)
            cache = self._evaluated
            cache.append((points, trajectories))
            while len(cache) > 1 and sum(len(one) for one, _ in cache) * size > MAX_CACHED_NUMBERS:
                cache.popleft()
        log_density = np.concatenate(chunks)
        if log_density.max(initial=-np.inf) > self.highest[0]:
            best = log_density.argmax()
            self.highest = log_density[best], phi[best].copy()
        return log_density

    def screen(self, phi: Array) -> Array:
        """Evaluate the log density at draws of the prior, and count failures for `unsolved`."""
        before = self.n_solutions, self.failures[OUT_OF_STEPS]
        log_density = self(phi)
        self._n_screened += self.n_solutions - before[0]
        self._n_unsolved += self.failures[OUT_OF_STEPS] - before[1]
        return log_density

    @property
    def unsolved(self) -> float:
        """Share of the solutions of screened draws of the prior that ran out of steps."""
        return self._n_unsolved / max(self._n_screened, 1)

    def _evaluate(self, phi) -> tuple[Array, ...]:
        """Return log densities at points, and the trajectories there."""
        u = self._split(phi)
        trajectories = self._solved(u)
        return self._at_trajectories(u, trajectories), *trajectories

    def _at_trajectories(self, u, trajectories) -> Array:
        """Return log densities at points, from their values and trajectories."""
        n_points = len(trajectories[0])
        log_density = np.full(n_points, -np.inf)
        finite = [np.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in trajectories]
        solved = np.all(finite, axis=0)
        if solved.any():
            with np.errstate(all="ignore"):
                at_solved = [array[solved] for array in [*u, *trajectories]]
                log_density[solved] = self._log_density_where(solved, at_solved)
        return np.where(np.isfinite(log_density), log_density, -np.inf)

    def _log_density_where(self, solved: NDArray[np.bool_], values: list[NDArray]) -> Array:
        """Return log densities of values at those points that have a solution."""
        (log_density,) = self._log_density(*values)
        return log_density

    def expand(self, phi: Array, widths: Array) -> Expansion:
        """Expand the log density to second order at points, given the prior's widths.

        Fixed coordinates have no slope, and a curvature of one.
        """
        at = self.expand_along(phi, np.broadcast_to(np.diag(widths), (*phi.shape, len(widths))))
        hessian = at.hessian / (widths[:, None] * widths)
        hessian[:, self.is_fixed] = hessian[..., self.is_fixed] = 0
        hessian[:, self.is_fixed, self.is_fixed] = -1
        gradient = np.where(self.is_fixed, 0, at.gradient / widths)
        return Expansion(at.log_density, gradient, hessian)

    def expand_along(self, phi: Array, factor: Array) -> Expansion:
        r"""Expand the log density to second order at points, along the axes in the columns of W.

        .. math::

            \phi(z) = \phi + W z, \qquad
            H = \nabla \nabla_{\delta} \log p(u + W \delta, x + S W \delta)

        By Gauss-Newton: with the density's second derivatives by u and by the solution x, whose
        derivatives are S, but without second derivatives of the solution.  They are differences of
        the density's exact gradient, by a small part of the axes.
        """
        n_points, n = phi.shape
        moved, solved = self._linearised(phi, factor)
        there = [np.concatenate([x[:, None], x[:, None] + STEP * by], axis=1) for x, by in solved]
        transformed, by_z = [x.reshape(-1, *x.shape[2:]) for x in there], [by for _, by in solved]
        ahead = moved[:, : 1 + n].reshape(-1, n)
        both = self._value_and_gradient(ahead, transformed, by_z, factor)
        log_density, gradient = (a.reshape(n_points, 1 + n, *a.shape[1:]) for a in both)
        with np.errstate(invalid="ignore"):
            hessian = (gradient[:, 1:] - gradient[:, :1]) / STEP
        return Expansion(log_density[:, 0], gradient[:, 0], (hessian + hessian.mT) / 2)

    def value_and_gradient(self, phi: Array, widths: Array) -> tuple[Array, Array]:
        """Evaluate the log density and its gradient at points.

        Differences of transforms are a small part of widths, of each coordinate or also each point.
        """
        factor = np.broadcast_to(widths, phi.shape)[:, :, None] * np.eye(phi.shape[1])
        _, solved = self._linearised(phi, factor)
        transformed, by_z = zip(*solved, strict=True)
        log_density, gradient = self._value_and_gradient(phi, transformed, by_z, factor)
        return log_density, gradient / widths

    def _linearised(self, phi, factor) -> tuple[Array, list[tuple[Array, Array]]]:
        """Return points with those a step along each axis, and solutions with their derivatives.

        Shapes ``(point, 1 + 2 n, n)``; of solutions, with positive states as logarithms,
        ``(point, ..., time, state)``; of derivatives along axes ``(point, n, ..., time, state)``.
        """
        n_points, n = phi.shape
        moves = STEP * factor.mT
        moved = np.concatenate([phi[:, None], phi[:, None] + moves, phi[:, None] - moves], axis=1)
        theta, starts, _ = self._at(self._split(moved.reshape(-1, n)))
        starts = [c.gp.transform_states(x0) for c, x0 in zip(self.constraints, starts, strict=True)]
        theta, starts = (
            [one.reshape(n_points, 1 + 2 * n, *one.shape[1:]) for one in each]
            for each in (theta, starts)
        )
        given = []
        for x0, parameters, varies, is_used in zip(
            starts, theta, self._varying, self._used, strict=True
        ):
            of_start, of_theta = _differences(x0), _differences(parameters[..., 0, :])
            of_theta = np.broadcast_to(of_theta, (*of_start.shape[:-1], of_theta.shape[-1]))
            given.append(np.concatenate([of_start, of_theta], axis=-1))
            varies |= is_used & (given[-1] != 0).any(axis=tuple(range(given[-1].ndim - 1)))
        solved = self.solve_with_sensitivities(
            [x0[:, 0] for x0 in starts], [one[:, 0] for one in theta],
            [tuple(varies.tolist()) for varies in self._varying],
        )  # fmt: skip
        with np.errstate(all="ignore"):
            return moved, [
                (x, _by_chain_rule(sensitivities, by[..., varies]))
                for (x, sensitivities), by, varies in zip(solved, given, self._varying, strict=True)
            ]

    def _value_and_gradient(self, phi, transformed, by_z, factor) -> tuple[Array, Array]:
        """Return the log density, and its gradient along axes, from solutions.

        There may be fewer axes than points: each is that of as many consecutive points.
        """
        n_points, n = phi.shape
        u = self._split(phi)
        with np.errstate(all="ignore"):
            states = [
                c.gp.back_transform(x) for c, x in zip(self.constraints, transformed, strict=True)
            ]
            values = self._gradient(*u, *states)
            of = [np.zeros(()), *self._values, *self._x]  # as many axes as the density, derivatives
            log_density, *by = broadcast_draws(values, of, n_points)
            own = np.concatenate([one.reshape(n_points, -1) for one in by[: len(u)]], axis=1)
            gradient = (own.reshape(len(factor), -1, n) @ factor).reshape(n_points, n)
            for constraint, by_states, x, slopes in zip(
                self.constraints, by[len(u) :], states, by_z, strict=True
            ):
                is_log = np.broadcast_to(constraint.gp.data.positive, x.shape[1:])
                slopes = slopes.reshape(len(slopes), n, -1)
                by_transformed = by_states * np.where(is_log, x, 1.0)
                by_transformed = by_transformed.reshape(len(slopes), -1, slopes.shape[-1])
                gradient += (by_transformed @ slopes.mT).reshape(n_points, n)
        return log_density, gradient

    @cached_property
    def _gradient_graphs(self) -> list:
        """The log density and its gradient by the values and by the states."""
        densities = [*self._checked_terms.values()]
        return total_with_gradient([*self._values, *self._x], densities)[1]

    @cached_property
    def _gradient(self) -> Callable:
        densities = [*self._checked_terms.values()]
        return compile_for_draws([*self._values, *self._x], densities, derive=total_with_gradient)

    def draw_prior(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws of the prior, with x(t0) near the first data, if there are any.

        Where ``start=`` gives x(t0) a prior, half of the draws are from that.  A prior that cannot
        be drawn from is replaced by a wide normal.  Fixed coordinates are the median of the first
        draws.
        """
        start = self._start
        phi = start + 3.0 * (1 + np.abs(start)) * rng.normal(size=(n, len(start)))
        with suppress(*PRIOR_ERRORS):
            parts = [np.reshape(part, (n, -1)) for part in self._prior_sampler(n)(rng)]
            drawn = np.concatenate(parts, axis=1)
            phi = np.where(np.isfinite(drawn), drawn, phi)
        n_of_start = len(self._start_entries(self._start_labels))
        if n_of_start:
            sparse = [
                np.broadcast_to(c.gp.data.is_sparse, c.gp.mean.shape) for c in self.constraints
            ]
            is_unseen = np.array(self._start_entries(sparse), dtype=bool)
            is_default = np.isin(self.names[-n_of_start:], self.default_starts)
            # Standard deviations from 0.001 to 0.3 of the state's, from 0.1 to 3 if not observed.
            nearest, farthest = np.where(is_unseen[:, None], (-1.0, 0.5), (-3.0, -0.5)).T
            noise = 10 ** (nearest + (farthest - nearest) * rng.random((n, 1)))
            near = start[-n_of_start:] + noise * rng.normal(size=(n, n_of_start))
            by_data = is_default | (~is_unseen & (np.arange(n)[:, None] % 2 == 0))
            phi[:, -n_of_start:] = np.where(by_data, near, phi[:, -n_of_start:])
        if self._fixed_at is None:
            self._fixed_at = np.median(phi[:, self.is_fixed], axis=0)
        phi[:, self.is_fixed] = self._fixed_at
        return phi

    def _prior_sampler(self, n: int) -> Callable[[np.random.Generator], list[NDArray]]:
        """Return a function that draws n points from their prior, compiled once."""
        if n not in self._prior_samplers:
            graphs = self._number.with_shared(self._unconstrained_graphs())
            self._prior_samplers[n] = compile_draws(graphs, n)
        return self._prior_samplers[n]

    def draw_prior_starts(self, n: int, rng: np.random.Generator) -> list[Array]:
        """Return draws of the prior of each x(t0); NaN where it is known or cannot be drawn."""
        starts = [np.full((n, *c.gp.mean.shape), np.nan) for c in self.constraints]
        for part in self._parts:
            with suppress(*PRIOR_ERRORS):
                [draws] = draw_values([self._exact[part.name]], n, rng)
                starts[part.number][(slice(None), *part.where)] = draws
        return starts

    def improper_coordinates(self, point: Array, widths: Array) -> list[str]:
        """Return the coordinates of flat prior along which the density does not fall off.

        It should fall by 20 within 30 of the posterior's widths on both sides of a point, as far
        as the ODE can be integrated.
        """
        families = tuple(type(family.rv_op) for family in (pm.Flat, pm.HalfFlat))
        flat = [isinstance(rv.owner.op, families) for rv in self._free_rvs]
        of_flat = np.flatnonzero(np.repeat(flat, [int(np.prod(s)) for s in self._shapes]))
        far = np.array([5.0, 10.0, 30.0, -5.0, -10.0, -30.0])
        moved = point + far[:, None, None] * np.diag(widths)[of_flat]
        u = self._split(np.concatenate([point[None], moved.reshape(-1, len(point))]))
        solutions = self._solved(u)
        is_solved = np.all([np.isfinite(x).reshape(len(x), -1).all(axis=1) for x in solutions], 0)
        log_density = self._at_trajectories(u, solutions)
        falls = is_solved[1:] & (log_density[1:] < log_density[0] - 20.0)
        is_proper = falls.reshape(2, len(far) // 2, -1).any(axis=1).all(axis=0)
        names = self.names
        return [names[k] for k in of_flat[~is_proper]]

    def why_zero(self, phi: Array) -> str:
        """Return why the density at a point is zero: where a solution ends, or which term it is."""
        u = self._split(phi[None])
        trajectories = self._solved(u)
        if not all(np.isfinite(x).all() for x in trajectories):
            return self._first_message(u, explain_failure)
        graphs = [*self.single_terms.values()]
        with np.errstate(all="ignore"):
            evaluate = compile_for_draws([*self._values, *self._x], graphs)
            arrays = broadcast_draws(evaluate(*u, *trajectories), graphs, 1)
        densities = {name: v[0] for name, v in zip(self.single_terms, arrays, strict=True)}
        of_priors = {name: v for name, v in densities.items() if name not in self.likelihood}
        if zero := where_impossible(of_priors):
            return (
                f"The prior density of {zero} is zero or NaN there; if the point was drawn from "
                "the prior, that prior computes it wrongly: write its numbers as floats, 50.0 "
                "instead of 50."
            )
        of_data = {name: densities[name] for name in self.likelihood}
        zero = where_impossible(of_data, self._observed_data())
        return f"The likelihood is zero at {zero}." if zero else ""

    def why_no_gradient(self, phi: Array) -> str:
        """Return why the density at a point has no derivatives, such as where in the ODE."""
        u = self._split(phi[None])
        [x, *_] = self._solved(u)

        def message(ode: ODE, t, start, theta) -> str:
            return explain_nonfinite_slope(ode, t, ode.solve(t, start, theta), theta)

        where = self._first_message(u, message if np.isfinite(x).all() else explain_failure)
        return where or "The likelihood has no finite derivative by the states or parameters there."

    def _first_message(self, u, message: Callable[..., str]) -> str:
        """Return the first message about the ODE, times, start and parameters of a solution."""
        theta, starts, _ = self._at(u)
        for constraint, parameters, x0 in zip(self.constraints, theta, starts, strict=True):
            gp, transformed = constraint.gp, np.atleast_2d(constraint.gp.transform_states(x0)[0])
            values = np.atleast_2d(parameters[0, ..., 0, :])
            each = np.broadcast_to(values, (len(transformed), values.shape[-1]))
            odes = equations(constraint.ode, gp)
            for ode, start, own, t in zip(
                odes, transformed, each, np.atleast_2d(gp.t), strict=True
            ):
                if where := message(ode.transformed, t, start, own):
                    return f"{where[0].upper()}{where[1:]}"
        return ""


def total(inputs, densities) -> tuple[Any, list]:
    """Derive the log density from its terms."""
    return inputs, [sum_of_entries(single_terms(inputs, densities)[1])]


def total_with_gradient(inputs, densities) -> tuple[Any, list]:
    """Derive the log density and its gradient from its terms."""
    _, [density] = total(inputs, densities)
    return inputs, [density, *gradient(density, inputs)]


def _differences(values: Array) -> Array:
    """Return derivatives along axes, from values at points and a step forward and back."""
    n = values.shape[1] // 2
    with np.errstate(invalid="ignore"):
        return (values[:, 1 : n + 1] - values[:, n + 1 :]) / (2 * STEP)


def _by_chain_rule(sensitivities: NDArray, by: NDArray) -> Array:
    """Return derivatives along axes, from sensitivities to starts and parameters and their own.

    Shapes ``(point, ..., time, state, d)`` and ``(point, n, ..., d)``; the result has
    ``(point, n, ..., time, state)``.
    """
    *front, n_times, n_states, d = sensitivities.shape
    flat = sensitivities.reshape(*front, n_times * n_states, d)
    along = np.moveaxis(np.moveaxis(by, 1, -2) @ flat.mT, -2, 1)
    return along.reshape(*along.shape[:-1], n_times, n_states)

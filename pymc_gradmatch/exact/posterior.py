"""A model's exact posterior: its own graph, with integrated trajectories in place of its states."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from typing import Any, Self

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import (
    EVALUATE_ONCE,
    at_initial_values,
    compile_draws,
    draw_values,
    hierarchical_scales,
    in_numpy,
    minus_inf_if_invalid,
    random_ancestors,
)
from pymc_gradmatch.exact.model import with_solutions
from pymc_gradmatch.exact.modes import Expansion
from pymc_gradmatch.exact.named import Named
from pymc_gradmatch.exact.solutions import compile_for_draws, with_draws
from pymc_gradmatch.gp import StateGP, start_of
from pymc_gradmatch.model import (
    Constraint,
    densities_of,
    equations,
    total_of,
    where_impossible,
)
from pymc_gradmatch.ode import ODE, OUT_OF_STEPS, explain_failure, explain_nonfinite_slope
from pymc_gradmatch.replaceable import CONSTANT, Numbers

MOST_NUMBERS = 4_000_000  # of trajectories that are held at once
MOST_KEPT = 1_000_000  # of these, that are not solved for again where a result needs them
N_PRIOR = 1_000  # draws of the prior, that tell how wide it is, or of which some are likely
NOISES = (-3.0, -0.5)  # logarithms to base ten, of standard deviations of a state
UNSEEN = (-1.0, 0.5)  # the same, of a state that is not observed
STEP = 1e-4  # of differences, along the axes that are given
FAR = 3.0  # from a point, in units of its coordinates or of itself, where a prior has no draws
DISTANCES, FALLING = (5.0, 10.0, 30.0), 20.0  # in widths, and what a density falls by before
FLAT = tuple(type(family.rv_op) for family in (pm.Flat, pm.HalfFlat))
# What drawing raises from flat priors, from vague ones, and where a prior's own parameters, which
# are drawn, are none that it may have.
NO_DRAWS = (RuntimeError, ArithmeticError, ValueError)


class ExactPosterior(Named):
    r"""The posterior that integrates the ODE, in unconstrained coordinates :math:`\phi`.

    .. math::

        p(\phi \mid y) \propto p(u)\; p\bigl(y \mid x(t; \theta, x_0), u\bigr), \qquad
        \phi = u

    with the value variables u of :func:`~pymc_gradmatch.exact_model`, those of x(t0) last:
    of all that the ODE's parameters and the likelihood depend on, with ``pm.Data`` as they are
    now.  Solutions are computed for many points at once, and enter its graph as data.  Unless
    ``start=`` gives x(t0) another prior, its coordinate is :math:`(x_0 - m) / s`, with mean and
    scale of the data; of positive states those of the logarithm.  Starts that are known are what
    they are known to be, and no coordinates.

    Parameters
    ----------
    model : pymc.Model
        The model.
    has_volume : bool, default True
        Whether it is the density of the coordinates, or that of the unknowns as they are.
    number : callable, optional
        Writes what x(t0) has of the data; see :meth:`with_data`.

    Attributes
    ----------
    likelihood : list of str
        Names of the observed variables and potentials that count.
    single_terms : dict of str to TensorVariable
        What the log density adds up, entry by entry, by the name of the variable.
    spreads : list of str
        Names of the spreads of populations, of which the joint mode with their members is where
        these are all the same.
    is_held : array of bool
        Which coordinates climbs leave where they are: these.
    highest : tuple of float and array of float
        The highest log density that was evaluated so far, and where.

    Raises
    ------
    ValueError
        If the model cannot be written so; the message names what stands in the way.
    """

    def __init__(self, model: pm.Model, *, has_volume: bool = True, number: Numbers = CONSTANT):
        super().__init__(model)
        self._number = number
        solved, theta, starts, self._parts = with_solutions(self, _to_be_given, number)
        self._exact, self._x = solved, [solved[name] for name in self.states]
        terms = _connected(solved, [*theta, *starts, *self._x], self._x)
        self.likelihood = [term.name for term in terms]
        needed = set(ancestors([*theta, *starts, *terms]))
        free = [rv for rv in solved.free_RVs if rv in needed]
        _check_continuous(free)
        self._free = [rv.name for rv in free]
        self._values = [solved.rvs_to_values[rv] for rv in free]
        of_start = {part.name for part in self._parts}
        known = [v for v in solved.deterministics if _is_made_of(v, free, solved, self._x)]
        named = [v for v in [*free, *known] if v.name not in {*of_start, *self.starts}]
        self._named = [v.name for v in named]
        upstream = set(ancestors([*theta, *starts]))
        self._parameters = [v.name for v in named if v in upstream]
        self._graphs = number.opened(solved.replace_rvs_by_values([*theta, *starts, *named]))
        self._natural = compile_for_draws(self._values, self._graphs)
        # A draw outside of the likelihood's domain has density zero, and stops no other.
        weighed = [*free, *terms]
        densities = minus_inf_if_invalid(number.opened(densities_of(solved, weighed, has_volume)))
        terms_by_name = dict(zip([rv.name for rv in weighed], densities, strict=True))
        self.single_terms = number.masked(terms_by_name)
        self._log_density = compile_for_draws(
            [*self._values, *self._x], [total_of([*self.single_terms.values()])]
        )
        self._observed = [term for term in terms if term in solved.observed_RVs]
        there = self._start_parts({}, None)
        self._shapes = [part.shape for part in there]
        self._there = np.concatenate([part.ravel() for part in there])
        self._drawings: dict[int, Callable] = {}
        held = hierarchical_scales(solved, [*theta, *starts, *terms])
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        self.spreads = [str(rv.name) for rv in free if rv in held]
        self.is_held = np.repeat(np.array([rv in held for rv in free], dtype=bool), sizes)
        self._held_at: NDArray[np.float64] | None = None
        self.highest = -np.inf, self._there
        self._n_screened, self._n_unsolved = 0, 0
        self._kept: deque[tuple[NDArray, list[NDArray]]] = deque()
        # By which start and parameter each solution has been seen to vary.
        self._varying = [
            np.zeros(len(c.ode.states) + len(c.ode.params), dtype=bool) for c in self.constraints
        ]
        # Scales and noise that the likelihood alone has do not move a solution.
        self._entering = [
            np.append(np.ones(len(c.ode.states), dtype=bool), c.ode.used_params)
            for c in self.constraints
        ]

    def with_data(self, gp: StateGP) -> Self:
        """Return the posterior of a data set, whose numbers have been put into the graphs.

        Of a model of one constraint and one data set, with data at the same places.  Neither is of
        use any more once those of another one are put there.

        Parameters
        ----------
        gp : StateGP
            The data.
        """
        _ = self._computed  # compiled here, once for all
        other = copy(self)
        other.constraints = [self.constraints[0]._replace(gp=gp)]
        other.n_solutions, other.failures = 0, Counter()
        vars(other).update(
            _held_at=None, _n_screened=0, _n_unsolved=0, _kept=deque(),
            _varying=[np.zeros_like(varying) for varying in self._varying],
        )  # fmt: skip
        parts = self._at_start(gp.states_of(start_of(gp))[0])
        there, n_of_start = self._there.copy(), len(self.of_starts(self._labels))
        if n_of_start:
            own = np.concatenate([part.ravel() for part in parts])
            there[-n_of_start:] = np.where(np.isfinite(own), own, there[-n_of_start:])
        vars(other).update(_there=there, highest=(-np.inf, there))
        return other

    @cached_property
    def _at_start(self) -> Callable:
        """The coordinates of x(t0), a function of it."""
        [constraint] = self.constraints
        x0 = pt.tensor(shape=constraint.gp.mean.shape, dtype="float64")
        graphs = self._coordinate_graphs([x0])[self._n_others :]
        free = random_ancestors(graphs)
        starting = at_initial_values(graphs, free, self.model.rvs_to_initial_values)
        return in_numpy([x0], self._number.opened(starting))

    def __call__(self, phi: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate the log density at points, shape ``(point, coordinate)``, up to a constant.

        Minus infinity where an integration failed.
        """
        size = sum(x.get_value(borrow=True).size for x in self._x)
        n_chunks = max(1, -(-len(phi) * size // MOST_NUMBERS))
        parts = []
        for part in np.array_split(phi, n_chunks):
            height, trajectories = self._evaluate(part)
            parts.append(height)
            self._kept.append((part, trajectories))
            while len(self._kept) > 1 and sum(len(one) for one, _ in self._kept) * size > MOST_KEPT:
                self._kept.popleft()
        heights = np.concatenate(parts)
        if heights.max(initial=-np.inf) > self.highest[0]:
            best = heights.argmax()
            self.highest = heights[best], phi[best].copy()
        return heights

    def screened(self, phi: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate the log density at draws of the prior, of which :attr:`unsolved` is told."""
        before = self.n_solutions, self.failures[OUT_OF_STEPS]
        height = self(phi)
        self._n_screened += self.n_solutions - before[0]
        self._n_unsolved += self.failures[OUT_OF_STEPS] - before[1]
        return height

    @property
    def unsolved(self) -> float:
        """Share of the solutions of screened draws of the prior that ran out of steps."""
        return self._n_unsolved / max(self._n_screened, 1)

    def _evaluate(self, phi) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
        """Return log densities at points, and the trajectories there."""
        u = self._split(phi)
        trajectories = self._solved(u)
        return self._heights(u, trajectories), trajectories

    def _heights(self, u, trajectories) -> NDArray[np.float64]:
        """Return log densities at points, the values u and trajectories of which are known."""
        n_points = len(trajectories[0])
        log_density = np.full(n_points, -np.inf)
        finite = [np.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in trajectories]
        solved = np.all(finite, axis=0)
        if solved.any():
            with np.errstate(all="ignore"):
                at_solved = [array[solved] for array in [*u, *trajectories]]
                log_density[solved] = self._weighed(at_solved, solved)
        return np.where(np.isfinite(log_density), log_density, -np.inf)

    def _weighed(self, values: list[NDArray], solved: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return log densities at those points that were solved from."""
        (height,) = self._log_density(*values)
        return height

    def expanded(self, phi: NDArray[np.float64], widths: NDArray[np.float64]) -> Expansion:
        """Expand the log density to second order at points, with what is held where it is.

        Parameters
        ----------
        phi : array of float
            Points, shape ``(point, n)``.
        widths : array of float
            Of the prior, in each coordinate.
        """
        at = self.along(phi, np.broadcast_to(np.diag(widths), (*phi.shape, len(widths))))
        hessian = at.hessian / (widths[:, None] * widths)
        hessian[:, self.is_held] = hessian[..., self.is_held] = 0
        hessian[:, self.is_held, self.is_held] = -1
        return Expansion(at.height, np.where(self.is_held, 0, at.gradient / widths), hessian)

    def along(self, phi: NDArray[np.float64], factor: NDArray[np.float64]) -> Expansion:
        r"""Expand the log density to second order around points, along axes.

        .. math::

            \phi(z) = \phi + W z, \qquad
            H = \nabla \nabla_{\delta} \log p(u + W \delta, x + S W \delta)

        as Gauss and Newton: with the second derivatives of the density by u and by the solution
        x, of which S are the derivatives, but without the solution's own second ones.  They are
        differences of the density's gradient, which is exact.

        Parameters
        ----------
        phi : array of float
            Points, shape ``(point, n)``.
        factor : array of float
            W, shape ``(point, n, n)``, one axis in each column: differences are a small part of
            these.
        """
        n_points, n = phi.shape
        moved, solved = self._linearised(phi, factor)
        there = [np.concatenate([x[:, None], x[:, None] + STEP * by], axis=1) for x, by in solved]
        levels, by_z = [x.reshape(-1, *x.shape[2:]) for x in there], [by for _, by in solved]
        ahead = moved[:, : 1 + n].reshape(-1, n)
        height, gradient = self._with_gradient(ahead, levels, by_z, factor)
        height, gradient = (a.reshape(n_points, 1 + n, *a.shape[1:]) for a in (height, gradient))
        with np.errstate(invalid="ignore"):
            hessian = (gradient[:, 1:] - gradient[:, :1]) / STEP
        return Expansion(height[:, 0], gradient[:, 0], (hessian + hessian.mT) / 2)

    def with_gradient(
        self, phi: NDArray[np.float64], widths: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Evaluate the log density and its gradient at points.

        Parameters
        ----------
        phi : array of float
            Points, shape ``(point, n)``.
        widths : array of float
            In each coordinate, or ``(point, n)``: differences of priors' transforms are a small
            part of these.
        """
        factor = np.broadcast_to(widths, phi.shape)[:, :, None] * np.eye(phi.shape[1])
        _, solved = self._linearised(phi, factor)
        levels, by_z = zip(*solved, strict=True)
        height, gradient = self._with_gradient(phi, levels, by_z, factor)
        return height, gradient / widths

    def _linearised(
        self, phi, factor
    ) -> tuple[NDArray[np.float64], list[tuple[NDArray[np.float64], NDArray[np.float64]]]]:
        """Return points and those a step along each axis, and solutions with their derivatives.

        Points of shape ``(point, 1 + 2 n, n)``; levels of solutions, ``(point, ..., time, state)``,
        and their derivatives along the axes, ``(point, n, ..., time, state)``.
        """
        n_points, n = phi.shape
        moves = STEP * factor.mT
        moved = np.concatenate([phi[:, None], phi[:, None] + moves, phi[:, None] - moves], axis=1)
        theta, starts, _ = self._at(self._split(moved.reshape(-1, n)))
        starts = [c.gp.levels_of(x0) for c, x0 in zip(self.constraints, starts, strict=True)]
        theta, starts = (
            [one.reshape(n_points, 1 + 2 * n, *one.shape[1:]) for one in each]
            for each in (theta, starts)
        )
        given = []
        for x0, parameters, varies, enters in zip(
            starts, theta, self._varying, self._entering, strict=True
        ):
            of_start, of_theta = _slopes(x0), _slopes(parameters[..., 0, :])
            of_theta = np.broadcast_to(of_theta, (*of_start.shape[:-1], of_theta.shape[-1]))
            given.append(np.concatenate([of_start, of_theta], axis=-1))
            varies |= enters & (given[-1] != 0).any(axis=tuple(range(given[-1].ndim - 1)))
        solved = self.linearised(
            [x0[:, 0] for x0 in starts], [one[:, 0] for one in theta],
            [tuple(varies.tolist()) for varies in self._varying],
        )  # fmt: skip
        with np.errstate(all="ignore"):
            return moved, [
                (x, _chained(sensitivities, by[..., varies]))
                for (x, sensitivities), by, varies in zip(solved, given, self._varying, strict=True)
            ]

    def _with_gradient(
        self, phi, levels, by_z, factor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the log density, and its gradient along axes, from solutions.

        Axes, and derivatives along them, may be fewer: each is that of as many points in turn.
        """
        n_points, n = phi.shape
        u = self._split(phi)
        with np.errstate(all="ignore"):
            states = [c.gp.states_of(x) for c, x in zip(self.constraints, levels, strict=True)]
            height, *by = with_draws(self._gradient(*u, *states), self._gradient_graphs, n_points)
            own = np.concatenate([one.reshape(n_points, -1) for one in by[: len(u)]], axis=1)
            gradient = (own.reshape(len(factor), -1, n) @ factor).reshape(n_points, n)
            for constraint, by_states, x, slopes in zip(
                self.constraints, by[len(u) :], states, by_z, strict=True
            ):
                is_log = np.broadcast_to(constraint.gp.data.positive, x.shape[1:])
                slopes = slopes.reshape(len(slopes), n, -1)
                by_levels = by_states * np.where(is_log, x, 1.0)
                by_levels = by_levels.reshape(len(slopes), -1, slopes.shape[-1])
                gradient += (by_levels @ slopes.mT).reshape(n_points, n)
        return height, gradient

    @cached_property
    def _gradient_graphs(self) -> list:
        """The log density and its gradient by the values and by the states."""
        inputs: list[Any] = [*self._values, *self._x]
        total = total_of([*self.single_terms.values()])
        gradient: Any = pytensor.grad(total, inputs, disconnected_inputs="ignore")
        return [total, *gradient]

    @cached_property
    def _gradient(self) -> Callable:
        return compile_for_draws([*self._values, *self._x], self._gradient_graphs)

    def starting_at(
        self, values: Mapping[str, ArrayLike] | None = None, starts: Sequence | None = None
    ) -> NDArray[np.float64]:
        """Return where the model starts, as phi, shape ``(coordinate,)``.

        Parameters
        ----------
        values : mapping of str to array_like, optional
            Free variables that start elsewhere than the model says.
        starts : sequence of array, optional
            x(t0) of each constraint, where the states start elsewhere.
        """
        return np.concatenate([part.ravel() for part in self._start_parts(values or {}, starts)])

    def _start_parts(self, values, starts) -> list[NDArray[np.float64]]:
        given = self.start_graphs if starts is None else [*map(pt.as_tensor, starts)]
        graphs = self._coordinate_graphs(given)
        reached = set(ancestors(graphs))
        initial = self.model.rvs_to_initial_values | {
            self.model[name]: np.asarray(value) for name, value in values.items()
        }
        free = [rv for rv in self.model.free_RVs if rv in reached]
        with np.errstate(all="ignore"):
            parts = pytensor.function(
                [], at_initial_values(graphs, free, initial), mode=EVALUATE_ONCE
            )()
        if all(np.isfinite(part).all() for part in parts):
            return parts
        free = [self._exact[name] for name in self._free]  # a prior excludes where the states start
        own = at_initial_values([_unconstrained(self._exact, rv) for rv in free], free, {})
        instead = pytensor.function([], own, mode=EVALUATE_ONCE)()
        return [np.where(np.isfinite(p), p, one) for p, one in zip(parts, instead, strict=True)]

    def drawn(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return draws of the prior, x(t0) near where it was seen, if it was.

        Where x(t0) has a prior of its own half of the draws are of that.  A prior that cannot be
        drawn from is taken for a wide normal.  What is held is the median of the first draws.
        """
        there = self._there
        phi = there + FAR * (1 + np.abs(there)) * rng.normal(size=(n, len(there)))
        with suppress(*NO_DRAWS):
            parts = [np.reshape(part, (n, -1)) for part in self._drawing(n)(rng)]
            drawn = np.concatenate(parts, axis=1)
            phi = np.where(np.isfinite(drawn), drawn, phi)
        n_of_start = len(self.of_starts(self._labels))
        if n_of_start:
            sparse = [
                np.broadcast_to(c.gp.data.is_sparse, c.gp.mean.shape) for c in self.constraints
            ]
            is_unseen = np.array(self.of_starts(sparse), dtype=bool)
            is_default = np.isin(self.names[-n_of_start:], self.default_starts)
            nearest, farthest = np.where(is_unseen[:, None], UNSEEN, NOISES).T
            noise = 10 ** (nearest + (farthest - nearest) * rng.random((n, 1)))
            near = there[-n_of_start:] + noise * rng.normal(size=(n, n_of_start))
            by_data = is_default | (~is_unseen & (np.arange(n)[:, None] % 2 == 0))
            phi[:, -n_of_start:] = np.where(by_data, near, phi[:, -n_of_start:])
        if self._held_at is None:
            self._held_at = np.median(phi[:, self.is_held], axis=0)
        phi[:, self.is_held] = self._held_at
        return phi

    def _drawing(self, n: int) -> Callable[[np.random.Generator], list[NDArray]]:
        """Return what draws the coordinates from their prior so many times, compiled once."""
        if n not in self._drawings:
            free = [self._exact[name] for name in self._free]
            graphs = self._number.opened([_unconstrained(self._exact, rv) for rv in free])
            self._drawings[n] = compile_draws(graphs, n)
        return self._drawings[n]

    def drawn_starts(self, n: int, rng: np.random.Generator) -> list[NDArray[np.float64]]:
        """Return draws of the prior of each x(t0); NaN of what is known, or cannot be drawn."""
        starts = [np.full((n, *c.gp.mean.shape), np.nan) for c in self.constraints]
        for part in self._parts:
            with suppress(*NO_DRAWS):
                [draws] = draw_values([self._exact[part.name]], n, rng)
                starts[part.number][(slice(None), *part.where)] = draws
        return starts

    def endless(self, point: NDArray[np.float64], widths: NDArray[np.float64]) -> list[str]:
        """Return the coordinates of flat prior along which the density does not fall off.

        So far as the ODE can be integrated, on either side of a point, in the posterior's widths.
        """
        flat = [isinstance(self._exact[name].owner.op, FLAT) for name in self._free]
        of_flat = np.flatnonzero(np.repeat(flat, [int(np.prod(s)) for s in self._shapes]))
        far = np.array([*DISTANCES, *(-distance for distance in DISTANCES)])
        moved = point + far[:, None, None] * np.diag(widths)[of_flat]
        u = self._split(np.concatenate([point[None], moved.reshape(-1, len(point))]))
        solutions = self._solved(u)
        is_solved = np.all([np.isfinite(x).reshape(len(x), -1).all(axis=1) for x in solutions], 0)
        heights = self._heights(u, solutions)
        falls = is_solved[1:] & (heights[1:] < heights[0] - FALLING)
        ends = falls.reshape(2, len(DISTANCES), -1).any(axis=1).all(axis=0)
        names = self.names
        return [names[k] for k in of_flat[~ends]]

    def impossible(self, phi: NDArray[np.float64]) -> str:
        """Say why the density at a point is zero: where a solution ends, or which term."""
        u = self._split(phi[None])
        trajectories = self._solved(u)
        if not all(np.isfinite(x).all() for x in trajectories):
            return self._ended(u)
        graphs = [self.single_terms[name] for name in self.likelihood]
        with np.errstate(all="ignore"):
            evaluate = compile_for_draws([*self._values, *self._x], graphs)
            arrays = with_draws(evaluate(*u, *trajectories), graphs, 1)
        densities = {name: v[0] for name, v in zip(self.likelihood, arrays, strict=True)}
        values = self.model.rvs_to_values
        names = [str(rv.name) for rv in self._observed]
        observed = {name: values[self.model[name]].eval(mode=EVALUATE_ONCE) for name in names}
        zero = where_impossible(densities, observed)
        return f"The likelihood is zero at {zero}." if zero else ""

    def without_slope(self, phi: NDArray[np.float64]) -> str:
        """Say why the density at a point has no derivatives: where the right-hand side has none."""
        u = self._split(phi[None])
        [x, *_] = self._solved(u)

        def said(ode: ODE, t, start, theta) -> str:
            return explain_nonfinite_slope(ode, t, ode.solve(t, start, theta), theta)

        where = self._of_solutions(u, said) if np.isfinite(x).all() else self._ended(u)
        return where or "The likelihood has no finite derivative by the states or parameters there."

    def _ended(self, u) -> str:
        """Say where the first solution ends that does, of one point."""
        return self._of_solutions(u, explain_failure)

    def _of_solutions(self, u, say: Callable[..., str]) -> str:
        """Return the first that there is to say of levels, times, start and parameters."""
        theta, starts, _ = self._at(u)
        for constraint, parameters, x0 in zip(self.constraints, theta, starts, strict=True):
            gp, levels = constraint.gp, np.atleast_2d(constraint.gp.levels_of(x0)[0])
            values = np.atleast_2d(parameters[0, ..., 0, :])
            each = np.broadcast_to(values, (len(levels), values.shape[-1]))
            odes = equations(constraint.ode, gp)
            for ode, start, own, t in zip(odes, levels, each, np.atleast_2d(gp.t), strict=True):
                if where := say(ode.transformed, t, start, own):
                    return f"{where[0].upper()}{where[1:]}"
        return ""

    def _coordinate_graphs(self, starts: Sequence) -> list:
        """Return the coordinates as graphs of the model's variables, and of the x(t0) of each."""
        here = {self._exact[name]: self.model[name] for name in self._free[: self._n_others]}
        here |= {self._exact[p.name]: starts[p.number][p.where] for p in self._parts}
        graphs = [_unconstrained(self._exact, self._exact[name]) for name in self._free]
        return graph_replace(graphs, here, strict=False)

    def coordinates(self, posterior: xr.Dataset) -> NDArray[np.float64]:
        """Return draws, dims ``chain`` and ``draw``, as phi, shape ``(draw, coordinate)``.

        Raises
        ------
        ValueError
            If draws and model do not belong together, or if they are too few.
        """
        arrays = self.at_draws(posterior, self._coordinate_graphs(self.start_graphs))
        draws = np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)
        if len(draws) <= 2 * draws.shape[1] or not (np.ptp(draws, axis=0) > 0).all():
            msg = (
                f"{len(draws)} draws of {draws.shape[1]} coordinates are given; expected more "
                "than two draws per coordinate, and none that is constant."
            )
            raise ValueError(msg)
        return draws


def _to_be_given(constraint: Constraint, *_) -> TensorVariable:
    """Return data of the shape of the states, in whose place solutions are put."""
    shape = constraint.gp.prior_mean.shape
    return pytensor.shared(np.zeros(shape), shape=shape)


def _slopes(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return derivatives from values at points and a step along each axis, and back again."""
    n = values.shape[1] // 2
    with np.errstate(invalid="ignore"):
        return (values[:, 1 : n + 1] - values[:, n + 1 :]) / (2 * STEP)


def _chained(sensitivities: NDArray, by: NDArray) -> NDArray[np.float64]:
    """Return derivatives along axes from those by starts and parameters, of which these are given.

    Shapes ``(point, ..., time, state, d)`` and ``(point, n, ..., d)``; the result has
    ``(point, n, ..., time, state)``.
    """
    *front, n_times, n_states, d = sensitivities.shape
    flat = sensitivities.reshape(*front, n_times * n_states, d)
    along = np.moveaxis(np.moveaxis(by, 1, -2) @ flat.mT, -2, 1)
    return along.reshape(*along.shape[:-1], n_times, n_states)


def _check_continuous(free: Sequence):
    discrete = [rv.name for rv in free if not np.issubdtype(rv.dtype, np.inexact)]
    if discrete:
        msg = f"the free variables {discrete} are discrete; expected continuous ones."
        raise ValueError(msg)


def _connected(model: pm.Model, seeds, x) -> list:
    """Return likelihoods and potentials that share variables with seeds, or with each other."""
    roots = {*model.free_RVs, *x}
    left = [*model.observed_RVs, *model.potentials]
    chosen: list = []
    reached = roots & set(ancestors(seeds))
    while found := [term for term in left if reached & set(ancestors([term]))]:
        chosen += found
        left = [term for term in left if term not in found]
        reached |= roots & set(ancestors(found))
    return chosen


def _is_made_of(variable, free, model: pm.Model, x) -> bool:
    roots = {*model.free_RVs, *x} & set(ancestors([variable]))
    return bool(roots) and roots <= set(free)


def _unconstrained(model: pm.Model, rv):
    transform = model.rvs_to_transforms[rv]
    return rv if transform is None else transform.forward(rv, *rv.owner.inputs)

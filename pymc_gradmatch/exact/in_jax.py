"""Batched exact posteriors of data sets, evaluated by JAX: ``fit_many(backend="jax")``."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor import as_tensor

from pymc_gradmatch._pymc import jax_function
from pymc_gradmatch.data_values import SharedValues
from pymc_gradmatch.exact.batch import BatchPosterior
from pymc_gradmatch.exact.posterior import ExactPosterior, Expansion
from pymc_gradmatch.exact.solutions import Array
from pymc_gradmatch.ode import DEFAULT_RTOL, SOLVED, Solve, packages

AT_ONCE = {"cpu": (256, 64)}  # points, without derivatives and with: they stay in a core's cache
AT_ONCE_ON_ACCELERATORS = (8_192, 2_048)
MOST_EXPLICIT = 300  # steps of a piece: all points of a block wait for the slowest
FEW = 32  # points, which cost less in machine code than JAX's steps for a block of them


class Functions(NamedTuple):
    """What JAX evaluates at points, with up to so many explicit steps or all."""

    evaluate: Callable
    expand: Callable


class JaxBatchPosterior(BatchPosterior):
    """Posteriors of several data sets, whose densities and derivatives JAX computes.

    The graphs are those of :class:`BatchPosterior`, and so are the derivatives but for rounding:
    the solution's by forward sensitivities, those of parameters and x(t0) by JAX in place of
    differences.  JAX compiles for a fixed number of points; the last of a request are padded.
    Points that need many steps, as stiff ones do, are evaluated together after the others.  A few
    of them, and those whose solution diffrax does not find, are evaluated in machine code.

    Raises
    ------
    NotImplementedError
        If JAX has no form of an operation in the graphs.
    """

    def __init__(self, written: ExactPosterior, number: SharedValues):
        super().__init__(written, number)
        self._quick = self._functions_for_jax(MOST_EXPLICIT)
        self._whole = self._functions_for_jax()

    def _functions_for_jax(self, most_explicit: int | None = None) -> Functions:
        """Write functions for JAX, and trace them, so that what has no form is found now."""
        _, jax = packages()
        [constraint], [[ode]] = self.constraints, self._transformed_odes
        [used] = self._used
        positive = np.broadcast_to(constraint.gp.data.positive, constraint.gp.mean.shape)
        wrt = tuple(used.tolist())
        try:
            at_values, tables_of_values = self._theta_and_start
            gradient, tables_of_gradient = self._density_with_gradient
            states = Solve(ode, constraint.gp.t, DEFAULT_RTOL, wrt)
            solve, solve_with_sensitivities = (
                one.in_jax(most_explicit) for one in (states, states.with_sensitivities)
            )
        except NotImplementedError as error:
            raise _no_form(error) from error
        jnp, sizes = jax.numpy, [int(np.prod(shape)) for shape in self._shapes]
        ends = np.cumsum(sizes)[:-1]

        def split(phi) -> list:
            parts = jnp.split(phi, ends)
            return [part.reshape(s) for part, s in zip(parts, self._shapes, strict=True)]

        def start_and_theta(phi, tables):
            theta, start = at_values(*split(phi), *(tables[place] for place in tables_of_values))
            start = jnp.where(positive, jnp.log(jnp.where(positive, start, 1.0)), start)
            return start, theta[0]

        def density(phi, transformed, tables):
            """Return the log density, and its gradient by the coordinates and by the states."""
            states = jnp.where(positive, jnp.exp(transformed), transformed)
            values = (tables[place] for place in tables_of_gradient)
            log_density, *by = gradient(*split(phi), states, *values)
            by_phi = jnp.concatenate([one.ravel() for one in by[:-1]])
            return log_density, by_phi, by[-1] * jnp.where(positive, states, 1.0), states

        def evaluate(phi, tables):
            transformed = solve(*jax.vmap(start_and_theta)(phi, tables))
            log_density, _, _, states = jax.vmap(density)(phi, transformed, tables)
            return log_density, states

        def linearise(phi, factor, tables):
            def of_point(phi):
                return jnp.concatenate(start_and_theta(phi, tables))

            at, along = jax.linearize(of_point, phi)
            return at, jax.vmap(along)(factor.T)[:, np.array(wrt)]

        def expand_one(phi, factor, transformed, sensitivities, by, tables):
            by_z = jnp.einsum("tkd,nd->ntk", sensitivities, by)

            def slope(z):
                moved = transformed + jnp.tensordot(z, by_z, 1)
                log_density, by_phi, by_states, _ = density(phi + factor @ z, moved, tables)
                total = by_phi @ factor + jnp.tensordot(by_z, by_states, 2)
                return total, (total, log_density)

            hessian, (total, log_density) = jax.jacfwd(slope, has_aux=True)(jnp.zeros(len(phi)))
            return log_density, total, (hessian + hessian.T) / 2

        def expand(phi, factor, tables):
            at, by = jax.vmap(linearise)(phi, factor, tables)
            n_states = len(positive)
            transformed, sensitivities = solve_with_sensitivities(
                at[:, :n_states], at[:, n_states:]
            )
            values = jax.vmap(expand_one)(phi, factor, transformed, sensitivities, by, tables)
            is_solved = jnp.isfinite(transformed).all(axis=(1, 2))
            return *values, is_solved & jnp.isfinite(sensitivities).all(axis=(1, 2, 3))

        n = len(self._start)
        of_values, with_derivatives = AT_ONCE.get(jax.default_backend(), AT_ONCE_ON_ACCELERATORS)
        self._places = {*tables_of_values, *tables_of_gradient}
        phi = np.zeros((1, n))
        own = self.number.shared_in([*self._graphs[:2], *self._gradient_graphs])
        tables = {place: v.get_value()[None] for v, place in own.items()}
        try:
            jax.eval_shape(evaluate, phi, tables)
            jax.eval_shape(expand, phi, np.eye(n)[None], tables)
        except (NotImplementedError, jax.errors.JAXTypeError) as error:
            raise _no_form(error) from error
        return Functions(
            _by_blocks(jax, evaluate, of_values), _by_blocks(jax, expand, with_derivatives)
        )

    @cached_property
    def _theta_and_start(self) -> tuple[Callable, list[int]]:
        return self._function(self._values, self._graphs[:2])

    @cached_property
    def _density_with_gradient(self) -> tuple[Callable, list[int]]:
        return self._function([*self._values, *self._x], self._gradient_graphs)

    def _function(self, inputs: Sequence, graphs: Sequence) -> tuple[Callable, list[int]]:
        """Return graphs as a function for JAX of inputs and tables, and the places of these."""
        places = self.number.shared_in(graphs)
        known: dict[Any, Any] = {
            v: as_tensor(v.get_value())
            for v in ancestors(graphs)
            if isinstance(v, SharedVariable) and v not in places and v not in inputs
        }
        graphs = graph_replace([*graphs], known, strict=False) if known else graphs
        return jax_function([*inputs, *places], graphs), [*places.values()]

    def _evaluate(self, phi) -> tuple[Array, ...]:
        def by_jax(one: Functions, phi):
            log_density, states = one.evaluate(phi, self._tables_at_rows())
            log_density = np.where(np.isfinite(log_density), log_density, -np.inf)
            return (log_density, states), np.isfinite(states).all(axis=(1, 2))

        return self._in_turn(by_jax, super()._evaluate, phi)

    def expand_along(self, phi: Array, factor: Array) -> Expansion:
        """Expand the log density to second order at points, along axes."""

        def by_jax(one: Functions, phi, factor):
            *values, is_solved = one.expand(phi, factor, self._tables_at_rows())
            return values, is_solved

        return Expansion(*self._in_turn(by_jax, super().expand_along, phi, factor))

    def value_and_gradient(self, phi: Array, widths: Array) -> tuple[Array, Array]:
        """Evaluate the log density and its gradient at points."""

        def by_jax(one: Functions, phi, _):
            factor = np.broadcast_to(np.eye(phi.shape[1]), (*phi.shape, phi.shape[1]))
            *values, _, is_solved = one.expand(phi, factor, self._tables_at_rows())
            return values, is_solved

        log_density, gradient = self._in_turn(by_jax, super().value_and_gradient, phi, widths)
        return log_density, gradient

    def _tables_at_rows(self) -> dict[int, Array]:
        return {place: self._tables[place][self._rows] for place in self._places}

    def _in_turn(
        self, by_jax: Callable, in_machine_code: Callable, *arguments: Array
    ) -> tuple[Array, ...]:
        """Return values at points: of JAX, and where it finds no solution of machine code."""
        found, is_solved = by_jax(self._quick, *arguments)
        values, ended = tuple(map(np.array, found)), np.full(len(is_solved), SOLVED)
        rows, left = self._rows, np.flatnonzero(~is_solved)
        try:
            if len(left) > FEW:
                self._rows = rows[left]
                found, is_solved = by_jax(self._whole, *(array[left] for array in arguments))
                _fill(values, left[is_solved], [array[is_solved] for array in found])
                left = left[~is_solved]
            if len(left):
                self._rows = rows[left]
                _fill(values, left, in_machine_code(*(array[left] for array in arguments)))
                ended[left] = self._ended.pop()
        finally:
            self._rows = rows
        self._ended.append(ended)
        return values


def _fill(values: Sequence[Array], places: NDArray[np.intp], found: Sequence[Array]):
    """Set values at places."""
    for array, own in zip(values, found, strict=True):
        array[places] = own


def _by_blocks(jax: Any, function: Callable, size: int) -> Callable:
    """Compile a function of points for blocks of one size, of which the last is padded."""
    compiled = jax.jit(function)

    def at_points(phi: Array, *arguments: Any) -> list[Array]:
        blocks = []
        for begin in range(0, len(phi), size):
            rows = np.minimum(np.arange(begin, begin + size), len(phi) - 1)
            block = jax.tree.map(lambda array, rows=rows: array[rows], (phi, *arguments))
            blocks.append(compiled(*block))
        return [np.concatenate(parts)[: len(phi)] for parts in zip(*blocks, strict=True)]

    return at_points


def _no_form(error: Exception) -> NotImplementedError:
    """Return the error that names what JAX has no form of."""
    [first, *_] = str(error).splitlines() or [type(error).__name__]
    return NotImplementedError(
        f'the ODE, a prior or the likelihood has no form in JAX: {first} Expected backend="numba".'
    )

"""ODEs: a right-hand side with its names, evaluated, differentiated and solved."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.graph.basic import Variable
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import in_numpy, without_traces
from pymc_gradmatch.numerics import one_at_a_time
from pymc_gradmatch.ode.inputs import (
    Input,
    Steps,
    as_doses,
    as_inputs,
    check_known,
    input_at,
    stacked_input,
    steps_at,
    times_where,
)
from pymc_gradmatch.ode.names import Names
from pymc_gradmatch.ode.node import solution
from pymc_gradmatch.ode.nonfinite import explain_failure
from pymc_gradmatch.ode.rhs import (
    SymbolicRHS,
    at_one_time,
    by_chain_rule,
    check_arguments,
    derivatives_of,
    expressions,
    returns_vector,
    with_input_values,
    with_jacobian,
)
from pymc_gradmatch.ode.rhs_code import Code, compile_rhs, tables_of
from pymc_gradmatch.ode.scalarize import Scalarized
from pymc_gradmatch.ode.solve import (
    DEFAULT_RTOL,
    Equations,
    Solver,
    evaluate,
    failures_by_reason,
)
from pymc_gradmatch.reporting import latex

type Array = NDArray[np.float64]

N_TIMES = 7  # of the symbols with which a right-hand side is checked
DERIVED = ("transformed", "symbolic", "_linearisation")  # attributes that copies compute again


class ODE(Names):
    r"""A system of ordinary differential equations, :math:`\dot x = f(t, x, \theta)`.

    Parameters
    ----------
    rhs : callable
        ``rhs(t, x, theta)``, written with :mod:`pymc.math` or :mod:`pytensor.tensor` functions.
        ``x`` and ``theta`` are named tuples: unpack them, or use ``x.prey`` and ``theta.alpha``.
        Returns one expression per state, as a tuple or list in the order of ``states`` or as a
        dict by state name.  ``x.prey`` is a tensor of the state at many times, time last, and
        ``theta.alpha`` a scalar: write what holds at each time.  The total of states is
        ``x.prey + x.predator``; ``pt.sum`` without an axis would add up times too.
        It may instead return one vector of the states; then everything is of one time:
        ``A @ pt.stack(x)``.
    states : sequence of str
        Names of the states.
    params : sequence of str, or mapping of str to int
        Names of the parameters.  If some are vectors, a mapping to their numbers of entries, or to
        () for scalars: ``{"k": 8, "loss": ()}``.  ``theta.k`` is then a vector with one prior of
        shape 8, and its entries are named ``k_0`` to ``k_7``.
    positive : sequence of str, optional
        Names of positive states.  The package works with their logarithms; the right-hand side and
        all results are in natural units.
    inputs : sequence of str, optional
        Names of known inputs.  The right-hand side is then ``rhs(t, x, theta, u)`` with a named
        tuple ``u``; the inputs are given to :meth:`with_inputs`.

    Raises
    ------
    ValueError, TypeError
        If a name is not usable, or the right-hand side, called with symbols, fails, does not return
        one scalar expression per state, picks or mixes times, changes from call to call, or takes
        its arguments in the order of ``odeint``, ``rhs(x, t, theta)``.

    Examples
    --------
    >>> import pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> decay
    ODE(states=['mass'], params=['rate'])
    >>> decay.solve([0.0, 1.0, 2.0], x0=[1.0], theta=[0.5])[:, 0].round(4)
    array([1.    , 0.6065, 0.3679])

    A chain of three compartments, with a vector of rates:

    >>> import pytensor.tensor as pt
    >>> def chain(t, x, theta):
    ...     flow = theta.k * pt.stack(x)
    ...     return pt.concatenate([[0.0], flow[:-1]]) - flow
    >>> ode = gm.ODE(chain, ["a", "b", "c"], {"k": 3})
    >>> ode.solve([0.0, 1.0], x0=[1.0, 0.0, 0.0], theta={"k": [1.0, 2.0, 3.0]})[1].round(3)
    array([0.368, 0.233, 0.147])
    """

    @without_traces
    def __init__(
        self,
        rhs: Callable,
        states: Sequence[str],
        params: Sequence[str] | Mapping[str, int | tuple[int, ...]],
        *,
        positive: Sequence[str] = (),
        inputs: Sequence[str] = (),
    ):
        self.rhs = rhs
        super().__init__(states, params, positive, inputs)
        self._given: tuple[Input | Callable, ...] = ()
        self._doses: dict[str, Input] = {}
        self._in_logs = (False,) * len(self.states)
        self._kinks = np.empty(0)  # besides those of the inputs
        self._fixed_time: float | None = None
        self._codes: dict[tuple, Code] = {}  # shared by copies
        theta = [pt.scalar(name, dtype="float64") for name in self.params]
        (t,), x, u = (
            [pt.TensorType("float64", (N_TIMES,))(name) for name in names]
            for names in (["t"], self.states, self.inputs)
        )
        arguments = self._arguments(x, theta, u)
        if not isinstance(rhs, Scalarized) and (
            self._has_vectors or returns_vector(rhs, t, *arguments)
        ):
            self.rhs = Scalarized(rhs)
        check_arguments(self.rhs, t, *arguments)

    @classmethod
    def from_sbml(cls, path: str | Path) -> "ODE":
        """Return the equations of an SBML file.

        Its parameters are those of the file that a slope depends on; the attributes ``nominal`` and
        ``nominal_start`` are their values and x(0) there.  Needs the extra ``petab``.

        Parameters
        ----------
        path : str or Path
            The file.

        Raises
        ------
        NotImplementedError
            If the model contains delays, algebraic rules or events.

        Examples
        --------
        >>> import pymc_gradmatch as gm
        >>> ode = gm.ODE.from_sbml("tests/petab/conversion/model.xml")
        >>> ode.nominal
        {'cell': 1.0, 'k1': 0.8, 'k2': 0.6}
        >>> ode.solve([0.0, 1.0], ode.nominal_start, ode.nominal)[1].round(4)
        array([0.5695, 0.4305])
        """
        from pymc_gradmatch.sbml import read_right_hand_side  # here: it needs an extra

        rhs, states, params, nominal_start, nominal = read_right_hand_side(path)
        ode = cls(rhs, states, params)
        vars(ode).update(nominal=nominal, nominal_start=nominal_start)
        return ode

    def __copy__(self) -> "ODE":
        """Return the same ODE without what is derived from its attributes."""
        copied = object.__new__(type(self))
        vars(copied).update({n: v for n, v in vars(self).items() if n not in DERIVED})
        return copied

    def _replaced(self, **attributes: Any) -> "ODE":
        """Return a copy with some attributes replaced."""
        copied = copy(self)
        vars(copied).update(attributes)
        return copied

    def __reduce__(self):
        # Its named tuples and compiled functions cannot be pickled, and need not be.
        names = {"positive": self.positive, "inputs": self.inputs}
        given = self._inputs_by_name | self._doses
        kept = ("_in_logs", "_kinks", "_fixed_time")
        others = {name: vars(self)[name] for name in kept}
        return _rebuilt, (self.rhs, self.states, self._declared, names, given, others)

    def _repr_html_(self) -> str | None:
        names = self.symbolic.names()
        equations = zip(self.symbolic.x, self.symbolic.derivatives, strict=True)
        try:
            lines = [rf"\dot{{{names[x]}}} &= {latex(slope, names)}" for x, slope in equations]
        except NotImplementedError:
            return None  # notebooks then show the text
        body = r" \\ ".join(lines)
        return rf'<div class="math">\[\begin{{aligned}} {body} \end{{aligned}}\]</div>'

    def with_inputs(self, inputs: Mapping[str, Input | Callable]) -> "ODE":
        """Return the same ODE with known inputs.

        Parameters
        ----------
        inputs : mapping of str to Input or callable
            For each of the names in ``inputs`` a :class:`~pymc_gradmatch.Input`, or a smooth
            function of time written with :mod:`pymc.math`.  An input with jumps or kinks must be an
            ``Input``: solvers restart at its times.  Also, for any of the states, an ``Input`` of
            kind ``"dose"`` or ``"reset"``, whose first time is later than that of x0.

        Raises
        ------
        ValueError, TypeError
            If names or inputs do not fit.

        Examples
        --------
        >>> import pymc as pm, pymc_gradmatch as gm
        >>> rhs = lambda t, x, theta, u: [u.sun - theta.loss * x.heat]
        >>> ode = gm.ODE(rhs, ["heat"], ["loss"], inputs=["sun"])
        >>> daily = ode.with_inputs({"sun": lambda t: 1 + pm.math.sin(t)})
        >>> daily.solve([0.0, 1.0], x0=[0.0], theta=[0.0])[1].round(4)
        array([1.4597])
        """
        doses = as_doses(inputs, self.states, self.positive)
        others = {n: inputs[n] for n in inputs if n not in doses} if doses else inputs
        replaced: dict[str, Any] = {"_doses": doses, "symbolic": self.symbolic}
        if others or self.inputs or not doses:
            replaced["_given"] = as_inputs(others, self.inputs)
        return self._replaced(**replaced)

    def with_inputs_changed(self, inputs: Mapping[str, Input | Callable]) -> "ODE":
        """Return the same ODE with some of its inputs replaced."""
        return self.with_inputs({**self._inputs_by_name, **self._doses, **inputs})

    @property
    def _inputs_by_name(self) -> dict[str, Input | Callable]:
        """The inputs of the right-hand side, if they were given."""
        return dict(zip(self.inputs, self._given, strict=False))

    @property
    def is_positive_state(self) -> tuple[bool, ...]:
        """Which states are positive, also if this is the ODE of their logarithms."""
        return tuple(a or b for a, b in zip(self.is_positive, self._in_logs, strict=True))

    def natural_states(self, x: Array) -> Array:
        """Return states in natural units from those of this ODE, which may be logarithms."""
        with np.errstate(over="ignore"):
            return np.where(self._in_logs, np.exp(np.where(self._in_logs, x, 0)), x)

    def transform_states(self, x: Array) -> Array:
        """Return states of :attr:`transformed` from those of this ODE."""
        positive = np.array(self.is_positive)
        return np.where(positive, np.log(np.where(positive, x, 1)), x)

    @cached_property
    def transformed(self) -> "ODE":
        r"""The ODE of the logarithms of positive states, by the chain rule.

        .. math:: \frac{d \log x}{dt} = \frac{f(t, x, \theta)}{x}

        This ODE itself, if no state is positive.
        """
        if not self.positive:
            return self
        rhs = partial(by_chain_rule, self.rhs, self.is_positive)
        return self._replaced(rhs=rhs, positive=(), _in_logs=self.is_positive)

    @property
    def is_nonautonomous(self) -> bool:
        """Whether the right-hand side depends on time: by itself, by inputs or by doses."""
        return bool(len(self.jumps) or self.symbolic.depend_on([self.symbolic.t]).any())

    @property
    def jumps(self) -> Array:
        """Times at which an input jumps, and with it the slope of the states, or a state jumps."""
        return times_where((*self._given, *self._doses.values()), "jumps")

    @property
    def steps(self) -> Steps:
        """How states jump at :attr:`jumps`, by doses and resets."""
        return steps_at(self.jumps, self._doses, self.states)

    @property
    def breaks(self) -> Array:
        """Times at which an input jumps or has a kink, or a state jumps."""
        kinks = np.union1d(times_where(self._given, "kinks"), self._kinks)
        return np.union1d(self.jumps, kinks)

    def check_times(self, t: Array):
        """Raise if inputs were not given, or are not known from the first to the last time."""
        if self.inputs and not self._given:
            msg = (
                f"the inputs {list(self.inputs)} of the ODE were not given; expected "
                f"ode.with_inputs({{{self.inputs[0]!r}: gm.Input(times, values), ...}}), or "
                "inputs= for gm.fit and gm.build_model."
            )
            raise ValueError(msg)
        check_known(self._given, self.inputs, t)

    def __call__(self, t, x, theta) -> TensorVariable:
        """Return the right-hand side as a PyTensor graph, shape ``(..., time, state)``.

        At times ``(time,)`` and states ``(..., time, state)``.  Parameters, by name or in the order
        of ``params``, broadcast against ``(..., time)``.
        """
        self.check_times(np.empty(0) if isinstance(t, Variable) else np.asarray(t))
        t, x = pt.as_tensor(t), pt.as_tensor(x)
        theta = [pt.as_tensor(value) for value in self.ordered_params(theta)]
        columns = [x[..., k] for k in range(len(self.states))]
        return derivatives_of(self.rhs, t, *self._arguments(columns, theta, self._inputs_at(t)))

    @cached_property
    def symbolic(self) -> SymbolicRHS:
        """The right-hand side as graphs of named symbols, inputs among them."""
        x = [pt.vector(name, dtype="float64") for name in self.states]
        t, *u = (pt.vector(name, dtype="float64") for name in ("t", *self.inputs))
        theta = [pt.scalar(name, dtype="float64") for name in self.params]
        return SymbolicRHS(t, x, theta, u, expressions(self.rhs, t, *self._arguments(x, theta, u)))

    @property
    def used_params(self) -> NDArray[np.bool_]:
        """Which parameters any derivative depends on, shape ``(param,)``."""
        return self.symbolic.depend_on(self.symbolic.theta).any(axis=0)

    @property
    def jacobian_pattern(self) -> NDArray[np.bool_]:
        """Which derivatives (rows) depend on which states (columns), shape ``(state, state)``."""
        return self.symbolic.depend_on(self.symbolic.x)

    def _inputs_at(self, t) -> list:
        return [input_at(value, t) for value in self._given]

    def solve(
        self,
        t: ArrayLike,
        x0,
        theta,
        *,
        inputs: Mapping[str, Input | Callable] | None = None,
        rtol: float = DEFAULT_RTOL,
    ) -> Any:
        r"""Solve the ODE: as numbers, or as a differentiable tensor if an argument is a tensor.

        .. math:: x(t) = x_0 + \int_{t_0}^t f(s, x(s), \theta)\, ds

        The solver restarts where an input jumps or has a kink.  ``x0`` includes a dose at ``t[0]``.

        Parameters
        ----------
        t : array_like of float
            Increasing times, shape ``(time,)``: numbers.
        x0 : array_like, or mapping of str to array_like
            States at ``t[0]``, shape ``(..., state)``, or by name; numbers or tensors.
        theta : mapping of str to array_like, or sequence
            Parameters by name or in order: numbers, arrays or tensors, of shape ``(...)``; or
            one array of numbers of shape ``(..., param)``.
        inputs : mapping of str to Input or callable, optional
            As for :meth:`with_inputs`, if they were not given before.
        rtol : float, default 1e-9
            Relative tolerance of each step; right for evidence and for weights.  1e-6 is enough
            for a chain whose draws are reweighted.

        Returns
        -------
        array of float, or TensorVariable
            Trajectories, shape ``(..., time, state)``, with the leading axes of starts and
            parameters, such as draws, experiments or patients.  If a start or a parameter is a
            tensor, so is the solution: it can be used in any PyMC model, has gradients by forward
            sensitivities, and is compiled by numba and by JAX.

        Raises
        ------
        ValueError, TypeError
            If times, starts or parameters do not fit.

        Warns
        -----
        UserWarning
            If the solution of numbers fails: it is NaN, and the warning says why (see
            :meth:`failures`).  A tensor is NaN without a warning, and so is the density of data.

        Notes
        -----
        Dormand and Prince's pair of order 8; for stiff systems, which are detected, the linearly
        implicit Euler method extrapolated to order 9 [1]_.  Sensitivities take the same steps,
        and cost about as much as one more solution for each derivative.  JAX runs both methods
        by diffrax (``pip install "pymc-gradmatch[jax]"``).

        References
        ----------
        .. [1] Hairer, E., Norsett, S. P., Wanner, G. (1993). *Solving Ordinary Differential
           Equations I*, section II.10; Hairer, E., Wanner, G. (1996). *II*, section IV.9.

        Examples
        --------
        >>> import pymc as pm, pymc_gradmatch as gm
        >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
        >>> decay.solve([0.0, 1.0], x0=[[1.0], [2.0]], theta={"rate": 0.5}).shape
        (2, 2, 1)

        As a node of a model:

        >>> with pm.Model():
        ...     rate = pm.HalfNormal("rate", 1)
        ...     x = decay.solve([0.0, 1.0, 2.0], x0={"mass": 1.0}, theta={"rate": rate})
        ...     y = pm.Normal("y", x[:, 0], 0.1, observed=[1.0, 0.6, 0.4])
        """
        if inputs is not None:
            return self.with_inputs(inputs).solve(t, x0, theta, rtol=rtol)
        if isinstance(t, Variable):
            msg = "t is a tensor; expected the times of the solution as numbers."
            raise TypeError(msg)
        t = np.asarray(t, dtype=float)
        if t.ndim != 1 or len(t) < 2 or not (np.diff(t) > 0).all():
            msg = f"t has shape {t.shape}; expected at least two strictly increasing times."
            raise ValueError(msg)
        if not np.isfinite(t).all():
            msg = "t has infinite times; expected finite ones, or ode.steady_state(x0, theta)."
            raise ValueError(msg)
        self.check_times(t)
        return self._solution(t, x0, theta, rtol)

    def steady_state(
        self,
        x0,
        theta,
        *,
        inputs: Mapping[str, Input | Callable] | None = None,
        t: float = 0.0,
        rtol: float = DEFAULT_RTOL,
    ) -> Any:
        r"""Return the steady state that a solution converges to, :math:`f(t, x, \theta) = 0`.

        Time and inputs are fixed at ``t``; doses are ignored.  The solution from ``x0`` is followed
        until Newton's method converges, so that conserved totals, such as that of a protein and its
        complexes, are those of ``x0``.  Derivatives are those of the implicit function theorem,
        :math:`\partial f / \partial x\; dx = -\partial f / \partial \theta\; d\theta`.

        Parameters
        ----------
        x0, theta, inputs, rtol
            As for :meth:`solve`.
        t : float, default 0
            The time at which inputs are fixed.

        Returns
        -------
        array of float, or TensorVariable
            Shape ``(..., state)``.  A tensor if a start or a parameter is one.

        Warns
        -----
        UserWarning
            If a solution of numbers grows or oscillates: NaN.

        Examples
        --------
        >>> import pymc_gradmatch as gm
        >>> rhs = lambda t, x, theta: [theta.back * x.b - x.a, x.a - theta.back * x.b]
        >>> ode = gm.ODE(rhs, ["a", "b"], ["back"])
        >>> ode.steady_state([1.0, 0.0], {"back": 0.25}).round(6)
        array([0.2, 0.8])
        """
        if inputs is not None:
            return self.with_inputs(inputs).steady_state(x0, theta, t=t, rtol=rtol)
        fixed, times = self.at_fixed_time(t), np.array([t, np.inf])
        return fixed._solution(times, x0, theta, rtol)[..., -1, :]

    def at_fixed_time(self, t: float) -> "ODE":
        """Return the ODE with time and inputs fixed, without doses; states may be zero."""
        self.check_times(np.array([t]))
        now: Any = pt.constant(t, dtype="float64")
        fixed = [
            value
            if is_random
            else Input([0.0], [cast("Any", input_at(value, now)).data], kind="previous")
            for value, is_random in zip(self._given, self._is_random, strict=True)
        ]
        ode = self._replaced(positive=(), _given=tuple(fixed), _doses={}, _kinks=np.empty(0))
        if self.symbolic.depend_on([self.symbolic.t]).any() or any(self._is_random):
            rhs = partial(at_one_time, self.rhs, float(t))
            return ode._replaced(rhs=rhs, _fixed_time=float(t))
        return ode

    def failures(
        self, t: ArrayLike, x0, theta, *, inputs: Mapping[str, Input | Callable] | None = None
    ) -> dict[str, NDArray[np.int64]]:
        """Return which draws :meth:`solve` cannot solve, and why.

        Parameters
        ----------
        t, x0, theta, inputs
            As for :meth:`solve`: numbers, with at most one axis of draws.

        Returns
        -------
        dict of str to array of int
            For each reason the indices of the draws; empty if all can be solved.

        Examples
        --------
        >>> import pymc_gradmatch as gm
        >>> growth = gm.ODE(lambda t, x, theta: [theta.k * x.a**2], ["a"], ["k"])
        >>> growth.failures([0.0, 2.0], x0=[1.0], theta={"k": [0.1, 0.6]})
        {'blew up': array([1])}
        """
        if inputs is not None:
            return self.with_inputs(inputs).failures(t, x0, theta)
        t = np.asarray(t, dtype=float)
        self.check_times(t)
        x0, theta, _ = self._draws(self._starts(x0), self._params(theta))
        _, ended = self._solve_draws(t, x0, theta, DEFAULT_RTOL)
        return failures_by_reason(ended)

    @property
    def _is_random(self) -> list[bool]:
        """Of which inputs the values are tensors."""
        return [isinstance(value, Input) and value.is_tensor for value in self._given]

    def _solution(self, t: Array, x0, theta, rtol: float) -> Any:
        starts, params = self._starts(x0), self._params(theta)
        if any(self._is_random):
            ode, values = self._with_values_as_params()
            return ode._as_graph(t, starts, [*params, *values], rtol)
        if any(isinstance(value, Variable) for value in (*starts, *params)):
            return self._as_graph(t, starts, params, rtol)
        draws_x0, draws_theta, shape = self._draws(starts, params)
        x, ended = self._solve_draws(t, draws_x0, draws_theta, rtol)
        if failed := failures_by_reason(ended):
            counts = ", ".join(f"{len(draws)} {reason}" for reason, draws in failed.items())
            first = np.flatnonzero(ended)[0]
            start, parameters = self.transform_states(draws_x0[first]), draws_theta[first]
            why = (
                explain_failure(self.transformed, t, start, parameters)
                if np.isfinite(t).all()
                else f"theta is {parameters.round(6)}: its solution grows, or oscillates."
            )
            msg = (
                f"the numerical integration of {(ended != 0).sum()} of {len(ended)} draws failed "
                f"({counts}); their trajectories are NaN. Of the first, {why}"
            )
            warnings.warn(msg, UserWarning, stacklevel=3)
        return x.reshape(*shape, *x.shape[1:])

    def _as_graph(self, t: Array, starts: list, params: list, rtol: float) -> TensorVariable:
        starts, params = (
            [pt.as_tensor(value).astype("float64") for value in values]
            for values in (starts, params)
        )
        positive = self.is_positive
        starts = [pt.log(v) if one else v for v, one in zip(starts, positive, strict=True)]
        x = solution(self.transformed, t, rtol, [*starts, *params], len(self.states))
        if not self.positive:
            return x
        columns = [pt.exp(x[..., k]) if one else x[..., k] for k, one in enumerate(positive)]
        return pt.stack(columns, -1)

    def _draws(self, starts: list, params: list) -> tuple[Array, Array, tuple[int, ...]]:
        """Return starts ``(draw, state)``, parameters ``(draw, param)`` and the axes of draws."""
        try:
            given = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (*starts, *params)))
        except ValueError:
            shapes = [np.shape(value) for value in (*starts, *params)]
            msg = f"x0 and theta have shapes {shapes}; expected the same number of draws of all."
            raise ValueError(msg) from None
        x0, theta = np.split(np.stack(given, -1).reshape(-1, len(given)), [len(starts)], axis=1)
        below = np.array(self.is_positive) & (x0 <= 0).any(axis=0)
        if below.any():
            names = [name for name, is_below in zip(self.states, below, strict=True) if is_below]
            msg = f"the positive states {names} start at zero or below; expected positive numbers."
            raise ValueError(msg)
        return x0, theta, given[0].shape

    def _solve_draws(self, t: Array, x0: Array, theta: Array, rtol: float) -> tuple:
        """Return the states, shape ``(draw, time, state)``, and how draws ended."""
        ode = self.transformed
        found = Solver(ode.equations(), t, rtol)(self.transform_states(x0), theta)
        return ode.natural_states(found.x) if self.positive else found.x, found.ended

    def _with_values_as_params(self) -> tuple["ODE", list[TensorVariable]]:
        """Return the ODE with values of inputs that are tensors as parameters, and the values."""
        given = self._inputs_by_name
        random: dict[str, Any] = {
            name: value
            for name, value in given.items()
            if isinstance(value, Input) and value.is_tensor
        }
        places = [(name, k) for name, value in random.items() for k in range(len(value.times))]
        names = [f"{name}_{k}" for name, k in places]
        values = [random[name].values[..., k] for name, k in places]
        others = {name: value for name, value in given.items() if name not in random}
        breaks = [times_where((*random.values(),), what) for what in ("kinks", "jumps")]
        ode = self._replaced(
            rhs=partial(with_input_values, self.rhs, (*self.param_lengths,), self.inputs, random),
            params=(*self.params, *names),
            param_lengths=self.param_lengths | dict.fromkeys(names),
            inputs=tuple(others),
            _given=tuple(others.values()),
            _codes={},
            _kinks=np.union1d(*breaks),
        )
        return ode, values

    def equations(self, wrt: tuple[bool, ...] | None = None) -> Equations:
        """Return the right-hand side as machine code, with all that a solver needs.

        ``wrt`` says by which initial states, then by which parameters, derivatives are taken.
        """
        if any(self._is_random):
            msg = (
                "an input has a tensor for its values; expected numbers. Tensors are for ode.solve "
                "inside a PyMC model."
            )
            raise TypeError(msg)
        wrt = wrt or (False,) * (len(self.states) + len(self.params))
        # Inputs are looked up in tables; functions of time are part of the code.
        functions = tuple(None if isinstance(value, Input) else value for value in self._given)
        key = wrt, self._in_logs, functions, self._fixed_time
        if key not in self._codes:
            sizes = len(self.states), len(self.params), functions.count(None)
            self._codes[key] = compile_rhs(self._expressions, *sizes, wrt)
        tables = tables_of([value for value in self._given if isinstance(value, Input)])
        return Equations(
            self._codes[key], tables, len(self.params), self._in_logs, self.breaks, self.jumps,
            *self.steps, wrt,
        )  # fmt: skip

    def _expressions(self, t, x, theta, looked_up) -> list:
        """Return the slopes as graphs of symbols; inputs on times are among these."""
        symbols = iter(looked_up)
        inputs = [
            next(symbols) if isinstance(value, Input) else input_at(value, t)
            for value in self._given
        ]
        return expressions(self.rhs, t, *self._arguments(x, theta, inputs))

    def slopes(self, t, x, theta) -> Array:
        """Evaluate the right-hand side in machine code, shape ``(..., state)``.

        At times ``(...)``, states ``(..., state)`` and parameters ``(..., param)``.
        """
        t, x, theta = (np.asarray(values, dtype=float) for values in (t, x, theta))
        shape = np.broadcast_shapes(t.shape, x.shape[:-1], theta.shape[:-1])
        t = np.broadcast_to(t, shape).ravel()
        x, theta = (
            np.broadcast_to(values, (*shape, values.shape[-1])).reshape(len(t), -1)
            for values in (x, theta)
        )
        return evaluate(self.equations(), t, x, theta).reshape(*shape, len(self.states))

    def linearised(self, t: Array, x: Array, theta: Array) -> tuple[Array, Array, Array]:
        """Evaluate the right-hand side along a trajectory, with its derivatives.

        At times, states and parameters of shapes ``(time,)``, ``(time, state)`` and ``(param,)``.
        Returns f, df_dx and df_dtheta, ``(time, state)``, ``(time, state, state)`` and ``(time,
        state, param)``.
        """
        n_times, n_states = x.shape
        theta = np.broadcast_to(theta, (n_times, len(self.params)))
        values = np.reshape(self._linearisation(t, *x.T, *theta.T), (-1, n_states, n_times))
        f, *slopes = values.swapaxes(1, 2)
        by = np.reshape(slopes, (-1, n_times, n_states)).transpose(1, 2, 0)
        return f, by[..., :n_states], by[..., n_states:]

    @cached_property
    def _linearisation(self) -> Callable:
        """Slopes, and their derivatives by states and parameters, as a function of vectors."""
        t, *given = (pt.vector(name, dtype="float64") for name in ("t", *self.states, *self.params))
        x, theta = given[: len(self.states)], given[len(self.states) :]
        slopes = expressions(self.rhs, t, *self._arguments(x, theta, self._inputs_at(t)))
        outputs = with_jacobian(slopes, t, given)
        return one_at_a_time(in_numpy([t, *given], outputs))  # threads share it


def _rebuilt(rhs, states, params, names, given, others) -> ODE:
    ode = ODE(rhs, states, params, **names)
    vars(ode).update(others)
    return ode.with_inputs(given) if given else ode


def stack_experiments(odes: Sequence[ODE]) -> ODE:
    """Return one right-hand side for all experiments, whose inputs differ.

    As a graph: of times ``(experiment, time)``, states ``(..., experiment, time, state)``, and
    parameters that broadcast against ``(..., experiment, time)``.  It cannot be integrated.
    """
    first = odes[0]
    if not first.inputs:
        return first
    given = [[ode._inputs_by_name[name] for ode in odes] for name in first.inputs]
    inputs = tuple(partial(stacked_input, values) for values in given)
    return first._replaced(_given=inputs, _doses={})

"""Right-hand sides: written once by the user, used as a graph and as a function."""

from collections.abc import Callable, Mapping, Sequence, Sized
from copy import copy
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.graph.basic import Variable
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import in_numpy, without_traces
from pymc_gradmatch.arguments import in_order, usable_names
from pymc_gradmatch.numerics import one_at_a_time
from pymc_gradmatch.ode.code import Code, compiled, tables_of
from pymc_gradmatch.ode.elements import ByElements
from pymc_gradmatch.ode.inputs import (
    Input,
    Steps,
    as_doses,
    as_inputs,
    check_known,
    input_at,
    steps_at,
    times_where,
)
from pymc_gradmatch.ode.rhs import (
    Written,
    by_chain_rule,
    check_arguments,
    derivatives_of,
    entries_in,
    entries_of,
    expressions,
    held_at_one_time,
    lengths_of,
    named,
    returns_vector,
    with_their_slopes,
)
from pymc_gradmatch.ode.solve import TOLERANCE, Equations, evaluate, in_words
from pymc_gradmatch.ode.trajectories import columns, node, numbers, solved, with_values_as_params
from pymc_gradmatch.reporting import latex

N_TIMES = 7  # of the symbols that a right-hand side is tried on
DERIVED = ("of_levels", "written", "_linearisation")


class ODE:
    r"""A system of ordinary differential equations, :math:`\dot x = f(t, x, \theta)`.

    Parameters
    ----------
    rhs : callable
        ``rhs(t, x, theta)``, written with :mod:`pymc.math` or
        :mod:`pytensor.tensor` functions.  ``x`` and ``theta`` are named tuples:
        unpack them, or use ``x.prey`` and ``theta.alpha``.  Returns one
        expression per state, as a tuple or list in the order of ``states`` or
        as a dict by state name.  ``x.prey`` is a tensor that holds the state at many times at
        once, time last, ``theta.alpha`` a scalar: write what holds at each time.  The total of
        states is ``x.prey + x.predator``; ``pt.sum`` without an axis would add times too.
        It may return one vector of the states; all is then of one time: ``A @ pt.stack(x)``.
    states : sequence of str
        Names of the states.
    params : sequence of str, or mapping of str to int
        Names of the parameters; with vectors among them how many entries each has, () of a
        number: ``{"k": 8, "loss": ()}``.  ``theta.k`` is then a vector, with one prior, of shape
        8.  Entries have names, too: ``k_0``.
    positive : sequence of str, optional
        Names of states that are positive.  The package works with their logarithms; the
        right-hand side, and what comes back, is in natural units.
    inputs : sequence of str, optional
        Names of known inputs.  The right-hand side is then ``rhs(t, x, theta, u)`` with
        a named tuple ``u``, and :meth:`with_inputs` says what they are.

    Raises
    ------
    ValueError, TypeError
        If a name is not usable, or the right-hand side, called on symbolic dummies, fails, does not
        return one scalar expression per state, picks or mixes times, changes from call to call,
        or takes its arguments in the order of ``odeint``, ``rhs(x, t, theta)``.

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
        self.states = usable_names(states, "states")
        self.lengths = lengths_of(params)
        entries = [one for pair in self.lengths.items() for one in entries_of(*pair)]
        self.params = usable_names(entries, "params")
        self.inputs, self.positive = (
            () if isinstance(given, Sized) and len(given) == 0 else usable_names(given, what)
            for given, what in ((inputs, "inputs"), (positive, "positive"))
        )
        unknown = [name for name in self.positive if name not in self.states]
        if unknown:
            msg = f"positive are {unknown}; expected some of the states {list(self.states)}."
            raise ValueError(msg)
        self._given: tuple[Input | Callable, ...] = ()
        self._doses: dict[str, Input] = {}
        self._in_logs = (False,) * len(self.states)
        self._kinks = np.empty(0)  # besides those of the inputs
        self._held: float | None = None  # the time at which it is held, of :meth:`held_at`
        self._codes: dict[tuple, Code] = {}  # which copies with other inputs share
        theta = [pt.scalar(name, dtype="float64") for name in self.params]
        (t,), x, u = (
            [pt.TensorType("float64", (N_TIMES,))(name) for name in names]
            for names in (["t"], self.states, self.inputs)
        )
        arguments = self._arguments(x, theta, u)
        if not isinstance(rhs, ByElements) and (
            self.has_vectors or returns_vector(rhs, t, *arguments)
        ):
            self.rhs = ByElements(rhs)
        check_arguments(self.rhs, t, *arguments)

    @classmethod
    def from_sbml(cls, path: str | Path) -> "ODE":
        """Return the equations of an SBML file.

        Its parameters are those of the file that a slope depends on, and its attributes
        ``nominal`` and ``nominal_start`` have their values and x(0).  Needs the extra ``petab``.

        Parameters
        ----------
        path : str or Path
            The file.

        Raises
        ------
        NotImplementedError
            If the model contains what is not supported, by its name and place: delays, algebraic
            rules, events.

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
        """Return the same ODE, with nothing that is derived from its parts."""
        known = object.__new__(type(self))
        vars(known).update({n: v for n, v in vars(self).items() if n not in DERIVED})
        return known

    def __reduce__(self):
        # Its named tuples and compiled functions cannot be pickled, and need not be.
        names = {"positive": self.positive, "inputs": self.inputs}
        given = dict(zip(self.inputs, self._given, strict=False)) | self._doses
        others = {"_in_logs": self._in_logs, "_kinks": self._kinks, "_held": self._held}
        return _rebuilt, (self.rhs, self.states, self._declared, names, given, others)

    def __repr__(self) -> str:
        names = {"positive": self.positive, "inputs": self.inputs}
        others = "".join(f", {what}={list(given)}" for what, given in names.items() if given)
        return f"ODE(states={list(self.states)}, params={self._declared}{others})"

    @property
    def has_vectors(self) -> bool:
        """Whether some parameters are the entries of vectors."""
        return any(n is not None for n in self.lengths.values())

    @property
    def _declared(self) -> list[str] | dict[str, Any]:
        lengths = {name: () if n is None else n for name, n in self.lengths.items()}
        return lengths if self.has_vectors else list(self.params)

    def _repr_html_(self) -> str | None:
        written, names = self.written, self.written.names()
        equations = zip(written.x, written.derivatives, strict=True)
        try:
            lines = [rf"\dot{{{names[x]}}} &= {latex(slope, names)}" for x, slope in equations]
        except NotImplementedError:
            return None  # notebooks then show the text
        body = r" \\ ".join(lines)
        return rf'<div class="math">\[\begin{{aligned}} {body} \end{{aligned}}\]</div>'

    def with_inputs(self, inputs: Mapping[str, Input | Callable]) -> "ODE":
        """Return the same ODE with its inputs known, an ODE of explicit time.

        Parameters
        ----------
        inputs : mapping of str to Input or callable
            For each of the names in ``inputs`` a :class:`~pymc_gradmatch.Input`, or a
            smooth function of time written with :mod:`pymc.math`.  What jumps or has
            kinks is an ``Input``, which knows where: solvers stop there.  For any of the
            states an ``Input`` of kind ``"dose"`` or ``"reset"``; the first is later than x0.

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
        written = self.written  # the same with whatever inputs
        known = copy(self)
        vars(known).update(_doses=doses, written=written)
        if others or self.inputs or not doses:
            vars(known).update(_given=as_inputs(others, self.inputs))
        return known

    def with_inputs_changed(self, inputs: Mapping[str, Input | Callable]) -> "ODE":
        """Return the same ODE with other inputs of these names; its others stay."""
        return self.with_inputs({**self.known_inputs, **self._doses, **inputs})

    def with_given(self, given: Sequence[Input | Callable]) -> "ODE":
        """Return the same ODE with inputs that have been checked, and without doses."""
        known = copy(self)
        vars(known).update(_given=tuple(given), _doses={})
        return known

    @property
    def known_inputs(self) -> dict[str, Input | Callable]:
        """The inputs of the right-hand side by name, where they were given."""
        return dict(zip(self.inputs, self._given, strict=False))

    @property
    def is_positive(self) -> tuple[bool, ...]:
        """Which states are positive, in their order."""
        return tuple(name in self.positive for name in self.states)

    @property
    def is_positive_state(self) -> tuple[bool, ...]:
        """Which states are positive, also where it is the ODE of their logarithms."""
        return tuple(a or b for a, b in zip(self.is_positive, self._in_logs, strict=True))

    def natural_states(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return states in their own units from those of this ODE, which may be logarithms."""
        with np.errstate(over="ignore"):
            return np.where(self._in_logs, np.exp(np.where(self._in_logs, x, 0)), x)

    @cached_property
    def of_levels(self) -> "ODE":
        r"""The same ODE for the logarithms of positive states, by the chain rule.

        .. math:: \frac{d \log x}{dt} = \frac{f(t, x, \theta)}{x}

        Itself, if no state is positive.
        """
        if not self.positive:
            return self
        logs = copy(self)
        rhs = partial(by_chain_rule, self.rhs, self.is_positive)
        vars(logs).update(rhs=rhs, positive=(), _in_logs=self.is_positive)
        return logs

    @property
    def is_driven(self) -> bool:
        """Whether time enters, by itself, by inputs or by doses."""
        return bool(len(self.jumps) or self.written.depend_on([self.written.t]).any())

    @property
    def jumps(self) -> NDArray[np.float64]:
        """Times at which an input jumps, and with it the slope of the states, or a state does."""
        return times_where((*self._given, *self._doses.values()), "jumps")

    @property
    def steps(self) -> Steps:
        """How states jump at :attr:`jumps`, which they do for doses and resets alone."""
        return steps_at(self.jumps, self._doses, self.states)

    @property
    def breaks(self) -> NDArray[np.float64]:
        """Times at which an input jumps or has a kink, or a state jumps."""
        kinks = np.union1d(times_where(self._given, "kinks"), self._kinks)
        return np.union1d(self.jumps, kinks)

    def check_times(self, t: NDArray[np.float64]):
        """Raise if inputs were not given, or are not known at all times from first to last."""
        if self.inputs and not self._given:
            msg = (
                f"the inputs {list(self.inputs)} of the ODE were not given; expected "
                f"ode.with_inputs({{{self.inputs[0]!r}: gm.Input(times, values), ...}}), or "
                "inputs= for gm.fit and gm.build_model."
            )
            raise ValueError(msg)
        check_known(self._given, self.inputs, t)

    def __call__(self, t, x, theta) -> TensorVariable:
        """Write the right-hand side as a PyTensor graph, shape ``(..., time, state)``.

        At times ``(time,)`` and states ``(..., time, state)``, in units of these per time;
        parameters, by name or in the order of ``params``, broadcast against ``(..., time)``.
        """
        self.check_times(np.empty(0) if isinstance(t, Variable) else np.asarray(t))
        t, x = pt.as_tensor(t), pt.as_tensor(x)
        theta = [pt.as_tensor(value) for value in self.ordered_params(theta)]
        columns = [x[..., k] for k in range(len(self.states))]
        return derivatives_of(self.rhs, t, *self._arguments(columns, theta, self._inputs_at(t)))

    @property
    def used(self) -> NDArray[np.bool_]:
        """Which parameters any derivative depends on, shape ``(param,)``."""
        return self.written.depend_on(self.written.theta).any(axis=0)

    @cached_property
    def written(self) -> "Written":
        """The right-hand side as graphs, made once, which repr, checks and ``enters`` read."""
        x = [pt.vector(name, dtype="float64") for name in self.states]
        t, *u = (pt.vector(name, dtype="float64") for name in ("t", *self.inputs))
        theta = [pt.scalar(name, dtype="float64") for name in self.params]
        return Written(t, x, theta, u, expressions(self.rhs, t, *self._arguments(x, theta, u)))

    def _arguments(self, x: Sequence, theta: Sequence, inputs: Sequence) -> list:
        """Return what the right-hand side is called with after the time."""
        last = [named("Input", self.inputs, inputs)] if inputs else []
        return [named("State", self.states, x), self.named_params(theta), *last]

    @property
    def enters(self) -> NDArray[np.bool_]:
        """Whose derivatives (rows) depend on which states (columns), shape ``(state, state)``."""
        return self.written.depend_on(self.written.x)

    def by_name(self, x, theta) -> tuple[Any, Any]:
        """Return states, shape ``(..., time, state)``, and parameters as named tuples."""
        columns = [x[..., k] for k in range(len(self.states))]
        parameters = self.named_params(self.ordered_params(theta), pt.stack)
        return named("State", self.states, columns), parameters

    def named_params(self, theta: Sequence, as_vector: Callable = tuple) -> Any:
        """Return parameters in the order of ``params`` as a named tuple, vectors together."""
        left = iter(theta)
        grouped = {
            name: next(left) if n is None else as_vector([*islice(left, n)])
            for name, n in self.lengths.items()
        }
        return named("Param", (*grouped,), grouped.values())

    def by_entry(self, theta: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return parameters with the entries of vectors by their names, ``k_0`` of ``k``."""
        if not self.has_vectors:
            return theta
        pairs = ((name, self.lengths.get(name), value) for name, value in theta.items())
        return dict(entry for one in pairs for entry in entries_in(*one))

    def _inputs_at(self, t) -> list:
        return [input_at(value, t) for value in self._given]

    def ordered_params(self, theta) -> list:
        """Return parameters in the order of ``params``, from a mapping or a sequence."""
        if hasattr(theta, "keys"):  # also a row or a table of pandas
            return in_order(self.by_entry(theta), self.params, "theta is")
        if not isinstance(theta, Sequence | np.ndarray):
            msg = (
                f"theta is a {type(theta).__name__}; expected a mapping by name, or a list, in the "
                f"order {list(self.params)}."
            )
            raise TypeError(msg)
        if len(theta) != len(self.params):
            msg = f"theta has {len(theta)} values; expected one for each of {list(self.params)}."
            raise ValueError(msg)
        return list(theta)

    def solve(
        self,
        t: ArrayLike,
        x0,
        theta,
        *,
        inputs: Mapping[str, Input | Callable] | None = None,
        rtol: float = TOLERANCE,
    ) -> Any:
        r"""Solve the ODE: numbers where all is known, a differentiable tensor where it is not.

        .. math:: x(t) = x_0 + \int_{t_0}^t f(s, x(s), \theta)\, ds

        It starts anew where an input jumps or has a kink.  A dose at ``t[0]`` is in ``x0``.

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
            As for :meth:`with_inputs`, where they were not given yet.
        rtol : float, default 1e-9
            Relative tolerance of each step; right for evidence and for weights.  1e-6 is enough
            for a chain whose draws are reweighted.

        Returns
        -------
        array of float, or TensorVariable
            Trajectories, shape ``(..., time, state)`` with the axes that starts and parameters
            have in front, such as draws, experiments or patients.  A tensor as soon as a start
            or a parameter is one: it belongs into any PyMC model, has gradients by forward
            sensitivities, and is compiled by numba and by JAX.

        Raises
        ------
        ValueError, TypeError
            If times, starts or parameters do not fit.

        Warns
        -----
        UserWarning
            If numbers cannot be solved from: NaN, and what happened (:meth:`failures`).  A
            tensor is NaN without a warning, and the density of data around it no number.

        Notes
        -----
        Dormand and Prince's pair of order 8; where a system turns out to be stiff, the linearly
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
            msg = "t is a tensor; expected the times at which the solution is wanted, as numbers."
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
        rtol: float = TOLERANCE,
    ) -> Any:
        r"""Return the steady state that a solution comes to, :math:`f(t, x, \theta) = 0`.

        Inputs, and time where it enters by itself, are held at what they are at ``t``; doses are
        not given.  The solution from ``x0`` is followed until Newton's steps end at rest, so what
        the equations keep, such as the total of a protein and its complexes, is that of ``x0``.
        Derivatives are those of the implicit function theorem,
        :math:`\partial f / \partial x\; dx = -\partial f / \partial \theta\; d\theta`.

        Parameters
        ----------
        x0, theta, inputs, rtol
            As for :meth:`solve`.
        t : float, default 0
            The time at which inputs are held.

        Returns
        -------
        array of float, or TensorVariable
            Shape ``(..., state)``.  A tensor as soon as a start or a parameter is one.

        Warns
        -----
        UserWarning
            If numbers do not come to rest: NaN.  They grow or oscillate.

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
        held, times = self.held_at(t), np.array([t, np.inf])
        return held._solution(times, x0, theta, rtol)[..., -1, :]

    def held_at(self, t: float) -> "ODE":
        """Return the same ODE with time and inputs held, without doses; states may be zero."""
        self.check_times(np.array([t]))
        held = copy(self)
        now: Any = pt.constant(t, dtype="float64")
        at = [
            Input([0.0], [cast("Any", input_at(value, now)).data], kind="previous")
            if not isinstance(value, Input)
            else value
            if value.is_tensor
            else value.held_at(t)
            for value in self._given
        ]
        vars(held).update(positive=(), _given=tuple(at), _doses={}, _kinks=np.empty(0))
        if self.written.depend_on([self.written.t]).any() or any(self._is_random):
            vars(held).update(rhs=partial(held_at_one_time, self.rhs, float(t)), _held=float(t))
        return held

    def _solution(self, t: NDArray[np.float64], x0, theta, rtol: float) -> Any:
        starts, params = self._starts(x0), self._params(theta)
        if any(self._is_random):
            known, values = with_values_as_params(self)
            return node(known, t, starts, [*params, *values], rtol)
        if any(isinstance(value, Variable) for value in (*starts, *params)):
            return node(self, t, starts, params, rtol)
        return numbers(self, t, starts, params, rtol)

    def failures(
        self, t: ArrayLike, x0, theta, *, inputs: Mapping[str, Input | Callable] | None = None
    ) -> dict[str, NDArray[np.int64]]:
        """Say which draws :meth:`solve` cannot solve, and why.

        Parameters
        ----------
        t, x0, theta, inputs
            As for :meth:`solve`: numbers, with at most one axis of draws.

        Returns
        -------
        dict of str to array of int
            For each reason the numbers of the draws; empty where all can be solved.

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
        _, _, ended = solved(self, t, self._starts(x0), self._params(theta), TOLERANCE)
        return in_words(ended)

    @property
    def _is_random(self) -> list[bool]:
        """Of which inputs the values are tensors."""
        return [isinstance(value, Input) and value.is_tensor for value in self._given]

    def _starts(self, x0) -> list:
        """Return x(t0), a number, an array or a tensor for each state."""
        if hasattr(x0, "keys"):
            return in_order(x0, self.states, "x0 is")
        return columns(x0, self.states, "x0")

    def _params(self, theta) -> list:
        theta = theta._asdict() if hasattr(theta, "_asdict") else theta
        if hasattr(theta, "keys") or (
            isinstance(theta, Sequence) and any(isinstance(value, Variable) for value in theta)
        ):
            return self.ordered_params(theta)
        return columns(theta, self.params, "theta")

    def levels(self, x0: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return states as those of :attr:`of_levels`."""
        positive = np.array(self.is_positive)
        return np.where(positive, np.log(np.where(positive, x0, 1)), x0)

    def equations(self, wrt: tuple[bool, ...] | None = None) -> Equations:
        """Return the right-hand side as machine code, and all that solvers know of it.

        ``wrt`` says by which initial states, then by which parameters, derivatives will be taken.
        """
        if any(self._is_random):
            msg = (
                "an input has a tensor for its values; expected numbers. Tensors are for ode.solve "
                "inside a PyMC model."
            )
            raise TypeError(msg)
        wrt = wrt or (False,) * (len(self.states) + len(self.params))
        # Numbers of inputs are looked up; functions of time are part of the code.
        written = tuple(None if isinstance(value, Input) else value for value in self._given)
        key = wrt, self._in_logs, written, self._held
        if key not in self._codes:
            sizes = len(self.states), len(self.params), written.count(None)
            self._codes[key] = compiled(self._written_of, *sizes, wrt)
        tables = tables_of([value for value in self._given if isinstance(value, Input)])
        return Equations(
            self._codes[key], tables, len(self.params), self._in_logs, self.breaks, self.jumps,
            *self.steps, wrt,
        )  # fmt: skip

    def _written_of(self, t, x, theta, looked_up) -> list:
        """Write the slopes as graphs of symbols, of which some are looked up."""
        measured = iter(looked_up)
        inputs = [
            next(measured) if isinstance(value, Input) else input_at(value, t)
            for value in self._given
        ]
        return expressions(self.rhs, t, *self._arguments(x, theta, inputs))

    def slopes(self, t, x, theta) -> NDArray[np.float64]:
        """Evaluate the right-hand side, shape ``(..., state)``.

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

    def linearised(
        self, t: NDArray[np.float64], x: NDArray[np.float64], theta: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
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
        """The derivatives, and theirs by every state and parameter, of as many vectors of times."""
        t, *given = (pt.vector(name, dtype="float64") for name in ("t", *self.states, *self.params))
        x, theta = given[: len(self.states)], given[len(self.states) :]
        slopes = expressions(self.rhs, t, *self._arguments(x, theta, self._inputs_at(t)))
        outputs = with_their_slopes(slopes, t, given)
        return one_at_a_time(in_numpy([t, *given], outputs))  # threads share it


def _rebuilt(rhs, states, params, names, given, others) -> ODE:
    ode = ODE(rhs, states, params, **names)
    vars(ode).update(others)
    return ode.with_inputs(given) if given else ode

"""Right-hand sides: written once by the user, used as a graph and as a function."""

import inspect
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from copy import copy
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.graph.basic import Variable, equal_computations
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable
from pytensor.tensor.elemwise import DimShuffle, Elemwise

from pymc_gradmatch._pymc import in_numpy, without_traces
from pymc_gradmatch.arguments import in_order, usable_names
from pymc_gradmatch.numerics import one_at_a_time
from pymc_gradmatch.ode.code import Code, compiled, tables_of
from pymc_gradmatch.ode.elements import ByElements, is_vector
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
from pymc_gradmatch.ode.node import solution
from pymc_gradmatch.ode.solve import TOLERANCE, Equations, Solver, evaluate, in_words
from pymc_gradmatch.ode.undefined import ended as stopped
from pymc_gradmatch.reporting import latex, latex_name

DERIVED = ("of_levels", "written", "_linearisation")
SAME = 1e-6  # relative, of slopes at one time and among others
TIMES = ("t", "time", "times", "tau")  # what people call the first argument
ORDER = (
    "Its arguments are (t, x, theta), as for scipy's solve_ivp; not (x, t, theta), as for odeint "
    "and pm.ode. Inputs come last."
)

POINTWISE = (Elemwise, DimShuffle)  # operations after which each time stands by itself
INDEXING = tuple(type(pt.vector()[place].owner.op) for place in (0, [0]))


def derivatives_of(
    rhs: Callable, t: TensorVariable, x: Any, theta: Any, *inputs: Any
) -> TensorVariable:
    """Return the derivatives of all states, or say what the right-hand side should return.

    Parameters
    ----------
    rhs : callable
        The user's ``rhs(t, x, theta)`` or ``rhs(t, x, theta, u)``.
    t : TensorVariable
        Times, shape ``(time,)``.
    x, theta : named tuple of TensorVariable
        States, each of shape ``(..., time)``, and parameters.
    *inputs : named tuple of TensorVariable
        None, or one of inputs, each of shape ``(time,)``.

    Returns
    -------
    TensorVariable
        Shape ``(..., time, state)``.
    """
    values = _expressions(rhs, t, x, theta, *inputs)
    return pt.stack([value + pt.zeros_like(x[0]) for value in values], -1)


def _expressions(rhs: Callable, t: TensorVariable, x: Any, theta: Any, *inputs: Any) -> list:
    states, params = x._fields, theta._fields
    try:
        returned = rhs(t, x, theta, *inputs)
    except Exception as error:  # the user's own lines: whatever they raise is said in words
        fourth = ", u" if inputs else ""
        named = "".join(f" and u = ({', '.join(u._fields)})" for u in inputs)
        msg = (
            f"calling the right-hand side on symbolic tensors raised {type(error).__name__} "
            f"({error}). It is called as rhs(t, x, theta{fourth}) with x = ({', '.join(states)}) "
            f"and theta = ({', '.join(params)}){named}. {_advice(rhs, error)}"
        )
        raise TypeError(msg) from error
    by_state = zip(states, _in_order_of_states(returned, states), strict=True)
    return [_derivative(state, value, x[0]) for state, value in by_state]


def check_arguments(rhs: Callable, t: TensorVariable, x: Any, theta: Any, *inputs: Any):
    """Raise if a right-hand side picks or mixes times, or takes its arguments in another order.

    What it may do: have no state in it, no parameter, no time, and any names.  It is called
    twice, and evaluated at a few numbers.

    Parameters
    ----------
    rhs : callable
        The user's ``rhs(t, x, theta)`` or ``rhs(t, x, theta, u)``.
    t, x, theta, *inputs : TensorVariable, named tuple of TensorVariable
        Times, states, parameters and inputs; graphs without parents.

    Raises
    ------
    ValueError, TypeError
        If so, or if it does not return one scalar expression per state.

    Warns
    -----
    UserWarning
        If time enters and no state does, and no argument is called t.
    """
    slopes = _expressions(rhs, t, x, theta, *inputs)
    used = set(ancestors(slopes))
    vectors = {"t": t} | {f"state {k!r}": v for k, v in zip(x._fields, x, strict=True)}
    vectors |= {f"input {k!r}": v for u in inputs for k, v in u._asdict().items()}
    names = {vector: name for name, vector in vectors.items()}
    for variable in used:
        if variable.owner is None or not isinstance(variable.owner.op, INDEXING):
            continue
        picked = variable.owner.inputs[0]
        if picked in names and variable.type.shape != picked.type.shape:
            msg = (
                f"the right-hand side indexes {names[picked]}, which holds all times at once; "
                f"expected an expression that is the same at every time. {ORDER}"
            )
            raise ValueError(msg)
    place = _place_of_time(rhs)
    misplaced = {1: ("second", "states", x), 2: ("third", "parameters", theta)}
    if place in misplaced:
        ordinal, given, variables = misplaced[place]
        if not used.intersection(variables):
            msg = (
                f"the {ordinal} argument of the right-hand side is called t, but is given the "
                f"{given}, and none of them enters. {ORDER}"
            )
            raise ValueError(msg)
    is_pointwise = all(isinstance(v.owner.op, POINTWISE) for v in used if v.owner)
    again = _expressions(rhs, t, x, theta, *inputs) if is_pointwise else []
    if not (is_pointwise and equal_computations(slopes, again)):
        _check_each_time(rhs, slopes, t, x, theta, *inputs)
    if place < 0 and t in used and not used.intersection(x):
        warnings.warn(
            f"time enters the right-hand side, but none of the states {list(x._fields)} does. "
            f"{ORDER} If it is meant so, call its first argument t.",
            UserWarning,
            stacklevel=4,
        )


def _check_each_time(rhs: Callable, slopes: list, t: TensorVariable, x: Any, theta: Any, *inputs):
    """Raise if slopes at one of many times are others than those at this time alone."""
    vectors = [t, *x, *(v for u in inputs for v in u)]
    alone = [pt.TensorType("float64", (1,))(v.name) for v in vectors]
    symbols = iter(alone)
    own_t = next(symbols)
    own_x, *own_u = (type(one)(*islice(symbols, len(one))) for one in (x, *inputs))
    by_itself = _expressions(rhs, own_t, own_x, theta, *own_u)
    evaluate = in_numpy([*vectors, *theta, *alone], [*slopes, *by_itself], rewrites=())
    rng, [n_times] = np.random.default_rng(0), t.type.shape
    n, j = len(vectors), n_times // 2

    def at_one(values: NDArray, parameters: NDArray) -> tuple[NDArray, NDArray]:
        slopes = evaluate(*values, *parameters, *values[:, [j]])
        among = [np.broadcast_to(slope, n_times)[j] for slope in slopes[: len(x)]]
        return np.array(among), np.ravel([np.ravel(slope) for slope in slopes[len(x) :]])

    for draw in (rng.random, rng.random, rng.lognormal):
        values, others = draw(size=(2, n, n_times))
        others[:, j], parameters = values[:, j], draw(size=len(theta))
        try:
            (among, single), (moved, _) = (at_one(one, parameters) for one in (values, others))
        except Exception:  # what an operation asks of its numbers is not known
            continue
        size = SAME * np.maximum(np.abs(among), np.abs(single))
        with np.errstate(invalid="ignore"):
            mixed, unlike = (np.abs(among - one) > size for one in (moved, single))
        if mixed.any():
            k = int(np.argmax(mixed))
            msg = (
                f"the derivative of state {x._fields[k]!r} at one time changes with states, inputs "
                f"or time at other times. x.{x._fields[0]} holds the state at all times at once, "
                "and what is written must hold at each of them by itself: a sum, mean, maximum or "
                "norm of it mixes times. Add states by name, x.a + x.b, or along the first axis, "
                "pt.sum(pt.stack(x), axis=0)."
            )
            raise ValueError(msg)
        if unlike.any():
            k = int(np.argmax(unlike))
            msg = (
                f"the derivative of state {x._fields[k]!r} at one time alone is {single[k]:.6g}, "
                f"and {among[k]:.6g} as one of {n_times}: it depends on how many times there are, "
                "or on something that changes from call to call. Expected the same expression at "
                "each call, and at every time; numbers that vary are parameters or inputs."
            )
            raise ValueError(msg)


def _place_of_time(rhs: Callable) -> int:
    """Return the place of the argument that is called t, or -1."""
    try:
        names = list(inspect.signature(rhs).parameters)
    except (TypeError, ValueError):  # no Python function
        return -1
    return next((i for i, name in enumerate(names) if name.strip("_").lower() in TIMES), -1)


def _advice(rhs: Callable, error: Exception) -> str:
    if _place_of_time(rhs) in (1, 2):
        return ORDER
    if isinstance(error, AttributeError) and isinstance(error.obj, tuple):  # x or theta
        return "Use these names, or declare what is missing in states or params."
    return (
        "Use pm.math or pytensor.tensor functions: numpy's and math's do not work on tensors, "
        "nor do `if`, `max` and comparisons (use pm.math.switch)."
    )


def _in_order_of_states(returned, states: tuple[str, ...]) -> list:
    if isinstance(returned, Mapping):
        return in_order(returned, states, "derivatives returned by the right-hand side are")
    if not isinstance(returned, tuple | list):
        msg = (
            f"the right-hand side returns a {type(returned).__name__}; expected a tuple, a list "
            f"or a dict with one expression for each of {list(states)}."
        )
        raise TypeError(msg)
    if len(returned) != len(states):
        msg = (
            f"the right-hand side returns {len(returned)} expressions; expected {len(states)}, "
            f"one for each of {list(states)}."
        )
        raise ValueError(msg)
    return list(returned)


def _derivative(state: str, value, column: TensorVariable) -> TensorVariable:
    try:
        value = pt.as_tensor(value)
    except (TypeError, ValueError, NotImplementedError) as error:
        msg = (
            f"the derivative of state {state!r} is a {type(value).__name__}; expected a "
            "number or an expression in t, x and theta written with pm.math functions."
        )
        raise TypeError(msg) from error
    fits = value.ndim <= column.ndim and all(
        n in (1, m) or n is None or m is None
        for n, m in zip(value.type.shape[::-1], column.type.shape[::-1], strict=False)
    )
    if not fits:
        msg = (
            f"the derivative of state {state!r} has shape {value.type.shape} where the state "
            f"has shape {column.type.shape}; expected one value per time. Index into vectors, "
            "and sum over states by name."
        )
        raise ValueError(msg)
    return value


class Written(NamedTuple):
    """A right-hand side as graphs: what it is made of, and one expression per state."""

    t: TensorVariable
    x: list[TensorVariable]
    theta: list[TensorVariable]
    inputs: list[TensorVariable]
    derivatives: list[TensorVariable]

    def depend_on(self, variables: Sequence[TensorVariable]) -> NDArray[np.bool_]:
        """Tell which derivatives (rows) depend on which variables (columns)."""
        upstream = [set(ancestors([derivative])) for derivative in self.derivatives]
        return np.array([[v in reached for v in variables] for reached in upstream])

    def names(self) -> dict[Variable, str]:
        """Return what the variables are called in formulas."""
        variables = [self.t, *self.x, *self.theta, *self.inputs]
        names = {v: latex_name(str(v.name)) for v in variables}
        return names | {v: f"{names[v]}(t)" for v in self.inputs}


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
        Where vectors are wanted it may return one, in the order of the states; all is then a
        number of one time: ``A @ pt.stack(x)``.
    states : sequence of str
        Names of the states.
    params : sequence of str, or mapping of str to int
        Names of the parameters; with vectors among them how many entries each has, () of a
        number: ``{"k": 8, "loss": ()}``.  ``theta.k`` is then a vector, with one prior, of shape
        8.  Entries have names, too: ``k_0``.
    positive : sequence of str, optional
        Names of states that are positive.  The right-hand side is in natural units all the
        same, and so is what comes back; the package works with their logarithms.
    inputs : sequence of str, optional
        Names of known inputs.  The right-hand side is then ``rhs(t, x, theta, u)`` with
        a named tuple ``u``, and :meth:`with_inputs` says what they are.

    Raises
    ------
    ValueError, TypeError
        If a name is not usable, or if the right-hand side, called once on
        symbolic dummies, fails, returns something else than one scalar
        expression per state, picks or mixes times, changes from call to call, or takes its
        arguments in the order of ``odeint``, ``rhs(x, t, theta)``.

    Examples
    --------
    >>> import numpy as np, pymc_gradmatch as gm
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

    Concentrations, with log-normal noise (:func:`~pymc_gradmatch.build_model`'s default there):

    >>> import pymc as pm
    >>> rhs = lambda t, x, theta: [-theta.rate * x.mass]
    >>> ode = gm.ODE(rhs, ["mass"], ["rate"], positive=["mass"])
    >>> t = np.linspace(0, 5, 11)
    >>> noise = np.random.default_rng(1).normal(0, 0.1, (11, 1))
    >>> y = ode.solve(t, x0=[100.0], theta=[0.5]) * np.exp(noise)
    >>> fit = gm.fit(ode, t, y, priors={"rate": pm.HalfNormal.dist(2)}, random_seed=1)
    >>> bool(fit.idata["posterior"]["x"].min() > 0)
    True
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
        self.lengths = _lengths(params)
        entries = [one for pair in self.lengths.items() for one in _entries(*pair)]
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
        n_time = 7

        def vectors(names):
            return [pt.TensorType("float64", (n_time,))(name) for name in names]

        theta = [pt.scalar(name, dtype="float64") for name in self.params]
        (t,), x, u = vectors(["t"]), vectors(self.states), vectors(self.inputs)
        last = [named("Input", self.inputs, u)] if u else []
        states, params = named("State", self.states, x), self.named_params(theta)
        if not isinstance(rhs, ByElements) and (
            self.has_vectors or _returns_vector(rhs, t, states, params, *last)
        ):
            self.rhs = ByElements(rhs)
        check_arguments(self.rhs, t, states, params, *last)

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
        from pymc_gradmatch.sbml import equations_of  # here: it needs an extra

        rhs, states, params, nominal_start, nominal = equations_of(path)
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
        params = self._declared if self.has_vectors else self.params
        return _rebuilt, (self.rhs, self.states, params, names, given, others)

    def __repr__(self) -> str:
        names = {"positive": self.positive, "inputs": self.inputs}
        others = "".join(f", {what}={list(given)}" for what, given in names.items() if given)
        params = self._declared if self.has_vectors else list(self.params)
        return f"ODE(states={list(self.states)}, params={params}{others})"

    @property
    def has_vectors(self) -> bool:
        """Whether some parameters are the entries of vectors."""
        return any(n is not None for n in self.lengths.values())

    @property
    def _declared(self) -> dict[str, Any]:
        return {name: () if n is None else n for name, n in self.lengths.items()}

    def _repr_html_(self) -> str | None:
        try:
            lines = self._formulas()
        except NotImplementedError:
            return None  # notebooks then show the text
        body = r" \\ ".join(lines)
        return rf'<div class="math">\[\begin{{aligned}} {body} \end{{aligned}}\]</div>'

    def _formulas(self) -> list[str]:
        """Return one equation per state, for LaTeX's ``aligned``."""
        written, names = self.written, self.written.names()
        equations = zip(written.x, written.derivatives, strict=True)
        return [rf"\dot{{{names[x]}}} &= {latex(slope, names)}" for x, slope in equations]

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
        rhs = partial(_by_chain_rule, self.rhs, self.is_positive)
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
        """Write the right-hand side as a PyTensor graph.

        Parameters
        ----------
        t : tensor_like of float
            Times, shape ``(time,)``.
        x : tensor_like of float
            States, shape ``(..., time, state)``.
        theta : mapping of str to tensor_like, or sequence in the order of ``params``
            Parameters; each broadcasts against ``(..., time)``.

        Returns
        -------
        TensorVariable
            Derivatives of the states, shape ``(..., time, state)``, in the
            units of x / time.
        """
        self.check_times(np.empty(0) if isinstance(t, Variable) else np.asarray(t))
        t, x = pt.as_tensor(t), pt.as_tensor(x)
        theta = [pt.as_tensor(value) for value in self.ordered_params(theta)]
        states = named("State", self.states, [x[..., k] for k in range(len(self.states))])
        return derivatives_of(self.rhs, t, states, self.named_params(theta), *self._known_inputs(t))

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
        arguments = [named("State", self.states, x), self.named_params(theta)]
        arguments += [named("Input", self.inputs, u)] if u else []
        return Written(t, x, theta, u, _expressions(self.rhs, t, *arguments))

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
        entries = {}
        for name, value in theta.items():
            if (n := self.lengths.get(name)) is None:
                entries[name] = value
                continue
            vector: Any = value if isinstance(value, Variable) else np.asarray(value, dtype=float)
            shape = vector.type.shape if isinstance(value, Variable) else vector.shape
            if not shape or shape[-1] not in (n, None):
                msg = f"{name!r} has shape {shape}; expected (..., {n}), one for each entry."
                raise ValueError(msg)
            entries |= {one: vector[..., k] for k, one in enumerate(_entries(name, n))}
        return entries

    def _known_inputs(self, t) -> list:
        """Return the inputs at times as what follows the parameters; nothing without inputs."""
        if not self.inputs:
            return []
        return [named("Input", self.inputs, [input_at(value, t) for value in self._given])]

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
        """Return the same ODE with time and inputs held at a time, without doses.

        No state is called positive, since one may be zero at rest.
        """
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
            vars(held).update(rhs=partial(_held, self.rhs, float(t)), _held=float(t))
        return held

    def _solution(self, t: NDArray[np.float64], x0, theta, rtol: float) -> Any:
        starts, params = self._starts(x0), self._params(theta)
        if any(self._is_random):
            known, values = self._with_values_as_params()
            return known._node(t, starts, [*params, *values], rtol)
        if any(isinstance(value, Variable) for value in (*starts, *params)):
            return self._node(t, starts, params, rtol)
        return self._numbers(t, starts, params, rtol)

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
        _, _, ended = self._solved(t, self._starts(x0), self._params(theta), TOLERANCE)
        return in_words(ended)

    @property
    def _is_random(self) -> list[bool]:
        """Of which inputs the values are tensors."""
        return [isinstance(value, Input) and value.is_tensor for value in self._given]

    def _with_values_as_params(self) -> tuple["ODE", list[TensorVariable]]:
        """Return the same ODE with random values of inputs among its parameters, and these."""
        random: dict[str, Any] = {
            name: value
            for name, value, is_random in zip(
                self.inputs, self._given, self._is_random, strict=True
            )
            if is_random
        }
        names = [f"{name}_{k}" for name, value in random.items() for k in range(len(value.times))]
        values = [v.values[..., k] for v in random.values() for k in range(len(v.times))]
        others = {n: v for n, v in self.known_inputs.items() if n not in random}
        rhs = partial(_of_values, self.rhs, (*self.lengths,), self.inputs, random)
        known = copy(self)
        vars(known).update(
            rhs=rhs, params=(*self.params, *names), lengths=self.lengths | dict.fromkeys(names),
            inputs=tuple(others), _codes={},
            _given=tuple(others.values()),
            _kinks=np.union1d(*(times_where((*random.values(),), w) for w in ("kinks", "jumps"))),
        )  # fmt: skip
        return known, values

    def _starts(self, x0) -> list:
        """Return x(t0), a number, an array or a tensor for each state."""
        if hasattr(x0, "keys"):
            return in_order(x0, self.states, "x0 is")
        return self._columns(x0, self.states, "x0")

    def _params(self, theta) -> list:
        """Return the same of each parameter."""
        theta = theta._asdict() if hasattr(theta, "_asdict") else theta
        if hasattr(theta, "keys") or (
            isinstance(theta, Sequence) and any(isinstance(value, Variable) for value in theta)
        ):
            return self.ordered_params(theta)
        return self._columns(theta, self.params, "theta")

    @staticmethod
    def _columns(values, names: tuple[str, ...], what: str) -> list:
        if isinstance(values, Sequence) and any(isinstance(value, Variable) for value in values):
            values = pt.stack([*map(pt.as_tensor, values)], -1)
        is_tensor = isinstance(values, Variable)
        values = values if is_tensor else np.asarray(values, dtype=float)
        length = values.type.shape[-1] if is_tensor and values.ndim else np.shape(values)[-1:]
        if values.ndim == 0 or length not in (None, len(names), (len(names),)):
            shape = values.type.shape if is_tensor else values.shape
            msg = (
                f"{what} has shape {shape}; expected ({len(names)},) or (draw, {len(names)}), in "
                f"the order {list(names)}."
            )
            raise ValueError(msg)
        return [values[..., k] for k in range(len(names))]

    def _node(self, t, starts: list, params: list, rtol: float) -> TensorVariable:
        """Return the solution as a graph."""
        given = [pt.as_tensor(value).astype("float64") for value in (*starts, *params)]
        positive = self.is_positive
        levels = [
            pt.log(value) if k < len(positive) and positive[k] else value
            for k, value in enumerate(given)
        ]
        x = solution(self.of_levels, t, rtol, levels, len(self.states))
        if not self.positive:
            return x
        columns = [pt.exp(x[..., k]) if one else x[..., k] for k, one in enumerate(positive)]
        return pt.stack(columns, -1)

    def _numbers(self, t, starts: list, params: list, rtol: float) -> NDArray[np.float64]:
        x, shape, ended = self._solved(t, starts, params, rtol)
        failed = in_words(ended)
        if failed:
            counts = ", ".join(f"{len(draws)} {reason}" for reason, draws in failed.items())
            values = np.broadcast_arrays(*(np.asarray(v, float) for v in (*starts, *params)))
            first = np.stack([v.ravel() for v in values], -1)[np.flatnonzero(ended)[0]]
            x0, theta = np.split(first, [len(starts)])
            said = (
                stopped(self.of_levels, t, self.levels(x0), theta)
                if np.isfinite(t).all()
                else f"theta is {theta.round(6)}: its solution grows, or oscillates."
            )
            msg = (
                f"the numerical integration of {(ended != 0).sum()} of {len(ended)} draws failed "
                f"({counts}); their trajectories are NaN. Of the first, {said}"
            )
            warnings.warn(msg, UserWarning, stacklevel=3)
        return x.reshape(*shape, *x.shape[1:])

    def _solved(self, t, starts: list, params: list, rtol: float) -> tuple:
        """Return the states, shape ``(draw, time, state)``, axes in front, and how draws ended."""
        try:
            given = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (*starts, *params)))
        except ValueError:
            shapes = [np.shape(value) for value in (*starts, *params)]
            msg = f"x0 and theta have shapes {shapes}; expected as many draws of all of them."
            raise ValueError(msg) from None
        shape = given[0].shape
        x0, theta = np.split(np.stack(given, -1).reshape(-1, len(given)), [len(starts)], axis=1)
        positive = np.array(self.is_positive)
        below = positive & (x0 <= 0).any(axis=0)
        if below.any():
            names = [name for name, is_below in zip(self.states, below, strict=True) if is_below]
            msg = f"the positive states {names} start at zero or below; expected positive numbers."
            raise ValueError(msg)
        logs = self.levels(x0)
        levels, _, ended, _ = Solver(self.of_levels.equations(), t, rtol)(logs, theta)
        with np.errstate(over="ignore"):
            x = np.where(positive, np.exp(np.where(positive, levels, 0)), levels)
        return x, shape, ended

    def levels(self, x0: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return states as those of :attr:`of_levels`."""
        positive = np.array(self.is_positive)
        return np.where(positive, np.log(np.where(positive, x0, 1)), x0)

    def equations(self, wrt: tuple[bool, ...] | None = None) -> Equations:
        """Return the right-hand side as machine code, and all that solvers know of it.

        Parameters
        ----------
        wrt : tuple of bool, optional
            By which initial states, then by which parameters, derivatives will be taken.
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
        arguments = [named("State", self.states, x), self.named_params(theta)]
        arguments += [named("Input", self.inputs, inputs)] if inputs else []
        return _expressions(self.rhs, t, *arguments)

    def slopes(self, t, x, theta) -> NDArray[np.float64]:
        """Evaluate the right-hand side at times ``(...)``, states ``(..., state)`` and parameters.

        Returns
        -------
        array of float
            Shape ``(..., state)``.
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

        Parameters
        ----------
        t, x, theta : array of float
            Times, states and parameters, shapes ``(time,)``, ``(time, state)``
            and ``(param,)``.

        Returns
        -------
        f, df_dx, df_dtheta : array of float
            Shapes ``(time, state)``, ``(time, state, state)`` and
            ``(time, state, param)``.
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
        arguments = [named("State", self.states, x), self.named_params(theta)]
        slopes = _expressions(self.rhs, t, *arguments, *self._known_inputs(t))
        along = [pt.zeros_like(t) + slope for slope in slopes]
        # What happens at one time depends on the states of that time alone.
        by = [_gradient(slope.sum(), given) for slope in along]
        outputs = [*along, *(one for column in zip(*by, strict=True) for one in column)]
        return one_at_a_time(in_numpy([t, *given], outputs))  # threads share it


def in_experiments(odes: Sequence[ODE]) -> ODE:
    """Return one right-hand side for all experiments, whose inputs differ.

    As a graph: of times ``(experiment, time)``, states ``(..., experiment, time, state)``, and
    parameters that broadcast against ``(..., experiment, time)``.  It is not integrated.
    """
    first = odes[0]
    if not first.inputs:
        return first
    given = [[ode.known_inputs[name] for ode in odes] for name in first.inputs]
    return first.with_given([partial(_of_each, inputs) for inputs in given])


def _of_each(inputs: Sequence[Input | Callable], t) -> TensorVariable:
    return pt.stack([pt.as_tensor(one(t[i])) + pt.zeros_like(t[i]) for i, one in enumerate(inputs)])


def _gradient(total: TensorVariable, wrt: list[TensorVariable]) -> list[TensorVariable]:
    return cast("list", pytensor.grad(total, wrt, disconnected_inputs="ignore"))


def _lengths(params: Sequence[str] | Mapping[str, Any]) -> dict[str, int | None]:
    """Return how many entries each parameter has; None of those that are numbers."""
    if not isinstance(params, Mapping):
        return dict.fromkeys(usable_names(params, "params"))
    lengths: dict[str, int | None] = {}
    for name, shape in zip(usable_names([*params], "params"), params.values(), strict=True):
        axes = shape if isinstance(shape, tuple) else (shape,)
        whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in axes)
        if len(axes) > 1 or not whole or min(axes, default=1) < 1:
            msg = (
                f"the parameter {name!r} has the length {shape!r}; expected how many entries it "
                "has, 8 or (8,), or () of a number."
            )
            raise ValueError(msg)
        lengths[name] = int(axes[0]) if axes else None
    return lengths


def _entries(name: str, n: int | None) -> list[str]:
    return [name] if n is None else [f"{name}_{k}" for k in range(n)]


def _returns_vector(rhs: Callable, t, x, theta, *inputs) -> bool:
    """Tell whether a right-hand side of numbers returns one tensor for all states."""

    def numbers(values):
        return [pt.scalar(value.name, dtype="float64") for value in values]

    given = [type(part)(*numbers(part)) for part in (x, theta, *inputs)]
    try:
        return is_vector(rhs(*numbers([t]), *given))
    except Exception:  # the user's own lines, of which `_expressions` says what they raise
        return False


def _rebuilt(rhs, states, params, names, given, others) -> ODE:
    ode = ODE(rhs, states, params, **names)
    vars(ode).update(others)
    return ode.with_inputs(given) if given else ode


def _of_values(
    rhs: Callable, params: tuple, inputs: tuple, random: Mapping[str, Input], t, x, theta, *known
) -> Any:
    """Write a right-hand side whose last parameters are the values of random inputs."""
    own, values = theta[: len(params)], iter(theta[len(params) :])
    u = known[0]._asdict() if known else {}
    for name, one in random.items():
        u[name] = sum(share * next(values) for share in one.shares(t))
    given = named("Input", inputs, [u[name] for name in inputs])
    return rhs(t, x, named("Param", params, own), given)


def _held(rhs: Callable, at: float, t, x, theta, *inputs) -> Any:
    """Write a right-hand side at one time, whatever the time is."""
    return rhs(pt.zeros_like(t) + np.float64(at), x, theta, *inputs)


def _by_chain_rule(rhs: Callable, is_positive: Sequence[bool], t, levels, theta, *inputs) -> list:
    """Return the derivatives of levels, logarithms where states are positive."""
    natural = [
        pt.exp(level) if positive else level
        for level, positive in zip(levels, is_positive, strict=True)
    ]
    x = type(levels)(*natural)
    slopes = _expressions(rhs, t, x, theta, *inputs)
    return [
        slope / state if positive else slope
        for slope, state, positive in zip(slopes, x, is_positive, strict=True)
    ]


def named(kind: str, names: tuple[str, ...], values: Iterable) -> Any:
    """Return values as a named tuple: what users unpack, or name."""
    return _record(kind, names)(*values)


@cache
def _record(kind: str, names: tuple[str, ...]) -> Callable[..., tuple]:
    return namedtuple(kind, names)

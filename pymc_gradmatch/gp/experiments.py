"""Several experiments, and their Gaussian processes with an axis of experiments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pymc_gradmatch.gp.data import read_only
from pymc_gradmatch.gp.derivatives import Operators
from pymc_gradmatch.gp.processes import Processes, StateGPBase
from pymc_gradmatch.gp.state_gp import StateGP, lengths_of
from pymc_gradmatch.numerics import Spectrum


@dataclass(frozen=True, eq=False)
class Experiment:
    """One experiment of several: its times and observations, inputs and start.

    Parameters
    ----------
    t : array_like of float
        Times, shape ``(time,)``.
    y : array_like of float
        Observations, shape ``(time, state)``, or a table: as for
        :func:`~pymc_gradmatch.build_model`.
    inputs : mapping of str to Input or callable, optional
        Inputs of the right-hand side, doses and resets of states.
    start : mapping of str, callable or "steady state", optional
        What is known of x(t[0]), as for :func:`~pymc_gradmatch.build_model`; the steady state
        is that of the experiment's inputs.
    likelihood : callable, optional
        ``likelihood(x, theta)`` in place of the normal likelihood of y, as for
        :func:`~pymc_gradmatch.build_model`, of this experiment's states and parameters.
        Variables that it adds to the model have the name as a prefix: ``mutant::counts``.
    scales : mapping of str to float, optional
        Roughly the standard deviation of states with too few observations.
    sigma : array_like of float, optional
        Known noise: a standard deviation for all, one per state, or one for each observation,
        in the shape of y or a table like it.
    name : str, optional
        Name of the experiment in a list; in a mapping the key is the name.

    Examples
    --------
    Two batches of one reaction, the second with a dose after two hours:

    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> dose = {"mass": gm.Input([2.0], [1.0], kind="dose")}
    >>> t, late = np.linspace(0, 3, 10), np.linspace(0, 4, 15)
    >>> y = decay.solve(t, x0=[1.0], theta=[0.5])
    >>> y_late = decay.solve(late, x0=[2.0], theta=[0.5], inputs=dose)
    >>> rng = np.random.default_rng(1)
    >>> experiments = {
    ...     "plain": gm.Experiment(t, y + rng.normal(0, 0.02, y.shape)),
    ...     "dosed": gm.Experiment(late, y_late + rng.normal(0, 0.02, y_late.shape), inputs=dose),
    ... }
    >>> priors = {"rate": pm.HalfNormal.dist(2)}
    >>> model = gm.build_model(decay, experiments=experiments, priors=priors, random_seed=1)
    >>> model.named_vars_to_dims["x"]
    ('experiment', 'time', 'state')
    """

    t: Any
    y: Any = None
    inputs: Mapping[str, Any] | None = None
    start: Mapping[str, Any] | Callable | str | None = None
    likelihood: Callable[[Any, Any], Any] | None = None
    scales: Mapping[str, float] | None = None
    sigma: Any = None
    name: str = ""


def as_experiments(given: Any) -> dict[str, Experiment]:
    """Return experiments by name; raise if there are none, or names are missing or repeated."""
    example = '{"wild type": gm.Experiment(t, y), "mutant": gm.Experiment(t2, y2)}'
    if isinstance(given, Experiment | pd.DataFrame):
        msg = f"experiments are a {type(given).__name__}; expected several, {example}."
        raise TypeError(msg)
    if isinstance(given, Mapping):
        named = {str(name): _as_experiment(one, name) for name, one in given.items()}
    elif isinstance(given, Sequence) and all(isinstance(one, Experiment) for one in given):
        named = {one.name: one for one in given}
        if "" in named or len(named) < len(given):
            msg = (
                f"the names of the experiments are {[one.name for one in given]}; expected "
                f"distinct ones, gm.Experiment(t, y, name=...), or {example}."
            )
            raise ValueError(msg)
    else:
        msg = f"experiments are a {type(given).__name__}; expected {example}."
        raise TypeError(msg)
    if not named:
        msg = f"no experiment is given; expected one or more, {example}."
        raise ValueError(msg)
    return named


def _as_experiment(given: Any, name) -> Experiment:
    if isinstance(given, Experiment):
        return given
    if isinstance(given, pd.DataFrame):
        return Experiment(given.index, given)
    msg = (
        f"the experiment {name!r} is a {type(given).__name__}; expected gm.Experiment(t, y), or a "
        "table with the times as its index."
    )
    raise TypeError(msg)


class StackedProcesses(NamedTuple):
    """The :class:`~pymc_gradmatch.gp.processes.Processes` of several experiments, stacked.

    Matrices have shape ``(experiment, state, time, time)``.
    """

    operators: Operators
    prior_spectrum: Spectrum
    conditional_spectrum: Spectrum
    state_space: None = None

    @property
    def prior_basis(self) -> Spectrum:
        """Basis of independent coordinates of the states."""
        return self.prior_spectrum

    @property
    def slope_operator(self) -> NDArray[np.float64]:
        """D."""
        return self.operators.D

    @classmethod
    def of(cls, processes: Sequence[Processes]) -> "StackedProcesses":
        """Stack processes of equal shapes."""

        def stacked(kind, parts):
            return kind(*(np.stack(arrays) for arrays in zip(*parts, strict=True)))

        return cls(
            stacked(Operators, [one.operators for one in processes]),
            stacked(Spectrum, [one.prior_spectrum for one in processes]),
            stacked(Spectrum, [one.conditional_spectrum for one in processes]),
        )


def _stacked(name: str, doc: str) -> Callable[[Any], NDArray[np.float64]]:
    """Return a method that stacks an attribute, or the result of a method, of all experiments."""

    def stacked(self) -> NDArray[np.float64]:
        each = [getattr(gp, name) for gp in self.members]
        return np.stack([one() if callable(one) else one for one in each])

    stacked.__name__, stacked.__doc__ = name, doc
    return stacked


@dataclass(frozen=True, init=False, repr=False, eq=False)
class StateGPs(StateGPBase):
    r"""The Gaussian processes of several experiments on grids of equal length.

    A :class:`StateGP` whose arrays have an axis of experiments first: states have
    shape ``(experiment, time, state)``, C, D and A ``(experiment, state, time, time)``, so that
    each factor of Theorem 1 is one batched product.

    Parameters
    ----------
    members : mapping of str to StateGP
        By name of the experiment, all of the same states.  Shorter grids are refined to the
        length of the longest.
    inputs : mapping of str to mapping, optional
        Inputs of each experiment, see :class:`Experiment`.

    Raises
    ------
    ValueError
        If the states are not the same.

    Examples
    --------
    The four lines for two experiments with separate rates:

    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> cov, times = pm.gp.cov.ExpQuad(1, ls=1.2), {"a": np.linspace(0, 2, 7), "b": np.arange(5.0)}
    >>> gp = gm.StateGPs(
    ...     {name: gm.StateGP(t, np.exp(-t)[:, None], [cov], 0.1) for name, t in times.items()}
    ... )
    >>> with pm.Model(coords={"experiment": gp.names}) as model:
    ...     theta = {"rate": pm.HalfNormal("rate", 2, dims="experiment")}
    ...     x = gp.prior("x")
    ...     sigma = pm.HalfNormal("sigma", 1, initval=gp.sigma[0], dims="state")
    ...     noise = gp.at_observations(sigma)
    ...     pm.Normal("y", gp.at_observations(x), noise, observed=gp.observations)
    ...     gm.GradientMatchingODE("gradient_match", decay, x, theta, gp=gp, gamma=0.3)
    y
    gradient_match
    >>> x.type.shape
    (2, 7, 1)
    """

    def __init__(
        self,
        members: Mapping[str, StateGP],
        inputs: Mapping[str, Mapping[str, Any] | None] | None = None,
    ):
        _check_members(members)
        longest = max(len(gp.t) for gp in members.values())
        each = tuple(
            gp if len(gp.t) == longest else gp.with_more_times(longest - len(gp.t))
            for gp in members.values()
        )
        given = inputs or {}
        vars(self).update(
            names=tuple(members),
            members=each,
            inputs=tuple(given.get(name) for name in members),
            data=each[0].data,  # only for what all share: states and positive
            sigma=np.stack([gp.sigma for gp in each]),
            prior_mean=read_only(np.stack([gp.prior_mean for gp in each])),
            prior_slope=read_only(np.stack([gp.prior_slope for gp in each])),
        )

    members: tuple[StateGP, ...]
    sigma: NDArray[np.float64]
    prior_mean: NDArray[np.float64]
    prior_slope: NDArray[np.float64]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str):
            """Raise, with advice for attributes that each experiment has separately."""
            msg = f"{type(self).__name__!r} has no attribute {name!r}"
            if name in {*dir(StateGP), *StateGP.__annotations__} and not name.startswith("_"):
                msg = (
                    f"gp.{name} exists for each experiment separately: gp.members[0].{name}; "
                    "gp.with_members(changed) returns a copy with changed members."
                )
            raise AttributeError(msg)

    t = property(_stacked("t", "The grids, shape ``(experiment, time)``."))
    mean = property(_stacked("mean", "What is subtracted, shape ``(experiment, state)``."))
    scale = property(_stacked("scale", "What states are divided by, ``(experiment, state)``."))
    nugget = property(_stacked("nugget", "On the diagonal of every C, ``(experiment, state)``."))
    posterior_mean = _stacked("posterior_mean", "Return the smoothed states.")
    posterior_sd = _stacked("posterior_sd", "Return their standard deviation.")
    slope_variance = _stacked("slope_variance", "Return the prior variance of the slopes.")
    log_marginal_likelihood = _stacked("log_marginal_likelihood", "Return that of each state.")

    def with_members(self, members: Sequence[StateGP]) -> Self:
        """Return the same experiments with other Gaussian processes."""
        inputs = dict(zip(self.names, self.inputs, strict=True))
        return type(self)(dict(zip(self.names, members, strict=True)), inputs)

    def with_sigma(self, sigma: Any) -> Self:
        """Return a copy with another noise: a number, per state, or per experiment and state."""
        return self._with(StateGP.with_sigma, sigma)

    def with_nugget(self, nugget: Any) -> Self:
        """Return a copy with another nugget, in the shapes of :meth:`with_sigma`."""
        return self._with(StateGP.with_nugget, nugget)

    def with_amplitude(self, factor: Any) -> Self:
        """Return a copy with kernels times a factor, in the shapes of :meth:`with_sigma`."""
        return self._with(StateGP.with_amplitude, factor)

    def _with(self, change: Callable[[StateGP, Any], StateGP], numbers: Any) -> Self:
        is_per_experiment = np.shape(numbers) == self.scale.shape
        each = np.asarray(numbers) if is_per_experiment else [numbers] * len(self.members)
        return self.with_members([change(*pair) for pair in zip(self.members, each, strict=True)])

    @cached_property
    def processes(self) -> Any:
        """C, D and A and their eigenbases, stacked."""
        return StackedProcesses.of([gp.processes for gp in self.members])

    @property
    def covs(self) -> tuple:
        """The kernels of all experiments, experiment by experiment."""
        return tuple(cov for gp in self.members for cov in gp.covs)

    @cached_property
    def indices(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Indices of the observations among experiments, on their grids, and among the states."""
        found = []
        for number, gp in enumerate(self.members):
            time, state = gp.data.indices
            found.append(np.stack([np.full(len(time), number), gp.observed[time], state]))
        experiment, time, state = np.concatenate(found, axis=1)
        return experiment, time, state

    @property
    def observations(self) -> NDArray[np.float64]:
        """The observations, experiment by experiment and time by time, ``(observation,)``."""
        return np.concatenate([gp.y[gp.data.indices] for gp in self.members])

    @property
    def observation_labels(self) -> list[str]:
        """Labels such as ``wild type: prey[0.5]``."""
        return [
            f"{name}: {label}"
            for name, gp in zip(self.names, self.members, strict=True)
            for label in gp.data.labels(self.states)
        ]

    def at_observations(self, x):
        """Return states or noise at the observations, one entry for each observation.

        x are states ``(..., experiment, time, state)``, numbers per experiment and state, or per
        state, such as sigma; one number for all is returned unchanged.
        """
        experiment, time, state = self.indices
        sizes = lengths_of(x)
        if len(sizes) == 0:
            return x
        indices = {1: (state,), 2: (experiment, state)}.get(len(sizes), (experiment, time, state))
        whole = self.prior_mean.shape
        expected = {1: whole[2:], 2: whole[::2]}.get(len(sizes), whole)
        given = sizes[-len(expected) :]
        if any(n not in (None, wanted) for n, wanted in zip(given, expected, strict=True)):
            msg = (
                f"x has shape {(*sizes,)}; expected {expected}: states (experiment, time, state), "
                "or numbers per experiment and state, or per state."
            )
            raise ValueError(msg)
        return x[..., *indices]

    def at_times(self, x):
        """Return the rows of x at observation times, ``(..., time_observed, state)``."""
        number = [np.full(len(gp.observed), n) for n, gp in enumerate(self.members)]
        observed = [gp.observed for gp in self.members]
        return x[..., np.concatenate(number), np.concatenate(observed), :]

    @property
    def t_observed(self) -> NDArray[np.float64]:
        """Times of the observations, experiment by experiment."""
        return np.concatenate([gp.t_observed for gp in self.members])

    def summary(self) -> pd.DataFrame:
        """Return the tables of :meth:`StateGP.summary`, the experiments as outer index."""
        tables = {name: gp.summary() for name, gp in zip(self.names, self.members, strict=True)}
        return pd.concat(tables, names=["experiment"])


def _check_members(members: Mapping[str, StateGP]):
    first = next(iter(members.values()))
    for name, gp in members.items():
        if gp.states != first.states or not np.array_equal(gp.data.positive, first.data.positive):
            msg = (
                f"the experiment {name!r} has the states {list(gp.states)}, the first "
                f"{list(first.states)}; expected the same. A state that was not observed in one "
                "experiment is a column of NaN, or missing in its table."
            )
            raise ValueError(msg)

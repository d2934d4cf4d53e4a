"""Checks of experiments, priors and likelihoods before anything is fitted, and the fit."""

import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pymc as pm
from numpy.typing import NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

from pymc_gradmatch.arguments import in_order, is_distribution, is_registered
from pymc_gradmatch.data_values import CONSTANT, DataValues
from pymc_gradmatch.gp import (
    AnyStateGP,
    Data,
    Experiment,
    StateGP,
    as_experiments,
    as_noise,
    back_transform,
    piecewise_mean,
    unfitted,
)
from pymc_gradmatch.model.constraint import check_states
from pymc_gradmatch.model.gauss_newton import Problem
from pymc_gradmatch.model.likelihood import (
    GraphLikelihood,
    LikelihoodFunction,
    NormalLikelihood,
    graph_likelihood,
    with_noise,
)
from pymc_gradmatch.model.priors import parameters_of
from pymc_gradmatch.model.start import Start
from pymc_gradmatch.model.starting_points import scaled_by_solutions
from pymc_gradmatch.ode import ODE

_log = logging.getLogger("pymc.gradmatch")  # follows PyMC's level and handlers


@dataclass(frozen=True, eq=False)
class CheckedExperiment:
    """One experiment, checked."""

    ode: ODE
    """With the inputs of the experiment."""
    data: Data
    start: Start
    likelihood: LikelihoodFunction | None = None
    """In place of the normal one of the data."""
    graph: GraphLikelihood | None = None
    """The graph of this likelihood."""
    noise: NDArray[np.float64] | None = None
    """Sigma of each observation, where it is known."""
    name: str = ""

    @classmethod
    def of(
        cls,
        ode: ODE,
        one: Experiment,
        name: str = "",
        *,
        several: bool = False,
        fits: bool = True,
        number: DataValues = CONSTANT,
    ) -> "CheckedExperiment":
        """Check one experiment; errors about one of several contain its name.

        ``fits`` is whether Gaussian processes will be fitted; ``number`` writes numbers of the
        data into the likelihood.
        """
        try:
            ode = ode if one.inputs is None else ode.with_inputs(one.inputs)
            positive = ode.is_positive if ode.positive else False
            data = Data.of(one.t, one.y, states=ode.states, scales=one.scales, positive=positive)
            check_states(ode, data.states)
            ode.check_times(data.t)
            _check_shared(one.y, data, several)
            start = Start.of(ode, one.start, data.t[0])
            if fits and not isinstance(one.y, SharedVariable):
                data = _without_constant_states(data, ode, start)
            graph = None
            if one.likelihood is not None:
                graph = graph_likelihood(
                    one.likelihood, ode, unfitted(data), several=several, number=number
                )
                if one.sigma is not None:
                    msg = "sigma is given, and so is a likelihood; expected sigma in its lines."
                    raise ValueError(msg)  # noqa: TRY301
            _check_doses(ode, data, start)
            _check_reached(ode, data, graph, start)
            noise = None if one.sigma is None else as_noise(one.sigma, data)
        except (TypeError, ValueError) as error:
            if not several:
                raise
            msg = f"experiment {name!r}: {error}"
            raise type(error)(msg) from error
        return cls(ode, data, start, one.likelihood, graph, noise, name)

    @property
    def names(self) -> list[str]:
        """Names of all that its likelihood adds to a model."""
        added = () if self.graph is None else self.graph.names
        return [f"{self.name}::{name}" if self.name else name for name in added]


def experiments_by_name(
    given: Mapping[str, Experiment] | Sequence[Experiment], whole: Experiment, gp: StateGP | None
) -> dict[str, Experiment]:
    """Return experiments by name, with the arguments for all as their defaults."""
    single = {"t": whole.t, "y": whole.y, "likelihood": whole.likelihood, "gp": gp}
    if any(value is not None for value in single.values()):
        msg = (
            f"{[n for n, v in single.items() if v is not None]} are given, and so are experiments, "
            "which have their own; expected one of them: gm.Experiment(t, y, likelihood=...)."
        )
        raise TypeError(msg)
    return {
        name: replace(
            one,
            inputs=whole.inputs if one.inputs is None else one.inputs or None,
            start=whole.start if one.start is None else one.start,
            scales=whole.scales if one.scales is None else one.scales,
            sigma=whole.sigma if one.sigma is None else one.sigma,
        )
        for name, one in as_experiments(given).items()
    }


@dataclass(frozen=True, eq=False)
class Fits:
    """Experiments with the Gaussian processes fitted to them."""

    parts: Sequence[CheckedExperiment]
    gp: AnyStateGP
    priors: Sequence[Mapping[str, TensorVariable]]
    """Scalar priors of each experiment."""
    is_local: NDArray[np.bool_]
    """Which parameters are separate for each experiment."""


def check_agreement(parts: Sequence[CheckedExperiment]):
    """Raise unless all experiments have known starts, noise and likelihoods of the same kind.

    Warn of random variables that the same lines draw separately for each of them.
    """
    first = parts[0]
    for one in parts:
        if one.start.places != first.start.places:
            both = [list(start.known) for start in (one.start, first.start)]
            msg = (
                f"the starts of {both[0]} are known in the experiment {one.name!r}, of {both[1]} "
                "in the first; expected the same states in all. What is known roughly has a prior."
            )
            raise ValueError(msg)
        if (one.noise is None) != (first.noise is None):
            msg = f"the noise of some experiments is known, that of {one.name!r} or the first is "
            raise ValueError(msg + "not; expected sigma= for each, or for none.")
        if (one.likelihood is None) != (first.likelihood is None):
            msg = f"some experiments have a likelihood, {one.name!r} or the first has not; "
            raise ValueError(msg + "expected one for each, or for none.")
    each = [one.graph.drawn for one in parts if one.graph is not None]
    repeated = [n for n in dict.fromkeys(itertools.chain(*each)) if sum(n in o for o in each) > 1]
    if repeated:
        name = repeated[0]
        warnings.warn(
            f"the likelihoods of several experiments draw {repeated}: each experiment has one of "
            f"its own, such as '{first.name}::{name}'. What they share is a parameter: name it in "
            f"the params of gm.ODE, which need not use it, give it a prior, and write theta.{name}."
            " With the dim 'experiment' of that prior each has its own, and this warning goes.",
            UserWarning,
            stacklevel=5,
        )


def check_priors(ode: ODE, priors, model: pm.Model, n_experiments: int | None = None):
    """Raise unless there is one prior for each parameter, or one per experiment."""
    in_order(priors, ode.params, "priors are")
    for name, prior in priors.items():
        is_entry = name not in ode.param_lengths and isinstance(prior, TensorVariable)
        if not (is_entry or is_distribution(prior) or is_registered(prior, model)):
            msg = (
                f"the prior of {name!r} is a {type(prior).__name__}; expected a distribution of "
                "PyMC, for example pm.HalfNormal.dist(5), or a variable of the model. A parameter "
                "that is known is a number in the right-hand side, or in the four lines."
            )
            raise TypeError(msg)
        if n_experiments is not None and prior.ndim == 1:
            if prior.type.shape[0] in (None, n_experiments):
                continue
            msg = (
                f"the prior of {name!r} has shape {prior.type.shape}; expected a scalar, or one "
                f'entry for each of {n_experiments} experiments: dims="experiment".'
            )
            raise ValueError(msg)
        if prior.ndim != 0:
            msg = f"the prior of {name!r} has {prior.ndim} dimensions; expected a scalar."
            raise ValueError(msg)


def check_noise_is_identifiable(parts: Sequence[Data]):
    """Raise if the noise of a state is to be estimated from data that are all the same.

    A solution through all of them leaves no residual, and the density has no bound.
    """
    seen = np.array([data.is_observed.any(axis=0) for data in parts])
    constant = np.array([data.is_constant for data in parts])
    silent = seen.any(axis=0) & (constant | ~seen).all(axis=0)
    if silent.any():
        k = int(np.flatnonzero(silent)[0])
        value = next(data.y[data.is_observed[:, k], k][0] for data in parts if data.is_constant[k])
        names = [name for name, one in zip(parts[0].states, silent, strict=True) if one]
        msg = (
            f"the data of the states {names} are the same at all times, and do not determine "
            "their noise; expected data that vary, or sigma, as numbers or with a prior. Where a "
            f"state is constant, give its start: start={{{names[0]!r}: {value:g}}}. What was "
            "not measured is NaN."
        )
        raise ValueError(msg)


def warn_of_unused(ode: ODE, priors: Mapping, parts: Sequence[CheckedExperiment]):
    """Warn of parameters that nothing depends on."""
    used = [name for name, is_used in zip(ode.params, ode.used_params, strict=True) if is_used]
    for one in parts:
        used += [*one.start.uses, *(() if one.graph is None else one.graph.depends_on)]
    nodes = [priors[name].owner for name in used if name in ode.params]
    parents = [variable for node in nodes if node is not None for variable in node.inputs]
    upstream = set(ancestors(parents))
    unused = [n for n in ode.params if n not in used and priors[n] not in upstream]
    if unused:
        warnings.warn(
            f"the parameters {unused} enter neither the derivatives, nor a start, nor a "
            "likelihood: data say nothing about them, and their posterior is their prior. Check "
            "whether the right-hand side was meant to use them, or leave them out of params.",
            UserWarning,
            stacklevel=3,
        )


def warn_of_unseen(parts: Sequence[CheckedExperiment]):
    """Warn of data in y that no line of a likelihood observes: they have no effect."""
    for one in parts:
        if one.graph is None:
            continue
        columns = zip(one.data.states, one.data.y.T, strict=True)
        unseen = [k for k, y in columns if not one.graph.observes(y[~np.isnan(y)])]
        if unseen:
            where = f"experiment {one.name!r}: " if one.name else ""
            warnings.warn(
                f"{where}y has data of {unseen} that no line of the likelihood observes. A "
                "likelihood takes the place of that of y, so they have no effect. Observe them in "
                "its lines too, or leave them out of y.",
                UserWarning,
                stacklevel=5,
            )


def noise_on_grid(parts: Sequence[CheckedExperiment], gp: AnyStateGP) -> NDArray[np.float64]:
    """Return known noise of each experiment on its grid, one where nothing was observed."""
    on_grid = np.ones(gp.prior_mean.shape)
    noises = [one.noise for one in parts if one.noise is not None]
    for each, noise, member in zip(on_grid, noises, gp.members, strict=True):
        each[member.observed] = np.nan_to_num(noise, nan=1.0)
    return on_grid


def fit_states(
    fit: Callable[[Data, np.random.Generator], StateGP],
    parts: Sequence[CheckedExperiment],
    priors: Sequence[Mapping[str, TensorVariable]],
    rng: np.random.Generator,
) -> list[StateGP]:
    """Fit a Gaussian process to each state of each experiment, with the jumps of doses removed.

    A scale that an experiment's data do not determine is that of the others, or of solutions.
    """
    scales = np.array([one.data.scale for one in parts])
    means = np.array([one.data.mean for one in parts])
    scaled = []
    for number, (one, prior) in enumerate(zip(parts, priors, strict=True)):
        for k in np.flatnonzero(np.isnan(scales[number])):
            known = ~np.isnan(scales[:, k])
            if known.any():
                if not one.data.is_constant[k]:
                    means[number, k] = np.median(means[known, k])
                scales[number, k] = np.median(scales[known, k])
        data = one.data.with_scale(means[number], scales[number])
        if data.unscaled:
            data = ScalesFromSolutions(one, data, prior).of(data, rng)
        scaled.append(data)
        means[number], scales[number] = scaled[-1].mean, scaled[-1].scale
    fits = []
    for one, data in zip(parts, _with_scales_of_zeros(scaled), strict=True):
        gp = fit(_without_doses(data, one.ode), rng)
        gp = StateGP.of(data, gp.processes, gp.sigma)
        fits.append(gp if one.noise is None else with_noise(gp, one.noise))
    return fits


class ScalesFromSolutions:
    """Finds scales that data lack from solutions of the ODE, for data sets of the same pattern.

    ``number`` sets the numbers of each data set in the likelihood, before it is called; other
    unknowns of a likelihood have the initial values of the first data set.
    """

    def __init__(
        self,
        one: CheckedExperiment,
        data: Data,
        priors: Mapping[str, TensorVariable],
        number: DataValues = CONSTANT,
    ):
        self._is_normal, gp = one.likelihood is None, unfitted(data)
        likelihood = (
            NormalLikelihood(gp)
            if one.likelihood is None
            else graph_likelihood(one.likelihood, one.ode, gp, number=number)
        )
        parameters = parameters_of(priors, one.ode.params)
        self._problem = Problem.of(
            one.ode.transformed, gp, parameters, likelihood=likelihood, start=one.start
        )

    def of(self, data: Data, rng: np.random.Generator) -> Data:
        """Return data with a scale for each state, but for states that are zero."""
        if not data.unscaled:
            return data
        problem = self._problem
        if self._is_normal:
            gp = unfitted(data)
            problem = replace(problem, gp=gp, likelihood=NormalLikelihood(gp))
        return scaled_by_solutions(problem, data, rng)

    def __call__(self, data: Data, rng: np.random.Generator) -> Data:
        """Return data with a scale for every state."""
        [scaled] = _with_scales_of_zeros([self.of(data, rng)])
        return scaled


def _with_scales_of_zeros(parts: Sequence[Data]) -> list[Data]:
    """Return data in which states that are zero have the scale of other experiments, or one."""
    scales = np.array([data.scale for data in parts])
    sizes = [np.median(one[one > 0]) if (one > 0).any() else 1.0 for one in scales.T]
    return [
        data.with_scale(data.mean, np.where(data.scale > 0, data.scale, sizes)) for data in parts
    ]


def _without_doses(data: Data, ode: ODE) -> Data:
    """Return the data minus the sum of the doses so far."""
    if np.isnan(data.scale).any() or not (ode.steps.amount != 0).any():
        return data
    later = ode.jumps > data.t[0]  # what is given before is in x(t0)
    steps = ode.steps.factor[later], ode.steps.amount[later]
    jumped = piecewise_mean(data.mean, data.t, ode.jumps[later], steps, data.positive)
    return replace(data, y=back_transform(data.transformed - jumped + data.mean, data.positive))


def _check_doses(ode: ODE, data: Data, start: Start):
    """Raise if a state has both a dose at the first time and a given start."""
    first = ode.jumps == data.t[0]
    dosed = (ode.steps.factor[first] != 1) | (ode.steps.amount[first] != 0)
    given = [*start.known, *start.priors]
    both = [n for n, one in zip(ode.states, dosed.any(axis=0), strict=True) if one and n in given]
    if both:
        msg = (
            f"the states {both} are given a dose at t = {data.t[0]:g}, the first time, and a start "
            "that holds at the same time, after the dose; expected one of them. Leave this dose "
            "out, and put it into the start."
        )
        raise ValueError(msg)


def _without_constant_states(data: Data, ode: ODE, start: Start) -> Data:
    """Return the data without those of states that stay at their known start.

    Each is this number: they have no noise, and no information about parameters.
    """
    numbers = np.array([start.numbers.get(name, np.nan) for name in ode.states])
    if not data.are_constant_at(numbers).any():
        return data
    is_constant = data.are_constant_at(start.constant_values(ode, data.t))
    if is_constant.any():
        _log.info(
            "the states %s never change from their start, and their data are these numbers: they "
            "carry no information, and are left out.",
            ", ".join(name for name, one in zip(ode.states, is_constant, strict=True) if one),
        )
    return data.without(is_constant) if is_constant.any() else data


def _check_reached(ode: ODE, data: Data, graph: GraphLikelihood | None, start: Start):
    """Raise if nothing is observed, or if a state with unknown start affects no observed one."""
    if graph is None:
        reached = data.is_observed.any(axis=0)
        if not reached.any():
            msg = "y holds no observation at all (all NaN); expected some, or a likelihood."
            raise ValueError(msg)
        _log_empty_times(data)
    else:
        reached = np.array([name in graph.depends_on for name in ode.states])
    reached = reached | np.isin(ode.states, [*start.known, *start.priors, *start.uses])
    for _ in ode.states:
        reached = reached | ode.jacobian_pattern[reached].any(axis=0)
    unreached = [
        name for name, is_reached in zip(ode.states, reached, strict=True) if not is_reached
    ]
    if unreached:
        msg = (
            f"the states {unreached} are neither observed, nor do they enter the equations of "
            "observed ones: data say nothing about them. Leave them out, and integrate them "
            "afterwards, observe them in a likelihood, or give their start: "
            f"start={{{unreached[0]!r}: 0.0}}."
        )
        raise ValueError(msg)


def _log_empty_times(data: Data):
    """Log times without observations, but for the first, that of x(t0)."""
    empty = data.t[1:][~data.is_observed[1:].any(axis=1)]
    if len(empty):
        _log.info(
            "nothing was observed at t = %s: these times carry no data, and only refine the grid.",
            ", ".join(f"{time:g}" for time in empty[:5]) + ", ..." * (len(empty) > 5),
        )


def _check_shared(y, data: Data, several: bool):
    """Raise if y is a shared variable that the likelihood could not follow."""
    if not isinstance(y, SharedVariable):
        return
    if several:
        msg = (
            "y is a shared variable, such as pm.Data, which several experiments do not follow "
            "where it is set anew; expected an array, y.get_value()."
        )
        raise TypeError(msg)
    if not data.is_complete:
        msg = (
            "y is a shared variable with missing values (NaN), but the likelihood is of the others "
            "alone; expected an array, y.get_value(), or complete pm.Data."
        )
        raise ValueError(msg)


def check_given_gp(gp: StateGP, data: Data, settings: Mapping[str, Any]):
    """Raise unless Gaussian processes that are given are of these data."""
    if settings.get("cov") is not None or settings.get("shared") is not None:
        msg = "gp is given, and so is cov or shared; a given gp has its kernels already."
        raise ValueError(msg)
    if not gp.data.is_same(data):
        msg = "gp was made from other data than t and y; expected the same times and observations."
        raise ValueError(msg)

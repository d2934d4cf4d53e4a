"""What is given of each experiment, checked before anything is fitted."""

import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import EVALUATE_ONCE, at_initial_values
from pymc_gradmatch.arguments import in_order, is_distribution, is_registered
from pymc_gradmatch.gp import (
    AnyStateGP,
    Data,
    Experiment,
    StateGP,
    as_noise,
    staircase,
    states_of,
    unfitted,
)
from pymc_gradmatch.model.constraint import check_states
from pymc_gradmatch.model.gauss_newton import Problem, scaled_by_solutions
from pymc_gradmatch.model.likelihood import LikelihoodFunction, Normal, Written, rehearsed
from pymc_gradmatch.model.priors import parameters_of
from pymc_gradmatch.model.start import Start
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.replaceable import CONSTANT, Numbers

_log = logging.getLogger("pymc.gradmatch")  # follows PyMC's level and handlers


@dataclass(frozen=True, eq=False)
class Given:
    """One experiment, checked.

    The ODE has its inputs; ``likelihood`` is there in place of the normal one of the data, and
    ``written`` what it writes; ``noise`` is sigma of each observation, where it is known.
    """

    ode: ODE
    data: Data
    known: Start
    likelihood: LikelihoodFunction | pm.Model | None = None
    written: Written | None = None
    noise: NDArray[np.float64] | None = None
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
        number: Numbers = CONSTANT,
    ) -> "Given":
        """Check one experiment; of one among several errors say its name.

        ``fits`` says whether Gaussian processes are still to be fitted; ``number`` writes numbers
        of the data into the likelihood.
        """
        try:
            ode = ode if one.inputs is None else ode.with_inputs(one.inputs)
            if several:
                _refuse_shared(one.y)
            positive = ode.is_positive if ode.positive else False
            data = Data.of(one.t, one.y, states=ode.states, scales=one.scales, positive=positive)
            check_states(ode, data.states)
            ode.check_times(data.t)
            _check_shared(one.y, data)
            known = Start.of(ode, one.start, data.t[0])
            if fits and not isinstance(one.y, SharedVariable):
                data = _without_rest(data, ode, known)
            written = None
            if one.likelihood is not None:
                written = rehearsed(
                    one.likelihood, ode, unfitted(data), several=several, number=number
                )
                if one.sigma is not None:
                    msg = "sigma is given, and so is a likelihood; expected sigma in its lines."
                    raise ValueError(msg)  # noqa: TRY301
            _check_doses(ode, data, known)
            _check_reached(ode, data, written, known)
            noise = None if one.sigma is None else as_noise(one.sigma, data)
        except (TypeError, ValueError) as error:
            if not several:
                raise
            msg = f"experiment {name!r}: {error}"
            raise type(error)(msg) from error
        return cls(ode, data, known, one.likelihood, written, noise, name)

    @property
    def names(self) -> list[str]:
        """Names of all that its likelihood adds to a model."""
        added = () if self.written is None else self.written.names
        return [f"{self.name}::{name}" if self.name else name for name in added]


@dataclass(frozen=True, eq=False)
class Fits:
    """Experiments with what was fitted to them."""

    parts: Sequence[Given]
    gp: AnyStateGP
    priors: Sequence[Mapping[str, TensorVariable]]
    """Scalar ones of each experiment."""
    is_local: NDArray[np.bool_]
    """Which parameters each experiment has for itself."""


def check_alike(parts: Sequence[Given]):
    """Raise unless what is known of starts, and what is observed, is alike in all experiments.

    Warn of unknowns that each of them has for itself by the same lines.
    """
    first = parts[0]
    for one in parts:
        if one.known.places != first.known.places:
            both = [list(start.known) for start in (one.known, first.known)]
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
    each = [one.written.drawn for one in parts if one.written is not None]
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
    """Raise if the noise of a state is sought in data that are all the same.

    A solution that runs through all of them leaves none: the density grows without a bound.
    """
    seen = np.array([data.is_observed.any(axis=0) for data in parts])
    constant = np.array([data.is_constant for data in parts])
    silent = seen.any(axis=0) & (constant | ~seen).all(axis=0)
    if silent.any():
        k = int(np.flatnonzero(silent)[0])
        value = next(data.y[data.is_observed[:, k], k][0] for data in parts if data.is_constant[k])
        names = [name for name, one in zip(parts[0].states, silent, strict=True) if one]
        msg = (
            f"the data of the states {names} are the same at all times, and do not tell their "
            "noise; expected data that vary, or sigma, as numbers or with a prior. Where a state "
            f"is known to stay where it is, say so: start={{{names[0]!r}: {value:g}}}. What was "
            "not measured is NaN."
        )
        raise ValueError(msg)


def warn_of_unused(ode: ODE, priors: Mapping, parts: Sequence[Given]):
    """Warn of parameters that nothing depends on."""
    used = [name for name, is_used in zip(ode.params, ode.used_params, strict=True) if is_used]
    for one in parts:
        used += [*one.known.uses, *(() if one.written is None else one.written.depends_on)]
    nodes = [priors[name].owner for name in used if name in ode.params]
    parents = [variable for node in nodes if node is not None for variable in node.inputs]
    upstream = set(ancestors(parents))
    unused = [n for n in ode.params if n not in used and priors[n] not in upstream]
    if unused:
        warnings.warn(
            f"the parameters {unused} enter neither the derivatives, nor a start, nor a "
            "likelihood: data say nothing about them, and their posterior is their prior. See "
            "whether the right-hand side was meant to use them, or leave them out of params.",
            UserWarning,
            stacklevel=3,
        )


def warn_of_unseen(parts: Sequence[Given]):
    """Warn of data in y that no line of a likelihood observes, and that count for nothing."""
    for one in parts:
        if one.written is None:
            continue
        columns = zip(one.data.states, one.data.y.T, strict=True)
        unseen = [k for k, y in columns if not one.written.observes(y[~np.isnan(y)])]
        if unseen:
            where = f"experiment {one.name!r}: " if one.name else ""
            warnings.warn(
                f"{where}y has data of {unseen} that no line of the likelihood observes. A "
                "likelihood takes the place of that of y, so they tell nothing. Observe them in "
                "its lines too, or leave them out of y.",
                UserWarning,
                stacklevel=5,
            )


def check_possible(
    parts: Sequence[Given],
    model: pm.Model,
    priors: Mapping[str, TensorVariable],
    gp: AnyStateGP,
    levels: NDArray[np.float64] | TensorVariable,
):
    """Raise if a likelihood is zero where samplers start: at levels of the states on the grid.

    Priors are those of the parameters, numbers or one for each experiment.
    """
    variables = [*priors.values()]
    upstream = set(ancestors(variables))
    to_come = [prior for prior in variables if is_distribution(prior)]
    free = [rv for rv in dict.fromkeys([*model.free_RVs, *to_come]) if rv in upstream]
    there = at_initial_values([*variables, pt.as_tensor(levels)], free, model.rvs_to_initial_values)
    *values, levels = pytensor.function([], there, mode=EVALUATE_ONCE)()
    theta = dict(zip(priors, values, strict=True))
    for number, (one, member, own) in enumerate(
        zip(parts, gp.members, gp.of_each(levels), strict=True)
    ):
        if one.written is None:
            continue
        of_one = [float(np.atleast_1d(value)[number * np.ndim(value)]) for value in theta.values()]
        zero = one.written.impossible(np.array(of_one), member.at_times(own))
        if zero:
            where = f"{one.name}::{zero}" if one.name else zero
            msg = (
                f"the likelihood is zero at {where}, where sampling starts (states at the Gaussian "
                "process' posterior mean, parameters at their support point). Check the data and "
                "the likelihood, start elsewhere with `initval`, or take preset 'refined', which "
                "starts from solutions of the ODE."
            )
            raise ValueError(msg)


def known_noise(parts: Sequence[Given], gp: AnyStateGP) -> NDArray[np.float64]:
    """Return known noise of each experiment at the times of its grid, one where nothing was."""
    on_grid = np.ones(gp.prior_mean.shape)
    noises = [one.noise for one in parts if one.noise is not None]
    for each, noise, member in zip(on_grid, noises, gp.members, strict=True):
        each[member.observed] = np.nan_to_num(noise, nan=1.0)
    return on_grid


def fit_states(
    fit: Callable[[Data, np.random.Generator], StateGP],
    parts: Sequence[Given],
    priors: Sequence[Mapping[str, TensorVariable]],
    rng: np.random.Generator,
) -> list[StateGP]:
    """Fit a Gaussian process to every state of every experiment, without what doses add to it.

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
        scaled.append(_scaled(one, data, prior, rng))
        means[number], scales[number] = scaled[-1].mean, scaled[-1].scale
    fits = []
    for one, data in zip(parts, _sized(scaled), strict=True):
        gp = fit(_without_steps(data, one.ode), rng)
        fits.append(StateGP.of(data, gp.processes, gp.sigma))
    return fits


def _sized(parts: Sequence[Data]) -> list[Data]:
    """Return the data with a scale also for states that are zero: that of others, or one.

    Any will do for what does not move.
    """
    scales = np.array([data.scale for data in parts])
    sizes = [np.median(one[one > 0]) if (one > 0).any() else 1.0 for one in scales.T]
    return [
        data.with_scale(data.mean, np.where(data.scale > 0, data.scale, sizes)) for data in parts
    ]


def _scaled(
    one: Given, data: Data, priors: Mapping[str, TensorVariable], rng: np.random.Generator
) -> Data:
    """Return the data with a scale for every state, if need be from solutions of the ODE."""
    if not data.unscaled:
        return data
    return scaled_by_solutions(_unscaled(one, data, priors), data, rng)


def _unscaled(
    one: Given, data: Data, priors: Mapping[str, TensorVariable], number: Numbers = CONSTANT
) -> Problem:
    """Return the problem of which solutions tell scales."""
    gp = unfitted(data)
    told = Normal(gp) if one.likelihood is None else rehearsed(
        one.likelihood, one.ode, gp, number=number
    )  # fmt: skip
    parameters = parameters_of(priors, one.ode.params)
    return Problem.of(one.ode.transformed, gp, parameters, None, told, one.known)


class Scales:
    """Finds scales for data sets that lack some, which are alike but for their numbers.

    ``number`` puts those of each into the likelihood, before it is asked for; what else is unknown
    in a likelihood is where that of the first starts.
    """

    def __init__(self, one: Given, priors: Mapping[str, TensorVariable], number: Numbers):
        self._is_normal = one.likelihood is None
        self._problem = _unscaled(one, one.data, priors, number)

    def __call__(self, data: Data, rng: np.random.Generator) -> Data:
        """Return data with a scale for every state."""
        if not data.unscaled:
            return data
        problem = self._problem
        if self._is_normal:
            gp = unfitted(data)
            problem = replace(problem, gp=gp, likelihood=Normal(gp))
        [scaled] = _sized([scaled_by_solutions(problem, data, rng)])
        return scaled


def _without_steps(data: Data, ode: ODE) -> Data:
    """Return the data less what doses have added to each state so far."""
    if np.isnan(data.scale).any() or not (ode.steps.amount != 0).any():
        return data
    later = ode.jumps > data.t[0]  # what is given before is in x(t0)
    steps = ode.steps.factor[later], ode.steps.amount[later]
    jumped = staircase(data.mean, data.t, ode.jumps[later], steps, data.positive)
    return replace(data, y=states_of(data.levels - jumped + data.mean, data.positive))


def _check_doses(ode: ODE, data: Data, known: Start):
    """Raise if a dose falls on the first time, at which the state is said to start otherwise."""
    first = ode.jumps == data.t[0]
    dosed = (ode.steps.factor[first] != 1) | (ode.steps.amount[first] != 0)
    given = [*known.known, *known.priors]
    both = [n for n, one in zip(ode.states, dosed.any(axis=0), strict=True) if one and n in given]
    if both:
        msg = (
            f"the states {both} are given a dose at t = {data.t[0]:g}, the first time, and a start "
            "that holds at the same time, after the dose; expected one of them. Leave this dose "
            "out, and put it into the start."
        )
        raise ValueError(msg)


def _without_rest(data: Data, ode: ODE, known: Start) -> Data:
    """Return the data without those of states that stay where they are known to start.

    Each is this number: they say nothing of parameters, and no noise is in them.
    """
    numbers = np.array([known.numbers.get(name, np.nan) for name in ode.states])
    if not data.are_all(numbers).any():
        return data
    at_rest = data.are_all(known.at_rest(ode, data.t))
    if at_rest.any():
        _log.info(
            "the states %s never change from their start, and their data are these numbers: they "
            "carry no information, and are left out.",
            ", ".join(name for name, one in zip(ode.states, at_rest, strict=True) if one),
        )
    return data.without(at_rest) if at_rest.any() else data


def _check_reached(ode: ODE, data: Data, written: Written | None, known: Start):
    """Raise if nothing is observed, or a state has no effect on what is, and an unknown start."""
    if written is None:
        reached = data.is_observed.any(axis=0)
        if not reached.any():
            msg = "y holds no observation at all (all NaN); expected some, or a likelihood."
            raise ValueError(msg)
        _tell_empty_times(data)
    else:
        reached = np.array([name in written.depends_on for name in ode.states])
    reached = reached | np.isin(ode.states, [*known.known, *known.priors, *known.uses])
    for _ in ode.states:
        reached = reached | ode.jacobian_pattern[reached].any(axis=0)
    unreached = [
        name for name, is_reached in zip(ode.states, reached, strict=True) if not is_reached
    ]
    if unreached:
        msg = (
            f"the states {unreached} are neither observed, nor do they enter the equations of "
            "observed ones: data say nothing about them. Leave them out, and integrate them "
            "afterwards, observe them in a likelihood, or say where they start: "
            f"start={{{unreached[0]!r}: 0.0}}."
        )
        raise ValueError(msg)


def _tell_empty_times(data: Data):
    """Log times at which nothing was observed, but for the first, where x(t0) is."""
    empty = data.t[1:][~data.is_observed[1:].any(axis=1)]
    if len(empty):
        _log.info(
            "nothing was observed at t = %s: these times carry no data, and only refine the grid.",
            ", ".join(f"{time:g}" for time in empty[:5]) + ", ..." * (len(empty) > 5),
        )


def _check_shared(y, data: Data):
    if isinstance(y, SharedVariable) and not data.is_complete:
        msg = (
            "y is a shared variable with missing values (NaN), but the likelihood is of the others "
            "alone; expected an array, y.get_value(), or complete pm.Data."
        )
        raise ValueError(msg)


def _refuse_shared(y):
    if isinstance(y, SharedVariable):
        msg = (
            "y is a shared variable, such as pm.Data, which several experiments do not follow "
            "where it is set anew; expected an array, y.get_value()."
        )
        raise TypeError(msg)


def refuse_beside_experiments(given: Mapping[str, Any]):
    """Raise if something is given that each experiment has for itself."""
    if given:
        msg = (
            f"{list(given)} are given, and so are experiments, which have their own; expected one "
            "of them: gm.Experiment(t, y, likelihood=...)."
        )
        raise TypeError(msg)


def check_given_gp(gp: StateGP, data: Data, settings: Mapping[str, Any]):
    """Raise unless Gaussian processes that are given are of these data."""
    if settings.get("cov") is not None or settings.get("shared") is not None:
        msg = "gp is given, and so is cov or shared; a given gp has its kernels already."
        raise ValueError(msg)
    if not gp.data.is_same(data):
        msg = "gp was made from other data than t and y; expected the same times and observations."
        raise ValueError(msg)

"""Whether an ODE, its states and a Gaussian process fit together, asked before any sampling."""

import warnings
from collections.abc import Sequence
from typing import cast

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.initial_point import make_initial_point_expression
from pymc.vartypes import continuous_types
from pytensor.gradient import NullTypeGradError
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.derivatives import EVALUATE_ONCE, random_ancestors
from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.ode import ODE

__all__ = [
    "check_labels",
    "check_ode",
    "check_shape",
    "check_start",
    "check_states",
    "dims_of",
    "label_states",
    "remember_data",
    "warn_of_other_data",
]


def check_ode(ode: ODE):
    """Raise unless an ODE is given, not its right-hand side or data."""
    if not isinstance(ode, ODE):
        msg = (
            f"ode is a {type(ode).__name__}; expected a gm.ODE(rhs, states, params), the first "
            "argument, before times and observations."
        )
        raise TypeError(msg)


def check_states(ode: ODE, names: tuple):
    """Raise unless the columns of the data are the states of the ODE, or have no names."""
    check_ode(ode)
    if len(ode.states) != len(names):
        msg = (
            f"the ODE has {len(ode.states)} states {list(ode.states)}, the data {len(names)}; "
            "expected one column of y per state of the ODE."
        )
        raise ValueError(msg)
    if names not in (tuple(range(len(names))), ode.states):
        msg = (
            f"the columns of y are {list(names)}, the states of the ODE {list(ode.states)}; "
            "expected the same names in the same order."
        )
        raise ValueError(msg)


def check_shape(x: TensorVariable, gp: StateGP):
    """Raise unless the states live on the grid of the Gaussian process."""
    expected = gp.prior_mean.shape
    if x.ndim < 2 or any(
        given not in (None, wanted)
        for given, wanted in zip(x.type.shape[-2:], expected, strict=True)
    ):
        msg = (
            f"x has shape {x.type.shape}; expected (..., time, state) = (..., {expected[0]}, "
            f'{expected[1]}), the grid of the Gaussian process: x = gp.prior("x").'
        )
        raise ValueError(msg)


def dims_of(model: pm.Model, x: TensorVariable) -> tuple[str, ...] | None:
    """Return the dims of states: their own, ``("time", "state")`` if the lengths fit, or None."""
    if model.named_vars.get(x.name) is x and x.name in model.named_vars_to_dims:
        return model.named_vars_to_dims[x.name]
    usual = ("time", "state")
    if x.ndim != 2 or not set(usual) <= set(model.coords):
        return None
    lengths = [int(model.dim_lengths[dim].eval()) for dim in usual]
    fits = all(n in (None, m) for n, m in zip(x.type.shape, lengths, strict=True))
    return usual if fits else None


def check_labels(model: pm.Model, ode: ODE, dims: Sequence[str | None] | None):
    """Raise unless the labels of the states are the names that the ODE has for them."""
    dim = dims[-1] if dims else None
    labels = model.coords.get(dim) if dim else None
    if labels is not None and labels not in (ode.states, tuple(range(len(ode.states)))):
        msg = (
            f"the model's coord {dim!r} is {list(labels)}, the states of the ODE are "
            f"{list(ode.states)}; expected the same names in the same order, so that "
            f"x.sel({dim}={ode.states[0]!r}) is that state: "
            f"pm.Model(coords={{{dim!r}: ode.states}})."
        )
        raise ValueError(msg)


def label_states(model: pm.Model, ode: ODE, dims: Sequence[str | None] | None):
    """Name the states after the ODE where the model has no labels for them."""
    dim = dims[-1] if dims else None
    if dim and model.coords[dim] is None:
        model.coords[dim] = ode.states


def remember_data(match: TensorVariable, model: pm.Model, gp: StateGP):
    """Note with the constraint which ``pm.Data`` its Gaussian processes were made from."""
    match.tag.made_from = {
        data.name: data.get_value()
        for data in model.data_vars
        for used in (gp.y, gp.t_observed)
        if np.array_equal(data.get_value(), used)
    }


def warn_of_other_data(model: pm.Model):
    """Warn if ``pm.Data`` were set after the Gaussian processes had been fitted to them."""
    made_from = [getattr(rv.tag, "made_from", {}) for rv in model.observed_RVs]
    changed = {
        name
        for values in made_from
        for name, value in values.items()
        if name in model.named_vars and not np.array_equal(model[name].get_value(), value)
    }
    if changed:
        warnings.warn(
            f"pm.Data {sorted(changed)} were set after the Gaussian processes had been fitted to "
            "them. Their kernels, times, mean and scale, and a sigma or prior mean estimated from "
            "the data, are still those of the old data. Build the model anew, or use gm.fit_many.",
            UserWarning,
            stacklevel=3,
        )


def check_start(
    model: pm.Model,
    ode: ODE,
    x,
    theta,
    gp: StateGP,
    others: Sequence = (),
    to_come: Sequence[TensorVariable] = (),
):
    """Evaluate the right-hand side and its slopes where samplers start; NaN there helps nobody.

    Parameters
    ----------
    model : pymc.Model
        Where x, theta and the others come from.
    ode, x, theta, gp
        As for :class:`~pymc_gradmatch.GradientMatchingODE`.
    others : sequence
        Gamma and sigma; if they are random, then by variables of the model.
    to_come : sequence of TensorVariable
        Distributions that are about to join the model.
    """
    x, theta = pt.as_tensor(x), [pt.as_tensor(value) for value in ode.ordered_params(theta)]
    f = ode(gp.t, x, theta)
    drawn = [f, *(other for other in others if isinstance(other, Variable))]
    stray = random_ancestors(drawn, [*model.basic_RVs, *to_come])
    stray += random_ancestors([v for rv in to_come for v in rv.owner.inputs], model.basic_RVs)
    if stray:
        msg = (
            f"states, parameters, gamma or sigma depend on {len(stray)} random variables that are "
            "not in the model, such as pm.HalfNormal.dist(5); expected named ones: "
            'pm.HalfNormal("alpha", 5).'
        )
        raise ValueError(msg)
    varying = {"the states": x} | {
        name: value
        for name, value in zip(ode.params, theta, strict=True)
        if random_ancestors([value]) and value.dtype in continuous_types
    }
    graphs = [f, *_slopes(f, [*varying.values()])]
    upstream = set(ancestors(graphs))
    free = [rv for rv in dict.fromkeys([*model.free_RVs, *to_come]) if rv in upstream]
    start = make_initial_point_expression(
        free_rvs=free,
        rvs_to_transforms={},
        initval_strategies=model.rvs_to_initial_values,
    )
    there = clone_replace(graphs, dict(zip(free, start, strict=True)))
    f, *slopes = pytensor.function([], there, mode=EVALUATE_ONCE)()
    advice = (
        "where sampling starts (states at the Gaussian process' posterior mean, parameters at "
        "their support point). Choose priors that keep it finite, start elsewhere with `initval`, "
        "or write the ODE for transformed states, for example logarithms."
    )
    if not np.isfinite(f).all():
        *_, row, column = np.argwhere(~np.isfinite(f))[0]
        msg = (
            f"the right-hand side of state {ode.states[column]!r} is {f[..., row, column]} at "
            f"t = {gp.t[row]:g} {advice}"
        )
        raise ValueError(msg)
    by_what = zip(varying, slopes, strict=False)  # or no slopes at all
    bad = [what for what, slope in by_what if not np.isfinite(slope).all()]
    if bad:
        msg = (
            f"the right-hand side is finite, but its derivative by {', '.join(bad)} is not, "
            f"{advice} A power such as x ** k has none at x < 0."
        )
        raise ValueError(msg)


def _slopes(f: TensorVariable, variables: list[TensorVariable]) -> list[TensorVariable]:
    """Write the gradient of all that f adds up to; nothing, if an operation has none."""
    try:
        return [
            cast("TensorVariable", pytensor.grad(f.sum(), v, disconnected_inputs="ignore"))
            for v in variables
        ]
    except (NotImplementedError, NullTypeGradError):
        return []

"""Whether an ODE, its states and a Gaussian process fit together, asked before any sampling."""

import numpy as np
import pymc as pm
from pymc.initial_point import make_initial_point_expression
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.derivatives import EVALUATE_ONCE, random_ancestors
from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.ode import ODE

__all__ = ["check_shape", "check_start", "check_states"]


def check_states(ode: ODE, names: tuple):
    """Raise unless the columns of the data are the states of the ODE, or have no names."""
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


def check_start(model: pm.Model, ode: ODE, x, theta, gp: StateGP):
    """Evaluate the right-hand side where samplers start; NaN there helps nobody."""
    f = ode(gp.t, x, theta)
    stray = random_ancestors([f], model.basic_RVs)
    if stray:
        msg = (
            f"the states or parameters depend on {len(stray)} random variables that are not in the "
            'model, such as pm.HalfNormal.dist(5); expected named ones: pm.HalfNormal("alpha", 5).'
        )
        raise ValueError(msg)
    upstream = set(ancestors([f]))
    free = [rv for rv in model.free_RVs if rv in upstream]
    start = make_initial_point_expression(
        free_rvs=free,
        rvs_to_transforms={},
        initval_strategies=model.rvs_to_initial_values,
    )
    values = clone_replace([f], dict(zip(free, start, strict=True)))[0].eval(mode=EVALUATE_ONCE)
    if np.isfinite(values).all():
        return
    *_, row, column = np.argwhere(~np.isfinite(values))[0]
    msg = (
        f"the right-hand side of state {ode.states[column]!r} is {values[..., row, column]} at "
        f"t = {gp.t[row]:g} where sampling starts (states at the Gaussian process' posterior mean, "
        "parameters at their support point). Choose priors that keep it finite, start elsewhere "
        "with `initval`, or write the ODE for transformed states, for example logarithms."
    )
    raise ValueError(msg)

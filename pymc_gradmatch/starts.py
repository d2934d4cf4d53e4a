"""Where the variables of a model start, and which of them climb to the mode."""

import numpy as np
import pymc as pm
import pytensor
from numpy.typing import NDArray
from pymc.initial_point import make_initial_point_expression
from pytensor.graph.traversal import ancestors

from pymc_gradmatch.derivatives import EVALUATE_ONCE
from pymc_gradmatch.distribution import GradientMatchingODERV
from pymc_gradmatch.packed import flat
from pymc_gradmatch.states import is_states

__all__ = ["given_starts", "held_variables"]


def given_starts(model: pm.Model) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Tell which entries of u have a start of the model's own, and return these starts."""
    graphs = make_initial_point_expression(
        free_rvs=model.free_RVs,
        rvs_to_transforms=model.rvs_to_transforms,
        initval_strategies=model.rvs_to_initial_values,
        return_transformed=True,
    )
    values = pytensor.function([], graphs, mode=EVALUATE_ONCE)()
    is_given = [
        np.full(np.size(value), is_states(rv) or model.rvs_to_initial_values[rv] is not None)
        for rv, value in zip(model.free_RVs, values, strict=True)
    ]
    entries = np.concatenate(is_given)
    return entries, flat(values)[entries]


def held_variables(model: pm.Model) -> set:
    """Return the free variables that neither are states nor reach a right-hand side."""
    matches = [rv for rv in model.observed_RVs if isinstance(rv.owner.op, GradientMatchingODERV)]
    mismatches = [rv.owner.inputs[2] for rv in matches]
    reached = set(ancestors(mismatches)) if matches else set(model.free_RVs)
    return {rv for rv in model.free_RVs if rv not in reached and not is_states(rv)}

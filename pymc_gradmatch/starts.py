"""Where the variables of a model start, and which of them climb to the mode."""

import numpy as np
import pymc as pm
import pytensor
from numpy.typing import NDArray
from pymc.initial_point import make_initial_point_expression
from pytensor.graph.traversal import ancestors

from pymc_gradmatch.derivatives import EVALUATE_ONCE
from pymc_gradmatch.distribution import is_constraint
from pymc_gradmatch.initial import starts_by_itself
from pymc_gradmatch.packed import flat
from pymc_gradmatch.states import basis_inputs, is_states

__all__ = ["given_starts", "has_start", "held_variables"]


def given_starts(model: pm.Model) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Tell which entries of u do not start at a draw of their prior, and return these starts.

    States, variances, which start at the support points of their priors, and
    what has a start of its own or an ``initval``.
    """
    graphs = make_initial_point_expression(
        free_rvs=model.free_RVs,
        rvs_to_transforms=model.rvs_to_transforms,
        initval_strategies=model.rvs_to_initial_values,
        return_transformed=True,
    )
    values = pytensor.function([], graphs, mode=EVALUATE_ONCE)()
    held = held_variables(model)

    def is_given(rv):
        return is_states(rv) or rv in held or has_start(model, rv)

    sizes = [np.size(value) for value in values]
    entries = np.repeat([is_given(rv) for rv in model.free_RVs], sizes)
    return entries, flat(values)[entries]


def has_start(model: pm.Model, rv) -> bool:
    """Tell whether a variable was told where to start."""
    return starts_by_itself(rv) or model.rvs_to_initial_values[rv] is not None


def held_variables(model: pm.Model) -> set:
    """Return the free variables that neither are states nor parameters of a right-hand side.

    Sigma, gamma and hyperparameters of kernels: variances, of which the joint
    mode with what varies runs to zero.
    """
    matches = [rv for rv in model.observed_RVs if is_constraint(rv)]
    if not matches:
        return set()
    states = [rv for rv in model.free_RVs if is_states(rv)]
    reached = set(ancestors([rv.owner.inputs[2] for rv in matches]))
    shaping = set(ancestors([part for rv in states for part in basis_inputs(rv)]))
    return {
        rv for rv in model.free_RVs if rv not in states and (rv not in reached or rv in shaping)
    }

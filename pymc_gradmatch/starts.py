"""Which variables of a model climb to the mode, and which stay where they start."""

import pymc as pm
from pytensor.graph.traversal import ancestors

from pymc_gradmatch.distribution import is_constraint
from pymc_gradmatch.initial import starts_by_itself
from pymc_gradmatch.states import basis_inputs, is_states

__all__ = ["has_start", "held_variables"]


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

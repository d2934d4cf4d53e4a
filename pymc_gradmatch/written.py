"""A model as graphs of its value variables, with the numbers in them told from the formula."""

from typing import Any, NamedTuple, cast

import pymc as pm
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable, equal_computations
from pytensor.graph.replace import clone_replace, graph_replace
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorConstant, TensorVariable

__all__ = ["Written", "same_but_for_constants", "write"]


class Written(NamedTuple):
    """The log density and the variables of a model, as graphs."""

    inputs: list[Variable]
    """The value variables, in the order of the model's free variables."""
    log_density: TensorVariable
    variables: list[TensorVariable]
    """The free variables and deterministics, untransformed."""
    names: list[str]
    """Their names."""
    constants: list[Any]
    """What may differ from one data set to the next: arrays, and numbers that are no factors."""


def write(model: pm.Model) -> Written:
    """Write a model's graphs, with ``pm.Data`` as it is now, and constant parts computed."""
    named = [*model.free_RVs, *model.deterministics]
    graphs = [model.logp(), *model.replace_rvs_by_values(named)]
    rewritten = rewrite_graph(_frozen(graphs), include=("canonicalize", "stabilize"))
    log_density, *variables = cast("list[TensorVariable]", rewritten)
    return Written(
        [model.rvs_to_values[rv] for rv in model.free_RVs],
        log_density,
        variables,
        [str(variable.name) for variable in named],
        [v for v in ancestors([log_density, *variables]) if _is_data(v)],
    )


def _frozen(graphs: list[Variable]) -> list[Variable]:
    values: dict[Variable, Variable] = {
        variable: pt.constant(variable.get_value(), dtype=variable.type.dtype)
        for variable in ancestors(graphs)
        if isinstance(variable, SharedVariable)
    }
    return clone_replace(graphs, values, rebuild_strict=False)


def _is_data(variable) -> bool:
    # Factors such as 0.5 belong to the formula.
    return (
        isinstance(variable, TensorConstant)
        and variable.dtype == "float64"
        and not (variable.ndim == 0 and float(4 * variable.data).is_integer())
    )


def same_but_for_constants(one: Written, other: Written) -> bool:
    """Tell whether two models are one formula, applied to other data."""
    if [c.type for c in one.constants] != [c.type for c in other.constants]:
        return False
    slots = [constant.type() for constant in one.constants]
    first, second = (
        graph_replace(
            [written.log_density, *written.variables],
            dict(zip(written.constants, slots, strict=True)),
        )
        for written in (one, other)
    )
    return one.names == other.names and equal_computations(
        [*first], [*second], in_xs=one.inputs, in_ys=other.inputs
    )

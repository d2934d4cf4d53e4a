"""The states in a model, of one data set or of several experiments."""

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import pandas as pd
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import EVALUATE_ONCE, at_support_points, random_ancestors, starting_at
from pymc_gradmatch.gp.data import Data, levels_of, states_of
from pymc_gradmatch.gp.derivatives import Operators
from pymc_gradmatch.gp.processes import (
    Parameterization,
    StatePrior,
    add_coords,
    check_coords,
)
from pymc_gradmatch.reporting import as_html

if TYPE_CHECKING:
    from pymc_gradmatch.gp.experiments import StateGPs
    from pymc_gradmatch.gp.state_gp import StateGP

type AnyStateGP = "StateGP | StateGPs"


class StateProcesses:
    """What :class:`StateGP`, of one data set, and :class:`StateGPs`, of several, have in common.

    Arrays of several experiments have one more axis, the first.

    Attributes
    ----------
    data : Data
        Names of the states, and which are positive; of one data set also times and observations.
    processes : Processes
        Kernels on the grid, with C, D and A.
    names : tuple of str
        Names of the experiments; none of one data set.
    inputs : tuple of mapping
        Inputs of each experiment, None where they are those of the ODE itself.
    """

    data: Data
    processes: Any
    names: tuple[str, ...]
    inputs: tuple[Mapping[str, Any] | None, ...]

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes of the states."""
        return ("experiment", "time", "state") if self.names else ("time", "state")

    @property
    def states(self) -> tuple:
        """Names of the states."""
        return self.data.states

    def levels_of(self, x):
        """Return the logarithms of states that are positive, and the others as they are.

        Works on arrays and on PyTensor variables alike, shape ``(..., state)``.
        """
        return levels_of(x, self.data.positive)

    def states_of(self, levels):
        """Return the states in the data's units, the inverse of :meth:`levels_of`."""
        return states_of(levels, self.data.positive)

    def of_each(self, x) -> list:
        """Return the part of each experiment; of one data set, x itself."""
        return [x[number] for number in range(len(self.names))] if self.names else [x]

    def together(self, parts: Sequence):
        """Put the parts of :meth:`of_each` together again."""
        return pt.stack([*parts]) if self.names else parts[0]

    def operators(self) -> Operators:
        """Return C, D and A of every state, each ``(..., state, time, time)``, standardised units.

        C has the nugget, A is without gamma.  For the formulae see
        :func:`~pymc_gradmatch.gp.derivatives.conditional_operators`.
        """
        return self.processes.operators

    def _headline(self) -> str:
        raise NotImplementedError

    def _in_words(self) -> pd.DataFrame:
        raise NotImplementedError

    def __repr__(self) -> str:
        rows = self._in_words().itertuples()
        lines = [f"  {row.Index}: {row.kernel}, sigma {row.sigma}" for row in rows]
        return "\n".join([self._headline(), *lines])

    def _repr_html_(self) -> str:
        return as_html(self._headline(), self._in_words())


def add_states(
    name: str, gp: AnyStateGP, parameterization: Parameterization, dims: Sequence[str]
) -> TensorVariable:
    """Add the states of Gaussian processes to the model on the stack."""
    model = pm.modelcontext(None)
    coords = check_states_fit(model, gp, parameterization, dims)
    add_coords(model, coords)
    dims, start = tuple(dims), start_of(gp)
    if parameterization == "centered":
        parameters = (gp.prior_mean, gp.scale, start, *gp.processes.prior_basis)
        sizes = {"shape": gp.prior_mean.shape, "dims": dims}  # for a length of 1
        if not gp.data.positive.any():
            return StatePrior(name, *parameters, **sizes)
        levels = StatePrior(levels_name(name), *parameters, **sizes)
        return pm.Deterministic(name, gp.states_of(levels), dims=dims)
    coordinates = at_support_points([_whitened(gp, start)])[0]
    independent = pm.Normal.dist(shape=gp.prior_mean.shape)
    starting = starting_at(independent, coordinates.eval(mode=EVALUATE_ONCE))
    whitened = model.register_rv(starting, whitened_name(name))
    basis, sd = _white_basis(gp)
    levels = gp.prior_mean + gp.scale[..., None, :] * basis.residual((sd * whitened).mT)
    return pm.Deterministic(name, gp.states_of(levels), dims=dims)


def _white_basis(gp: AnyStateGP):
    """Return the basis of whitened states, and the standard deviations of coordinates in it."""
    basis = gp.processes.prior_basis if gp.processes.chain else gp.processes.prior_spectrum
    return basis, basis.variances.mT**0.5


def _whitened(gp: AnyStateGP, levels) -> TensorVariable:
    """Return the coordinates of levels in which the process is a standard normal."""
    basis, sd = _white_basis(gp)
    standardised = (levels - gp.prior_mean) / gp.scale[..., None, :]
    return basis.coordinates(pt.as_tensor(standardised)).mT / sd


def levels_name(name: str) -> str:
    """Return the name of the free variable behind states of which some are positive."""
    return f"{name}_log_"


def whitened_name(name: str) -> str:
    """Return the name of the free variable behind whitened states."""
    return f"{name}_whitened_"


def behind_states(
    name: str, gp: AnyStateGP, x: TensorVariable, known: Container[str]
) -> dict[str, TensorVariable]:
    """Return the free variable behind states, if its name is known, as a function of these."""
    levels = gp.levels_of(x)
    if levels_name(name) in known:
        return {levels_name(name): levels}
    if whitened_name(name) in known:
        return {whitened_name(name): _whitened(gp, levels)}
    return {}


def start_of(gp: AnyStateGP):
    """Return where samplers start: the data smoothed, or a prior mean that is a trajectory."""
    return gp.prior_mean if (gp.prior_slope != 0).any() else gp.posterior_mean()


def check_states_fit(
    model: pm.Model, gp: AnyStateGP, parameterization: str, dims: Sequence[str]
) -> dict[str, Sequence | NDArray | int]:
    """Raise if states cannot be added to a model; return the coords that they need."""
    if parameterization not in get_args(Parameterization):
        msg = f"parameterization is {parameterization!r}; expected 'centered' or 'whitened'."
        raise ValueError(msg)
    usual = gp.dims
    if (
        isinstance(dims, str)
        or len(dims) != len(usual)
        or not all(isinstance(dim, str) for dim in dims)
    ):
        msg = f"dims are {dims!r}; expected the names of {len(usual)}, for example {usual}."
        raise ValueError(msg)
    is_graph = isinstance(gp.sigma, TensorVariable)
    stray = random_ancestors([gp.sigma], model.basic_RVs) if is_graph else []
    if stray:
        msg = (
            f"sigma depends on {len(stray)} random variables that are not in the model, such "
            'as pm.HalfNormal.dist(1); expected named ones: pm.HalfNormal("sigma", 1).'
        )
        raise ValueError(msg)
    n_states = len(gp.states)
    named = gp.states != tuple(range(n_states))
    coords = dict(zip(dims, (*gp.labels, gp.states if named else n_states), strict=True))
    check_coords(model, coords)
    return coords

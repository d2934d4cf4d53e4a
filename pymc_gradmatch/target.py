"""The exact posterior of an ODE's parameters: its density, for many draws at once."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import xarray as xr
from numpy.typing import NDArray
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors

from pymc_gradmatch.batched import BatchedSolver
from pymc_gradmatch.derivatives import EVALUATE_ONCE
from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.ode import ODE

__all__ = ["START", "Evaluated", "ExactPosterior"]

START = "x0"  # name of x(t0)


class Evaluated(NamedTuple):
    """The exact posterior at some draws.

    Attributes
    ----------
    log_density : array of float
        Shape ``(draw,)``, without a constant; -inf where an integration failed.
    variables : dict of str to array
        The ODE's parameters, x(t0) as ``x0``, sigma if it is random and all
        other variables they depend on, by name, in natural units.
    trajectories : array of float
        States at the times of the data, shape ``(draw, time, state)``.
    """

    log_density: NDArray[np.float64]
    variables: dict[str, NDArray[np.float64]]
    trajectories: NDArray[np.float64]


class ExactPosterior:
    r"""The posterior that integrates the ODE, in unconstrained coordinates :math:`\phi`.

    .. math::

        p(\phi \mid y) \propto p(u) \prod_{ik}
        N\bigl(y_{ik} \mid x_k(t_i; \theta, x_0), \sigma_k^2\bigr), \qquad
        \phi = \bigl(u, (x_0 - m) / s\bigr)

    with the value variables u of all that theta and sigma depend on, under the
    model's prior, and a flat prior on x(t0).

    Parameters
    ----------
    model : pymc.Model
        Has a scalar variable for each of ``ode.params``, by its name.
    ode : ODE
        The system.
    gp : StateGP
        Where data, mean m and scale s come from.
    posterior : xarray.Dataset
        Draws of the model; their x(t0) and u are the attribute ``draws``.
    states : str
        Name of the states in ``posterior``.
    sigma : str or None
        Name of the noise's standard deviation; None: it is fixed at ``gp.sigma``.

    Attributes
    ----------
    names : list of str
        Names of the coordinates of phi.
    draws : array of float
        The draws of ``posterior`` as phi, shape ``(draw, coordinate)``.
    times : array of float
        When the data were observed, shape ``(time,)``.
    observed : array of float
        The data, shape ``(time, state)``.
    noise_is_random : bool
        Whether sigma is among the coordinates.

    Raises
    ------
    ValueError
        If a variable is missing in the model or in the draws, has a shape that
        does not fit, or hardly varies.
    """

    def __init__(
        self,
        model: pm.Model,
        ode: ODE,
        gp: StateGP,
        posterior: xr.Dataset,
        *,
        states: str,
        sigma: str | None,
    ):
        self.ode, self._gp, self._sigma = ode, gp, sigma
        self.noise_is_random = sigma is not None
        self.times, self.observed = gp.t_observed, gp.y
        first = posterior[states].get_index("time")[:1]
        self._grid = np.union1d(first, self.times)
        self._solve = BatchedSolver(ode)

        theta = [_variable(model, name, [()]) for name in ode.params]
        noise = [] if sigma is None else [_variable(model, sigma, [(), (len(ode.states),)])]
        needed = _free_variables(model, [*theta, *noise])
        free = [rv for rv in model.free_RVs if rv in needed]
        missing = [rv.name for rv in free if rv.name not in posterior]
        if missing or START in [v.name for v in (*theta, *noise, *free)]:
            msg = (
                f"the draws have no {missing}, only {list(posterior.data_vars)}; expected all that "
                f"theta and sigma depend on, and none called {START!r}, the name of x(t0). Take "
                "idata and model from the same run."
            )
            raise ValueError(msg)
        values = [model.rvs_to_values[rv] for rv in free]
        draws = [_stacked(posterior[rv.name]) for rv in free]
        unconstrained = _for_draws(free, [_unconstrained(model, rv) for rv in free])(*draws)
        self._shapes = [array.shape[1:] for array in unconstrained]
        self._variables = (*theta, *noise, *free)
        self._free = [rv.name for rv in free]
        log_prior = model.logp(vars=free + _data_on_theta(model, theta, needed))
        natural = model.replace_rvs_by_values([*theta, *noise, *free])
        self._evaluate = _for_draws(values, [log_prior, *natural])

        start = _stacked(posterior[states].isel(time=0))
        n_draws = len(start)
        u = [array.reshape(n_draws, -1) for array in unconstrained]
        self.draws = np.concatenate([*u, (start - gp.mean) / gp.scale], axis=1)
        if n_draws <= 2 * self.draws.shape[1] or not (np.ptp(self.draws, axis=0) > 0).all():
            msg = (
                f"{n_draws} draws of {self.draws.shape[1]} coordinates are given; expected more "
                "than two draws per coordinate, and none that is constant."
            )
            raise ValueError(msg)
        self.names = [
            name
            for value, shape in zip(values, self._shapes, strict=True)
            for name in _entries(value.name, shape)
        ]
        self.names += [f"{START}[{state}]" for state in ode.states]

    def __call__(self, phi: NDArray[np.float64]) -> Evaluated:
        """Evaluate the posterior at points of shape ``(draw, coordinate)``."""
        log_prior, variables = self.variables(phi)
        theta = np.stack([variables[name] for name in self.ode.params], axis=1)
        trajectories = self._solve(self._grid, variables[START], theta)
        trajectories = trajectories[:, np.isin(self._grid, self.times)]
        log_density = log_prior + self._log_likelihood(trajectories, variables)
        log_density = np.where(np.isfinite(log_density), log_density, -np.inf)
        return Evaluated(log_density, variables, trajectories)

    def variables(self, phi: NDArray[np.float64]):
        """Return the log prior, shape ``(draw,)``, and the variables by name, without solving."""
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        *u, start = np.split(phi, np.cumsum(sizes), axis=1)
        arrays = [part.reshape(-1, *shape) for part, shape in zip(u, self._shapes, strict=True)]
        log_prior, *natural = self._evaluate(*arrays)
        variables = {START: self._gp.mean + self._gp.scale * start}
        for variable, value in zip(self._variables, natural, strict=True):
            shape = value.shape[value.ndim - variable.ndim :]
            variables[variable.name] = np.broadcast_to(value, (len(phi), *shape))
        return log_prior, variables

    def starts(self, phi: NDArray[np.float64]) -> list[dict]:
        """Return free variables and x(t0) of each draw, by name."""
        _, variables = self.variables(phi)
        return [
            {name: variables[name][draw] for name in (*self._free, START)}
            for draw in range(len(phi))
        ]

    def _log_likelihood(self, trajectories, variables):
        if self._sigma is None:
            sigma = self._gp.sigma
        else:  # one for all states or one per state
            sigma = variables[self._sigma].reshape(len(trajectories), 1, -1)
        residuals = (self.observed - trajectories) / sigma
        return -(0.5 * residuals**2 + np.log(sigma)).sum(axis=(1, 2))


def _stacked(draws: xr.DataArray) -> NDArray[np.float64]:
    return draws.stack(sample=("chain", "draw")).transpose("sample", ...).to_numpy()


def _variable(model: pm.Model, name: str, shapes):
    """Return a variable of the model that has one of some shapes."""
    if name not in model.named_vars:
        msg = (
            f"the model has no variable {name!r}, only {list(model.named_vars)}; expected one for "
            "each parameter of the ODE by its name, and for sigma. Add a pm.Deterministic."
        )
        raise ValueError(msg)
    variable = model[name]
    if not any(
        len(shape) == variable.ndim and all(map(_may_equal, variable.type.shape, shape))
        for shape in shapes
    ):
        msg = f"the variable {name!r} has shape {variable.type.shape}; expected one of {shapes}."
        raise ValueError(msg)
    return variable


def _may_equal(static: int | None, size: int) -> bool:
    return static in (None, size)


def _free_variables(model: pm.Model, graphs) -> set:
    return set(ancestors(graphs)) & set(model.free_RVs)


def _data_on_theta(model: pm.Model, theta, needed) -> list:
    """Return further likelihood terms and potentials of theta that no state enters."""
    return [
        term
        for term in model.observed_RVs + model.potentials
        if _free_variables(model, [term]) <= needed
        and _free_variables(model, [term]) & _free_variables(model, theta)
    ]


def _unconstrained(model: pm.Model, rv):
    transform = model.rvs_to_transforms[rv]
    return rv if transform is None else transform.forward(rv, *rv.owner.inputs)


def _for_draws(inputs, outputs) -> Callable:
    """Compile graphs for inputs that have a draw axis in front."""
    batched = [pt.tensor(dtype=v.dtype, shape=(None, *v.type.shape)) for v in inputs]
    graphs = vectorize_graph(outputs, dict(zip(inputs, batched, strict=True)))
    return pytensor.function(batched, graphs, mode=EVALUATE_ONCE, on_unused_input="ignore")


def _entries(name: str, shape: tuple[int, ...]) -> list[str]:
    if not shape:
        return [name]
    return [f"{name}[{', '.join(map(str, index))}]" for index in np.ndindex(*shape)]

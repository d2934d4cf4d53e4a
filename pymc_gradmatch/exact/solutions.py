"""The solutions of a model's ODEs at draws of its parameters, and what the model predicts then."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from time import monotonic
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors, truncated_graph_inputs
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import EVALUATE_ONCE, in_numpy, random_ancestors
from pymc_gradmatch.gp import StateGPs, is_states
from pymc_gradmatch.model import Constraint, constraints, equations, known_starts
from pymc_gradmatch.ode import ODE, Solution, Solver, in_words

type Wrt = Sequence[tuple[bool, ...]]


class OutOfTimeError(TimeoutError):
    """A search has had the time that it was given."""


class Solutions:
    """The solutions of a model's ODEs at draws of its parameters and of x(t0).

    Parameters
    ----------
    model : pymc.Model
        Has a :class:`~pymc_gradmatch.GradientMatchingODE` or several, of states with a name.

    Attributes
    ----------
    model : pymc.Model
        The model.
    constraints : list of Constraint
        What it says of ODEs.
    known : list of Known or None
        What it knows exactly of the x(t0) of each.
    states, starts : list of str
        Names of the states of each, and of their x(t0): ``"x"`` and ``"x0"``.
    n_solutions : int
        How many draws have been solved from so far.
    failures : Counter
        How many of them have no solution, by what happened.
    deadline : float
        By :func:`time.monotonic`, after which solving raises :class:`OutOfTimeError`.

    Raises
    ------
    ValueError
        If the model has no ODE, or states that cannot be replaced.
    """

    def __init__(self, model: pm.Model):
        self.model, self.constraints = model, constraints(model)
        if not self.constraints:
            msg = (
                f"the model observes {[rv.name for rv in model.observed_RVs]}; expected a "
                "gm.GradientMatchingODE among these, which says what ODE the states obey."
            )
            raise ValueError(msg)
        self.states = [_name_of_states(model, constraint) for constraint in self.constraints]
        if len(set(self.states)) < len(self.states):
            msg = f"two constraints share the states {self.states}; expected one ODE for each."
            raise ValueError(msg)
        by_states = {known.x: known for known in known_starts(model)}
        self.known = [by_states.get(constraint.x) for constraint in self.constraints]
        self.starts = [unused_name(f"{name}0", model) for name in self.states]
        self.n_solutions, self.failures = 0, Counter[str]()
        self.deadline = np.inf
        self._levels = [
            _levels_of_each(equations(constraint.ode, constraint.gp))
            for constraint in self.constraints
        ]

    @property
    def observed(self) -> list[str]:
        """Names of what the model observes beside the constraints."""
        matched = [constraint.name for constraint in self.constraints]
        matched += [known.name for known in self.known if known is not None]
        return [rv.name for rv in self.model.observed_RVs if rv.name not in matched]

    def starts_at(self, draws: xr.Dataset) -> list[NDArray[np.float64]]:
        """Return x(t0) of each constraint at draws of it, or of the states."""
        return [
            _stacked(draws[name]) if name in draws else self.at_draws(draws, [graph])[0]
            for name, graph in zip(self.starts, self.start_graphs, strict=True)
        ]

    @property
    def start_graphs(self) -> list[TensorVariable]:
        """x(t0) of each constraint, shape ``(..., state)``, as graphs of the model's variables."""
        graphs = []
        for constraint, known in zip(self.constraints, self.known, strict=True):
            x0 = constraint.x[..., 0, :]
            graphs.append(pt.set_subtensor(x0[..., known.places], known.values) if known else x0)
        return graphs

    @property
    def theta_graphs(self) -> list[TensorVariable]:
        """The parameters of each constraint's ODE, shape ``(..., 1, param)``."""
        return [constraint.theta for constraint in self.constraints]

    def dims(self, name: str) -> tuple[str | None, ...] | None:
        """Return the dims of a variable, of the states or of x(t0), where the model names them."""
        by_name = self.model.named_vars_to_dims
        if name not in self.starts:
            return by_name.get(name)
        dims = by_name.get(self.states[self.starts.index(name)])
        return dims and (*dims[:-2], dims[-1])

    def labels(self, name: str, shape: tuple[int, ...]) -> list[Sequence]:
        """Return labels along each axis of a variable: coords, names of states, or numbers."""
        dims = self.dims(name) or self._dims_behind(name, shape) or (None,) * len(shape)
        coords = [self.model.coords.get(dim) for dim in dims]
        labels = [
            range(size) if coord is None else coord
            for size, coord in zip(shape, coords, strict=True)
        ]
        of_states = zip(self.starts, self.states, self.constraints, strict=True)
        for start, states, constraint in of_states:
            if name in {start, states} and isinstance(labels[-1], range):
                labels[-1] = constraint.ode.states
        return labels

    def _dims_behind(self, name: str, shape: tuple[int, ...]) -> tuple[str | None, ...] | None:
        """Return the dims of the variable behind a value, unless that has another shape."""
        coords, values = self.model.coords, self.model.rvs_to_values
        for rv in [rv for rv, value in values.items() if value.name == name]:
            dims = self.model.named_vars_to_dims.get(str(rv.name), ())
            if tuple(len(coords.get(dim) or ()) for dim in dims) == shape:
                return dims
        return None

    def entries(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """Return a name for every scalar of a variable, such as ``x0[prey]``."""
        if not shape:
            return [name]
        return [
            f"{name}[{', '.join(map(str, labels))}]"
            for labels in product(*self.labels(name, shape))
        ]

    def stale(self, posterior: xr.Dataset) -> set[str]:
        """Return the names of draws that :func:`pymc.do` has overruled, and of what came of them.

        States stay, which are solved for anew.
        """
        named = {v for name, v in self.model.named_vars.items() if name in posterior}
        fixed = {v for v in named if isinstance(v, SharedVariable | Constant)}
        states = {v for c in self.constraints for v in named & {*ancestors([c.x])} if is_states(v)}
        states |= {constraint.x for constraint in self.constraints}
        return {str(v.name) for v in named - states if fixed & {*ancestors([v])}}

    def at_draws(
        self, posterior: xr.Dataset, graphs: Sequence[TensorVariable]
    ) -> list[NDArray[np.float64]]:
        """Evaluate graphs of the model's variables at draws of these.

        Parameters
        ----------
        posterior : xarray.Dataset
            With dims ``chain`` and ``draw``.
        graphs : sequence of TensorVariable
            Graphs of random variables of the model.

        Returns
        -------
        list of array
            With ``(draw,)``, all chains in one, in front.

        Raises
        ------
        ValueError
            If the draws lack a variable that is needed, or have it in another shape.
        """
        drawn = [v for name, v in self.model.named_vars.items() if name in posterior]
        stale = self.stale(posterior)
        drawn = [v for v in drawn if v.name not in stale]
        inputs = [v for v in truncated_graph_inputs(graphs, drawn) if v in set(drawn)]
        lacking = [rv.name for rv in random_ancestors(graphs, known=inputs)]
        if lacking:
            msg = (
                f"the draws have no {lacking}, only {list(posterior.data_vars)}; expected all that "
                "the states, the ODE's parameters and the likelihood depend on. Take idata and "
                "model from the same run."
            )
            if gone := sorted(stale.intersection(lacking)):
                msg = (
                    f"the draws of {gone} are from before pm.do fixed what they depend on; "
                    "expected draws that fit: sample the model that pm.do returns."
                )
            raise ValueError(msg)
        values = [_stacked(posterior[v.name]) for v in inputs]
        for variable, array in zip(inputs, values, strict=True):
            shape = variable.type.shape
            if len(shape) != array.ndim - 1 or not all(map(_may_equal, shape, array.shape[1:])):
                msg = (
                    f"the draws of {variable.name!r} have shape {array.shape[1:]}, the model's "
                    f"variable {shape}; expected the same. Take idata and model from the same run."
                )
                raise ValueError(msg)
        n_draws = posterior.sizes["chain"] * posterior.sizes["draw"]
        return with_draws(compile_for_draws(inputs, graphs)(*values), graphs, n_draws)

    def solve(
        self,
        starts: Sequence[NDArray[np.float64]],
        theta: Sequence[NDArray[np.float64]],
        times: Sequence[NDArray[np.float64]] | None = None,
    ) -> list[NDArray[np.float64]]:
        """Integrate each ODE from every draw.

        Parameters
        ----------
        starts, theta : sequence of array
            Of each constraint, shapes ``(draw, ..., state)`` and ``(draw, ..., 1, param)``.
        times : sequence of array, optional
            Output times of each, none before its grid, at whose first time its start holds; the
            grid if not given.  Where experiments have times of their own, one row for each.

        Returns
        -------
        list of array
            Shapes ``(draw, ..., time, state)``; NaN where an integration failed.
        """
        if times is None:
            times = [constraint.gp.t for constraint in self.constraints]
        solutions = []
        for odes, constraint, t, x0, parameters in zip(
            self._levels, self.constraints, times, starts, theta, strict=True
        ):
            gp = constraint.gp
            shape = (*x0.shape[:-1], parameters.shape[-1])
            flat = np.broadcast_to(parameters[..., 0, :], shape)
            levels = gp.levels_of(x0)
            if isinstance(gp, StateGPs):
                solution = np.empty((len(x0), *np.shape(t), x0.shape[-1]))
                for of in _alike(odes, gp.t, t):
                    own = odes[of[0]], gp.t[of[0], 0], t[of[0]]
                    solution[:, of] = self._solved_by(*own, levels[:, of], flat[:, of])
            else:
                solution = self._solved_by(odes[0], gp.t[0], t, levels, flat)
            solutions.append(gp.states_of(solution))
        return solutions

    def solve_one(self, number: int, x0, theta) -> NDArray[np.float64]:
        """Integrate the ODE of one of several experiments, as :meth:`solve` does of all."""
        [constraint], [odes] = self.constraints, self._levels
        gp, t = constraint.gp, constraint.gp.t[number]
        solved = self._solved_by(odes[number], t[0], t, gp.levels_of(x0), theta[..., 0, :])
        return gp.states_of(solved)

    def linearised(
        self,
        levels: Sequence[NDArray[np.float64]],
        theta: Sequence[NDArray[np.float64]],
        wrt: Wrt,
        times: Sequence[NDArray[np.float64]] | None = None,
    ) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Integrate each ODE with its derivatives by x(t0) and parameters.

        Parameters
        ----------
        levels, theta : sequence of array
            As for :meth:`solve`, but levels of x(t0).
        wrt : sequence of tuple of bool
            Of each ODE: by which levels of x(t0), then by which parameters.
        times : sequence of array, optional
            The first times of each grid, if not all.

        Returns
        -------
        list of (array, array)
            Levels of each, ``(draw, ..., time, state)``, and their derivatives, with one more axis
            for those that were asked for; NaN where an integration failed.
        """
        if times is None:
            times = [constraint.gp.t for constraint in self.constraints]
        solved = []
        for odes, constraint, t, x0, parameters, by in zip(
            self._levels, self.constraints, times, levels, theta, wrt, strict=True
        ):
            gp = constraint.gp
            flat = np.broadcast_to(parameters[..., 0, :], (*x0.shape[:-1], parameters.shape[-1]))
            if not isinstance(gp, StateGPs):
                solution = self._solution(odes[0], t, x0, flat, by)
                solved.append((solution.x, solution.sensitivities))
                continue
            shape = len(x0), *t.shape, x0.shape[-1]
            x, sensitivities = np.empty(shape), np.empty((*shape, sum(by)))
            for of in _alike(odes, t, t):
                one = self._solution(odes[of[0]], t[of[0]], x0[:, of], flat[:, of], by)
                x[:, of] = one.x.reshape(len(x0), len(of), *one.x.shape[1:])
                sensitivities[:, of] = one.sensitivities.reshape(*x[:, of].shape, sum(by))
            solved.append((x, sensitivities))
        return solved

    def _solved_by(self, ode: ODE, first: float, t, x0, theta) -> NDArray[np.float64]:
        """Return solutions at some times, of starts at a first one that need not be among them."""
        whole = t if t[0] == first else np.append(first, t)
        solution = self._solution(ode, whole, x0, theta)
        return solution.x[:, -len(t) :].reshape(*x0.shape[:-1], len(t), x0.shape[-1])

    def _solution(self, ode: ODE, t, x0, theta, wrt: tuple[bool, ...] | None = None) -> Solution:
        if monotonic() > self.deadline:
            msg = f"out of time after {self.n_solutions} solutions"
            raise OutOfTimeError(msg)
        solve = Solver(ode.equations(wrt), t)
        solution = solve(x0.reshape(-1, x0.shape[-1]), theta.reshape(-1, theta.shape[-1]))
        self.n_solutions += len(solution.ended)
        self.failures.update({why: len(draws) for why, draws in in_words(solution.ended).items()})
        return solution


def _levels_of_each(odes: Sequence[ODE]) -> list[ODE]:
    """Return the equations of the levels of each, the same object where they are the same."""
    levels = {id(ode): ode.of_levels for ode in odes}
    return [levels[id(ode)] for ode in odes]


def _alike(odes: Sequence[ODE], grids, times) -> list[list[int]]:
    """Return experiments in groups that are solved at once: of one ODE, start and times."""
    groups: dict[tuple, list[int]] = {}
    for number, (ode, grid, t) in enumerate(zip(odes, grids, times, strict=True)):
        groups.setdefault((id(ode), grid[0], t.tobytes()), []).append(number)
    return [*groups.values()]


def _name_of_states(model: pm.Model, constraint: Constraint) -> str:
    names = [name for name, variable in model.named_vars.items() if variable is constraint.x]
    if not names:
        msg = (
            f"the states of {constraint.name!r} are an expression without a name; expected a "
            'variable of the model, for example x = pm.Deterministic("x", ...).'
        )
        raise ValueError(msg)
    return names[0]


def unused_name(name: str, model: pm.Model) -> str:
    """Return a name, or one like it where the model has that already."""
    while name in model.named_vars:
        name += "_"
    return name


def _stacked(draws: xr.DataArray) -> NDArray[np.float64]:
    values = draws.transpose("chain", "draw", ...).to_numpy()
    return values.reshape(-1, *values.shape[2:])


def _may_equal(static: int | None, size: int) -> bool:
    return static in (None, size)


def compile_for_draws(inputs, outputs, random_seed: int | None = None) -> Callable:
    """Compile graphs for inputs that have a draw axis in front; random ones take a seed."""
    batched = [pt.tensor(dtype=v.dtype, shape=(None, *v.type.shape)) for v in inputs]
    graphs = vectorize_graph(outputs, dict(zip(inputs, batched, strict=True)))
    if random_seed is None:
        return in_numpy(batched, graphs)
    return pm.compile(
        batched, graphs, random_seed=random_seed, mode="FAST_COMPILE", on_unused_input="ignore"
    )


def with_draws(values, graphs, *batch: int) -> list[NDArray[np.float64]]:
    """Give values of graphs axes for draws where they depend on no draw."""
    return [
        np.broadcast_to(value, (*batch, *value.shape[value.ndim - graph.ndim :]))
        for value, graph in zip(values, graphs, strict=True)
    ]


def predict(
    idata: xr.DataTree,
    *,
    model: pm.Model | None = None,
    group: str | None = None,
    t: ArrayLike | None = None,
    random_seed: int | None = None,
) -> xr.DataTree:
    r"""Integrate the ODE from draws of theta and x(t0), and draw data around the solutions.

    .. math::

        x^{(i)} = x(t;\, \theta^{(i)}, x_0^{(i)}), \qquad y^{(i)} \sim p(y \mid x^{(i)}, u^{(i)})

    with the model's own likelihood p.  :func:`pymc.sample_prior_predictive` and
    :func:`pymc.sample_posterior_predictive` draw data around the states of the
    model, which have a Gaussian process prior of their own: in the prior they
    know nothing of the ODE, and an intervention on theta by :func:`pymc.do` does
    not move them.

    Parameters
    ----------
    idata : xarray.DataTree
        With draws of the parameters, and of the states or of x(t0): from
        :func:`~pymc_gradmatch.sample`, :func:`pymc.sample`,
        :func:`pymc.sample_prior_predictive`, or the ``idata`` of
        :func:`~pymc_gradmatch.integrate_check`.
    model : pymc.Model, optional
        The model, if it is not the one on the stack.
    group : {"posterior", "prior"}, optional
        Where the draws are; the posterior if there is one.
    t : array_like of float, optional
        Times of trajectories, the first not before the first of the grid; also
        beyond the data: a forecast.  Without it, the model's grid.
    random_seed : int, optional
        Seed of the data.

    Returns
    -------
    xarray.DataTree
        The group ``posterior_predictive`` or ``prior_predictive``: trajectories under the
        names of the states and, without ``t``, data under the names that they have
        in the model.  A draw that cannot be integrated is NaN.  Without ``t``
        also ``observed_data``, so that ArviZ's predictive checks apply.

    Raises
    ------
    ValueError
        If the draws are not the model's, or the times begin before its grid.

    Notes
    -----
    The likelihood is written for the times of the model, so at other times there are
    trajectories only; add the noise that you observe with.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> t = np.linspace(0, 2, 9)
    >>> y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))
    >>> gp = gm.StateGP(t, y, [pm.gp.cov.ExpQuad(1, ls=1.0)], sigma=0.05)
    >>> model = gm.build_model(decay, t, y, priors={"rate": pm.HalfNormal.dist(2)}, gp=gp)
    >>> prior = pm.sample_prior_predictive(20, model=model, random_seed=1)
    >>> forecast = gm.predict(prior, model=model, t=[0.0, 2.0, 8.0])
    >>> forecast["prior_predictive"]["x"].sizes["time"]
    3
    """
    if not isinstance(idata, xr.DataTree):
        msg = (
            f"idata is a {type(idata).__name__}; expected a DataTree with draws, of a fit "
            "gm.predict(fit.idata, model=fit.model)."
        )
        raise TypeError(msg)
    model = pm.modelcontext(model)
    group = group or ("posterior" if "posterior" in idata.children else "prior")
    if group not in idata.children:
        msg = f"idata has the groups {list(idata.children)}; expected {group!r} among them."
        raise ValueError(msg)
    draws = idata[group].dataset
    solutions = Solutions(model)
    grids = [constraint.gp.t for constraint in solutions.constraints]
    times = grids if t is None else [_checked(t, grid) for grid in grids]
    for constraint, at in zip(solutions.constraints, times, strict=True):
        for ode, rows in zip(
            equations(constraint.ode, constraint.gp), np.atleast_2d(at), strict=True
        ):
            ode.check_times(rows)
    starts, theta = solutions.starts_at(draws), solutions.at_draws(draws, solutions.theta_graphs)
    trajectories = solutions.solve(starts, theta, times)
    solved = _named(solutions, trajectories, times, draws)
    predictive = f"{group}_predictive"
    if t is not None or not solutions.observed:  # a potential alone knows the data
        return xr.DataTree.from_dict({predictive: solved})
    with warnings.catch_warnings():
        # What weighs draws has no say in data around given ones.
        warnings.filterwarnings("ignore", "The effect of Potentials", UserWarning)
        data = pm.sample_posterior_predictive(
            xr.DataTree.from_dict({"posterior": _given(draws, solved, solutions)}),
            model=model,
            var_names=solutions.observed,
            random_seed=random_seed,
            progressbar=False,
        )
    failed = xr.concat([solved[name].isnull().any(solved[name].dims[2:]) for name in solved], "x")
    drawn = data["posterior_predictive"].dataset.where(~failed.any("x"))
    observed = data["observed_data"].dataset[solutions.observed]
    return xr.DataTree.from_dict({predictive: drawn.merge(solved), "observed_data": observed})


def _checked(t: ArrayLike, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return times at which solutions are asked for, a row for each experiment of several."""
    times, first = np.asarray(t, dtype=float), grid[..., 0].max()
    wrong = ""
    if times.ndim != 1 or not len(times):
        wrong = f"has shape {times.shape}; expected a vector of"
    elif not (np.diff(times) > 0).all():
        wrong = f"is not increasing after t[{np.argmin(np.diff(times) > 0)}]; expected"
    elif times[0] < first:
        wrong = f"begins at {times[0]:g}; expected"
    if wrong:
        msg = (
            f"t {wrong} increasing times, none before {first:g}, where the states of the model "
            "start."
        )
        raise ValueError(msg)
    return times if grid.ndim == 1 else np.tile(times, (len(grid), 1))


def _named(solutions: Solutions, trajectories, times, draws: xr.Dataset) -> xr.Dataset:
    """Return trajectories with the dims and coords of the model's states."""
    arrays = {}
    for name, values, constraint, at in zip(
        solutions.states, trajectories, solutions.constraints, times, strict=True
    ):
        dims = solutions.dims(name) or (f"{name}_time", f"{name}_state")
        coords: dict[Any, Any] = {
            dim: list(labels)
            for dim, labels in solutions.model.coords.items()
            if dim in dims and labels
        }
        if at.ndim == 1 or (at == at[0]).all():
            coords[dims[-2]] = at if at.ndim == 1 else at[0]
        coords |= {dims[-1]: list(constraint.ode.states)}
        coords |= {dim: draws[dim].to_numpy() for dim in ("chain", "draw")}
        shape = draws.sizes["chain"], draws.sizes["draw"], *values.shape[1:]
        arrays[name] = xr.DataArray(values.reshape(shape), coords, ("chain", "draw", *dims))
    return xr.Dataset(arrays)


def _given(draws: xr.Dataset, solved: xr.Dataset, solutions: Solutions) -> xr.Dataset:
    """Return the draws with solutions in place of their states; where these failed, any states."""
    old = [*solutions.states, *solutions.stale(draws), "time"]
    others = draws.drop_vars(old, errors="ignore")
    filled = {name: values.fillna(values.mean()) for name, values in solved.items()}
    # What states are computed from must be among the draws, or PyMC draws it and them anew.
    free = solutions.model.free_RVs
    behind = truncated_graph_inputs([constraint.x for constraint in solutions.constraints], free)
    n_draws = draws.sizes["chain"], draws.sizes["draw"]
    for rv in free:
        if rv in behind and rv.name not in {*draws, *filled}:
            shape = *n_draws, *rv.shape.eval(mode=EVALUATE_ONCE)
            dims = "chain", "draw", *(f"{rv.name}_{k}" for k in range(rv.ndim))
            filled[rv.name] = xr.DataArray(np.zeros(shape), dims=dims)
    return others.merge(xr.Dataset(filled), compat="override", join="override")

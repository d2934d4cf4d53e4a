"""A PEtab problem, read from its files, as arguments of :func:`gm.fit <pymc_gradmatch.fit>`."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.replace import graph_replace
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import ParameterValueError, gradient, in_numpy, without_traces
from pymc_gradmatch.gp import Experiment
from pymc_gradmatch.model import build_model
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.petab.conditions import (
    Parameter,
    ProblemDefinition,
    ProblemRightHandSide,
    Simulation,
    text_or_default,
)
from pymc_gradmatch.sampling import Fit, fit
from pymc_gradmatch.sbml import Model, read_sbml, valid_name

if TYPE_CHECKING:
    import petab.v1 as petab


def load(path: str | Path) -> "Problem":
    """Read a PEtab problem (version 1, SBML) from its files.

    Parameters
    ----------
    path : str or Path
        The YAML file, which names the other files.

    Returns
    -------
    Problem

    Raises
    ------
    FileNotFoundError, ValueError
        If files are missing or are not a PEtab problem.
    NotImplementedError
        If the problem contains an unsupported element; the message names it and its place.

    Examples
    --------
    >>> import pymc_gradmatch as gm
    >>> gm.petab.load("tests/petab/conversion/problem.yaml")
    PEtab problem 'problem': 2 states, 3 estimated parameters, 2 experiments, 2 observables,
    20 measurements
    """
    import petab.v1 as petab

    path = Path(path)
    config = _config_of(path)
    source = petab.Problem.from_yaml(config, base_path=str(path.parent))
    if source.model is None or source.model.type_id != "sbml":
        msg = f"{path}: the model is not in SBML; expected an SBML model."
        raise NotImplementedError(msg)
    model = read_sbml(_file_of_model(path, config))
    return Problem(path, source, _definition_of(source, model, path))


def _config_of(path: Path) -> dict[str, Any]:
    """Return the content of the YAML file, without visualization files, which may be missing."""
    import yaml

    config = yaml.safe_load(path.read_text("utf-8"))
    for problem in config["problems"]:
        problem.pop("visualization_files", None)
    return config


def _file_of_model(path: Path, config: Mapping[str, Any]) -> Path:
    files = [file for problem in config["problems"] for file in problem["sbml_files"]]
    if len(files) != 1:
        msg = f"{path}: has {len(files)} models, {files}; expected one."
        raise NotImplementedError(msg)
    return path.parent / files[0]


@dataclass(frozen=True, eq=False)
class Problem:
    """A parameter estimation problem: equations, experiments, likelihoods and priors.

    Parameters are on the scale of estimation: ``log10_k`` is the decimal logarithm of ``k``.
    :func:`load` returns it.

    Attributes
    ----------
    path : Path
        The YAML file.
    source : petab.v1.Problem
        The tables.
    definition : ProblemDefinition
        Model, parameters, conditions and observables.

    Examples
    --------
    >>> import pymc_gradmatch as gm
    >>> problem = gm.petab.load("tests/petab/conversion/problem.yaml")
    >>> problem.ode
    ODE(states=['A', 'B'], params=['log10_k1', 'log10_k2', 'sigma'])
    >>> round(problem.log_likelihood(problem.nominal), 3)
    42.654
    """

    path: Path
    source: "petab.Problem" = field(repr=False)
    definition: ProblemDefinition = field(repr=False)

    @property
    def name(self) -> str:
        """The name of the YAML file."""
        return self.path.stem

    @cached_property
    def ode(self) -> ODE:
        """The equations, with all states and all estimated parameters on their scales."""
        definition = self.definition
        names = [valid_name(name) for name in definition.model.states]
        inputs = [called for kinds in definition.inputs.values() for called in kinds.values()]
        params = [one.name for one in definition.parameters.values()]
        return ODE(
            ProblemRightHandSide(definition),
            names,
            params,
            inputs=[*inputs, *definition.switches.values()],
        )

    @cached_property
    def simulations(self) -> list[Simulation]:
        """The experiments: each pair of conditions with its rows of the measurement table."""
        table = self.source.measurement_df
        before = table.get("preequilibrationConditionId", pd.Series("", table.index)).astype(object)
        before = before.where(before.notna(), "")
        groups = table.groupby([table["simulationConditionId"], before], sort=False)
        return [
            Simulation(self.definition, self.ode, condition, first, rows)
            for (condition, first), rows in groups
        ]

    @cached_property
    def experiments(self) -> dict[str, Experiment]:
        """The experiments, by the name of their condition and of their pre-equilibration."""
        return {
            one.name: Experiment(
                one.t, inputs=one.inputs or None, start=one.start, likelihood=one.likelihood
            )
            for one in self.simulations
        }

    @property
    def priors(self) -> dict[str, TensorVariable]:
        """The prior of each parameter, on its scale: PEtab's, or uniform between the bounds."""
        return {one.name: one.prior for one in self.definition.parameters.values()}

    @property
    def nominal(self) -> dict[str, float]:
        """The nominal values in the files, natural, by the names in the files."""
        return {name: one.nominal for name, one in self.definition.parameters.items()}

    def scaled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert natural values, by the names in the files, to values of the model."""
        return {
            one.name: one.scaled(np.asarray(values[name], float))
            for name, one in self.definition.parameters.items()
        }

    def natural(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert values of the model to natural ones, by the names in the files."""
        return {
            name: one.natural(np.asarray(values[one.name], float))
            for name, one in self.definition.parameters.items()
        }

    def log_likelihood(self, values: Mapping[str, float]) -> float:
        """Return the log likelihood of the measurements, as PEtab defines it.

        It is minus infinity if the ODE cannot be integrated or a noise is not positive.

        Parameters
        ----------
        values : mapping of str to float
            Natural, by the names in the file; others have their nominal values.

        Examples
        --------
        >>> import pymc_gradmatch as gm
        >>> problem = gm.petab.load("tests/petab/conversion/problem.yaml")
        >>> problem.nominal
        {'k1': 0.8, 'k2': 0.6, 'sigma': 0.04}
        >>> round(problem.log_likelihood({"k1": 0.7, "sigma": 0.05}), 3)
        36.152
        """
        total = self._evaluated(self._log_likelihood, self._in_order(values))[0]
        return -np.inf if np.isnan(total) else float(total)

    def value_and_gradient(
        self, scaled: Sequence[float] | NDArray[np.float64]
    ) -> tuple[float, NDArray[np.float64]]:
        """Return the log likelihood and its gradient, for optimisers.

        Parameters
        ----------
        scaled : array_like of float
            Parameters on their scales, in the order of ``ode.params``.

        Examples
        --------
        >>> from scipy.optimize import minimize
        >>> import pymc_gradmatch as gm
        >>> problem = gm.petab.load("tests/petab/conversion/problem.yaml")
        >>> def falling(point):
        ...     value, gradient = problem.value_and_gradient(point)
        ...     return -value, -gradient
        >>> bounds = [one.bounds for one in problem.definition.parameters.values()]
        >>> found = minimize(falling, [0.0, 0.0, 0.1], jac=True, bounds=bounds)
        >>> bool(-found.fun > problem.log_likelihood(problem.nominal))
        True
        """
        value, *gradient = self._evaluated(self._with_gradient, scaled)
        return -np.inf if np.isnan(value) else float(value), np.array(gradient, dtype=float)

    def _evaluated(self, function: Callable, point: Sequence[float] | NDArray) -> Any:
        """Call a compiled function; return NaN if a noise is not positive."""
        try:
            return function(*point)
        except ParameterValueError:
            return np.full(1 + len(self.ode.params), np.nan)

    def simulate(self, values: Mapping[str, float]) -> pd.DataFrame:
        """Return the measurement table with simulations instead of measurements.

        Parameters
        ----------
        values : mapping of str to float
            Natural, by the names in the file; others have their nominal values.

        Examples
        --------
        >>> import pymc_gradmatch as gm
        >>> problem = gm.petab.load("tests/petab/conversion/problem.yaml")
        >>> problem.simulate(problem.nominal)[["observableId", "time", "simulation"]].head(2)
          observableId  time  simulation
        0        obs_a   0.5    0.712334
        1        obs_b   0.5    0.287666
        """
        columns = self._simulated(*self._in_order(values))
        parts = [rows for one in self._written[1] for rows in one]
        table = pd.concat(
            [rows.assign(simulation=column) for rows, column in zip(parts, columns, strict=True)]
        )
        return table.drop(columns=["_place", "measurement"]).sort_index()

    def _in_order(self, values: Mapping[str, float]) -> list:
        unknown = [name for name in values if name not in self.definition.parameters]
        if unknown:
            msg = (
                f"values are given for {unknown}; expected some of the estimated parameters "
                f"{[*self.definition.parameters]}."
            )
            raise ValueError(msg)
        return [*self.scaled({**self.nominal, **values}).values()]

    @cached_property
    @without_traces
    def _written(self) -> tuple:
        """Simulations and log likelihood as graphs of the parameters, without Gaussian process."""
        theta = [pt.scalar(name, dtype="float64") for name in self.ode.params]
        total, tables, simulated = pt.zeros(()), [], []
        for one in self.simulations:
            _, given = self.ode.by_name(pt.zeros((1, len(self.ode.states))), theta)
            x0 = [*one.starts(given).values()]
            x = self.ode.solve(one.t, x0, theta, inputs=one.inputs or None)
            states, _ = self.ode.by_name(x, theta)
            predictions = one.predictions(states, given)
            tables.append([rows for rows, _, _ in predictions])
            simulated += [mean for _, mean, _ in predictions]
            # PyMC rewrites the whole graph of a model: keep the solutions out of it
            given_as = [(rows, mean.type(), noise.type()) for rows, mean, noise in predictions]
            with pm.Model(model=None) as model:
                one.observe(given_as)
            known = {
                own: value
                for parts in zip(given_as, predictions, strict=True)
                for own, value in zip(*(part[1:] for part in parts), strict=True)
            }
            total += graph_replace(model.observedlogp, known, strict=False)
        return theta, tables, simulated, total

    @cached_property
    def _log_likelihood(self) -> Callable:
        theta, _, _, total = self._written
        return in_numpy(theta, [total])

    @cached_property
    def _with_gradient(self) -> Callable:
        theta, _, _, total = self._written
        slopes = gradient(total, theta)
        return in_numpy(theta, [total, *slopes])

    @cached_property
    def _simulated(self) -> Callable:
        theta, _, simulated, _ = self._written
        return in_numpy(theta, simulated)

    @property
    def _given(self) -> dict[str, Any]:
        """Arguments of :func:`gm.fit <pymc_gradmatch.fit>`, for one experiment or several."""
        if len(self.experiments) > 1:
            return {"experiments": self.experiments}
        [one] = self.experiments.values()
        return {"t": one.t, "inputs": one.inputs, "start": one.start, "likelihood": one.likelihood}

    def build_model(self, **settings) -> pm.Model:
        """Build the gradient-matching model, by :func:`~pymc_gradmatch.build_model`.

        Parameters
        ----------
        **settings
            Its arguments; ``preset="refined"`` by default.

        Examples
        --------
        >>> import pymc_gradmatch as gm
        >>> problem = gm.petab.load("tests/petab/conversion/problem.yaml")
        >>> model = problem.build_model(progressbar=False)
        >>> [rv.name for rv in model.free_RVs]
        ['log10_k1', 'log10_k2', 'sigma', 'x']
        """
        given = {"preset": "refined", "priors": self.priors, **self._given, **settings}
        return build_model(self.ode, **given)

    def fit(self, **settings) -> Fit:
        """Fit the problem, by :func:`~pymc_gradmatch.fit`.

        Parameters
        ----------
        **settings
            Its arguments, such as ``n_draws``, ``max_seconds``, ``random_seed``.

        Examples
        --------
        >>> import pymc_gradmatch as gm
        >>> problem = gm.petab.load("tests/petab/conversion/problem.yaml")
        >>> fit = problem.fit(n_draws=1_000, random_seed=1, progressbar=False)
        >>> fit.is_exact
        True
        >>> problem.with_estimates(fit.mode)["nominalValue"].round(2).tolist()
        [0.77, 0.56, 0.02]
        """
        return fit(self.ode, **{"priors": self.priors, **self._given, **settings})

    def with_estimates(self, values: Mapping[str, float]) -> pd.DataFrame:
        """Return the parameter table with estimates as nominal values.

        Parameters
        ----------
        values : mapping of str to float
            By the names of the model, on its scales, such as ``fit.mode``.
        """
        table = self.source.parameter_df.copy()
        for name, value in self.natural(values).items():
            table.loc[name, "nominalValue"] = float(value)
        return table

    def to_petab(self, folder: str | Path, values: Mapping[str, float]) -> Path:
        """Write the problem with estimates as nominal values, for other tools.

        Parameters
        ----------
        folder : str or Path
            The folder for all files except visualization files; not the problem's own folder.
        values : mapping of str to float
            By the names of the model, on its scales, such as ``fit.mode``.

        Returns
        -------
        Path
            The YAML file in the folder.

        Examples
        --------
        >>> from tempfile import TemporaryDirectory
        >>> import pymc_gradmatch as gm
        >>> problem = gm.petab.load("tests/petab/conversion/problem.yaml")
        >>> with TemporaryDirectory() as folder:
        ...     written = problem.to_petab(folder, problem.scaled({**problem.nominal, "k1": 0.7}))
        ...     gm.petab.load(written).nominal["k1"]
        0.7
        """
        import petab.v1 as petab
        import yaml

        here, folder = self.path.parent, Path(folder)
        if folder.resolve() == here.resolve():
            msg = f"the folder {str(folder)!r} is the problem's own; expected another one."
            raise ValueError(msg)
        config = _config_of(self.path)
        named = [
            str(file)
            for problem in config["problems"]
            for files in problem.values()
            for file in (files if isinstance(files, list) else [])
        ]
        for file in named:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(here / file, folder / file)
        estimated = "parameters_estimated.tsv"
        petab.write_parameter_df(self.with_estimates(values), str(folder / estimated))
        written = folder / self.path.name
        written.write_text(yaml.safe_dump({**config, "parameter_file": estimated}), "utf-8")
        return written

    def __repr__(self) -> str:
        model = self.definition.model
        n_steady = sum(bool(one.before) for one in self.simulations)
        after = f", {n_steady} of them from a steady state" if n_steady else ""
        observables = self.source.measurement_df["observableId"].nunique()
        return (
            f"PEtab problem {self.name!r}: {len(model.states)} states, "
            f"{len(self.definition.parameters)} estimated parameters, {len(self.simulations)} "
            f"experiment{'s' * (len(self.simulations) != 1)}{after}, {observables} "
            f"observable{'s' * (observables != 1)}, {len(self.source.measurement_df)} measurements"
        )


def _definition_of(source: "petab.Problem", model: Model, path: Path) -> ProblemDefinition:
    table = source.parameter_df
    is_estimated = table["estimate"].astype(int) == 1
    parameters = {
        name: Parameter.of_row(name, row, f"{path.parent}, parameter table")
        for name, row in table[is_estimated].iterrows()
    }
    fixed = table.loc[~is_estimated, "nominalValue"].astype(float).to_dict()
    used = source.measurement_df.reindex(
        columns=["simulationConditionId", "preequilibrationConditionId"]
    )
    conditions = {
        name: _overrides(row, fixed, f"{path.parent}, condition table, {name!r}", model, parameters)
        for name, row in source.condition_df.iterrows()
        if name in set(used.to_numpy().ravel())
    }
    return ProblemDefinition(model, parameters, fixed, conditions, _observables(source))


def _overrides(row, fixed: Mapping, place: str, model: Model, parameters: Mapping) -> dict:
    found: dict[str, float | str] = {}
    for name, value in row.items():
        if name == "conditionName" or pd.isna(value) or value == "":
            continue
        try:
            found[name] = float(value)
        except ValueError:
            if value not in fixed and value not in parameters:
                msg = (
                    f"{place}: {name!r} is {value!r}; expected a number or a parameter of the "
                    "parameter table."
                )
                raise NotImplementedError(msg) from None
            found[name] = fixed.get(value, value)
        if name in model.rules and name not in model.alias.values():  # except constants of events
            msg = f"{place}: {name!r} is set, and a rule determines it; expected only one of these."
            raise NotImplementedError(msg)
    return found


def _observables(source: "petab.Problem") -> dict[str, dict[str, Any]]:
    from petab.v1.math import sympify_petab

    found = {}
    for name, row in source.observable_df.iterrows():
        found[name] = {
            "distribution": text_or_default(row.get("noiseDistribution"), "normal"),
            "transformation": text_or_default(row.get("observableTransformation"), "lin"),
            "observable": sympify_petab(row["observableFormula"]),
            "noise": sympify_petab(row["noiseFormula"]),
        }  # fmt: skip
    return found

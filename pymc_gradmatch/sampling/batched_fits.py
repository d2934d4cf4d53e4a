"""Fits of many data sets: one exact posterior, written and compiled once, for each pattern."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import pymc as pm
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import extendable_copy, without_traces, young_generation_gc
from pymc_gradmatch.arguments import as_numbers
from pymc_gradmatch.data_values import DataSet, OtherFormulaError, SharedValues
from pymc_gradmatch.exact import (
    BatchPosterior,
    Diagnostics,
    ExactPosterior,
    JaxBatchPosterior,
    run_batched,
)
from pymc_gradmatch.gp import (
    Data,
    Experiment,
    StateGP,
    transformed_name,
    unfitted_with,
    whitened_name,
)
from pymc_gradmatch.model import (
    CheckedExperiment,
    ScalesFromSolutions,
    Settings,
    likelihood_formula,
    scales_finder,
    unfitted_model,
)
from pymc_gradmatch.numerics import on_one_thread, one_at_a_time
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.reporting import silence
from pymc_gradmatch.sampling.engine import NUTS_FIRST, ExactSearch, verdict_of
from pymc_gradmatch.sampling.one_call import fit

DATA_SETTINGS = "likelihood", "scales", "inputs", "start"  # arguments of gm.fit beyond Settings
VERDICT_FIELDS = {"verdict": "", "is_exact": False, "pareto_k": np.nan}  # with values of no fit
NDIM_OF_NOISE_BY_OBSERVATION = 2  # a known sigma of shape (time, state)
MAX_PATTERNS = 8  # kept compiled: each takes some megabytes
BACKENDS: dict[str, type[BatchPosterior]] = {"numba": BatchPosterior, "jax": JaxBatchPosterior}


class ExactFits:
    """Fits of an ODE to data sets, each as by :func:`~pymc_gradmatch.fit`.

    The exact posteriors of data sets with the same observation pattern are one formula with
    different numbers: it is written once, and evaluated for all of them in batches, by a backend.
    """

    def __init__(
        self,
        ode: ODE,
        priors: Mapping[str, TensorVariable] | Callable,
        n_draws: int,
        settings: Mapping[str, Any],
        backend: str = "numba",
    ):
        self.ode, self.priors, self.n_draws, self.settings = ode, priors, n_draws, settings
        self.backend = backend
        self._posteriors: dict[Hashable, BatchedPosterior | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_posteriors": {}}  # each process compiles its own

    @one_at_a_time
    @on_one_thread
    @without_traces
    @young_generation_gc
    def __call__(self, *data_sets: tuple) -> list[xr.Dataset | Exception]:
        """Fit (times, observations, seed) of each data set; return draws or the error of each."""
        if not self._can_batch:
            return [self._fit_separately(*one) for one in data_sets]
        outcomes: list[Any] = [None] * len(data_sets)
        by_pattern: dict[Hashable, list[int]] = {}
        checked: list[Any] = [None] * len(data_sets)
        for place, (t, y, _) in enumerate(data_sets):
            try:
                checked[place] = self._check(t, y)
                by_pattern.setdefault(checked[place].pattern, []).append(place)
            except (TypeError, ValueError) as error:
                outcomes[place] = error
        for places in by_pattern.values():
            found = self._fit_pattern(
                [data_sets[place] for place in places], [checked[p] for p in places]
            )
            for place, outcome in zip(places, found, strict=True):
                outcomes[place] = outcome
        return outcomes

    @property
    def _can_batch(self) -> bool:
        """Whether posteriors of data sets can differ in their numbers alone."""
        sigma = self.settings.get("sigma")
        is_fixed = isinstance(sigma, str) and sigma == "fixed"
        return not is_fixed and not {*self.settings} - {*DATA_SETTINGS, *Settings.__annotations__}

    def _fit_pattern(self, data_sets: Sequence[tuple], checked: Sequence["CheckedData"]) -> list:
        """Fit data sets with the same observation pattern."""
        try:
            posterior = self._batched_posterior(data_sets[0], checked[0])
        except OtherFormulaError:
            posterior = self._posteriors[checked[0].pattern] = None
        except Exception as error:  # of the model, which is the same for all
            return [error] * len(data_sets)
        if posterior is None or not self._is_verified(posterior, data_sets, checked):
            return [self._fit_separately(*one) for one in data_sets]
        outcomes: list[Any] = [None] * len(data_sets)
        ones: dict[int, DataSet] = {}
        for place, ((*_, seed), one) in enumerate(zip(data_sets, checked, strict=True)):
            try:
                ones[place] = posterior.data_set(one, np.random.default_rng(seed))
            except ValueError as error:  # no scales were found
                outcomes[place] = error
        seeds = [data_sets[place][2] for place in ones]
        found = run_batched(
            posterior.batch,
            [*ones.values()],
            lambda target, k: self._search(target, seeds[k]),
        )
        for place, outcome in zip(ones, found, strict=True):
            needs_chains = isinstance(outcome, NeedsChainsError)
            outcomes[place] = self._fit_separately(*data_sets[place]) if needs_chains else outcome
        return outcomes

    def _is_verified(
        self,
        posterior: "BatchedPosterior",
        data_sets: Sequence[tuple],
        checked: Sequence["CheckedData"],
    ) -> bool:
        """Return whether replacing numbers gives the likelihood that another data set writes.

        Checked once, with the first data set whose numbers differ from those written.
        """
        if posterior.is_verified:
            return True
        for (t, y, _), one in zip(data_sets, checked, strict=True):
            if not posterior.has_numbers_of(one):
                try:
                    own = CheckedExperiment.of(self.ode, self._experiment(t, y)).graph
                except (TypeError, ValueError):  # the separate fit reports it
                    return False
                posterior.set_values(one)
                opened, rng = posterior.given.graph, np.random.default_rng(0)
                assert own is not None
                assert opened is not None
                posterior.is_verified = opened.is_same(own, rng)
                if not posterior.is_verified:
                    self._posteriors[one.pattern] = None
                return posterior.is_verified
        return True

    def _search(self, target: ExactPosterior, seed: Any) -> xr.Dataset:
        """Return draws of one posterior, with its verdict."""
        search = BatchedSearch(target, self.n_draws, np.random.default_rng(seed), silence)
        search.run()
        posterior = target.posterior(search.found.weighted.points[search.resampled()])
        diagnostics = search.judged()
        return _with_verdict(posterior, verdict_of(diagnostics), diagnostics)

    def _experiment(self, t: ArrayLike, y: Any) -> Experiment:
        """Return a data set as an experiment."""
        given, sigma = self.settings, self.settings.get("sigma")
        known = None if isinstance(sigma, str | TensorVariable) else sigma
        y, likelihood = bind_data(given.get("likelihood"), y)
        return Experiment(
            t, y, given.get("inputs"), given.get("start"), likelihood, given.get("scales"), known
        )

    def _check(self, t: ArrayLike, y: Any) -> "CheckedData":
        """Check a data set; return its pattern and its numbers."""
        one = self._experiment(t, y)
        if one.likelihood is None:
            given = CheckedExperiment.of(self.ode, one)
            by_observation = np.ndim(one.sigma) == NDIM_OF_NOISE_BY_OBSERVATION
            return CheckedData(_pattern(given.data, by_observation), given)
        times = as_numbers(t, "t")
        form, _, numbers = likelihood_formula(one.likelihood, self.ode, times)
        return CheckedData((times.tobytes(), form), None, numbers)

    def _batched_posterior(self, first: tuple, checked: "CheckedData") -> "BatchedPosterior | None":
        """Return the posteriors of a pattern; None where each data set needs chains."""
        pattern = checked.pattern
        if pattern not in self._posteriors:
            posterior = self._write(first, checked)
            target = posterior.batch.written
            by_nuts = len(target.names) >= NUTS_FIRST or target.spreads
            self._posteriors[pattern] = None if by_nuts else posterior
            while len(self._posteriors) > MAX_PATTERNS:
                del self._posteriors[next(iter(self._posteriors))]
        return self._posteriors[pattern]

    def _write(self, first: tuple, checked: "CheckedData") -> "BatchedPosterior":
        """Write the posterior of a data set, with numbers that can be replaced."""
        t, y, seed = first
        one, rng = self._experiment(t, y), np.random.default_rng(seed)
        if checked.given is not None and np.ndim(one.sigma) < NDIM_OF_NOISE_BY_OBSERVATION:
            one = replace(one, y=_without_missing(checked.given.data))
        number = SharedValues() if one.likelihood is None else SharedValues(
            likelihood_formula(one.likelihood, self.ode, as_numbers(t, "t"))
        )  # fmt: skip
        settings = {name: v for name, v in self.settings.items() if name not in DATA_SETTINGS}
        given = {name: getattr(one, name) for name in DATA_SETTINGS}
        with extendable_copy(pm.Model.get_context(error_if_none=False)):
            first_given, scales = scales_finder(self.ode, one, self.priors, number, rng)
            model = unfitted_model(
                self.ode, t, one.y, priors=self.priors, settings=settings, number=number,
                random_seed=rng, progressbar=False, **given,
            )  # fmt: skip
        target = ExactPosterior(model, number=number)
        return BatchedPosterior(
            BACKENDS[self.backend](target, number),
            first_given,
            scales,
            checked.numbers,
            not checked.numbers,
        )

    def _fit_separately(self, t: ArrayLike, y: Any, seed: Any) -> xr.Dataset | Exception:
        """Fit a data set by :func:`~pymc_gradmatch.fit`."""
        y, likelihood = bind_data(self.settings.get("likelihood"), y)
        try:
            found = fit(
                self.ode, t, y, priors=self.priors, n_draws=self.n_draws,
                random_seed=np.random.default_rng(seed), progressbar=False,
                **{**self.settings, "likelihood": likelihood},
            )  # fmt: skip
        except Exception as error:  # the other data sets are fitted
            return error
        return _with_verdict(found.idata["posterior"].dataset, found.verdict, found.diagnostics)


class CheckedData(NamedTuple):
    """A data set that was checked.

    Data sets of one ``pattern`` have the same posterior but for numbers: of the data ``given``, or,
    with a likelihood of the user's, the ``numbers`` in its lines.
    """

    pattern: Hashable
    given: CheckedExperiment | None
    numbers: Sequence[NDArray] = ()


class NeedsChainsError(Exception):
    """A data set needs chains of NUTS, which are compiled for it alone."""


class BatchedSearch(ExactSearch):
    """The search for an exact posterior in a batch, which raises where chains would be run."""

    def _compiled(self):
        raise NeedsChainsError


@dataclass
class BatchedPosterior:
    """The posteriors of data sets with the same observation pattern.

    ``given`` is the data set for which it was written, ``numbers`` those in its likelihood,
    ``scales`` finds the scales that data do not determine.  ``is_verified``: replaced numbers were
    found to give the likelihood of another data set, or there are none to replace.
    """

    batch: BatchPosterior
    given: CheckedExperiment
    scales: ScalesFromSolutions
    numbers: Sequence[NDArray]
    is_verified: bool

    @property
    def _gp(self) -> StateGP:
        return cast("StateGP", self.batch.written.constraints[0].gp)

    def has_numbers_of(self, one: CheckedData) -> bool:
        """Return whether the likelihood was written with the numbers of a data set."""
        return all(map(np.array_equal, self.numbers, one.numbers))

    def set_values(self, one: CheckedData):
        """Set the numbers in the likelihood to those of a data set."""
        self.batch.number.set_values(DataSet(self._gp, one.numbers))

    def data_set(self, one: CheckedData, rng: np.random.Generator) -> DataSet:
        """Return all numbers of a data set."""
        given = one.given or self.given
        self.set_values(one)
        other = unfitted_with(self._gp, self.scales(given.data, rng))
        other = other if given.noise is None else other.with_sigma(self._gp.sigma)
        return DataSet(other, one.numbers)


def bind_data(likelihood: Callable | None, y: Any) -> tuple[Any, Callable | None]:
    """Return ``y`` and ``likelihood`` as gm.fit takes them: the data go into one of the two."""
    if likelihood is None:
        return y, None
    return None, lambda x, theta: likelihood(x, theta, y)


def _pattern(data: Data, by_observation: bool) -> Hashable:
    """Return the times and the observed states, or the observed entries."""
    is_observed = data.is_observed if by_observation else data.is_observed.any(axis=0)
    return data.t.tobytes(), is_observed.tobytes()


def _without_missing(data: Data) -> NDArray[np.float64]:
    """Return data with medians in the place of missing values of observed states."""
    is_seen = data.is_observed.any(axis=0)
    median = np.nanmedian(np.where(is_seen, data.y, 0.0), axis=0)
    return np.where(is_seen & ~data.is_observed, median, data.y)


def _with_verdict(posterior: xr.Dataset, verdict: str, diagnostics: Diagnostics) -> xr.Dataset:
    """Return draws without auxiliary variables of the states, with the verdict as attributes."""
    behind = [
        f(str(name)) for name in posterior.data_vars for f in (transformed_name, whitened_name)
    ]
    values = (verdict, diagnostics.passed, diagnostics.pareto_k)
    fields = dict(zip(VERDICT_FIELDS, values, strict=True))
    return posterior.drop_vars(behind, errors="ignore").assign_attrs(fields)

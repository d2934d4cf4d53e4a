"""Exact posteriors of many data sets: written and compiled once for those of one pattern."""

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
from pymc_gradmatch.exact import Batch, Diagnostics, ExactPosterior, side_by_side
from pymc_gradmatch.gp import Data, Experiment, StateGP, levels_name, refilled, whitened_name
from pymc_gradmatch.model import Given, Scales, Settings, formula_of, scales_of, unfitted_model
from pymc_gradmatch.numerics import on_one_thread, one_at_a_time
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.replaceable import DataSet, OtherFormulaError, Replaceable
from pymc_gradmatch.reporting import silence
from pymc_gradmatch.sampling.engine import MANY, Exact, verdict_of
from pymc_gradmatch.sampling.one_call import fit

GIVEN = "likelihood", "scales", "inputs", "start"  # what settings have beside those of a preset
SAID = {"verdict": "", "is_exact": False, "pareto_k": np.nan}
BY_ENTRY = 2  # axes of noise that is known of each observation
MOST_PATTERNS = 8  # that are kept: each holds some megabytes


class ExactFits:
    """Fits of an ODE to some data sets, each as by :func:`~pymc_gradmatch.fit`.

    Of data sets with observations at the same places the exact posterior is the same formula of
    other numbers: it is written once, and all are evaluated together.
    """

    def __init__(
        self,
        ode: ODE,
        priors: Mapping[str, TensorVariable] | Callable,
        n_draws: int,
        settings: Mapping[str, Any],
    ):
        self.ode, self.priors, self.n_draws, self.settings = ode, priors, n_draws, settings
        self._written: dict[Hashable, Alike | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_written": {}}  # each process writes and compiles for itself

    @one_at_a_time
    @on_one_thread
    @without_traces
    @young_generation_gc
    def __call__(self, *data_sets: tuple) -> list[xr.Dataset | Exception]:
        """Fit data sets, tuples of times, observations and seed: draws, or the error, of each."""
        if not self._are_alike:
            return [self._alone(*one) for one in data_sets]
        outcomes: list[Any] = [None] * len(data_sets)
        by_pattern: dict[Hashable, list[int]] = {}
        checked: list[Any] = [None] * len(data_sets)
        for place, (t, y, _) in enumerate(data_sets):
            try:
                checked[place] = self._read(t, y)
                by_pattern.setdefault(checked[place].pattern, []).append(place)
            except (TypeError, ValueError) as error:
                outcomes[place] = error
        for places in by_pattern.values():
            found = self._fitted(
                [data_sets[place] for place in places], [checked[p] for p in places]
            )
            for place, outcome in zip(places, found, strict=True):
                outcomes[place] = outcome
        return outcomes

    @property
    def _are_alike(self) -> bool:
        """Whether data sets may be told apart by their numbers alone."""
        sigma = self.settings.get("sigma")
        is_fixed = isinstance(sigma, str) and sigma == "fixed"
        return not is_fixed and not {*self.settings} - {*GIVEN, *Settings.__annotations__}

    def _fitted(self, data_sets: Sequence[tuple], checked: Sequence["Checked"]) -> list:
        """Fit data sets of one pattern."""
        try:
            alike = self._of_pattern(data_sets[0], checked[0])
        except OtherFormulaError:
            alike = self._written[checked[0].pattern] = None
        except Exception as error:  # of the model, which all have
            return [error] * len(data_sets)
        if alike is None or not self._is_right(alike, data_sets, checked):
            return [self._alone(*one) for one in data_sets]
        outcomes: list[Any] = [None] * len(data_sets)
        ones: dict[int, DataSet] = {}
        for place, ((*_, seed), one) in enumerate(zip(data_sets, checked, strict=True)):
            try:
                ones[place] = alike.filled(one, np.random.default_rng(seed))
            except ValueError as error:  # of its scales
                outcomes[place] = error
        seeds = [data_sets[place][2] for place in ones]
        found = side_by_side(
            alike.batch,
            [*ones.values()],
            lambda target, k: self._judged(target, seeds[k]),
        )
        for place, outcome in zip(ones, found, strict=True):
            is_left = isinstance(outcome, NotTogetherError)
            outcomes[place] = self._alone(*data_sets[place]) if is_left else outcome
        return outcomes

    def _is_right(
        self, alike: "Alike", data_sets: Sequence[tuple], checked: Sequence["Checked"]
    ) -> bool:
        """Tell whether the likelihood of another data set is its own, with its numbers put in.

        Of the first other one that comes.
        """
        if alike.is_compared:
            return True
        for (t, y, _), one in zip(data_sets, checked, strict=True):
            if not alike.is_of(one):
                try:
                    own = Given.of(self.ode, self._experiment(t, y)).written
                except (TypeError, ValueError):  # which a fit by itself says of it
                    return False
                alike.put(one)
                opened, rng = alike.given.written, np.random.default_rng(0)
                assert own is not None
                assert opened is not None
                alike.is_compared = opened.is_same(own, rng)
                if not alike.is_compared:
                    self._written[one.pattern] = None
                return alike.is_compared
        return True

    def _judged(self, target: ExactPosterior, seed: Any) -> xr.Dataset:
        """Return draws of one posterior, with what the verdict says."""
        search = Together(target, self.n_draws, np.random.default_rng(seed), silence)
        search.run()
        posterior = target.posterior(search.found.weighted.points[search.resampled()])
        diagnostics = search.judged()
        return _with_verdict(posterior, verdict_of(diagnostics), diagnostics)

    def _experiment(self, t: ArrayLike, y: Any) -> Experiment:
        """Return a data set as :func:`~pymc_gradmatch.fit` takes it."""
        given, sigma = self.settings, self.settings.get("sigma")
        known = None if isinstance(sigma, str | TensorVariable) else sigma
        y, likelihood = observed_by(given.get("likelihood"), y)
        return Experiment(
            t, y, given.get("inputs"), given.get("start"), likelihood, given.get("scales"), known
        )

    def _read(self, t: ArrayLike, y: Any) -> "Checked":
        """Check a data set, and tell it apart from others by its pattern and its numbers."""
        one = self._experiment(t, y)
        if one.likelihood is None:
            given = Given.of(self.ode, one)
            return Checked(_pattern(given.data, np.ndim(one.sigma) == BY_ENTRY), given)
        times = as_numbers(t, "t")
        form, _, numbers = formula_of(one.likelihood, self.ode, times)
        return Checked((times.tobytes(), form), None, numbers)

    def _of_pattern(self, first: tuple, checked: "Checked") -> "Alike | None":
        """Return the posteriors of a pattern, if it is its numbers alone that tell them apart."""
        pattern = checked.pattern
        if pattern not in self._written:
            alike = self._write(first, checked)
            target = alike.batch.written
            by_chains = len(target.names) >= MANY or target.spreads
            self._written[pattern] = None if by_chains else alike
            while len(self._written) > MOST_PATTERNS:
                del self._written[next(iter(self._written))]
        return self._written[pattern]

    def _write(self, first: tuple, checked: "Checked") -> "Alike":
        """Write the posterior of a data set, with numbers that those of others can replace."""
        t, y, seed = first
        one, rng = self._experiment(t, y), np.random.default_rng(seed)
        if checked.given is not None and np.ndim(one.sigma) < BY_ENTRY:
            one = replace(one, y=_completed(checked.given.data))
        number = Replaceable() if one.likelihood is None else Replaceable(
            formula_of(one.likelihood, self.ode, as_numbers(t, "t"))
        )  # fmt: skip
        settings = {name: v for name, v in self.settings.items() if name not in GIVEN}
        given = {name: getattr(one, name) for name in GIVEN}
        with extendable_copy(pm.Model.get_context(error_if_none=False)):
            first_given, scales = scales_of(self.ode, one, self.priors, number, rng)
            model = unfitted_model(
                self.ode, t, one.y, priors=self.priors, settings=settings, number=number,
                random_seed=rng, progressbar=False, **given,
            )  # fmt: skip
        target = ExactPosterior(model, number=number)
        return Alike(
            Batch(target, number), first_given, scales, checked.numbers, not checked.numbers
        )

    def _alone(self, t: ArrayLike, y: Any, seed: Any) -> xr.Dataset | Exception:
        """Fit a data set whose noise, or likelihood, is a formula of its own."""
        y, likelihood = observed_by(self.settings.get("likelihood"), y)
        try:
            found = fit(
                self.ode, t, y, priors=self.priors, n_draws=self.n_draws,
                random_seed=np.random.default_rng(seed), progressbar=False,
                **{**self.settings, "likelihood": likelihood},
            )  # fmt: skip
        except Exception as error:  # the others go on
            return error
        return _with_verdict(found.idata["posterior"].dataset, found.verdict, found.diagnostics)


class Checked(NamedTuple):
    """A data set before its posterior is written.

    Of those that differ in ``numbers``, which are in the lines of their likelihoods, alone the
    pattern is the same.  Where a likelihood of its own is all that there is, nothing is ``given``.
    """

    pattern: Hashable
    given: Given | None
    numbers: Sequence[NDArray] = ()


class NotTogetherError(Exception):
    """A data set needs chains, which are compiled for it alone."""


class Together(Exact):
    """The search for an exact posterior beside others, which ends where chains would be run."""

    def _compiled(self):
        raise NotTogetherError


@dataclass
class Alike:
    """The posteriors of data sets of one pattern, and what fills in the numbers of each.

    ``given`` is the one that was written, with these ``numbers`` in its likelihood; ``scales``
    finds those that data do not determine.  ``is_compared`` says whether the likelihood was found
    to be right for another data set, or needs not be.
    """

    batch: Batch
    given: Given
    scales: Scales
    numbers: Sequence[NDArray]
    is_compared: bool

    @property
    def _gp(self) -> StateGP:
        return cast("StateGP", self.batch.written.constraints[0].gp)

    def is_of(self, one: Checked) -> bool:
        """Tell whether these are the numbers that were written."""
        return all(map(np.array_equal, self.numbers, one.numbers))

    def put(self, one: Checked):
        """Put numbers into the likelihood."""
        self.batch.number.put(DataSet(self._gp, one.numbers))

    def filled(self, one: Checked, rng: np.random.Generator) -> DataSet:
        """Return the numbers of a data set."""
        given = one.given or self.given
        self.put(one)
        other = refilled(self._gp, self.scales(given.data, rng))
        other = other if given.noise is None else other.with_sigma(self._gp.sigma)
        return DataSet(other, one.numbers)


def observed_by(likelihood: Callable | None, y: Any) -> tuple[Any, Callable | None]:
    """Return the observations and the likelihood of a data set: one of these has them."""
    if likelihood is None:
        return y, None
    return None, lambda x, theta: likelihood(x, theta, y)


def _pattern(data: Data, by_entry: bool) -> Hashable:
    """Return what data sets share for one formula: times, states, perhaps where data are."""
    seen = data.is_observed
    return data.t.tobytes(), (seen if by_entry else seen.any(axis=0)).tobytes()


def _completed(data: Data) -> NDArray[np.float64]:
    """Return data with some number in the place of missing ones of states that were seen."""
    seen = data.is_observed.any(axis=0)
    middle = np.nanmedian(np.where(seen, data.y, 0.0), axis=0)
    return np.where(seen & ~data.is_observed, middle, data.y)


def _with_verdict(posterior: xr.Dataset, verdict: str, diagnostics: Diagnostics) -> xr.Dataset:
    """Return draws without what stands behind the states, with what the verdict says."""
    behind = [f(str(name)) for name in posterior.data_vars for f in (levels_name, whitened_name)]
    said = (verdict, diagnostics.passed, diagnostics.pareto_k)
    return posterior.drop_vars(behind, errors="ignore").assign_attrs(zip(SAID, said, strict=True))

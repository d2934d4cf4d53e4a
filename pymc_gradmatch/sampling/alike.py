"""Exact posteriors of many data sets: written and compiled once for those of one pattern."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr
from numpy.typing import ArrayLike
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import beside, without_full_collections, without_traces
from pymc_gradmatch.exact import Batch, Diagnostics, ExactPosterior, side_by_side
from pymc_gradmatch.gp import Data, Experiment, StateGP, levels_name, refilled, whitened_name
from pymc_gradmatch.model import Given, Settings, unfitted_model
from pymc_gradmatch.numerics import on_one_thread, one_at_a_time
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.replaceable import Replaceable
from pymc_gradmatch.reporting import silence
from pymc_gradmatch.sampling.engine import MANY, Exact, verdict_of
from pymc_gradmatch.sampling.one_call import fit

GIVEN = ("likelihood", "scales", "inputs", "start")  # what settings have beside those of a preset
SAID = {"verdict": "", "is_exact": False, "pareto_k": np.nan}
MOST_PATTERNS = 8  # that are kept: each holds some megabytes


class ExactFits:
    """Fits of an ODE to some data sets, each as by :func:`~pymc_gradmatch.fit`.

    Of data sets with observations at the same places the exact posterior is the same formula of
    other numbers: it is written once, and all are evaluated together.

    Parameters
    ----------
    ode, priors, settings
        As for :func:`~pymc_gradmatch.fit`, the same for all.
    n_draws : int
        Draws of each.
    """

    def __init__(
        self,
        ode: ODE,
        priors: Mapping[str, TensorVariable] | Callable,
        n_draws: int,
        settings: Mapping[str, Any],
    ):
        self.ode, self.priors, self.n_draws, self.settings = ode, priors, n_draws, settings
        self._written: dict[tuple, Batch | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_written": {}}  # each process writes and compiles for itself

    @one_at_a_time
    @on_one_thread
    @without_traces
    @without_full_collections
    def __call__(self, *data_sets: tuple) -> list[xr.Dataset | Exception]:
        """Fit some data sets, each a tuple of times, observations and seed.

        Returns
        -------
        list of Dataset or Exception
            The draws of each with what the verdict says, or what went wrong.
        """
        if not self._are_alike:
            return [self._alone(*one) for one in data_sets]
        outcomes: list[Any] = [None] * len(data_sets)
        by_pattern: dict[tuple, list[int]] = {}
        checked: list[Any] = []
        for place, (t, y, _) in enumerate(data_sets):
            try:
                checked.append(self._checked(t, y))
                by_pattern.setdefault(_pattern(checked[-1].data), []).append(place)
            except (TypeError, ValueError) as error:
                checked.append(None)
                outcomes[place] = error
        for pattern, places in by_pattern.items():
            some = [data_sets[place] for place in places]
            found = self._fitted(pattern, some, [checked[place] for place in places])
            for place, outcome in zip(places, found, strict=True):
                outcomes[place] = outcome
        return outcomes

    @property
    def _are_alike(self) -> bool:
        """Whether data sets may be told apart by their numbers alone."""
        sigma, likelihood = self.settings.get("sigma"), self.settings.get("likelihood")
        is_fixed = isinstance(sigma, str) and sigma == "fixed"
        others = {*self.settings} - {*GIVEN, *Settings.__annotations__}
        return not others and not is_fixed and likelihood is None

    def _fitted(self, pattern: tuple, data_sets: Sequence[tuple], checked: Sequence[Given]) -> list:
        """Fit data sets of one pattern."""
        try:
            batch = self._batch_of(pattern, data_sets[0], checked[0].data)
        except Exception as error:  # of the model, which all have
            return [error] * len(data_sets)
        if batch is None:
            return [self._alone(*one) for one in data_sets]
        first: Any = batch.written.constraints[0].gp
        gps = [_with_data(first, one) for one in checked]
        seeds = [seed for *_, seed in data_sets]
        return side_by_side(batch, gps, lambda target, place: self._judged(target, seeds[place]))

    def _judged(self, target: ExactPosterior, seed: Any) -> xr.Dataset:
        """Return draws of one posterior, with what the verdict says."""
        search = Exact(target, self.n_draws, np.random.default_rng(seed), silence)
        search.run()
        posterior = target.posterior(search.found.weighted.points[search.resampled()])
        diagnostics = search.judged()
        return _told(posterior, verdict_of(diagnostics), diagnostics)

    def _checked(self, t: ArrayLike, y: ArrayLike) -> Given:
        given, sigma = self.settings, self.settings.get("sigma")
        known = None if isinstance(sigma, str | TensorVariable) else sigma
        one = Experiment(
            t, y, given.get("inputs"), given.get("start"), scales=given.get("scales"), sigma=known
        )
        return Given.of(self.ode, one, "", several=False, fits=True)

    def _batch_of(self, pattern: tuple, first: tuple, data: Data) -> Batch | None:
        """Return the posteriors of a pattern, if it is its numbers alone that tell them apart."""
        if data.unscaled:
            return None
        if pattern not in self._written:
            t, y, seed = first
            target, number = self._write(t, y, np.random.default_rng(seed))
            by_chains = len(target.names) >= MANY or target.spreads
            self._written[pattern] = None if by_chains else Batch(target, number)
            while len(self._written) > MOST_PATTERNS:
                del self._written[next(iter(self._written))]
        return self._written[pattern]

    def _write(
        self, t: ArrayLike, y: ArrayLike, rng: np.random.Generator
    ) -> tuple[ExactPosterior, Replaceable]:
        """Write the posterior of a data set, with numbers that those of others can replace."""
        number = Replaceable()
        given = {name: self.settings.get(name) for name in GIVEN}
        settings = {name: v for name, v in self.settings.items() if name not in GIVEN}
        with beside(pm.Model.get_context(error_if_none=False)):
            model = unfitted_model(
                self.ode, t, y, priors=self.priors, settings=settings, number=number,
                random_seed=rng, progressbar=False, **given,
            )  # fmt: skip
        return ExactPosterior(model, number=number), number

    def _alone(self, t: ArrayLike, y: ArrayLike, seed: Any) -> xr.Dataset | Exception:
        """Fit a data set whose likelihood, noise or scale is a formula of its own."""
        try:
            found = fit(
                self.ode, t, y, priors=self.priors, n_draws=self.n_draws,
                random_seed=np.random.default_rng(seed), progressbar=False, **self.settings,
            )  # fmt: skip
        except Exception as error:  # the others go on
            return error
        return _told(found.idata["posterior"].dataset, found.verdict, found.diagnostics)


def _pattern(data: Data) -> tuple:
    """Return what data sets have to share for one formula: times, and where data are."""
    return data.t.tobytes(), data.is_observed.tobytes(), data.is_sparse.tobytes()


def _with_data(gp: StateGP, one: Given) -> StateGP:
    other = refilled(gp, one.data)
    return other if one.noise is None else other.with_sigma(gp.sigma)


def _told(posterior: xr.Dataset, verdict: str, diagnostics: Diagnostics) -> xr.Dataset:
    """Return draws without what stands behind the states, with what the verdict says."""
    behind = [f(str(name)) for name in posterior.data_vars for f in (levels_name, whitened_name)]
    said = (verdict, diagnostics.passed, diagnostics.pareto_k)
    return posterior.drop_vars(behind, errors="ignore").assign_attrs(zip(SAID, said, strict=True))

"""Exact posteriors of many data sets: written and compiled once for those of one pattern."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import xarray as xr
from numpy.typing import ArrayLike
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import beside, without_full_collections, without_traces
from pymc_gradmatch.exact import Diagnostics, ExactPosterior
from pymc_gradmatch.gp import Experiment, levels_name, refilled, whitened_name
from pymc_gradmatch.model import Given, unfitted_model
from pymc_gradmatch.numerics import on_one_thread, one_at_a_time
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.replaceable import Replaceable
from pymc_gradmatch.sampling.engine import Exact, verdict_of
from pymc_gradmatch.sampling.one_call import fit

GIVEN = ("likelihood", "scales", "inputs", "start")  # what settings have beside those of a preset
SAID = {"verdict": "", "is_exact": False, "pareto_k": np.nan}
MOST_PATTERNS = 8  # that are kept: each holds some megabytes


class ExactFits:
    """Fits of an ODE to data sets, one after the other, each as by :func:`~pymc_gradmatch.fit`.

    Of data sets with observations at the same places the exact posterior is the same formula of
    other numbers: it is written for the first, and takes those of each.

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
        self._written: dict[tuple, "Written"] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_written": {}}  # each process writes and compiles for itself

    @one_at_a_time
    @on_one_thread
    @without_traces
    @without_full_collections
    def __call__(
        self, t: ArrayLike, y: ArrayLike, seed: int | np.random.SeedSequence
    ) -> xr.Dataset:
        """Fit one data set, and return its draws with what the verdict says."""
        rng = np.random.default_rng(seed)
        one = Given.of(self.ode, self._experiment(t, y), "", several=False, fits=True)
        target = self._target(one, y, rng)
        if target is None:
            return self._alone(t, y, rng)
        search = Exact(target, self.n_draws, rng, _silent)
        search.run()
        places, diagnostics = search.judged()
        posterior = target.posterior(search.found.weighted.points[places])
        return _told(posterior, verdict_of(diagnostics), diagnostics)

    def _experiment(self, t: ArrayLike, y: ArrayLike) -> Experiment:
        shared = {name: self.settings.get(name) for name in ("inputs", "start", "scales", "sigma")}
        if isinstance(shared["sigma"], str | TensorVariable):
            shared["sigma"] = None
        return Experiment(t, y, **shared)

    def _target(self, one: Given, y: ArrayLike, rng) -> ExactPosterior | None:
        """Return the posterior of a data set, if its numbers alone tell it from others."""
        data = one.data
        is_fixed = isinstance(self.settings.get("sigma"), str) and self.settings["sigma"] == "fixed"
        if self.settings.get("likelihood") is not None or is_fixed or data.unscaled:
            return None
        pattern = (data.t.tobytes(), data.is_observed.tobytes(), data.is_sparse.tobytes())
        if pattern not in self._written:
            self._written[pattern] = self._write(data.t, y, rng)
            while len(self._written) > MOST_PATTERNS:
                del self._written[next(iter(self._written))]
        return self._written[pattern].with_data(one)

    def _write(self, t: ArrayLike, y: ArrayLike, rng: np.random.Generator) -> "Written":
        number = Replaceable()
        given = {name: self.settings.get(name) for name in GIVEN}
        settings = {name: v for name, v in self.settings.items() if name not in GIVEN}
        with beside(pm.Model.get_context(error_if_none=False)):
            model = unfitted_model(
                self.ode, t, y, priors=self.priors, settings=settings, number=number,
                random_seed=rng, progressbar=False, **given,
            )  # fmt: skip
        return Written(ExactPosterior(model, number=number), number)

    def _alone(self, t: ArrayLike, y: ArrayLike, rng: np.random.Generator) -> xr.Dataset:
        """Fit a data set whose likelihood, noise or scale is a formula of its own."""
        found = fit(
            self.ode, t, y, priors=self.priors, n_draws=self.n_draws, random_seed=rng,
            progressbar=False, **self.settings,
        )  # fmt: skip
        return _told(found.idata["posterior"].dataset, found.verdict, found.diagnostics)


class Written(NamedTuple):
    """The exact posterior of a data set, with numbers that those of others can replace."""

    target: ExactPosterior
    number: Replaceable

    def with_data(self, one: Given) -> ExactPosterior:
        """Return the posterior of a data set with observations at the same places."""
        [constraint] = self.target.constraints
        gp = refilled(constraint.gp, one.data)
        self.number.put(gp)
        return self.target.with_data(gp)


def _told(posterior: xr.Dataset, verdict: str, diagnostics: Diagnostics) -> xr.Dataset:
    """Return draws without what stands behind the states, with what the verdict says."""
    behind = [f(str(name)) for name in posterior.data_vars for f in (levels_name, whitened_name)]
    said = (verdict, diagnostics.passed, diagnostics.pareto_k)
    return posterior.drop_vars(behind, errors="ignore").assign_attrs(zip(SAID, said, strict=True))


def _silent(doing: str):
    """Say nothing."""

"""Draws of an exact posterior: optimisation to its modes, then importance sampling or NUTS."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from arviz_base import from_dict
from numpy.typing import NDArray

from pymc_gradmatch._pymc import set_start
from pymc_gradmatch.arguments import check_counts
from pymc_gradmatch.exact import (
    FIRST_STARTS,
    MAX_STARTS,
    MIN_EFFECTIVE,
    N_PRIOR,
    Diagnostics,
    ExactPosterior,
    LocalApproximation,
    Mixture,
    ModeSearch,
    NoGradientError,
    SearchResult,
    ZeroDensityError,
    approximate,
    diagnose,
    find_modes,
    fit_mixture,
    further_starts,
    grow_horizon,
    residuals,
    result_of_chains,
    run_searches,
    searches_dataset,
    solved_model,
    weight_normal_approximations,
)
from pymc_gradmatch.numerics import Laplace
from pymc_gradmatch.sampling.coordinates import centre_in_part, log_volume, members, shares_of_data
from pymc_gradmatch.sampling.posterior import CompiledPosterior, compile_posterior

NUTS_FIRST = 20  # unknowns from which on NUTS comes before importance sampling
NUTS_SECOND = 15  # unknowns from which on NUTS comes after failed importance sampling
ATTEMPTS = 2  # of importance sampling, before NUTS
N_CHAINS = 4
# A second run of the chains is longer by a factor between these.
LEAST_FACTOR, MOST_FACTOR = 2, 8
HIERARCHY_TARGET_ACCEPT = 0.99  # of the second run for a hierarchy, whose neck needs short steps
NUTS_RTOL = 1e-6  # of the ODE's solutions in NUTS; importance weights correct for it
MIN_DRAWS = 1_000  # fewer are too few to fit the tail index k
N_STARTS_RETURNED = 4
N_EXAMINED = 100  # prior draws examined for an error message
UNSEEN = "A solution that none of the searches found cannot be ruled out."
TRY = (
    "Try more draws (n_draws=), narrower priors where the data leave parameters open, or NUTS: "
    "gm.sample(model=fit.exact_model)."
)


def check_n_draws(n_draws: int):
    """Raise unless there are enough draws for a verdict."""
    check_counts(n_draws=n_draws)
    if n_draws is None:
        msg = "n_draws is None; expected a whole number."
        raise TypeError(msg)
    if n_draws < MIN_DRAWS:
        msg = f"n_draws is {n_draws}; expected at least {MIN_DRAWS}, for a tail to fit k to."
        raise ValueError(msg)


@dataclass(frozen=True)
class Drawn:
    """Draws of an exact posterior with their diagnostics.

    ``found`` has the weighted draws, ``places`` the places of the resampled ones among them,
    ``covariance`` is of the unconstrained coordinates, ``starts`` are free variables and x(t0) at
    some draws.
    """

    found: SearchResult
    places: NDArray[np.int64]
    idata: xr.DataTree
    diagnostics: Diagnostics
    covariance: pd.DataFrame
    starts: list[dict[str, Any]]


class ExactSearch:
    """The search for ``n_draws`` draws of the exact posterior ``target``.

    ``initial_draws``: draws ``(draw, n)`` of the gradient-matching posterior, further starts of the
    optimisation.  ``optimised`` is the result of the optimisation so far, ``found`` the weighted
    draws.
    """

    def __init__(
        self,
        target: ExactPosterior,
        n_draws: int,
        rng: np.random.Generator,
        report: Callable[[str], None],
        initial_draws: NDArray[np.float64] | None = None,
    ):
        self.target, self.n_draws, self.rng, self.report = target, n_draws, rng, report
        self.initial_draws = initial_draws
        self.optimised: ModeSearch | None = None
        self.found: SearchResult

    def run(self):
        """Optimise to the modes, and draw around them.

        By NUTS with twenty unknowns or more and one mode, with fifteen or more where importance
        sampling fails, and for hierarchies; by importance sampling otherwise.  Chains with too few
        effective draws are run once more, longer.  Chains that do not converge become the start of
        importance sampling; those of a hierarchy are run once more in shorter steps instead, since
        no proposal covers its neck.
        """
        self._optimise()
        is_hierarchy, n = bool(self.target.spreads), len(self.target.names)
        around: Mixture | None = None
        by_nuts = (n >= NUTS_SECOND or is_hierarchy) and len(self.modes.point) == 1
        if by_nuts and n < NUTS_FIRST and not is_hierarchy:
            self._search(attempts=ATTEMPTS)
            if self.found.is_reliable:
                return
        if by_nuts:
            self.report("sampling by NUTS")
            with suppress(RuntimeError):  # NUTS makes no progress; importance sampling may
                posterior, start = self._compiled()
                self.found = self._sampled(posterior, start)
                factor = self._factor_of_second_run()
                if not self.found.is_reliable and (is_hierarchy or factor <= MOST_FACTOR):
                    steps = {"target_accept": HIERARCHY_TARGET_ACCEPT} if is_hierarchy else {}
                    self.found = self._sampled(posterior, start, min(factor, MOST_FACTOR), **steps)
                if is_hierarchy or self.found.is_reliable:
                    return
                around = fit_mixture(self.found.weighted.points, self.rng)
        self._search(around=around)

    def _optimise(self):
        """Optimise to the modes; where they fit poorly with a growing horizon and more starts."""
        target = self.target
        also = "" if self.initial_draws is None else "the draws, and from "
        doing = f"optimising from {also}prior draws"
        self.report(f"{doing}: the first {FIRST_STARTS} of {MAX_STARTS} starts at most")
        with suppress(ZeroDensityError, NoGradientError):  # a first piece of the data may do
            for found in find_modes(target, self.rng, self.initial_draws):
                self.optimised = found
                self._report_modes(doing, found)
        if self.optimised is not None and self.initial_draws is not None:
            return
        if self.optimised is None or fits_poorly(target, self.modes):
            self._grow()
        assert self.optimised is not None
        if self.initial_draws is None and fits_poorly(target, self.modes):
            doing = "optimising from more prior draws"
            self.report(doing)
            for found in further_starts(target, self.optimised, self.rng):
                self.optimised = found
                self._report_modes(doing, found)
                if not fits_poorly(target, self.modes):
                    break

    def _search(self, **settings):
        """Draw around the modes by importance sampling."""
        self.found = run_searches(
            self.target, self.modes, self.n_draws, self.rng,
            report=lambda words: self.report(f"searching: {words}"), **settings,
        )  # fmt: skip

    def _report_modes(self, doing: str, found: ModeSearch):
        """Report how many starts were optimised, and to how many modes."""
        n, n_modes = len(found.end_points.point), len(found.modes.point)
        modes = "a mode" if n_modes == 1 else f"{n_modes} modes"
        self.report(f"{doing}: {n} of {max(n, MAX_STARTS)} starts at most, to {modes}")

    def _report_chains(self, chains: Sequence):
        """Report the number of draws of all chains, warm-up included."""
        n, of = sum(one.finished_draws for one in chains), sum(one.total_draws for one in chains)
        self.report(f"sampling by NUTS: {n} of {of} draws of {len(chains)} chains")

    @property
    def modes(self) -> LocalApproximation:
        """The modes found so far."""
        assert self.optimised is not None
        return self.optimised.modes

    def _compiled(self) -> tuple[CompiledPosterior, Laplace]:
        """Return the exact posterior, compiled for NUTS, and its mode."""
        exact = solved_model(self.target.model, rtol=NUTS_RTOL)
        centre_in_part(exact, self._centred)
        for name, value in self.target.constrained(self.modes.point[0]).items():
            set_start(exact[name], value)
        posterior = compile_posterior(exact)
        return posterior, posterior.find_mode(self.rng)

    @cached_property
    def _centred(self) -> dict[str, NDArray[np.float64]]:
        """The centring lambda of members of populations, by name; see :mod:`.coordinates`."""
        target, point = self.target, self.modes.point[:1]
        variance = np.diagonal(self.modes.covariance[0])
        levels, variances = target.unconstrained(point), target.unconstrained(variance[None])
        at = {name: value[None, None] for name, value in target.constrained(point[0]).items()}
        here = from_dict({"posterior": at})["posterior"].dataset
        centred = {}
        for rv in members(target.model, {target.model[name] for name in target.spreads}):
            name = str(rv.name)
            (center,), (spread,) = target.at_draws(here, rv.owner.inputs[-2:])
            centred[name] = shares_of_data(levels[name][0], variances[name][0], center, spread)
        return centred

    def _factor_of_second_run(self) -> int:
        """Return by how much longer chains have twice the effective draws that are needed."""
        n_effective = max(self.found.weighted.n_effective, 1)
        return max(LEAST_FACTOR, int(np.ceil(2 * MIN_EFFECTIVE / n_effective)))

    def _sampled(
        self, posterior: CompiledPosterior, start: Laplace, factor: int = 1, **settings: float
    ) -> SearchResult:
        """Run chains of NUTS with ``factor`` times ``n_draws`` draws in all."""
        n_draws = factor * self.n_draws // N_CHAINS
        run = posterior.sample(
            start, self.rng, draws=n_draws, tune=None, chains=N_CHAINS, cores=1,
            progress=self._report_chains, **settings,
        )  # fmt: skip
        draws, stats = run["posterior"].dataset, run["sample_stats"].dataset
        phi, log_density = self.target.coordinates(draws), stats["logp"].to_numpy()
        graphs = [
            log_volume(centred, self.target.model[name].owner.inputs[-1])
            for name, centred in self._centred.items()
        ]
        for volume in self.target.at_draws(draws, graphs):  # z to phi
            log_density = log_density - volume.reshape(*log_density.shape, -1).sum(axis=-1)
        n_divergences = int(stats["diverging"].sum())
        chains = phi.reshape(*log_density.shape, -1)
        return result_of_chains(self.target, self.modes, chains, log_density, n_divergences)

    def _grow(self):
        """Optimise with a growing horizon."""
        self.report("optimising with a growing horizon")
        target, known = self.target, self.optimised
        with suppress(ZeroDensityError, NoGradientError):
            known = grow_horizon(target, self.rng, known)
        if known is None:
            raise ValueError(_no_start(target, self.rng))
        self.optimised = known

    def approximate(self):
        """Weight draws of the normal approximations at the modes, after the search was stopped.

        Before any mode was found, of the approximation at the best point.
        """
        self.target.deadline = np.inf
        if self.optimised is None:
            widths = self.target.draw_prior(N_PRIOR, self.rng).std(axis=0)
            local = approximate(self.target, self.target.highest[1][None], np.diag(widths)[None])
            self.optimised = ModeSearch.of(local, widths)
        self.found = weight_normal_approximations(self.target, self.modes, self.rng)

    def resampled(self) -> NDArray[np.int64]:
        """Return the places of resampled draws."""
        return self.found.weighted.resampled(self.n_draws, self.rng)

    def judged(self, stopped: str = "") -> Diagnostics:
        """Return the diagnostics; the reason why a search was stopped withholds the verdict."""
        assert self.optimised is not None
        self.found.disagreement.index = [*self.target.names, "evidence"]
        return diagnose(self.target, self.found, self.optimised, stopped)

    def drawn(self, stopped: str = "") -> Drawn:
        """Return resampled draws with their diagnostics."""
        target, found, names = self.target, self.found, self.target.names
        places, points = self.resampled(), found.weighted.points
        idata = target.idata(points[places], self.rng)
        idata["searches"] = xr.DataTree(searches_dataset(found, names))
        starts = target.initial_points(points[list(dict.fromkeys(places))[:N_STARTS_RETURNED]])
        covariance = pd.DataFrame(found.covariance, names, names)
        diagnostics = self.judged(stopped)
        return Drawn(found, places, idata, diagnostics, covariance, starts)


def verdict_of(diagnostics: Diagnostics) -> str:
    """Return the verdict as text, with its limits, or with what to do."""
    return f"{diagnostics.in_words()} {UNSEEN if diagnostics.passed else TRY}"


def fits_poorly(target: ExactPosterior, modes: LocalApproximation) -> bool:
    """Return whether residuals at the best mode are autocorrelated, or have outliers."""
    left = residuals(target, modes.point[0])
    return any(one.is_autocorrelated or one.have_outlier for one in left)


def _no_start(target: ExactPosterior, rng: np.random.Generator) -> str:
    """Return why no optimisation can start, at the model's start or at a prior draw."""
    points = np.concatenate([target.start_point()[None], target.draw_prior(N_EXAMINED, rng)])
    is_possible = np.isfinite(target(points))
    point = points[is_possible][0] if is_possible.any() else points[0]
    at = {label: float(f"{v[0]:.3g}") for label, v in target.scalars(point[None]).items()}
    if is_possible.any():
        return (
            "the exact density has no finite derivatives at prior draws, so that no optimisation "
            f"can start there. At {at}: {target.why_no_gradient(point)}"
        )
    why = target.why_zero(point)
    where = f" From {at}: {why}" if why else ""
    return (
        "the exact density is zero at all prior draws: the ODE cannot be integrated from "
        f"there, or the likelihood or a prior excludes them.{where} Check the priors."
    )

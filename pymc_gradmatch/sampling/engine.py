"""Draws of an exact posterior: climbs to its modes, then chains or searches around them."""

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
    EFFECTIVE,
    FIRST_CLIMBS,
    MOST_CLIMBS,
    N_PRIOR,
    Coverage,
    Diagnostics,
    ExactPosterior,
    Found,
    ImpossibleError,
    Local,
    Mixture,
    NoSlopesError,
    climbs,
    cover,
    diagnosed,
    exact_model,
    fit_mixture,
    further_climbs,
    grown,
    look_around,
    rescaled,
    residuals,
    sampled,
    searched,
    weighed_once,
)
from pymc_gradmatch.numerics import Laplace
from pymc_gradmatch.sampling.coordinates import centre_in_part, log_volume, members, shares_of_data
from pymc_gradmatch.sampling.posterior import CompiledPosterior, compile_posterior

MANY = 20  # unknowns, from which on chains are run first
SEVERAL, ATTEMPTS = 15, 2  # from which on they are run where so many attempts of searches fail
N_CHAINS = 4
LONGER, LONGEST = 2, 8  # times as long, that chains are run once more
ACCEPTED = 0.99  # mean acceptance of these, of a hierarchy
ROUGHLY = 1e-6  # relative tolerance of their solutions; weights make up for it
MIN_DRAWS = 1_000
N_HANDED_ON = 4
N_EXAMINED = 100  # draws of the prior, where no climb can begin
UNSEEN = "A solution that none of the searches found cannot be ruled out."
TRY = (
    "Try more draws (n_draws), narrower priors where the data leave parameters open, or sample the "
    "exact posterior with an ODE solver in the loop, from .starts and with .covariance as the "
    "metric."
)


def check_n_draws(n_draws: int):
    """Raise if draws are too few for a verdict."""
    check_counts(n_draws=n_draws)
    if n_draws is None:
        msg = "n_draws is None; expected a whole number."
        raise TypeError(msg)
    if n_draws < MIN_DRAWS:
        msg = f"n_draws is {n_draws}; expected at least {MIN_DRAWS}, for a tail to fit k to."
        raise ValueError(msg)


@dataclass(frozen=True)
class Drawn:
    """Draws of an exact posterior and what is known of them.

    ``found`` are weighted ones, before they are resampled, and ``places`` those of the draws among
    these; the covariance is that of unconstrained coordinates; ``starts`` are free variables and
    x(t0) at some of the draws.
    """

    found: Coverage
    places: NDArray[np.int64]
    idata: xr.DataTree
    diagnostics: Diagnostics
    covariance: pd.DataFrame
    starts: list[dict[str, Any]]


class Exact:
    """The search for an exact posterior, in steps that each leave something behind.

    So many draws of the posterior ``target`` are wanted; draws of the gradient-matching posterior,
    ``(draw, n)``, may be ``near``, to climb from as well.  ``climbed`` is where climbs led, as
    soon as there are some, and ``found`` the weighted draws.
    """

    def __init__(
        self,
        target: ExactPosterior,
        n_draws: int,
        rng: np.random.Generator,
        say: Callable[[str], None],
        near: NDArray[np.float64] | None = None,
    ):
        self.target, self.n_draws, self.rng, self.say = target, n_draws, rng, say
        self.near = near
        self.climbed: Found | None = None
        self.found: Coverage

    def run(self):
        """Climb to modes, and draw around them.

        Of many unknowns with one mode, of several where searches fail, and of a hierarchy, chains
        of NUTS are run, and once more where they have too few effective draws: as long as that
        takes.  Where they do not converge, searches go on from them; but not for a hierarchy, which
        has a neck that no proposal covers: its chains are run once more in shorter steps.
        """
        target = self.target
        also = "" if self.near is None else "the draws, and from "
        doing = f"climbing from {also}draws of the prior"
        self.say(f"{doing}: the first {FIRST_CLIMBS} of {MOST_CLIMBS} climbs at most")
        with suppress(ImpossibleError, NoSlopesError):  # the whole may be where a piece is not
            for found in climbs(target, self.rng, self.near):
                self.climbed = found
                self._say_climbs(doing, found)
        looks = self.near is None
        if self.climbed is None or (looks and is_strange(target, self.modes)):
            self._grow()
        assert self.climbed is not None
        if looks and is_strange(target, self.modes):
            doing = "climbing from more draws of the prior"
            self.say(doing)
            for found in further_climbs(target, self.climbed, self.rng):
                self.climbed = found
                self._say_climbs(doing, found)
                if not is_strange(target, self.modes):
                    break
        is_hierarchy, n = bool(target.spreads), len(target.names)
        around: Mixture | None = None
        by_chains = (n >= SEVERAL or is_hierarchy) and len(self.modes.height) == 1
        if by_chains and n < MANY and not is_hierarchy:
            self._search(attempts=ATTEMPTS)
            if self.found.is_reliable:
                return
        if by_chains:
            self.say("sampling by NUTS")
            with suppress(RuntimeError):  # where they make no headway searches may
                posterior, start = self._compiled()
                self.found = self._sampled(posterior, start)
                longer = self._times_longer()
                if not self.found.is_reliable and (is_hierarchy or longer <= LONGEST):
                    steps = {"target_accept": ACCEPTED} if is_hierarchy else {}
                    self.found = self._sampled(posterior, start, min(longer, LONGEST), **steps)
                if is_hierarchy or self.found.is_reliable:
                    return
                around = fit_mixture(self.found.weighted.points, self.rng)
        self._search(around=around)

    def _search(self, **settings):
        """Draw around modes by importance sampling."""
        self.found = cover(
            self.target, self.modes, self.n_draws, self.rng,
            say=lambda words: self.say(f"searching: {words}"), **settings,
        )  # fmt: skip

    def _say_climbs(self, doing: str, found: Found):
        """Say how many climbs there were, of how many at most, and where they led."""
        n, n_modes = len(found.ends.height), len(found.modes.height)
        modes = "a mode" if n_modes == 1 else f"{n_modes} modes"
        self.say(f"{doing}: {n} of {max(n, MOST_CLIMBS)} climbs at most, to {modes}")

    def _say_chains(self, chains: Sequence):
        """Say how many draws of all chains there are, with those of their adaptation."""
        n, of = sum(one.finished_draws for one in chains), sum(one.total_draws for one in chains)
        self.say(f"sampling by NUTS: {n} of {of} draws of {len(chains)} chains")

    @property
    def modes(self) -> Local:
        """The modes that were climbed to."""
        assert self.climbed is not None
        return self.climbed.modes

    def _compiled(self) -> tuple[CompiledPosterior, Laplace]:
        """Return the exact posterior, compiled for chains, and its mode."""
        exact = exact_model(self.target.model, rtol=ROUGHLY)
        centre_in_part(exact, self._centred)
        for name, value in self.target.natural(self.modes.point[0]).items():
            set_start(exact[name], value)
        posterior = compile_posterior(exact)
        return posterior, posterior.find_mode(self.rng)

    @cached_property
    def _centred(self) -> dict[str, NDArray[np.float64]]:
        """How far members of populations are centred, by name; see :mod:`.coordinates`."""
        target, point = self.target, self.modes.point[:1]
        variance = np.diagonal(self.modes.covariance[0])
        levels, variances = target.unconstrained(point), target.unconstrained(variance[None])
        at = {name: value[None, None] for name, value in target.natural(point[0]).items()}
        here = from_dict({"posterior": at})["posterior"].dataset
        centred = {}
        for rv in members(target.model, {target.model[name] for name in target.spreads}):
            name = str(rv.name)
            (center,), (spread,) = target.at_draws(here, rv.owner.inputs[-2:])
            centred[name] = shares_of_data(levels[name][0], variances[name][0], center, spread)
        return centred

    def _times_longer(self) -> int:
        """Return how much longer chains have to be for twice the effective draws that suffice."""
        n_effective = max(self.found.weighted.n_effective, 1)
        return max(LONGER, int(np.ceil(2 * EFFECTIVE / n_effective)))

    def _sampled(
        self, posterior: CompiledPosterior, start: Laplace, longer: int = 1, **settings: float
    ) -> Coverage:
        """Run chains of NUTS, so many times as long."""
        n_draws = longer * self.n_draws // N_CHAINS
        run = posterior.sample(
            start, self.rng, draws=n_draws, tune=None, chains=N_CHAINS, cores=1,
            progress=self._say_chains, **settings,
        )  # fmt: skip
        draws, stats = run["posterior"].dataset, run["sample_stats"].dataset
        phi, height = self.target.coordinates(draws), stats["logp"].to_numpy()
        graphs = [
            log_volume(centred, self.target.model[name].owner.inputs[-1])
            for name, centred in self._centred.items()
        ]
        for volume in self.target.at_draws(draws, graphs):  # of z, in the place of phi
            height = height - volume.reshape(*height.shape, -1).sum(axis=-1)
        n_divergences = int(stats["diverging"].sum())
        chains = phi.reshape(*height.shape, -1)
        return sampled(self.target, self.modes, chains, height, n_divergences)

    def _grow(self):
        """Climb with a growing horizon, too."""
        self.say("climbing with a growing horizon")
        target, known = self.target, None if self.climbed is None else self.climbed
        with suppress(ImpossibleError, NoSlopesError):
            known = grown(target, self.rng, known)
        if known is None:
            raise ValueError(_in_no_solution(target, self.rng))
        self.climbed = known

    def approximate(self):
        """Weigh draws of the modes' normal approximations: the best that a stopped search has.

        Before there are modes, of that of the highest point.
        """
        self.target.deadline = np.inf
        if self.climbed is None:
            widths = self.target.drawn(N_PRIOR, self.rng).std(axis=0)
            local = look_around(self.target, self.target.highest[1][None], np.diag(widths)[None])
            self.climbed = Found.of(rescaled(local), widths)
        self.found = weighed_once(self.target, self.modes, self.rng)

    def resampled(self) -> NDArray[np.int64]:
        """Return the places of draws of equal weight."""
        return self.found.weighted.resampled(self.n_draws, self.rng)

    def judged(self, stopped: str = "") -> Diagnostics:
        """Return what the verdict is made of; what stopped the search withholds it."""
        assert self.climbed is not None
        self.found.disagreement.index = [*self.target.names, "evidence"]
        return diagnosed(self.target, self.found, self.climbed, stopped)

    def drawn(self, stopped: str = "") -> Drawn:
        """Return draws, of equal weight, with a verdict."""
        target, found, names = self.target, self.found, self.target.names
        places, points = self.resampled(), found.weighted.points
        idata = target.idata(points[places], self.rng)
        idata["searches"] = xr.DataTree(searched(found, names))
        handed_on = points[list(dict.fromkeys(places))[:N_HANDED_ON]]
        starts = target.initial_points(handed_on)
        covariance = pd.DataFrame(found.covariance, names, names)
        diagnostics = self.judged(stopped)
        return Drawn(found, places, idata, diagnostics, covariance, starts)


def verdict_of(diagnostics: Diagnostics) -> str:
    """Return a verdict in words, with what it says nothing of, or what to do."""
    return f"{diagnostics.in_words()} {UNSEEN if diagnostics.passed else TRY}"


def is_strange(target: ExactPosterior, modes: Local) -> bool:
    """Tell whether residuals at the highest mode are autocorrelated, or have outliers."""
    left = residuals(target, modes.point[0])
    return any(one.is_autocorrelated or one.have_outlier for one in left)


def _in_no_solution(target: ExactPosterior, rng: np.random.Generator) -> str:
    """Say why there is nowhere to climb from: at the model's start, or at a draw of the prior."""
    points = np.concatenate([target.starting_at()[None], target.drawn(N_EXAMINED, rng)])
    is_possible = np.isfinite(target(points))
    point = points[is_possible][0] if is_possible.any() else points[0]
    at = {label: float(f"{v[0]:.3g}") for label, v in target.scalars(point[None]).items()}
    if is_possible.any():
        return (
            "the exact density has no finite derivatives at draws of the prior, so that nothing "
            f"climbs from there. At {at}: {target.without_slope(point)}"
        )
    why = target.impossible(point)
    where = f" From {at}: {why}" if why else ""
    return (
        "the exact density is zero at all draws of the prior: the ODE cannot be integrated from "
        f"there, or the likelihood excludes them.{where} Check the priors."
    )

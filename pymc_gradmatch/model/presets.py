"""Presets: settings of the matched model, and what they make of data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypedDict

import numpy as np
from numpy.typing import ArrayLike
from pytensor.tensor import TensorVariable

from pymc_gradmatch.gp import (
    AnyStateGP,
    CovFunction,
    Data,
    Parameterization,
    StateGP,
    fit_data,
    unfitted,
)
from pymc_gradmatch.model.given import Given
from pymc_gradmatch.model.refinement import grid_of, recentre, refine, refine_together


class Settings(TypedDict, total=False):
    """Settings of :func:`build_model` that a preset decides where they are not given."""

    cov: str | CovFunction | Sequence[str | CovFunction]
    shared: bool
    gamma: ArrayLike | TensorVariable
    grid: int | ArrayLike
    amplitude: ArrayLike
    recentred: bool
    sigma: str | TensorVariable | ArrayLike
    parameterization: Parameterization
    state_box: float


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a preset makes of data and settings."""

    gp: AnyStateGP
    gamma: Any
    start: Mapping[str, Any]
    """Parameters that samplers start from; the others start where their priors say."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings with their defaults, and what is made of them: here the paper's."""

    cov: str | CovFunction | Sequence[str | CovFunction] = "ExpQuad"
    shared: bool = False
    gamma: Any = 0.3
    grid: int | ArrayLike | None = None
    amplitude: ArrayLike | None = None
    recentred: bool | None = None
    sigma: Any = "fixed"
    parameterization: Parameterization = "centered"
    state_box: float | None = None

    is_matched: ClassVar[bool] = True
    """Whether states match slopes: what they are in the exact posterior is the solution."""

    @property
    def noise(self) -> Any:
        """Sigma, where it is known: neither a word nor a prior."""
        return None if isinstance(self.sigma, str | TensorVariable) else self.sigma

    def fit(self, data: Data, rng: np.random.Generator) -> StateGP:
        """Fit the Gaussian processes of one experiment."""
        return fit_data(data, cov=self.cov, shared=self.shared, random_seed=rng)

    def prepare(
        self,
        parts: Sequence[Given],
        gp: AnyStateGP,
        priors: Sequence[Mapping[str, TensorVariable]],
        is_local: Sequence[bool],
        rng: np.random.Generator,
        progressbar: bool,
    ) -> Prepared:
        """Choose grids, amplitudes and prior means.

        Parameters
        ----------
        parts : sequence of Given
            Each experiment.
        gp : StateGP or StateGPs
            Fits to the data.
        priors : sequence of mapping
            Scalar priors of each experiment.
        is_local : sequence of bool
            Which parameters each experiment has for itself.
        """
        gp = gp.of_members([self._on_grid(*one) for one in zip(parts, gp.members, strict=True)])
        if not self.recentred:
            return Prepared(gp, self.gamma, {})
        if isinstance(self.gamma, TensorVariable):
            msg = (
                "gamma is a variable; recentred=True expects numbers. Call gm.recentre with "
                "numbers, and pass its gp and your gamma."
            )
            raise ValueError(msg)  # noqa: TRY004  not the type is wrong, the pair is
        [one], [prior], [member] = parts, priors, gp.members
        found = recentre(
            one.ode, member, priors=prior, gamma=self.gamma, likelihood=one.likelihood,
            start=one.known, sigma=one.noise, random_seed=rng, progressbar=progressbar,
        )  # fmt: skip
        return Prepared(found.gp, self.gamma, found.theta)

    def _on_grid(self, one: Given, gp: StateGP) -> StateGP:
        gp = gp if self.grid is None else gp.with_grid(self.grid)
        gp = gp.with_breaks(one.ode.jumps, *one.ode.steps)
        return gp if self.amplitude is None else gp.with_amplitude(self.amplitude)


@dataclass(frozen=True, kw_only=True)
class RefinedPreset(Preset):
    """Grid, kernels, prior mean and gamma by the rule of :func:`~pymc_gradmatch.refine`."""

    cov: str | CovFunction | Sequence[str | CovFunction] = "Matern52"
    gamma: Any = None
    sigma: Any = "random"

    def fit(self, data: Data, rng: np.random.Generator) -> StateGP:
        """Fit the Gaussian processes, of which the rule takes sigma and nothing else."""
        if data.is_sparse.all():
            return unfitted(data)
        return fit_data(data, cov=self.cov, shared=self.shared, random_seed=rng, only_sigma=True)

    def prepare(
        self,
        parts: Sequence[Given],
        gp: AnyStateGP,
        priors: Sequence[Mapping[str, TensorVariable]],
        is_local: Sequence[bool],
        rng: np.random.Generator,
        progressbar: bool,
    ) -> Prepared:
        """Apply the rule; a given grid or gamma stands."""
        if self.amplitude is not None or self.recentred is not None:
            msg = "preset 'refined' sets amplitude and recentred itself; expected neither."
            raise ValueError(msg)
        if isinstance(gp, StateGP):
            [one], [prior] = parts, priors
            found = refine(
                one.ode, gp, priors=prior, likelihood=one.likelihood, start=one.known,
                sigma=one.noise, grid=self.grid, random_seed=rng, progressbar=progressbar,
            )  # fmt: skip
            start = found.theta
            gp, gamma = found.gp, found.gamma
        else:
            if not (self.grid is None or isinstance(self.grid, int)):
                msg = (
                    "with experiments preset 'refined' expects a whole number of grid steps "
                    "between observations, if any grid."
                )
                raise ValueError(msg)
            together = refine_together(
                [one.ode for one in parts], gp, priors=priors, is_local=is_local,
                likelihoods=[one.likelihood for one in parts],
                starts=[one.known for one in parts],
                grid=self.grid, random_seed=rng, progressbar=progressbar,
            )  # fmt: skip
            gp, gamma, start = together
        return Prepared(gp, gamma if self.gamma is None else self.gamma, start)


@dataclass(frozen=True, kw_only=True)
class UnfittedPreset(RefinedPreset):
    """The data and the grid alone: all that the exact posterior has of Gaussian processes."""

    is_matched: ClassVar[bool] = False

    def fit(self, data: Data, rng: np.random.Generator) -> StateGP:
        """Return Gaussian processes that no data have been used for."""
        return unfitted(data)

    def prepare(self, parts: Sequence[Given], gp: AnyStateGP, *others) -> Prepared:
        """Lay out the rule's grids; a given one stands."""
        members = [
            member.with_grid(grid_of(member) if self.grid is None else self.grid).with_breaks(
                one.ode.jumps, *one.ode.steps
            )
            for one, member in zip(parts, gp.members, strict=True)
        ]
        return Prepared(gp.of_members(members), self.gamma, {})


PRESETS = {"fgpgm": Preset(), "refined": RefinedPreset()}


def preset_of(name: str, settings: Mapping[str, Any]) -> Preset:
    """Return a preset with the settings that are given, None being as good as none."""
    if name not in tuple(PRESETS):
        msg = f"preset is {name!r}; expected one of {list(PRESETS)}."
        raise ValueError(msg)
    known = [field.name for field in fields(Preset)]
    unknown = [setting for setting in settings if setting not in known]
    if unknown:
        msg = f"build_model has no argument {' or '.join(map(repr, unknown))}; expected {known}."
        raise TypeError(msg)
    given = {setting: value for setting, value in settings.items() if value is not None}
    return replace(PRESETS[name], **given)

"""Presets: settings of the gradient-matching model, and the processes that they lead to."""

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
    fits_states,
    unfitted,
)
from pymc_gradmatch.model.given import CheckedExperiment, Fits
from pymc_gradmatch.model.layout import grid_of
from pymc_gradmatch.model.refinement import refine_experiments


class Settings(TypedDict, total=False):
    """Settings of :func:`build_model` that a preset decides where they are not given."""

    cov: str | CovFunction | Sequence[str | CovFunction]
    shared: bool
    gamma: ArrayLike | TensorVariable
    grid: int | ArrayLike
    amplitude: ArrayLike
    sigma: str | TensorVariable | ArrayLike
    parameterization: Parameterization


@dataclass(frozen=True, eq=False)
class Prepared:
    """Gaussian processes and gamma of a model, before it is written."""

    gp: AnyStateGP
    gamma: Any
    start: Mapping[str, Any]
    """Initial values of parameters; others have those of their priors."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The paper's settings, with sigma unknown, and how they are applied to fits."""

    cov: str | CovFunction | Sequence[str | CovFunction] = "ExpQuad"
    shared: bool = False
    gamma: Any = 0.3
    grid: int | ArrayLike | None = None
    amplitude: ArrayLike | None = None
    sigma: Any = "random"
    parameterization: Parameterization = "centered"

    has_mismatch: ClassVar[bool] = True
    """Whether the model has the mismatch of slopes; the exact posterior has none."""

    @property
    def noise(self) -> Any:
        """Sigma where it is known, else None."""
        return None if isinstance(self.sigma, str | TensorVariable) else self.sigma

    def check(self, n_states: int):
        """Raise unless sigma is one of the settings that there are."""
        if isinstance(self.sigma, TensorVariable):
            if not fits_states(self.sigma, n_states):
                msg = (
                    f"the prior of sigma has shape {self.sigma.type.shape}; expected one number, "
                    f"or one for each of {n_states} states."
                )
                raise ValueError(msg)
        elif isinstance(self.sigma, str) and self.sigma not in ("fixed", "random"):
            msg = (
                f"sigma is {self.sigma!r}; expected 'fixed', 'random', a prior in the data's "
                "units, for example pm.HalfNormal.dist(0.5), or known standard deviations."
            )
            raise ValueError(msg)

    def fit(self, data: Data, rng: np.random.Generator) -> StateGP:
        """Fit the Gaussian processes of one experiment."""
        return fit_data(data, cov=self.cov, shared=self.shared, random_seed=rng)

    def prepare(self, fits: Fits, rng: np.random.Generator, progressbar: bool) -> Prepared:
        """Choose grids, amplitudes and prior means."""
        each = zip(fits.parts, fits.gp.members, strict=True)
        return Prepared(fits.gp.with_members([self._on_grid(*one) for one in each]), self.gamma, {})

    def _on_grid(self, one: CheckedExperiment, gp: StateGP) -> StateGP:
        gp = gp if self.grid is None else gp.with_grid(self.grid)
        gp = gp.with_breaks(one.ode.jumps, *one.ode.steps)
        return gp if self.amplitude is None else gp.with_amplitude(self.amplitude)


@dataclass(frozen=True, kw_only=True)
class RefinedPreset(Preset):
    """Grid, kernels, prior mean and gamma by the rule of :func:`~pymc_gradmatch.refine`."""

    cov: str | CovFunction | Sequence[str | CovFunction] = "Matern52"
    gamma: Any = None

    def fit(self, data: Data, rng: np.random.Generator) -> StateGP:
        """Fit sigma, which is all that the rule uses of a fit."""
        if data.is_sparse.all():
            return unfitted(data)
        return fit_data(data, cov=self.cov, shared=self.shared, random_seed=rng, only_sigma=True)

    def prepare(self, fits: Fits, rng: np.random.Generator, progressbar: bool) -> Prepared:
        """Apply the rule, with a grid or gamma if given."""
        if self.amplitude is not None:
            msg = "preset 'refined' sets the amplitude itself; expected none."
            raise ValueError(msg)
        gp = fits.gp
        if gp.names and not (self.grid is None or isinstance(self.grid, int)):
            msg = (
                "with experiments preset 'refined' expects a whole number of grid steps between "
                "observations, if any grid."
            )
            raise ValueError(msg)
        found = refine_experiments(fits, grid=self.grid, random_seed=rng, progressbar=progressbar)
        refined = gp.with_members([problem.gp for problem in found.problems])
        if self.gamma is not None:
            return Prepared(refined, self.gamma, found.theta)
        gammas = [problem.gamma for problem in found.problems]
        return Prepared(refined, np.array(gammas) if gp.names else gammas[0], found.theta)


@dataclass(frozen=True, kw_only=True)
class UnfittedPreset(RefinedPreset):
    """Data and grid without a fit, for the exact posterior."""

    has_mismatch: ClassVar[bool] = False

    def fit(self, data: Data, rng: np.random.Generator) -> StateGP:
        """Return Gaussian processes that are not fitted."""
        return unfitted(data)

    def prepare(self, fits: Fits, rng: np.random.Generator, progressbar: bool) -> Prepared:
        """Return the grids of solutions, or the given one."""
        grids = [grid_of(gp) if self.grid is None else self.grid for gp in fits.gp.members]
        members = [
            gp.with_grid(grid).with_breaks(one.ode.jumps, *one.ode.steps)
            for one, gp, grid in zip(fits.parts, fits.gp.members, grids, strict=True)
        ]
        return Prepared(fits.gp.with_members(members), self.gamma, {})


PRESETS = {"fgpgm": Preset(), "refined": RefinedPreset()}


def preset_of(name: str, settings: Mapping[str, Any]) -> Preset:
    """Return a preset with the settings that are given and not None."""
    if name not in tuple(PRESETS):
        msg = f"preset is {name!r}; expected one of {list(PRESETS)}."
        raise ValueError(msg)
    known = [field.name for field in fields(Preset)]
    unknown = [setting for setting in settings if setting not in known]
    if unknown:
        msg = (
            f"there is no argument {' or '.join(map(repr, unknown))}; expected priors, "
            "experiments, likelihood, scales, inputs or start, as gm.fit and gm.build_model have "
            f"them, or one of the settings {known}."
        )
        raise TypeError(msg)
    given = {setting: value for setting, value in settings.items() if value is not None}
    return replace(PRESETS[name], **given)

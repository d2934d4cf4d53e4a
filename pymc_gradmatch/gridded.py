"""Data on a grid of times: where they lie on it, and what the states are measured by."""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pymc_gradmatch.series import (
    as_observations,
    as_times,
    grid_around,
    mean_and_scale,
    read_only,
    state_names,
)

__all__ = ["GriddedData"]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class GriddedData:
    """Observations at some times of a grid, and the mean and scale of the states there.

    What :class:`~pymc_gradmatch.StateGP` is built on.  Objects are immutable.

    Parameters
    ----------
    t : array_like of float
        Times, shape ``(time,)``, sorted, at least three.
    y : array_like of float
        Observations, shape ``(time, state)``.
    standardize : bool, default True
        Whether mean and scale are those of the data, or zero and one.

    Attributes
    ----------
    t : array of float
        The grid, at first the times of the observations.
    observed : array of int
        Where in the grid the observations are, shape ``(observation,)``.
    states : tuple
        Names of the states.
    mean, scale : array of float
        What standardises the data, shape ``(state,)``, in the data's units.
    prior_mean, prior_slope : array of float
        The mean around which states vary and its derivative, shape ``(time,
        state)``, in the data's units, and per unit of time.

    Raises
    ------
    ValueError
        If times or observations cannot be used; the message says why.
    """

    t: NDArray[np.float64]
    y: NDArray[np.float64]
    observed: NDArray[np.intp]
    states: tuple
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    prior_mean: NDArray[np.float64]
    prior_slope: NDArray[np.float64]

    def __init__(self, t: ArrayLike, y: ArrayLike, *, standardize: bool = True):
        times = as_times(t)
        observations = as_observations(y, times)
        mean, scale = mean_and_scale(observations, standardize)
        self._fill(
            t=times,
            y=observations,
            observed=np.arange(len(times)),
            states=state_names(y, observations.shape[1]),
            mean=mean,
            scale=scale,
            **_constant_mean(mean, len(times)),
        )

    def _fill(self, **attributes):
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def _changed(self, **changes) -> Self:
        copy = object.__new__(type(self))
        copy._fill(**{field.name: getattr(self, field.name) for field in fields(self)} | changes)
        return copy

    @property
    def t_observed(self) -> NDArray[np.float64]:
        """Times of the observations, shape ``(observation,)``."""
        return self.t[self.observed]

    def at_observations(self, x):
        """Return the rows of x, ``(..., time, state)``, that belong to the observations.

        Works on arrays and on PyTensor variables alike: what the likelihood is about.
        """
        if len(self.observed) == len(self.t):
            return x
        steps = np.diff(self.observed)
        if (steps == steps[0]).all():
            first, last = int(self.observed[0]), int(self.observed[-1])
            return x[..., first : last + 1 : int(steps[0]), :]
        return x[..., self.observed, :]

    def with_grid(self, grid: int | ArrayLike) -> Self:
        r"""Return a copy whose states live on a finer grid than the observations.

        Theorem 1 holds on any grid; observations are of some of its times.

        Parameters
        ----------
        grid : int or array_like of float
            Steps between one observation and the next (1: the observation
            times alone), or sorted times with the observation times among them.

        Raises
        ------
        ValueError
            If an observation time is missing, or the prior mean is a
            trajectory, which is known on its own grid only.
        """
        if (self.prior_slope != 0).any() or (self.prior_mean != self.mean).any():
            msg = "the prior mean is a trajectory on the present grid; call with_grid before it."
            raise ValueError(msg)
        times, observed = grid_around(self.t_observed, grid)
        return self._changed(t=times, observed=observed, **_constant_mean(self.mean, len(times)))

    def with_mean(self, x: ArrayLike, slope: ArrayLike) -> Self:
        r"""Return a copy whose prior mean is a trajectory m(t) in place of a constant.

        Theorem 1 holds for any mean: :math:`N(x \mid m, C)` and
        :math:`N(f(x, \theta) \mid \dot m + D (x - m), A + \gamma I)`.

        Parameters
        ----------
        x, slope : array_like of float
            The trajectory on the grid and its derivative, shape ``(time,
            state)``, in the data's units, and per unit of time.
        """
        trajectories = []
        for name, values in {"x": x, "slope": slope}.items():
            array = read_only(values)
            expected = (len(self.t), len(self.states))
            if array.shape != expected or not np.isfinite(array).all():
                msg = (
                    f"{name} has shape {array.shape}; expected finite values of shape (time, "
                    f"state) = {expected}, on the grid gp.t."
                )
                raise ValueError(msg)
            trajectories.append(array)
        return self._changed(prior_mean=trajectories[0], prior_slope=trajectories[1])


def _constant_mean(mean: NDArray[np.float64], n_times: int) -> dict[str, NDArray[np.float64]]:
    shape = (n_times, len(mean))
    return {
        "prior_mean": read_only(np.broadcast_to(mean, shape)),
        "prior_slope": read_only(np.zeros(shape)),
    }

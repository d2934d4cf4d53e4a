"""Gaussian processes of one data set."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
import pymc as pm
from numpy.typing import ArrayLike, NDArray
from pytensor.compile import SharedVariable
from pytensor.tensor import TensorVariable

from pymc_gradmatch.arguments import as_numbers
from pymc_gradmatch.gp.data import (
    Data,
    as_nugget,
    as_positive,
    as_sigma,
    breaks_within,
    grid_with,
    grid_with_breaks,
    piecewise_mean,
    read_only,
    refined_grid,
)
from pymc_gradmatch.gp.kernels import check_kernels, describe
from pymc_gradmatch.gp.processes import Processes, Regression, StateGPBase


@dataclass(frozen=True, init=False, repr=False, eq=False)
class StateGP(StateGPBase):
    r"""One Gaussian process per state: data, kernels with fixed hyperparameters, and noise.

    .. math::

        y_k = x_k + \varepsilon_k, \quad \varepsilon_k \sim N(0, \sigma_k^2 I), \quad
        (x_k - m_k) / s_k \sim N(0, C_k)

    with the mean :math:`m_k` and standard deviation :math:`s_k` of the data.
    :func:`~pymc_gradmatch.fit_gp` makes one by maximum marginal likelihood;
    this constructor takes given kernels.  Objects are immutable.

    Parameters
    ----------
    t : array_like of float
        Times, shape ``(time,)``, sorted, at least three.
    y : array_like of float
        Observations, shape ``(time, state)``, NaN where nothing was measured; ``pm.Data``
        are read once.  A table's column names become the names of the states.
    covs : sequence of pymc.gp.cov.BaseCovariance
        One kernel per state, of one input dimension, on time in the units of
        ``t`` and on standardised data.  Hyperparameters are numbers; PyTensor keeps a
        literal such as ``0.5`` in single precision, ``np.float64(0.5)`` in double.
    sigma : array_like of float
        Standard deviation of the observation noise in the data's units, one
        number or one per state.
    nugget : float, default 1e-4
        Added to the diagonal of every C, in standardised units squared; acts
        like noise of standard deviation ``sqrt(nugget)`` in the states.
    states : sequence of str, optional
        Names of the states, in the order of the kernels: of an array's columns, or
        if a table has its columns in another order.
    scales : mapping of str to float, optional
        Roughly the standard deviation of states with too few observations.
    standardize : bool, default True
        Subtract the mean and divide by the standard deviation (ddof 0) of each
        state's data.  If False, kernels apply to the data as they are.
    positive : bool or sequence of bool, default False
        Which states are positive: ``ode.is_positive``.  The Gaussian process, sigma, mean,
        scale, prior mean and posterior mean of such a state are those of its logarithm; ``y``
        and :meth:`prior` are in the data's units.

    Attributes
    ----------
    data : Data
        Times, observations, and names, mean and scale of the states.
    processes : Processes
        Kernels on the grid, with C, D and A.
    prior_mean, prior_slope : array of float
        The prior mean of the states and its derivative, shape ``(time, state)``, in the
        data's units, and per unit of time.
    steps : (array, array)
        Factor and amount of each state at :attr:`breaks`, see :meth:`with_breaks`.

    Raises
    ------
    ValueError
        If times, observations, kernels, sigma or nugget cannot be used.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> t = np.linspace(0, 3, 7)
    >>> y = np.stack([np.sin(t), np.cos(t)], axis=1)
    >>> gp = gm.StateGP(t, y, covs=[pm.gp.cov.ExpQuad(1, ls=1.2)] * 2, sigma=0.1)
    >>> gp.operators().D.shape
    (2, 7, 7)
    """

    data: Data
    processes: Processes
    sigma: NDArray[np.float64]
    prior_mean: NDArray[np.float64]
    prior_slope: NDArray[np.float64]
    steps: tuple[NDArray[np.float64], NDArray[np.float64]]
    names: tuple[str, ...] = ()
    inputs: tuple[Mapping[str, Any] | None, ...] = (None,)

    def __init__(
        self,
        t: ArrayLike,
        y: ArrayLike,
        covs: Sequence[pm.gp.cov.BaseCovariance],
        sigma: ArrayLike,
        *,
        nugget: ArrayLike = 1e-4,
        states: Sequence[str] | None = None,
        scales: Mapping[Any, float] | None = None,
        standardize: bool = True,
        positive: bool | Sequence[bool] = False,
    ):
        data = Data.of(
            t, y, states=states, scales=scales, standardize=standardize, positive=positive
        ).scaled()
        nuggets = as_nugget(nugget, data.states)
        checked = check_kernels(covs, len(data.states))
        processes = Processes(data.t, checked, nuggets)
        self._set(data, processes, as_sigma(sigma, data.states))
        processes.check()

    @classmethod
    def of(
        cls,
        data: Data,
        processes: Processes,
        sigma: NDArray[np.float64],
        steps: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None,
    ) -> Self:
        """Return an object of checked parts; the prior mean is that of the data."""
        gp = object.__new__(cls)
        gp._set(data, processes, sigma, steps)
        return gp

    def _set(self, data: Data, processes: Processes, sigma, steps=None):
        shape = len(processes.breaks), len(data.states)
        steps = (np.ones(shape), np.zeros(shape)) if steps is None else steps
        mean = piecewise_mean(data.mean, processes.t, processes.breaks, steps, data.positive)
        vars(self).update(
            data=data,
            processes=processes,
            sigma=sigma,
            steps=steps,
            prior_mean=read_only(mean),
            prior_slope=read_only(np.zeros(mean.shape)),
        )

    def _with(self, **changes) -> Self:
        changed = copy(self)
        vars(changed).update(changes)
        return changed

    @property
    def t(self) -> NDArray[np.float64]:
        """The grid of times of the states, at first those of the observations."""
        return self.processes.t

    @property
    def y(self) -> NDArray[np.float64]:
        """The observations, shape ``(observation, state)``, NaN where a state was not observed."""
        return self.data.y

    @property
    def members(self) -> tuple[Self, ...]:
        """The Gaussian processes of each experiment; here this object alone."""
        return (self,)

    def with_members(self, members: Sequence[Self]) -> Self:
        """Return the only one; :class:`StateGPs` stack them."""
        [one] = members
        return one

    @property
    def observations(self) -> NDArray[np.float64]:
        """The observations in the shape that :meth:`at_observations` returns."""
        return self.at_observations(self.y)

    @property
    def mean(self) -> NDArray[np.float64]:
        """What is subtracted from each state, shape ``(state,)``, in the data's units."""
        return self.data.mean

    @property
    def scale(self) -> NDArray[np.float64]:
        """What each state is divided by, shape ``(state,)``, in the data's units."""
        return self.data.scale

    @property
    def covs(self) -> tuple[pm.gp.cov.BaseCovariance, ...]:
        """One kernel per state."""
        return self.processes.covs

    @property
    def nugget(self) -> NDArray[np.float64]:
        """What is added to the diagonal of every C, shape ``(state,)``."""
        return self.processes.nugget

    @property
    def t_observed(self) -> NDArray[np.float64]:
        """Times of the observations, shape ``(observation,)``."""
        return self.data.t

    @property
    def observed(self) -> NDArray[np.intp]:
        """Indices of the observations in the grid, shape ``(observation,)``."""
        return np.searchsorted(self.t, self.t_observed)

    def at_observations(self, x):
        r"""Return states, noise or data at the observations, as a likelihood needs them.

        The rows of x at observation times; one entry per observation, time by time, if
        values are missing:

        .. code-block:: python

            noise = gp.at_observations(sigma)
            pm.Normal("y", gp.at_observations(x), noise, observed=gp.observations)

        Parameters
        ----------
        x : array_like of float or TensorVariable
            States on the grid, shape ``(..., time, state)``; numbers per observation time
            and state, such as the data; or numbers per state, or one for all, such as sigma,
            which are returned unchanged if the data are complete.

        Returns
        -------
        array of float or TensorVariable
            Shape ``(..., observation time, state)``, or ``(..., observation)`` if values
            are missing, with coords :attr:`observation_labels`.

        Examples
        --------
        >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
        >>> t = np.linspace(0, 3, 7)
        >>> y = np.stack([np.sin(t), np.cos(t)], axis=1)
        >>> y[::2, 1] = np.nan
        >>> gp = gm.StateGP(t, y, [pm.gp.cov.ExpQuad(1, ls=1.2)] * 2, sigma=[0.1, 0.2])
        >>> with pm.Model(coords={"observation": gp.observation_labels}):
        ...     x = gp.prior("x")
        ...     sigma = pm.HalfNormal("sigma", 1, initval=gp.sigma, dims="state")
        ...     noise = gp.at_observations(sigma)
        ...     y = pm.Normal("y", gp.at_observations(x), noise, observed=gp.observations)
        >>> y.type.shape
        (10,)
        """
        sizes, (_, states) = lengths_of(x), self.data.indices
        if len(sizes) == 0:
            return x
        if len(sizes) == 1:
            _check_per_state(sizes[0], len(self.states))
            is_one_for_all = sizes[0] == 1 < len(self.states)
            return x if self.data.is_complete or is_one_for_all else x[states]
        at_times = x if self._is_at_observations(sizes) else self.at_times(x)
        return at_times if self.data.is_complete else at_times[..., *self.data.indices]

    def _is_at_observations(self, sizes: Sequence[int | None]) -> bool:
        """Return whether rows belong to the observation times, not to those of the grid."""
        n_grid, n_observed = len(self.t), len(self.t_observed)
        if n_grid != n_observed and sizes[-2] not in (n_grid, n_observed):
            msg = (
                f"x has shape {(*sizes,)}; expected (..., {n_grid}, state), states on the grid, or "
                f"(..., {n_observed}, state), numbers per observation time. If a length is "
                f"None, specify it: pt.specify_shape(x, ({n_grid}, {len(self.states)}))."
            )
            raise ValueError(msg)
        return sizes[-2] == n_observed != n_grid

    def at_times(self, x):
        """Return the rows of x, ``(..., time, state)``, at the observation times."""
        observed = self.observed
        if len(observed) == len(self.t):
            return x
        steps = np.diff(observed)
        if (steps == steps[0]).all():
            first, last = int(observed[0]), int(observed[-1])
            return x[..., first : last + 1 : int(steps[0]), :]
        return x[..., observed, :]

    @property
    def observation_labels(self) -> list[str]:
        """Labels such as ``prey[0.5]``, coords of what :meth:`at_observations` returns."""
        return self.data.labels(self.states)

    def with_grid(self, grid: int | ArrayLike) -> Self:
        r"""Return a copy with states on a finer grid than the observations.

        Theorem 1 holds on any grid that contains the observation times.

        Parameters
        ----------
        grid : int or array_like of float
            Steps between consecutive observations, or sorted times with the
            observation times among them.

        Raises
        ------
        ValueError
            If an observation time is missing, or the prior mean is a trajectory.
        """
        return self._on(grid, self.processes, self.steps)

    def _on(self, grid: int | ArrayLike, processes: Processes, steps) -> Self:
        plain = piecewise_mean(self.mean, self.t, self.breaks, self.steps, self.data.positive)
        if (self.prior_slope != 0).any() or (self.prior_mean != plain).any():
            msg = "the prior mean is a trajectory on this grid; change the grid before with_mean."
            raise ValueError(msg)
        times = grid_with_breaks(grid_with(self.t_observed, grid), processes.breaks)
        return self.of(self.data, processes.changed(t=times), self.sigma, steps)

    def with_breaks(
        self, times: ArrayLike, factor: ArrayLike = 1.0, amount: ArrayLike = 0.0
    ) -> Self:
        r"""Return a copy whose slopes, and by known steps states, may jump at some times.

        For inputs that jump: ``gp.with_breaks(ode.jumps)``, and with doses
        ``gp.with_breaks(ode.jumps, *ode.steps)``.  Between breaks kernels are unchanged; the
        slopes of different intervals are independent
        (:class:`~pymc_gradmatch.kernels.Broken`).  Each break is added to the grid, with the
        slope to its right, and a time shortly before it, for the slope to its left.
        The prior mean jumps as the states do.

        Parameters
        ----------
        times : array_like of float
            Times outside the grid are ignored; times that differ by rounding are merged.
        factor, amount : array_like of float
            At each of the times a state becomes ``factor * x + amount``, shape ``(break,
            state)``, in the data's units; continuous if not given.

        Raises
        ------
        ValueError
            If the prior mean is a trajectory.
        """
        times = as_numbers(times, "times of breaks").ravel()
        shape = len(times), len(self.states)
        given = (
            np.broadcast_to(as_numbers(factor, "steps"), shape),
            np.broadcast_to(as_numbers(amount, "steps"), shape),
        )
        times, given = breaks_within(self.t, times, given)
        inside = np.union1d(self.breaks, times)
        steps = np.ones((len(inside), shape[1])), np.zeros((len(inside), shape[1]))
        for step, before, after in zip(steps, self.steps, given, strict=True):
            step[np.searchsorted(inside, self.breaks)] = before
            step[np.searchsorted(inside, times)] = after
        if all(map(np.array_equal, steps, self.steps)):
            return self
        # The jump of a dosed state's logarithm depends on the state: the process starts anew
        # there until a solution is the prior mean.
        carried = np.where(self.data.positive & (steps[1] != 0) & (steps[0] != 0), np.nan, steps[0])
        processes = self.processes.changed(breaks=read_only(inside), carried=carried)
        return self._on(self.t, processes, steps)

    @property
    def breaks(self) -> NDArray[np.float64]:
        """Times at which slopes may jump, see :meth:`with_breaks`."""
        return self.processes.breaks

    def with_more_times(self, n_more: int) -> Self:
        """Return a copy on a grid with ``n_more`` times added in the widest gaps."""
        # The times shortly before breaks are added again with the breaks.
        before_breaks = np.searchsorted(self.t, self.breaks) - 1
        times = refined_grid(np.delete(self.t, before_breaks), n_more)
        return self._on(times, self.processes, self.steps)

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
        trajectories = {"x": read_only(x), "slope": read_only(slope)}
        for name, array in trajectories.items():
            expected = self.prior_mean.shape
            if array.shape != expected or not np.isfinite(array).all():
                msg = (
                    f"{name} has shape {array.shape}; expected finite values of shape (time, "
                    f"state) = {expected}, on the grid gp.t."
                )
                raise ValueError(msg)
        x = trajectories["x"]
        factor, amount = self.steps
        processes, dosed = self.processes, self.data.positive & (amount != 0) & (factor != 0)
        if dosed.any():
            left = 1 - amount / self.back_transform(x[np.searchsorted(self.t, self.breaks)])
            processes = processes.changed(carried=np.where(dosed, left, factor))
        return self._with(prior_mean=x, prior_slope=trajectories["slope"], processes=processes)

    def with_covs(self, covs: Sequence[pm.gp.cov.BaseCovariance]) -> Self:
        """Return a copy with other kernels, one per state."""
        checked = check_kernels(covs, len(self.states))
        return self._with(processes=self.processes.changed(covs=checked))

    def with_nugget(self, nugget: ArrayLike) -> Self:
        """Return a copy with another nugget, one number or one per state."""
        nuggets = as_nugget(nugget, self.states)
        return self._with(processes=self.processes.with_nugget(nuggets))

    def with_amplitude(self, factor: ArrayLike) -> Self:
        """Return a copy whose kernels are multiplied by a factor, one number or one per state.

        C without its nugget, and A, are ``factor`` times as large: the prior of states and
        slopes is weaker.
        """
        factors = as_positive(factor, self.states, "factor")
        return self._with(processes=self.processes.multiplied(factors))

    def with_sigma(self, sigma: ArrayLike) -> Self:
        """Return a copy with another noise, in the data's units, one number or one per state."""
        return self._with(sigma=as_sigma(sigma, self.states))

    def slope_variance(self) -> NDArray[np.float64]:
        """Return the prior variance of the slopes, the median over time, shape ``(state,)``.

        In (standardised state / time) squared, the units of gamma.
        """
        return self.processes.slope_variance

    def posterior_mean(self) -> NDArray[np.float64]:
        r"""Return the smoothed states on the grid, shape ``(time, state)``, in the data's units.

        .. math:: m + s\,C_{:o}\,(C_{oo} + \sigma^2 I)^{-1}\,(\tilde y - \tilde m_o)

        where o are the times of the observations.
        """
        return self.prior_mean + self.scale * self._regression().mean

    def posterior_sd(self) -> NDArray[np.float64]:
        r"""Return the standard deviation of the smoothed states, shape ``(time, state)``.

        .. math:: s\,\operatorname{diag}(C - C_{:o}\,(C_{oo} + \sigma^2 I)^{-1}\,C_{o:})^{1/2}

        In the units of :meth:`posterior_mean`, without observation noise.
        """
        return self.scale * np.sqrt(self._regression().variance)

    def log_marginal_likelihood(self) -> NDArray[np.float64]:
        r"""Return log N(y_k | m_k, s_k^2 (C_k + sigma_k^2 I)) of each state's data.

        On the standardised data, without the constant of the scale.
        """
        return self._regression().log_evidence

    def _regression(self) -> Regression:
        residual = (self.data.transformed - self.prior_mean[self.observed]) / self.scale
        return self.processes.regression((self.sigma / self.scale) ** 2, residual, self.observed)

    def summary(self) -> pd.DataFrame:
        """Return a table with one row per state.

        Columns: the kernel (on standardised data), ``sigma``, ``mean`` and
        ``scale`` in the data's units, and the log marginal likelihood of the
        standardised data.
        """
        return pd.DataFrame(
            {
                "kernel": [describe(cov) for cov in self.covs],
                "sigma": self.sigma,
                "mean": self.mean,
                "scale": self.scale,
                "log_marginal_likelihood": self.log_marginal_likelihood(),
            },
            index=pd.Index(self.states, name="state"),
        )


def lengths_of(x) -> tuple[int | None, ...]:
    """Return the shape of numbers or of a variable, None where it is unknown."""
    if isinstance(x, SharedVariable):
        return x.get_value(borrow=True).shape
    return x.type.shape if isinstance(x, TensorVariable) else np.shape(x)


def _check_per_state(length: int | None, n_states: int):
    """Raise unless a vector is one number for all states or one for each."""
    if length not in (None, 1, n_states):
        msg = (
            f"a vector of {length} numbers is given; expected one for each of {n_states} states. "
            "Numbers per observation time have shape (time, state), for example sigma[:, None]."
        )
        raise ValueError(msg)

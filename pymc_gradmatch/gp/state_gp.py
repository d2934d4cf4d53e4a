"""Data, Gaussian processes and noise, all that Algorithm 1 fixes first."""

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
    Residuals,
    around_breaks,
    as_nugget,
    as_positive,
    as_sigma,
    breaks_within,
    divided_further,
    grid_around,
    read_only,
    residuals,
    staircase,
)
from pymc_gradmatch.gp.kernels import check_kernels, describe
from pymc_gradmatch.gp.processes import (
    Parameterization,
    Processes,
    StateProcesses,
    add_states,
)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class StateGP(StateProcesses):
    r"""One Gaussian process per state, with everything fixed that Algorithm 1 fixes first.

    .. math::

        y_k = x_k + \varepsilon_k, \quad \varepsilon_k \sim N(0, \sigma_k^2 I), \quad
        (x_k - m_k) / s_k \sim N(0, C_k)

    with the mean :math:`m_k` and standard deviation :math:`s_k` of the data.
    :func:`~pymc_gradmatch.fit_gp` makes one by maximum marginal likelihood;
    this constructor takes kernels that you already have.  Objects are
    immutable.

    Parameters
    ----------
    t : array_like of float
        Times, shape ``(time,)``, sorted, at least three.
    y : array_like of float
        Observations, shape ``(time, state)``, NaN where nothing was measured.  A
        table's column names become the names of the states.  Of ``pm.Data`` the
        present values are taken.
    covs : sequence of pymc.gp.cov.BaseCovariance
        One kernel per state, of one input dimension, on time in the units of
        ``t`` and on standardised data.  Hyperparameters are numbers, or random
        variables of a model: C, D and A are then graphs of them, factorised at
        every evaluation.  PyTensor keeps a literal such as ``0.5`` in single
        precision, ``np.float64(0.5)`` in double.
    sigma : array_like of float or TensorVariable
        Standard deviation of the observation noise in the data's units, one
        number or one per state; may be random.
    nugget : float, default 1e-4
        Added to the diagonal of every C, in standardised units squared; acts
        like an unseen noise of standard deviation ``sqrt(nugget)``.
    states : sequence of str, optional
        Names of the states, in the order of the kernels: of an array's columns, or
        where a table has its columns in another order.
    scales : mapping of str to float, optional
        Roughly the standard deviation of states that were not observed, or hardly.
    standardize : bool, default True
        Subtract the mean and divide by the standard deviation (ddof 0) of each
        state's data.  If False, kernels apply to the data as they are.
    positive : bool or sequence of bool, default False
        Which states are positive: ``ode.is_positive``.  The Gaussian process of such a state
        is one of its logarithm; sigma, mean, scale, prior mean and posterior mean are that
        logarithm's.  ``y`` and :meth:`prior` are in the data's units all the same.

    Attributes
    ----------
    data : Data
        Times, observations, names of the states, and what standardises them.
    processes : Processes
        Kernels on the grid, with C, D and A.
    prior_mean, prior_slope : array of float
        The mean around which states vary and its derivative, shape ``(time,
        state)``, in the data's units, and per unit of time.
    steps : (array, array)
        Factor and amount of each state at :attr:`breaks`, see :meth:`with_breaks`.

    Raises
    ------
    ValueError
        If times, observations, kernels, sigma or nugget cannot be used; the
        message says why.

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
    sigma: Any
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
        sigma: ArrayLike | TensorVariable,
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
        n_states = len(data.states)
        nuggets = as_nugget(nugget, data.states)
        checked = check_kernels(covs, n_states)
        processes = Processes(data.t, checked, nuggets)
        self._hold(data, processes, as_sigma(sigma, data.states))
        processes.check()

    @classmethod
    def of(
        cls,
        data: Data,
        processes: Processes,
        sigma: Any,
        steps: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None,
    ) -> Self:
        """Put together what has been checked; the prior mean is that of the data."""
        gp = object.__new__(cls)
        gp._hold(data, processes, sigma, steps)
        return gp

    def _hold(self, data: Data, processes: Processes, sigma, steps=None):
        n_breaks, n_states = len(processes.breaks), len(data.states)
        if steps is None:
            steps = np.ones((n_breaks, n_states)), np.zeros((n_breaks, n_states))
        mean = staircase(data.mean, processes.t, processes.breaks, steps, data.positive)
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
        """Itself alone, as of :class:`StateGPs` each experiment's."""
        return (self,)

    def of_members(self, members: Sequence[Self]) -> Self:
        """Return the only one, as of :class:`StateGPs` the same experiments."""
        [one] = members
        return one

    @property
    def labels(self) -> tuple:
        """Labels along the axes of the states before the last, the times of the grid."""
        return (self.t,)

    @property
    def observations(self) -> NDArray[np.float64]:
        """What was observed, in the shape of what :meth:`at_observations` returns of the states."""
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
        """Where in the grid the observations are, shape ``(observation,)``."""
        return np.searchsorted(self.t, self.t_observed)

    def residuals(self, x: NDArray[np.float64], states: Sequence[str]) -> list[Residuals]:
        """Return what states on the grid leave of each one's data, where these are enough."""
        return residuals([(self.data.y, x[self.observed])], states)

    def at_observations(self, x):
        r"""Return what a likelihood of the observations is about: of states, of noise, of data.

        With complete data the rows of x that belong to observations.  With missing
        values one entry per observation, time by time:

        .. code-block:: python

            noise = gp.at_observations(sigma)
            pm.Normal("y", gp.at_observations(x), noise, observed=gp.observations)

        Parameters
        ----------
        x : array_like of float or TensorVariable
            States on the grid, shape ``(..., time, state)``; or numbers per
            observation time and state, such as the data; or per state, such as
            sigma, or one for all, which come back as they are where data are complete.

        Returns
        -------
        array of float or TensorVariable
            Shape ``(..., observation time, state)``, or ``(..., observation)`` where
            values are missing.  :attr:`observation_labels` are coords of these.

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
        sizes, (_, states) = lengths_of(x), self.data.places
        if len(sizes) == 0:
            return x
        if len(sizes) == 1:
            _check_per_state(sizes[0], len(self.states))
            is_one_for_all = sizes[0] == 1 < len(self.states)
            return x if self.data.is_complete or is_one_for_all else x[states]
        at_times = x if self._is_at_observations(sizes) else self.at_times(x)
        return at_times if self.data.is_complete else at_times[..., *self.data.places]

    def _is_at_observations(self, sizes: Sequence[int | None]) -> bool:
        """Tell whether rows belong to times of observations, and not to those of the grid."""
        n_grid, n_observed = len(self.t), len(self.t_observed)
        if n_grid != n_observed and sizes[-2] not in (n_grid, n_observed):
            msg = (
                f"x has shape {(*sizes,)}; expected (..., {n_grid}, state), states on the grid, or "
                f"(..., {n_observed}, state), numbers per observation time. Where a length is "
                f"None, say which: pt.specify_shape(x, ({n_grid}, {len(self.states)}))."
            )
            raise ValueError(msg)
        return sizes[-2] == n_observed != n_grid

    def at_times(self, x):
        """Return the rows of x, ``(..., time, state)``, that belong to times of observations."""
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
        """Labels such as ``prey[0.5]``, coords of what :meth:`at_observations` makes of states."""
        return self.data.labels(self.states)

    def with_grid(self, grid: int | ArrayLike) -> Self:
        r"""Return a copy with states on a finer grid than the observations.

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
        return self._on(grid, self.processes, self.steps)

    def _on(self, grid: int | ArrayLike, processes: Processes, steps) -> Self:
        plain = staircase(self.mean, self.t, self.breaks, self.steps, self.data.positive)
        if (self.prior_slope != 0).any() or (self.prior_mean != plain).any():
            msg = "the prior mean is a trajectory on the present grid; call with_grid before it."
            raise ValueError(msg)
        times = around_breaks(grid_around(self.t_observed, grid), processes.breaks)
        return self.of(self.data, processes.with_grid(times), self.sigma, steps)

    def with_breaks(
        self, times: ArrayLike, factor: ArrayLike = 1.0, amount: ArrayLike = 0.0
    ) -> Self:
        r"""Return a copy whose slopes may jump at some times, and whose states do as is known.

        For inputs that jump: ``gp.with_breaks(ode.jumps)``, and with doses
        ``gp.with_breaks(ode.jumps, *ode.steps)``.  From one break to the next the
        kernels are what they were, and the slopes of different pieces are independent
        (:class:`~pymc_gradmatch.kernels.Broken`).  A break joins the grid, where it has the
        slope to its right, and so does a time shortly before it, for the slope to its left.
        The prior mean jumps as states do, and what deviates from it is carried over.

        Parameters
        ----------
        times : array_like of float
            Those outside of the grid do not count; those that only rounding parts are one.
        factor, amount : array_like of float
            At each of the times a state becomes ``factor * x + amount``, shape ``(break,
            state)``, in the data's units; continuous if not given.

        Raises
        ------
        ValueError
            If the prior mean is a trajectory, which is known on its own grid only.
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
        # The logarithm of a dosed state jumps by what it was before: nothing is carried over
        # until a solution is the prior mean.
        carried = np.where(self.data.positive & (steps[1] != 0) & (steps[0] != 0), np.nan, steps[0])
        processes = self.processes.with_breaks(read_only(inside), carried)
        return self._on(self.t, processes, steps)

    @property
    def breaks(self) -> NDArray[np.float64]:
        """Times at which slopes may jump, see :meth:`with_breaks`."""
        return self.processes.breaks

    def with_more_times(self, n_more: int) -> Self:
        """Return a copy on a grid of so many more times, where it was widest."""
        # The times shortly before breaks come back with the breaks.
        shortly = np.searchsorted(self.t, self.breaks) - 1
        times = divided_further(np.delete(self.t, shortly), n_more)
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
            left = 1 - amount / self.states_of(x[np.searchsorted(self.t, self.breaks)])
            processes = processes.with_breaks(self.breaks, np.where(dosed, left, factor))
        return self._with(prior_mean=x, prior_slope=trajectories["slope"], processes=processes)

    def with_covs(self, covs: Sequence[pm.gp.cov.BaseCovariance]) -> Self:
        """Return a copy with other kernels, one per state."""
        checked = check_kernels(covs, len(self.states))
        return self._with(processes=self.processes.with_covs(checked))

    def with_nugget(self, nugget: ArrayLike) -> Self:
        """Return a copy with another nugget, one number or one per state."""
        nuggets = as_nugget(nugget, self.states)
        return self._with(processes=self.processes.with_nugget(nuggets))

    def with_amplitude(self, factor: ArrayLike) -> Self:
        """Return a copy whose kernels are multiplied by a factor, one number or one per state.

        C without its nugget, and with it A, is ``factor`` times as large: the
        prior is weaker for the states and for their slopes.
        """
        factors = as_positive(factor, self.states, "factor")
        return self._with(processes=self.processes.multiplied(factors))

    def with_sigma(self, sigma: ArrayLike | TensorVariable) -> Self:
        """Return a copy with another noise, in the data's units, one number or one per state."""
        return self._with(sigma=as_sigma(sigma, self.states))

    def slope_variance(self) -> NDArray[np.float64]:
        """Return the prior variance of the slopes, the median over time, shape ``(state,)``.

        In (standardised state / time) squared: what gamma is to be compared with.
        """
        self._check_numbers("slope_variance")
        return self.processes.slope_variance

    def posterior_mean(self) -> NDArray[np.float64]:
        r"""Return the smoothed states on the grid, shape ``(time, state)``, in the data's units.

        .. math:: m + s\,C_{:o}\,(C_{oo} + \sigma^2 I)^{-1}\,(\tilde y - \tilde m_o)

        where o are the times of the observations.  A graph where sigma is one.
        """
        return self.prior_mean + self.scale * self.processes.smoothed(*self._regression)

    def posterior_sd(self) -> NDArray[np.float64]:
        r"""Return how uncertain the smoothed states are, shape ``(time, state)``.

        .. math:: s\,\operatorname{diag}(C - C_{:o}\,(C_{oo} + \sigma^2 I)^{-1}\,C_{o:})^{1/2}

        In the units of :meth:`posterior_mean`, without the noise of observations.
        """
        self._check_numbers("posterior_sd")
        return self.scale * np.sqrt(self.processes.spread(*self._regression))

    def log_marginal_likelihood(self) -> NDArray[np.float64]:
        r"""Return log N(y_k | m_k, s_k^2 (C_k + sigma_k^2 I)) of each state's data.

        On the standardised data, without the constant that the scale brings.
        """
        self._check_numbers("log_marginal_likelihood")
        return self.processes.log_evidence(*self._regression)

    @property
    def _regression(self) -> tuple:
        residual = (self.data.levels - self.prior_mean[self.observed]) / self.scale
        return (self.sigma / self.scale) ** 2, residual, self.observed

    def _check_numbers(self, method: str):
        if isinstance(self.sigma, TensorVariable):
            msg = (
                f"gp.{method} needs numbers, but sigma of this StateGP is a random variable. "
                "Call it on a fitted one: gm.fit_gp(t, y, cov=...)."
            )
            raise ValueError(msg)  # noqa: TRY004

    def prior(
        self,
        name: str,
        parameterization: Parameterization = "centered",
        *,
        dims: Sequence[str] = ("time", "state"),
    ) -> TensorVariable:
        r"""Add the states to the model on the stack: N(x | m, s^2 C), Theorem 1's second factor.

        Parameters
        ----------
        name : str
            Name of the states in the model.
        parameterization : {"centered", "whitened"}
            ``"centered"``: the states themselves are the free variable, which
            is what the paper's sampler moves.  ``"whitened"``: the free variable
            is a standard normal, ``name + "_whitened_"``, the coordinates of
            the states in the eigenbasis of C, and the states are a
            deterministic.  Both give the same posterior.  Where times
            are many, the coordinates are those of C's Cholesky factor.
        dims : (str, str), default ("time", "state")
            Names of the dims.  Experiments with times of their own in one model
            have dims of their own: ``dims=("time2", "state")``.

        Returns
        -------
        TensorVariable
            The states in the data's units, shape ``(time, state)``; coords are
            added where the model lacks them.  Where neither the data nor the
            model name the states, the constraint does, after those of the ODE.
            Samplers start at the posterior mean of the Gaussian process.  Where states are
            positive, the free variable is ``name + "_log_"``, and the states a deterministic.

        Raises
        ------
        ValueError
            If the parameterization is unknown, the model's coords do not fit
            the data, or sigma depends on a random variable that is
            not in the model; nothing is added before.

        Examples
        --------
        >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
        >>> t = np.linspace(0, 3, 7)
        >>> gp = gm.StateGP(t, np.sin(t)[:, None], [pm.gp.cov.ExpQuad(1, ls=1.2)], sigma=0.1)
        >>> with pm.Model() as model:
        ...     x = gp.prior("x")
        >>> x.type.shape
        (7, 1)
        """
        return add_states(name, self, parameterization, dims)

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

    def _headline(self) -> str:
        return (
            f"StateGP: {len(self.states)} states, {len(self.t)} times on "
            f"[{self.t[0]:g}, {self.t[-1]:g}], nugget {self.nugget.max():g}"
        )

    def _in_words(self) -> pd.DataFrame:
        random = isinstance(self.sigma, TensorVariable)
        sigmas = ["random"] * len(self.states) if random else [f"{s:.4g}" for s in self.sigma]
        kernels = [describe(cov) for cov in self.covs]
        return pd.DataFrame({"kernel": kernels, "sigma": sigmas}, index=[*self.states])


def lengths_of(x) -> tuple[int | None, ...]:
    """Return the shape of numbers or of a variable, None where a graph does not tell."""
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

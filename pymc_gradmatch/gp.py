"""The Gaussian processes of the states: data, kernels, C, D, A and the prior."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch import normal, spectral, structured
from pymc_gradmatch.derivatives import Blocks, evaluate_blocks
from pymc_gradmatch.kernels import check_kernels, describe
from pymc_gradmatch.operators import Operators, blocks_of, conditional_operators
from pymc_gradmatch.series import (
    as_nugget,
    as_observations,
    as_positive,
    as_sigma,
    as_times,
    grid_around,
    mean_and_scale,
    read_only,
    state_names,
)
from pymc_gradmatch.states import Parameterization, add_states

__all__ = ["StateGP"]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class StateGP:
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
        Observations, shape ``(time, state)``.  A table's column names become
        the names of the states.
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
    standardize : bool, default True
        Subtract the mean and divide by the standard deviation (ddof 0) of each
        state's data.  If False, kernels apply to the data as they are.

    Attributes
    ----------
    states : tuple
        Names of the states.
    mean, scale : array of float
        What standardises the data, shape ``(state,)``, in the data's units.

    Raises
    ------
    ValueError
        If times, observations, kernels, sigma or nugget cannot be used; the
        message says why.

    References
    ----------
    .. [1] Wenk, P. et al. (2019). Fast Gaussian process based gradient matching
       for parameter identification in systems of nonlinear ODEs. *AISTATS*.
    .. [2] Dondelinger, F. et al. (2013). ODE parameter inference using adaptive
       gradient matching with Gaussian processes. *AISTATS*.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> t = np.linspace(0, 3, 7)
    >>> y = np.stack([np.sin(t), np.cos(t)], axis=1)
    >>> gp = gm.StateGP(t, y, covs=[pm.gp.cov.ExpQuad(1, ls=1.2)] * 2, sigma=0.1)
    >>> gp.operators().D.shape
    (2, 7, 7)

    Adaptive gradient matching [2]_, hyperparameters, noise and gamma in one posterior:

    >>> decay = gm.ODE(lambda t, x, theta: [-theta.k * x.a, -theta.k * x.b], ["a", "b"], ["k"])
    >>> with pm.Model() as model:
    ...     variance, lengthscale = pm.HalfNormal("variance", 2), pm.HalfNormal("lengthscale", 3)
    ...     kernel = variance * pm.gp.cov.ExpQuad(1, ls=lengthscale)
    ...     gp = gm.StateGP(t, y, covs=[kernel] * 2, sigma=pm.HalfNormal("sigma", 1))
    ...     x = gp.prior("x")
    ...     y_obs = pm.Normal("y", x, gp.sigma, observed=y)
    ...     theta, gamma = {"k": pm.HalfNormal("k")}, pm.HalfNormal("gamma")
    ...     match = gm.GradientMatchingODE("gradient_match", decay, x, theta, gp=gp, gamma=gamma)
    """

    t: NDArray[np.float64]
    y: NDArray[np.float64]
    observed: NDArray[np.intp]
    covs: tuple[pm.gp.cov.BaseCovariance, ...]
    sigma: Any
    nugget: NDArray[np.float64]
    states: tuple
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    prior_mean: NDArray[np.float64]
    prior_slope: NDArray[np.float64]
    _blocks: Blocks
    _operators: Operators

    def __init__(
        self,
        t: ArrayLike,
        y: ArrayLike,
        covs: Sequence[pm.gp.cov.BaseCovariance],
        sigma: ArrayLike | TensorVariable,
        *,
        nugget: ArrayLike = 1e-4,
        standardize: bool = True,
    ):
        self._set(t, y, covs, sigma, nugget, standardize, evaluate_blocks)

    def _set(self, t, y, covs, sigma, nugget, standardize, evaluate):
        times = as_times(t)
        observations = as_observations(y, times)
        n_states = observations.shape[1]
        nuggets = as_nugget(nugget, n_states)
        mean, scale = mean_and_scale(observations, standardize)
        checked_covs = check_kernels(covs, n_states)
        blocks = blocks_of(checked_covs, times, evaluate)
        self._fill(
            t=times,
            y=observations,
            observed=np.arange(len(times)),
            covs=checked_covs,
            sigma=as_sigma(sigma, n_states),
            nugget=nuggets,
            states=state_names(y, n_states),
            mean=mean,
            scale=scale,
            prior_mean=read_only(np.broadcast_to(mean, observations.shape)),
            prior_slope=read_only(np.zeros(observations.shape)),
            _blocks=blocks,
            _operators=conditional_operators(blocks, nuggets),
        )

    def _fill(self, **attributes):
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def _changed(self, **changes) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)} | changes
        if {"_blocks", "nugget"} & changes.keys():
            values["_operators"] = conditional_operators(values["_blocks"], values["nugget"])
        gp = object.__new__(type(self))
        gp._fill(**values)
        return gp

    @classmethod
    def _from_evaluated(cls, t, y, covs, sigma, nugget, standardize, evaluate) -> Self:
        """Construct where a function of (kernel, times) gives the blocks at less cost."""
        gp = object.__new__(cls)
        gp._set(t, y, covs, sigma, nugget, standardize, evaluate)
        return gp

    @property
    def is_random(self) -> bool:
        """Whether a kernel has random hyperparameters; C, D and A are graphs then."""
        return isinstance(self._operators.C, TensorVariable)

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
        shape = (len(times), len(self.states))
        return self._changed(
            t=times,
            observed=observed,
            prior_mean=read_only(np.broadcast_to(self.mean, shape)),
            prior_slope=read_only(np.zeros(shape)),
            _blocks=blocks_of(self.covs, times, evaluate_blocks),
        )

    def with_covs(self, covs: Sequence[pm.gp.cov.BaseCovariance]) -> Self:
        """Return a copy with other kernels, one per state."""
        checked = check_kernels(covs, len(self.states))
        return self._changed(covs=checked, _blocks=blocks_of(checked, self.t, evaluate_blocks))

    def with_nugget(self, nugget: ArrayLike) -> Self:
        """Return a copy with another nugget, one number or one per state."""
        return self._changed(nugget=as_nugget(nugget, len(self.states)))

    def with_amplitude(self, factor: ArrayLike) -> Self:
        """Return a copy whose kernels are multiplied by a factor, one number or one per state.

        C without its nugget, and with it A, is ``factor`` times as large: the
        prior pulls less on the states, and says less about their slopes.
        """
        factors = as_positive(factor, len(self.states), "factor")
        return self._changed(
            covs=tuple(float(f) * cov for f, cov in zip(factors, self.covs, strict=True)),
            _blocks=Blocks(*(factors[:, None, None] * block for block in self._blocks)),
        )

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

    def with_sigma(self, sigma: ArrayLike | TensorVariable) -> Self:
        """Return a copy with another noise, in the data's units, one number or one per state."""
        return self._changed(sigma=as_sigma(sigma, len(self.states)))

    @cached_property
    def _prior_spectrum(self) -> spectral.Spectrum:
        return spectral.spectrum(self._operators.C)

    @cached_property
    def _prior_basis(self) -> normal.Basis:
        if self.is_random:
            return normal.cholesky(self._operators.C)
        return normal.innovations(self._operators.C) or self._prior_spectrum

    @cached_property
    def _conditional_spectrum(self) -> spectral.Spectrum:
        return spectral.spectrum(self._operators.A)

    @cached_property
    def _slope_operator(self) -> structured.Compressed | NDArray[np.float64] | TensorVariable:
        if self.is_random:
            return self._operators.D
        return structured.compress_if_cheaper(self._operators.D) or self._operators.D

    def operators(self) -> Operators:
        """Return C, D and A of every state, each ``(state, time, time)``, standardised units.

        C has the nugget, A is without gamma.  For the formulae see
        :func:`~pymc_gradmatch.operators.conditional_operators`.
        """
        return self._operators

    def slope_variance(self) -> NDArray[np.float64]:
        """Return the prior variance of the slopes, the median over time, shape ``(state,)``.

        In (standardised state / time) squared: what gamma is to be compared with.
        """
        self._check_numbers("slope_variance")
        return np.median(np.diagonal(np.asarray(self._blocks.d2k), axis1=-2, axis2=-1), axis=-1)

    def posterior_mean(self) -> NDArray[np.float64]:
        r"""Return the smoothed states on the grid, shape ``(time, state)``, in the data's units.

        .. math:: m + s\,C_{:o}\,(C_{oo} + \sigma^2 I)^{-1}\,(\tilde y - \tilde m_o)

        where o are the times of the observations.  A graph where hyperparameters are random.
        """
        K, residual = self._marginal
        solve = pt.linalg.solve if isinstance(K, TensorVariable) else np.linalg.solve
        weights = solve(K, residual.T[..., None])
        smooth = (self._operators.C[:, :, self.observed] @ weights)[..., 0].T
        return self.prior_mean + self.scale * smooth

    def log_marginal_likelihood(self) -> NDArray[np.float64]:
        r"""Return log N(y_k | m_k, s_k^2 (C_k + sigma_k^2 I)) of each state's data.

        On the standardised data, without the constant that the scale brings.
        """
        self._check_numbers("log_marginal_likelihood")
        K, residual = self._marginal
        misfit = (residual.T * np.linalg.solve(K, residual.T[..., None])[..., 0]).sum(axis=-1)
        return -0.5 * (misfit + np.linalg.slogdet(2 * np.pi * K).logabsdet)

    @property
    def _marginal(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the covariance of the observations and their residual, standardised."""
        noise = ((self.sigma / self.scale) ** 2)[:, None, None] * np.eye(len(self.y))
        K = self._operators.C[:, self.observed[:, None], self.observed] + noise
        return K, (self.y - self.prior_mean[self.observed]) / self.scale

    def _check_numbers(self, method: str):
        if self.is_random or isinstance(self.sigma, TensorVariable):
            msg = (
                f"gp.{method} needs numbers, but hyperparameters or sigma of this StateGP are "
                "random variables. Call it on a fitted one: gm.fit_gp(t, y, cov=...)."
            )
            raise ValueError(msg)

    def prior(self, name: str, parameterization: Parameterization = "centered") -> TensorVariable:
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
            deterministic.  Both give the same posterior; :func:`pymc.do`,
            :func:`pymc.observe` and copies of a model need ``"centered"``.
            Where hyperparameters are random, the coordinates are those of C's
            Cholesky factor.

        Returns
        -------
        TensorVariable
            The states in the data's units, shape ``(time, state)``, dims
            ``("time", "state")``; coords are added where the model lacks them.
            Samplers start at the posterior mean of the Gaussian process.

        Raises
        ------
        ValueError
            If the parameterization is unknown, or the model's coords do not
            fit the data.

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
        return add_states(name, self, parameterization)

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

    def __repr__(self) -> str:
        lines = [
            f"StateGP: {len(self.states)} states, {len(self.t)} times on "
            f"[{self.t[0]:g}, {self.t[-1]:g}], nugget {self.nugget.max():g}"
        ]
        random = isinstance(self.sigma, TensorVariable)
        sigmas = ["random"] * len(self.states) if random else [f"{s:.4g}" for s in self.sigma]
        lines += [
            f"  {state}: {describe(cov)}, sigma {sigma}"
            for state, cov, sigma in zip(self.states, self.covs, sigmas, strict=True)
        ]
        return "\n".join(lines)

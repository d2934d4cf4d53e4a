"""Data, Gaussian processes and noise, all that Algorithm 1 fixes first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
import pymc as pm
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.gp.data import GriddedData, as_nugget, as_positive, as_sigma
from pymc_gradmatch.gp.derivatives import evaluate_blocks
from pymc_gradmatch.gp.kernels import check_kernels, describe
from pymc_gradmatch.gp.operators import GridProcess, Operators, blocks_of, log_evidence, smoothed
from pymc_gradmatch.gp.prior import Parameterization, add_states

__all__ = ["StateGP", "table_of", "text_of"]


def text_of(gp) -> str:
    """Return one line on the grid and one on each state."""
    lines = [
        f"StateGP: {len(gp.states)} states, {len(gp.t)} times on "
        f"[{gp.t[0]:g}, {gp.t[-1]:g}], nugget {gp.nugget.max():g}"
    ]
    random = isinstance(gp.sigma, TensorVariable)
    sigmas = ["random"] * len(gp.states) if random else [f"{s:.4g}" for s in gp.sigma]
    lines += [
        f"  {state}: {describe(cov)}, sigma {sigma}"
        for state, cov, sigma in zip(gp.states, gp.covs, sigmas, strict=True)
    ]
    return "\n".join(lines)


def table_of(gp) -> pd.DataFrame:
    """Return what was fixed or fitted, one row per state."""
    return pd.DataFrame(
        {
            "kernel": [describe(cov) for cov in gp.covs],
            "sigma": gp.sigma,
            "mean": gp.mean,
            "scale": gp.scale,
            "log_marginal_likelihood": gp.log_marginal_likelihood(),
        },
        index=pd.Index(gp.states, name="state"),
    )


@dataclass(frozen=True, init=False, repr=False, eq=False)
class StateGP(GriddedData):
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
        the names of the states.  Of ``pm.Data`` the present values are taken.
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

    sigma: Any
    _process: GridProcess

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
        super().__init__(t, y, standardize=standardize)
        n_states = len(self.states)
        nuggets = as_nugget(nugget, n_states)
        checked = check_kernels(covs, n_states)
        blocks = blocks_of(checked, self.t, evaluate)
        sigmas = as_sigma(sigma, n_states)
        self._fill(sigma=sigmas, _process=GridProcess(checked, nuggets, blocks))

    def _changed(self, **changes) -> Self:
        if "t" in changes:
            changes["_process"] = self._process.with_covs(self.covs, changes["t"])
        return super()._changed(**changes)

    @classmethod
    def _from_evaluated(cls, t, y, covs, sigma, nugget, standardize, evaluate) -> Self:
        """Construct where a function of (kernel, times) gives the blocks at less cost."""
        gp = object.__new__(cls)
        gp._set(t, y, covs, sigma, nugget, standardize, evaluate)
        return gp

    @property
    def covs(self) -> tuple[pm.gp.cov.BaseCovariance, ...]:
        """One kernel per state."""
        return self._process.covs

    @property
    def nugget(self) -> NDArray[np.float64]:
        """What is added to the diagonal of every C, shape ``(state,)``."""
        return self._process.nugget

    @property
    def is_random(self) -> bool:
        """Whether a kernel has random hyperparameters; C, D and A are graphs then."""
        return self._process.is_random

    def with_covs(self, covs: Sequence[pm.gp.cov.BaseCovariance]) -> Self:
        """Return a copy with other kernels, one per state."""
        checked = check_kernels(covs, len(self.states))
        return self._changed(_process=self._process.with_covs(checked, self.t))

    def with_nugget(self, nugget: ArrayLike) -> Self:
        """Return a copy with another nugget, one number or one per state."""
        nuggets = as_nugget(nugget, len(self.states))
        return self._changed(_process=self._process.with_nugget(nuggets))

    def with_amplitude(self, factor: ArrayLike) -> Self:
        """Return a copy whose kernels are multiplied by a factor, one number or one per state.

        C without its nugget, and with it A, is ``factor`` times as large: the
        prior pulls less on the states, and says less about their slopes.
        """
        factors = as_positive(factor, len(self.states), "factor")
        return self._changed(_process=self._process.multiplied(factors))

    def with_sigma(self, sigma: ArrayLike | TensorVariable) -> Self:
        """Return a copy with another noise, in the data's units, one number or one per state."""
        return self._changed(sigma=as_sigma(sigma, len(self.states)))

    def operators(self) -> Operators:
        """Return C, D and A of every state, each ``(state, time, time)``, standardised units.

        C has the nugget, A is without gamma.  For the formulae see
        :func:`~pymc_gradmatch.gp.operators.conditional_operators`.
        """
        return self._process.operators

    def slope_variance(self) -> NDArray[np.float64]:
        """Return the prior variance of the slopes, the median over time, shape ``(state,)``.

        In (standardised state / time) squared: what gamma is to be compared with.
        """
        self._check_numbers("slope_variance")
        return self._process.slope_variance

    def posterior_mean(self) -> NDArray[np.float64]:
        r"""Return the smoothed states on the grid, shape ``(time, state)``, in the data's units.

        .. math:: m + s\,C_{:o}\,(C_{oo} + \sigma^2 I)^{-1}\,(\tilde y - \tilde m_o)

        where o are the times of the observations.  A graph where hyperparameters are random.
        """
        return self.prior_mean + self.scale * smoothed(*self._regression)

    def log_marginal_likelihood(self) -> NDArray[np.float64]:
        r"""Return log N(y_k | m_k, s_k^2 (C_k + sigma_k^2 I)) of each state's data.

        On the standardised data, without the constant that the scale brings.
        """
        self._check_numbers("log_marginal_likelihood")
        return log_evidence(*self._regression)

    @property
    def _regression(self) -> tuple:
        residual = (self.y - self.prior_mean[self.observed]) / self.scale
        return self._process.operators.C, (self.sigma / self.scale) ** 2, residual, self.observed

    def _check_numbers(self, method: str):
        if self.is_random or isinstance(self.sigma, TensorVariable):
            msg = (
                f"gp.{method} needs numbers, but hyperparameters or sigma of this StateGP are "
                "random variables. Call it on a fitted one: gm.fit_gp(t, y, cov=...)."
            )
            raise ValueError(msg)

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
            deterministic.  Both give the same posterior.  Where hyperparameters
            are random, the coordinates are those of C's Cholesky factor.
        dims : (str, str), default ("time", "state")
            Names of the dims.  Experiments with times of their own in one model
            have dims of their own: ``dims=("time2", "state")``.

        Returns
        -------
        TensorVariable
            The states in the data's units, shape ``(time, state)``; coords are
            added where the model lacks them.  Where neither the data nor the
            model name the states, the constraint does, after those of the ODE.
            Samplers start at the posterior mean of the Gaussian process.

        Raises
        ------
        ValueError
            If the parameterization is unknown, the model's coords do not fit
            the data, or sigma or a kernel depends on a random variable that is
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
        return table_of(self)

    def __repr__(self) -> str:
        return text_of(self)

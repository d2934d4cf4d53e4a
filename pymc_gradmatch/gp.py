"""The Gaussian processes of the states: data, kernels, C, D, A and the prior."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch import normal, spectral, structured
from pymc_gradmatch.derivatives import evaluate_blocks
from pymc_gradmatch.kernels import check_kernels, describe
from pymc_gradmatch.operators import Operators, operators_of
from pymc_gradmatch.series import (
    as_observations,
    as_sigma,
    as_times,
    mean_and_scale,
    state_names,
)
from pymc_gradmatch.states import StatePrior, add_coords

__all__ = ["Parameterization", "StateGP"]

Parameterization = Literal["centered", "whitened"]


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
        ``t`` and on standardised data.  Hyperparameters are numbers; PyTensor
        keeps a literal such as ``0.5`` in single precision, ``np.float64(0.5)``
        in double.
    sigma : array_like of float
        Standard deviation of the observation noise in the data's units, one
        number or one per state.
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

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> t = np.linspace(0, 3, 7)
    >>> y = np.stack([np.sin(t), np.cos(t)], axis=1)
    >>> gp = gm.StateGP(t, y, covs=[pm.gp.cov.ExpQuad(1, ls=1.2)] * 2, sigma=0.1)
    >>> gp.operators().D.shape
    (2, 7, 7)
    """

    t: NDArray[np.float64]
    y: NDArray[np.float64]
    covs: tuple[pm.gp.cov.BaseCovariance, ...]
    sigma: NDArray[np.float64]
    nugget: float
    states: tuple
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    _operators: Operators

    def __init__(
        self,
        t: ArrayLike,
        y: ArrayLike,
        covs: Sequence[pm.gp.cov.BaseCovariance],
        sigma: ArrayLike,
        *,
        nugget: float = 1e-4,
        standardize: bool = True,
    ):
        self._set(t, y, covs, sigma, nugget, standardize, evaluate_blocks)

    def _set(self, t, y, covs, sigma, nugget, standardize, evaluate):
        times = as_times(t)
        observations = as_observations(y, times)
        n_states = observations.shape[1]
        if not nugget >= 0:
            msg = f"nugget is {nugget}; expected a number that is not negative."
            raise ValueError(msg)
        mean, scale = mean_and_scale(observations, standardize)
        checked_covs = check_kernels(covs, n_states)
        attributes = {
            "t": times,
            "y": observations,
            "covs": checked_covs,
            "sigma": as_sigma(sigma, n_states),
            "nugget": nugget,
            "states": state_names(y, n_states),
            "mean": mean,
            "scale": scale,
            "_operators": operators_of(checked_covs, times, nugget, evaluate),
        }
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    @classmethod
    def _from_evaluated(cls, t, y, covs, sigma, nugget, standardize, evaluate) -> Self:
        """Construct where a function of (kernel, times) gives the blocks at less cost."""
        gp = object.__new__(cls)
        gp._set(t, y, covs, sigma, nugget, standardize, evaluate)
        return gp

    @cached_property
    def _prior_spectrum(self) -> spectral.Spectrum:
        return spectral.spectrum(self._operators.C)

    @cached_property
    def _prior_basis(self) -> normal.Basis:
        return normal.innovations(self._operators.C) or self._prior_spectrum

    @cached_property
    def _conditional_spectrum(self) -> spectral.Spectrum:
        return spectral.spectrum(self._operators.A)

    @cached_property
    def _slope_operator(self) -> structured.Compressed | NDArray[np.float64]:
        return structured.compress_if_cheaper(self._operators.D) or self._operators.D

    def operators(self) -> Operators:
        """Return C, D and A of every state, each ``(state, time, time)``, standardised units.

        C has the nugget, A is without gamma.  For the formulae see
        :func:`~pymc_gradmatch.operators.conditional_operators`.
        """
        return self._operators

    def posterior_mean(self) -> NDArray[np.float64]:
        r"""Return the smoothed states, shape ``(time, state)``, in the data's units.

        .. math:: m + s\,C\,(C + \sigma^2 I)^{-1}\,\tilde y
        """
        vectors, variances = self._prior_spectrum
        shrinkage = variances / (variances + self._noise_variance[:, None])
        coordinates = spectral.per_state(vectors.mT, self._standardised)
        return self.mean + self.scale * spectral.per_state(vectors, shrinkage.T * coordinates)

    def log_marginal_likelihood(self) -> NDArray[np.float64]:
        r"""Return log N(y_k | m_k, s_k^2 (C_k + sigma_k^2 I)) of each state's data.

        On the standardised data, without the constant that the scale brings.
        """
        vectors, variances = self._prior_spectrum
        total = variances + self._noise_variance[:, None]
        coordinates = spectral.per_state(vectors.mT, self._standardised).T
        return -0.5 * (coordinates**2 / total + np.log(2 * np.pi * total)).sum(axis=-1)

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
        model = pm.modelcontext(None)
        start = self.posterior_mean()
        add_coords(model, {"time": self.t, "state": self.states})
        if parameterization == "centered":
            return StatePrior(
                name, self.mean, self.scale, start, *self._prior_basis, dims=("time", "state")
            )
        if parameterization == "whitened":
            vectors, variances = self._prior_spectrum
            sd = np.sqrt(variances).T
            standardised_start = (start - self.mean) / self.scale
            whitened = pm.Normal(
                f"{name}_whitened_",
                shape=self.y.shape,
                initval=spectral.per_state(vectors.mT, standardised_start) / sd,
            )
            x = self.mean + self.scale * spectral.per_state(pt.as_tensor(vectors), sd * whitened)
            return pm.Deterministic(name, x, dims=("time", "state"))
        msg = f"parameterization is {parameterization!r}; expected 'centered' or 'whitened'."
        raise ValueError(msg)

    @property
    def _standardised(self):
        return (self.y - self.mean) / self.scale

    @property
    def _noise_variance(self):
        return np.square(self.sigma / self.scale)

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
            f"[{self.t[0]:g}, {self.t[-1]:g}], nugget {self.nugget:g}"
        ]
        lines += [
            f"  {state}: {describe(cov)}, sigma {sigma:.4g}"
            for state, cov, sigma in zip(self.states, self.covs, self.sigma, strict=True)
        ]
        return "\n".join(lines)

r"""Gaussian process regression: what noisy observations at some times of a grid say.

.. math:: r_k = \tilde x_{k,o} + \varepsilon_k, \quad \tilde x_k \sim N(0, C_k), \quad
          \varepsilon_k \sim N(0, v_k I)

where o are the times of the observations.
"""

from typing import Any

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.tensor.variable import TensorVariable

__all__ = ["log_evidence", "smoothed"]


def smoothed(C, noise, residual: NDArray[np.float64], observed: NDArray[np.intp]):
    r"""Return the posterior mean of every state on the grid, shape ``(time, state)``.

    .. math:: C_{:o}\,(C_{oo} + v I)^{-1}\,r

    Parameters
    ----------
    C : array of float or TensorVariable
        Covariance of the states, shape ``(state, time, time)``.
    noise : array of float or TensorVariable
        Variance v of each state's noise, shape ``(state,)``.
    residual : array of float
        Observations less their prior mean, shape ``(observation, state)``.
    observed : array of int
        Where in the grid the observations are, shape ``(observation,)``.

    Returns
    -------
    array of float or TensorVariable
        A graph where C or the noise is one.
    """
    K = _covariance(C, noise, observed)
    solve = pt.linalg.solve if isinstance(K, TensorVariable) else np.linalg.solve
    weights = solve(K, residual.T[..., None])
    return (C[:, :, observed] @ weights)[..., 0].T


def log_evidence(
    C: NDArray[np.float64],
    noise: NDArray[np.float64],
    residual: NDArray[np.float64],
    observed: NDArray[np.intp],
) -> NDArray[np.float64]:
    r"""Return :math:`\log N(r_k \mid 0, C_{k,oo} + v_k I)` of each state, shape ``(state,)``.

    Parameters are those of :func:`smoothed`, all of them numbers.
    """
    K = _covariance(C, noise, observed)
    misfit = (residual.T * np.linalg.solve(K, residual.T[..., None])[..., 0]).sum(axis=-1)
    return -0.5 * (misfit + np.linalg.slogdet(2 * np.pi * K).logabsdet)


def _covariance(C, noise, observed) -> Any:
    return C[:, observed[:, None], observed] + noise[:, None, None] * np.eye(len(observed))

"""The Gaussian processes of the states: data, kernels, C, D, A and the prior."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch import kernels, spectral
from pymc_gradmatch.series import as_observations, as_times, state_names
from pymc_gradmatch.states import StatePrior

__all__ = ["Operators", "StateGP", "conditional_operators"]

Parameterization = Literal["centered", "whitened"]


class Operators(NamedTuple):
    """The matrices of Theorem 1, one per state, shape ``(state, time, time)``.

    In standardised units: C has no unit, D is in 1 / time, A in 1 / time squared.
    """

    C: NDArray[np.float64]
    """Covariance of the states, with the nugget."""
    D: NDArray[np.float64]
    """Maps states to the mean of their derivatives."""
    A: NDArray[np.float64]
    """Covariance of the derivatives given the states, without gamma."""


def conditional_operators(blocks: kernels.Blocks, nugget: float) -> Operators:
    r"""Condition a Gaussian process' derivative on its values.

    .. math::

        C = k + \epsilon I, \qquad D = {'C}\,C^{-1}, \qquad
        A = C'' - {'C}\,C^{-1}\,C'

    so that :math:`p(\dot x \mid x) = N(D x, A)` (Wenk et al. 2019, eq. 6 to 9).
    The nugget :math:`\epsilon` stands wherever C stands and on no derivative
    block, as in the reference implementation.

    Parameters
    ----------
    blocks : Blocks
        The kernel and its derivatives, arrays of shape ``(state, time, time)``.
    nugget : float
        Added to the diagonal of the kernel matrix, in standardised units squared.

    Returns
    -------
    Operators

    Raises
    ------
    ValueError
        If C is not numerically positive definite.
    """
    C = blocks.k + nugget * np.eye(blocks.k.shape[-1])
    vectors, variances = spectral.spectrum(C)
    singular = (variances <= spectral.smallest_reliable(variances)).any(axis=-1)
    if singular.any():
        msg = (
            f"the covariance C of state {np.flatnonzero(singular).tolist()} is not positive "
            f"definite with nugget={nugget:g}: the kernel is too smooth for this grid. "
            "Use a larger nugget (the paper's is 1e-4), or a shorter lengthscale."
        )
        raise ValueError(msg)
    D = (blocks.dk_dt1 @ vectors / variances[:, None, :]) @ vectors.mT
    A = blocks.d2k - D @ blocks.dk_dt2
    return Operators(C, D, (A + A.mT) / 2)


@dataclass(frozen=True, repr=False, eq=False)
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
        ``t`` and on standardised data.  Hyperparameters are numbers.
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
    covs: Sequence[pm.gp.cov.BaseCovariance]
    sigma: NDArray[np.float64]
    _: KW_ONLY
    nugget: float = 1e-4
    standardize: bool = True
    states: tuple = field(init=False)
    mean: NDArray[np.float64] = field(init=False)
    scale: NDArray[np.float64] = field(init=False)

    def __post_init__(self):
        t = as_times(self.t)
        y = as_observations(self.y, t)
        n_states = y.shape[1]
        checked = {
            "t": t,
            "y": y,
            "states": state_names(self.y, n_states),
            "covs": _checked_covs(self.covs, n_states),
            "sigma": _checked_sigma(self.sigma, n_states),
            "mean": _frozen(y.mean(axis=0) if self.standardize else np.zeros(n_states)),
            "scale": _frozen(y.std(axis=0) if self.standardize else np.ones(n_states)),
        }
        if not self.nugget >= 0:
            msg = f"nugget is {self.nugget}; expected a number that is not negative."
            raise ValueError(msg)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @cached_property
    def _operators(self) -> Operators:
        distinct = {id(cov): cov for cov in self.covs}
        blocks = {key: kernels.evaluate_blocks(cov, self.t) for key, cov in distinct.items()}
        stacked = (np.stack(b) for b in zip(*(blocks[id(cov)] for cov in self.covs), strict=True))
        operators = conditional_operators(kernels.Blocks(*stacked), self.nugget)
        return Operators(*(_frozen(matrix) for matrix in operators))

    @cached_property
    def _spectrum_C(self) -> spectral.Spectrum:
        return spectral.spectrum(self._operators.C)

    def operators(self) -> Operators:
        """Return C, D and A of every state, each ``(state, time, time)``, standardised units.

        C has the nugget, A is without gamma.  See :func:`conditional_operators`
        for the formulae.
        """
        return self._operators

    def posterior_mean(self) -> NDArray[np.float64]:
        r"""Return the smoothed states, shape ``(time, state)``, in the data's units.

        .. math:: m + s\,C\,(C + \sigma^2 I)^{-1}\,\tilde y
        """
        vectors, variances = self._spectrum_C
        shrinkage = variances / (variances + self._noise_variance[:, None])
        coordinates = spectral.per_state(vectors.mT, self._standardised)
        return self.mean + self.scale * spectral.per_state(vectors, shrinkage.T * coordinates)

    def log_marginal_likelihood(self) -> NDArray[np.float64]:
        r"""Return log N(y_k | m_k, s_k^2 (C_k + sigma_k^2 I)) of each state's data.

        On the standardised data, without the constant that the scale brings.
        """
        vectors, variances = self._spectrum_C
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
            deterministic.  Both give the same posterior.

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
        vectors, variances = self._spectrum_C
        start = self.posterior_mean()
        self._add_coords(model)
        if parameterization == "centered":
            return StatePrior(
                name, self.mean, self.scale, vectors, variances, start, dims=("time", "state")
            )
        if parameterization == "whitened":
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

    def _add_coords(self, model: pm.Model):
        for dim, values in {"time": self.t, "state": self.states}.items():
            if dim not in model.coords:
                model.add_coord(dim, values)
            elif len(model.coords[dim] or ()) != len(values):
                msg = (
                    f"the model has the coord {dim!r} with {len(model.coords[dim] or ())} values; "
                    f"this Gaussian process has {len(values)}. Name the model's coord differently."
                )
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
                "kernel": [kernels.describe(cov) for cov in self.covs],
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
            f"  {state}: {kernels.describe(cov)}, sigma {sigma:.4g}"
            for state, cov, sigma in zip(self.states, self.covs, self.sigma, strict=True)
        ]
        return "\n".join(lines)


def _frozen(array: ArrayLike) -> NDArray[np.float64]:
    array = np.array(array, dtype=float)
    array.flags.writeable = False
    return array


def _checked_covs(covs, n_states: int) -> tuple:
    covs = tuple(covs)
    if len(covs) != n_states:
        msg = f"covs has {len(covs)} kernels for {n_states} states; expected one per state."
        raise ValueError(msg)
    for k, cov in enumerate(covs):
        if not isinstance(cov, pm.gp.cov.BaseCovariance):
            msg = f"covs[{k}] is a {type(cov).__name__}; expected a kernel from pm.gp.cov."
            raise TypeError(msg)
        kernels.check_one_dimensional(cov)
    return covs


def _checked_sigma(sigma, n_states: int) -> NDArray[np.float64]:
    try:
        values = np.broadcast_to(np.asarray(sigma, dtype=float), n_states)
    except ValueError:
        msg = (
            f"sigma has shape {np.shape(sigma)}; expected one number or one for each of "
            f"{n_states} states."
        )
        raise ValueError(msg) from None
    if not (np.isfinite(values) & (values > 0)).all():
        msg = f"sigma is {values.tolist()}; expected positive standard deviations."
        raise ValueError(msg)
    return _frozen(values)

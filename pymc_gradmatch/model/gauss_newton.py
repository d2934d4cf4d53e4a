r"""The most probable states and parameters of Theorem 1, by Gauss-Newton.

Given hyperparameters, minus the log of Theorem 1 is half a sum of squares
(prior, observations and mismatch, each whitened) and the prior of theta.  Its
Hessian without the second derivatives of f is exact where the mismatch is
small, however tight the constraint: a trust region needs a handful of steps
where a gradient method would need thousands.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.model.priors import Parameters
from pymc_gradmatch.numerics import on_one_thread, products
from pymc_gradmatch.ode import ODE

__all__ = ["Matched", "climb", "climb_from_prior"]

N_STARTS = 8
N_CLIMBED = 2  # the best of the starts, from which states and parameters climb together


class Matched(NamedTuple):
    """The most probable states and parameters."""

    u: NDArray[np.float64]
    """Parameters, unconstrained, shape ``(param,)``."""
    x: NDArray[np.float64]
    """States on the grid, shape ``(time, state)``, in the data's units."""
    sd: NDArray[np.float64]
    """Posterior standard deviations of u, from the Hessian."""
    misfit: float
    """Minus the log of Theorem 1, up to a constant of the data and the grid."""


@on_one_thread
def climb(
    ode: ODE,
    gp: StateGP,
    parameters: Parameters,
    gamma: NDArray[np.float64],
    starts: Sequence[tuple[NDArray, NDArray]],
) -> Matched:
    """Climb from starts (u, states) and return the best point reached.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    gp : StateGP
        Gaussian processes with their data, sigma and prior mean.
    parameters : Parameters
        The parameters with their prior.
    gamma : array of float
        Variance of the mismatch, shape ``(state,)``.
    starts : sequence of (array, array)
        Unconstrained parameters and states in the data's units.
    """
    problem = _Problem(ode, gp, parameters, gamma)
    fits = [problem.minimise(problem.flat(u, x)) for u, x in starts]
    best = min(fits, key=lambda fit: fit.fun)
    n_params = len(parameters.names)
    return Matched(best.x[:n_params], problem.states(best.x), problem.sd(best.x), float(best.fun))


def climb_from_prior(
    ode: ODE,
    gp: StateGP,
    parameters: Parameters,
    gamma: NDArray[np.float64],
    x: NDArray[np.float64],
    rng: np.random.Generator,
) -> Matched:
    """Climb from eight prior draws, the parameters alone at first, given the states x.

    Raises
    ------
    ValueError
        If the right-hand side is finite for none of the draws.
    """
    problem = _Problem(ode, gp, parameters, gamma)
    draws = [parameters.draw(seed) for seed in rng.integers(2**31, size=N_STARTS)]
    points = [problem.flat(u, x) for u in draws]
    usable = [point for point in points if np.isfinite(problem.value(point)[0])]
    if not usable:
        msg = (
            f"the right-hand side is finite for none of {N_STARTS} draws of the parameters from "
            "their prior, at the states' posterior mean; check the priors and the ODE."
        )
        raise ValueError(msg)
    fits = [problem.minimise(point, only_parameters=True) for point in usable]
    best = sorted(fits, key=lambda fit: fit.fun)[:N_CLIMBED]
    n_params = len(parameters.names)
    return climb(ode, gp, parameters, gamma, [(fit.x[:n_params], x) for fit in best])


class _Linearised(NamedTuple):
    """The mismatch at a point and its derivatives, state by state."""

    mismatch: NDArray[np.float64]
    """Whitened, shape ``(state, time)``."""
    by_u: NDArray[np.float64]
    """Its derivatives by the parameters, shape ``(state, time, param)``."""
    by_x: NDArray[np.float64]
    """Derivatives of f, not whitened, by the states of the same time, ``(state, state, time)``."""


class _Problem:
    """Minus the log of Theorem 1 as a function of one vector: u, then states by state."""

    def __init__(self, ode: ODE, gp: StateGP, parameters: Parameters, gamma):
        self.ode, self.gp, self.parameters = ode, gp, parameters
        self.shape = gp.prior_mean.shape
        vectors, variances = gp._process.conditional_spectrum
        self.whiten = (vectors / np.sqrt(np.maximum(variances, 0) + gamma[:, None])[:, None]).mT
        self.slope = self.whiten @ gp.operators().D
        vectors, variances = gp._process.prior_spectrum
        precision = (vectors / variances[:, None]) @ vectors.mT
        self.noise = gp.sigma / gp.scale
        observed = np.zeros((len(gp.states), len(gp.t)))
        observed[:, gp.observed] = (self.noise**-2)[:, None]
        self.quadratic = precision + observed[..., None] * np.eye(len(gp.t))
        self.weights = self.whiten.mT @ self.whiten
        self.cross = self.slope.mT @ self.whiten
        self.fixed = self.slope.mT @ self.slope + self.quadratic
        data = np.zeros(self.shape)
        data[gp.observed] = (gp.y - gp.prior_mean[gp.observed]) / gp.scale / self.noise**2
        self.linear = data.T
        self.offset = 0.5 * np.sum(np.square((gp.y - gp.prior_mean[gp.observed]) / gp.sigma))
        self.at: tuple = (None, None)

    def flat(self, u, x) -> NDArray:
        return np.concatenate([u, ((x - self.gp.prior_mean) / self.gp.scale).T.ravel()])

    def states(self, point) -> NDArray:
        return self.gp.prior_mean + self.gp.scale * self._deviation(point).T

    def _deviation(self, point):
        return point[len(self.parameters.names) :].reshape(self.shape[::-1])

    def _linearised(self, point) -> _Linearised:
        if self.at[0] is not None and np.array_equal(self.at[0], point):
            return self.at[1]
        gp, n_params = self.gp, len(self.parameters.names)
        theta, dtheta = self.parameters.natural(point[:n_params])
        with np.errstate(all="ignore"):
            f, df_dx, df_dtheta = self.ode.linearised(gp.t, self.states(point), theta)
            deviation = self._deviation(point)
            mismatch = products.matvec(self.whiten, ((f - gp.prior_slope) / gp.scale).T)
            mismatch -= products.matvec(self.slope, deviation)
            by_u = self.whiten @ ((df_dtheta * dtheta).swapaxes(0, 1) / gp.scale[:, None, None])
            by_x = (df_dx * gp.scale / gp.scale[:, None]).transpose(1, 2, 0)
        self.at = (point.copy(), _Linearised(mismatch, by_u, by_x))
        return self.at[1]

    def value(self, point) -> tuple[float, NDArray]:
        """Return the objective and its gradient."""
        n_params = len(self.parameters.names)
        mismatch, by_u, by_x = self._linearised(point)
        log_prior, prior_gradient, _ = self.parameters.log_prior(point[:n_params])
        deviation = self._deviation(point)
        pulled = products.matvec(self.quadratic, deviation)
        with np.errstate(all="ignore"):
            value = 0.5 * np.sum(np.square(mismatch)) - log_prior + self.offset
            value += np.sum(deviation * (0.5 * pulled - self.linear))
            back = products.matvec(self.whiten.mT, mismatch)
            by_states = (by_x * back[:, None]).sum(axis=0)
            by_states += pulled - self.linear - products.matvec(self.slope.mT, mismatch)
            by_params = np.einsum("ktp,kt->p", by_u, mismatch) - prior_gradient
            gradient = np.concatenate([by_params, by_states.ravel()])
        finite = np.isfinite(value) and np.isfinite(gradient).all()
        return (float(value), gradient) if finite else (np.inf, np.zeros_like(gradient))

    def hessian(self, point) -> NDArray:
        """Return the Hessian without the second derivatives of f.

        Its blocks of two states are products of entries, not of matrices: what
        happens at one time depends on the states of that time alone.
        """
        n_params, (n_states, n_times) = len(self.parameters.names), self.shape[::-1]
        _, by_u, by_x = self._linearised(point)
        n = n_params + n_states * n_times
        if not (np.isfinite(by_u).all() and np.isfinite(by_x).all()):
            # SciPy asks for it before it turns down a point at which the value is infinite.
            return np.eye(n)
        states = np.zeros((n_states, n_times, n_states, n_times))
        mixed = -np.einsum("ktp,kts->pks", by_u, self.slope)
        for m in range(n_states):
            entering = np.flatnonzero(by_x[m].any(axis=1))
            d = by_x[m, entering]
            both = d[:, None, :, None] * self.weights[m] * d[:, None, :]
            states[entering[:, None], :, entering, :] += both
            cross = self.cross[m] * d[:, None, :]
            states[m][:, entering] -= cross.swapaxes(0, 1)
            states[entering, :, m] -= cross.mT
            states[m, :, m] += self.fixed[m]
            mixed[:, entering] += (by_u[m].T @ self.whiten[m])[:, None] * d
        hessian = np.empty((n, n))
        curvature = self.parameters.log_prior(point[:n_params])[2]
        # Heavy tails bend the other way: left out, so that variances stay positive.
        prior = np.diag(np.maximum(-curvature, 0))
        hessian[:n_params, :n_params] = np.einsum("ktp,ktq->pq", by_u, by_u) + prior
        hessian[:n_params, n_params:] = mixed.reshape(n_params, -1)
        hessian[n_params:, :n_params] = mixed.reshape(n_params, -1).T
        hessian[n_params:, n_params:] = states.reshape(n - n_params, n - n_params)
        return hessian

    def sd(self, point) -> NDArray:
        """Return the standard deviations of the parameters that the Hessian tells."""
        free = slice(len(self.parameters.names))
        given = slice(len(self.parameters.names), None)
        hessian = self.hessian(point)
        follow = np.linalg.solve(hessian[given, given], hessian[given, free])
        marginal = hessian[free, free] - hessian[free, given] @ follow
        return np.sqrt(np.diagonal(np.linalg.pinv(marginal, hermitian=True)))

    def minimise(self, point, *, only_parameters: bool = False):
        free = slice(len(self.parameters.names) if only_parameters else None)

        def whole(part):
            return np.concatenate([part, point[len(part) :]])

        def value(part):
            value, gradient = self.value(whole(part))
            return value, gradient[free]

        fit = minimize(
            value,
            point[free],
            jac=True,
            hess=lambda part: self.hessian(whole(part))[free, free],
            method="trust-exact",
            options={"gtol": 1e-3, "maxiter": 100},
        )
        fit.x = whole(fit.x)
        return fit

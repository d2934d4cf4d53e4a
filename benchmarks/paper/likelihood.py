"""Maximum likelihood of parameters and initial states by numerical integration."""

from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

import pymc_gradmatch as gm
from benchmarks.cases import Case
from benchmarks.paper import systems
from pymc_gradmatch.model.gauss_newton import Problem
from pymc_gradmatch.model.priors import Parameters, parameters_of
from pymc_gradmatch.model.starting_points import optimise_from_prior
from pymc_gradmatch.ode import Solver

__all__ = ["LikelihoodFit", "maximum_likelihood"]

N_STARTS = 4
EVALUATIONS = 60  # of one climb; on a ridge that the box cuts off the last ones gain nothing
REWEIGHTED = 3  # times that sigma is estimated anew from the residuals
STEP = 1e-5  # of the finite differences, relative


class LikelihoodFit(NamedTuple):
    """The maximum, and the normal approximation there.

    Attributes
    ----------
    u : array
        Parameters, then initial states.
    covariance : array
        Of u, from the Gauss-Newton Hessian.
    x, dx : array
        The trajectory, shape ``(time, state)``, and its derivatives by u,
        shape ``(time, state, entry of u)``.
    box : tuple of array
        Least and largest u.
    note : str
        Empty, or what went wrong.
    """

    u: np.ndarray
    covariance: np.ndarray
    x: np.ndarray
    dx: np.ndarray
    box: tuple[np.ndarray, np.ndarray]
    note: str

    def draws(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw parameters, clipped to the box, and states, linear in u."""
        n_params = len(self.u) - self.x.shape[1]
        u = rng.multivariate_normal(self.u, self.covariance, size=n, method="eigh")
        u = np.clip(u, *self.box)
        return u[:, :n_params], self.x + np.einsum("tku,nu->ntk", self.dx, u - self.u)


class _Trajectories:
    """Residuals as a function of u = (theta, x0), and their derivatives."""

    def __init__(self, case: Case, data: systems.Simulation):
        self.solve, self.data = Solver(case.ode.equations(), data.t), data
        self.n_params = len(case.theta)

    def __call__(self, u: np.ndarray) -> np.ndarray:
        """Return trajectories, shape ``(draw, time, state)``, of points ``(draw, entry)``."""
        return self.solve(u[:, self.n_params :], u[:, : self.n_params]).x

    def residuals(self, u, sigma) -> np.ndarray:
        # What cannot be integrated is far off, and finite: the optimiser turns round.
        x = np.nan_to_num(self(u[None])[0], nan=1e6, posinf=1e6, neginf=-1e6)
        return ((x - self.data.y) / sigma).ravel()

    def derivatives(self, u) -> np.ndarray:
        """Return central differences, shape ``(time, state, entry)``; one call of the solver."""
        step = STEP * np.maximum(np.abs(u), 1e-3)
        x = self(np.concatenate([u + np.diag(step), u - np.diag(step)]))
        up, down = np.split(np.nan_to_num(x), 2)
        return np.moveaxis((up - down) / (2 * step[:, None, None]), 0, -1)

    def jacobian(self, u, sigma) -> np.ndarray:
        return (self.derivatives(u) / sigma[:, None]).reshape(-1, len(u))


def maximum_likelihood(
    case: Case, data: systems.Simulation, gp: gm.StateGP, seed: int
) -> LikelihoodFit:
    """Fit (theta, x0) by least squares, every state weighted by its noise.

    From the mode of gradient matching and from points around it; sigma is the
    Gaussian processes' at first and then the residuals' own, which maximises
    the likelihood over sigma too.

    Parameters
    ----------
    case : Case
        The system and its box.
    data : Simulation
        The observations.
    gp : StateGP
        Gaussian processes fitted to them.
    seed : int
        Seed of the starts.

    Returns
    -------
    LikelihoodFit
    """
    trajectories = _Trajectories(case, data)
    n_params, n_states = len(case.theta), len(case.x0)
    low, high = (
        np.r_[np.full(n_params, edge), np.full(n_states, sign * np.inf)]
        for edge, sign in zip(case.paper.theta_box, (-1, 1), strict=True)
    )

    def fit(u, sigma):
        margin = 1e-9 * (high - low)[:n_params].mean()
        return least_squares(
            trajectories.residuals,
            np.clip(u, low + margin, high - margin),
            jac=trajectories.jacobian,
            bounds=(low, high),
            x_scale="jac",
            args=(sigma,),
            max_nfev=EVALUATIONS,
        )

    sigma = np.asarray(gp.sigma)
    best = min((fit(u, sigma) for u in _starts(case, gp, seed)), key=lambda attempt: attempt.cost)
    degrees = data.y.size - len(best.x)
    for _ in range(REWEIGHTED):
        squares = np.square(trajectories(best.x[None])[0] - data.y).mean(axis=0)
        sigma = np.sqrt(squares * data.y.size / degrees)
        best = fit(best.x, sigma)
    covariance = np.linalg.pinv(best.jac.T @ best.jac, hermitian=True)
    x = trajectories(best.x[None])[0]
    note = "" if best.success else f"least squares: {best.message}"
    return LikelihoodFit(best.x, covariance, x, trajectories.derivatives(best.x), (low, high), note)


def _starts(case: Case, gp: gm.StateGP, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    ode, parameters = case.ode, _parameters(case)
    gamma = np.full(len(ode.states), case.paper.gamma)
    problem = Problem.of(ode, gp, parameters, gamma)
    mode = optimise_from_prior(problem, gp.posterior_mean(), rng)
    theta = parameters.natural(mode.u)[0]
    around = [theta * np.exp(0.5 * rng.normal(size=len(theta))) for _ in range(N_STARTS - 1)]
    return [np.r_[start, mode.x[0]] for start in (theta, *around)]


@cache
def _parameters(case: Case) -> Parameters:
    return parameters_of(case.priors(), case.ode.params)

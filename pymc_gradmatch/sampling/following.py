r"""Draws that follow the ODE, for posteriors in which NUTS gets stuck.

What the ODE is solved from, parameters and x(t0), and what the likelihood needs beside are
few.  Given them, minus the log of Theorem 1 is half a sum of squares r of the states (prior,
mismatch and, nearly, what is observed).  With J its Jacobian at the solution and
:math:`L L^T = J^T J`, the states that solve

.. math:: L^{-1} J^T r(x) = z, \qquad z \sim N(0, I)

have the density :math:`N(z \mid 0, I)\, |\det L^{-1} J^T J(x)|` ("randomise then optimise" [1]_).
They follow what is curved of the right-hand side, from which draws of a normal approximation
are tens of nats away where the constraint is tight.  So a mixture of t distributions in the few
is a proposal for all, and importance sampling moves it to the matched posterior, however bent
that is.

References
----------
.. [1] Bardsley, J. M., Solonen, A., Haario, H., Laine, M. (2014). Randomize-then-optimize: a
   method for sampling from posterior distributions in nonlinear inverse problems. *SIAM
   Journal on Scientific Computing* 36(4).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from arviz_stats import rhat
from numpy.typing import NDArray
from pytensor.graph.traversal import ancestors
from scipy.linalg import solve_triangular

from pymc_gradmatch._pymc import EVALUATE_ONCE
from pymc_gradmatch.exact import ExactPosterior, Mixture, Weighted, fit_mixture, gather, repeated
from pymc_gradmatch.gp import StateGP, is_states
from pymc_gradmatch.model import (
    Constraint,
    Squares,
    constraints,
    known_starts,
    of_model,
    residuals,
)
from pymc_gradmatch.numerics import Density, matvec
from pymc_gradmatch.ode import ODE

MOST_COORDINATES = 600  # of states: a draw costs their number to the power of three
SEARCHES, ENOUGH = 2, 400  # of their own; effective draws that are a chain
MOST_PILOTS, WIDER = 3_000, 2.0  # draws that the first proposal is fitted to, and one around it
AT_ONCE = 1_000_000  # numbers in the matrices of draws that are solved for together
AGREED, CHANCE = 0.01, 10  # R-hat less one; in fewer than a thousand draws chance moves it further
COMPARED = 1_000  # draws of each chain that tell whether searches agree
MOST_STEPS, SOLVED = 10, 1e-3  # of Newton, and the error of z that is left
SHORTER = (1.0, 0.3, 0.1)  # of a step, where a whole one leads away


class Chains(NamedTuple):
    """Draws of value variables, and whether their weights are reliable and searches agree."""

    u: NDArray[np.float64]
    """Shape ``(chain, draw, n)``."""
    pareto_k: float
    is_reliable: bool


class Followed:
    """A posterior as a function of what the ODE needs: its states are drawn given that.

    Parameters
    ----------
    model : pymc.Model
        With one constraint.
    density : callable
        Its log density at value variables, shape ``(point, n)``, in the order of the model.

    Raises
    ------
    ValueError
        If the exact posterior cannot be written, or is of other variables.
    """

    def __init__(self, model: pm.Model, density: Density):
        self.target = ExactPosterior(model)
        self._density = density
        [constraint] = constraints(model)
        if not isinstance(constraint.gp, StateGP):
            msg = "the model has an axis of experiments; expected one of a single data set."
            raise ValueError(msg)  # noqa: TRY004  the model is refused, not a type
        self._gp, self._ode = constraint.gp, constraint.ode.of_levels
        self._squares = Squares.of(self._gp, gamma_of(constraint))
        self._told, _ = of_model(model, constraint.ode, self._gp)
        self._names = [model.rvs_to_values[rv].name for rv in model.free_RVs]
        [self._states_name] = [
            model.rvs_to_values[rv].name for rv in model.free_RVs if is_states(rv)
        ]
        if others := {*self._names} - {self._states_name, *self.target.value_names}:
            msg = f"neither the ODE nor the likelihood needs {', '.join(sorted(others))}."
            raise ValueError(msg)

    @property
    def n_random(self) -> int:
        """How many standard normal numbers z the states are made of."""
        n_times, n_states = self._gp.prior_mean.shape
        return (n_times - 1) * n_states

    def __call__(
        self, phi: NDArray[np.float64], z: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return log densities of points, estimated without bias, and value variables.

        Parameters
        ----------
        phi : array of float
            What the ODE and the likelihood need, shape ``(draw, n)``.
        z : array of float
            What the states are made of, shape ``(draw, n_random)``.
        """
        at = self.target.integrated(phi)
        [theta], [trajectories] = at.theta, at.trajectories
        solved = np.flatnonzero(np.isfinite(trajectories).all(axis=(1, 2)))
        theta = theta.reshape(len(phi), -1)[solved]
        values = {name: part[solved] for name, part in at.values.items()}
        deviation, log_density = self._states(theta, trajectories[solved], values, z[solved])
        values[self._states_name] = deviation.mT
        parts = [values[name].reshape(len(solved), -1) for name in self._names]
        u = np.zeros((len(phi), sum(part.shape[1] for part in parts)))
        u[solved] = np.concatenate(parts, axis=1)
        found = np.isfinite(log_density)
        ended = solved[found]
        ratio = np.full(len(phi), -np.inf)
        if len(ended):
            ratio[ended] = self._density(u[ended])[0] - log_density[found] + at.log_volume[ended]
        return np.where(np.isfinite(ratio), ratio, -np.inf), u

    def _states(self, theta, trajectories, values, z) -> tuple[NDArray, NDArray]:
        """Draw the states, shape ``(draw, state, time)``, and return their log densities."""
        levels = self._gp.levels_of(trajectories)
        n_params, n_draws = theta.shape[1], len(theta)
        drawn = [(np.empty((0, *levels.shape[:0:-1])), np.empty(0))]
        n_chunks = max(1, -(-n_draws * self.n_random**2 // AT_ONCE))
        for part in np.array_split(np.arange(n_draws), min(n_chunks, max(n_draws, 1))):
            slopes, curvatures = [], []
            for i in part:
                told = self._told.given({name: value[i] for name, value in values.items()})
                slopes.append(told(theta[i], levels[i]).by_states)
                curvatures.append(told.curvature(theta[i], levels[i])[n_params:, n_params:])
            if len(part):
                sums = SumsOfSquares(
                    self._ode, self._gp, self._squares, theta[part], levels[part],
                    np.array(slopes), np.array(curvatures), self._told.rows,
                )  # fmt: skip
                drawn.append(randomised(sums, z[part]))
        deviations, log_densities = zip(*drawn, strict=True)
        return np.concatenate(deviations), np.concatenate(log_densities)


class SumsOfSquares:
    """Minus the log of Theorem 1 given parameters and x(t0), around a solution for each draw.

    Parameters
    ----------
    ode, gp, squares : ODE, StateGP, Squares
        What Theorem 1 is written with.
    theta, levels : array of float
        Parameters and solutions, shapes ``(draw, param)`` and ``(draw, time, state)``.
    slopes, curvatures : array of float
        What is observed as a quadratic there: derivatives of its log density, shape ``(draw,
        time, state)``, and minus the second, by state and row, shape ``(draw, n, n)``.
    rows : array of int
        The times at which something is observed.
    """

    def __init__(
        self, ode: ODE, gp: StateGP, squares: Squares,
        theta: NDArray, levels: NDArray, slopes: NDArray, curvatures: NDArray, rows: NDArray,
    ):  # fmt: skip
        self._ode, self._gp, self._squares, self._theta = ode, gp, squares, theta
        n_times, n_states = gp.prior_mean.shape
        self.solution = ((levels - gp.prior_mean) / gp.scale).mT
        self._slopes = (slopes * gp.scale).mT
        units = np.repeat(gp.scale, len(rows))
        self._curvatures = curvatures * units * units[:, None]
        self._rows = (np.arange(n_states)[:, None] * n_times + rows).ravel()
        every = np.arange(len(theta))
        mismatch, self._by_x = self.linearised(self.solution, every)
        self.gradient_there = self.gradient(self.solution, mismatch, every)
        self.hessian_there = self.hessian(self._by_x, every)

    def linearised(self, deviation: NDArray, draws: NDArray) -> tuple[NDArray, NDArray]:
        """Return the whitened mismatch, and derivatives of f by the states of the same time."""
        gp, n = self._gp, len(deviation)
        n_times, n_states = gp.prior_mean.shape
        levels = gp.prior_mean + gp.scale * deviation.mT
        theta = np.repeat(self._theta[draws], n_times, axis=0)
        with np.errstate(all="ignore"):
            f, by_x, _ = self._ode.linearised(np.tile(gp.t, n), levels.reshape(-1, n_states), theta)
            gap = residuals(f.reshape(levels.shape), levels, gp).mT
            by_x = (by_x * gp.scale / gp.scale[:, None]).reshape(n, n_times, n_states, n_states)
            return matvec(self._squares.whiten, gap), by_x.transpose(0, 2, 3, 1)

    def gradient(self, deviation: NDArray, mismatch: NDArray, draws: NDArray) -> NDArray:
        """Return J^T r with J at the solution, by the states after the first time."""
        squares = self._squares
        back = matvec(squares.whiten.mT, mismatch)
        gradient = matvec(squares.precision, deviation) - matvec(squares.slope.mT, mismatch)
        gradient += (self._by_x[draws] * back[:, :, None]).sum(axis=1) - self._slopes[draws]
        away = (deviation - self.solution[draws]).reshape(len(draws), -1)[:, self._rows]
        flat = gradient.reshape(len(draws), -1)
        flat[:, self._rows] += matvec(self._curvatures[draws], away)
        return gradient[:, :, 1:].reshape(len(draws), -1)

    def hessian(self, by_x: NDArray, draws: NDArray) -> NDArray:
        """Return J^T J(x), J at the solution and J(x) where f has given derivatives."""
        hessian = self._squares.pulled_back(self._by_x[draws], by_x)
        n = self.solution[0].size
        flat = hessian.reshape(len(draws), n, n)
        flat[:, self._rows[:, None], self._rows] += self._curvatures[draws]
        n -= len(self.solution[0])
        return hessian[:, :, 1:, :, 1:].reshape(len(draws), n, n)


def randomised(sums: SumsOfSquares, z: NDArray[np.float64]) -> tuple[NDArray, NDArray]:
    r"""Solve :math:`L^{-1} J^T r(x) = z` by Newton's method, for all draws side by side.

    Returns
    -------
    deviation : array of float
        States from the prior mean in standard deviations of the data, ``(draw, state, time)``.
    log_density : array of float
        That of the draw, up to a constant; infinite where no solution was found.
    """
    deviation, log_density = sums.solution.copy(), np.full(len(z), np.inf)
    hessian = sums.hessian_there
    factor, is_definite = _cholesky(hessian)
    wanted = matvec(factor, z)
    left = sums.gradient_there - wanted
    going = np.flatnonzero(is_definite)
    hessian = hessian[going]
    for _ in range(MOST_STEPS):
        if not len(going):
            break
        steps = -np.linalg.solve(hessian, left[going][..., None])[..., 0]
        steps = steps.reshape(len(going), deviation.shape[1], -1)
        lengths = np.linalg.norm(_solved(factor[going], left[going]), axis=1)
        by_x = np.empty((len(going), deviation.shape[1], *deviation.shape[1:]))
        has_moved = np.zeros(len(going), dtype=bool)
        for shorter in SHORTER:
            these = np.flatnonzero(~has_moved)
            if not len(these):
                break
            draws = going[these]
            tried = deviation[draws]
            tried[:, :, 1:] += shorter * steps[these]
            mismatch, by_x[these] = sums.linearised(tried, draws)
            there = sums.gradient(tried, mismatch, draws) - wanted[draws]
            with np.errstate(all="ignore"):
                nearer = np.linalg.norm(_solved(factor[draws], there), axis=1)
            better = nearer < lengths[these]
            deviation[draws[better]], left[draws[better]] = tried[better], there[better]
            has_moved[these[better]], lengths[these[better]] = True, nearer[better]
        going, lengths = going[has_moved], lengths[has_moved]
        hessian = sums.hessian(by_x[has_moved], going)
        ends = lengths < SOLVED
        ended = going[ends]
        drawn = z[ended] + _solved(factor[ended], left[ended])
        volume = np.log(np.diagonal(factor[ended], axis1=1, axis2=2)).sum(axis=1)
        log_density[ended] = np.linalg.slogdet(hessian[ends])[1] - volume
        log_density[ended] -= 0.5 * np.square(drawn).sum(axis=1)
        going, hessian = going[~ends], hessian[~ends]
    return deviation, log_density


def _cholesky(matrices: NDArray) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return lower factors, and of which matrices they are: the identity where there is none."""
    factors = np.broadcast_to(np.eye(matrices.shape[-1]), matrices.shape).copy()
    is_definite = np.isfinite(matrices).all(axis=(1, 2))
    for place in np.flatnonzero(is_definite):
        try:
            factors[place] = np.linalg.cholesky(matrices[place])
        except np.linalg.LinAlgError:
            is_definite[place] = False
    return factors, is_definite


def _solved(factors: NDArray, vectors: NDArray) -> NDArray[np.float64]:
    """Return the solutions of lower triangular systems, one for each vector."""
    solutions = np.empty_like(vectors)
    for solution, *one in zip(solutions, factors, vectors, strict=True):
        solution[:] = solve_triangular(*one, lower=True, check_finite=False)
    return solutions


def gamma_of(constraint: Constraint) -> NDArray[np.float64]:
    """Return what the diagonal of A + gamma I has more than that of A, shape ``(state,)``."""
    # Of independent coordinates, one at a time: the rows of the basis' factor.
    basis, n_time = constraint.basis, constraint.gp.t.shape[-1]
    each = pt.eye(n_time)[:, None] * pt.sqrt(basis.variances)
    vectors = basis.residual(each).eval(mode=EVALUATE_ONCE)
    total = np.square(vectors).sum(axis=0).T
    return (total - np.diagonal(constraint.gp.operators().A, axis1=1, axis2=2)).mean(axis=1)


def followed(model: pm.Model, density: Density) -> Followed | None:
    """Return the posterior of one ODE, of known gamma and starts from anywhere; else none."""
    found = constraints(model)
    if len(found) != 1:
        return None
    [constraint] = found
    gp = constraint.gp
    fits = (
        gp.prior_mean.ndim == 2
        and gp.prior_mean.size <= MOST_COORDINATES
        and not gp.is_random
        and not known_starts(model)
        and sum(map(is_states, model.free_RVs)) == 1
        and not set(ancestors(list(constraint.basis))) & set(model.basic_RVs)
        and all(model.named_vars.get(name) in model.free_RVs for name in constraint.ode.params)
    )
    if not fits:
        return None
    try:
        return Followed(model, density)
    except ValueError:
        return None


def follow(matched: Followed, posterior: xr.Dataset, rng: np.random.Generator) -> Chains:
    """Draw as many chains as there are of draws that lie about where a posterior is.

    Two searches, each from half of the chains, so that R-hat compares what came about by itself.
    A chain is a share of the draws of all rounds of one of them, repeated as often as their
    weights say: effective sample sizes take account of that.  Searches go on until they agree.
    """
    n_chains, n_draws = posterior.sizes["chain"], posterior.sizes["draw"]
    phi = matched.target.coordinates(posterior)
    around = Mixture.around(phi.mean(axis=0), WIDER**2 * np.atleast_2d(np.cov(phi.T)))
    halves = np.array_split(phi.reshape(n_chains, n_draws, -1), min(SEARCHES, n_chains))
    searches = [_gathered(matched, half, around, rng) for half in halves]
    for found in zip(*searches, strict=False):  # until one has no rounds left
        drawn = []
        for half, (weighted, u) in zip(halves, found, strict=True):
            places = chains_of(weighted, len(half), max(n_draws, COMPARED), rng)
            drawn.append((weighted.points[places], u[places]))
        points, u = map(np.concatenate, zip(*drawn, strict=True))
        each = [weighted for weighted, _ in found]
        is_reliable = all(weighted.is_reliable for weighted in each) and agree(points)
        if is_reliable:
            break
    kept = np.arange(n_draws) * u.shape[1] // n_draws
    return Chains(u[:, kept], max(weighted.pareto_k for weighted in each), is_reliable)


def chains_of(
    weighted: Weighted, n_chains: int, n_draws: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the places of chains of weighted draws, none in two of them, ``(chain, draw)``."""
    mixed = rng.permutation(len(weighted.weights))
    shares = [mixed[chain::n_chains] for chain in range(n_chains)]
    return np.array([share[repeated(weighted.weights[share], n_draws, rng)] for share in shares])


def agree(chains: NDArray[np.float64]) -> bool:
    """Tell whether R-hat is what PyMC asks for, of chains of shape ``(chain, draw, n)``.

    Of a single chain it is that of its halves.
    """
    if len(chains) == 1:
        half = chains.shape[1] // 2
        chains = chains[0, : 2 * half].reshape(2, half, -1)
    return bool((rhat(chains) - 1 < max(AGREED, CHANCE / chains.shape[1])).all())


def _gathered(
    matched: Followed, near, around: Mixture, rng
) -> Iterator[tuple[Weighted, NDArray[np.float64]]]:
    """Yield weighted draws of the few, and value variables.

    First when they are worth as many chains as given, then twice as many and so on, at last
    when there are no rounds left.
    """
    pilots = rng.permutation(near.reshape(-1, near.shape[-1]))[:MOST_PILOTS]
    start = fit_mixture(pilots, rng).stretched().defended(around)
    rounds, needed = [], len(near) * ENOUGH

    def target(phi):
        height, u = matched(phi, rng.normal(size=(len(phi), matched.n_random)))
        rounds.append(u)
        return height

    for weighted in gather(target, start, rng):
        if weighted.is_reliable and weighted.n_effective > needed:
            needed *= 2
            yield weighted, np.concatenate(rounds)
    yield weighted, np.concatenate(rounds)

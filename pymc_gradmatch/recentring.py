"""A prior mean that satisfies the ODE: what removes the smoothing bias."""

import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.checks import check_states
from pymc_gradmatch.climbing import Matched, climb, climb_from_prior
from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.naming import in_order
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.parameters import Parameters, parameters_of
from pymc_gradmatch.progress import reporting
from pymc_gradmatch.series import as_positive

__all__ = ["SEARCHING", "Recentred", "follow", "recentre"]

ROUNDS = 10
SETTLED = 0.1  # posterior standard deviations
SEARCHING = "seeking the ODE's solution from draws of the prior"


class Recentred(NamedTuple):
    """What :func:`recentre` found."""

    gp: StateGP
    """With the ODE's solution as prior mean, and sigma from the residuals around it."""
    theta: dict[str, float]
    """The parameters of that solution."""
    moves: list[float]
    """How far each round moved theta, in posterior standard deviations, the most of all."""


def recentre(
    ode: ODE,
    gp: StateGP,
    *,
    priors: Mapping[str, TensorVariable],
    gamma: ArrayLike,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
) -> Recentred:
    r"""Make the ODE's own solution the prior mean of the states, in rounds.

    Each round finds the most probable states and parameters, integrates the
    ODE numerically from there, and takes the solution m as the prior mean:

    .. math:: N(x \mid m, C)\; N(f(x, \theta) \mid \dot m + D (x - m), A + \gamma I)

    Theorem 1 holds for any mean.  The Gaussian process then describes what is
    left, the distance from one solution of the ODE, and pulls towards no
    constant: the smoothing bias goes.  It ends when theta moves by less than a
    tenth of its posterior standard deviation, at ten rounds, or where the ODE
    cannot be integrated.  A handful of solutions in all.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    gp : StateGP
        Gaussian processes with their data.  Re-centring serves best with an
        inflated amplitude on a fine grid:
        ``gp.with_grid(4).with_amplitude(100)``.
    priors : mapping of str to TensorVariable
        As for :func:`~pymc_gradmatch.build_model`.
    gamma : array_like of float
        Variance of the mismatch, one number or one per state.
    random_seed : int or numpy.random.Generator, optional
        Seed of the eight prior draws among which the first estimate is sought.
    progressbar : bool, default True
        Show what is being done, from the first second on.

    Returns
    -------
    Recentred
        Named tuple ``(gp, theta, moves)``.

    Raises
    ------
    ValueError
        If names do not fit, or the right-hand side is finite at no start.

    Warns
    -----
    UserWarning
        If the ODE cannot be integrated at an estimate; the rounds before stand.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> t = np.linspace(0, 4, 9)
    >>> y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))
    >>> gp = gm.fit_gp(t, y, cov="Matern52", random_seed=1).with_grid(4).with_amplitude(100)
    >>> priors = {"rate": pm.HalfNormal.dist(5)}
    >>> fit = gm.recentre(decay, gp, priors=priors, gamma=1e-4, random_seed=1)
    >>> bool(fit.moves[-1] < 0.1)
    True
    """
    check_states(ode, gp.states)
    in_order(priors, ode.params, "priors are")
    gammas = as_positive(gamma, len(gp.states), "gamma")
    parameters = parameters_of(priors, ode.params)
    rng = np.random.default_rng(random_seed)
    x = gp.posterior_mean()
    with reporting(SEARCHING, enabled=progressbar) as say:
        start = climb_from_prior(ode, gp, parameters, gammas, x, rng)
        gp, matched, moves = follow(ode, gp, parameters, start, lambda gp: (gp, gammas), say=say)
    return Recentred(gp, parameters.by_name(matched.u), moves)


def follow(
    ode: ODE,
    gp: StateGP,
    parameters: Parameters,
    matched: Matched,
    settings: Callable[[StateGP], tuple[StateGP, NDArray[np.float64]]],
    *,
    say: Callable[[str], None],
    rounds: int = ROUNDS,
) -> tuple[StateGP, Matched, list[float]]:
    """Re-centre until theta settles; ``settings`` gives each round its kernel and its gamma."""
    moves: list[float] = []
    for number in range(rounds):
        last = f", the last moved theta by {moves[-1]:.1g} sd" if moves else ""
        say(f"re-centring on the ODE's solution: round {number + 1}{last}")
        centred = _centred(ode, gp, parameters, matched)
        if centred is None:
            break
        gp, gamma = settings(centred)
        before = matched.u
        matched = climb(ode, gp, parameters, gamma, [(before, gp.prior_mean)])
        moves.append(float(np.max(np.abs(matched.u - before) / matched.sd)))
        if moves[-1] < SETTLED:
            break
    return gp, matched, moves


def _advice(ode: ODE, gp: StateGP, start: NDArray[np.float64]) -> str:
    """Say which states start below zero, where their data never are, or else where to look."""
    below = [
        f"{state!r} at {value:.3g}"
        for state, value, data in zip(ode.states, start, gp.y.T, strict=True)
        if value < 0 <= data.min()
    ]
    look = "Check the priors, and start elsewhere with another random_seed."
    if not below:
        return look
    return (
        f"The state {', '.join(below)} starts below zero, where its data never are: if noise hides "
        "so small a start, write the ODE for its logarithm, or give its start a likelihood of its "
        f'own, for example pm.Normal("start", x[0, k], small, observed=...). {look}'
    )


def distance_from_solution(
    ode: ODE, gp: StateGP, parameters: Parameters, matched: Matched
) -> NDArray[np.float64]:
    """Return how far the most probable states are from the solution with the same start.

    In sigma, root mean square over time, shape ``(state,)``; NaN if it cannot be integrated.
    """
    solution = _solution(ode, gp, parameters, matched)
    with np.errstate(over="ignore"):
        return np.sqrt(np.square((matched.x - solution) / gp.sigma).mean(axis=0))


def _solution(ode: ODE, gp: StateGP, parameters: Parameters, matched: Matched) -> NDArray:
    theta, _ = parameters.natural(matched.u)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return ode.solve(gp.t, matched.x[0], theta)


def _centred(ode: ODE, gp: StateGP, parameters: Parameters, matched: Matched) -> StateGP | None:
    solution = _solution(ode, gp, parameters, matched)
    theta, _ = parameters.natural(matched.u)
    residual = gp.y - solution[gp.observed]
    spent = (len(theta) + solution.shape[1]) / solution.shape[1]
    with np.errstate(over="ignore"):
        variance = np.square(residual).sum(axis=0) / max(len(residual) - spent, 1)
    if not (np.isfinite(solution).all() and np.isfinite(variance).all()):
        warnings.warn(
            f"the ODE could not be integrated at the estimate "
            f"{dict(zip(ode.params, theta.round(4).tolist(), strict=True))}: the prior mean stays "
            f"as it is, and so does the smoothing bias. {_advice(ode, gp, matched.x[0])}",
            UserWarning,
            stacklevel=4,
        )
        return None
    slope, *_ = ode.linearised(gp.t, solution, theta)
    return gp.with_mean(solution, slope).with_sigma(np.sqrt(variance))

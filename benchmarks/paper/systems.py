"""The paper's three benchmark systems, with its settings and their sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor import TensorVariable

import pymc_gradmatch as gm
from pymc_gradmatch.model import constraints


def keep_within(model: pm.Model, half_width: float) -> pm.Model:
    """Forbid states so many standard deviations of the data from their mean, in place.

    The reference code samples in such a box, 3 or 5 standard deviations wide on each side.
    """
    [match] = constraints(model)
    with model:
        inside = pt.all(pt.abs(match.x - match.gp.mean) <= half_width * match.gp.scale)
        pm.Potential("state_box", pt.switch(inside, 0.0, -np.inf))
    return model


class Noise(NamedTuple):
    """A noise level: one standard deviation for all states, or a ratio of variances."""

    kind: Literal["sd", "snr"]
    size: float

    def sigma(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the standard deviation of each state's noise, shape ``(state,)``."""
        if self.kind == "sd":
            return np.full(x.shape[1], self.size)
        return x.std(axis=0) / np.sqrt(self.size)


class PaperSettings(NamedTuple):
    """How Wenk et al. (2019) fit a system, with the boxes of their reference code."""

    cov: str
    shared: bool
    gamma: float
    theta_box: tuple[float, float]
    state_box: float
    state_step: float
    param_step: float
    draws: int


class Simulation(NamedTuple):
    """A simulated data set: times, observations, true states and noise per state."""

    t: NDArray[np.float64]
    y: NDArray[np.float64]
    x: NDArray[np.float64]
    sigma: NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class System:
    """An ODE with everything the paper fixes about it.

    Attributes
    ----------
    name, citation : str
        What it is called and where it comes from.
    ode : ODE
        The right-hand side.
    theta : mapping of str to float
        True parameters, in the order of ``ode.params``.
    x0 : tuple of float
        States at the first time, in the order of ``ode.states``.
    t : array of float
        Times of the observations.
    noise : mapping of str to Noise
        Noise levels by name.
    paper : PaperSettings
        Kernel, gamma, proposals and boxes of the paper.

    Examples
    --------
    >>> from benchmarks.paper.systems import lotka_volterra
    >>> data = lotka_volterra.simulate("low", random_seed=1)
    >>> data.y.shape
    (20, 2)
    """

    name: str
    citation: str
    ode: gm.ODE
    theta: Mapping[str, float]
    x0: tuple[float, ...]
    t: NDArray[np.float64]
    noise: Mapping[str, Noise]
    paper: PaperSettings

    def simulate(
        self,
        noise: str,
        *,
        t: ArrayLike | None = None,
        random_seed: int | np.random.Generator | None = None,
    ) -> Simulation:
        """Integrate the system numerically and add Gaussian noise.

        Parameters
        ----------
        noise : str
            Name of a noise level, one of ``system.noise``.
        t : array_like of float, optional
            Times, in place of the paper's; the first is where ``x0`` holds.
        random_seed : int or numpy.random.Generator, optional
            Seed of the noise.

        Returns
        -------
        Simulation
        """
        if noise not in self.noise:
            msg = f"noise is {noise!r}; {self.name} has the levels {list(self.noise)}."
            raise ValueError(msg)
        times = self.t if t is None else np.asarray(t, dtype=float)
        x = self.ode.solve(times, self.x0, self.theta)
        sigma = self.noise[noise].sigma(x)
        y = x + np.random.default_rng(random_seed).normal(size=x.shape) * sigma
        return Simulation(times, y, x, sigma)

    def priors(self) -> dict[str, TensorVariable]:
        """Return the reference code's prior: uniform on a box, for every parameter.

        Its middle, where NUTS starts, can be far from the posterior (50 on the
        Lotka-Volterra box); with a small gamma chains may be caught there.
        :func:`~pymc_gradmatch.sample_fgpgm` finds a start by itself; for NUTS
        prefer a prior that knows the scale, such as ``pm.HalfNormal.dist(5)``.
        """
        return {name: pm.Uniform.dist(*self.paper.theta_box) for name in self.ode.params}

    def __repr__(self) -> str:
        return f"System({self.name}: {self.ode!r}, noise levels {list(self.noise)})"


def _lotka_volterra(t, x, theta):
    prey, predator = x
    return (
        theta.alpha * prey - theta.beta * prey * predator,
        -theta.gamma * predator + theta.delta * prey * predator,
    )


def _protein_transduction(t, x, theta):
    binding = theta.k2 * x.S * x.R - theta.k3 * x.RS
    activation = theta.k4 * x.RS
    deactivation = theta.V * x.Rpp / (theta.Km + x.Rpp)
    return {
        "S": -theta.k1 * x.S - binding,
        "dS": theta.k1 * x.S,
        "R": -binding + deactivation,
        "RS": binding - activation,
        "Rpp": activation - deactivation,
    }


def _fitzhugh_nagumo(t, x, theta):
    V, R = x
    return (
        theta.phi * (V - V**3 / 3 + R),
        -(V - theta.alpha + theta.beta * R) / theta.phi,
    )


lotka_volterra = System(
    name="Lotka-Volterra",
    citation=(
        "Lotka, A. J. (1932). The growth of mixed populations: two species competing for a common "
        "food supply. Journal of the Washington Academy of Sciences 22, 461-469. Set-up: Wenk et "
        "al. (2019), section 4; 20 times on [0, 2], noise sd 0.1 or 0.5. One kernel for both "
        "states (the paper's appendix)."
    ),
    ode=gm.ODE(_lotka_volterra, ["prey", "predator"], ["alpha", "beta", "gamma", "delta"]),
    theta={"alpha": 2.0, "beta": 1.0, "gamma": 4.0, "delta": 1.0},
    x0=(5.0, 3.0),
    t=np.linspace(0, 2, 20),
    noise={"low": Noise("sd", 0.1), "high": Noise("sd", 0.5)},
    paper=PaperSettings("ExpQuad", True, 0.3, (0.0, 100.0), 3.0, 0.075, 0.09, 100_000),
)

protein_transduction = System(
    name="protein transduction",
    citation=(
        "Vyshemirsky, V. and Girolami, M. A. (2008). Bayesian ranking of biochemical system "
        "models. Bioinformatics 24(6), 833-839. Set-up: Wenk et al. (2019), section 4; noise sd "
        "0.001 or 0.01. The denominator is the paper's, without the 1e-6 of the reference code."
    ),
    ode=gm.ODE(
        _protein_transduction,
        ["S", "dS", "R", "RS", "Rpp"],
        ["k1", "k2", "k3", "k4", "V", "Km"],
    ),
    theta={"k1": 0.07, "k2": 0.6, "k3": 0.05, "k4": 0.3, "V": 0.017, "Km": 0.3},
    x0=(1.0, 0.0, 1.0, 0.0, 0.0),
    t=np.array([0, 1, 2, 4, 5, 7, 10, 15, 20, 30, 40, 50, 60, 80, 100], dtype=float),
    noise={"low": Noise("sd", 0.001), "high": Noise("sd", 0.01)},
    paper=PaperSettings("Sigmoid", False, 1e-4, (0.0, 4.0), 5.0, 0.001, 0.15, 300_000),
)

fitzhugh_nagumo = System(
    name="FitzHugh-Nagumo",
    citation=(
        "FitzHugh, R. (1961). Impulses and physiological states in theoretical models of nerve "
        "membrane. Biophysical Journal 1(6), 445-466; Nagumo, J., Arimoto, S. and Yoshizawa, S. "
        "(1962). An active pulse transmission line simulating nerve axon. Proceedings of the IRE "
        "50(10), 2061-2070. Set-up: Wenk et al. (2019), section 4, with the signs and the start of "
        "the reference code; times on [0, 10], here 20 of them as in its SNR 10 figures."
    ),
    ode=gm.ODE(_fitzhugh_nagumo, ["V", "R"], ["alpha", "beta", "phi"]),
    theta={"alpha": 0.2, "beta": 0.2, "phi": 3.0},
    x0=(-1.0, 1.0),
    t=np.linspace(0, 10, 20),
    noise={"snr10": Noise("snr", 10.0), "snr100": Noise("snr", 100.0)},
    paper=PaperSettings("Matern52", False, 3e-4, (1e-4, 10.0), 3.0, 0.075, 0.12, 300_000),
)

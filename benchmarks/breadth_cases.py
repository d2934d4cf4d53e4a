"""The problems of the breadth study: ODEs of the literature, simulated, nothing tuned for us.

An ordinary user's choices throughout: all states observed, times that show the
dynamics, noise a few per cent of how much each state varies, and for every
parameter a half-normal prior five times as wide as its size, or as one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pymc as pm
from numpy.typing import NDArray
from pytensor.tensor import TensorVariable

import pymc_gradmatch as gm
from benchmarks.rivals import Prior
from pymc_gradmatch.paper.systems import Simulation

__all__ = ["PROBLEMS", "REPLICATES", "Problem", "problem_named"]

REPLICATES = range(1, 6)


@dataclass(frozen=True)
class Problem:
    """A system with its truth, its times and its noise.

    Attributes
    ----------
    name, citation : str
        What it is called, where it comes from, and what deviates from there.
    rhs : callable
        The right-hand side as a user writes it.
    x0, theta : mapping of str to float
        True states at the first time and true parameters, in the order of the ODE's.
    t : array of float
        Times of the observations; the first is where ``x0`` holds.
    noise : float
        Standard deviation of each state's noise, as a share of the state's own.
    stiff : bool
        Whether the exact posterior needs an implicit solver.
    """

    name: str
    citation: str
    rhs: Callable
    x0: Mapping[str, float]
    theta: Mapping[str, float]
    t: NDArray[np.float64]
    noise: float = 0.05
    stiff: bool = False
    ode: gm.ODE = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "ode", gm.ODE(self.rhs, list(self.x0), list(self.theta)))

    def simulate(self, replicate: int) -> Simulation:
        """Return one of the data sets; its number is the seed of the noise."""
        x = self.ode.solve(self.t, self.x0, self.theta)
        sigma = self.noise * x.std(axis=0)
        noise = np.random.default_rng(replicate).normal(size=x.shape) * sigma
        return Simulation(self.t, x + noise, x, sigma)

    def prior_of(self, name: str) -> Prior:
        """Return the prior of a parameter: five times as wide as its size, or as one."""
        return Prior("HalfNormal", (5 * max(1.0, self.theta[name]),))

    def priors(self) -> dict[str, TensorVariable]:
        """Return the prior of every parameter, for PyMC."""
        return {name: self.prior_of(name).pymc() for name in self.theta}


def problem_named(name: str) -> Problem:
    """Return one of the problems."""
    return next(problem for problem in PROBLEMS if problem.name == name)


def _decay(t, x, theta):
    return [-theta.rate * x.mass]


def _logistic(t, x, theta):
    return [theta.r * x.n * (1 - x.n / theta.K)]


def _oral_dose(t, x, theta):
    return {
        "gut": -theta.ka * x.gut,
        "plasma": theta.ka * x.gut / theta.V - theta.ke * x.plasma,
    }


def _michaelis_menten(t, x, theta):
    rate = theta.Vmax * x.S / (theta.Km + x.S)
    return {"S": -rate, "P": rate}


def _pendulum(t, x, theta):
    return {"angle": x.velocity, "velocity": -theta.b * x.velocity - theta.c * pm.math.sin(x.angle)}


def _van_der_pol(t, x, theta):
    return {"x": x.v, "v": theta.mu * (1 - x.x**2) * x.v - x.x}


def _sir(size: float) -> Callable:
    def rhs(t, x, theta):
        infections = theta.beta * x.S * x.I / size
        recoveries = theta.gamma * x.I
        return {"S": -infections, "I": infections - recoveries, "R": recoveries}

    return rhs


def _seir(t, x, theta):
    infections = theta.beta * x.S * x.I
    return {
        "S": -infections,
        "E": infections - theta.kappa * x.E,
        "I": theta.kappa * x.E - theta.gamma * x.I,
        "R": theta.gamma * x.I,
    }


def _chemostat(t, x, theta):
    dilution, inflow = 0.3, 10.0
    growth = theta.mu * x.S / (theta.Ks + x.S) * x.N
    return {"N": growth - dilution * x.N, "S": dilution * (inflow - x.S) - growth / theta.Y}


def _brusselator(t, x, theta):
    autocatalysis = x.x**2 * x.y
    return {
        "x": theta.a + autocatalysis - (theta.b + 1) * x.x,
        "y": theta.b * x.x - autocatalysis,
    }


def _goodwin(t, x, theta):
    return {
        "mRNA": 1 / (1 + x.repressor**10) - theta.m1 * x.mRNA,
        "protein": theta.k2 * x.mRNA - theta.m2 * x.protein,
        "repressor": theta.k3 * x.protein - theta.m3 * x.repressor,
    }


def _lorenz63(t, x, theta):
    return (
        theta.sigma * (x.y - x.x),
        x.x * (theta.rho - x.z) - x.y,
        x.x * x.y - theta.beta * x.z,
    )


def _lorenz96(t, x, theta):
    n = len(x)
    return [(x[(i + 1) % n] - x[i - 2]) * x[i - 1] - x[i] + theta.F for i in range(n)]


def _enzyme(t, x, theta):
    binding = theta.kf * x.E * x.S - theta.kr * x.C
    catalysis = theta.kc * x.C
    return {
        "E": -binding + catalysis,
        "S": -binding,
        "C": binding - catalysis,
        "P": catalysis,
    }


def _robertson(t, x, theta):
    first = theta.k1 * x.A
    second = theta.k2 * x.B**2
    third = theta.k3 * x.B * x.C
    return {"A": -first + third, "B": first - second - third, "C": second}


def _tumour(t, x, theta):
    e, u = x
    return {
        "e": theta.s + theta.r * e * u / (theta.g + u) - 0.02 * e * u - theta.d * e,
        "u": theta.al * u * (1 - u / 80) - e * u / 4,
    }


PROBLEMS = (
    Problem(
        "decay",
        "First-order decay; eleven times over three time constants.",
        _decay,
        x0={"mass": 2.0},
        theta={"rate": 0.5},
        t=np.linspace(0, 6, 11),
    ),
    Problem(
        "logistic",
        "Verhulst, P. F. (1838). Notice sur la loi que la population suit dans son accroissement. "
        "Correspondance mathematique et physique 10, 113-121.",
        _logistic,
        x0={"n": 0.5},
        theta={"r": 0.8, "K": 10.0},
        t=np.linspace(0, 12, 25),
    ),
    Problem(
        "oral dose",
        "One compartment with first-order absorption: Boeckmann, A. J., Sheiner, L. B. and Beal, "
        "S. L. (1994). NONMEM users guide, part V, whose theophylline data have these times (h), a "
        "dose near 4.5 mg/kg, and about these values. Here the gut is observed too.",
        _oral_dose,
        x0={"gut": 4.5, "plasma": 0.0},
        theta={"ka": 1.5, "ke": 0.08, "V": 0.5},
        t=np.array([0, 0.25, 0.5, 1, 2, 3.5, 5, 7, 9, 12, 24]),
    ),
    Problem(
        "Michaelis-Menten",
        "Michaelis, L. and Menten, M. L. (1913). Die Kinetik der Invertinwirkung. Biochemische "
        "Zeitschrift 49, 333-369. A progress curve from four times Km.",
        _michaelis_menten,
        x0={"S": 2.0, "P": 0.0},
        theta={"Vmax": 1.0, "Km": 0.5},
        t=np.linspace(0, 5, 20),
    ),
    Problem(
        "pendulum",
        "Damped pendulum: the example in the documentation of scipy.integrate.odeint, with half as "
        "many times.",
        _pendulum,
        x0={"angle": np.pi - 0.1, "velocity": 0.0},
        theta={"b": 0.25, "c": 5.0},
        t=np.linspace(0, 10, 51),
    ),
    Problem(
        "Van der Pol",
        "Van der Pol, B. (1926). On relaxation-oscillations. Philosophical Magazine 2(11), "
        "978-992. mu 2, nearly three periods.",
        _van_der_pol,
        x0={"x": 2.0, "v": 0.0},
        theta={"mu": 2.0},
        t=np.linspace(0, 20, 40),
    ),
    Problem(
        "SIR fractions",
        "Kermack, W. O. and McKendrick, A. G. (1927). A contribution to the mathematical theory of "
        "epidemics. Proceedings of the Royal Society A 115, 700-721. Fractions; time in weeks.",
        _sir(1.0),
        x0={"S": 0.99, "I": 0.01, "R": 0.0},
        theta={"beta": 2.0, "gamma": 0.7},
        t=np.linspace(0, 12, 25),
    ),
    Problem(
        "SIR counts",
        "The same epidemic in a million people.",
        _sir(1e6),
        x0={"S": 0.99e6, "I": 0.01e6, "R": 0.0},
        theta={"beta": 2.0, "gamma": 0.7},
        t=np.linspace(0, 12, 25),
    ),
    Problem(
        "SIR days",
        "The same epidemic in days, from one infected person in ten thousand.",
        _sir(1.0),
        x0={"S": 0.9999, "I": 1e-4, "R": 0.0},
        theta={"beta": 0.3, "gamma": 0.1},
        t=np.linspace(0, 120, 41),
    ),
    Problem(
        "SEIR",
        "Anderson, R. M. and May, R. M. (1991). Infectious Diseases of Humans. Oxford University "
        "Press. Fractions, time in weeks, latent and infectious for half a week each.",
        _seir,
        x0={"S": 0.98, "E": 0.01, "I": 0.01, "R": 0.0},
        theta={"beta": 5.0, "kappa": 2.0, "gamma": 2.0},
        t=np.linspace(0, 10, 31),
    ),
    Problem(
        "chemostat",
        "Monod, J. (1950). La technique de culture continue. Annales de l'Institut Pasteur 79, "
        "390-410. Dilution 0.3 per hour and inflow 10 g/l are known.",
        _chemostat,
        x0={"N": 0.2, "S": 10.0},
        theta={"mu": 0.9, "Ks": 1.5, "Y": 0.5},
        t=np.linspace(0, 16, 30),
    ),
    Problem(
        "Brusselator",
        "Prigogine, I. and Lefever, R. (1968). Symmetry breaking instabilities in dissipative "
        "systems II. Journal of Chemical Physics 48, 1695-1700. The limit cycle at (1, 3).",
        _brusselator,
        x0={"x": 1.0, "y": 1.0},
        theta={"a": 1.0, "b": 3.0},
        t=np.linspace(0, 15, 50),
    ),
    Problem(
        "Goodwin",
        "Goodwin, B. C. (1965). Oscillatory behavior in enzymatic control processes. Advances in "
        "Enzyme Regulation 3, 425-438. Form, start and values of the toy model of PINTS, after "
        "Calderhead, B. and Girolami, M. (2009). Computational Statistics and Data Analysis 53; 51 "
        "of its 200 times.",
        _goodwin,
        x0={"mRNA": 0.0054, "protein": 0.053, "repressor": 1.93},
        theta={"k2": 2.0, "k3": 4.0, "m1": 0.12, "m2": 0.08, "m3": 0.1},
        t=np.linspace(0, 100, 51),
    ),
    Problem(
        "Lorenz-63",
        "Lorenz, E. N. (1963). Deterministic nonperiodic flow. Journal of the Atmospheric Sciences "
        "20, 130-141. From a point near the attractor, for two units of time.",
        _lorenz63,
        x0={"x": -8.0, "y": 7.0, "z": 27.0},
        theta={"sigma": 10.0, "rho": 28.0, "beta": 8 / 3},
        t=np.linspace(0, 2, 81),
    ),
    Problem(
        "Lorenz-96",
        "Lorenz, E. N. (1996). Predictability: a problem partly solved. ECMWF Seminar on "
        "Predictability, 1-18. Ten states instead of forty, F 8, two units of time on the "
        "attractor.",
        _lorenz96,
        x0=dict(
            zip(
                [f"x{i}" for i in range(1, 11)],
                [1.5, 2.0, 6.6, 4.0, -3.3, 0.9, 0.8, 2.5, 10.3, -1.7],
                strict=True,
            )
        ),
        theta={"F": 8.0},
        t=np.linspace(0, 2, 41),
    ),
    Problem(
        "enzyme",
        "Briggs, G. E. and Haldane, J. B. S. (1925). A note on the kinetics of enzyme action. "
        "Biochemical Journal 19, 338-339. Binding settles within milliseconds; twenty times over "
        "the slow scale.",
        _enzyme,
        x0={"E": 0.2, "S": 1.0, "C": 0.0, "P": 0.0},
        theta={"kf": 1000.0, "kr": 500.0, "kc": 1.0},
        t=np.linspace(0, 15, 20),
        stiff=True,
    ),
    Problem(
        "Robertson",
        "Robertson, H. H. (1966). The solution of a set of reaction rate equations. In Walsh, J. "
        "(ed.), Numerical Analysis: An Introduction, 178-182. His times, [0, 40].",
        _robertson,
        x0={"A": 1.0, "B": 0.0, "C": 0.0},
        theta={"k1": 0.04, "k2": 3e7, "k3": 1e4},
        t=np.linspace(0, 40, 41),
        stiff=True,
    ),
    Problem(
        "tumour",
        "Kuznetsov, V. A. et al. (1994). Nonlinear dynamics of immunogenic tumors. Bulletin of "
        "Mathematical Biology 56, 295-321. Effector cells against a tumour, rescaled; data and "
        "priors leave a long bent ridge.",
        _tumour,
        x0={"e": 1.0, "u": 20.0},
        theta={"s": 0.3, "r": 1.2, "g": 15.0, "d": 0.5, "al": 1.0},
        t=np.linspace(0, 12, 40),
        noise=0.03,
    ),
)

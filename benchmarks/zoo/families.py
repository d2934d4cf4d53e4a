"""Systems of the zoo: equations, rough sizes of their numbers, and how long they are watched.

A family is a list of functions that take a generator and return a system.  Sizes are those
around which priors are put; where only a certain prior makes the problem what it is, such as
a wide one of a frequency, it stands there itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytensor.tensor as pt

from benchmarks.cases.case import Prior

__all__ = ["FAMILIES", "System"]

type Rng = np.random.Generator


@dataclass(frozen=True, eq=False)
class System:
    """Equations with the sizes of what they are about.

    Attributes
    ----------
    rhs : callable
        As of ``gm.ODE``.
    starts : mapping of str to float
        Rough sizes of states at first; zero where a positive state is known to begin with nothing.
    theta : mapping of str to float or Prior
        Rough sizes of parameters, all positive, or their priors.
    end : float
        The last time.
    is_positive : bool
        Whether states stay positive, so that counts and logarithms make sense.
    inputs : tuple of str
        Names of inputs of the right-hand side.
    """

    rhs: Callable
    starts: Mapping[str, float]
    theta: Mapping[str, float | Prior]
    end: float
    is_positive: bool = True
    inputs: tuple[str, ...] = ()


def letters(n: int) -> list[str]:
    """Return names for some states."""
    return list("abcdef"[:n])


# Mass action


def network(rng: Rng) -> System:
    """Return random reactions of one or two reactants among one to six species."""
    n = int(rng.integers(1, 7))
    n_reactions = int(rng.integers(n, min(2 * n, 12) + 1))
    reactions = []
    for number in range(n_reactions):
        first = number % n  # every species takes part
        other = [k for k in range(n) if k != first]
        kind = rng.choice(["decay", "conversion", "joining", "catalysis", "splitting"])
        if not other or kind == "decay":
            reactions.append(([first], []))
        elif kind == "conversion" or len(other) < 2:
            reactions.append(([first], [int(rng.choice(other))]))
        else:
            second, third = map(int, rng.choice(other, 2, replace=False))
            reactions.append(
                {
                    "joining": ([first, second], [third]),
                    "catalysis": ([first, second], [third, second]),
                    "splitting": ([first], [second, third]),
                }[kind]
            )

    def rhs(t, x, theta):
        slopes: list[Any] = [0.0] * n
        for rate, (used, made) in zip(theta, reactions, strict=True):
            flow = rate
            for k in used:
                flow = flow * x[k]
            for k in used:
                slopes[k] = slopes[k] - flow
            for k in made:
                slopes[k] = slopes[k] + flow
        return [slope + 0.0 * x[0] for slope in slopes]

    starts = {name: float(rng.choice([2.0, 1.0, 0.5])) for name in letters(n)}
    theta = {f"k{number + 1}": 0.6 for number in range(n_reactions)}
    return System(rhs, starts, theta, 6.0)


def chain(rng: Rng) -> System:
    """Return a chain of first-order steps that begins with the first species alone."""
    n = int(rng.integers(2, 7))

    def rhs(t, x, theta):
        flows = [theta[k] * x[k] for k in range(n - 1)]
        middle = [before - after for before, after in pairwise(flows)]
        return [-flows[0], *middle, flows[-1]]

    starts = dict.fromkeys(letters(n), 0.0) | {"a": 2.0}
    return System(rhs, starts, {f"k{k + 1}": 0.8 for k in range(n - 1)}, 2.0 * n)


# Enzymes


def enzyme(rng: Rng) -> System:
    """Return a substrate that is turned into a product, or its four elementary steps."""
    if rng.random() < 0.5:
        return System(
            lambda t, x, th: [
                -th.v * x.s / (th.k + x.s), th.v * x.s / (th.k + x.s)
            ],
            {"s": 2.0, "p": 0.0}, {"v": 0.7, "k": 0.8}, 6.0,
        )  # fmt: skip

    def rhs(t, x, th):
        bound = th.on * x.e * x.s - th.off * x.c
        made = th.cat * x.c
        return [-bound, made - bound, bound - made, made]

    starts = {"s": 2.0, "e": 0.6, "c": 0.0, "p": 0.0}
    return System(rhs, starts, {"on": 2.0, "off": 0.7, "cat": 1.0}, 6.0)


def drug(rng: Rng) -> System:
    """Return a drug that is absorbed and eliminated by an enzyme."""
    return System(
        lambda t, x, th: [-th.ka * x.gut, th.ka * x.gut - th.v * x.blood / (th.k + x.blood)],
        {"gut": 4.0, "blood": 0.0}, {"ka": 1.0, "v": 0.8, "k": 1.0}, 8.0,
    )  # fmt: skip


def fed(rng: Rng) -> System:
    """Return a substrate that flows in, and an enzyme that its product inhibits."""
    return System(
        lambda t, x, th, u: [
            u.feed - th.v * x.s / (th.k * (1 + x.p / th.ki) + x.s),
            th.v * x.s / (th.k * (1 + x.p / th.ki) + x.s) - th.d * x.p,
        ],
        {"s": 1.0, "p": 0.3}, {"v": 1.0, "k": 0.6, "ki": 0.8, "d": 0.4}, 10.0, inputs=("feed",),
    )  # fmt: skip


# Regulation


def ring(rng: Rng) -> System:
    """Return genes that repress each other in a ring, with or without their messengers."""
    n = int(rng.choice([1, 2, 3]))
    has_messengers = bool(rng.random() < 0.4)
    power = int(rng.choice([2, 3, 4]))
    shares_rates = bool(rng.random() < 0.5)

    def rhs(t, x, theta):
        proteins = x[:n]
        rates = [theta.s] * n if shares_rates else theta[2 : 2 + n]
        made = [rate / (1 + (proteins[k - 1] / theta.k) ** power) for k, rate in enumerate(rates)]
        if not has_messengers:
            return [m - theta.d * p for m, p in zip(made, proteins, strict=True)]
        messengers = x[n:]
        return [
            *(theta.d * (m - p) for m, p in zip(messengers, proteins, strict=True)),
            *(one - theta.d * m for one, m in zip(made, messengers, strict=True)),
        ]

    names = letters(n) + ([f"m{k}" for k in letters(n)] if has_messengers else [])
    starts = {name: float(rng.choice([0.3, 1.0, 2.0])) for name in names}
    rates = {"s": 3.0} if shares_rates else {f"s{k + 1}": 3.0 for k in range(n)}
    return System(rhs, starts, {"d": 0.8, "k": 0.8, **rates}, 12.0)


def induced(rng: Rng) -> System:
    """Return a gene that an inducer switches on, and its protein."""
    return System(
        lambda t, x, th, u: [
            th.b + th.s * u.inducer**2 / (th.k**2 + u.inducer**2) - th.dm * x.m,
            th.t * x.m - th.dp * x.p,
        ],
        {"m": 0.2, "p": 0.2},
        {"b": 0.1, "s": 1.5, "k": 0.8, "dm": 1.0, "t": 1.0, "dp": 0.5}, 10.0,
        inputs=("inducer",),
    )  # fmt: skip


# Ecology


def growth(rng: Rng) -> System:
    """Return one population that grows to a limit."""
    return System(
        lambda t, x, th: [th.r * x.n * (1 - x.n / th.k)],
        {"n": 0.5}, {"r": 0.8, "k": 5.0}, 10.0,
    )  # fmt: skip


def predation(rng: Rng) -> System:
    """Return hunters and prey, by Lotka and Volterra or with satiety and a limit."""
    if rng.random() < 0.5:
        return System(
            lambda t, x, th: [
                x.prey * (th.a - th.b * x.hunter), x.hunter * (th.c * x.prey - th.d)
            ],
            {"prey": 2.0, "hunter": 1.0}, {"a": 1.0, "b": 0.7, "c": 0.5, "d": 0.9}, 10.0,
        )  # fmt: skip

    def rhs(t, x, th):
        eaten = th.b * x.prey * x.hunter / (1 + th.h * x.prey)
        return [th.a * x.prey * (1 - x.prey / th.k) - eaten, th.c * eaten - th.d * x.hunter]

    theta = {"a": 1.0, "k": 6.0, "b": 0.8, "h": 0.2, "c": 0.6, "d": 0.6}
    return System(rhs, {"prey": 2.0, "hunter": 1.0}, theta, 12.0)


def competition(rng: Rng) -> System:
    """Return two or three species that compete."""
    n = int(rng.choice([2, 3]))
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]

    def rhs(t, x, theta):
        weights = dict(zip(pairs, theta[n:], strict=True))
        return [
            theta[i] * x[i] * (1 - x[i] - sum(weights[i, j] * x[j] for j in range(n) if j != i))
            for i in range(n)
        ]

    theta = {f"r{i + 1}": 1.0 for i in range(n)} | {f"w{i + 1}{j + 1}": 0.6 for i, j in pairs}
    return System(rhs, dict.fromkeys(letters(n), 0.2), theta, 10.0)


def epidemic(rng: Rng) -> System:
    """Return an epidemic with or without a time of latency, in shares of a population."""
    if rng.random() < 0.5:
        return System(
            lambda t, x, th: [-th.b * x.s * x.i, th.b * x.s * x.i - th.g * x.i],
            {"s": 0.95, "i": 0.02}, {"b": 1.2, "g": 0.4}, 20.0,
        )  # fmt: skip
    return System(
        lambda t, x, th: [
            -th.b * x.s * x.i, th.b * x.s * x.i - th.l * x.e, th.l * x.e - th.g * x.i, th.g * x.i
        ],
        {"s": 0.95, "e": 0.02, "i": 0.02, "r": 0.0}, {"b": 1.2, "l": 0.7, "g": 0.4}, 25.0,
    )  # fmt: skip


# Mechanics


def pendulum(rng: Rng) -> System:
    """Return a damped pendulum."""
    return System(
        lambda t, x, th: [x.speed, -th.g * pt.sin(x.angle) - th.c * x.speed],
        {"angle": 1.2, "speed": 0.8}, {"g": 2.0, "c": 0.15}, 10.0, is_positive=False,
    )  # fmt: skip


def spring(rng: Rng) -> System:
    """Return a damped spring, as stiff as it may be, or one that stiffens (Duffing)."""
    if rng.random() < 0.5:
        return System(
            lambda t, x, th: [x.v, -th.k * x.q - th.c * x.v],
            {"q": 1.0, "v": 1.0}, {"k": 3.0, "c": 0.3}, 10.0, is_positive=False,
        )  # fmt: skip
    return System(
        lambda t, x, th: [x.v, -th.k * x.q - th.c * x.v - th.h * x.q**3],
        {"q": 1.0, "v": 1.0}, {"k": 1.0, "c": 0.2, "h": 0.8}, 10.0, is_positive=False,
    )  # fmt: skip


def masses(rng: Rng) -> System:
    """Return two or three masses between springs, all alike or each of its own."""
    n = int(rng.choice([2, 3]))
    is_alike = bool(rng.random() < 0.5)

    def rhs(t, x, theta):
        springs = [theta.k] * (n + 1) if is_alike else theta[1:]
        places = [0.0, *x[:n], 0.0]
        pulls = [
            springs[k + 1] * (places[k + 2] - places[k + 1])
            - springs[k] * (places[k + 1] - places[k])
            for k in range(n)
        ]
        return [*x[n:], *(pull - theta.c * v for pull, v in zip(pulls, x[n:], strict=True))]

    starts = {f"q{k + 1}": 1.0 for k in range(n)} | {f"v{k + 1}": 0.5 for k in range(n)}
    stiff = {"k": 1.5} if is_alike else {f"k{k + 1}": 1.5 for k in range(n + 1)}
    return System(rhs, starts, {"c": 0.15, **stiff}, 10.0, is_positive=False)


# Circuits


def filtered(rng: Rng) -> System:
    """Return a ladder of one to three low passes behind a source."""
    n = int(rng.integers(1, 4))

    def rhs(t, x, theta, u):
        before = [u.source, *x[: n - 1]]
        return [theta[k] * (before[k] - x[k]) for k in range(n)]

    starts = {f"u{k + 1}": 1.0 for k in range(n)}
    theta = {f"w{k + 1}": 1.0 for k in range(n)}
    return System(rhs, starts, theta, 8.0, is_positive=False, inputs=("source",))


def resonant(rng: Rng) -> System:
    """Return a circuit of resistor, coil and capacitor behind a source."""
    return System(
        lambda t, x, th, u: [th.k * x.i, th.l * (u.source - x.v) - th.r * x.i],
        {"v": 1.0, "i": 0.5}, {"k": 1.5, "l": 1.5, "r": 0.4}, 10.0,
        is_positive=False, inputs=("source",),
    )  # fmt: skip


def valve(rng: Rng) -> System:
    """Return the oscillator of Van der Pol."""
    return System(
        lambda t, x, th: [x.v, th.m * (1 - x.q**2) * x.v - th.k * x.q],
        {"q": 1.5, "v": 1.0}, {"m": 1.0, "k": 1.0}, 12.0, is_positive=False,
    )  # fmt: skip


def nerve(rng: Rng) -> System:
    """Return the circuit of FitzHugh and Nagumo."""
    return System(
        lambda t, x, th: [
            th.c * (x.v - x.v**3 / 3 + x.r), -(x.v - th.a + th.b * x.r) / th.c
        ],
        {"v": 1.0, "r": 1.0}, {"a": 0.3, "b": 0.3, "c": 2.5}, 15.0, is_positive=False,
    )  # fmt: skip


# Wide frequencies


def _frequency(rng: Rng) -> Prior:
    """Return a wide prior of a frequency, of which ten units of time are seen."""
    return [
        Prior("Uniform", (0.3, float(rng.uniform(6, 20)))),
        Prior("LogNormal", (np.log(3.0), 0.8)),
        Prior("HalfNormal", (8.0,)),
    ][rng.integers(3)]


def turning(rng: Rng) -> System:
    """Return a rotation, or an oscillation with a damping of its own."""
    if rng.random() < 0.5:
        return System(
            lambda t, x, th: [th.w * x.v, -th.w * x.q],
            {"q": 1.0, "v": 1.0}, {"w": _frequency(rng)}, 10.0, is_positive=False,
        )  # fmt: skip
    return System(
        lambda t, x, th: [th.w * x.v - th.c * x.q, -th.w * x.q - th.c * x.v],
        {"q": 1.0, "v": 1.0}, {"w": _frequency(rng), "c": 0.1}, 10.0, is_positive=False,
    )  # fmt: skip


def two_turning(rng: Rng) -> System:
    """Return two rotations beside each other."""
    return System(
        lambda t, x, th: [th.w1 * x.v, -th.w1 * x.q, th.w2 * x.w, -th.w2 * x.p],
        {"q": 1.0, "v": 1.0, "p": 1.0, "w": 1.0},
        {"w1": _frequency(rng), "w2": _frequency(rng)}, 10.0, is_positive=False,
    )  # fmt: skip


FAMILIES: dict[str, list[Callable[[Rng], System]]] = {
    "mass action": [network, network, chain],
    "Michaelis-Menten": [enzyme, drug, fed],
    "Hill": [ring, ring, induced],
    "ecology": [growth, predation, predation, competition, epidemic, epidemic],
    "mechanics": [pendulum, spring, masses],
    "circuits": [filtered, resonant, valve, nerve],
    "wide frequency": [turning, turning, two_turning],
}

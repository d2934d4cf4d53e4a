"""The cases of the messy study: data as they come, every one with its instrument.

An instrument says what of the states is seen and how.  It is written three times, which a
test holds to each other: as a simulation, as what a user gives to ``gm.fit``, and as a log
density for the rival.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
from numpy.typing import NDArray
from pytensor.tensor import TensorVariable

import pymc_gradmatch as gm
from benchmarks.cases.case import Prior
from benchmarks.paper import systems

__all__ = ["MESSY", "Instrument", "Messy"]

type Array = NDArray[np.float64]


class Noise(NamedTuple):
    """What an instrument has unknown: a prior of ``size`` positive numbers, called sigma."""

    prior: Prior
    size: int


@dataclass(frozen=True, eq=False)
class Instrument(ABC):
    """What is seen of the states.

    Attributes
    ----------
    ode : ODE
        Whose states they are.
    columns : sequence of str
        What the columns of its data are called.
    """

    ode: gm.ODE
    columns: Sequence[str]

    @abstractmethod
    def measure(self, x: Array, rng: np.random.Generator) -> Array:
        """Return data, shape ``(time, column)``, NaN where nothing was measured."""

    @abstractmethod
    def arguments(self, y: Array) -> dict[str, Any]:
        """Return what a user gives to ``gm.fit`` beside ODE, times, priors and starts."""

    def spread(self, y: Array) -> Array:
        """Return how much each column varies, where the noise's prior depends on it."""
        return np.zeros(0)

    def noise(self, spread) -> Noise | None:
        """Return what is unknown of the noise; nothing unless said otherwise."""
        return None

    @abstractmethod
    def log_density(self, x, sigma, y):
        """Return the log density of data given the states and the noise, for JAX."""

    @property
    def places(self) -> list[int]:
        """Places of the columns among the states."""
        return [self.ode.states.index(column) for column in self.columns]

    def table(self, y: Array) -> pd.DataFrame:
        """Return data as a table."""
        return pd.DataFrame(y, columns=list(self.columns))


def everything(rng: np.random.Generator, shape: tuple[int, ...]):
    """See every value."""
    return np.ones(shape, dtype=bool)


def all_but(share: float) -> Callable:
    """Lose a share of the values at random."""

    def seen(rng, shape):
        lost = rng.permutation(np.prod(shape)) < round(share * np.prod(shape))
        return ~lost.reshape(shape)

    return seen


def in_turn(rng, shape):
    """See one column after the other, each at times of its own."""
    return np.arange(shape[0])[:, None] % shape[1] == np.arange(shape[1])


def later(rng, shape):
    """See everything but the first time."""
    return np.broadcast_to(np.arange(shape[0])[:, None] > 0, shape)


def _counted(log_prob: Callable, x, y):
    """Return the sum of a log density over what was measured, with a finite gradient."""
    import jax.numpy as jnp

    is_seen = ~jnp.isnan(y)
    terms = log_prob(jnp.where(is_seen, x, 1.0), jnp.where(is_seen, y, 1.0))
    return jnp.where(is_seen, terms, 0.0).sum()


@dataclass(frozen=True, eq=False)
class Table(Instrument):
    """Normal noise, log-normal where states are positive: ``y=`` a table.

    Attributes
    ----------
    sigma_of : callable
        Maps the true states to the standard deviation of each one's noise.
    seen : callable
        Maps a generator and the shape of the data to what was measured.
    prior : Prior, optional
        Of each sigma; half-normal, as wide as its data vary, if not given.
    """

    sigma_of: Callable[[Array], Array]
    seen: Callable = everything
    prior: Prior | None = None

    @property
    def _is_log(self) -> bool:
        return all(column in self.ode.positive for column in self.columns)

    def measure(self, x, rng):
        """Add noise, and leave out what is not seen."""
        levels = np.log(x) if self._is_log else x
        noise = rng.normal(size=x.shape) * self.sigma_of(x)
        y = (levels + noise)[:, self.places]
        y = np.exp(y) if self._is_log else y
        return np.where(self.seen(rng, y.shape), y, np.nan)

    def arguments(self, y):
        """Return the table, and sigma's prior where it is not the usual one."""
        settings: dict[str, Any] = {"y": self.table(y)}
        if self.prior is not None:
            settings["sigma"] = self.prior.pymc(shape=len(self.columns))
        return settings

    def spread(self, y):
        """Return that of levels."""
        return np.nanstd(np.log(y) if self._is_log else y, axis=0)

    def noise(self, spread):
        """Return the prior of a sigma for each column."""
        return Noise(self.prior or Prior("HalfNormal", (spread,)), len(self.columns))

    def log_density(self, x, sigma, y):
        """Return that of a normal, or of a log-normal."""
        import jax.numpy as jnp
        from numpyro import distributions

        if self._is_log:
            return _counted(
                lambda x, y: distributions.LogNormal(jnp.log(x), sigma).log_prob(y),
                x[:, self.places],
                y,
            )
        return _counted(
            lambda x, y: distributions.Normal(x, sigma).log_prob(y), x[:, self.places], y
        )


@dataclass(frozen=True, eq=False)
class Relative(Instrument):
    """Log-normal noise in lines of one's own.

    Attributes
    ----------
    sigma : float
        Its true standard deviation, of logarithms.
    seen : callable
        Maps a generator and the shape of the data to what was measured.
    prior : Prior, optional
        Of sigma; it is known if not given.
    """

    sigma: float
    seen: Callable = everything
    prior: Prior | None = None

    def measure(self, x, rng):
        """Multiply by noise, and leave out what is not seen."""
        true = x[:, self.places]
        y = true * np.exp(self.sigma * rng.normal(size=true.shape))
        return np.where(self.seen(rng, y.shape), y, np.nan)

    def arguments(self, y):
        """Return the table, from which starts are made, and the lines."""
        table = self.table(y)

        def likelihood(x, theta):
            sigma = self.sigma
            if self.prior is not None:
                sigma = pm.Model.get_context().register_rv(self.prior.pymc(), "sigma")
            for name, column in table.items():
                seen = np.flatnonzero(column.notna())
                states = getattr(x, name)[seen]
                pm.LogNormal(f"seen_{name}", pm.math.log(states), sigma, observed=column[seen])

        return {"y": table, "likelihood": likelihood}

    def noise(self, spread):
        """Return one sigma, or nothing if it is known."""
        return None if self.prior is None else Noise(self.prior, 1)

    def log_density(self, x, sigma, y):
        """Return that of a log-normal."""
        import jax.numpy as jnp
        from numpyro import distributions

        sigma = self.sigma if self.prior is None else sigma
        return _counted(
            lambda x, y: distributions.LogNormal(jnp.log(x), sigma).log_prob(y),
            x[:, self.places],
            y,
        )


@dataclass(frozen=True, eq=False)
class Lost(Instrument):
    """Poisson counts of how much the first column fell from one time to the next."""

    def measure(self, x, rng):
        """Count; there is nothing to count at the first time."""
        counts = rng.poisson(-np.diff(x[:, self.places], axis=0))
        return np.concatenate([[[np.nan]], counts])

    def arguments(self, y):
        """Return the line."""

        def likelihood(x, theta):
            of = getattr(x, self.columns[0])
            pm.Poisson("cases", of[:-1] - of[1:], observed=y[1:, 0].astype(int))

        return {"likelihood": likelihood}

    def log_density(self, x, sigma, y):
        """Return that of Poisson counts."""
        from numpyro import distributions

        of = x[:, self.places[0]]
        return distributions.Poisson(of[:-1] - of[1:]).log_prob(y[1:, 0]).sum()


@dataclass(frozen=True, eq=False)
class Limited(Instrument):
    """Normal noise; the first column's instrument tells nothing below a limit.

    Attributes
    ----------
    sigma : float
        True standard deviation of either column's noise.
    limit : float
        The limit of detection.
    prior : Prior
        Of each column's sigma.
    """

    sigma: float
    limit: float
    prior: Prior

    def measure(self, x, rng):
        """Add noise; what is below the limit is the limit."""
        y = x[:, self.places] + self.sigma * rng.normal(size=x.shape)
        y[:, 0] = np.maximum(y[:, 0], self.limit)
        return y

    def arguments(self, y):
        """Return the table, from which starts are made, and the lines."""
        below, free = self.columns

        def likelihood(x, theta):
            sigma = pm.Model.get_context().register_rv(self.prior.pymc(shape=2), "sigma")
            noisy = pm.Normal.dist(getattr(x, below), sigma[0])
            pm.Censored("limited", noisy, lower=self.limit, upper=None, observed=y[:, 0])
            pm.Normal("free", getattr(x, free), sigma[1], observed=y[:, 1])

        return {"y": self.table(y), "likelihood": likelihood}

    def noise(self, spread):
        """Return a sigma for each column."""
        return Noise(self.prior, 2)

    def log_density(self, x, sigma, y):
        """Return that of a censored normal and of a normal."""
        import jax
        from numpyro import distributions

        below, free = self.places
        noisy = distributions.Normal(x[:, below], sigma[0])
        # The logarithm of a rounded zero would end the gradient.
        less = jax.scipy.stats.norm.logcdf((self.limit - x[:, below]) / sigma[0])
        told = jax.numpy.where(y[:, 0] > self.limit, noisy.log_prob(y[:, 0]), less)
        return told.sum() + distributions.Normal(x[:, free], sigma[1]).log_prob(y[:, 1]).sum()


@dataclass(frozen=True, eq=False)
class Counted(Table):
    """Real data in a table, of which a share is deleted."""

    data: pd.DataFrame = field(default_factory=pd.DataFrame)

    def measure(self, x, rng):
        """Delete."""
        y = self.data[list(self.columns)].to_numpy(dtype=float)
        return np.where(self.seen(rng, y.shape), y, np.nan)


@dataclass(frozen=True, eq=False)
class Messy:
    """A problem of the messy study.

    Attributes
    ----------
    name, setup : str
        What tables call it; where it comes from, what is seen, and what priors say.
    ode, x0, theta, t, prior
        As in :class:`~benchmarks.cases.Case`.
    instrument : Instrument
        What is seen.
    start : mapping of str to float, Prior or callable
        What is known of x(t0), as ``gm.fit`` takes it.
    figures : str
        Which of the issue's figures it belongs to: ``"trajectories"`` or ``"theta"``.
    """

    name: str
    setup: str
    ode: gm.ODE
    x0: Mapping[str, float]
    theta: Mapping[str, float]
    t: Array
    prior: Mapping[str, Prior]
    instrument: Instrument
    start: Mapping[str, float | Prior | Callable] = field(default_factory=dict)
    figures: str = "trajectories"

    @property
    def truth(self) -> Array:
        """True parameters, in the order of ``ode.params``."""
        return np.array(list(self.theta.values()))

    @property
    def x(self) -> Array:
        """The true states at the times, shape ``(time, state)``."""
        return self.ode.solve(self.t, self.x0, self.theta)

    def simulate(self, replicate: int) -> Array:
        """Return the data of a set; its number is the seed."""
        return self.instrument.measure(self.x, np.random.default_rng(replicate))

    def fit(self, y: Array, **settings) -> gm.Fit:
        """Fit a data set as a user would."""
        return gm.fit(self.ode, self.t, **self.arguments(y), **settings)

    def arguments(self, y: Array) -> dict[str, Any]:
        """Return what a user gives to ``gm.fit`` beside ODE and times."""
        start = {name: _for_pymc(known) for name, known in self.start.items()}
        priors: dict[str, TensorVariable] = {n: prior.pymc() for n, prior in self.prior.items()}
        given = self.instrument.arguments(y)
        return {"priors": priors, "start": start, **given} if start else {"priors": priors, **given}


def _for_pymc(known):
    return known.pymc() if isinstance(known, Prior) else known


def _around(median: float, log_sd: float = 1.0) -> Prior:
    return Prior("LogNormal", (float(np.log(median)), log_sd))


def _of(system: systems.System) -> dict[str, Any]:
    return {
        "ode": system.ode,
        "x0": dict(zip(system.ode.states, system.x0, strict=True)),
        "theta": system.theta,
    }


def _constant(sigma: float) -> Callable[[Array], Array]:
    return lambda x: np.full(x.shape[1], sigma)


def _hes1(t, x, theta):
    bound = theta.a * x.P * x.H
    repressed = 1 / (1 + x.P**2)
    return {
        "P": -bound + theta.b * x.M - theta.c * x.P,
        "M": -theta.d * x.M + theta.e * repressed,
        "H": -bound + theta.f * repressed - theta.g * x.H,
    }


def _sir(t, x, theta):
    infections = theta.beta * x.S * x.I / POPULATION
    recoveries = theta.gamma * x.I
    return {"S": -infections, "I": infections - recoveries, "R": recoveries}


def _oral_dose(t, x, theta):
    absorbed = theta.ka * x.gut
    return {"gut": -absorbed, "plasma": absorbed / theta.V - theta.ke * x.plasma}


def _metabolism(t, x, theta):
    made = theta.k1 * x.parent
    return {"parent": -made, "metabolite": made - theta.k2 * x.metabolite}


def _lotka_volterra(t, x, theta):
    prey, predator = x
    eaten = prey * predator
    return theta.alpha * prey - theta.beta * eaten, theta.delta * eaten - theta.gamma * predator


POPULATION = 10_000
HES1 = gm.ODE(_hes1, ["P", "M", "H"], list("abcdefg"), positive=["P", "M", "H"])
SIR = gm.ODE(_sir, ["S", "I", "R"], ["beta", "gamma"])
ORAL = gm.ODE(_oral_dose, ["gut", "plasma"], ["ka", "ke", "V"])
METABOLISM = gm.ODE(_metabolism, ["parent", "metabolite"], ["k1", "k2"])
RATES = ["alpha", "beta", "gamma", "delta"]
HUNTED = gm.ODE(_lotka_volterra, ["prey", "predator"], RATES, positive=["predator"])
HARES = gm.ODE(_lotka_volterra, ["hare", "lynx"], RATES, positive=["hare", "lynx"])
LV, FHN, PT = (
    systems.lotka_volterra,
    systems.fitzhugh_nagumo,
    systems.protein_transduction,
)
LYNX_HARE = gm.datasets.lynx_hare()


def _lv(name: str, setup: str, t=LV.t, seen=everything) -> Messy:
    return Messy(
        name,
        f"{setup} {LV.citation} Noise sd 0.1; half-normal priors of scale 5.",
        **_of(LV),
        t=t,
        prior=dict.fromkeys(LV.theta, Prior("HalfNormal", (5.0,))),
        instrument=Table(LV.ode, ["prey", "predator"], _constant(0.1), seen),
    )


MESSY = (
    Messy(
        "Hes1, H hidden",
        "MAGI's set-up: Yang, S., Wong, S. W. K. and Kou, S. C. (2021). Inference of dynamic "
        "systems from noisy and sparse data via manifold-constrained Gaussian processes. PNAS "
        "118(15); ODE after Hirata, H. et al. (2002). Science 298, 840-843. P and M at alternating "
        "times, H never, log-normal noise of known sd 0.15. Priors tell orders of magnitude: "
        "log-normal, sd 1, around 0.03 (a, c, d), 0.3 (b, e, g) and 10 (f, and H at the start), "
        "where MAGI's are flat; other starts are flat in the logarithm.",
        HES1,
        x0={"P": 1.4386, "M": 2.0375, "H": 17.9039},
        theta={"a": 0.022, "b": 0.3, "c": 0.031, "d": 0.028, "e": 0.5, "f": 20.0, "g": 0.3},
        t=np.arange(0, 241, 7.5),
        prior=dict(
            zip("abcdefg", map(_around, [0.03, 0.3, 0.03, 0.03, 0.3, 10.0, 0.3]), strict=True)
        ),
        instrument=Relative(HES1, ["P", "M"], 0.15, in_turn),
        start={"H": _around(10.0)},
    ),
    Messy(
        "FHN, R hidden",
        f"{FHN.citation} SNR 100, 25 times; half-normal priors of scale 5, flat starts.",
        **_of(FHN),
        t=np.linspace(0, 10, 25),
        prior=dict.fromkeys(FHN.theta, Prior("HalfNormal", (5.0,))),
        instrument=Table(FHN.ode, ["V"], FHN.noise["snr100"].sigma),
    ),
    Messy(
        "PT, S and RS hidden",
        f"{PT.citation} Noise sd 0.001; half-normal priors of scale 1, flat starts.",
        **_of(PT),
        t=PT.t,
        prior=dict.fromkeys(PT.theta, Prior("HalfNormal", (1.0,))),
        instrument=Table(PT.ode, ["dS", "R", "Rpp"], PT.noise["low"].sigma),
    ),
    Messy(
        "LV, predators hidden",
        f"{LV.citation} Noise sd 0.1; half-normal priors of scale 5. The data tell beta only times "
        "the number of predators, so there is a log-normal prior of their number at the start, "
        "around 3, sd 0.5; and predators, whose number is positive, are a positive state.",
        **_of(LV) | {"ode": HUNTED},
        t=LV.t,
        prior=dict.fromkeys(LV.theta, Prior("HalfNormal", (5.0,))),
        instrument=Table(HUNTED, ["prey"], _constant(0.1)),
        start={"predator": _around(3.0, 0.5)},
    ),
    _lv("LV, 40 % missing", "Two values in five are lost at random.", seen=all_but(0.4)),
    _lv(
        "LV, own times",
        "Prey at 20 times and predators at 20 others, between them.",
        t=np.linspace(0, 2, 40),
        seen=in_turn,
    ),
    Messy(
        "SIR, new cases",
        "Kermack, W. O. and McKendrick, A. G. (1927). Proceedings of the Royal Society A 115, "
        "700-721. Weekly Poisson counts of new cases among 10 000 people, all states hidden; "
        "nobody immune at the start. Log-normal priors, sd 1, around 1 for both rates and around "
        "10 for the infected at the start.",
        SIR,
        x0={"S": POPULATION - 20.0, "I": 20.0, "R": 0.0},
        theta={"beta": 2.0, "gamma": 0.7},
        t=np.arange(14.0),
        prior={"beta": _around(1.0), "gamma": _around(1.0)},
        instrument=Lost(SIR, ["S"]),
        start={"S": lambda theta, x0: POPULATION - x0.I, "I": _around(10.0), "R": 0.0},
        figures="theta",
    ),
    Messy(
        "oral dose",
        "The case of the breadth study with the gut hidden and the start known; concentrations "
        "with log-normal noise, sd 0.1, unknown, half-normal of scale 1. Log-normal priors, wide "
        "for ka (around 1, sd 1) and narrower for ke (0.1, sd 0.5) and V (0.5, sd 0.5), as these "
        "tell absorption from elimination.",
        ORAL,
        x0={"gut": 4.5, "plasma": 0.0},
        theta={"ka": 1.5, "ke": 0.08, "V": 0.5},
        t=np.array([0, 0.25, 0.5, 1, 2, 3.5, 5, 7, 9, 12, 24]),
        prior={"ka": _around(1.0), "ke": _around(0.1, 0.5), "V": _around(0.5, 0.5)},
        instrument=Relative(ORAL, ["plasma"], 0.1, later, Prior("HalfNormal", (1.0,))),
        start={"gut": 4.5, "plasma": 0.0},
        figures="theta",
    ),
    Messy(
        "detection limit",
        "A substance and its metabolite, which is not there at the start; noise sd 0.2, unknown, "
        "half-normal of scale 1; below 1 the substance is not detected (after a third of the "
        "times). Log-normal priors, sd 1, around 1; the start of the substance is flat.",
        METABOLISM,
        x0={"parent": 10.0, "metabolite": 0.0},
        theta={"k1": 0.8, "k2": 0.2},
        t=np.linspace(0, 8, 17),
        prior={"k1": _around(1.0), "k2": _around(1.0)},
        instrument=Limited(
            METABOLISM, ["parent", "metabolite"], 0.2, 1.0, Prior("HalfNormal", (1.0,))
        ),
        start={"metabolite": 0.0},
        figures="theta",
    ),
    Messy(
        "lynx and hare, 30 % deleted",
        "The pelts of 1900 to 1920 with 13 of 42 counts deleted, by the priors of posteriordb, "
        "entry hudson_lynx_hare-lotka_volterra, whose means stand for the truth; a set is a "
        "deletion.",
        HARES,
        x0={"hare": 34.0, "lynx": 5.9},
        theta=LYNX_HARE.reference["mean"].to_dict(),
        t=LYNX_HARE.pelts.index.to_numpy(dtype=float),
        prior={
            "alpha": Prior("TruncatedNormal", (1.0, 0.5)),
            "beta": Prior("TruncatedNormal", (0.05, 0.05)),
            "gamma": Prior("TruncatedNormal", (1.0, 0.5)),
            "delta": Prior("TruncatedNormal", (0.05, 0.05)),
        },
        instrument=Counted(
            HARES,
            ["hare", "lynx"],
            _constant(0.25),
            all_but(0.3),
            Prior("LogNormal", (-1.0, 1.0)),
            LYNX_HARE.pelts,
        ),
        start={"hare": _around(10.0), "lynx": _around(10.0)},
        figures="theta",
    ),
)

"""Do all modes that fit alike have their share?  ``python -m benchmarks.symmetry``.

Rates that can change places, labels that can be switched, signs and frequencies that the data
cannot tell: which mode a climb comes to is chance.  ``--sets`` data sets of each problem are
fitted by ``gm.fit``; the table has the probability of an event that tells the modes apart, as
symmetry or quadrature know it and as the draws do, and by how many Monte Carlo errors the two
differ at most.  ``--quick`` fits one set of the first problem.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import halfnorm

import pymc_gradmatch as gm
from benchmarks import RESULTS, none_failed, one_call, show

WIDTH = 10.0  # of the priors of frequency and velocity


class Problem(NamedTuple):
    """Equations, what is seen of their solution, and an event that tells modes apart.

    Attributes
    ----------
    rhs, t
        The ODE and its times.
    x0, theta : dict of str to float
        The truth.
    noise : float
        Standard deviation of the data; half-normal with a scale of one in the prior.
    prior : callable
        Returns the prior of any parameter.
    start : dict of str
        As for ``gm.fit``.
    seen : callable
        Maps the states, by attribute, to what the data are about.
    event : callable
        Maps draws by name to truth values.
    probability : callable
        Maps data to its probability in the exact posterior.
    """

    rhs: Callable
    t: NDArray[np.float64]
    x0: dict[str, float]
    theta: dict[str, float]
    noise: float
    prior: Callable
    start: dict[str, Any]
    seen: Callable
    event: Callable
    probability: Callable

    @property
    def ode(self) -> gm.ODE:
        """The right-hand side."""
        return gm.ODE(self.rhs, [*self.x0], [*self.theta])

    def simulate(self, seed: int) -> NDArray[np.float64]:
        """Return data of a seed."""
        solution = self.ode.solve(self.t, x0=[*self.x0.values()], theta=[*self.theta.values()])
        clean = self.seen(SimpleNamespace(**dict(zip(self.x0, solution.T, strict=True))))
        return clean + np.random.default_rng(seed).normal(0, self.noise, clean.shape)

    def fit(self, seed: int) -> one_call.Row:
        """Fit the data of a seed by the one call."""
        y = self.simulate(seed)

        def likelihood(x, theta):
            pm.Normal("y", self.seen(x), pm.HalfNormal("noise", 1), observed=y)

        found, row = one_call.fitted(
            self.ode, self.t, None, priors={name: self.prior() for name in self.theta},
            start=self.start, likelihood=likelihood, random_seed=seed,
        )  # fmt: skip
        if found is None:
            return row
        exact, ours = self.probability(y), self.event(found.idata["posterior"]).mean().item()
        error = np.sqrt(exact * (1 - exact) / found.n_effective)
        return row | {
            "modes": len(found.modes), "probability": exact, "by the draws": ours,
            "apart": abs(ours - exact) / error,
        }  # fmt: skip


def equal(share: float) -> Callable:
    """Return a probability that symmetry knows."""
    return lambda y: share


def slow(t: NDArray[np.float64], below: float) -> Callable:
    """Return the probability of a low frequency of a sine, by quadrature over it and the noise.

    Given these the data are normal: position and velocity at first have normal priors.
    """
    frequencies, noises = np.linspace(1e-3, 4 * WIDTH, 16_000), np.linspace(0.02, 0.4, 60)

    def probability(y):
        log_density = np.empty((len(frequencies), len(noises)))
        for row, w in zip(log_density, frequencies, strict=True):
            by_start = np.stack([2 * np.cos(w * t), WIDTH * np.sin(w * t) / w], axis=1)
            left, widths, _ = np.linalg.svd(by_start)
            variances = np.zeros(len(t))
            variances[:2] = widths**2
            along = np.square(left.T @ y)
            total = variances[:, None] + noises**2
            row[:] = -0.5 * (along[:, None] / total + np.log(total)).sum(axis=0)
        log_density += halfnorm.logpdf(noises) + halfnorm.logpdf(frequencies, scale=WIDTH)[:, None]
        is_slow = frequencies < below
        return float(np.exp(logsumexp(log_density[is_slow]) - logsumexp(log_density)))

    return probability


EQUAL_GAPS = np.linspace(0, 11, 12)
PROBLEMS = {
    "A to B to C, C seen": Problem(
        lambda t, x, th: [-th.k1 * x.a, th.k1 * x.a - th.k2 * x.b, th.k2 * x.b],
        np.linspace(0, 10, 21), {"a": 1.0, "b": 0.0, "c": 0.0}, {"k1": 2.0, "k2": 0.4}, 0.02,
        lambda: pm.LogNormal.dist(0, 1), {"a": 1.0, "b": 0.0, "c": 0.0},
        lambda x: x.c, lambda draws: draws["k1"] > draws["k2"], equal(1 / 2),
    ),
    "two decays, sum seen": Problem(
        lambda t, x, th: [-th.k1 * x.a, -th.k2 * x.b],
        np.linspace(0, 6, 25), {"a": 5.0, "b": 3.0}, {"k1": 2.0, "k2": 0.3}, 0.05,
        lambda: pm.LogNormal.dist(0, 1), {name: pm.HalfNormal.dist(5) for name in "ab"},
        lambda x: x.a + x.b, lambda draws: draws["k1"] > draws["k2"], equal(1 / 2),
    ),
    "three decays, sum seen": Problem(
        lambda t, x, th: [-th.k1 * x.a, -th.k2 * x.b, -th.k3 * x.c],
        np.linspace(0, 6, 40), {"a": 5.0, "b": 4.0, "c": 3.0}, {"k1": 5.0, "k2": 1.0, "k3": 0.2},
        0.02, lambda: pm.LogNormal.dist(0, 1.5), {name: pm.HalfNormal.dist(5) for name in "abc"},
        lambda x: x.a + x.b + x.c,
        lambda draws: (draws["k1"] > draws["k2"]) & (draws["k2"] > draws["k3"]), equal(1 / 6),
    ),
    "growth, square seen": Problem(
        lambda t, x, th: [th.r * x.x - x.x**3],
        np.linspace(0, 4, 25), {"x": 0.1}, {"r": 2.0}, 0.05,
        lambda: pm.HalfNormal.dist(5), {"x": pm.Normal.dist(0, 1)},
        lambda x: x.x**2, lambda draws: draws["x0"] > 0, equal(1 / 2),
    ),
    "oscillator at equal gaps": Problem(
        lambda t, x, th: [x.v, -(th.w**2) * x.q],
        EQUAL_GAPS, {"q": 0.955, "v": -0.266}, {"w": 0.9}, 0.1,
        lambda: pm.HalfNormal.dist(WIDTH),
        {"q": pm.Normal.dist(0, 2), "v": pm.Normal.dist(0, WIDTH)},
        lambda x: x.q, lambda draws: draws["w"] < np.pi, slow(EQUAL_GAPS, np.pi),
    ),
}  # fmt: skip


def main(arguments: list[str] | None = None):
    """Fit all, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--sets", type=int, default=5, help="of each problem")
    parser.add_argument("--csv", type=Path, default=RESULTS / "symmetry.csv", help="the table")
    parser.add_argument("--quick", action="store_true", help="one set of the first problem")
    options = parser.parse_args(arguments)
    chosen, n_sets = [*PROBLEMS], options.sets
    if options.quick:
        chosen, n_sets, options.csv = chosen[:1], 1, None
    rows = pd.DataFrame(
        {"problem": name} | PROBLEMS[name].fit(seed) for name in chosen for seed in range(n_sets)
    )
    if options.quick:
        none_failed(one_call.unsealed(rows.set_index("problem")))
    groups = rows.groupby("problem", sort=False)
    table = groups[["modes", "probability", "by the draws"]].mean()
    table.insert(0, "sets", groups.size())
    table.insert(1, "sealed", groups["is_exact"].mean())
    table["apart, Monte Carlo errors"] = groups["apart"].max()
    table["CPU s"] = groups["seconds"].median()
    show(table, options.csv)


if __name__ == "__main__":
    main()

"""The exact posterior of every data set of the accuracy study, by numerical integration.

``python -m benchmarks.exact`` samples what is missing in ``--out``, one file per
data set, and writes the summary of all files to ``benchmarks/exact.csv``;
``--table`` does the latter only.  An interrupted run goes on where it stopped.
``--quick`` samples one data set with short chains.  JAX comes with the extra
``benchmarks``; importing this module does not need it.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from time import process_time
from typing import NamedTuple

import arviz as az
import numpy as np
import pandas as pd

from benchmarks.cases import ACCURACY_CASES, AccuracyCase
from benchmarks.rivals import RIGHT_HAND_SIDES, import_jax

HERE = Path(__file__).parent
# All cases get their first data sets before any case gets its last: a partial run is of use.
BLOCKS = ((0, 10), (10, 40), (40, 100))


class Length(NamedTuple):
    """Length of every chain: warm-up, and draws after it."""

    warmup: int
    draws: int


QUICK = (Length(100, 100),)
LENGTHS = (Length(300, 700), Length(600, 1_400), Length(1_000, 4_000))
CHAINS = 4
RHAT_REACHED = 1.01


class Fit(NamedTuple):
    """Draws of the exact posterior of one data set.

    Attributes
    ----------
    theta, x0, sigma : array
        Parameters, states at the first time and noise of every state, each of
        shape ``(chain, draw, ...)``.
    divergences : int
        Divergent transitions after warm-up.
    attempts : int
        How many lengths of chains were tried; the last is kept.
    cpu_seconds : float
        Warm-up and draws of all chains of the last attempt, compilation left out.
    """

    theta: np.ndarray
    x0: np.ndarray
    sigma: np.ndarray
    divergences: int
    attempts: int
    cpu_seconds: float

    def rhat(self) -> float:
        """Return the largest R-hat of theta."""
        return float(az.rhat(self._theta_by_name()).dataset["theta"].max())

    def ess(self) -> float:
        """Return the least bulk effective sample size of theta."""
        return float(az.ess(self._theta_by_name(), method="bulk").dataset["theta"].min())

    def _theta_by_name(self):
        return az.from_dict({"posterior": {"theta": self.theta}})


def split(case: AccuracyCase, u) -> tuple:
    """Split unconstrained points into log theta, the first states and log sigma."""
    n_params, n_states = len(case.system.theta), len(case.system.x0)
    return u[..., :n_params], u[..., n_params : n_params + n_states], u[..., -n_states:]


def log_density(case: AccuracyCase) -> Callable:
    """Return the exact log density of an unconstrained point, given the observations.

    Theta has the prior of the case; the first states have normal priors as wide as
    ten standard deviations of the observations, which is practically flat; and the
    noise of each state is half-normal, as wide as its observations vary.
    """
    diffrax, jax, numpyro = import_jax()
    distributions = numpyro.distributions
    right_hand_side = RIGHT_HAND_SIDES[case.system.name]
    term = diffrax.ODETerm(lambda t, x, theta: jax.numpy.stack(right_hand_side(*x, *theta)))
    # A hundred thousandth of the noise: far below what the data can tell.
    controller = diffrax.PIDController(rtol=1e-6, atol=1e-5 * case.simulate(0).sigma.min())

    def log_p(u, y):
        log_theta, x0, log_sigma = split(case, u)
        theta, sigma = jax.numpy.exp(log_theta), jax.numpy.exp(log_sigma)
        spread = y.std(axis=0)
        solution = diffrax.diffeqsolve(
            term,
            diffrax.Tsit5(),
            t0=case.t[0],
            t1=case.t[-1],
            dt0=None,
            y0=x0,
            args=theta,
            saveat=diffrax.SaveAt(ts=case.t),
            stepsize_controller=controller,
            adjoint=diffrax.RecursiveCheckpointAdjoint(),
            max_steps=1_000,
            throw=False,
        )
        return (
            (case.prior.numpyro().log_prob(theta) + log_theta).sum()
            + distributions.Normal(y.mean(axis=0), 10 * spread).log_prob(x0).sum()
            + (distributions.HalfNormal(spread).log_prob(sigma) + log_sigma).sum()
            + distributions.Normal(solution.ys, sigma).log_prob(y).sum()
        )

    return log_p


def round_coordinates(case: AccuracyCase) -> tuple[np.ndarray, np.ndarray]:
    """Return the truth, unconstrained, and a factor of its Gauss-Newton covariance.

    In these coordinates the posterior of every data set of the case is nearly
    round, so that warm-up starts with short trajectories.
    """
    system, truth = case.system, case.simulate(0)
    center = np.concatenate([np.log(list(system.theta.values())), system.x0, np.log(truth.sigma)])
    n_solved = len(system.theta) + len(system.x0)
    steps = 1e-3 * np.eye(n_solved, len(center))
    up, down = (
        system.ode.solve(case.t, x0, np.exp(log_theta))
        for log_theta, x0, _ in (split(case, center + step) for step in (steps, -steps))
    )
    slopes = ((up - down) / 2e-3 / truth.sigma).reshape(n_solved, -1)
    # About the prior's share, one for every log theta, and Fisher's, 2 T for every log sigma.
    counts = len(system.theta), len(system.x0), len(system.x0)
    precision = np.diag(np.repeat([1.0, 0.0, 2.0 * len(case.t)], counts))
    precision[:n_solved, :n_solved] += slopes @ slopes.T
    return center, np.linalg.inv(np.linalg.cholesky(precision)).T


@cache
def compiled_chain(name: str, length: Length) -> Callable:
    """Return ``chain(key, y)``, compiled once for all data sets of a case."""
    _, jax, numpyro = import_jax()
    case = next(case for case in ACCURACY_CASES if case.name == name)
    log_p = log_density(case)
    center, factor = round_coordinates(case)

    def chain(key, y):
        of_start, of_chain = jax.random.split(key)
        kernel = numpyro.infer.NUTS(
            potential_fn=lambda z: -log_p(center + factor @ z, y), dense_mass=True
        )
        mcmc = numpyro.infer.MCMC(
            kernel, num_warmup=length.warmup, num_samples=length.draws, progress_bar=False
        )
        # A reference may start near the truth, by about as much as the posterior is wide.
        start = jax.random.normal(of_start, center.shape)
        mcmc.run(of_chain, init_params=start, extra_fields=("diverging",))
        return center + mcmc.get_samples() @ factor.T, mcmc.get_extra_fields()["diverging"].sum()

    example = jax.random.key(0), case.simulate(0).y
    return jax.jit(chain).lower(*example).compile()


def sample(case: AccuracyCase, replicate: int, lengths: Sequence[Length] = LENGTHS) -> Fit:
    """Sample the exact posterior of a data set, with longer chains until they agree.

    Parameters
    ----------
    case : AccuracyCase
        One of the cases of the study.
    replicate : int
        Number of the data set, also the seed of the chains.
    lengths : sequence of Length
        What to try in turn while the largest R-hat is above 1.01.

    Returns
    -------
    Fit
        The last attempt.

    Raises
    ------
    ImportError
        If JAX, NumPyro or diffrax is missing.
    """
    _, jax, _ = import_jax()
    y = case.simulate(replicate).y
    for attempt, length in enumerate(lengths):
        chain = compiled_chain(case.name, length)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(replicate), attempt), CHAINS)
        start = process_time()
        runs = [jax.block_until_ready(chain(key, y)) for key in keys]
        cpu_seconds = process_time() - start
        log_theta, x0, log_sigma = split(case, np.stack([np.asarray(u) for u, _ in runs]))
        divergences = sum(int(count) for _, count in runs)
        fit = Fit(np.exp(log_theta), x0, np.exp(log_sigma), divergences, attempt + 1, cpu_seconds)
        if fit.rhat() <= RHAT_REACHED:
            break
    return fit


def summary(case: AccuracyCase, replicate: int, fit: Fit) -> dict[str, float]:
    """Return what the study compares with, a row of the table."""
    draws = fit.theta.reshape(-1, fit.theta.shape[-1])
    theta, x0 = draws.mean(axis=0), fit.x0.mean(axis=(0, 1))
    error = case.system.ode.solve(case.t, x0, theta) - case.simulate(replicate).x
    states, params = case.system.ode.states, case.system.ode.params
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    by_name = {
        "mean": (params, theta),
        "sd": (params, draws.std(axis=0)),
        "log mean": (params, np.log(draws).mean(axis=0)),
        "log sd": (params, np.log(draws).std(axis=0)),
        "2.5 %": (params, low),
        "97.5 %": (params, high),
        "mean x0": (states, x0),
        "mean sigma": (states, fit.sigma.mean(axis=(0, 1))),
        "rmse": (states, np.sqrt((error**2).mean(axis=0))),
    }
    return {
        "rmse": float(np.sqrt((error**2).mean())),
        "rhat": fit.rhat(),
        "ess": fit.ess(),
        "divergences": fit.divergences,
        "attempts": fit.attempts,
        "cpu_seconds": fit.cpu_seconds,
    } | {
        f"{quantity} {name}": float(value)
        for quantity, (names, values) in by_name.items()
        for name, value in zip(names, values, strict=True)
    }


def path_of(case: AccuracyCase, replicate: int, folder: Path) -> Path:
    """Return where the draws of a data set are kept."""
    return folder / f"{case.name.replace(' ', '-')}-{replicate}.npz"


def save(fit: Fit, path: Path):
    """Write draws in single precision, all of the file or nothing."""
    arrays = {name: np.asarray(value) for name, value in fit._asdict().items()}
    halved = {name: a.astype("float32") if a.ndim else a for name, a in arrays.items()}
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, **halved)
    os.replace(unfinished, path)


def load(path: Path) -> Fit:
    """Read what `save` wrote."""
    with np.load(path) as arrays:
        return Fit(
            *(a.astype(float) if (a := arrays[name]).ndim else a.item() for name in Fit._fields)
        )


def saved(folder: Path) -> Iterator[tuple[AccuracyCase, int, Path]]:
    """Iterate over the files in a folder, by case and replicate."""
    for case in ACCURACY_CASES:
        for replicate in range(BLOCKS[-1][-1]):
            path = path_of(case, replicate, folder)
            if path.exists():
                yield case, replicate, path


def table_of(folder: Path) -> pd.DataFrame:
    """Return the summaries of all data sets in a folder, one row each."""
    rows = [
        {"case": case.name, "replicate": replicate, **summary(case, replicate, load(path))}
        for case, replicate, path in saved(folder)
    ]
    return pd.DataFrame(rows).set_index(["case", "replicate"])


def run(folder: Path, cases: Sequence[AccuracyCase], replicates: int, lengths: Sequence[Length]):
    """Sample what a folder lacks, block by block over all cases, and print a line for each."""
    folder.mkdir(parents=True, exist_ok=True)
    for first, end in BLOCKS:
        for case in cases:
            for replicate in range(first, min(end, replicates)):
                path = path_of(case, replicate, folder)
                if path.exists():
                    continue
                fit = sample(case, replicate, lengths)
                save(fit, path)
                row = summary(case, replicate, fit)
                line = (f"{name} {value:.4g}" for name, value in list(row.items())[:6])
                print(f"{case.name} {replicate}: {', '.join(line)}", flush=True)


def main(arguments: list[str] | None = None):
    """Sample the exact posteriors and write their table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "exact", help="draws")
    parser.add_argument("--csv", type=Path, default=HERE / "exact.csv", help="table")
    parser.add_argument("--replicates", type=int, default=100, help="data sets of each case")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in ACCURACY_CASES])
    parser.add_argument("--table", action="store_true", help="the table only, of what is there")
    parser.add_argument("--quick", action="store_true", help="one data set, short chains, no files")
    options = parser.parse_args(arguments)

    if options.quick:
        case = ACCURACY_CASES[0]
        print(pd.Series(summary(case, 0, sample(case, 0, QUICK))).to_string())
        return
    if not options.table:
        names = options.cases or [case.name for case in ACCURACY_CASES]
        cases = [case for case in ACCURACY_CASES if case.name in names]
        run(options.out, cases, options.replicates, LENGTHS)
    table_of(options.out).to_csv(options.csv, float_format="%.5g")


if __name__ == "__main__":
    main()

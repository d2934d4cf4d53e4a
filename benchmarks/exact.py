"""The exact posterior of every data set of a study, by numerical integration.

``python -m benchmarks.exact`` samples for the accuracy study what ``--out``, one file
per data set, and ``--csv``, the table, lack, and writes the table of all;
``python -m benchmarks.exact breadth`` does so for the breadth study.  ``--table`` only
writes.  An interrupted run goes on where it stopped.  ``--quick`` samples one data set
with short chains.  JAX comes with the extra ``benchmarks``.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import arviz as az
import numpy as np
import pandas as pd

from benchmarks import RESULTS, RUNS, runner
from benchmarks.accuracy.fit import accuracy_of
from benchmarks.breadth.fit import moments
from benchmarks.cases import ACCURACY, BREADTH, Case, named
from benchmarks.jax_rival import Fit, Length, sample

QUICK = (Length(100, 100),)
OF_ACCURACY, OF_BREADTH = ["case", "replicate"], ["problem", "replicate", "variable"]


def summary(case: Case, replicate: int, fit: Fit) -> dict[str, float]:
    """Return what the accuracy study compares with, a row of its table."""
    theta = fit.theta.reshape(-1, len(case.theta)).T
    low, high = np.quantile(theta, [0.025, 0.975], axis=1)
    x0, sigma = (values.mean(axis=(0, 1)) for values in (fit.x0, fit.sigma))
    by_name = {
        "2.5 %": (case.theta, low),
        "97.5 %": (case.theta, high),
        "mean x0": (case.x0, x0),
        "mean sigma": (case.x0, sigma),
    }
    return {
        "rhat": fit.rhat(),
        "ess": fit.ess(),
        "divergences": fit.divergences,
        "attempts": fit.attempts,
        "cpu_seconds": fit.cpu_seconds,
        **accuracy_of(case, case.simulate(replicate), theta, x0),
    } | {
        f"{quantity} {name}": float(value)
        for quantity, (names, values) in by_name.items()
        for name, value in zip(names, values, strict=True)
    }


def variables(case: Case, fit: Fit) -> pd.DataFrame:
    """Return what the breadth study compares with: a row for every theta, first state and sigma."""
    draws = {name: fit.theta[..., i] for i, name in enumerate(case.theta)} | {
        f"{what}[{state}]": values[..., k]
        for what, values in {"x0": fit.x0, "sigma": fit.sigma}.items()
        for k, state in enumerate(case.x0)
    }
    rows = {
        name: moments(values)
        | {
            "50 %": np.median(values),
            "rhat": float(az.rhat(values)),
            "ess": float(az.ess(values)),
            "divergences": fit.divergences,
            "attempts": fit.attempts,
            "cpu_seconds": fit.cpu_seconds,
        }
        for name, values in draws.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def of_accuracy(fits) -> pd.DataFrame:
    """Return a row for every data set."""
    rows = ((key, summary(named(ACCURACY, key[0]), key[1], fit)) for key, fit in fits)
    return runner.table_of(rows, OF_ACCURACY)


def of_breadth(fits) -> pd.DataFrame:
    """Return a row for every variable of every data set."""
    tables = {key: variables(named(BREADTH, key[0]), fit) for key, fit in fits}
    return pd.concat(tables, names=OF_BREADTH)


class Reference(NamedTuple):
    """What a study compares with: of which data sets, and how it is saved."""

    cases: Sequence[Case]
    replicates: Sequence[int]
    # All cases get their first data sets before any case gets its last: a partial run is of use.
    ends: Sequence[int]
    table_of: Callable[..., pd.DataFrame]
    index: list[str]
    float_format: str
    folder: str


REFERENCES = {
    "accuracy": Reference(
        ACCURACY, range(100), (10, 40), of_accuracy, OF_ACCURACY, "%.5g", "exact"
    ),
    "breadth": Reference(
        BREADTH, range(1, 6), range(1, 5), of_breadth, OF_BREADTH, "%.6g", "breadth-exact"
    ),
}


def write(fit: Fit, path: Path):
    """Write draws in single precision."""
    arrays = {name: np.asarray(value) for name, value in fit._asdict().items()}
    halved = {name: a.astype("float32") if a.ndim else a for name, a in arrays.items()}
    with path.open("wb") as file:
        np.savez(file, **halved)


def read(path: Path) -> Fit:
    """Read what `write` wrote."""
    with path.open("rb") as file, np.load(file) as arrays:
        return Fit(
            *(a.astype(float) if (a := arrays[name]).ndim else a.item() for name in Fit._fields)
        )


NPZ = runner.Format(".npz", write, read)


def report(key, fit: Fit):
    """Print a line for a data set."""
    print(
        f"{key[0]} {key[1]}: R-hat {fit.rhat():.3f}, {fit.ess():.0f} effective draws, "
        f"{fit.divergences} divergences, {fit.cpu_seconds:.0f} CPU s",
        flush=True,
    )


def main(arguments: list[str] | None = None):
    """Sample the exact posteriors and write their table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("study", nargs="?", choices=list(REFERENCES), default="accuracy")
    parser.add_argument("--out", type=Path, help="draws")
    parser.add_argument("--csv", type=Path, help="table")
    parser.add_argument("--replicates", type=int, help="data sets of each case")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in ACCURACY + BREADTH])
    parser.add_argument("--table", action="store_true", help="the table only, of what is there")
    parser.add_argument("--quick", action="store_true", help="one data set, short chains, no files")
    options = parser.parse_args(arguments)
    reference = REFERENCES[options.study]
    if options.quick:
        case, replicate = reference.cases[0], reference.replicates[0]
        fit = {(case.name, replicate): sample(case, replicate, QUICK)}
        print(reference.table_of(fit.items()).T.to_string())
        return
    names = [case.name for case in reference.cases]
    csv = options.csv or RESULTS / options.study / "exact.csv"
    known = runner.known_from(csv, reference.index)
    saved = runner.Saved(options.out or RUNS / reference.folder, NPZ, known=known)
    if not options.table:
        keys = runner.keys_of(
            options.cases or names,
            replicates=reference.replicates[: options.replicates],
            ends=reference.ends,
        )
        runner.run(
            keys,
            lambda key: sample(named(reference.cases, key[0]), key[1]),
            saved,
            report=report,
        )
    every = runner.keys_of(names, replicates=reference.replicates, ends=())
    table = saved.table(every, reference.table_of)
    table.to_csv(csv, float_format=reference.float_format)


if __name__ == "__main__":
    main()

"""The exact posterior of every data set of the accuracy study, by numerical integration.

``python -m benchmarks.exact`` samples what is missing in ``--out``, one file per
data set, and writes the summary of all files to ``benchmarks/exact.csv``;
``--table`` does the latter only.  An interrupted run goes on where it stopped.
``--quick`` samples one data set with short chains.  JAX comes with the extra
``benchmarks``; importing this module does not need it.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.cases import ACCURACY_CASES, AccuracyCase
from benchmarks.exact_posterior import Case, Fit, Length, sample
from benchmarks.saving import finished

HERE = Path(__file__).parent
# All cases get their first data sets before any case gets its last: a partial run is of use.
BLOCKS = ((0, 10), (10, 40), (40, 100))
QUICK = (Length(100, 100),)


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


def path_of(case: Case, replicate: int, folder: Path) -> Path:
    """Return where the draws of a data set are kept."""
    return folder / f"{case.name.replace(' ', '-')}-{replicate}.npz"


def save(fit: Fit, path: Path):
    """Write draws in single precision, all of the file or nothing."""
    arrays = {name: np.asarray(value) for name, value in fit._asdict().items()}
    halved = {name: a.astype("float32") if a.ndim else a for name, a in arrays.items()}
    with finished(path) as unfinished, unfinished.open("wb") as file:
        np.savez(file, **halved)


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
    if not rows:
        msg = f"{folder} has no files of draws; run without --table first."
        raise FileNotFoundError(msg)
    return pd.DataFrame(rows).set_index(["case", "replicate"])


def run(folder: Path, cases: Sequence[AccuracyCase], replicates: int):
    """Sample what a folder lacks, block by block over all cases, and print a line for each."""
    folder.mkdir(parents=True, exist_ok=True)
    for first, end in BLOCKS:
        for case in cases:
            for replicate in range(first, min(end, replicates)):
                path = path_of(case, replicate, folder)
                if path.exists():
                    continue
                fit = sample(case, replicate)
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
        run(options.out, cases, options.replicates)
    table_of(options.out).to_csv(options.csv, float_format="%.5g")


if __name__ == "__main__":
    main()

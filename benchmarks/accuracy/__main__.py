"""Accuracy beside the exact posterior: ``python -m benchmarks.accuracy``.

Fits what ``--out`` and ``--csv`` lack, one file per data set, case and method,
prints the table of all that is there and writes all rows to ``--csv``; an
interrupted run goes on where it stopped.  ``--table`` prints only, ``--quick``
fits three data sets of two cases and keeps nothing.  The exact posteriors come from
``benchmarks/results/accuracy/exact.csv``, see ``benchmarks.exact``.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks import RESULTS, RUNS, none_failed, runner, show
from benchmarks.accuracy.fit import METHODS, fit
from benchmarks.cases import ACCURACY, Case, named

FOLDER = RESULTS / "accuracy"
REPLICATES, ENDS = range(100), (10, 40)
AIMS = {
    "LV low": 1.10,
    "LV high": 1.10,
    "FHN SNR 10": 1.25,
    "FHN SNR 100": 1.25,
    "FHN MAGI": np.nan,
    "PT low": 2.0,
    "PT high": 2.0,
}
INDEX = ["case", "method", "replicate"]
AGREE = 3.5  # Monte Carlo standard errors; the most of six parameters in 100 data sets


def report(key, row: dict):
    """Print a line for a fit."""
    keys = ("rmse", "covered", "rhat", "ess", "divergences", "k", "n_effective", "failure")
    told = (
        f"{k} {row[k]:.4g}" if isinstance(row[k], float | int) else row[k] for k in keys if k in row
    )
    print(*key, ", ".join(told), flush=True)


def table_of(rows: pd.DataFrame, exact: pd.DataFrame) -> pd.DataFrame:
    """Summarise fits beside the exact posteriors of the same data sets."""
    summaries = {}
    for (name, method), group in rows.groupby(level=["case", "method"], sort=False):
        fits = group.droplevel(["case", "method"])
        reference = exact.loc[name]
        shared = fits.index.intersection(reference.index)
        fits, reference = fits.loc[shared], reference.loc[shared]
        params = [c.removeprefix("log mean ") for c in reference if c.startswith("log mean ")]
        params = [p for p in params if reference[f"log mean {p}"].notna().any()]
        summaries[name, method] = _summary(fits, reference, params, named(ACCURACY, name))
    return pd.DataFrame(summaries).T.rename_axis(["case", "method"])


def _summary(fits, reference, params, case: Case) -> dict[str, float]:
    exact_rmse = reference["rmse"].median()
    mean, sd = (fits[[f"{of} {p}" for p in params]].to_numpy() for of in ("log mean", "log sd"))
    exact_mean, exact_sd = (
        reference[[f"{of} {p}" for p in params]].to_numpy() for of in ("log mean", "log sd")
    )
    summary = {
        "sets": len(fits),
        "rmse": fits["rmse"].median(),
        "exact rmse": exact_rmse,
        "ratio": fits["rmse"].median() / exact_rmse,
        "aim": AIMS[case.name],
        "failures": int((~(fits["rmse"] < 5 * exact_rmse)).sum()),
        "coverage": fits["covered"].mean(),
        "exact coverage": _coverage(reference, params, case),
        "moved (exact sd)": np.nanmedian(np.nanmax(np.abs(mean - exact_mean) / exact_sd, axis=1)),
        "sd ratio": np.nanmedian(sd / exact_sd),
        "mixing": _mixing(fits),
        "median ess": fits["ess"].median(),
        "CPU s": (fits["build_seconds"] + fits["sample_seconds"]).median(),
    }
    if "k" in fits and fits["k"].notna().any():
        checked = fits[[f"checked log mean {p}" for p in params]].to_numpy()
        error = np.sqrt(
            1 / fits["n_effective"].to_numpy()[:, None] + 1 / reference["ess"].to_numpy()[:, None]
        )
        apart = np.nanmax(np.abs(checked - exact_mean) / (exact_sd * error), axis=1)
        good = (fits["k"] < 0.7).to_numpy() & (apart < AGREE)
        summary |= {
            "k < 0.7": (fits["k"] < 0.7).mean(),
            "sealed": fits["is_exact"].eq(1).mean(),
            "exact after check": good.mean(),
            "checked ratio": fits["checked rmse"].median() / exact_rmse,
            "checked coverage": fits["checked covered"].mean(),
        }
    return summary


def _mixing(fits: pd.DataFrame) -> float:
    """Return the share of fits whose chains mix; of none where there were no chains."""
    known = fits[["rhat", "ess"]].dropna()
    return (known["rhat"].lt(1.01) & known["ess"].ge(200)).mean()


def _coverage(reference, params, case: Case) -> float:
    low, high = (
        reference[[f"{edge} % {p}" for p in params]].to_numpy() for edge in ("2.5", "97.5")
    )
    true = np.array([case.theta[p] for p in params])
    return float(((low <= true) & (true <= high)).mean())


def main(arguments: list[str] | None = None):
    """Run the study and print its tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "accuracy", help="rows")
    parser.add_argument("--exact", type=Path, default=FOLDER / "exact.csv", help="exact posteriors")
    parser.add_argument("--csv", type=Path, default=FOLDER / "fits.csv", help="all rows")
    parser.add_argument("--replicates", type=int, default=100, help="data sets of each case")
    parser.add_argument("--cases", nargs="+", choices=list(AIMS), default=list(AIMS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--table", action="store_true", help="the tables only")
    parser.add_argument("--quick", action="store_true", help="three data sets of two cases")
    options = parser.parse_args(arguments)
    if options.quick:
        options.cases, options.replicates = ["LV low", "FHN SNR 100"], 3
    known = None if options.quick else runner.known_from(options.csv, INDEX)
    keys = runner.keys_of(
        options.cases, options.methods, replicates=REPLICATES[: options.replicates], ends=ENDS
    )
    every = runner.keys_of(list(AIMS), METHODS, replicates=REPLICATES, ends=())
    with runner.kept_in(options.out, quick=options.quick) as out:
        saved = runner.Saved(out, runner.JSON, known=known)
        if not options.table:
            runner.run(keys, fit, saved, report=report)
        rows = saved.table(every, partial(runner.table_of, index=INDEX)).sort_index()
    if options.quick:
        none_failed(rows.reindex(columns=["failure"]).dropna())
    elif not options.table:
        rows.to_csv(options.csv, float_format="%.5g")
    exact = pd.read_csv(options.exact, index_col=["case", "replicate"])
    show(table_of(rows, exact).T)


if __name__ == "__main__":
    main()

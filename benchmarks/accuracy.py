"""Accuracy beside the exact posterior: ``python -m benchmarks.accuracy``.

Fits what ``--out`` and ``--csv`` lack, one file per data set, case and method,
prints the table of all that is there and writes all rows to ``--csv``; an
interrupted run goes on where it stopped.  ``--table`` prints only, ``--quick``
fits three data sets of two cases.  The exact posteriors come from
``benchmarks/exact.csv``, see ``benchmarks.exact``.
"""

import argparse
import json
import platform
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.accuracy_fit import METHODS, Study
from benchmarks.cases import ACCURACY_CASES, AccuracyCase
from benchmarks.saving import finished

HERE = Path(__file__).parent
BLOCKS = ((0, 10), (10, 40), (40, 100))
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


def path_of(case: AccuracyCase, method: str, replicate: int, folder: Path) -> Path:
    """Return where the row of a fit is kept."""
    return folder / f"{case.name.replace(' ', '-')}-{method}-{replicate}.json"


def run(folder: Path, cases, methods, replicates: int, known: pd.Index):
    """Fit what a folder and a table of known rows lack; a failure is a row with its reason."""
    folder.mkdir(parents=True, exist_ok=True)
    studies = {(case.name, method): Study(case, method) for case in cases for method in methods}
    for first, end in BLOCKS:
        for case in cases:
            for method in methods:
                for replicate in range(first, min(end, replicates)):
                    path = path_of(case, method, replicate, folder)
                    if path.exists() or (case.name, method, replicate) in known:
                        continue
                    row = _fitted(studies[case.name, method], replicate)
                    with finished(path) as unfinished:
                        unfinished.write_text(json.dumps(row))
                    print(case.name, method, replicate, _short(row), flush=True)


def _fitted(study: Study, replicate: int) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return study.fit(replicate)
        except Exception as error:
            return {"failure": f"{type(error).__name__}: {error}"[:200]}


def _short(row: dict) -> str:
    keys = ("rmse", "covered", "rhat", "ess", "divergences", "k", "n_effective", "failure")
    return ", ".join(
        f"{k} {row[k]:.4g}" if isinstance(row[k], float | int) else row[k] for k in keys if k in row
    )


def rows_of(folder: Path, known: pd.DataFrame | None) -> pd.DataFrame:
    """Return the rows of a folder, and of a table those that the folder lacks."""
    rows = [
        {"case": case.name, "method": method, "replicate": replicate} | json.loads(path.read_text())
        for case in ACCURACY_CASES
        for method in METHODS
        for replicate in range(BLOCKS[-1][-1])
        if (path := path_of(case, method, replicate, folder)).exists()
    ]
    fitted = pd.DataFrame(rows).set_index(INDEX) if rows else None
    tables = [table for table in (fitted, known) if table is not None]
    if not tables:
        msg = f"there are no fits in {folder}; run without --table first."
        raise FileNotFoundError(msg)
    joined = pd.concat(tables)
    return joined[~joined.index.duplicated()].sort_index()


def table_of(rows: pd.DataFrame, exact: pd.DataFrame) -> pd.DataFrame:
    """Summarise fits beside the exact posteriors of the same data sets."""
    summaries = {}
    for (name, method), group in rows.groupby(level=["case", "method"], sort=False):
        fits = group.droplevel(["case", "method"])
        case = next(case for case in ACCURACY_CASES if case.name == name)
        reference = exact.loc[name]
        shared = fits.index.intersection(reference.index)
        fits, reference = fits.loc[shared], reference.loc[shared]
        params = [c.removeprefix("log mean ") for c in reference if c.startswith("log mean ")]
        params = [p for p in params if reference[f"log mean {p}"].notna().any()]
        summaries[name, method] = _summary(fits, reference, params, case)
    return pd.DataFrame(summaries).T.rename_axis(["case", "method"])


def _summary(fits, reference, params, case: AccuracyCase) -> dict[str, float]:
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
        "mixing": (fits["rhat"].lt(1.01) & fits["ess"].ge(200)).mean(),
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
            "exact after check": good.mean(),
            "checked ratio": fits["checked rmse"].median() / exact_rmse,
            "checked coverage": fits["checked covered"].mean(),
        }
    return summary


def _coverage(reference, params, case: AccuracyCase) -> float:
    low, high = (
        reference[[f"{edge} % {p}" for p in params]].to_numpy() for edge in ("2.5", "97.5")
    )
    true = np.array([case.system.theta[p] for p in params])
    return float(((low <= true) & (true <= high)).mean())


def main(arguments: list[str] | None = None):
    """Run the study and print its tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "accuracy", help="rows")
    parser.add_argument("--exact", type=Path, default=HERE / "exact.csv", help="exact posteriors")
    parser.add_argument("--csv", type=Path, default=HERE / "accuracy.csv", help="all rows")
    parser.add_argument("--replicates", type=int, default=100, help="data sets of each case")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in ACCURACY_CASES])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--table", action="store_true", help="the tables only")
    parser.add_argument("--quick", action="store_true", help="three data sets of two cases")
    options = parser.parse_args(arguments)
    names = options.cases or [case.name for case in ACCURACY_CASES]
    if options.quick:
        names, options.replicates = ["LV low", "FHN SNR 100"], 3
        options.out = options.out.with_name("accuracy-quick")
    known = None
    if options.csv.exists() and not options.quick:
        known = pd.read_csv(options.csv, index_col=INDEX)
    cases = [case for case in ACCURACY_CASES if case.name in names]
    if not options.table:
        done = pd.Index([]) if known is None else known.index
        run(options.out, cases, options.methods, options.replicates, done)
    rows = rows_of(options.out, known)
    exact = pd.read_csv(options.exact, index_col=["case", "replicate"])
    packages = ", ".join(f"{p} {version(p)}" for p in ("pymc", "pytensor", "nutpie"))
    print(f"Python {platform.python_version()}, {packages}, {platform.machine()}, one thread")
    print(table_of(rows, exact).T.to_string(float_format="{:.3g}".format))
    if not options.quick:
        rows.to_csv(options.csv, float_format="%.5g")


if __name__ == "__main__":
    main()

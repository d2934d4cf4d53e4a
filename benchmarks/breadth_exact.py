"""The exact posterior of every data set of the breadth study, by numerical integration.

``python -m benchmarks.breadth_exact`` samples what is missing in ``--out``, one file per
data set, and writes the summary of all files to ``benchmarks/breadth-exact.csv``;
``--table`` does the latter only.  An interrupted run goes on where it stopped.  JAX
comes with the extra ``benchmarks``; importing this module does not need it.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import arviz as az
import numpy as np
import pandas as pd

from benchmarks.breadth_cases import PROBLEMS, REPLICATES, Problem, problem_named
from benchmarks.exact import load, path_of, save
from benchmarks.exact_posterior import Fit, sample

HERE = Path(__file__).parent
INDEX = ["problem", "replicate", "variable"]


def summary(problem: Problem, fit: Fit) -> pd.DataFrame:
    """Return what the study compares with: a row for every parameter, first state and sigma."""
    of_states = {"x0": fit.x0, "sigma": fit.sigma}
    draws = {name: fit.theta[..., i] for i, name in enumerate(problem.theta)} | {
        f"{what}[{state}]": values[..., k]
        for what, values in of_states.items()
        for k, state in enumerate(problem.x0)
    }
    table = pd.DataFrame.from_dict(
        {name: _row(values) for name, values in draws.items()}, orient="index"
    )
    return table.assign(
        divergences=fit.divergences, attempts=fit.attempts, cpu_seconds=fit.cpu_seconds
    ).rename_axis("variable")


def _row(values: np.ndarray) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.025, 0.5, 0.975])
    return {
        "mean": values.mean(),
        "sd": values.std(),
        "2.5 %": low,
        "50 %": middle,
        "97.5 %": high,
        "rhat": float(az.rhat(values)),
        "ess": float(az.ess(values)),
    }


def saved(folder: Path) -> Iterator[tuple[Problem, int, Path]]:
    """Iterate over the files in a folder, by problem and replicate."""
    for problem in PROBLEMS:
        for replicate in REPLICATES:
            path = path_of(problem, replicate, folder)
            if path.exists():
                yield problem, replicate, path


def table_of(folder: Path) -> pd.DataFrame:
    """Return the summaries of all data sets in a folder."""
    tables = {
        (problem.name, replicate): summary(problem, load(path))
        for problem, replicate, path in saved(folder)
    }
    if not tables:
        msg = f"{folder} has no files of draws; run without --table first."
        raise FileNotFoundError(msg)
    return pd.concat(tables, names=INDEX)


def run(folder: Path, problems):
    """Sample what a folder lacks, and print a line for each data set."""
    folder.mkdir(parents=True, exist_ok=True)
    for replicate in REPLICATES:
        for problem in problems:
            path = path_of(problem, replicate, folder)
            if path.exists():
                continue
            fit = sample(problem, replicate)
            save(fit, path)
            print(
                f"{problem.name} {replicate}: R-hat {fit.rhat():.3f}, {fit.ess():.0f} effective "
                f"draws, {fit.divergences} divergences, {fit.cpu_seconds:.0f} CPU s",
                flush=True,
            )


def main(arguments: list[str] | None = None):
    """Sample the exact posteriors and write their table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--out", type=Path, default=HERE / "results" / "breadth-exact", help="draws"
    )
    parser.add_argument("--csv", type=Path, default=HERE / "breadth-exact.csv", help="table")
    parser.add_argument("--problems", nargs="+", choices=[problem.name for problem in PROBLEMS])
    parser.add_argument("--table", action="store_true", help="the table only, of what is there")
    options = parser.parse_args(arguments)
    if not options.table:
        names = options.problems or [problem.name for problem in PROBLEMS]
        run(options.out, [problem_named(name) for name in names])
    table_of(options.out).to_csv(options.csv, float_format="%.6g")


if __name__ == "__main__":
    main()

"""ODEs that nobody here had tuned for, by the road of the README: ``python -m benchmarks.breadth``.

Every data set is built, sampled and checked in a process of its own, and what came
of it is set beside the exact posterior of the same data (``breadth-exact.csv``, see
``benchmarks.breadth_exact``).  Fits what ``--out`` lacks, one file per data set, prints
a table and writes all rows to ``--csv``; an interrupted run goes on where it stopped.
``--table`` prints only, ``--quick`` fits one data set of two easy systems.

An interval of a parameter is wrong if it misses the exact posterior's mean by more than
two of its standard deviations, or has less than two thirds of its width.  A data set is

- *confirmed*: the exact check gives its seal, and no interval is wrong;
- *sealed, wrong*: the seal, and a wrong interval;
- *silent, wrong*: a wrong interval of the sampled model, and not a word from
  building or sampling it;
- *honest*: neither of these two, and no seal;
- *failed in words*: an error of ours within a minute of CPU time;
- *failed*: any other error, or no answer.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
from importlib.metadata import version
from pathlib import Path
from time import process_time

import numpy as np
import pandas as pd

from benchmarks.breadth_cases import PROBLEMS, REPLICATES, Problem, problem_named
from benchmarks.breadth_fit import Row, fit, trajectory_rmse
from benchmarks.saving import finished

HERE = Path(__file__).parent
EASY = ("decay", "logistic")
INDEX = ["problem", "replicate"]
FAR, NARROW = 2.0, 2 / 3  # exact standard deviations, and exact widths: the study's definition
SOON = 60.0  # CPU seconds within which a failure is to be said
OURS = ("ValueError", "TypeError", "RuntimeError")
OUTCOMES = ["confirmed", "sealed, wrong", "silent, wrong", "honest", "failed in words", "failed"]


def run(folder: Path, problems, replicates, limit: int):
    """Fit what a folder lacks, each data set in a process with so many CPU seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    for replicate in replicates:
        for problem in problems:
            path = path_of(problem, replicate, folder)
            if path.exists():
                continue
            process = multiprocessing.get_context("spawn").Process(
                target=_fit_to, args=(problem.name, replicate, path, limit)
            )
            process.start()
            process.join()
            if not path.exists():
                _give_up(path, limit, process.exitcode)
            print(problem.name, replicate, _short(json.loads(path.read_text())), flush=True)


def path_of(problem: Problem, replicate: int, folder: Path) -> Path:
    """Return where the row of a fit is kept."""
    return folder / f"{problem.name.replace(' ', '-')}-{replicate}.json"


def _fit_to(name: str, replicate: int, path: Path, limit: int):
    end = round(process_time()) + limit
    resource.setrlimit(resource.RLIMIT_CPU, (end, end))
    started = path.with_suffix(".started")
    row = fit(problem_named(name), replicate, keep=lambda row: started.write_text(json.dumps(row)))
    with finished(path) as unfinished:
        unfinished.write_text(json.dumps(row))
    started.unlink()


def _give_up(path: Path, limit: int, exitcode: int | None):
    """Save what a fit had before its process ended without an answer."""
    started = path.with_suffix(".started")
    row = json.loads(started.read_text())
    row["failure"] = f"no answer within {limit} CPU s (exit code {exitcode})"
    row["cpu_seconds"][row["stage"]] = float(limit)
    with finished(path) as unfinished:
        unfinished.write_text(json.dumps(row))
    started.unlink()


def _short(row: Row) -> str:
    seconds = f"{sum(row['cpu_seconds'].values()):.0f} CPU s"
    told = row.get("failure") or row["verdict"]
    return f"{seconds}, {row['stage']}: {told[:120]}"


def judged(row: Row, exact: pd.DataFrame, problem: Problem, replicate: int) -> Row:
    """Compare a fit with the exact posterior of its data, and name the outcome.

    Parameters
    ----------
    row : dict
        What :func:`benchmarks.breadth_fit.fit` returned.
    exact : pandas.DataFrame
        The exact posterior's moments, one row per variable.
    problem, replicate
        Which data set it is.

    Returns
    -------
    dict
        A row of the table.
    """
    x0 = [exact.loc[f"x0[{state}]", "mean"] for state in problem.x0]
    theta = exact.loc[list(problem.theta), "mean"]
    exact_rmse = trajectory_rmse(problem, problem.simulate(replicate), x0, theta)
    seconds = row["cpu_seconds"]
    said = [line for lines in row["said"].values() for line in lines]
    # What is said before the check, while the sampled model is all there is.
    warned = bool(row["said"].get("build") or row["said"].get("sample"))
    matched, checked = (_against(row.get(of), exact) for of in ("matched", "checked"))
    outcome = _outcome(row, matched, checked, warned)
    return {
        "outcome": outcome,
        "rhat": row.get("rhat"),
        "ess": row.get("ess"),
        "divergences": row.get("divergences"),
        "rmse": row.get("matched", {}).get("rmse"),
        "checked rmse": row.get("checked", {}).get("rmse"),
        "exact rmse": exact_rmse,
        **{f"matched {name}": value for name, value in matched.items()},
        **{f"checked {name}": value for name, value in checked.items()},
        "is_exact": row.get("is_exact"),
        "warned": warned,
        "exact rhat": exact.loc[list(problem.theta), "rhat"].max(),
        "cpu_seconds": sum(seconds.values()),
        **{f"{stage} seconds": seconds.get(stage) for stage in ("build", "sample", "check")},
        "failure": row.get("failure"),
        "verdict": row.get("verdict"),
        "said": " | ".join(said),
    }


def _against(fitted: Row | None, exact: pd.DataFrame) -> Row:
    """Return how far and how wide the intervals are, the worst of all parameters."""
    if fitted is None:
        return {"moved": np.nan, "narrowest": np.nan, "widest": np.nan, "wrong": False}
    theta = pd.DataFrame.from_dict(fitted["theta"], orient="index")
    exact = exact.loc[theta.index]
    moved = ((theta["mean"] - exact["mean"]) / exact["sd"]).abs().max()
    width = (theta["97.5 %"] - theta["2.5 %"]) / (exact["97.5 %"] - exact["2.5 %"])
    return {
        "moved": moved,
        "narrowest": width.min(),
        "widest": width.max(),
        "wrong": bool(not (moved <= FAR and width.min() >= NARROW)),
    }


def _outcome(row: Row, matched: Row, checked: Row, warned: bool) -> str:
    if row.get("is_exact") and checked["wrong"]:
        return "sealed, wrong"
    if matched["wrong"] and not warned:
        return "silent, wrong"
    if row.get("is_exact"):
        return "confirmed"
    if "failure" not in row:
        return "honest"
    in_words = row["failure"].startswith(OURS) and sum(row["cpu_seconds"].values()) < SOON
    return "failed in words" if in_words else "failed"


def rows_of(folder: Path, exact: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a folder whose exact posteriors are known."""
    rows = {
        (problem.name, replicate): judged(
            json.loads(path.read_text()), exact.loc[problem.name, replicate], problem, replicate
        )
        for problem in PROBLEMS
        for replicate in REPLICATES
        if (path := path_of(problem, replicate, folder)).exists()
        and (problem.name, replicate) in exact.index
    }
    if not rows:
        msg = f"there are no fits in {folder}; run without --table first."
        raise FileNotFoundError(msg)
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(INDEX)


def table_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Summarise the data sets of each problem; the worst where no other word is said."""
    return pd.DataFrame(
        {name: _summary(group) for name, group in rows.groupby(level="problem", sort=False)}
    ).T.rename_axis("problem")


def _summary(group: pd.DataFrame) -> Row:
    counts = group["outcome"].value_counts()
    figures = {
        "R-hat": group["rhat"].max(),
        "ess (median)": group["ess"].median(),
        "rmse / exact": (group["rmse"] / group["exact rmse"]).median(),
        "moved": group["matched moved"].max(),
        "narrowest": group["matched narrowest"].min(),
        "widest": group["matched widest"].max(),
        "checked rmse / exact": (group["checked rmse"] / group["exact rmse"]).median(),
        "checked moved": group["checked moved"].max(),
        "checked narrowest": group["checked narrowest"].min(),
        "sealed": int((group["is_exact"] == True).sum()),  # noqa: E712 (None where there is none)
        "exact R-hat": group["exact rhat"].max(),
        "CPU s (median)": group["cpu_seconds"].median(),
        "CPU s": group["cpu_seconds"].max(),
    }
    return {"sets": len(group)} | {name: counts.get(name, 0) for name in OUTCOMES} | figures


def main(arguments: list[str] | None = None):
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "breadth", help="rows")
    parser.add_argument("--exact", type=Path, default=HERE / "breadth-exact.csv")
    parser.add_argument("--csv", type=Path, default=HERE / "breadth.csv", help="all rows")
    parser.add_argument("--problems", nargs="+", choices=[problem.name for problem in PROBLEMS])
    parser.add_argument("--limit", type=int, default=600, help="CPU seconds of a fit")
    parser.add_argument("--table", action="store_true", help="the table only")
    parser.add_argument("--quick", action="store_true", help="one data set of two easy systems")
    options = parser.parse_args(arguments)
    names, replicates = options.problems or [problem.name for problem in PROBLEMS], REPLICATES
    if options.quick:
        names, replicates = EASY, REPLICATES[:1]
        options.out = options.out.with_name("breadth-quick")
    if not options.table:
        run(options.out, [problem_named(name) for name in names], replicates, options.limit)
    exact = pd.read_csv(options.exact, index_col=[*INDEX, "variable"]).sort_index()
    rows = rows_of(options.out, exact)
    packages = ", ".join(f"{p} {version(p)}" for p in ("pymc", "pytensor", "nutpie"))
    print(f"Python {platform.python_version()}, {packages}, {platform.machine()}", end=", ")
    print(f"{os.environ.get('OMP_NUM_THREADS', 'all')} BLAS threads")
    print(table_of(rows).T.to_string(float_format="{:.3g}".format))
    confirmed = rows.groupby(level="problem")["outcome"].agg(lambda o: (o == "confirmed").all())
    print(f"{confirmed.sum()} of {len(confirmed)} systems confirmed in every data set.")
    if not options.quick:
        rows.to_csv(options.csv, float_format="%.5g")


if __name__ == "__main__":
    main()

"""What came of a data set of the breadth study, beside the exact posterior of the same data.

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

import numpy as np
import pandas as pd

from benchmarks.breadth.fit import Row, trajectory_rmse
from benchmarks.cases import Case

__all__ = ["OUTCOMES", "judged", "table_of"]

FAR, NARROW = 2.0, 2 / 3  # exact standard deviations, and exact widths: the study's definition
SOON = 60.0  # CPU seconds within which a failure is to be said
OUTCOMES = ["confirmed", "sealed, wrong", "silent, wrong", "honest", "failed in words", "failed"]


def judged(row: Row, exact: pd.DataFrame, case: Case, replicate: int) -> Row:
    """Compare a fit with the exact posterior of its data, and name the outcome.

    Parameters
    ----------
    row : dict
        What :func:`benchmarks.breadth.fit.fit` returned.
    exact : pandas.DataFrame
        The exact posterior's moments, one row per variable.
    case, replicate
        Which data set it is.

    Returns
    -------
    dict
        A row of the table.
    """
    x0 = [exact.loc[f"x0[{state}]", "mean"] for state in case.x0]
    theta = exact.loc[list(case.theta), "mean"]
    exact_rmse = trajectory_rmse(case, case.simulate(replicate), x0, theta)
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
        "exact rhat": exact.loc[list(case.theta), "rhat"].max(),
        "cpu_seconds": sum(seconds.values()),
        **{f"{stage} seconds": seconds.get(stage) for stage in ("build", "sample", "check")},
        "n_effective": row.get("n_effective"),
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
    soon = sum(row["cpu_seconds"].values()) < SOON
    return "failed in words" if row.get("in_words") and soon else "failed"


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
        "sealed": int(group["is_exact"].eq(True).sum()),  # None where there is none
        "exact R-hat": group["exact rhat"].max(),
        "CPU s (median)": group["cpu_seconds"].median(),
        "CPU s": group["cpu_seconds"].max(),
    }
    return {"sets": len(group)} | {name: counts.get(name, 0) for name in OUTCOMES} | figures

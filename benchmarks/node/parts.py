"""The parts of the study: rows, what is printed of them, and which fail in a quick run."""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmarks.node import compilation, cost, gradients, nuts, patients

__all__ = ["PARTS", "given_up", "measured"]

MOST_OFF = 1e-6  # of a log density, in a quick run


class Part(NamedTuple):
    """A part of the study.

    Attributes
    ----------
    work : callable
        Maps the parts of a key, and what is told of a row before its end, to the row.
    keys, quick : sequence of tuple
        The rows, and those of a quick run.
    index : list of str
        What the parts of a key are called.
    table : callable
        Maps rows to what is printed.
    failed : callable
        Maps rows of a quick run to those that fail.
    """

    work: Callable[..., dict[str, Any]]
    keys: Sequence[tuple]
    quick: Sequence[tuple]
    index: list[str]
    table: Callable[[pd.DataFrame], pd.DataFrame]
    failed: Callable[[pd.DataFrame], pd.Series]


def _without_note(work: Callable) -> Callable:
    return partial(_told_nothing, work)


def _told_nothing(work, *key):
    *key, _ = key
    return work(*key)


def _gradients(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(aim=gradients.AIM)


def _cost(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows, each beside the best of the rival's at the node's tolerance."""
    table = rows.drop(columns=["side"], errors="ignore")
    if "us" in table:
        is_ours = table["by"] == cost.OURS
        like = table[~is_ours & (table["rtol"] <= 1e-9)]
        best = like["us"].groupby(level="problem").min()
        problems = table.index.get_level_values("problem")
        ratio = table["us"] / best.reindex(problems).to_numpy()
        table["ratio to the rival's best"] = ratio.where(is_ours)
        table["aim"] = pd.Series([cost.AIMS[p] for p in problems], table.index).where(is_ours)
    return table.droplevel("number").set_index("by", append=True)


def _nuts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return costs, and distances of means from the reference."""
    numbers = ["unknowns", "build_s", "compile_s", "seconds", "memory_GB", "rhat", "ess"]
    table = rows.reindex(columns=[*numbers, "divergences", "steps", "longer rhat", "failure"])
    table["ess per CPU s"] = table["ess"] / table["seconds"]
    away = {key: _away(rows, *key) for key in rows.index}
    table["furthest mean (reference sd)"] = pd.Series(away).reindex(rows.index)
    return table.dropna(axis=1, how="all")


def _away(rows: pd.DataFrame, name, side) -> float:
    """Return how far means are from the rival's, or from those of its longer run."""
    there = rows.xs(name, level=0)
    if side == nuts.THEIRS or nuts.THEIRS not in there.index:
        return np.nan
    mine, rival = there.loc[side], there.loc[nuts.THEIRS]
    for prefix in ("", "longer "):
        if rival.get(f"{prefix}rhat", np.inf) <= nuts.MIXED and isinstance(mine["means"], str):
            return nuts.furthest(mine, {key: rival[prefix + key] for key in ("means", "sds")})
    return np.nan


def _unmixed(rows: pd.DataFrame) -> pd.Series:
    return rows.loc[~((rows["rhat"] < 1.02) & (rows["divergences"] == 0)), "rhat"]


def _off(rows: pd.DataFrame) -> pd.Series:
    off = rows["log density off"]
    return off[~(off < MOST_OFF)]


PARTS = {
    "gradients": Part(
        _without_note(gradients.measured),
        gradients.KEYS, gradients.QUICK, ["problem", "points"],
        _gradients, lambda rows: rows.loc[~(rows["furthest"] < gradients.AIM), "furthest"],
    ),
    "cost": Part(
        _without_note(cost.measured), cost.KEYS, cost.QUICK, ["problem", "number"], _cost, _off,
    ),
    "compilation": Part(
        _without_note(compilation.measured), compilation.KEYS, compilation.QUICK,
        ["by", "caches"], lambda rows: rows, lambda rows: rows.loc[rows["compile"].isna()],
    ),
    "nuts": Part(
        nuts.sampled, nuts.KEYS, nuts.QUICK, ["problem", "by"], _nuts, _unmixed,
    ),
    "ring": Part(
        nuts.of_ring, nuts.RING_KEYS, nuts.RING_QUICK, ["unknowns asked for", "by"], _nuts,
        _unmixed,
    ),
    "patients": Part(
        _without_note(patients.measured),
        patients.KEYS, patients.QUICK, ["patients", "model"],
        lambda rows: rows, lambda rows: rows.loc[rows["is_finite"] != 1, "is_finite"],
    ),
}  # fmt: skip


def measured(
    part: str, key: tuple, note: Callable[[dict], None] = lambda known: None
) -> dict[str, Any]:
    """Measure a row, and say what went wrong."""
    logging.getLogger("pymc").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    known: dict[str, Any] = {}

    def kept(row):
        known.update(row)
        note(dict(known))

    kept({})
    try:
        return PARTS[part].work(*key, kept)
    except Exception as error:
        return known | {"failure": f"{type(error).__name__}: {error}"[:200]}


def given_up(known: dict | None, seconds: int, exit_code: int | None) -> dict[str, Any]:
    """Return what is known of a row that ended too early."""
    return (known or {}) | {"failure": f"no end within {seconds} CPU s (exit code {exit_code})"}

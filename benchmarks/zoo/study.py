"""What is kept of a fit and of its reference, and whether a passed verdict is false."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from time import process_time
from typing import Any

import numpy as np
import pandas as pd
from arviz_stats.ecdf_utils import ecdf_pit
from numpy.typing import NDArray
from scipy.stats import beta, kstest

from benchmarks import one_call
from benchmarks.zoo.generator import problem
from benchmarks.zoo.priors import to_scores
from benchmarks.zoo.problem import Problem, draws_of
from benchmarks.zoo.reference import Reference, moments, reference

__all__ = [
    "ALIKE", "EXTREME", "Row", "as_row", "banded", "clopper_pearson", "fit", "judged", "kept_of",
    "least", "refer", "shares", "summary_of",
]  # fmt: skip

type Array = NDArray[np.float64]
type Row = dict[str, Any]

SEED = 1_000_000  # of fits, added to the problem's number: no seed that drew any data
EXTREME = 0.01  # two-sided probability of a rank, below which a fit is looked at
MOVED, WIDTHS = 0.25, (0.8, 1.25)  # reference standard deviations, and their ratio: false beyond
ERRORS = 2.0  # Monte Carlo errors, that a figure may be off without being false
SIMULATIONS, BAND = 1_000, 0.95  # of ArviZ
LARGER = 4  # times the population of two runs that do not agree, for two others
LIKELIHOOD = "log likelihood"
ALIKE = 0.1  # that the fit's log likelihood and the one in numpy may differ by


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise in what takes more CPU seconds."""

    def ended(number, frame):
        msg = f"no answer in {seconds} CPU s"
        raise TimeoutError(msg)

    before = signal.signal(signal.SIGPROF, ended)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fit(number: int, *, seconds: int) -> Row:
    """Fit the problem of a number by ``gm.fit``; returns what the tables need."""
    posed = problem(number)
    return kept_of(posed, SEED + number, seconds)


def kept_of(posed: Problem, random_seed: int, seconds: int) -> Row:
    """Fit a problem with a seed; returns the verdict and what the draws say of each unknown."""
    told = {"family": posed.family, "unknowns": len(posed.unknowns), **posed.described}

    def limited(*given, **arguments):
        with within(seconds):
            return one_call.fitted(*given, **arguments)

    try:
        found, row = posed.fit(random_seed, limited)
    except TimeoutError as error:  # between two lines of what catches it
        found, row = None, {"is_exact": 0.0, "seconds": float(seconds), "verdict": str(error)}
    if found is None:
        return told | row | {"failed": 1.0}
    posterior = found.idata["posterior"].dataset
    draws = np.stack([draws_of(posterior, u.label) for u in posed.unknowns], axis=1)
    row |= {
        "failed": 0.0, "k": float(found.pareto_k), "n_effective": float(found.n_effective),
        "n_solutions": int(found.n_solutions),
    }  # fmt: skip
    heights = posed.log_likelihood(draws)
    theirs = found.idata["log_likelihood"].dataset.isel(chain=0)
    of_draws = sum(one.sum([*one.dims][1:]).to_numpy() for one in theirs.values())
    row["apart"] = float(np.abs(heights - of_draws).max())
    return told | row | {"draws": summary_of(posed, draws, heights)}


def summary_of(posed: Problem, draws: Array, heights: Array) -> list[Row]:
    """Return what draws say of each unknown, and of the log likelihood."""
    columns = zip(posed.unknowns, draws.T, strict=True)
    scores = np.stack([to_scores(u.prior, column) for u, column in columns], axis=1)
    natural, scored = moments(draws), moments(scores)
    rows: list[Row] = [
        {
            "unknown": unknown.label, "kind": unknown.kind,
            "below": float((draws[:, k] < posed.truth[k]).mean()),
            **{name: float(of[k]) for name, of in natural._asdict().items()},
            **{f"score {name}": float(of[k]) for name, of in scored._asdict().items()},
        }
        for k, unknown in enumerate(posed.unknowns)
    ]  # fmt: skip
    below = float((heights < posed.log_likelihood(posed.truth[None])).mean())
    return [*rows, {"unknown": LIKELIHOOD, "kind": LIKELIHOOD, "below": below}]


def refer(number: int, *, size: int) -> Row:
    """Return the reference of the problem of a number, larger where two runs do not agree."""
    posed, start = problem(number), process_time()
    found = reference(posed, size)
    if not found.scores_agree.all():
        found = reference(posed, LARGER * size, seeds=(3, 4))
    return as_row(posed, found) | {"seconds": process_time() - start}


def as_row(posed: Problem, found: Reference) -> Row:
    """Return a reference as what can be saved."""
    return {
        "by": found.by,
        "unknowns": [unknown.label for unknown in posed.unknowns],
        "of": {
            name: {
                "mean": of.mean.tolist(), "sd": of.sd.tolist(), "kurtosis": of.kurtosis.tolist(),
                "agree": agree.tolist(), "errors": errors.tolist(),
            }
            for name, of, agree, errors in [
                ("", found.natural, found.natural_agree, found.natural_errors),
                ("score ", found.scores, found.scores_agree, found.scores_errors),
            ]
        },
    }  # fmt: skip


def judged(row: Row, known: Row) -> Row:
    """Return whether draws are right, by a reference: each unknown as it is, and as a score.

    As it is, only where both runs of the reference agree, which for a tail without moments they
    do not.  Where they do not in scores the reference is unreliable, and tells nothing.
    """
    wrong, furthest, widths = [], 0.0, []
    reliable = all(known["of"]["score "]["agree"])
    drawn = [one for one in row["draws"] if one["unknown"] != LIKELIHOOD]
    for scale, of in known["of"].items():
        for k, one in enumerate(drawn):
            if not of["agree"][k]:
                continue
            sd, worth = of["sd"][k], row["n_effective"]
            moved = abs(one[f"{scale}mean"] - of["mean"][k]) / sd
            width = one[f"{scale}sd"] / sd
            error = np.hypot(width * worth**-0.5, of["errors"][k])
            kurtosis = max(one[f"{scale}kurtosis"], of["kurtosis"][k])
            of_width = ERRORS * np.sqrt(max(kurtosis - 1, 0) / 4) * np.hypot(
                worth**-0.5, of["errors"][k]
            )  # fmt: skip
            low, high = WIDTHS[0] * np.exp(-of_width), WIDTHS[1] * np.exp(of_width)
            if moved > MOVED + ERRORS * error or not low <= width <= high:
                wrong.append(
                    f"{scale}{one['unknown']}: {moved:.2f} sd away, {width:.2f} times as wide"
                )
            if scale:
                furthest, widths = max(furthest, moved), [*widths, width]
    return {
        "reference": known["by"] if reliable else "unreliable",
        "false": float(bool(wrong)) if reliable else np.nan,
        "wrong": "; ".join(wrong) if reliable else "",
        "furthest": furthest, "narrowest": min(widths, default=np.nan),
        "widest": max(widths, default=np.nan),
    }  # fmt: skip


def least(row: Row) -> float:
    """Return the least two-sided probability among the ranks of a fit."""
    sides = [2 * min(one["below"], 1 - one["below"]) for one in row["draws"]]
    return min(sides)


def banded(rows: dict[int, Row]) -> pd.DataFrame:
    """Hold the ranks of truths to their simultaneous band, by what they are ranks of.

    One unknown of each fit, by chance: those of one fit depend on each other.
    """
    kinds = ["any", "parameter", "start", "noise", LIKELIHOOD]
    found = {}
    for kind in kinds:
        values = []
        for number, row in rows.items():
            those = [
                one["below"]
                for one in row["draws"]
                if one["kind"] == kind or (kind == "any" and one["kind"] != LIKELIHOOD)
            ]
            if those:
                values.append(those[np.random.default_rng(number).integers(len(those))])
        if len(values) < 2:
            continue
        below = np.array(values)
        _, ecdf, lower, upper = ecdf_pit(below, BAND, SIMULATIONS, rng=np.random.default_rng(0))
        outside = np.maximum(lower - ecdf, ecdf - upper).max()
        found[kind] = {
            "fits": len(below),
            "inside the band": outside <= 0,
            "beyond it": max(outside, 0.0),
            "p (Kolmogorov-Smirnov)": kstest(below, "uniform").pvalue,
            "95 % intervals hold the truth": (np.abs(below - 0.5) < 0.475).mean(),
        }
    return pd.DataFrame(found).T.rename_axis("rank of")


def shares(fits: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return how many fits passed, what they cost, and what references say, by a column."""
    groups = fits.groupby(by, sort=False)
    seconds = groups["seconds"]
    return pd.DataFrame(
        {
            "fits": groups.size(),
            "passed": groups["is_exact"].mean(),
            "failed": groups["failed"].sum(),
            "CPU s": seconds.median(),
            "90 %": seconds.quantile(0.9),
            "most": seconds.max(),
            "solutions": groups["n_solutions"].median(),
            "extreme": groups["extreme"].sum(),
            "referred": groups["false"].count(),
            "false": groups["false"].sum(),
        }
    )


def clopper_pearson(k: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Return the interval of a share of which k of n were seen."""
    tail = (1 - level) / 2
    low = beta.ppf(tail, k, n - k + 1) if k else 0.0
    high = beta.ppf(1 - tail, k + 1, n - k) if k < n else 1.0
    return float(low), float(high)

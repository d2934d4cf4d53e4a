"""What does each part of the engine buy?  ``python -m benchmarks.ablation``.

Problems of ``benchmarks.zoo``, numbers 0 to ``--n``, and some of its rotations that were falsely
sealed before are fitted by the whole engine, and with one part of it switched off or one of its
constants at half and at twice.  A row of the table is a switch: how many fits have the whole
engine's draws to the digit, verdicts, lost and gained beside the whole engine, how far draws moved
at most, verdicts that are false by the zoo's measure, CPU seconds (ratio of medians) and solutions
of the ODE (ratio of sums).  Draws are held to the zoo's reference where one is saved, else to those
of the whole engine where it has a verdict.  ``another seed`` switches nothing off, and tells what
chance does.

Fits are kept in a file each, of the present package; ``--only`` does some of the switches,
``--table`` prints only; ``--quick`` fits two problems with two switches, and keeps nothing.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pandas as pd

from benchmarks import RESULTS, RUNS, none_failed, runner, show
from benchmarks.zoo import known, study
from benchmarks.zoo.__main__ import Lasting, in_pool, zoo
from benchmarks.zoo.generator import problem
from benchmarks.zoo.problem import Problem
from pymc_gradmatch.exact import diagnostics, horizon, importance, multistart, ridges, search
from pymc_gradmatch.sampling import engine

WHOLE, OTHER_SEED = "whole", "another seed"
GENERATED, ROTATIONS = "zoo", ("rotation", "22 like it")
QUICK_PROBLEMS, QUICK_SWITCHES = (16, 31), (WHOLE, "walks", "horizon")
SHIFT = 500_000  # of another seed
UNTRIED: study.Row = {
    "is_exact": 0.0, "failed": 1.0, "seconds": 0.0,
    "verdict": "not tried: the whole engine had no answer in time",
}  # fmt: skip
MOMENTS = ("mean", "sd", "kurtosis")
INDEX = ["switch", "problem", "number"]

type Key = tuple[str, str, int]


class Change(NamedTuple):
    """What stands in the place of an attribute of a module or a class, made from what is there."""

    of: Any
    name: str
    made: Callable[[Any], Any]


class Switch(NamedTuple):
    """What is taken away, in a sentence, and how."""

    takes_away: str
    changes: Sequence[Change] = ()
    seed: int = 0
    """Added to that of the fit."""


def instead(value: Any) -> Callable[[Any], Any]:
    """Return a change to a value, whatever was there."""
    return lambda before: value


def times(factor: float) -> Callable[[Any], Any]:
    """Return a change of a number by a factor."""
    return lambda before: factor * before


def one_of_two(searched: Callable) -> Callable:
    """Return a search of which every second call gives back what the one before it found."""
    found: list[Any] = []

    def every_other(*given, **settings):
        if found:
            return found.pop()
        found.append(searched(*given, **settings))
        return found[0]

    return every_other


def of_the_first(together: Callable) -> Callable:
    """Return a comparison that is told of the first search alone."""
    return lambda pools, *given: together(pools[:1], *given)


def likeliest(target, drawn, n, rng):
    """Return the likeliest of draws, as starts."""
    heights = target(drawn)
    return drawn[np.argsort(-heights)[: min(n, np.isfinite(heights).sum())]]


def unwalked(target, local):
    """Return the mixture of the modes alone, as that of ridges."""
    return ridges.Ridges(ridges.mixture_of_modes(local), 0, local.log_density)


def of_constant(name: str, *places: Any) -> dict[str, Switch]:
    """Return switches that halve and double a constant wherever it is known by its name."""
    return {
        f"{name} {words}": Switch(
            f"{words} the {name}", [Change(of, name, times(factor)) for of in places]
        )
        for words, factor in (("half", 0.5), ("twice", 2))
    }


PARTS = {
    WHOLE: Switch("nothing"),
    OTHER_SEED: Switch("nothing: what chance does", seed=SHIFT),
    "walks": Switch(
        "HMC trajectories from the draws, which may leave them",
        [Change(search, "hmc_check", instead(lambda target, found, rng: found.hmc))],
    ),
    "ridges": Switch(
        "ridge continuation: the mixture of the modes alone is the start",
        [
            Change(search, "follow_ridges", instead(unwalked)),
            Change(search, "without_ridge_connected", instead(lambda target, local, say: local)),
        ],
    ),
    "wide start": Switch(
        "the width of the second search's first proposal",
        [Change(search, "WIDE_START", instead(1.0))],
    ),
    "second search": Switch(
        "the second search, and with it what the first is compared with",
        [Change(search, "_search", one_of_two), Change(search, "_combined", of_the_first)],
    ),
    "more climbs": Switch(
        "starts after the first 32",
        [Change(multistart, "MAX_STARTS", instead(multistart.FIRST_STARTS))],
    ),
    "other climbs": Switch(
        "starts from other draws than the likeliest",
        [Change(multistart, "_starts", instead(likeliest))],
    ),
    "more draws": Switch(
        "the larger rounds of searches that start again",
        [Change(search, "DRAWS_PER_ROUND", lambda before: before[:1] * len(before))],
    ),
    "restarts": Switch(
        "searches that start again", [Change(search, "DRAWS_PER_ROUND", lambda before: before[:1])]
    ),
    "pooled one": Switch(
        "all rounds of a search but the last", [Change(importance, "MAX_POOLED_ROUNDS", instead(1))]
    ),
    "pooled all": Switch(
        "the rule that a search forgets its first rounds",
        [Change(importance, "MAX_POOLED_ROUNDS", instead(None))],
    ),
    "defence": Switch(
        "the wider part of the first search's first proposal",
        [Change(importance.Mixture, "defensive", instead(lambda mixture, other: mixture))],
    ),
    "stretch": Switch(
        "the half of each proposal that is longer along its longest axis",
        [Change(importance.Mixture, "stretched", instead(lambda mixture: mixture))],
    ),
    "horizon": Switch(
        "the growing horizon where the fit is poor",
        [Change(engine, "fits_poorly", instead(lambda target, local: False))],
    ),
}
SWITCHES = (
    PARTS
    | of_constant("EVIDENCE_GAP", multistart, horizon)
    | of_constant("MAX_CHANCE_OF_NEW", multistart, diagnostics)
    | of_constant("MIN_REPEATS", multistart)
    | of_constant("MAX_DISAGREEMENT", search)
    | of_constant("MAX_ERROR", search)
    | of_constant("MAX_FALL", ridges)
)


@contextmanager
def without(switch: Switch) -> Iterator[None]:
    """Switch something off."""
    with ExitStack() as stack:
        for of, name, made in switch.changes:
            stack.enter_context(patch.object(of, name, made(getattr(of, name))))
        yield


def posed(name: str, number: int) -> tuple[Problem, int]:
    """Return a problem and the seed of its fit."""
    if name == GENERATED:
        return problem(number), study.SEED + number
    return known.KNOWN[name].posed(number), number


@cache
def is_within(name: str, number: int, seconds: int) -> bool:
    """Tell whether the whole engine has an answer in time.

    After that all is compiled that a fit of this problem needs, in this process.
    """
    return not study.kept_of(*posed(name, number), seconds)["failed"]


def fit(key: Key, *, seconds: int) -> study.Row:
    """Fit a problem without a part of the engine, if the whole has an answer in time."""
    name, of, number = key
    if not is_within(of, number, seconds):
        return UNTRIED
    switch, (of_problem, seed) = SWITCHES[name], posed(of, number)
    with without(switch):
        return study.kept_of(of_problem, seed + switch.seed, seconds)


def as_known(row: study.Row) -> study.Row:
    """Return what draws say as a reference."""
    drawn = [one for one in row["draws"] if one["unknown"] != study.LIKELIHOOD]
    n = len(drawn)
    rest = {"agree": [True] * n, "errors": [row["n_effective"] ** -0.5] * n}
    return {
        "by": "whole engine",
        "of": {
            scale: {
                name: [one[f"{scale}{name}"] for one in drawn]
                for name in ("mean", "sd", "kurtosis")
            }
            | rest
            for scale in ("", "score ")
        },
    }


def moved(row: study.Row, of: study.Row) -> tuple[float, float]:
    """Return how far draws are from a reference at most, beyond Monte Carlo errors.

    In standard deviations, and in their logarithms, of normal scores.
    """
    drawn = [one for one in row["draws"] if one["unknown"] != study.LIKELIHOOD]
    mean, sd, kurtosis = (np.array([one[f"score {name}"] for one in drawn]) for name in MOMENTS)
    scores = {name: np.array(values) for name, values in of["of"]["score "].items()}
    errors = study.ERRORS * np.hypot(row["n_effective"] ** -0.5, scores["errors"])
    tails = np.sqrt(np.maximum(np.maximum(kurtosis, scores["kurtosis"]) - 1, 0) / 4)
    of_mean = np.abs(mean - scores["mean"]) / scores["sd"] - errors
    of_width = np.abs(np.log(sd / scores["sd"])) - tails * errors
    return max(of_mean.max(), 0.0), max(of_width.max(), 0.0)


def compared(row: study.Row, whole: study.Row, reference: study.Row | None) -> study.Row:
    """Return what is told of a fit beside the whole engine's."""
    passed, passes = bool(row["is_exact"]), bool(whole["is_exact"])
    if reference is not None and not all(reference["of"]["score "]["agree"]):
        reference = None
    if reference is None and passes:
        reference = as_known(whole)
    told = {
        "passed": passed, "lost": passes and not passed, "gained": passed and not passes,
        "failed": bool(row["failed"]),
        "same": "draws" in row and row["n_effective"] == whole["n_effective"],
        "reference": "", "moved": np.nan, "log sd": np.nan, "false": np.nan,
        "k": row.get("k", np.nan), "seconds": row["seconds"],
        "solutions": row.get("n_solutions", np.nan),
        "withheld": "" if passed else row["verdict"][:120],
    }  # fmt: skip
    if reference is not None and "draws" in row:
        told["reference"] = reference["by"]
        told["moved"], told["log sd"] = moved(row, reference)
        told["false"] = study.judged(row, reference)["false"] if passed else np.nan
    return told


def table_of(
    rows: dict[Key, study.Row], references: dict[tuple[str, int], study.Row]
) -> pd.DataFrame:
    """Return a table of fits, each beside that of the whole engine, if that has an answer."""
    return runner.table_of(
        (
            (key, compared(row, rows[WHOLE, *key[1:]], references.get(key[1:])))
            for key, row in rows.items()
            if not rows.get((WHOLE, *key[1:]), UNTRIED)["failed"]
        ),
        INDEX,
    )


def summary_of(fits: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each switch."""
    whole = fits.loc[WHOLE]
    summaries = {}
    for switch, of in fits.groupby("switch", sort=False):
        here = of.loc[switch]
        beside = whole.loc[here.index]
        both = here["solutions"].notna() & beside["solutions"].notna()
        passed = here[here["passed"]]
        summaries[switch] = {
            "fits": len(here), "same": here["same"].sum(), "passed": here["passed"].sum(),
            "lost": here["lost"].sum(), "gained": here["gained"].sum(),
            "failed": here["failed"].sum(), "moved": passed["moved"].max(),
            "log sd": passed["log sd"].max(), "false": passed["false"].sum(),
            "of": passed["false"].count(),
            "CPU s": here["seconds"].median() / beside["seconds"].median(),
            "solutions": here["solutions"][both].sum() / beside["solutions"][both].sum(),
        }  # fmt: skip
    return pd.DataFrame(summaries).T.rename_axis("switch")


def report(key: Key, row: study.Row):
    """Print a line for a fit."""
    print(*key, f"{row['seconds']:.1f} CPU s, {row['verdict'][:110]}", flush=True)


def references_of(folder: Path, keys: Sequence[Key]) -> dict[tuple[str, int], study.Row]:
    """Return the references that are saved, by problem."""
    found = {}
    generated = Lasting(folder / "references", runner.JSON)
    of_known = Lasting(folder / "known-references", runner.JSON)
    for name, number in dict.fromkeys(key[1:] for key in keys):
        if name == GENERATED:
            path = generated.path((number,))
        else:
            path = of_known.path((name, known.KNOWN[name].reference_of(number)))
        if path.exists():
            found[name, number] = runner.JSON.read(path)
    return found


def keys_of(numbers: Sequence[int], n_rotations: int, switches: Sequence[str]) -> list[Key]:
    """Return all jobs, problem by problem."""
    problems = [(GENERATED, number) for number in numbers]
    problems += [(name, number) for name in ROTATIONS for number in range(n_rotations)]
    return [(switch, *of) for of in problems for switch in switches]


def main(arguments: list[str] | None = None):
    """Fit all, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "ablation", help="rows")
    parser.add_argument("--csv", type=Path, default=RESULTS / "ablation.csv", help="the fits")
    parser.add_argument("--zoo", type=Path, default=RUNS / "zoo", help="where its references are")
    parser.add_argument("--n", type=int, default=40, help="problems of the zoo")
    parser.add_argument("--numbers", nargs="+", type=int, help="of these, not the first n")
    parser.add_argument("--rotations", type=int, default=3, help="of each kind")
    parser.add_argument("--only", nargs="+", choices=[*SWITCHES], help="switches; all unless given")
    parser.add_argument("--limit", type=int, default=60, help="CPU seconds of a fit")
    parser.add_argument("--workers", type=int, choices=[1, 2], default=1, help="processes")
    parser.add_argument("--table", action="store_true", help="the table only")
    parser.add_argument("--quick", action="store_true", help="two problems with two switches")
    options = parser.parse_args(arguments)
    switches = dict.fromkeys([WHOLE, *(options.only or SWITCHES)])
    keys = keys_of(options.numbers or range(options.n), options.rotations, [*switches])
    if options.quick:
        keys = [(switch, GENERATED, n) for n in QUICK_PROBLEMS for switch in QUICK_SWITCHES]
    with runner.kept_in(options.out, quick=options.quick) as out:
        saved = runner.Saved(out, runner.JSON)
        if not options.table:
            work = partial(fit, seconds=options.limit)
            runner.run(keys, work, saved, workers=in_pool(options.workers), report=report)
        fits = table_of(dict(saved.items(keys)), references_of(options.zoo / zoo(), keys))
    if not (options.quick or options.table):
        fits.to_csv(options.csv, float_format="%.4g")
    show(summary_of(fits))
    lost = fits.loc[fits["lost"] | fits["gained"] | (fits["false"] == 1)]
    if len(lost):
        print(lost[["passed", "k", "moved", "log sd", "false", "withheld"]].to_string())
    none_failed(fits.loc[fits["failed"] & ~fits["withheld"].str.contains("CPU s"), "withheld"])


if __name__ == "__main__":
    main()

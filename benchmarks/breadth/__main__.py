"""The breadth study: ``python -m benchmarks.breadth``.

Every data set is built, sampled and checked in a process of its own, and what came
of it is set beside the exact posterior of the same data
(``benchmarks/results/breadth/exact.csv``, see ``benchmarks.exact``).  Fits what
``--out`` lacks, one file per data set, prints a table and writes all rows to ``--csv``,
where those of data sets that were not fitted stay; an interrupted run goes on where it
stopped.  ``--one-call`` fits by ``gm.fit`` instead; ``--seed`` fits the same data with
other seeds, into a folder and a table of their own; ``--table`` prints only, ``--quick``
fits one data set of two easy systems and keeps nothing.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

from benchmarks import RESULTS, RUNS, none_failed, runner, show
from benchmarks.breadth.fit import Row, fit, fit_in_one_call, given_up
from benchmarks.breadth.outcomes import judged, table_of
from benchmarks.cases import BREADTH, named

FOLDER = RESULTS / "breadth"
PROBLEMS = [case.name for case in BREADTH]
REPLICATES = range(1, 6)
EASY = ["decay", "logistic"]
INDEX = ["problem", "replicate"]


def report(key, row: Row):
    """Print a line for a fit."""
    seconds = f"{sum(row['cpu_seconds'].values()):.0f} CPU s"
    told = row.get("failure") or row["verdict"]
    print(*key, f"{seconds}, {row['stage']}: {told[:120]}", flush=True)


def rows_of(fits: Iterable[tuple[tuple, Row]], exact: pd.DataFrame) -> pd.DataFrame:
    """Return fits beside the exact posteriors of their data."""
    rows = ((key, judged(row, exact.loc[key], named(BREADTH, key[0]), key[1])) for key, row in fits)
    return runner.table_of(rows, INDEX)


def main(arguments: list[str] | None = None):
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--one-call", action="store_true", help="by gm.fit")
    parser.add_argument("--seed", type=int, default=0, help="added to the seed of every fit")
    parser.add_argument("--out", type=Path, help="rows")
    parser.add_argument("--exact", type=Path, default=FOLDER / "exact.csv", help="exact posteriors")
    parser.add_argument("--csv", type=Path, help="all rows")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=PROBLEMS)
    parser.add_argument("--limit", type=int, default=600, help="CPU seconds of a fit")
    parser.add_argument("--table", action="store_true", help="the table only")
    parser.add_argument("--quick", action="store_true", help="one data set of two easy systems")
    options = parser.parse_args(arguments)
    replicates, road = REPLICATES, "one-call" if options.one_call else "fits"
    if options.seed:
        road += f"-seed-{options.seed}"
    options.csv = options.csv or FOLDER / f"{road}.csv"
    if options.quick:
        options.problems, replicates = EASY, REPLICATES[:1]
    known = None if options.quick else runner.known_from(options.csv, INDEX)
    exact = pd.read_csv(options.exact, index_col=[*INDEX, "variable"]).sort_index()
    judgeable = exact.index.droplevel("variable")
    every = runner.keys_of(PROBLEMS, replicates=REPLICATES, ends=())
    with runner.kept_in(options.out or RUNS / f"breadth-{road}", quick=options.quick) as out:
        # What the table knows is no reason not to fit: a run is of one state of the package.
        saved = runner.Saved(out, runner.JSON)
        if not options.table:
            runner.run(
                runner.keys_of(options.problems, replicates=replicates, ends=range(1, 5)),
                partial(fit_in_one_call if options.one_call else fit, seed=options.seed),
                saved,
                workers=runner.in_processes(options.limit, given_up),
                report=report,
            )
        rows = replace(saved, known=known).table(
            [key for key in every if key in judgeable], partial(rows_of, exact=exact)
        )
    rows = rows.loc[[key for key in every if key in rows.index]]
    if options.quick:
        wrong = rows["outcome"] != "confirmed"
        none_failed(rows.loc[wrong, ["outcome", "failure", "verdict"]])
    elif not options.table:
        rows.to_csv(options.csv, float_format="%.5g")
    show(table_of(rows).T)
    confirmed = rows.groupby(level="problem")["outcome"].agg(lambda o: (o == "confirmed").all())
    print(f"{confirmed.sum()} of {len(confirmed)} systems confirmed in every data set.")


if __name__ == "__main__":
    main()

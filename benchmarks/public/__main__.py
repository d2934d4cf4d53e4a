"""Small published data sets: ``python -m benchmarks.public``.

Each of some forty data sets of kinetics, pharmacology, epidemics, ecology, physiology and others
(public/data has the numbers, with their sources) is fitted by ``gm.fit`` as the pages suggest, in
a process of its own, and set beside the reference of the same posterior
(``benchmarks/results/public/references.csv``; ``--references`` makes those that are missing).
Fits what ``--out`` lacks, one file per fit, prints a table and writes all rows to ``--csv``, where
those that were not fitted stay; an interrupted run goes on where it stopped.  ``--table`` prints
only, ``--quick`` fits three data sets and keeps nothing.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

from benchmarks import RESULTS, RUNS, none_failed, runner, show
from benchmarks.public import PROBLEMS
from benchmarks.public.judge import OUTCOMES, fit, given_up, judged, refer

FOLDER = RESULTS / "public"
INDEX = ["problem", "seed"]
EASY = ["nitrogen pentoxide", "theophylline by mouth", "plague in Eyam"]
SHOWN = ["outcome", "moved", "of", "narrowest", "widest", "k", "seconds"]


def make_references(names: Iterable[str], csv: Path):
    """Add the references that a table lacks, one after the other."""
    for name in names:
        known = runner.known_from(csv, ["problem", "unknown"])
        if known is not None and name in known.index.get_level_values("problem"):
            continue
        found = refer(name)
        csv.parent.mkdir(parents=True, exist_ok=True)
        every = found if known is None else pd.concat([known, found])
        with runner.finished(csv) as unfinished:
            every.to_csv(unfinished, float_format="%.6g")
        seconds, agree = found["seconds"].iloc[0], found["scores agree"].all()
        print(
            f"{name}: {found['by'].iloc[0]}, {seconds:.0f} CPU s, runs agree: {agree}", flush=True
        )


def rows_of(fits: Iterable[tuple[tuple, dict]], references: pd.DataFrame) -> pd.DataFrame:
    """Return fits beside the references of their posteriors."""
    there = references.index.get_level_values("problem")
    rows = (
        (key, judged(row, references.loc[key[0]] if key[0] in there else None)) for key, row in fits
    )
    return runner.table_of(rows, INDEX)


def main(arguments: list[str] | None = None):
    """Fit, and print what came of it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "public", help="rows")
    parser.add_argument("--csv", type=Path, default=FOLDER / "fits.csv", help="all rows")
    parser.add_argument(
        "--against", type=Path, default=FOLDER / "references.csv", help="the references"
    )
    parser.add_argument("--problems", nargs="+", choices=[*PROBLEMS], default=[*PROBLEMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of the fits")
    parser.add_argument("--limit", type=int, default=300, help="CPU seconds of a fit")
    parser.add_argument("--references", action="store_true", help="make references, fit nothing")
    parser.add_argument("--table", action="store_true", help="the table only")
    parser.add_argument("--quick", action="store_true", help="three easy data sets")
    options = parser.parse_args(arguments)
    if options.references:
        make_references(options.problems, options.against)
        return
    references = pd.read_csv(options.against, index_col=["problem", "unknown"])
    if options.quick:
        options.problems, options.seeds = EASY, [1]
    keys = [(name, seed) for seed in options.seeds for name in options.problems]
    known = None if options.quick else runner.known_from(options.csv, INDEX)
    with runner.kept_in(options.out, quick=options.quick) as out:
        saved = runner.Saved(out, runner.JSON)
        if not options.table:
            runner.run(
                keys, fit, saved, workers=runner.in_processes(options.limit, given_up),
                report=lambda key, row: print(
                    *key, f"{row['seconds']:.0f} CPU s: {row['verdict'][:90]}", flush=True
                ),
            )  # fmt: skip
        rows = replace(saved, known=known).table(keys, partial(rows_of, references=references))
    if options.quick:
        none_failed(rows.loc[rows["outcome"] != "right, passed", ["outcome", "verdict"]])
    elif not options.table:
        rows.to_csv(options.csv, float_format="%.5g")
    show(rows[SHOWN])
    counts = rows["outcome"].value_counts().reindex(OUTCOMES, fill_value=0)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    print(f"median {rows['seconds'].median():.1f} CPU s")


if __name__ == "__main__":
    main()

"""The messy study: ``python -m benchmarks.messy``.

Data as they come, each set by ``gm.fit`` and by NumPyro with diffrax through the same
likelihood and priors (JAX comes with the extra ``benchmarks``; ``--roads fit`` and ``--roads
exact`` do one of the two).  Does what ``--out`` and the saved tables lack, one file per fit,
prints the figures of all that is there beside their aims, and writes all rows to
``benchmarks/results/messy``; an interrupted run goes on where it stopped.  ``--table`` prints
only, ``--quick`` does one set of two easy cases and keeps nothing.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pandas as pd

from benchmarks import RESULTS, RUNS, none_failed, runner, show
from benchmarks.cases import MESSY
from benchmarks.messy.exact import exact
from benchmarks.messy.figures import AIMS, costs, published, references, starts, table_of
from benchmarks.messy.fit import fit, given_up
from benchmarks.messy.rows import OF_SET, Row, long_table

FOLDER = RESULTS / "messy"
NAMES = [case.name for case in MESSY]
EASY = ["LV, own times", "SIR, new cases"]
ROADS = {"exact": ["case", "replicate"], "fit": ["case", "replicate", "seed"]}
# A deletion of real counts is no new data set, and five show what there is to see.
SETS, FEW = range(20), {"lynx and hare, 30 % deleted": 5}
ENDS = (1, 5)
SEEDS, SETS_OF_SEEDS = range(10), 2


def keys_of(names: list[str], n_sets: int) -> Iterator[tuple[str, list[tuple]]]:
    """Return jobs, road by road and block by block: what is there at any time is of use."""
    bounds = [0, *(end for end in ENDS if end < n_sets), n_sets]
    for first, end in pairwise(bounds):
        sets = [(n, r) for n in names for r in SETS[first : min(end, FEW.get(n, len(SETS)))]]
        yield "exact", sets
        yield "fit", [(*key, SEEDS[0]) for key in sets]
        if first < SETS_OF_SEEDS <= end:
            yield "fit", list(product(names, SETS[:SETS_OF_SEEDS], SEEDS))


def report(road: str, key, row: Row):
    """Print a line for a fit."""
    figures = ("k", "rhat", "n_effective", "cpu_seconds")
    told = row.get("failure") or ", ".join(f"{n} {row[n]:.3g}" for n in figures if n in row)
    print(road, *key, told, flush=True)


def main(arguments: list[str] | None = None):
    """Run the study and print its tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--roads", nargs="+", choices=list(ROADS), default=list(ROADS))
    parser.add_argument("--sets", type=int, default=len(SETS), help="of each case")
    parser.add_argument("--out", type=Path, default=RUNS / "messy", help="rows")
    parser.add_argument("--limit", type=int, default=600, help="CPU seconds of a fit of ours")
    parser.add_argument("--table", action="store_true", help="the tables only")
    parser.add_argument("--quick", action="store_true", help="one set of two easy cases")
    options = parser.parse_args(arguments)
    if options.quick:
        options.cases, options.sets = EASY, 1
    csv = {"exact": FOLDER / "exact.csv", "fit": FOLDER / "fits.csv"}
    saved_rows = {
        road: None if options.quick else runner.known_from(csv[road], [*index, "variable"])
        for road, index in ROADS.items()
    }
    alone = runner.in_processes(options.limit, given_up)
    work = {"exact": (exact, None), "fit": (fit, alone)}
    blocks = [] if options.table else keys_of(options.cases, options.sets)
    with runner.kept_in(options.out, quick=options.quick) as out:
        saved = {
            road: runner.Saved(out / road, runner.JSON, known=rows)
            for road, rows in saved_rows.items()
        }
        for road, keys in blocks:
            if road not in options.roads:
                continue
            function, workers = work[road]
            runner.run(keys, function, saved[road], workers=workers, report=partial(report, road))
            if not options.quick:
                write(saved, csv)  # a run that is ended leaves its tables
        tables = {road: rows_of(saved[road], road) for road in ROADS}
    fits, every = tables["fit"], tables["exact"]
    if options.quick:
        said = fits.xs(OF_SET, level="variable")
        said = said.reindex(columns=["is_exact", "verdict", "failure"])
        none_failed(said[said["is_exact"] != 1])
    known = references(every)
    left_out = len(every.index.droplevel("variable").unique()) - len(
        known.index.droplevel("variable").unique()
    )
    figures = table_of(fits, known)
    figures.insert(0, "aim", pd.Series(AIMS))
    show(figures.fillna({"aim": ""}))
    print(f"{left_out} sets are left out: the rival's chains do not agree.")
    for title, table in {
        "Hes1: RMSE of the mean trajectories, means over sets": published(fits, known),
        "Several seeds for a set (aim: 0.95 in the same mode)": starts(fits, known),
        "CPU s from data to 1000 effective draws; only ours has warm caches on disk": costs(
            fits, known
        ),
    }.items():
        print(f"\n{title}\n{table.to_string(float_format='{:.3g}'.format)}")


def rows_of(saved: runner.Saved, road: str) -> pd.DataFrame:
    """Return all rows of a road."""
    every = dict.fromkeys(k for r, keys in keys_of(NAMES, len(SETS)) if r == road for k in keys)
    return saved.table(list(every), partial(long_table, index=ROADS[road])).sort_index()


def write(saved: dict[str, runner.Saved], csv: dict[str, Path]):
    """Write the tables of all roads that have results."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for road, path in csv.items():
        try:
            table = rows_of(saved[road], road)
        except FileNotFoundError:
            continue
        table.drop(columns="verdict", errors="ignore").to_csv(path, float_format="%.5g")


if __name__ == "__main__":
    main()

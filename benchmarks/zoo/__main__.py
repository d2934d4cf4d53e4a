"""Is a passed verdict true, on problems that nobody wrote?  ``python -m benchmarks.zoo``.

``--n`` problems of a generator are fitted by ``gm.fit``, truth drawn from the very priors of
the fit.  Printed are the share with a passed verdict, what a fit costs, and whether the ranks
of the truth among the passed are uniform.  Every passed fit with an extreme rank, and
``--references`` others by chance, are held to a reference that shares nothing with the package
but the ODE's solver (``benchmarks.zoo.reference``): a verdict is false if any unknown's mean is
more than a quarter of a standard deviation away, or its width off by a fifth, beyond Monte Carlo
error.

``--known`` fits the posteriors that were falsely sealed before, twenty seeds each.  Fits and
references are kept in a file each: fits of the present package and zoo, references of the
present zoo.  ``--table`` prints only; ``--quick`` poses three small problems, and keeps nothing.
"""

import argparse
import ast
import multiprocessing
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks import RESULTS, RUNS, none_failed, runner, show
from benchmarks.zoo import known, study

QUICK = (16, 31, 36)
SOURCES = ("priors", "families", "generator", "problem", "reference")
TOLD = ["family", "law", "seen", "parts", "spacing"]  # columns that shares are told by


@dataclass(frozen=True)
class Lasting(runner.Saved):
    """Results that the package's source does not change."""

    @property
    def here(self) -> Path:
        """Where they are."""
        return self.folder

    def left_aside(self) -> int:
        """Return how many results are those of another package: none."""
        return 0


def zoo() -> str:
    """Return what tells these problems and references from those of any other source.

    However it is laid out.
    """
    folder = Path(__file__).parent
    trees = [ast.parse((folder / f"{name}.py").read_text("utf-8")) for name in SOURCES]
    return sha256("".join(map(ast.dump, trees)).encode()).hexdigest()[:12]


def in_pool(n: int) -> runner.Workers:
    """Return workers in so many processes, which live on from job to job."""

    def workers(work, keys):
        with multiprocessing.get_context("spawn").Pool(n) as pool:
            yield from pool.imap_unordered(partial(_done, work), keys)

    return workers if n > 1 else runner.in_turn


def _done(work, key):
    return key, work(key)


def fit(key: tuple[int], *, seconds: int) -> study.Row:
    """Fit the problem of a key."""
    return study.fit(*key, seconds=seconds)


def refer(key: tuple[int], *, size: int) -> study.Row:
    """Return the reference of the problem of a key."""
    return study.refer(*key, size=size)


def to_be_referred(rows: dict[int, study.Row], n: int) -> list[int]:
    """Return the numbers of passed fits with an extreme rank, and of some others by chance."""
    passed = [number for number, row in rows.items() if row["is_exact"]]
    by_chance = sorted(passed, key=lambda number: np.random.default_rng([1, number]).random())
    extreme = [number for number in passed if study.least(rows[number]) < study.EXTREME]
    return [*extreme, *(number for number in by_chance[:n] if number not in extreme)]


def report(key, row: study.Row):
    """Print a line for a fit or a reference."""
    told = row.get("verdict", row.get("by", ""))
    print(*key, f"{row.get('seconds', 0.0):.1f} CPU s, {told[:110]}", flush=True)


def rows_of(saved: runner.Saved, keys) -> dict[int, study.Row]:
    """Return what has been saved, by the problem's number."""
    there = [key for key in keys if saved.path(key).exists()]
    return {key[0]: row for key, row in saved.items(there)} if there else {}


def fits_of(rows: dict[int, study.Row], references: dict[int, study.Row]) -> pd.DataFrame:
    """Return a table of fits, each with what its reference says."""
    table = {}
    for number, row in rows.items():
        flat = {name: value for name, value in row.items() if name != "draws"}
        passed = bool(row["is_exact"])
        flat["least rank"] = study.least(row) if "draws" in row else np.nan
        flat["extreme"] = float(passed and flat["least rank"] < study.EXTREME)
        if passed and number in references:
            flat |= study.judged(row, references[number])
        table[number] = flat
    columns = ["k", "n_effective", "n_solutions", "apart", "reference", "false", "wrong"]
    found = pd.DataFrame.from_dict(table, orient="index").rename_axis("problem").sort_index()
    return found.reindex(columns=list(dict.fromkeys([*found.columns, *columns])))


def ranks_of(rows: dict[int, study.Row]) -> pd.DataFrame:
    """Return a table of the unknowns of all fits."""
    unknowns = [
        {"problem": number, **one} for number, row in rows.items() for one in row.get("draws", ())
    ]
    return pd.DataFrame(unknowns).set_index(["problem", "unknown"]).sort_index()


def tell(fits: pd.DataFrame, rows: dict[int, study.Row]):
    """Print the tables."""
    show(study.shares(fits.assign(all="all"), "all"))
    for column in TOLD:
        print(study.shares(fits, column).to_string(float_format="{:.3g}".format))
    passed = {number: row for number, row in rows.items() if row["is_exact"]}
    print(study.banded(passed).to_string(float_format="{:.3g}".format))
    for kind in ("extreme rank", "by chance"):
        of = fits[fits["extreme"] == (kind == "extreme rank")]
        k, n = int(of["false"].sum()), int(of["false"].count())
        low, high = study.clopper_pearson(k, n) if n else (0.0, 1.0)
        unreliable = (of["reference"] == "unreliable").sum()
        print(
            f"{kind}: {k} false of {n} passed fits with a reference, {k / max(n, 1):.3f} "
            f"({low:.3f} to {high:.3f}); {unreliable} references unreliable"
        )
    wrong = fits.loc[fits["false"] == 1, ["family", "law", "k", "reference", "wrong"]]
    if len(wrong):
        print(wrong.to_string(float_format="{:.3g}".format))
    lost = fits.loc[fits["is_exact"] != 1, ["family", "law", "unknowns", "seconds", "verdict"]]
    if len(lost):
        print(
            lost.assign(verdict=lost["verdict"].str[:200]).to_string(float_format="{:.3g}".format)
        )


def main(arguments: list[str] | None = None):
    """Run the study and print its tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "zoo", help="rows")
    parser.add_argument("--csv", type=Path, default=RESULTS / "zoo", help="folder of the tables")
    parser.add_argument("--n", type=int, default=500, help="problems")
    parser.add_argument("--references", type=int, default=50, help="of passed fits, by chance")
    parser.add_argument("--size", type=int, default=1_500, help="of a reference's populations")
    parser.add_argument("--limit", type=int, default=120, help="CPU seconds of a fit")
    parser.add_argument("--workers", type=int, choices=[1, 2], default=1, help="processes")
    parser.add_argument("--known", action="store_true", help="what was falsely sealed before")
    parser.add_argument("--table", action="store_true", help="the tables only")
    parser.add_argument("--quick", action="store_true", help="three small problems, one reference")
    options = parser.parse_args(arguments)
    with runner.kept_in(options.out / zoo(), quick=options.quick) as out:
        (_known if options.known else _generated)(options, out)


def _generated(options, out: Path):
    numbers = QUICK if options.quick else range(options.n)
    keys: list[tuple[int]] = [(number,) for number in numbers]
    fits = runner.Saved(out / "fits", runner.JSON)
    references = Lasting(out / "references", runner.JSON)
    if not options.table:
        workers = in_pool(options.workers)
        work = partial(fit, seconds=options.limit)
        runner.run(keys, work, fits, workers=workers, report=report)
    rows = rows_of(fits, keys)
    if not options.table:
        chosen = to_be_referred(rows, 1 if options.quick else options.references)
        work = partial(refer, size=500 if options.quick else options.size)
        runner.run([(n,) for n in chosen], work, references, workers=workers, report=report)
    table = fits_of(rows, rows_of(references, keys))
    if options.quick:
        wrong = (table["failed"] == 1) | (table["false"] == 1) | (table["apart"] > study.ALIKE)
        none_failed(table.loc[wrong, ["verdict", "wrong", "apart"]])
    elif not options.table:
        options.csv.mkdir(parents=True, exist_ok=True)
        table.to_csv(options.csv / "fits.csv", float_format="%.5g")
        ranks_of(rows).to_csv(options.csv / "unknowns.csv", float_format="%.5g")
    tell(table, rows)


def _known(options, out: Path):
    keys = [(name, seed) for name, one in known.KNOWN.items() for seed in one.seeds]
    if options.quick:
        keys = [("rotation", 0)]
    of_keys = [(name, known.KNOWN[name].reference_of(seed)) for name, seed in keys]
    fits = runner.Saved(out / "known", runner.JSON)
    references = Lasting(out / "known-references", runner.JSON)
    if not options.table:
        workers = in_pool(options.workers)
        work = partial(known.fit, seconds=options.limit)
        runner.run(keys, work, fits, workers=workers, report=report)
        work = partial(known.refer, size=20 * options.size)
        runner.run(list(dict.fromkeys(of_keys)), work, references, workers=workers)
    table = known.table_of(dict(fits.items(keys)), dict(references.items(of_keys)))
    show(table, None if options.quick or options.table else options.csv / "known.csv")


if __name__ == "__main__":
    main()

"""Published problems with box priors and few data: ``python -m benchmarks.published``.

Boehm, Bruno, Armistead and Crauste of the collection in PEtab format are fitted by ``gm.fit``,
a process for each fit.  First the log likelihood at the nominal parameters is held to the
published one, which is the highest known.  The table has the log likelihood at the best draw and
at the mode, how much lower the better of these is than the best known (1.92 is half the 95 %
quantile of chi squared), the verdict, what is unidentified, CPU seconds and solutions.

One file per fit, so that an interrupted run goes on where it stopped; rows of ``--csv`` that were
not asked for stay.  ``--table`` prints the saved table only, ``--quick`` checks the nominal
parameters alone.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks import RESULTS, RUNS, none_failed, runner, show
from benchmarks.published import PROBLEMS
from benchmarks.published.fit import fit, given_up

INDEX = ["problem", "seed"]
ROUNDED = 2e-3  # published log likelihoods have three digits


def nominal() -> pd.DataFrame:
    """Return the log likelihood of every problem at its nominal parameters, and the published."""
    rows = {
        name: {"ours": problem.log_likelihood(problem.box["nominal"]), "published": problem.best}
        for name, problem in PROBLEMS.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("problem")


def main(arguments: list[str] | None = None):
    """Check the nominal parameters, fit, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "published", help="rows")
    parser.add_argument("--csv", type=Path, default=RESULTS / "published.csv", help="all rows")
    parser.add_argument("--problems", nargs="+", choices=[*PROBLEMS], default=[*PROBLEMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of the fits")
    parser.add_argument("--limit", type=int, default=300, help="CPU seconds of a fit")
    parser.add_argument("--table", action="store_true", help="the table only")
    parser.add_argument("--quick", action="store_true", help="the nominal parameters only")
    options = parser.parse_args(arguments)
    if options.table:
        show(pd.read_csv(options.csv, index_col=INDEX))
        return
    check = nominal()
    show(check, None)
    none_failed(check[~(np.abs(check["ours"] - check["published"]) < ROUNDED)])
    if options.quick:
        return
    keys = [(name, seed) for seed in options.seeds for name in options.problems]
    saved = runner.Saved(options.out, runner.JSON)
    runner.run(
        keys,
        fit,
        saved,
        workers=runner.in_processes(options.limit, given_up),
        report=lambda key, row: print(*key, row["verdict"][:90], flush=True),
    )
    known = runner.known_from(options.csv, INDEX)
    rows = replace(saved, known=known).table(keys, partial(runner.table_of, index=INDEX))
    show(rows, options.csv, "%.5g")


if __name__ == "__main__":
    main()

"""The solution as a node: ``python -m benchmarks.node``, what issue 46 asks for.

Six parts, each with a table in ``results/node``: are gradients right (beside differences); what
does a log density with its gradient cost; how long does an exact model take to compile; NUTS on
exact models from where gradient matching starts; the same on rings of Lorenz-96; and how does the
cost grow with patients?  The rival is NumPyro with diffrax (``pip install ".[benchmarks]"``) on the
same density.  Every row is measured in a process of its own, one file each, so that an interrupted
run goes on where it stopped; ``--table`` prints only, ``--quick`` does a small version of each part
without the rival, keeps nothing and ends with what failed.
"""

import argparse
from functools import partial
from pathlib import Path

import pandas as pd

from benchmarks import RESULTS, RUNS, none_failed, runner, show
from benchmarks.node.parts import PARTS, given_up, measured

LIMIT = 1_200  # CPU seconds of a row


def main(arguments: list[str] | None = None):
    """Run the study and print its tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--only", nargs="+", help="rows with one of these in their key")
    parser.add_argument("--out", type=Path, default=RUNS / "node", help="rows")
    parser.add_argument("--csv", type=Path, default=RESULTS / "node", help="folder of the tables")
    parser.add_argument("--limit", type=int, default=LIMIT, help="CPU seconds of a row")
    parser.add_argument("--table", action="store_true", help="the tables only")
    parser.add_argument("--quick", action="store_true", help="a small version, without the rival")
    options = parser.parse_args(arguments)
    failures = []
    for name in options.parts:
        part, csv = PARTS[name], options.csv / f"{name}.csv"
        keys = part.quick if options.quick else part.keys
        if options.only:
            keys = [key for key in keys if {*map(str, key)} & {*options.only}]
        known = None if options.quick else runner.known_from(csv, part.index)
        with runner.kept_in(options.out / name, quick=options.quick) as out:
            saved = runner.Saved(out, runner.JSON, known=known)
            if not options.table:
                runner.run(
                    keys, partial(measured, name), saved,
                    workers=None if options.quick else runner.in_processes(options.limit, given_up),
                    report=lambda key, row: print(*key, row, flush=True),
                )  # fmt: skip
            rows = saved.table(keys, partial(runner.table_of, index=part.index))
        if options.quick:
            if "failure" in rows:
                failures.append(rows["failure"].dropna().astype(str))
                rows = rows[rows["failure"].isna()]
            if len(rows):
                failures.append(part.failed(rows).astype(str))
        elif not options.table:
            csv.parent.mkdir(parents=True, exist_ok=True)
            rows.to_csv(csv, float_format="%.5g")
        print(f"\n{name}")
        if len(rows):
            show(part.table(rows))
    if failures:
        none_failed(pd.concat(failures))


if __name__ == "__main__":
    main()

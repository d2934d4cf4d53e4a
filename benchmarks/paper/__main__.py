"""Run the experiments of the paper: ``python -m benchmarks.paper``.

``run`` (the default) fits what ``--out`` lacks, every fit a file of its own,
and goes on where a killed run stopped; a file that is broken is fitted again,
and a fit that failed once its file is deleted.  Then it combines all into
``study.nc`` and prints the tables, as ``table`` does, which also writes them in
Markdown to ``tables.md``.
``figures`` draws from ``study.nc``.  ``--quick`` does all of it and keeps nothing.

With ``--scheduler ADDRESS`` the fits run on the workers of a Dask cluster,
which are started in a copy of this repository::

    dask scheduler
    OMP_NUM_THREADS=1 PYTHONPATH=. dask worker ADDRESS --nworkers 2 --nthreads 1
"""

import argparse
from pathlib import Path

from benchmarks import RUNS, none_failed, runner
from benchmarks.cases import PAPER
from benchmarks.paper.figures import draw_figures
from benchmarks.paper.markdown import markdown_tables
from benchmarks.paper.methods import FULL, METHODS, QUICK
from benchmarks.paper.results import combine, load
from benchmarks.paper.study import run, tasks_of
from benchmarks.paper.tables import failures, write_tables

SYSTEMS = ["LV", "PT", "FHN"]


def main(arguments: list[str] | None = None):
    """Run the study, or show what has been saved."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", nargs="?", choices=("run", "table", "figures"), default="run")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--replicates", type=int, help="data sets of each case; 100, quick 1")
    parser.add_argument("--n-jobs", type=int, default=-1, help="processes; -1 is one per core")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="run on this Dask cluster")
    parser.add_argument("--quick", action="store_true", help="the first case, short chains")
    options = parser.parse_args(arguments)
    with runner.kept_in(options.out or RUNS / "paper", quick=options.quick) as out:
        act(options, out)


def act(options: argparse.Namespace, out: Path):
    """Run the study in a folder, or show what has been saved there."""
    if options.action == "run":
        cases = [case.name for case in PAPER if case.name.split()[0] in options.systems]
        effort, replicates = FULL, 100
        if options.quick:
            cases, effort, replicates = cases[:1], QUICK, 1
        run(
            tasks_of(cases, options.methods, options.replicates or replicates),
            out,
            effort,
            n_jobs=options.n_jobs,
            scheduler=options.scheduler,
        )
    if options.action in ("run", "table"):
        combine(out)
        write_tables(load(out), out)
        text = "\n\n".join(markdown_tables(out).values()) + "\n"
        (out / "tables.md").write_text(text, "utf-8")
    if options.action == "figures" or options.quick:
        for path in draw_figures(load(out), out / "figures"):
            print(path)
    if options.quick:
        none_failed(failures(load(out)))


if __name__ == "__main__":
    main()

"""How the package is built, revision by revision: ``python -m benchmarks.house 408c503 HEAD``.

Counts modules and doors (``__init__.py`` of packages), floors (of the graph of imports
between modules: one more than the highest that is imported), arrows of that graph, lines,
names in ``dir(gm)``, and what is imported from inside other libraries.  For the road from
the data to the density it builds a model and evaluates its density, for that to the
draws it samples too, and counts the modules in which a function has run.
"""

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd

PACKAGE = "pymc_gradmatch"
LIBRARIES = ("pymc", "pytensor", "nutpie", "arviz_stats", "arviz_base", "arviz_plots")
PUBLIC = {
    *LIBRARIES,
    "arviz_base.labels",
    "pymc.model.transform.conditioning",
    "pytensor.compile.mode",
    "pytensor.compile.sharedvalue",
    "pytensor.gradient",
    "pytensor.graph.basic",
    "pytensor.graph.op",
    "pytensor.graph.replace",
    "pytensor.graph.rewriting.utils",
    "pytensor.graph.traversal",
    "pytensor.tensor",
    "pytensor.tensor.elemwise",
    "pytensor.tensor.random.op",
    "pytensor.tensor.subtensor",
    "pytensor.tensor.variable",
}
ROAD = """
import sys, threading
import numpy as np, pymc as pm, pymc_gradmatch as gm

everything = [getattr(gm, name) for name in dir(gm)]  # so that no room is imported on the way
files = set()
def note(frame, event, argument):
    if event == "call":
        files.add(frame.f_code.co_filename)

decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
t = np.linspace(0, 4, 9)
y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))
threading.setprofile(note)
sys.setprofile(note)
model = gm.build_model(decay, t, y, priors={"rate": pm.HalfNormal.dist(1)})
model.compile_logp(mode="FAST_COMPILE")(model.initial_point())
if sys.argv[1] == "draws":
    gm.sample(100, tune=100, chains=1, model=model, random_seed=1, progressbar=False)
sys.setprofile(None)
print(len({file for file in files if "/pymc_gradmatch/" in file}))
"""


def modules(package: Path) -> dict[str, Path]:
    """Return the modules of a package by their dotted names, doors not among them."""
    return {
        ".".join((PACKAGE, *path.relative_to(package).with_suffix("").parts)): path
        for path in sorted(package.rglob("*.py"))
        if path.name != "__init__.py"
    }


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for every ``from module import name`` of a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.module or "", alias.name


def behind(package: Path, known: Mapping[str, Path], module: str, name: str) -> str:
    """Return the module that an import reaches, through a door or directly."""
    if f"{module}.{name}" in known:
        return f"{module}.{name}"
    if module in known:
        return module
    door = package.joinpath(*module.split(".")[1:], "__init__.py")
    return next(
        behind(package, known, source, name)
        for source, exported in imports(door)
        if exported == name
    )


def arrows(package: Path) -> dict[str, set[str]]:
    """Return which modules each module imports."""
    known = modules(package)
    return {
        module: {
            behind(package, known, source, name)
            for source, name in imports(path)
            if source.split(".")[0] == PACKAGE
        }
        for module, path in known.items()
    }


def floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return one more than the highest floor that each imports; the lowest is the first.

    Raises
    ------
    ValueError
        If imports go in a circle.
    """
    known: dict[str, int] = {}

    def floor(node: str, above: tuple[str, ...] = ()) -> int:
        if node in above:
            msg = f"imports go in a circle: {[*above, node]}"
            raise ValueError(msg)
        if node not in known:
            known[node] = 1 + max((floor(n, (*above, node)) for n in graph[node]), default=0)
        return known[node]

    for node in graph:
        floor(node)
    return known


def internals(package: Path) -> set[tuple[str, str]]:
    """Return what is imported from inside other libraries."""
    return {
        (source, name)
        for path in package.rglob("*.py")
        for source, name in imports(path)
        if source.split(".")[0] in LIBRARIES and source not in PUBLIC
    }


def measured(package: Path) -> dict[str, int]:
    """Return the figures of one version of the package."""

    def printed(*command: str) -> int:
        run = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            cwd=package.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        return int(run.stdout.splitlines()[-1])

    graph = arrows(package)
    files = [*package.rglob("*.py")]
    return {
        "modules": len(graph),
        "doors": sum(path.name == "__init__.py" for path in files) - 1,
        "floors": max(floors(graph).values()),
        "arrows": sum(map(len, graph.values())),
        "lines": sum(len(path.read_text("utf-8").splitlines()) for path in files),
        "names in dir(gm)": printed("-c", f"import {PACKAGE} as gm; print(len(dir(gm)))"),
        "internals": len(internals(package)),
        "modules from t to the density": printed("-c", ROAD, "density"),
        "modules from t to the draws": printed("-c", ROAD, "draws"),
    }


def main(arguments: list[str] | None = None):
    """Print the figures of several revisions side by side."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("revisions", nargs="+", help="of this repository, as git knows them")
    table = {}
    for revision in parser.parse_args(arguments).revisions:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(
                ["git", "archive", revision, PACKAGE],
                cwd=Path(__file__).parent.parent,
                capture_output=True,
                check=True,
            )
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            table[revision] = measured(Path(folder) / PACKAGE)
    print(pd.DataFrame(table).to_string())


if __name__ == "__main__":
    main()

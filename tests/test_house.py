"""The architecture: imports go down, packages have one entrance, and no private names are used."""

import ast
import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import pymc_gradmatch as gm


def modules(package: Path) -> dict[str, Path]:
    """Return the modules of a package by their dotted names, doors not among them."""
    return {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)): path
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
            if source.split(".")[0] == package.name
        }
        for module, path in known.items()
    }


PACKAGE = Path(gm.__file__).parent
MODULES = modules(PACKAGE)
ARROWS = arrows(PACKAGE)
DESIGN = (PACKAGE.parent / "docs" / "design.md").read_text("utf-8")

OTHERS = re.compile(r"(pymc|pytensor|nutpie|arviz\w*)(\.|$)")
PUBLIC = {  # documented, or exported by a library at its root
    "arviz",
    "arviz_base",
    "arviz_base.labels",  # az.labels
    "arviz_plots.visuals",  # az.visuals
    "arviz_stats",
    "arviz_stats.base.array_stats",
    "nutpie",
    "pymc",
    "pymc.distributions",
    "pymc.distributions.transforms",
    "pymc.gp",
    "pymc.gp.cov",
    "pymc.math",
    "pymc.model.fgraph",
    "pymc.model.transform.conditioning.remove_value_transforms",
    "pymc.pytensorf.join_nonshared_inputs",
    "pymc.pytensorf.make_shared_replacements",
    "pytensor",
    "pytensor.compile",
    "pytensor.gradient",
    "pytensor.graph",
    "pytensor.graph.basic",
    "pytensor.graph.fg",
    "pytensor.graph.replace",
    "pytensor.graph.rewriting.utils",
    "pytensor.graph.traversal",
    *("pytensor.raise_op", "pytensor.scalar"),  # and below: what graphs are made of
    "pytensor.tensor",
    "pytensor.tensor.basic",
    "pytensor.tensor.blas",
    "pytensor.tensor.elemwise",
    "pytensor.tensor.linalg",
    "pytensor.tensor.math",
    "pytensor.tensor.random",
    "pytensor.tensor.shape",
    "pytensor.tensor.subtensor",
}
COMPILES = re.compile(
    r"pytensor\.function|pm\.compile|scalar_code|compile_starts|.+\.(eval|compile_\w+)"
)
IN_NUMPY = {"EVALUATE_ONCE", "'FAST_COMPILE'"}  # modes
NAMED_TUPLES = {"_asdict", "_fields", "_replace"}  # documented with an underscore


def room_of(module):
    """Return the package of a module, or its own name where it stands beside the packages."""
    return module.split(".")[1]


def of_ours(module):
    return [(m, name) for m, name in imports(MODULES[module]) if m.startswith("pymc_gradmatch")]


def test_imports_between_rooms_go_down():
    rooms = {room_of(module): set() for module in ARROWS}
    for module, reached in ARROWS.items():
        rooms[room_of(module)] |= {room_of(other) for other in reached} - {room_of(module)}
    TopologicalSorter(rooms).prepare()  # raises where they go in a circle


@pytest.mark.parametrize("module", MODULES)
def test_other_rooms_are_entered_through_their_door(module):
    through_the_wall = [
        source
        for source, _ in of_ours(module)
        if source.count(".") > 1 and room_of(source) != room_of(module)
    ]
    assert not through_the_wall


@pytest.mark.parametrize("module", MODULES)
def test_no_private_name_of_another_module_is_used(module):
    used = [name for _, name in of_ours(module)]
    assert not [name for name in used if name.startswith("_")]


def taken_from_other_libraries(path):
    """Yield (module, name) of all that a file takes from other libraries, by dots or by import."""
    nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
    places = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found = {a.asname or a.name: a.name for a in node.names if OTHERS.match(a.name)}
            places |= found
            yield from ((module, "") for module in found.values())
        if isinstance(node, ast.ImportFrom) and OTHERS.match(node.module or ""):
            yield from ((node.module, alias.name) for alias in node.names)
    for node in nodes:
        if isinstance(node, ast.Attribute) and re.fullmatch(r"\w+(\.\w+)+", ast.unparse(node)):
            root, *names = ast.unparse(node).split(".")
            place = sys.modules.get(places.get(root))
            for name in names:
                if isinstance(place, ModuleType):
                    yield place.__name__, name
                    place = getattr(place, name)


def is_public(module, name):
    """Tell whether a name of another library's module is one that users are shown."""
    value = None
    with contextlib.suppress(ModuleNotFoundError):  # it needs JAX, which need not be there
        value = getattr(importlib.import_module(module), name, None)
    place = value.__name__ if isinstance(value, ModuleType) else module
    return not name.startswith("_") and not PUBLIC.isdisjoint((place, f"{place}.{name}"))


@pytest.mark.parametrize("path", sorted({*PACKAGE.rglob("*.py")} - {PACKAGE / "_pymc.py"}), ids=str)
def test_internals_of_other_libraries_are_in_one_module(path):
    assert not {taken for taken in taken_from_other_libraries(path) if not is_public(*taken)}


@pytest.mark.parametrize("module", MODULES)
def test_no_private_attribute_of_what_is_made_elsewhere_is_used(module):
    nodes = [*ast.walk(ast.parse(MODULES[module].read_text("utf-8")))]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    private = {
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Attribute)
        and re.match(r"_(?!_)", node.attr)
        and node.attr not in own | NAMED_TUPLES
        and ast.unparse(node.value) not in ("self", "cls")
    }
    assert module == "pymc_gradmatch._pymc" or not private


def compiled_otherwise(source):
    """Return the calls that compile to machine code, but not within ``without_fastmath()``."""
    nodes = [*ast.walk(ast.parse(source))]
    within = {
        inner
        for node in nodes
        if isinstance(node, ast.With)
        and "without_fastmath()" in [ast.unparse(item.context_expr) for item in node.items]
        for inner in ast.walk(node)
    }
    return [
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Call)
        and COMPILES.fullmatch(ast.unparse(node.func))
        and IN_NUMPY.isdisjoint(ast.unparse(k.value) for k in node.keywords if k.arg == "mode")
        and node not in within
    ]


@pytest.mark.parametrize("module", MODULES)
def test_what_becomes_machine_code_is_compiled_as_written(module):
    assert compiled_otherwise(MODULES[module].read_text("utf-8")) == []


def test_what_is_compiled_otherwise_is_found():
    """Assert it of each place of the package, were it not ``without_fastmath()``."""
    sources = [path.read_text("utf-8") for path in MODULES.values()]
    sources = [source for source in sources if " without_fastmath():" in source]
    assert sources
    for source in sources:
        found = compiled_otherwise(source.replace(" without_fastmath():", " nullcontext():"))
        assert len(found) >= source.count(" without_fastmath():")


def test_public_names_are_all_that_is_seen():
    assert dir(gm) == sorted(gm.__all__)


def test_the_map_shows_every_room_and_every_module():
    rooms = dict(re.findall(r'\["<b>(\w+)</b>(.*?)"\]', DESIGN))
    drawn = {f"{room}.{m}" for room, ms in rooms.items() for m in re.findall(r"\w{3,}", ms)}
    there = {module.removeprefix("pymc_gradmatch.") for module in MODULES}
    assert drawn == {module for module in there if "." in module}
    assert all(f"`{module}`" in DESIGN for module in there if "." not in module)


ANSWERS = re.findall(r"^\| (.+\?) \| (.+) \|$", DESIGN, re.MULTILINE)


@pytest.mark.parametrize(("question", "answer"), ANSWERS, ids=[q for q, _ in ANSWERS])
def test_what_the_map_says_is_there_is_there(question, answer):
    text = "".join(
        path.read_text("utf-8")
        for name in re.findall(r"[\w/]+\.py", answer)
        for path in [*PACKAGE.glob(name), *PACKAGE.parent.glob(name)]
    )
    names = [name.split(".")[0] for name in re.findall(r"`(\w[\w.]*)`", answer)]
    assert text
    assert [n for n in names if not re.search(rf"\b{n}\b", text) and not hasattr(gm, n)] == []

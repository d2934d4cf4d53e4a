"""The house: packages with one door each, and imports that only go down."""

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import pymc_gradmatch as gm

PACKAGE = Path(gm.__file__).parent
MODULES = {
    ".".join(("pymc_gradmatch", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
OTHERS = re.compile(r"(pymc|pytensor|nutpie|arviz\w*)(\.|$)")
PUBLIC = {  # documented, or exported by a library at its root
    "arviz",
    "arviz_base.labels",  # az.labels
    "arviz_plots.visuals",  # az.visuals
    "nutpie",
    "pymc",
    "pymc.distributions",
    "pymc.distributions.transforms",
    "pymc.gp",
    "pymc.gp.cov",
    "pymc.math",
    "pymc.model.transform.conditioning.remove_value_transforms",
    "pymc.pytensorf.join_nonshared_inputs",
    "pymc.pytensorf.make_shared_replacements",
    "pytensor",
    "pytensor.compile",
    "pytensor.gradient",
    "pytensor.graph",
    "pytensor.graph.basic",
    "pytensor.graph.replace",
    "pytensor.graph.rewriting.utils",
    "pytensor.graph.traversal",
    "pytensor.tensor",
    "pytensor.tensor.linalg",
    "pytensor.tensor.random",
}
NAMED_TUPLES = {"_asdict", "_fields", "_replace"}  # documented with an underscore


def imports_of(module):
    """Return {(module, name)} of what a module imports from this package."""
    tree = ast.parse(MODULES[module].read_text("utf-8"))
    return {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pymc_gradmatch")
        for alias in node.names
    }


def room_of(module):
    """Return the package in which a module is; its own name for those beside the packages."""
    return module.split(".")[1]


def modules_behind(module, name):
    """Return the module that an import reaches: through the door of a package, or directly."""
    if f"{module}.{name}" in MODULES:
        return f"{module}.{name}"
    if module in MODULES:
        return module
    door = ast.parse((PACKAGE / room_of(module) / "__init__.py").read_text("utf-8"))
    return next(
        f"{node.module}.{alias.name}" if node.module == module else node.module
        for node in door.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (alias.asname or alias.name) == name
    )


GRAPH = {m: {modules_behind(*i) for i in imports_of(m)} for m in MODULES}


def floors(graph):
    """Return each node's floor: one more than that of the highest it imports."""
    known = {}

    def floor(node, above=()):
        assert node not in above, f"imports go in a circle: {[*above, node]}"
        if node not in known:
            known[node] = 1 + max((floor(n, (*above, node)) for n in graph[node]), default=0)
        return known[node]

    for node in graph:
        floor(node)
    return known


def test_imports_of_modules_go_down():
    assert max(floors(GRAPH).values()) <= 12


def test_imports_of_packages_go_down():
    rooms = {room_of(module) for module in GRAPH}
    between = {
        room: {room_of(n) for m, ns in GRAPH.items() if room_of(m) == room for n in ns} - {room}
        for room in rooms
    }
    floors(between)


@pytest.mark.parametrize("module", MODULES)
def test_other_packages_are_entered_through_their_door(module):
    inside = {
        source
        for source, _ in imports_of(module)
        if room_of(source + ".") != room_of(module) and source.count(".") > 1
    }
    assert not inside


@pytest.mark.parametrize("module", MODULES)
def test_no_private_name_of_another_module_is_used(module):
    private = {name for _, name in imports_of(module) if name.startswith("_") and name != "_pymc"}
    assert not private


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
    value = getattr(sys.modules[module], name, None)
    place = value.__name__ if isinstance(value, ModuleType) else module
    return not name.startswith("_") and not PUBLIC.isdisjoint((place, f"{place}.{name}"))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=str)
def test_internals_of_other_libraries_are_in_one_module(path):
    hidden = {taken for taken in taken_from_other_libraries(path) if not is_public(*taken)}
    assert path.name == "_pymc.py" or not hidden


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


@pytest.mark.parametrize("room", ROOMS)
def test_a_door_says_what_the_room_is_for_and_what_it_offers(room):
    door = ast.parse((PACKAGE / room / "__init__.py").read_text("utf-8"))
    assert len(ast.get_docstring(door).split()) > 20
    assert any(ast.unparse(node).startswith("__all__") for node in door.body)


def test_public_names_are_all_that_is_seen():
    assert dir(gm) == sorted(gm.__all__)

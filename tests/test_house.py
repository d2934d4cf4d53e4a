"""The house: packages with one door each, and imports that only go down."""

import ast
import re
from pathlib import Path

import pytest

import pymc_gradmatch as gm

PACKAGE = Path(gm.__file__).parent
MODULES = {
    ".".join(("pymc_gradmatch", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
INTERNALS = re.compile(r"(pymc|pytensor|nutpie|arviz_stats|arviz_base|arviz_plots)")


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


@pytest.mark.parametrize("room", ROOMS)
def test_a_door_says_what_the_room_is_for_and_what_it_offers(room):
    door = ast.parse((PACKAGE / room / "__init__.py").read_text("utf-8"))
    assert len(ast.get_docstring(door).split()) > 20
    assert any(ast.unparse(node).startswith("__all__") for node in door.body)


def test_public_names_are_all_that_is_seen():
    assert dir(gm) == sorted(gm.__all__)

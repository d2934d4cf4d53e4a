"""The house: rooms with one door each, imports that only go down, and a map that is right."""

import ast
import re
from pathlib import Path

import pytest

import pymc_gradmatch as gm
from benchmarks.house import arrows, floors, imports, modules

PACKAGE = Path(gm.__file__).parent
MODULES = modules(PACKAGE)
ARROWS = arrows(PACKAGE)
DOORS = sorted(PACKAGE.glob("*/__init__.py"))
DESIGN = (PACKAGE.parent / "docs" / "design.md").read_text("utf-8")


def room_of(module):
    """Return the package of a module, or its own name where it stands beside the packages."""
    return module.split(".")[1]


def of_ours(module):
    return [(m, name) for m, name in imports(MODULES[module]) if m.startswith("pymc_gradmatch")]


def test_the_house_is_small():
    assert len(MODULES) <= 40
    assert max(floors(ARROWS).values()) <= 12


def test_imports_between_rooms_go_down():
    rooms = {room_of(module): set() for module in ARROWS}
    for module, reached in ARROWS.items():
        rooms[room_of(module)] |= {room_of(other) for other in reached} - {room_of(module)}
    floors(rooms)  # raises where they go in a circle


def test_a_circle_of_imports_is_found():
    with pytest.raises(ValueError, match=r"circle: \['a', 'b', 'a'\]"):
        floors({"a": {"b"}, "b": {"a"}})


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


@pytest.mark.parametrize("module", MODULES)
def test_a_gaussian_process_has_a_type_wherever_it_is_handed_over(module):
    arguments = [
        argument
        for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
        for argument in [*node.args.args, *node.args.kwonlyargs]
    ]
    assert not [a for a in arguments if a.arg == "gp" and a.annotation is None]


@pytest.mark.parametrize("door", DOORS, ids=[door.parent.name for door in DOORS])
def test_a_door_says_what_the_room_is_for_and_what_it_offers(door):
    tree = ast.parse(door.read_text("utf-8"))
    assert len(re.findall(r"\.(?:\s|$)", ast.get_docstring(tree))) >= 2
    assert ast.unparse(tree.body[-1]).startswith("__all__")


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

"""The index of the benchmarks: what it names is there, and what is there it names."""

import re
from importlib.util import find_spec

import pytest

from benchmarks import RESULTS

FOLDER = RESULTS.parent
TEXT = (FOLDER / "README.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if "python -m" in line
]


def linked(text):
    """Return the files that a text links to."""
    return [(FOLDER / path).resolve() for path in re.findall(r"\]\(([^)]+)\)", text)]


def test_every_saved_table_is_in_the_index_and_every_link_leads_somewhere():
    assert all(path.exists() for path in linked(TEXT))
    tables = [path for _, _, results, _ in ROWS for path in linked(results)]
    assert sorted(tables) == sorted(RESULTS.rglob("*.csv"))


@pytest.mark.parametrize("row", ROWS, ids=[row[1] for row in ROWS])
def test_a_command_is_a_module_that_the_pages_which_quote_it_name(row):
    _, commands, results, pages = row
    for module in re.findall(r"`python -m ([\w.]+)", commands):
        assert find_spec(module)
    names = [
        *re.findall(r"(benchmarks\.[\w.]+)", commands),
        *re.findall(r"(\w+/\w+\.csv)", results),
    ]
    for page in linked(pages):
        text = page.read_text("utf-8")
        assert "make benchmarks" in text or any(name in text for name in names), page.name

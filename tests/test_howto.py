"""The how-to pages: their cells run, and both ways to a model that they show are one."""

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[1] / "docs" / "howto").glob("*.md"))
BOTH_WAYS = next(page for page in PAGES if page.stem == "both-ways")


def cells(text):
    """Return the code of a page."""
    return re.findall(r"^```{code-cell} python\n(?::[^\n]*\n)*(.*?)^```$", text, re.M | re.S)


def sections():
    """Return the headings of the page with the code below each, what comes before left out."""
    _, *parts = re.split(r"^## ", BOTH_WAYS.read_text("utf-8"), flags=re.M)
    return {part.splitlines()[0]: "\n".join(cells(part)) for part in parts}


@pytest.fixture(scope="module")
def beginning():
    namespace = {}
    before, *_ = re.split(r"^## ", BOTH_WAYS.read_text("utf-8"), flags=re.M)
    for cell in cells(before):
        exec(cell, namespace)
    return namespace


@pytest.mark.slow
@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("heading", [*sections()][:-1])
def test_one_call_and_four_lines_are_one_model(beginning, heading):
    namespace = dict(beginning)
    exec(sections()[heading], namespace)
    built, lines = (namespace[name].point_logps(round_vals=6) for name in ("built", "lines"))
    assert len(built) >= 4
    assert built == pytest.approx(lines, abs=2e-6, rel=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto")  # of az.loo
@pytest.mark.parametrize(
    "page", [p for p in PAGES if cells(p.read_text("utf-8"))], ids=lambda p: p.stem
)
def test_every_cell_of_a_page_runs(page):
    namespace = {}
    for cell in cells(page.read_text("utf-8")):
        exec(cell, namespace)
    assert len(namespace) > 3

"""The pages: all public names are on the API page, and links lead somewhere."""

import ast
import importlib
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import pymc_gradmatch as gm

ROOT = Path(__file__).parents[1]
FOLDERS = ".", "docs", "docs/howto", "docs/history"
PAGES = [page for folder in FOLDERS for page in (ROOT / folder).glob("*.md")]


def test_the_api_page_lists_all_that_is_public():
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    listed = re.findall(r"^   (\w+)$|`gm\.(\w+)`", page, re.MULTILINE)
    assert sorted(name or module for name, module in listed) == sorted(gm.__all__)


def test_no_two_api_pages_differ_in_case_alone():
    renamed = re.search(
        r"autosummary_filename_map = (.*)", (ROOT / "docs/conf.py").read_text("utf-8")
    )
    pages = ast.literal_eval(renamed[1])
    names = [pages.get(f"pymc_gradmatch.{name}", f"pymc_gradmatch.{name}") for name in gm.__all__]
    assert len({name.lower() for name in names}) == len(names)


def test_flowcharts_are_drawn_without_a_network(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(ROOT / "docs")
    drawing = importlib.import_module("drawing")
    text = (ROOT / "docs" / "design.md").read_text("utf-8").split("```mermaid")[1].split("```")[0]
    drawn = ET.fromstring(drawing.svg(text))
    assert len(drawn.findall("rect")) == len(re.findall(r"\[", text))
    assert len(drawn.findall("line")) == text.count("-->")
    assert all(float(line.get("y2")) > float(line.get("y1")) for line in drawn.findall("line"))
    with pytest.raises(ValueError, match="leave their boxes"):
        drawing.svg(f'a["<b>a</b><br/>{"words, " * 6}"]')


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_files_lead_somewhere(page):
    made = "api/generated/"  # when the site is built
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    if page.parent.name == "docs":
        links = [link for link in links if not link.startswith(made)]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_of_how_tos_is_listed():
    listed = (ROOT / "docs" / "howto" / "index.md").read_text("utf-8")
    pages = [p.stem for p in (ROOT / "docs" / "howto").glob("*.md") if p.stem != "index"]
    assert [page for page in pages if f"\n{page}\n" not in listed] == []

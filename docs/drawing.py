"""Flowcharts of the pages, which GitHub draws by Mermaid, as pictures that need no network."""

import re
from html import escape, unescape

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

WIDTH, LINE, GAP, BETWEEN = 280, 20, 46, 40  # of a box and a line of its text; between boxes
LETTERS = 38  # that fit into a box


class Flowchart(SphinxDirective):
    """Draw the boxes and arrows of a Mermaid ``flowchart TD``."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the picture."""
        return [nodes.raw("", svg("\n".join(self.content)), format="html")]


def svg(text: str) -> str:
    """Return a flowchart as SVG: each box below those that point to it."""
    words = {name: label.split("<br/>") for name, label in re.findall(r'(\w+)\["(.*?)"\]', text)}
    arrows = re.findall(r"(\w+) --> (\w+)", text)
    if not words or not {name for arrow in arrows for name in arrow} <= words.keys():
        msg = 'expected lines such as gp["<b>gp</b><br/>data"] and gp --> numerics.'
        raise ValueError(msg)
    long = [line for lines in words.values() for line in lines if len(_plain(line)) > LETTERS]
    if long:
        msg = f"{long} leave their boxes; expected at most {LETTERS} letters up to each <br/>."
        raise ValueError(msg)
    rows = _rows(words, arrows)
    heights = [max(len(words[name]) for name in row) * LINE + 16 for row in rows]
    breadth = max(map(len, rows)) * (WIDTH + BETWEEN)
    boxes, places, top = [], {}, 4
    for row, height in zip(rows, heights, strict=True):
        for i, name in enumerate(row):
            center = breadth / 2 + (i - (len(row) - 1) / 2) * (WIDTH + BETWEEN)
            places[name] = center, top, top + height
            boxes.append(_box(center, top, height, words[name]))
        top += height + GAP
    lines = "".join(_arrow(places[start], places[end]) for start, end in arrows)
    return (
        f'<svg viewBox="0 0 {breadth} {top - GAP + 4}" style="max-width: {breadth}px" '
        'class="flowchart" role="img"><defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" '
        'markerWidth="9" markerHeight="9" orient="auto"><path d="M0 0L8 4L0 8z" '
        f'fill="currentColor"/></marker></defs>{"".join(boxes)}{lines}</svg>'
    )


def _rows(words: dict[str, list[str]], arrows: list[tuple[str, str]]) -> list[list[str]]:
    depth = dict.fromkeys(words, 0)
    for _ in words:
        for start, end in arrows:
            depth[end] = max(depth[end], depth[start] + 1)
    pointed_to = {end for _, end in arrows}
    for name in words:  # the first boxes stand just above what they point to
        below = [depth[end] for start, end in arrows if start == name]
        if below and name not in pointed_to:
            depth[name] = min(below) - 1
    by_depth = [[name for name in words if depth[name] == level] for level in range(len(words))]
    return [row for row in by_depth if row]


def _box(center: float, top: float, height: float, lines: list[str]) -> str:
    first = top + height / 2 - (len(lines) - 1) * LINE / 2
    text = "".join(
        f'<text x="{center}" y="{first + i * LINE}" dominant-baseline="central" '
        f'font-weight="{"bold" if "<b>" in line else "normal"}">'
        f"{escape(_plain(line))}</text>"
        for i, line in enumerate(lines)
    )
    frame = f'x="{center - WIDTH / 2}" y="{top}" width="{WIDTH}" height="{height}" rx="6"'
    return f'<rect {frame} fill="none" stroke="currentColor"/>{text}'


def _plain(line: str) -> str:
    return unescape(re.sub("<.*?>", "", line))


def _arrow(start: tuple, end: tuple) -> str:
    ends = f'x1="{start[0]}" y1="{start[2]}" x2="{end[0]}" y2="{end[1]}"'
    return f'<line {ends} stroke="currentColor" marker-end="url(#tip)"/>'


def setup(app: Sphinx):
    """Take the place of Mermaid."""
    app.add_directive("mermaid", Flowchart)

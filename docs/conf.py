"""The site: ``make docs``; warnings are errors, code cells are run (and kept in a cache)."""

import sys
from pathlib import Path

import pymc_gradmatch as gm

HERE = Path(__file__).parent
sys.path.append(str(HERE))
(HERE / "notebooks").mkdir(exist_ok=True)
for notebook in (HERE.parent / "notebooks").glob("*.ipynb"):  # stored with outputs; tests run them
    text = notebook.read_text("utf-8").replace("](../docs/", "](../")  # links of the repository
    (HERE / "notebooks" / notebook.name).write_text(text, "utf-8")

project = "pymc_gradmatch"
author = "The pymc_gradmatch developers"
copyright = author  # noqa: A001
version = release = gm.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_design",
    "drawing",  # flowcharts
    "sphinx-mathjax-offline",  # formulas without a network
]
exclude_patterns = ["_build", "**.ipynb_checkpoints", "jupyter_execute"]

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "cells")
nb_execution_excludepatterns = ["notebooks/*"]
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

autosummary_generate = True
# fit.html and Fit.html would be one file on a disk that does not tell cases apart
autosummary_filename_map = {"pymc_gradmatch.Fit": "pymc_gradmatch.Fit-result"}
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # gammas=GAMMAS, in place of eight numbers of sixteen digits
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Warns"]

templates_path = ["_templates"]
html_theme = "pydata_sphinx_theme"
html_title = f"pymc_gradmatch {release}"
html_theme_options = {
    "header_links_before_dropdown": 4,  # of five the header is two lines on a laptop
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
}
alone = "quickstart", "idea", "habits", "troubleshooting", "coming-from", "design", "cite"
html_sidebars = {page: [] for page in alone}  # no pages below
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Docstrings list references that the text does not number.
suppress_warnings = ["ref.footnote"]


def setup(app):
    """Leave out fields of which nothing is said but their number; find notebooks where they are."""

    def of_the_site(app, page, source):
        source[0] = source[0].replace("](../notebooks/", "](notebooks/")  # links of the repository
        source[0] = source[0].replace("](../../notebooks/", "](../notebooks/")

    app.connect("source-read", of_the_site)

    def unsaid(app, what, name, obj, skip, options):
        return skip or str(getattr(obj, "__doc__", "")).startswith("Alias for field number")

    app.connect("autodoc-skip-member", unsaid)

"""The project itself: environments agree, the README's example runs as pasted."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pymc_gradmatch as gm

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def requirements(lines):
    """Return {name: version range}, with extras (``pymc[nutpie]``) as packages of their own."""
    found = {}
    for line in lines:
        name, extras, versions = re.fullmatch(
            r"([A-Za-z][\w.-]*)(?:\[([\w,-]+)\])?([<>=!~\d.,*]*)", line.replace(" ", "")
        ).groups()
        found[name] = versions
        found |= dict.fromkeys(extras.split(",") if extras else [], "")
    return found


def test_conda_environment_is_the_same_as_pyproject():
    text = (ROOT / "environment.yml").read_text("utf-8")
    conda = re.findall(r"^  - ([\w.<>=,-]+)$", text.split("dependencies:")[1], re.MULTILINE)
    project = PYPROJECT["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    conda = [name.removeprefix("python-") for name in conda]  # conda-forge's name for graphviz
    expected = requirements(declared) | {"python": project["requires-python"], "pip": ""}
    assert requirements(conda) == expected


def test_the_conda_recipe_needs_what_pyproject_does():
    text = (ROOT / ".ci" / "conda" / "recipe.yaml").read_text("utf-8")
    listed = re.findall(r"^    - (.+)$", text.split("  run:\n")[1].split("\n\n")[0], re.MULTILINE)
    python, *others = listed
    assert python == "python >=${{ python_min }}"
    needed = requirements(others)
    needed["matplotlib"] = needed.pop("matplotlib-base")
    assert needed == requirements(PYPROJECT["project"]["dependencies"])
    assert f'version: "{gm.__version__}"' in text
    assert f'python_min: "{PYPROJECT["project"]["requires-python"].removeprefix(">=")}"' in text


def test_python_version_files_agree():
    pinned = (ROOT / ".python-version").read_text("utf-8").strip()
    assert PYPROJECT["project"]["requires-python"] == f">={pinned}"


def test_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert importlib.metadata.version("pymc-gradmatch") == gm.__version__
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == gm.__version__
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE)[1] == gm.__version__


@pytest.mark.slow
def test_mypy_accepts_a_users_script_and_sees_its_mistakes(tmp_path):
    """Strict but for what concerns PyMC, which has no types; unused ignores are errors."""
    untyped = ["--allow-untyped-calls", "--allow-untyped-defs", "--ignore-missing-imports"]
    options = ["--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}", *untyped]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(ROOT / "tests" / "data" / "user_script.py")],
        env=os.environ | {"MYPYPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout


def test_notebooks_are_stored_with_their_outputs_and_without_paths():
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        text = path.read_text("utf-8")
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        assert all(cell["execution_count"] for cell in cells), path.name
        assert sum(len(cell["outputs"]) for cell in cells) > len(cells) / 2, path.name
        assert not re.search(r"/(home|root|tmp|work|Users)/", text), path.name


@pytest.mark.slow
def test_readme_example_runs_as_pasted(tmp_path):
    examples = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL
    )
    script = tmp_path / "example.py"
    script.write_text("\n".join(examples), "utf-8")
    run = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "alpha" in run.stdout
    assert not re.search("warning|rhat|chain|diverg", run.stderr, re.IGNORECASE), run.stderr
    assert (tmp_path / "states.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("code", "unneeded"),
    [
        ("gm", {"arviz_stats", "numba", "nutpie", "matplotlib", "scipy.stats"}),
        ("gm.build_model, gm.fit", {"arviz_plots", "nutpie", "matplotlib"}),  # solvers are numba's
    ],
)
def test_what_is_not_used_is_not_imported(code, unneeded):
    """PyMC may import these itself, at some version: what it does not import counts."""
    ask = "import sys, pymc; before = set(sys.modules); import pymc_gradmatch as gm; "
    ask += f"{code}; print(*(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert not unneeded & set(run.stdout.split())
    assert "pymc_gradmatch" in run.stdout.split()

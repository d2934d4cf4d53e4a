"""Here, not in tests, because doctests need it too: GRADMATCH_SEED_SHIFT shifts every seed."""

import os
import runpy
from importlib.util import find_spec
from pathlib import Path

SEEDS = Path(__file__).parent / "tests" / "seeds"
collect_ignore = [str(SEEDS), str(SEEDS.parent / "data")]  # not tests, nor to be imported
if find_spec("libsbml") is None:  # the extra petab
    collect_ignore += ["pymc_gradmatch/petab", "pymc_gradmatch/sbml"]

if os.environ.get("GRADMATCH_SEED_SHIFT"):
    runpy.run_path(str(SEEDS / "sitecustomize.py"))
    paths = [str(SEEDS), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def pytest_configure(config):
        """Let estimates end at their bounds: of a dozen points some draws ask for no noise."""
        config.addinivalue_line("filterwarnings", "ignore:.* ended at its .* bound:UserWarning")

"""The rival's speed: NUTS through a numerical solver, NumPyro with diffrax.

``python -m benchmarks.rivals`` prints it, ``--out`` saves it as CSV, and ``--quick``
runs Lotka-Volterra with short chains.  JAX comes with the extra ``benchmarks``.
"""

import argparse
from pathlib import Path

import pandas as pd

from benchmarks import show
from benchmarks.cases import SPEED
from benchmarks.jax_rival import diffrax_nuts


def main(arguments: list[str] | None = None):
    """Run the rival on every case, print a table, save it as CSV."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="Lotka-Volterra, short chains")
    parser.add_argument("--out", type=Path, help="CSV file to save")
    parser.add_argument("--seed", type=int, default=1, help="seed of data and chains")
    options = parser.parse_args(arguments)
    size = {"warmup": 300, "draws": 300, "chains": 2} if options.quick else {}

    rows = []
    for case in SPEED[:1] if options.quick else SPEED:
        data = case.simulate(options.seed)
        for mass in ("diagonal", "dense"):
            rival = diffrax_nuts(
                case, data, dense_mass=mass == "dense", random_seed=options.seed, **size
            )
            rows.append({"case": case.name, "times": len(case.t), "mass": mass, **rival._asdict()})
    show(pd.DataFrame(rows).set_index(["case", "times", "mass"]), options.out)


if __name__ == "__main__":
    main()

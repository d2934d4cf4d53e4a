"""A :class:`~pymc_gradmatch.StateGP` in words and as a table, for those who read."""

import pandas as pd
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.kernels import describe

__all__ = ["table_of", "text_of"]


def text_of(gp) -> str:
    """Return one line on the grid and one on each state."""
    lines = [
        f"StateGP: {len(gp.states)} states, {len(gp.t)} times on "
        f"[{gp.t[0]:g}, {gp.t[-1]:g}], nugget {gp.nugget.max():g}"
    ]
    random = isinstance(gp.sigma, TensorVariable)
    sigmas = ["random"] * len(gp.states) if random else [f"{s:.4g}" for s in gp.sigma]
    lines += [
        f"  {state}: {describe(cov)}, sigma {sigma}"
        for state, cov, sigma in zip(gp.states, gp.covs, sigmas, strict=True)
    ]
    return "\n".join(lines)


def table_of(gp) -> pd.DataFrame:
    """Return what was fixed or fitted, one row per state."""
    return pd.DataFrame(
        {
            "kernel": [describe(cov) for cov in gp.covs],
            "sigma": gp.sigma,
            "mean": gp.mean,
            "scale": gp.scale,
            "log_marginal_likelihood": gp.log_marginal_likelihood(),
        },
        index=pd.Index(gp.states, name="state"),
    )

"""Real data sets in the package."""

import json
from importlib import resources
from typing import NamedTuple

import pandas as pd


class LynxHare(NamedTuple):
    """Pelt counts and the posterior of an exact analysis."""

    pelts: pd.DataFrame
    """Pelts traded per year, in thousands; columns ``hare`` and ``lynx``, index ``year``."""
    reference: pd.DataFrame
    """Exact posterior by numerical integration: columns ``mean`` and ``sd`` by parameter."""
    source: str
    """Source of the counts and of the posterior."""


def lynx_hare() -> LynxHare:
    """Load the Hudson's Bay Company's counts of hare and lynx pelts, 1900 to 1920.

    Returns
    -------
    LynxHare

    References
    ----------
    .. [1] Hewitt, C. G. (1921). *The Conservation of the Wild Life of Canada*.
       Scribner.
    .. [2] Carpenter, B. (2018). Predator-prey population dynamics: the
       Lotka-Volterra model in Stan. Stan case studies.
    .. [3] Magnusson, M. et al. posteriordb: a database of Bayesian posterior
       inference; entry hudson_lynx_hare-lotka_volterra.

    Examples
    --------
    >>> import pymc_gradmatch as gm
    >>> gm.datasets.lynx_hare().pelts.loc[1904]
    hare    36.3
    lynx    59.4
    Name: 1904, dtype: float64
    """
    text = resources.files("pymc_gradmatch").joinpath("data/lynx_hare.json").read_text("utf-8")
    content = json.loads(text)
    posterior = content["reference_posterior"]
    return LynxHare(
        pelts=pd.DataFrame(
            {"hare": content["hare"], "lynx": content["lynx"]},
            index=pd.Index(content["year"], name="year"),
        ),
        reference=pd.DataFrame({"mean": posterior["mean"], "sd": posterior["sd_approx"]}).loc[
            list(posterior["sd_approx"])
        ],
        source=f"Counts: {content['source']}. Posterior: {posterior['source']}.",
    )


class Theophylline(NamedTuple):
    """Concentrations of a drug in twelve people."""

    table: pd.DataFrame
    """Columns ``subject``, ``weight`` (kg), ``dose`` (mg per kg, by mouth at time zero), ``time``
    (hours) and ``concentration`` (mg per litre of serum)."""
    source: str
    """Source of the data."""


def theophylline() -> Theophylline:
    """Load concentrations of theophylline in the serum of twelve people after one oral dose.

    Returns
    -------
    Theophylline

    References
    ----------
    - Boeckmann, A. J., Sheiner, L. B., Beal, S. L. (1994). *NONMEM Users Guide: Part V*.
      NONMEM Project Group, University of California, San Francisco.  Data of R. Upton.
    - Pinheiro, J. C., Bates, D. M. (2000). *Mixed-Effects Models in S and S-PLUS*. Springer.

    Examples
    --------
    >>> import pymc_gradmatch as gm
    >>> table = gm.datasets.theophylline().table
    >>> len(table), table["subject"].nunique()
    (132, 12)
    """
    file = resources.files("pymc_gradmatch").joinpath("data/theophylline.csv")
    with file.open(encoding="utf-8") as text:
        table = pd.read_csv(text)
    return Theophylline(
        table,
        "Boeckmann, Sheiner and Beal (1994), a study by R. Upton; numbers as in R's dataset Theoph",
    )

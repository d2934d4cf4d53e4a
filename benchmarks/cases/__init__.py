"""What the studies fit: right-hand sides, truths, times, noise and priors, each written once.

A case makes any number of data sets, every one from its seed.  ``PAPER``, ``ACCURACY``
and ``SPEED`` are the paper's three systems with different times and priors, ``BREADTH``
are ODEs of the literature, ``MESSY`` are data with hidden states, missing values and
likelihoods other than the normal, ``NETWORKS`` are those of the study of costs, ``CALIBRATION``
draws its truths.
"""

from benchmarks.cases.calibration import CALIBRATION
from benchmarks.cases.case import Case, Prior, named
from benchmarks.cases.literature import BREADTH
from benchmarks.cases.messy import MESSY, Messy
from benchmarks.cases.networks import NETWORKS
from benchmarks.cases.systems import ACCURACY, PAPER, SPEED

__all__ = [
    "ACCURACY",
    "BREADTH",
    "CALIBRATION",
    "MESSY",
    "NETWORKS",
    "PAPER",
    "SPEED",
    "Case",
    "Messy",
    "Prior",
    "named",
]

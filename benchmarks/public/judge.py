"""A fit of a published data set, its reference, and what came of it.

A mean is right within 0.3 of the reference's standard deviations, and a standard deviation within
25 % of the reference's.  Four hundred effective draws, which is what a passed verdict has at
least, tell a mean to 0.05 standard deviations and a standard deviation to 4 %, and a reference
both to 3 %: the margins are five to six such errors, so chance does not cross them in a few hundred
unknowns, and what is within them changes no conclusion.  (0.3 standard deviations move the end of a
95 % interval by a seventh of its half.)  An unknown with a tail so long that its standard
deviation is told badly, kurtosis above nine by either, is judged by its normal scores under its
prior.

- *right, passed*: all unknowns are right, and the verdict is passed;
- *right, withheld*: all are right, and the verdict says that it cannot be sure;
- *wrong, withheld*: some are not, and it says so;
- *wrong without a word*: some are not, and the verdict is passed;
- *no answer*: an error, or no end within the limit;
- *no reference*: the two runs do not agree, or were not made.
"""

from collections.abc import Callable
from time import process_time

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks import one_call
from benchmarks.public import PROBLEMS
from benchmarks.zoo.priors import to_scores
from benchmarks.zoo.problem import draws_of
from benchmarks.zoo.reference import moments, reference

__all__ = ["OUTCOMES", "fit", "given_up", "judged", "refer"]

type Array = NDArray[np.float64]

FAR, WIDTHS, HEAVY = 0.3, (0.75, 1.25), 9.0
# Sizes of two populations, and sweeps of chains that go on from them, until they agree.
ATTEMPTS = [(1_000, 0), (4_000, 0), (1_000, 2_000), (1_000, 10_000)]
OUTCOMES = [
    "right, passed", "right, withheld", "wrong, withheld", "wrong without a word", "no answer",
    "no reference, passed", "no reference, withheld",
]  # fmt: skip
FIGURES = ["mean", "sd", "kurtosis", "score mean", "score sd"]


def fit(key: tuple[str, int], keep: Callable[[one_call.Row], None]) -> one_call.Row:
    """Fit a data set, and keep what the draws say of each unknown."""
    keep({})
    name, seed = key
    problem = PROBLEMS[name]
    given = problem.arguments()
    ode, t, y = (given.pop(what, None) for what in ("ode", "t", "y"))
    found, row = one_call.fitted(ode, t, y, random_seed=seed, **given)
    if found is None:
        return row | {"draws": {}}
    posterior = found.idata["posterior"].dataset
    draws = np.stack([draws_of(posterior, u.label) for u in problem.unknowns], 1)
    theirs = found.idata["log_likelihood"].dataset.isel(chain=0)
    of_draws = sum(one.sum([*one.dims][1:]).to_numpy() for one in theirs.values())
    return row | {
        "k": float(found.pareto_k), "n_effective": float(found.n_effective),
        "apart": float(np.abs(problem.log_likelihood(draws) - of_draws).max()),
        "unidentified": " ".join(map(str, found.unidentified.index)),
        "draws": _figures(name, draws),
    }  # fmt: skip


def _figures(name: str, draws: Array, weights: Array | None = None) -> dict[str, dict[str, float]]:
    unknowns = PROBLEMS[name].unknowns
    scores = np.stack([to_scores(u.prior, c) for u, c in zip(unknowns, draws.T, strict=True)], 1)
    natural, scored = moments(draws, weights), moments(scores, weights)
    return {
        unknown.label: {
            "mean": float(natural.mean[k]), "sd": float(natural.sd[k]),
            "kurtosis": float(natural.kurtosis[k]),
            "score mean": float(scored.mean[k]), "score sd": float(scored.sd[k]),
        }
        for k, unknown in enumerate(unknowns)
    }  # fmt: skip


def given_up(known: one_call.Row, seconds: int, exit_code: int | None) -> one_call.Row:
    """Return the row of a fit that ended without an answer."""
    verdict = f"no answer within {seconds} CPU s (exit code {exit_code})"
    return known | {"is_exact": 0.0, "seconds": float(seconds), "verdict": verdict, "draws": {}}


def refer(name: str) -> pd.DataFrame:
    """Return the reference of a data set: a row for each unknown.

    Up to three unknowns by quadrature, else two populations that the likelihood is let in to;
    larger ones where the two do not agree, and then two ensembles of chains that go on from them.
    SciPy's solver has a word on the density there.
    """
    problem, start = PROBLEMS[name], process_time()
    for number, (size, sweeps) in enumerate(ATTEMPTS):
        found = reference(problem, size, (2 * number + 1, 2 * number + 2), sweeps)
        if found.scores_agree.all():
            break
    middle = problem.natural(found.scores.mean[None])[0]
    ours = float(problem.log_likelihood(middle[None])[0])
    return pd.DataFrame(
        {
            "mean": found.natural.mean, "sd": found.natural.sd, "kurtosis": found.natural.kurtosis,
            "score mean": found.scores.mean, "score sd": found.scores.sd,
            "agree": found.natural_agree, "scores agree": found.scores_agree, "by": found.by,
            "solvers apart": ours - problem.by_scipy(middle), "seconds": process_time() - start,
        },
        pd.MultiIndex.from_product(
            [[name], [u.label for u in problem.unknowns]], names=["problem", "unknown"]
        ),
    )  # fmt: skip


def judged(row: one_call.Row, known: pd.DataFrame | None) -> one_call.Row:
    """Return a row of the table: what came of a fit, by its reference."""
    draws = row["draws"]
    kept = {name: value for name, value in row.items() if name != "draws"}
    if not draws:
        return {"outcome": "no answer", **kept}
    if known is None or not known["scores agree"].all():
        told = "passed" if row["is_exact"] else "withheld"
        return {"outcome": f"no reference, {told}", **kept}
    furthest, narrowest, widest, worst = 0.0, np.inf, 0.0, ""
    for label, of in draws.items():
        ours = known.loc[label]
        is_heavy = max(ours["kurtosis"], of["kurtosis"]) > HEAVY
        kind = "score " if is_heavy or not ours["agree"] else ""
        apart = abs(of[f"{kind}mean"] - ours[f"{kind}mean"]) / ours[f"{kind}sd"]
        ratio = of[f"{kind}sd"] / ours[f"{kind}sd"]
        if apart > furthest:
            furthest, worst = apart, label
        narrowest, widest = min(narrowest, ratio), max(widest, ratio)
    right = furthest <= FAR and WIDTHS[0] <= narrowest and widest <= WIDTHS[1]
    passed = bool(row["is_exact"])
    outcome = {
        (True, True): "right, passed", (True, False): "right, withheld",
        (False, False): "wrong, withheld", (False, True): "wrong without a word",
    }[bool(right), passed]  # fmt: skip
    figures = {"moved": furthest, "of": worst, "narrowest": narrowest, "widest": widest}
    return {"outcome": outcome, **figures, **kept}

"""A fit of a published problem, and what the study keeps of it."""

from collections.abc import Callable

import pymc_gradmatch as gm
from benchmarks import one_call
from benchmarks.published.problem import Problem
from benchmarks.published.problems import PROBLEMS

__all__ = ["best_draw", "fit", "given_up"]


def fit(key: tuple[str, int], keep: Callable[[one_call.Row], None]) -> one_call.Row:
    """Fit a problem; nothing is known of the row before its end."""
    keep({})
    name, seed = key
    problem = PROBLEMS[name]
    arguments = problem.arguments()
    found, row = one_call.fitted(
        arguments.pop("ode"), arguments.pop("t", None), None, random_seed=seed, **arguments
    )
    if found is None:
        return row
    at_draw, at_mode = best_draw(found), _at_highest_mode(problem, found)
    return row | {
        "best draw": at_draw,
        "mode": at_mode,
        "below the best known": problem.best - max(at_draw, at_mode),
        "k": found.pareto_k,
        "n_effective": found.n_effective,
        "solutions / 4 000": found.n_solutions / 4_000,
        "unidentified": " ".join(found.unidentified.index),
    }


def best_draw(found: gm.Fit) -> float:
    """Return the highest log likelihood of a fit's draws."""
    every = found.idata["log_likelihood"].dataset
    of_draws = sum(
        values.sum([dim for dim in values.dims if dim not in ("chain", "draw")])
        for values in every.values()
    )
    return float(of_draws.max())


def _at_highest_mode(problem: Problem, found: gm.Fit) -> float:
    """Return the log likelihood at the highest mode of a fit."""
    return problem.log_likelihood(found.modes.iloc[0][problem.box.index].astype(float))


def given_up(known: one_call.Row, seconds: int, exit_code: int | None) -> one_call.Row:
    """Return the row of a fit that ended without an answer."""
    verdict = f"no answer within {seconds} CPU s (exit code {exit_code})"
    return known | {"is_exact": 0.0, "seconds": float(seconds), "verdict": verdict}

"""Published problems, written by hand, whose best fits are known."""

from benchmarks.published.problem import Problem
from benchmarks.published.problems import PROBLEMS

__all__ = ["PROBLEMS", "Problem"]

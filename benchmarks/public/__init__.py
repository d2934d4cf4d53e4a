"""Small published data sets, each by the call that the pages suggest, beside a reference."""

from benchmarks.public import chemistry, medicine, populations
from benchmarks.public.problem import Problem

__all__ = ["PROBLEMS", "Problem"]

PROBLEMS = {
    problem.name: problem
    for problem in [*chemistry.PROBLEMS, *medicine.PROBLEMS, *populations.PROBLEMS]
}

"""Exact posteriors of data sets of one pattern: searched side by side, evaluated together.

Each search runs in a thread of its own, one at a time: it stops where it asks for log densities,
and goes on when those that all searches have asked for are there.  So a search is written as if
there were no other, and integrations, of which each has a few, are done by the hundred.
"""

from collections.abc import Callable, Sequence
from threading import Semaphore, Thread
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch.exact.modes import Expansion
from pymc_gradmatch.exact.posterior import MOST_NUMBERS, ExactPosterior
from pymc_gradmatch.exact.solutions import compile_for_draws
from pymc_gradmatch.ode import Solution, failures_by_reason
from pymc_gradmatch.replaceable import DataSet, Replaceable


class Asked(NamedTuple):
    """What a search asks for: a method of the posterior, points, and axes or widths of each."""

    method: str
    phi: NDArray[np.float64]
    around: NDArray[np.float64]


class Batch(ExactPosterior):
    """Posteriors of data sets of one pattern, as a function of points and whose they are.

    Parameters
    ----------
    written : ExactPosterior
        That of one of them, with numbers that can be replaced.
    number : Replaceable
        What wrote these.
    """

    def __init__(self, written: ExactPosterior, number: Replaceable):
        vars(self).update(vars(written))
        inputs, states = [*self._values], [*self._values, *self._x]
        self.written, self.number = written, number
        self._tables: list[NDArray[np.float64]] = []
        self._natural = self._by_rows(inputs, self._graphs)
        total = self._gradient_graphs[:1]
        self._log_density = self._by_rows(states, total)
        vars(self)["_gradient"] = self._by_rows(states, self._gradient_graphs)
        self._rows = np.zeros(1, dtype=int)
        self._outcomes: list[NDArray[np.int64]] = []

    def hold(self, data_sets: Sequence[DataSet]):
        """Take the numbers of data sets, by which these have their rows."""
        self._tables = self.number.of_each(data_sets)

    def put(self, row: int):
        """Put the numbers of one of these into what is evaluated for it alone."""
        self.number.put_row(self._tables, row)

    def _by_rows(self, inputs: Sequence, graphs: Sequence) -> Callable:
        """Compile graphs for points of any data sets."""
        places = self.number.within(graphs)
        evaluate = compile_for_draws([*inputs, *places], graphs)

        def of_rows(*values):
            rows = np.repeat(self._rows, len(values[0]) // len(self._rows))
            return evaluate(*values, *(self._tables[place][rows] for place in places.values()))

        return of_rows

    def _weighed(self, values: list[NDArray], solved: NDArray[np.bool_]) -> NDArray[np.float64]:
        rows = self._rows
        self._rows = np.repeat(rows, len(solved) // len(rows))[solved]
        try:
            return super()._weighed(values, solved)
        finally:
            self._rows = rows

    def _solution(self, *args) -> Solution:
        solution = super()._solution(*args)
        self._outcomes.append(solution.ended)
        return solution

    def answers(self, asked: Sequence[Asked], rows: Sequence[int]) -> list["Answer"]:
        """Evaluate one method at the points of several data sets."""
        method = asked[0].method
        phi = np.concatenate([one.phi for one in asked])
        around = np.concatenate([one.around for one in asked])
        whose = np.repeat(rows, [len(one.phi) for one in asked])
        size = sum(x.get_value(borrow=True).size for x in self._x)
        each = size if method == "height" else size * (1 + phi.shape[1])
        n_parts = max(1, -(-len(phi) * each // MOST_NUMBERS))
        self._outcomes, parts = [], []
        for part in np.array_split(np.arange(len(phi)), n_parts):
            self._rows = whose[part]
            parts.append(getattr(self, f"_{method}_of")(phi[part], around[part]))
        values = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        ends = np.cumsum([len(one.phi) for one in asked])[:-1]
        split = [np.split(array, ends) for array in (np.concatenate(self._outcomes), *values)]
        return [Answer(ended, own) for ended, *own in zip(*split, strict=True)]

    def _height_of(self, phi, around) -> tuple[NDArray[np.float64], ...]:
        height, trajectories = self._evaluate(phi)
        return height, *trajectories

    def _expansion_of(self, phi, around) -> tuple[NDArray[np.float64], ...]:
        return self.along(phi, around)

    def _gradient_of(self, phi, around) -> tuple[NDArray[np.float64], ...]:
        return self.with_gradient(phi, around)


class Answer(NamedTuple):
    """What became of the solutions, and the values, at the points that were asked for."""

    ended: NDArray[np.int64]
    values: list[NDArray[np.float64]]


class Stopped(BaseException):
    """Ends a search from outside."""


class Member(ExactPosterior):
    """The posterior of one data set of a batch, which is evaluated when all searches have asked.

    Parameters
    ----------
    own : ExactPosterior
        Itself alone.
    ask : callable
        Asks the batch.
    """

    def __init__(self, own: ExactPosterior, ask: Callable[[Asked], Answer]):
        vars(self).update(vars(own))
        self._ask = ask

    def _evaluate(self, phi) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
        height, *trajectories = self._asked("height", phi, phi)
        return height, trajectories

    def along(self, phi: NDArray[np.float64], factor: NDArray[np.float64]) -> Expansion:
        """Expand the log density to second order at points, as the posterior alone does."""
        return Expansion(*self._asked("expansion", phi, factor))

    def with_gradient(
        self, phi: NDArray[np.float64], widths: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Evaluate the log density and its gradient at points, as the posterior alone does."""
        around = np.broadcast_to(widths, phi.shape)
        height, gradient = self._asked("gradient", phi, around)
        return height, gradient

    def _asked(self, method: str, phi, around) -> list[NDArray[np.float64]]:
        ended, values = self._ask(Asked(method, phi, around))
        self.n_solutions += len(ended)
        self.failures.update(
            {why: len(points) for why, points in failures_by_reason(ended).items()}
        )
        return values


class _Search:
    """A search in a thread of its own, that runs while it has its turn."""

    def __init__(self, work: Callable[[Callable[[Asked], Answer]], Any]):
        self.asked: Asked | None = None
        self.answer: Answer | BaseException | None = None
        self.result: Any = None
        self.is_done = False
        self._mine, self._back = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work):
        self._mine.acquire()
        try:
            if isinstance(self.answer, BaseException):
                raise self.answer  # noqa: TRY301  stopped before it began
            self.result = work(self._ask)
        except BaseException as error:
            self.result = error
        self.is_done = True
        self._back.release()

    def _ask(self, asked: Asked) -> Answer:
        self.asked = asked
        self._back.release()
        self._mine.acquire()
        if isinstance(self.answer, BaseException):
            raise self.answer
        assert self.answer is not None
        return self.answer

    def go_on(self, answer: Answer | BaseException | None):
        """Let it run until it asks or ends."""
        self.answer = answer
        self._mine.release()
        self._back.acquire()


def side_by_side(
    batch: Batch, data_sets: Sequence[DataSet], search: Callable[[ExactPosterior, int], Any]
) -> list[Any]:
    """Search for the posteriors of data sets, and return the results, or errors.

    Parameters
    ----------
    batch : Batch
        The posteriors.
    data_sets : sequence of DataSet
        Their numbers, with Gaussian processes as data.
    search : callable
        Is given the posterior of each, and its number.
    """
    batch.hold(data_sets)

    def begun(number: int) -> _Search:
        def work(ask):
            return search(Member(batch.written.with_data(data_sets[number].data), ask), number)

        return _Search(work)

    searches = [begun(number) for number in range(len(data_sets))]
    answers: dict[int, Any] = dict.fromkeys(range(len(data_sets)))
    try:
        while answers:
            for number, answer in answers.items():
                batch.put(number)
                searches[number].go_on(answer)
            going = [number for number in answers if not searches[number].is_done]
            answers = _answered(batch, searches, going)
    finally:
        for one in searches:
            if not one.is_done:
                one.go_on(Stopped())
    return [one.result for one in searches]


def _answered(
    batch: Batch, searches: Sequence[_Search], going: Sequence[int]
) -> dict[int, Answer | Exception]:
    """Evaluate what searches have asked for: what is alike at once."""
    by_method: dict[str, list[int]] = {}
    for number in going:
        asked = searches[number].asked
        assert asked is not None
        by_method.setdefault(asked.method, []).append(number)
    answers: dict[int, Any] = {}
    for numbers in by_method.values():
        asked_for: list[Any] = [searches[number].asked for number in numbers]
        answers |= dict(zip(numbers, batch.answers(asked_for, numbers), strict=True))
    return {number: answers[number] for number in going}

"""Batched exact posteriors of data sets with the same observation pattern.

Each search runs in its own thread, one thread at a time: it stops where it requests evaluations of
its posterior, and goes on when the requests of all searches have been evaluated jointly.  So a
search is written for a single data set, and integrations are done by the hundred.
"""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch.data_values import DataSet, SharedValues
from pymc_gradmatch.exact.posterior import MAX_NUMBERS, ExactPosterior, Expansion
from pymc_gradmatch.exact.solutions import Array, compile_for_draws
from pymc_gradmatch.ode import Solution, failures_by_reason


class Request(NamedTuple):
    """A method of the posterior, and arrays of arguments by point."""

    method: str
    arguments: tuple[Array, ...]


class Response(NamedTuple):
    """How the solutions ended, and the values, at the points of a request."""

    ended: NDArray[np.int64]
    values: list[Array]


class BatchPosterior(ExactPosterior):
    """Posteriors of several data sets, evaluated at points of any of them at once.

    Made from the posterior of one data set, written with numbers that can be replaced.
    """

    def __init__(self, written: ExactPosterior, number: SharedValues):
        vars(self).update(vars(written))
        states = [*self._values, *self._x]
        self.written, self.number = written, number
        self._tables: list[Array] = []
        self._rows = np.zeros(1, dtype=int)
        self._ended: list[NDArray[np.int64]] = []
        self._evaluate_graphs = self._compile_by_row([*self._values], self._graphs)
        self._log_density = self._compile_by_row(states, self._gradient_graphs[:1])
        self._gradient = self._compile_by_row(states, self._gradient_graphs)

    def set_data_sets(self, data_sets: Sequence[DataSet]):
        """Set the data sets, to whose rows points belong."""
        self._tables = self.number.tables(data_sets)

    def set_data_set(self, row: int):
        """Set the numbers of one of them in the graphs that it evaluates itself."""
        self.number.set_row(self._tables, row)

    def _compile_by_row(self, inputs: Sequence, graphs: Sequence) -> Callable:
        """Compile graphs for points of any data sets, whose rows are ``self._rows``."""
        places = self.number.shared_in(graphs)
        evaluate = compile_for_draws([*inputs, *places], graphs)

        def at_rows(*values):
            rows = np.repeat(self._rows, len(values[0]) // len(self._rows))
            return evaluate(*values, *(self._tables[place][rows] for place in places.values()))

        return at_rows

    def _log_density_where(self, solved: NDArray[np.bool_], values: list[NDArray]) -> Array:
        rows = self._rows
        self._rows = np.repeat(rows, len(solved) // len(rows))[solved]
        try:
            return super()._log_density_where(solved, values)
        finally:
            self._rows = rows

    def _solution(self, *args) -> Solution:
        solution = super()._solution(*args)
        self._ended.append(solution.ended)
        return solution

    def respond(self, requests: Sequence[Request], rows: Sequence[int]) -> list[Response]:
        """Evaluate one method at the points of several data sets."""
        method = requests[0].method
        sizes = [len(request.arguments[0]) for request in requests]
        arguments = [*map(np.concatenate, zip(*(one.arguments for one in requests), strict=True))]
        row_of_point = np.repeat(rows, sizes)
        size = sum(x.get_value(borrow=True).size for x in self._x)
        if len(arguments) > 1:  # derivatives by each coordinate
            size *= 1 + arguments[0].shape[1]
        n_chunks = max(1, -(-sum(sizes) * size // MAX_NUMBERS))
        self._ended, chunks = [], []
        for chunk in np.array_split(np.arange(sum(sizes)), n_chunks):
            self._rows = row_of_point[chunk]
            chunks.append(getattr(self, method)(*(array[chunk] for array in arguments)))
        values = [np.concatenate(arrays) for arrays in zip(*chunks, strict=True)]
        ends = np.cumsum(sizes)[:-1]
        split = [np.split(array, ends) for array in (np.concatenate(self._ended), *values)]
        return [Response(ended, own) for ended, *own in zip(*split, strict=True)]


class BatchMember(ExactPosterior):
    """The posterior of one data set of a batch, which requests its evaluations."""

    def __init__(self, own: ExactPosterior, request: Callable[[Request], Response]):
        vars(self).update(vars(own))
        self._request = request

    def _evaluate(self, phi) -> tuple[Array, ...]:
        return tuple(self._requested("_evaluate", phi))

    def expand_along(self, phi: Array, factor: Array) -> Expansion:
        """Expand the log density to second order at points, along axes."""
        return Expansion(*self._requested("expand_along", phi, factor))

    def value_and_gradient(self, phi: Array, widths: Array) -> tuple[Array, Array]:
        """Evaluate the log density and its gradient at points."""
        widths = np.broadcast_to(widths, phi.shape)
        log_density, gradient = self._requested("value_and_gradient", phi, widths)
        return log_density, gradient

    def _requested(self, method: str, *arguments) -> list[Array]:
        ended, values = self._request(Request(method, arguments))
        self.n_solutions += len(ended)
        self.failures.update(
            {why: len(points) for why, points in failures_by_reason(ended).items()}
        )
        return values


class CancelledError(BaseException):
    """Ends the thread of a search."""


class SearchThread:
    """A search in its own thread, which runs only while :meth:`resume` waits for it."""

    def __init__(self, search: Callable[[Callable[[Request], Response]], Any]):
        self.request: Request | None = None
        self.result: Any = None
        self.is_done = False
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._responses: SimpleQueue[Any] = SimpleQueue()
        Thread(target=self._run, args=(search,), daemon=True).start()

    def _run(self, search):
        try:
            self._next_response()
            self.result = search(self._evaluate)
        except BaseException as error:
            self.result = error
        self._requests.put(None)

    def _evaluate(self, request: Request) -> Response:
        self._requests.put(request)
        return self._next_response()

    def _next_response(self) -> Any:
        response = self._responses.get()
        if isinstance(response, BaseException):
            raise response
        return response

    def resume(self, response: Response | BaseException | None = None):
        """Run until the next request, or the end."""
        self._responses.put(response)
        self.request = self._requests.get()
        self.is_done = self.request is None


def run_batched(
    batch: BatchPosterior,
    data_sets: Sequence[DataSet],
    search: Callable[[ExactPosterior, int], Any],
) -> list[Any]:
    """Run a search for each data set, and return the results, or errors.

    The search is called with the posterior of a data set, and its number.
    """
    batch.set_data_sets(data_sets)

    def thread_of(number: int) -> SearchThread:
        def run(request):
            own = batch.written.with_data(data_sets[number].data)
            return search(BatchMember(own, request), number)

        return SearchThread(run)

    threads = [thread_of(number) for number in range(len(data_sets))]
    responses: dict[int, Any] = dict.fromkeys(range(len(data_sets)))
    try:
        while responses:
            by_method: dict[str, dict[int, Request]] = {}
            for number, response in responses.items():
                batch.set_data_set(number)
                threads[number].resume(response)
                if (request := threads[number].request) is not None:
                    by_method.setdefault(request.method, {})[number] = request
            responses = {}
            for requests in by_method.values():
                found = batch.respond([*requests.values()], [*requests])
                responses |= dict(zip(requests, found, strict=True))
    finally:
        for one in threads:
            if not one.is_done:
                one.resume(CancelledError())
    return [one.result for one in threads]

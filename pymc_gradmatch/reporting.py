"""What people are shown: a line while something runs, verdicts with their tables, formulas."""

import html
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import takewhile
from math import ceil, inf, isclose, log, log10
from threading import Timer

import cloudpickle
import pandas as pd
from pytensor.graph.basic import Constant, Variable
from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

DELAY = 0.5  # seconds; what is done by then needs no words
DIGITS, MOST_DIGITS = 3, 12
GREEK = re.compile(
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|"
    "upsilon|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega"
)
SUM, PRODUCT, POWER, ATOM = range(4)  # how tightly the parts of a formula hold together
LOGARITHMS = {"log10_": r"\log_{10}", "log_": r"\log"}  # what names on a scale begin with
RELATIONS = {"LT": "<", "GT": ">", "LE": r"\le", "GE": r"\ge", "EQ": "=", "NEQ": r"\ne"}


@contextmanager
def reporting(doing: str, *, enabled: object = True) -> Iterator[Callable[[str], None]]:
    """Show what is being done, and for how long, while a block runs; gone when it ends.

    Parameters
    ----------
    doing : str
        What the block does, for example ``"finding the mode"``.
    enabled : object, default True
        False, or a ``progressbar`` that is: shows nothing.

    Yields
    ------
    callable
        Takes what is being done from now on.

    Examples
    --------
    >>> from pymc_gradmatch.reporting import reporting
    >>> with reporting("finding the mode", enabled=False) as say:
    ...     say("finding the mode: the second climb")
    """
    display = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),  # experiments may have [brackets]
        TimeElapsedColumn(),
        console=_console(),
        transient=True,
        disable=not enabled,
    )
    task = display.add_task(doing, total=None)

    def show():
        with suppress(LiveError):  # before rich 14.1, where another display is on
            display.start()

    timer = Timer(DELAY, show)
    timer.daemon = True
    timer.start()
    try:
        yield lambda words: display.update(task, description=words)
    finally:
        timer.cancel()
        timer.join()
        display.stop()


def silence(words: str):
    """Take what is being done, and show nothing."""


def _console() -> Console:
    """Return where words are shown: in notebooks without ipywidgets as a line of text.

    rich would show nothing there, and warn each time.
    """
    console = Console(stderr=True)
    if console.is_jupyter and find_spec("ipywidgets") is None:
        return Console(stderr=True, force_jupyter=False, force_terminal=True)
    return console


def furthest(moved: pd.Series, decimals: int = 1) -> str:
    """Name the three largest moves, with their sizes."""
    most = moved[moved.abs().sort_values(ascending=False).index[:3]]
    return ", ".join(f"{name} by {value:+.{decimals}f}" for name, value in most.items())


class Verdict:
    """A result that shows itself by what :meth:`shown` returns, as text and in notebooks.

    Any pickle stores it, with the functions that a user wrote: by value where they are in no
    module, such as lambdas and what a notebook has.
    """

    def __reduce__(self):
        return _restored, (type(self), cloudpickle.dumps(vars(self)))

    def shown(self) -> tuple[str, list[pd.DataFrame]]:
        """Return the words and the tables that stand for the result."""
        raise NotImplementedError

    def __repr__(self) -> str:
        words, tables = self.shown()
        return "\n\n".join([words, *(rounded(table).to_string() for table in tables)])

    def _repr_html_(self) -> str:
        words, tables = self.shown()
        return as_html(words, *tables)


def _restored(kind: type[Verdict], pickled: bytes) -> Verdict:
    result = object.__new__(kind)
    vars(result).update(cloudpickle.loads(pickled))
    return result


def as_html(words: str, *tables: pd.DataFrame) -> str:
    """Return words and tables for a notebook."""
    return "".join(
        [f"<p>{html.escape(words)}</p>", *(rounded(table).to_html() for table in tables)]
    )


def rounded(table: pd.DataFrame) -> pd.DataFrame:
    """Return numbers as text: three digits, or more where standard deviations are smaller yet.

    Examples
    --------
    >>> import pandas as pd
    >>> from pymc_gradmatch.reporting import rounded
    >>> rounded(pd.DataFrame({"mean": [0.54637, 20010.31], "sd": [0.067231, 5.581]}))
        mean      sd
    0  0.546  0.0672
    1  20010    5.58
    """
    numbers = table.select_dtypes("floating")
    wide = numbers.filter(regex=r"(^|_)sd$").min(axis=1).reindex(table.index)
    text = table.copy()
    for name, column in numbers.items():
        is_located = re.search(r"mean$|^(eti|hdi)", str(name))
        beside = wide if is_located else wide * inf
        text[name] = [_in_digits(*pair) for pair in zip(column, beside, strict=True)]
    return text


def _in_digits(value: float, sd: float) -> str:
    least = log10(abs(value) / sd) if value and 0 < sd < inf and abs(value) < inf else 0
    return f"{value:.{min(max(DIGITS, ceil(least + DIGITS - 2)), MOST_DIGITS)}g}"


def latex_name(name: str) -> str:
    r"""Return the name of a variable for a formula.

    Examples
    --------
    >>> from pymc_gradmatch.reporting import latex_name
    >>> print(latex_name("k1"), latex_name("beta"), latex_name("growth_max"))
    k_{1} \beta \mathrm{growth}_{\mathrm{max}}
    >>> print(latex_name("log10_k1"))
    \log_{10}(k_{1})
    """
    for scale, written in LOGARITHMS.items():
        if name.startswith(scale) and name != scale:
            return f"{written}({latex_name(name.removeprefix(scale))})"
    stem = "".join(takewhile(str.isalpha, name))
    below = name[len(stem) :].lstrip("_")
    return _letters(stem) + (f"_{{{_letters(below)}}}" if below else "")


def _letters(name: str) -> str:
    if GREEK.fullmatch(name):
        return f"\\{name}"
    plain = name.replace("_", r"\_")
    return plain if len(name) == 1 or name.isdigit() else rf"\mathrm{{{plain}}}"


def latex(graph: Variable, names: Mapping[Variable, str]) -> str:
    r"""Return a graph of scalar operations as a formula.

    Parameters
    ----------
    graph : Variable
        Written with operations on single elements.
    names : mapping of Variable to str
        What stands for the variables that it is made of.

    Raises
    ------
    NotImplementedError
        If it is made of anything else, such as a loop or a matrix.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pymc_gradmatch.reporting import latex
    >>> V, s, K = pt.vector("V"), pt.vector("s"), pt.vector("K")
    >>> print(latex(-V * s**2 / (K + s), {V: "V", s: "s", K: "K"}))
    \frac{-V\,{s}^{2}}{K + s}

    Powers of ten are written so:

    >>> print(latex(pt.exp(2.302585092994046 * V), {V: "V"}))
    10^{V}
    """
    return _formula(graph, names)[0]


def _formula(graph: Variable, names: Mapping[Variable, str]) -> tuple[str, int]:
    """Return a formula, and how tightly its parts hold together."""
    graph = graph if graph in names else _unshaped(graph)
    if graph in names:
        return names[graph], ATOM
    if isinstance(graph, Constant) and graph.data.size == 1:
        return _number(graph.data.item())
    if graph.owner is None:
        msg = f"{graph} has no formula"
        raise NotImplementedError(msg)
    op, inputs = graph.owner.op, graph.owner.inputs
    kind = getattr(op, "scalar_op", None)
    if kind is None:
        msg = f"{op} has no formula"
        raise NotImplementedError(msg)
    parts = [_formula(part, names) for part in inputs]
    if type(kind).__name__ == "Exp" and (power := _of_ten(inputs[0])) is not None:
        return f"10^{{{_formula(power, names)[0]}}}", POWER
    match type(kind).__name__, parts:
        case "Identity" | "Cast", [part]:
            return part
        case "Add", _:
            terms = [_within(part, SUM) for part in parts]
            return "".join([terms[0], *map(_added, terms[1:])]), SUM
        case "Sub", [first, second]:
            return f"{_within(first, SUM)} - {_factor(second)}", SUM
        case "Mul", _:
            first, *others = parts
            if first[0] == "-1" and others:
                return f"-{_joined(others)}", PRODUCT
            return _joined(parts), PRODUCT
        case "TrueDiv", [(above, _), (below, _)]:
            return rf"\frac{{{above}}}{{{below}}}", POWER
        case "Neg", [part]:
            return f"-{_within(part, PRODUCT)}", PRODUCT
        case "Sqr", [part]:
            return f"{{{_within(part, ATOM)}}}^{{2}}", POWER
        case "Pow", [base, (exponent, _)]:
            return f"{{{_within(base, ATOM)}}}^{{{exponent}}}", POWER
        case "Sqrt", [(inside, _)]:
            return rf"\sqrt{{{inside}}}", ATOM
        case "Abs", [(inside, _)]:
            return rf"\left|{inside}\right|", ATOM
        case (name, [(left, _), (right, _)]) if name in RELATIONS:
            return f"{left} {RELATIONS[name]} {right}", SUM
        case name, _:
            return rf"{_function(name)}\left({', '.join(part for part, _ in parts)}\right)", ATOM


def _joined(factors: list[tuple[str, int]]) -> str:
    """Return a product, with a dot before a number."""
    first, *others = factors
    written = [_factor(other) for other in others]
    dotted = [rf" \cdot {one}" if one[0].isdigit() else rf"\,{one}" for one in written]
    return "".join([_within(first, PRODUCT), *dotted])


def _of_ten(exponent: Variable) -> Variable | None:
    """Return to which power an exponential raises ten, if it has log(10) as a factor."""
    product = _unshaped(exponent)
    kind = getattr(product.owner and product.owner.op, "scalar_op", None)
    if type(kind).__name__ != "Mul" or len(product.owner.inputs) != 2:
        return None
    first, second = map(_unshaped, product.owner.inputs)
    factor, power = (first, second) if isinstance(first, Constant) else (second, first)
    if not isinstance(factor, Constant) or factor.data.size != 1:
        return None
    return power if isclose(factor.data.item(), log(10), rel_tol=1e-12) else None


def _unshaped(graph: Variable) -> Variable:
    """Return what was given other axes."""
    while graph.owner is not None and type(graph.owner.op).__name__ == "DimShuffle":
        graph = graph.owner.inputs[0]
    return graph


def _number(value: float) -> tuple[str, int]:
    text = f"{value:.6g}"
    mantissa, _, exponent = text.partition("e")
    if exponent:
        factor = "" if mantissa == "1" else rf"{mantissa} \times "
        return f"{factor}10^{{{int(exponent)}}}", PRODUCT
    return text, PRODUCT if value < 0 else ATOM


def _within(part: tuple[str, int], tightness: int) -> str:
    text, own = part
    return text if own >= tightness else rf"\left({text}\right)"


def _factor(part: tuple[str, int]) -> str:
    """Return what stands behind another factor, or a minus: no sign of its own."""
    text, own = part
    return rf"\left({text}\right)" if own < PRODUCT or text.startswith("-") else text


def _added(term: str) -> str:
    return f" - {term[1:]}" if term.startswith("-") else f" + {term}"


def _function(name: str) -> str:
    known = name.lower() in ("exp", "log", "sin", "cos", "tan", "tanh", "sinh", "cosh")
    return f"\\{name.lower()}" if known else rf"\operatorname{{{name.lower()}}}"

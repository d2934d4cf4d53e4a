"""Output for users: progress lines, results as text and tables, formulas."""

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

DISPLAY_DELAY = 0.5  # seconds; faster work shows no progress line
DIGITS, MAX_DIGITS = 3, 12  # significant digits of numbers in tables
GREEK = re.compile(
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|"
    "upsilon|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega"
)
SUM, PRODUCT, POWER, ATOM = range(4)  # operator precedence, lowest first
LOGARITHMS = {"log10_": r"\log_{10}", "log_": r"\log"}  # prefixes of names on a log scale
RELATIONS = {"LT": "<", "GT": ">", "LE": r"\le", "GE": r"\ge", "EQ": "=", "NEQ": r"\ne"}


@contextmanager
def reporting(doing: str, *, enabled: object = True) -> Iterator[Callable[[str], None]]:
    """Show a message and the elapsed time while a block runs.

    Parameters
    ----------
    doing : str
        The first message, for example ``"finding the mode"``.
    enabled : object, default True
        If false, nothing is shown.

    Yields
    ------
    callable
        Replaces the message by its argument.

    Examples
    --------
    >>> from pymc_gradmatch.reporting import reporting
    >>> with reporting("finding the mode", enabled=False) as report:
    ...     report("finding the mode: second optimisation")
    """
    display = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),  # experiments may have [brackets]
        TimeElapsedColumn(),
        console=_progress_console(),
        transient=True,
        disable=not enabled,
    )
    task = display.add_task(doing, total=None)

    def show():
        with suppress(LiveError):  # rich before 14.1 allows only one display
            display.start()

    timer = Timer(DISPLAY_DELAY, show)
    timer.daemon = True
    timer.start()
    try:
        yield lambda message: display.update(task, description=message)
    finally:
        timer.cancel()
        timer.join()
        display.stop()


def silence(message: str):
    """Ignore a message: the callback if no progress is shown."""


def _progress_console() -> Console:
    """Return rich's console; in notebooks without ipywidgets one that writes text.

    There rich would show nothing and warn each time.
    """
    console = Console(stderr=True)
    if console.is_jupyter and find_spec("ipywidgets") is None:
        return Console(stderr=True, force_jupyter=False, force_terminal=True)
    return console


def largest_changes(moved: pd.Series, decimals: int = 1) -> str:
    """Return the largest changes as text, with names and sizes: three, without negligible ones."""
    most = moved[moved.abs().sort_values(ascending=False).index[:3]]
    most = most[(most.abs().round(decimals) > 0) | (most.index == most.index[0])]
    return ", ".join(f"{name} by {value:+.{decimals}f}" for name, value in most.items())


class Report:
    """A result that is displayed as text and tables, also in notebooks.

    It can be pickled with the functions that a user wrote, which are stored by value if they are
    not in a module, such as lambdas and functions of a notebook.
    """

    def __reduce__(self):
        return _restored, (type(self), cloudpickle.dumps(vars(self)))

    def report_parts(self) -> tuple[str, list[pd.DataFrame]]:
        """Return the text and the tables that are displayed."""
        raise NotImplementedError

    def __repr__(self) -> str:
        text, tables = self.report_parts()
        return "\n\n".join([text, *(rounded(table).to_string() for table in tables)])

    def _repr_html_(self) -> str:
        text, tables = self.report_parts()
        return as_html(text, *tables)


def _restored(kind: type[Report], pickled: bytes) -> Report:
    result = object.__new__(kind)
    vars(result).update(cloudpickle.loads(pickled))
    return result


def as_html(text: str, *tables: pd.DataFrame) -> str:
    """Return text and tables as HTML."""
    return "".join([f"<p>{html.escape(text)}</p>", *(rounded(table).to_html() for table in tables)])


def rounded(table: pd.DataFrame) -> pd.DataFrame:
    """Format numbers with three digits, or more if the standard deviation is smaller than that.

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
    sds = numbers.filter(regex=r"(^|_)sd$").min(axis=1).reindex(table.index)
    text = table.copy()
    for name, column in numbers.items():
        is_located = re.search(r"mean$|^(eti|hdi)", str(name))
        compared = sds if is_located else sds * inf
        text[name] = [_in_digits(*pair) for pair in zip(column, compared, strict=True)]
    return text


def _in_digits(value: float, sd: float) -> str:
    least = log10(abs(value) / sd) if value and 0 < sd < inf and abs(value) < inf else 0
    return f"{value:.{min(max(DIGITS, ceil(least + DIGITS - 2)), MAX_DIGITS)}g}"


def latex_name(name: str) -> str:
    r"""Return the name of a variable in LaTeX.

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
    return _latex_letters(stem) + (f"_{{{_latex_letters(below)}}}" if below else "")


def _latex_letters(name: str) -> str:
    if GREEK.fullmatch(name):
        return f"\\{name}"
    plain = name.replace("_", r"\_")
    return plain if len(name) == 1 or name.isdigit() else rf"\mathrm{{{plain}}}"


def latex(graph: Variable, names: Mapping[Variable, str]) -> str:
    r"""Return a graph of scalar operations as a LaTeX formula.

    Parameters
    ----------
    graph : Variable
        A graph of elementwise operations.
    names : mapping of Variable to str
        The LaTeX names of its variables.

    Raises
    ------
    NotImplementedError
        If it contains other operations, such as a loop or a matrix product.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pymc_gradmatch.reporting import latex
    >>> V, s, K = pt.vector("V"), pt.vector("s"), pt.vector("K")
    >>> print(latex(-V * s**2 / (K + s), {V: "V", s: "s", K: "K"}))
    \frac{-V\,{s}^{2}}{K + s}

    Powers of ten:

    >>> print(latex(pt.exp(2.302585092994046 * V), {V: "V"}))
    10^{V}
    """
    return _formula(graph, names)[0]


def _formula(graph: Variable, names: Mapping[Variable, str]) -> tuple[str, int]:
    """Return a formula and the precedence of its outermost operation."""
    graph = graph if graph in names else _without_dimshuffles(graph)
    if graph in names:
        return names[graph], ATOM
    if isinstance(graph, Constant) and graph.data.size == 1:
        return _latex_number(graph.data.item())
    if graph.owner is None:
        msg = f"{graph} has no formula"
        raise NotImplementedError(msg)
    op, inputs = graph.owner.op, graph.owner.inputs
    kind = getattr(op, "scalar_op", None)
    if kind is None:
        msg = f"{op} has no formula"
        raise NotImplementedError(msg)
    parts = [_formula(part, names) for part in inputs]
    if type(kind).__name__ == "Exp" and (power := _power_of_ten(inputs[0])) is not None:
        return f"10^{{{_formula(power, names)[0]}}}", POWER
    match type(kind).__name__, parts:
        case "Identity" | "Cast", [part]:
            return part
        case "Add", _:
            terms = [_parenthesised(part, SUM) for part in parts]
            return "".join([terms[0], *map(_added_term, terms[1:])]), SUM
        case "Sub", [first, second]:
            return f"{_parenthesised(first, SUM)} - {_factor(second)}", SUM
        case "Mul", _:
            first, *others = parts
            if first[0] == "-1" and others:
                return f"-{_product(others)}", PRODUCT
            return _product(parts), PRODUCT
        case "TrueDiv", [(above, _), (below, _)]:
            return rf"\frac{{{above}}}{{{below}}}", POWER
        case "Neg", [part]:
            return f"-{_parenthesised(part, PRODUCT)}", PRODUCT
        case "Sqr", [part]:
            return f"{{{_parenthesised(part, ATOM)}}}^{{2}}", POWER
        case "Pow", [base, (exponent, _)]:
            return f"{{{_parenthesised(base, ATOM)}}}^{{{exponent}}}", POWER
        case "Sqrt", [(inside, _)]:
            return rf"\sqrt{{{inside}}}", ATOM
        case "Abs", [(inside, _)]:
            return rf"\left|{inside}\right|", ATOM
        case (name, [(left, _), (right, _)]) if name in RELATIONS:
            return f"{left} {RELATIONS[name]} {right}", SUM
        case name, _:
            return (
                rf"{_latex_function(name)}\left({', '.join(part for part, _ in parts)}\right)",
                ATOM,
            )


def _product(factors: list[tuple[str, int]]) -> str:
    """Return a product, with a dot before a number."""
    first, *others = factors
    written = [_factor(other) for other in others]
    dotted = [rf" \cdot {one}" if one[0].isdigit() else rf"\,{one}" for one in written]
    return "".join([_parenthesised(first, PRODUCT), *dotted])


def _power_of_ten(exponent: Variable) -> Variable | None:
    """Return y if an exponent is log(10) * y, so that its exponential is 10 ** y."""
    product = _without_dimshuffles(exponent)
    kind = getattr(product.owner and product.owner.op, "scalar_op", None)
    if type(kind).__name__ != "Mul" or len(product.owner.inputs) != 2:
        return None
    first, second = map(_without_dimshuffles, product.owner.inputs)
    factor, power = (first, second) if isinstance(first, Constant) else (second, first)
    if not isinstance(factor, Constant) or factor.data.size != 1:
        return None
    return power if isclose(factor.data.item(), log(10), rel_tol=1e-12) else None


def _without_dimshuffles(graph: Variable) -> Variable:
    """Return a variable without its DimShuffles."""
    while graph.owner is not None and type(graph.owner.op).__name__ == "DimShuffle":
        graph = graph.owner.inputs[0]
    return graph


def _latex_number(value: float) -> tuple[str, int]:
    text = f"{value:.6g}"
    mantissa, _, exponent = text.partition("e")
    if exponent:
        factor = "" if mantissa == "1" else rf"{mantissa} \times "
        return f"{factor}10^{{{int(exponent)}}}", PRODUCT
    return text, PRODUCT if value < 0 else ATOM


def _parenthesised(part: tuple[str, int], precedence: int) -> str:
    text, own = part
    return text if own >= precedence else rf"\left({text}\right)"


def _factor(part: tuple[str, int]) -> str:
    """Return a factor after another factor or a minus, in parentheses if it has a sign."""
    text, own = part
    return rf"\left({text}\right)" if own < PRODUCT or text.startswith("-") else text


def _added_term(term: str) -> str:
    return f" - {term[1:]}" if term.startswith("-") else f" + {term}"


def _latex_function(name: str) -> str:
    known = name.lower() in ("exp", "log", "sin", "cos", "tan", "tanh", "sinh", "cosh")
    return f"\\{name.lower()}" if known else rf"\operatorname{{{name.lower()}}}"

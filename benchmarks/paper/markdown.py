"""The tables of ``docs/history/paper.md`` in Markdown, from the CSV files of a study."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd

__all__ = ["markdown_tables"]

Cells = dict[str, Callable[[pd.Series], str]]


def _number(column: str, digits: int = 2) -> Callable[[pd.Series], str]:
    def cell(row: pd.Series) -> str:
        if pd.isna(row.get(column)):
            return "-"
        # Rounded first, then written without an exponent down to 1e-4.
        return f"{float(f'{row[column]:.{digits}g}'):.15g}"

    return cell


def _share(column: str) -> Callable[[pd.Series], str]:
    # Plus zero: not "-0.00".
    return lambda row: "-" if pd.isna(row.get(column)) else f"{round(row[column], 2) + 0:.2f}"


def _quartiles(row: pd.Series) -> str:
    median, low, high = (_number(name, 3)(row) for name in ("rmse true x0", "q25 true", "q75 true"))
    return f"{median} ({low}, {high})"


def _with_error(method: str) -> Callable[[pd.Series], str]:
    def cell(row: pd.Series) -> str:
        if pd.isna(row.get(method)):
            return "-"
        median, error = _number(method, 3)(row), _number(f"{method} error")(row)
        return f"{median} ± {error} ({row[f'{method} sets']:.0f})"

    return cell


COLUMNS: dict[str, Cells] = {
    "summary": {
        "sets": _number("sets", 3),
        "RMSE, true x0": _quartiles,
        "RMSE, inferred x0": _number("rmse inferred x0", 3),
        "coverage of theta": _share("coverage"),
        "least effective draws": _number("ess"),
        "CPU s per fit": _number("CPU s"),
    },
    "reference": {
        "reference code": _number("reference", 3),
        "FGPGM (sets)": _with_error("fgpgm"),
        "ratio": _share("fgpgm ratio"),
        "NUTS (sets)": _with_error("nuts"),
        "its ratio": _share("nuts ratio"),
        "8 sets as far": _share("nuts chance"),
        "integration, its ratio": _share("exact ratio"),
    },
    "table1": {
        "sets": _number("sets", 3),
        "of medians": _share("of medians"),
        "paired, median": _share("paired"),
        "the paper": _share("paper"),
    },
    "agreement": {
        "sets": _number("sets", 3),
        "converged": _number("converged", 3),
        "agree": _share("agree"),
        "largest z": _number("largest z"),
        "farthest apart where not converged (sd)": _number("the same, not converged"),
        "median least effective draws of Metropolis": _number("median Metropolis ess"),
    },
    "costs": {
        "fits": _number("fits", 5),
        "cases": _number("cases", 3),
        "CPU h": _number("CPU h", 3),
        "CPU h for 100 sets of each of these": _number("CPU h, 100 sets of each case"),
    },
}
INDEX = {"summary": 2, "table1": 2, "reference": 2}


def markdown_tables(folder: Path) -> dict[str, str]:
    """Return the tables of a folder of CSV files, by their names.

    Parameters
    ----------
    folder : Path
        Where :func:`benchmarks.paper.tables.write_tables` has saved them.

    Returns
    -------
    dict of str to str
        A Markdown table of each file that is there, with a dash for what is not known.
    """
    return {
        name: _table(pd.read_csv(path), INDEX.get(name, 1), columns)
        for name, columns in COLUMNS.items()
        if (path := folder / f"{name}.csv").exists()
    }


def _table(rows: pd.DataFrame, n_index: int, columns: Cells) -> str:
    index = list(rows.columns[:n_index])
    lines = [_line([*index, *columns]), "|---" * (n_index + len(columns)) + "|"]
    last = None
    for _, row in rows.iterrows():
        first = "" if row[index[0]] == last else row[index[0]]
        last = row[index[0]] if n_index > 1 else None
        cells = [cell(row) for cell in columns.values()]
        lines.append(_line([first, *row[index[1:]], *cells]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return ("| " + " | ".join(cells) + " |").replace("|  |", "| |")

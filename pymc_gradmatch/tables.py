"""What verdicts have in common: the largest moves, and one way to print."""

import pandas as pd

__all__ = ["furthest", "printed"]


def furthest(moved: pd.Series, decimals: int = 1) -> str:
    """Name the three largest moves, with their sizes."""
    most = moved[moved.abs().sort_values(ascending=False).index[:3]]
    return ", ".join(f"{name} by {value:+.{decimals}f}" for name, value in most.items())


def printed(verdict: str, table: pd.DataFrame) -> str:
    """Return a verdict and its table as text."""
    return f"{verdict}\n\n{table.to_string(float_format='{:.3g}'.format)}"

"""A table of rich that leaves out whole columns where the terminal is too narrow for all.

rich itself would cut cells in the middle, and a number without its end is another number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_GAP = 2


@dataclass
class FittedTable:
    """Rows of text; see the module.

    Args:
        title: Above it.
        head: Names of the columns; the first one stays, and is cut where it must be.
        numeric: Columns whose cells stand at the right.
        dispensable: Columns in the order in which they are left out.
    """

    title: str
    head: Sequence[str]
    numeric: Sequence[int]
    dispensable: Sequence[int]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table in the columns that fit."""
        shown = self.fitting(options.max_width)
        table = Table(title=self.title, title_justify="left", box=None, padding=(0, _GAP, 0, 0))
        width = options.max_width - sum(self._width(index) + _GAP for index in shown[1:])
        for index in shown:
            table.add_column(
                self.head[index],
                justify="right" if index in self.numeric else "left",
                no_wrap=True,
                max_width=max(1, width - _GAP) if index == 0 else None,
                min_width=None if index == 0 else self._width(index),
            )
        for row in self.rows:
            table.add_row(*(row[index] for index in shown))
        yield table

    def fitting(self, width: int) -> list[int]:
        """Columns that are shown on so many characters, in their order; empty ones never are."""
        shown = [index for index in range(len(self.head)) if any(row[index] for row in self.rows)]
        for index in self.dispensable:
            if sum(self._width(each) + _GAP for each in shown) <= width:
                break
            shown = [each for each in shown if each != index]
        return shown

    def _width(self, index: int) -> int:
        return max(cell_len(row[index]) for row in (self.head, *self.rows))

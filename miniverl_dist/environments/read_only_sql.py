"""Runs SQL that a model wrote, on a private in-memory database: read-only, bounded, deterministic.

SQLite runs in this process, so nothing may depend on the goodwill of a statement:

* an authorizer allows reading and the functions listed below, and refuses all else when the
  statement is compiled: writes, ATTACH, PRAGMA (also as a table), transactions, load_extension,
  and whatever is not the same at every call (``random``, ``'now'``);
* a progress handler counts instructions of SQLite's virtual machine, a limit that is the same on
  every machine, and looks at the thread's CPU time for the few statements whose single
  instructions are slow;
* no value may be longer than ``MAX_VALUE_BYTES``: ``replace``, ``group_concat`` and ``||`` fail
  instead of filling memory, and functions that are quadratic in a text stay quick;
* compiling is not covered by the progress handler, so the text is bounded beforehand: its length,
  its depth, and its common table expressions, which SQLite copies at every mention.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from miniverl_dist.environments.question_tasks import Scalar, ToolError

MAX_SQL_CHARS = 2_000
MAX_VALUE_BYTES = 4_096
"""Of one value, and of one row."""
MAX_TABLE_EXPRESSIONS = 2
MAX_CELL_CHARS = 200
_HANDLER_EVERY = 100
"""Instructions between two looks at the limits."""

_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4 * MAX_SQL_CHARS,
    sqlite3.SQLITE_LIMIT_COLUMN: 60,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 50,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 8,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 20,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_FUNCTION_NAMES = """
abs avg char coalesce count dense_rank first_value glob group_concat hex ifnull iif instr lag
last_value lead length like lower ltrim max min nth_value ntile nullif percent_rank quote rank
replace round row_number rtrim sign substr substring sum total trim typeof unicode upper
"""
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
"""Linear, or quadratic in ``MAX_VALUE_BYTES``. Not ``printf``: it counts a width of 10^9 down."""
_TOKEN = re.compile(
    r"--[^\n]*|/\*.*?(?:\*/|\Z)|'(?:[^']|'')*'?|\"(?:[^\"]|\"\")*\"?|`[^`]*`?|\[[^\]]*\]?|\w+|\S",
    re.DOTALL,
)
_TABLE_EXPRESSION = re.compile(r"\bas (?:(?:not )?materialized )?\(")


@dataclass(frozen=True)
class Table:
    """A table's contents; values are texts and integers."""

    name: str
    columns: tuple[tuple[str, str], ...]
    """(name, SQL type) each."""
    rows: tuple[tuple[str | int, ...], ...]

    def as_json(self) -> dict[str, object]:
        """For the checksum of the data."""
        return {"name": self.name, "columns": list(self.columns), "rows": list(self.rows)}


@dataclass(frozen=True)
class Rows:
    """A result; ``has_more``: it goes on behind ``rows``."""

    rows: tuple[tuple[Scalar, ...], ...]
    has_more: bool


class ReadOnlyDatabase:
    """One in-memory database with the tables given.

    Args:
        tables: Made once; nothing can be written afterwards.
        max_steps: Instructions that a statement may take.
        max_statement_s: CPU seconds that it may take.
    """

    def __init__(self, tables: Sequence[Table], *, max_steps: int, max_statement_s: float) -> None:
        self._max_steps, self._max_statement_s = max_steps, max_statement_s
        self._steps, self._started_s = 0, 0.0
        self._is_out_of_budget = False
        # An episode moves between threads, and is in one at a time.
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, cached_statements=0
        )
        self._connection.text_factory = _text
        for table in tables:
            _fill(self._connection, table)
        self._close_off()

    def _close_off(self) -> None:
        connection = self._connection
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA temp_store = MEMORY")
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_progress_handler(self._tick, _HANDLER_EVERY)
        connection.set_authorizer(_authorize)

    def _tick(self) -> bool:
        """True interrupts the statement."""
        self._steps += _HANDLER_EVERY
        self._is_out_of_budget = (
            self._steps > self._max_steps
            or time.thread_time() - self._started_s > self._max_statement_s
        )
        return self._is_out_of_budget

    def query(self, sql: str, *, max_rows: int) -> Rows:
        """Run one statement.

        Raises:
            ToolError: it is refused, fails, or takes more than it may.
        """
        if problem := text_problem(sql):
            raise ToolError(problem)
        self._steps, self._started_s, self._is_out_of_budget = 0, time.thread_time(), False
        try:
            cursor = self._connection.execute(sql)
            try:
                if cursor.description is None:
                    raise ToolError("the statement gives no rows: write one SELECT")
                found = cursor.fetchmany(max_rows + 1)
            finally:
                cursor.close()
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            raise ToolError(self._told(error)) from error
        return Rows(tuple(found[:max_rows]), len(found) > max_rows)

    def _told(self, error: Exception) -> str:
        if self._is_out_of_budget:
            return "the statement takes too long: ask for less"
        text = str(error)
        if "not authorized" in text or "prohibited" in text:
            return f"{text[:MAX_CELL_CHARS]}: only reading is allowed, nothing random, no clock"
        return text[:MAX_CELL_CHARS] or type(error).__name__

    def close(self) -> None:
        """Free the database; safe to call twice."""
        self._connection.close()


def text_problem(sql: str) -> str | None:
    """Why a statement is not even compiled, or None."""
    if len(sql) > MAX_SQL_CHARS:
        return f"the statement has {len(sql)} characters, expected at most {MAX_SQL_CHARS}"
    if "\0" in sql:
        return "the statement holds a NUL character"
    words = " ".join(_words(sql)) + " "
    if not words.startswith(("select ", "with ", "values ")):
        return "only reading is allowed: write one SELECT"
    num_expressions = len(_TABLE_EXPRESSION.findall(words)) if "with " in words else 0
    if num_expressions > MAX_TABLE_EXPRESSIONS:
        return f"more than {MAX_TABLE_EXPRESSIONS} table expressions after WITH: use subqueries"
    return None


def _words(sql: str) -> Iterator[str]:
    """Tokens without comments, in lower case; texts and quoted names as one mark."""
    for token in _TOKEN.finditer(sql):
        word = token[0]
        if not word.startswith(("--", "/*")):
            yield "?" if word[0] in "'\"`[" else word.lower()


def write_rows(rows: Rows) -> str:
    """Rows as JSON, each cell cut; a mark where there are more.

    JSON has no infinite number, which SQLite makes of ``9e999``: it is shown as a text, for null
    is what an empty cell shows.
    """
    cells = [[_shown(cell) for cell in row] for row in rows.rows]
    text = json.dumps(cells, ensure_ascii=False, allow_nan=False)
    return f"{text} (first {len(cells)} rows; there are more)" if rows.has_more else text


def _shown(cell: object) -> object:
    if isinstance(cell, bytes):
        return f"x'{cell[: MAX_CELL_CHARS // 2].hex()}'"
    if isinstance(cell, float) and math.isinf(cell):
        return "Infinity" if cell > 0 else "-Infinity"
    return cell[:MAX_CELL_CHARS] if isinstance(cell, str) else cell


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _authorize(
    action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
) -> int:
    """SQLite asks while it compiles a statement."""
    if action in _ACTIONS:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _fill(connection: sqlite3.Connection, table: Table) -> None:
    """Names are ours, never a model's."""
    columns = ", ".join(f"{name} {kind}" for name, kind in table.columns)
    connection.execute(f"CREATE TABLE {table.name} ({columns})")
    marks = ", ".join("?" for _ in table.columns)
    connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table.rows)

"""Questions on a database that only read-only SQL can see; it is a real SQLite in memory.

A database has two tables of one theme, the second with a key to the first. Answers are computed
from the rows in Python; that the expert's SQL finds the same is what the audit of all tasks checks.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miniverl_dist.config.environments import Difficulty, SqliteConfig
from miniverl_dist.environments.question import QuestionEnvironment
from miniverl_dist.environments.question_tasks import (
    Family,
    Question,
    ToolError,
    ToolResult,
    make_tool,
)
from miniverl_dist.environments.read_only_sql import ReadOnlyDatabase, Table, write_rows
from miniverl_dist.environments.texts import CallWriter, write_json_lines
from miniverl_dist.schemas.messages import ToolCall


class SqlTools:
    """Looks at one database.

    Args:
        tables: Its contents.
        config: Limits of a statement.
    """

    def __init__(self, tables: Sequence[Table], config: SqliteConfig) -> None:
        self._tables = {table.name: table for table in tables}
        self._max_rows = config.max_rows
        self._database = ReadOnlyDatabase(
            tables, max_steps=config.max_steps, max_statement_s=config.max_statement_s
        )

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Look; see `Toolbox.call`."""
        match name:
            case "list_tables":
                return ToolResult(json.dumps(list(self._tables)), tuple(self._tables))
            case "describe":
                return self._describe(arguments["table"])
            case _:
                return self._query(arguments["sql"])

    def _describe(self, name: object) -> ToolResult:
        table = self._tables.get(name) if isinstance(name, str) else None
        if table is None:
            known = ", ".join(self._tables)
            raise ToolError(f"describe: no table {str(name)[:80]!r}; known are {known}")
        columns = [f"{column} {kind}" for column, kind in table.columns]
        return ToolResult(json.dumps(columns), tuple(column for column, _ in table.columns))

    def _query(self, sql: object) -> ToolResult:
        if not isinstance(sql, str):
            raise ToolError(f"query: sql must be a text, found {type(sql).__name__}")
        rows = self._database.query(sql, max_rows=self._max_rows)
        return ToolResult(write_rows(rows), tuple(cell for row in rows.rows for cell in row))

    def close(self) -> None:
        """Free the database; safe to call twice."""
        self._database.close()


@dataclass(frozen=True)
class _Theme:
    """Names of a database: ``groups`` (id, name) and ``items`` (id, group, name, amount)."""

    groups: str
    key: str
    items: str
    amount: str
    amounts: range
    group_words: str
    item_words: str


_SHOPS = _Theme(
    groups="shops",
    key="shop_id",
    items="products",
    amount="price",
    amounts=range(3, 400),
    group_words="north south harbour station market castle",
    item_words="lamp chair desk shelf clock mirror rug vase stool bench candle basket bowl frame",
)
_AUTHORS = _Theme(
    groups="authors",
    key="author_id",
    items="books",
    amount="pages",
    amounts=range(80, 900),
    group_words="Arendt Borges Calvino Duras Eco Frisch",
    item_words="Ashes Bridges Dunes Echoes Fields Glass Islands Journal Keys Letters Mosaic Night",
)
_LINES = _Theme(
    groups="lines",
    key="line_id",
    items="trains",
    amount="minutes",
    amounts=range(12, 300),
    group_words="coast valley summit forest lake border",
    item_words="T101 T115 T128 T133 T147 T152 T166 T179 T184 T190 T203 T218 T225 T239 T244 T257",
)
_THEMES = (_SHOPS, _AUTHORS, _LINES)


def _tables(theme: _Theme, rng: random.Random) -> tuple[Table, Table]:
    names = rng.sample(theme.group_words.split(), rng.randint(3, 5))
    groups = tuple((index, name) for index, name in enumerate(names, start=1))
    # Every group has an item and no two items the same amount: each question has one answer.
    items = rng.sample(theme.item_words.split(), rng.randint(7, 12))
    amounts = rng.sample(theme.amounts, len(items))
    owners = [index for index, _ in groups]
    owners += rng.choices(owners, k=len(items) - len(owners))
    rows = tuple(
        (index, owner, name, amount)
        for index, (owner, name, amount) in enumerate(
            zip(owners, items, amounts, strict=True), start=1
        )
    )
    item_columns = (("id", "INTEGER"), (theme.key, "INTEGER"), ("name", "TEXT"))
    return (
        Table(theme.groups, (("id", "INTEGER"), ("name", "TEXT")), groups),
        Table(theme.items, (*item_columns, (theme.amount, "INTEGER")), rows),
    )


def draw(difficulty: Difficulty, rng: random.Random) -> Question:
    """A value by name; a count or a largest one; something of one group, over both tables."""
    theme = rng.choice(_THEMES)
    groups, items = _tables(theme, rng)
    match difficulty:
        case "easy":
            text, sql, answer = _by_name(theme, items, rng)
            looks = []
        case "medium":
            text, sql, answer = _over_one_table(theme, items, rng)
            looks = [_call("describe", table=items.name)]
        case "hard":
            text, sql, answer = _over_both(theme, groups, items, rng)
            looks = [_call("list_tables")]
            looks += [_call("describe", table=table.name) for table in (groups, items)]
    hidden = [table.as_json() for table in (groups, items)]
    return Question(text, (*looks, _call("query", sql=sql)), str(answer), hidden)


def _by_name(theme: _Theme, items: Table, rng: random.Random) -> tuple[str, str, object]:
    _, _, name, amount = rng.choice(items.rows)
    return (
        f"What is the {theme.amount} of {name}? Table {items.name} has name and {theme.amount}.",
        f"SELECT {theme.amount} FROM {items.name} WHERE name = '{name}'",
        amount,
    )


def _over_one_table(theme: _Theme, items: Table, rng: random.Random) -> tuple[str, str, object]:
    amounts = {str(row[2]): int(row[3]) for row in items.rows}
    if rng.random() < 0.5:
        limit = rng.choice(sorted(amounts.values())[1:])
        return (
            f"How many {items.name} have a value of {theme.amount} below {limit}?",
            f"SELECT COUNT(*) FROM {items.name} WHERE {theme.amount} < {limit}",
            sum(amount < limit for amount in amounts.values()),
        )
    word, order, choose = rng.choice((("largest", "DESC", max), ("smallest", "ASC", min)))
    return (
        f"Which of the {items.name} has the {word} {theme.amount}? Give its name.",
        f"SELECT name FROM {items.name} ORDER BY {theme.amount} {order} LIMIT 1",
        choose(amounts, key=lambda name: amounts[name]),
    )


def _over_both(
    theme: _Theme, groups: Table, items: Table, rng: random.Random
) -> tuple[str, str, object]:
    index, name = rng.choice(groups.rows)
    amounts = {str(row[2]): int(row[3]) for row in items.rows if row[1] == index}
    source = (
        f"FROM {items.name} i JOIN {groups.name} g ON i.{theme.key} = g.id WHERE g.name = '{name}'"
    )
    match rng.choice(("sum", "count", "largest")):
        case "sum":
            text = f"What is the sum of {theme.amount} over the {items.name} of {name}?"
            return text, f"SELECT SUM(i.{theme.amount}) {source}", sum(amounts.values())
        case "count":
            text = f"How many {items.name} does {name} have?"
            return text, f"SELECT COUNT(*) {source}", len(amounts)
        case _:
            text = f"Which of the {items.name} of {name} has the largest {theme.amount}?"
            sql = f"SELECT i.name {source} ORDER BY i.{theme.amount} DESC LIMIT 1"
            return f"{text} Give its name.", sql, max(amounts, key=lambda key: amounts[key])


def _call(name: str, /, **arguments: str) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


_TEXT = {"type": "string"}


def sqlite_query(
    config: SqliteConfig, write_calls: CallWriter = write_json_lines
) -> QuestionEnvironment:
    """The databases' questions under a config."""
    family = Family(
        name="sqlite_query",
        tools=(
            make_tool("list_tables", "The names of the tables."),
            make_tool("describe", "The columns of a table and their types.", table=_TEXT),
            make_tool("query", "Run one SELECT of SQLite; rows as JSON.", sql=_TEXT),
        ),
        answer_schema=_TEXT,
        draw=draw,
        open_tools=lambda question: SqlTools(_read_tables(question.hidden), config),
        versions={"sqlite": sqlite3.sqlite_version},
    )
    return QuestionEnvironment(family, config, write_calls)


def _read_tables(hidden: Sequence[Mapping[str, Any]]) -> list[Table]:
    return [
        Table(
            table["name"],
            tuple((name, kind) for name, kind in table["columns"]),
            tuple(tuple(row) for row in table["rows"]),
        )
        for table in hidden
    ]

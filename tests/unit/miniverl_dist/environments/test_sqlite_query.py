from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.config.environments import SqliteConfig
from miniverl_dist.environments.question_tasks import ToolError
from miniverl_dist.environments.read_only_sql import ReadOnlyDatabase, Table, write_rows
from miniverl_dist.environments.sqlite_query import sqlite_query
from miniverl_dist.schemas.messages import ParsedCall
from tests.support.question_audit import (
    answer_of,
    audit,
    call,
    do,
    play_messages,
    random_calls,
    refused,
    told,
)

ENV = sqlite_query(SqliteConfig(num_tasks=30))
TASK_IDS = tuple(ENV.tasks())
LIMIT_S = 0.6
"""CPU time of one statement; the slowest below takes a quarter of it."""

ITEMS = Table(
    "items",
    (("id", "INTEGER"), ("name", "TEXT"), ("price", "INTEGER")),
    tuple((index, f"n{index}", 3 * index) for index in range(30)),
)


def database(max_steps: int = 100_000, max_statement_s: float = 5.0) -> ReadOnlyDatabase:
    return ReadOnlyDatabase([ITEMS], max_steps=max_steps, max_statement_s=max_statement_s)


@pytest.fixture(scope="module")
def items() -> ReadOnlyDatabase:
    return database()


@pytest.mark.parametrize("seed", range(3))
def test_audit(seed: int) -> None:
    audit(sqlite_query(SqliteConfig(num_tasks=60, seed=seed)))


@settings(max_examples=40)
@given(
    task_id=st.sampled_from(TASK_IDS),
    messages=st.lists(
        st.lists(random_calls(tuple(ENV.schemas), ("table", "sql", "answer")), max_size=3),
        max_size=3,
    ),
)
def test_no_call_breaks_it(task_id: str, messages: Sequence[Sequence[ParsedCall]]) -> None:
    play_messages(ENV.start(task_id, prefix_calls=0), messages)


WORDS = ("SELECT", "FROM", "items", "WHERE", "(", ")", ",", "*", "'a", "a'", '"', "[", "--", "/*")
MORE = ("WITH", "RECURSIVE", "AS", "UNION ALL", ";", "\0", "1", "max", "name", "?", ":x", "||", "`")


@settings(max_examples=100)
@given(words=st.lists(st.sampled_from(WORDS + MORE) | st.text(max_size=4), max_size=25))
def test_no_text_breaks_the_database(words: list[str]) -> None:
    """A result or a refusal, and the rows are still what they were."""
    tables = database()
    for sql in (" ".join(words), " ".join(["SELECT", *words])):
        with suppress(ToolError):
            tables.query(sql, max_rows=3)
    assert tables.query("SELECT count(*), sum(price) FROM items", max_rows=2).rows == ((30, 1305),)
    tables.close()


COUNT_UP = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
LONG = "replace(hex('" + "a" * 80 + "'), '6', '" + "b" * 20 + "')"
HOSTILE = {
    "delete": ("DELETE FROM items", "only reading"),
    "insert": ("INSERT INTO items VALUES (1, 2, 3)", "only reading"),
    "update behind a comment": ("/* SELECT */ UPDATE items SET price = 0", "only reading"),
    "drop": ("DROP TABLE items", "only reading"),
    "create": ("CREATE TABLE x (y)", "only reading"),
    "delete behind WITH": ("WITH x AS (SELECT 1) DELETE FROM items", "not authorized"),
    "insert behind WITH": ("WITH x AS (SELECT 1) INSERT INTO items SELECT 1, 2, 3", "not auth"),
    "attach": ("ATTACH DATABASE '/tmp/x.db' AS y", "only reading"),
    "vacuum into": ("VACUUM INTO '/tmp/x.db'", "only reading"),
    "pragma": ("PRAGMA query_only = OFF", "only reading"),
    "pragma as a table": ("SELECT * FROM pragma_database_list", "not authorized"),
    "transaction": ("BEGIN", "only reading"),
    "explain": ("EXPLAIN SELECT 1", "only reading"),
    "load_extension": ("SELECT load_extension('x')", "not authorized to use function"),
    "readfile": ("SELECT readfile('/etc/passwd')", "no such function"),
    "random": ("SELECT random()", "nothing random, no clock"),
    "clock": ("SELECT date('now')", "nothing random, no clock"),
    "clock by keyword": ("SELECT current_timestamp", "not authorized"),
    "two statements": ("SELECT 1; SELECT 2", "one statement at a time"),
    "a write behind a read": ("SELECT 1; DROP TABLE items", "one statement at a time"),
    "NUL byte": ("SELECT 'a\0b'", "holds a NUL character"),
    "surrogate": ("SELECT '\ud800'", "surrogates not allowed"),
    "nothing": ("", "only reading"),
    "only a comment": ("-- SELECT 1", "only reading"),
    "unfinished": ("SELECT", "incomplete input"),
    "unfinished text": ("SELECT 'a", "unrecognized token"),
    "parameters": ("SELECT ?, :a, @b", "too many SQL variables"),
    "long text": ("SELECT 1 " + " " * 3000, "expected at most 2000"),
    "endless recursion": (f"{COUNT_UP} SELECT count(*) FROM c", "takes too long"),
    "endless rows": (f"{COUNT_UP} SELECT x FROM c WHERE x < 0", "takes too long"),
    "endless sort": (f"{COUNT_UP} SELECT x FROM c ORDER BY x", "takes too long"),
    "endless wide rows": (
        f"WITH RECURSIVE c(x) AS (SELECT {LONG} UNION ALL SELECT {LONG} FROM c) "
        "SELECT count(*) FROM (SELECT x FROM c ORDER BY x)",
        "takes too long",
    ),
    "slow instructions": (
        f"{COUNT_UP} SELECT sum(instr({LONG}, substr({LONG}, 1, 999) || 'z')) FROM c",
        "takes too long",
    ),
    "wide join": ("SELECT count(*) FROM items a, items b, items c, items d", "takes too long"),
    "zeroblob": ("SELECT zeroblob(1000000000)", "not authorized to use function: zeroblob"),
    "printf": ("SELECT printf('%.*c', 1000000000, 'x')", "not authorized to use function: printf"),
    "format": ("SELECT format('%1000000000d', 1)", "not authorized to use function: format"),
    "doubled text": (f"SELECT replace({LONG}, 'b', {LONG})", "too big"),
    "concatenation": (f"SELECT {' || '.join([LONG] * 9)}", "too big"),
    "aggregated text": ("SELECT group_concat(a.name || b.name) FROM items a, items b", "too big"),
    "table expressions that multiply": (
        "WITH a AS (SELECT 1), b AS (SELECT 1 FROM a, a), c AS (SELECT 1 FROM b, b) SELECT 1",
        "more than 2 table expressions",
    ),
    "table expressions in disguise": (
        "WITH a AS/**/(SELECT 1), b AS NOT MATERIALIZED (SELECT 1 FROM a, a), "
        "c AS --x\n MATERIALIZED (SELECT 1 FROM b, b) SELECT 1",
        "more than 2 table expressions",
    ),
    "two table expressions, many mentions": (
        f"WITH a AS (SELECT 1), b AS (SELECT 1 FROM {', '.join('a' * 190)}) "
        f"SELECT 1 FROM {', '.join('b' * 190)}",
        "at most 64 tables",
    ),
    "many tables": (f"SELECT * FROM {', '.join(['items'] * 60)}", "too many columns"),
    "deep parentheses": (f"SELECT {'(' * 900}1{')' * 900}", "stack overflow"),
    "deep expression": (f"SELECT {'1+' * 900}1", "tree is too large"),
    "deep subqueries": (f"SELECT {'(SELECT ' * 90}1{')' * 90}", "stack overflow"),
    "long pattern": (f"SELECT 'a' LIKE '{'%a' * 60}'", "pattern too complex"),
    "overflow": ("SELECT abs(-9223372036854775808)", "integer overflow"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_statements_are_refused_in_bounded_time(items: ReadOnlyDatabase, name: str) -> None:
    sql, problem = HOSTILE[name]
    started = time.thread_time()
    with pytest.raises(ToolError) as caught:
        items.query(sql, max_rows=5)
    assert time.thread_time() - started < LIMIT_S
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 300
    assert items.query("SELECT count(*), sum(price) FROM items", max_rows=2).rows == ((30, 1305),)


@pytest.mark.parametrize(
    ("sql", "shown"),
    [
        ("SELECT name FROM items WHERE price > 80 ORDER BY id", '[["n27"], ["n28"], ["n29"]]'),
        ("select count(*) from items;", "[[30]]"),
        (" -- why\n SELECT 1", "[[1]]"),
        (
            "WITH t AS (SELECT max(price) m FROM items) SELECT name FROM items, t WHERE price = m",
            '[["n29"]]',
        ),
        ("VALUES (1), (NULL)", "[[1], [null]]"),
        ("SELECT avg(price) FROM items", "[[43.5]]"),
        (
            "SELECT x'ff', CAST(x'ff' AS TEXT), 'é', 9e999",
            '[["x\'ff\'", "\ufffd", "é", "Infinity"]]',
        ),
        ("SELECT name FROM sqlite_master", '[["items"]]'),
        ("SELECT id FROM items", "[[0], [1], [2]] (first 3 rows; there are more)"),
        ("SELECT id FROM items LIMIT 3", "[[0], [1], [2]]"),
        ("SELECT 1 WHERE 0", "[]"),
        (f"SELECT {LONG}", None),
    ],
)
def test_reading(items: ReadOnlyDatabase, sql: str, shown: str | None) -> None:
    text = write_rows(items.query(sql, max_rows=3))
    assert text == shown if shown else len(text) == 200 + len('[[""]]')


def test_what_json_has_no_number_for_is_a_text() -> None:
    """And a policy that has seen it is still judged."""
    session = ENV.start(TASK_IDS[0], prefix_calls=0)
    text = told(session, "query", sql="SELECT 9e999, -9e999, 9e999 - 9e999, NULL")
    assert text == '[["Infinity", "-Infinity", null, null]]'
    assert not session.finish().passed


def test_the_same_statement_is_refused_at_the_same_count_on_every_machine() -> None:
    sql = f"{COUNT_UP} SELECT x FROM c LIMIT 1 OFFSET 400"
    assert database(max_steps=20_000).query(sql, max_rows=1).rows == ((401,),)
    with pytest.raises(ToolError, match="takes too long"):
        database(max_steps=2_000).query(sql, max_rows=1)


def test_cpu_time_bounds_what_instructions_do_not() -> None:
    slow = database(max_steps=10**9, max_statement_s=0.05)
    started = time.thread_time()
    with pytest.raises(ToolError, match="takes too long"):
        slow.query(f"{COUNT_UP} SELECT count(*) FROM c", max_rows=1)
    assert 0.05 <= time.thread_time() - started < 0.3
    assert slow.query("SELECT 1", max_rows=1).rows == ((1,),)


def test_tools_of_a_session() -> None:
    session = ENV.start("sqlite_query_hard_000", prefix_calls=0)
    assert "no table 'x'; known are " in refused(session, "describe", table="x")
    assert "no table \"['x']\"" in refused(session, "describe", table=["x"])
    assert "sql must be a text, found int" in refused(session, "query", sql=1)
    assert "no such table" in refused(session, "query", sql="SELECT 1 FROM trees")
    first, second = told(session, "list_tables")[2:-2].split('", "')
    for table in (first, second):
        columns = told(session, "describe", table=table)
        assert columns.startswith('["id INTEGER", ')
    told(session, "query", sql=f"SELECT count(*) FROM {second}")


def test_rows_behind_the_cut_have_not_been_seen() -> None:
    """An answer that the result holds but does not show was found by no tool."""
    env = sqlite_query(SqliteConfig(num_tasks=1, max_rows=1))
    (task_id,) = env.tasks()
    answer = answer_of(env, task_id)
    table, column = env.questions[task_id].expert_calls[0].arguments["sql"].split()[3:0:-2]
    session = env.start(task_id, prefix_calls=0)
    told(session, "query", sql=f"SELECT {column} FROM {table} ORDER BY {column} = {answer}")
    told(session, "submit", answer=answer)
    assert session.finish().verdict["reason"] == "no tool has shown the answer"


def test_sessions_have_databases_of_their_own() -> None:
    first, second = (ENV.start(TASK_IDS[0], prefix_calls=0) for _ in range(2))
    sql = ENV.questions[TASK_IDS[0]].expert_calls[0]
    do(first, sql)
    first.close()
    (observation,) = do(second, sql)
    assert not observation.is_error
    do(second, call("submit", answer=answer_of(ENV, TASK_IDS[0])))
    assert second.finish().passed


@pytest.mark.parametrize("seed", [0, 5])
def test_answers_do_not_depend_on_ties(seed: int) -> None:
    """No two rows of a database have the same amount: a largest one is one."""
    env = sqlite_query(SqliteConfig(num_tasks=60, seed=seed))
    for task in env.questions.values():
        groups, rows = (table["rows"] for table in task.question.hidden)
        assert len({row[3] for row in rows}) == len(rows)
        assert {row[1] for row in rows} == {row[0] for row in groups}


def test_the_provenance_names_the_sqlite_that_answered() -> None:
    assert ENV.provenance()["sqlite"] == sqlite3.sqlite_version

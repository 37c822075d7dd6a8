from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from miniverl_dist.config.recipe import BfclCategory
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.environments.splits import split
from miniverl_dist.errors import RecordError, TaskNotFoundError
from miniverl_dist.schemas.messages import ToolCall
from rollout_server.bfcl.tasks import BfclData, BfclTask, load_data, parse_expert_call

needs_bfcl = [
    pytest.mark.bfcl,
    pytest.mark.skipif(
        importlib.util.find_spec("bfcl_eval") is None,
        reason="bfcl-eval is not installed: scripts/install_bfcl.sh",
    ),
]


class TestTask:
    task = BfclTask(
        task_id="t",
        turns=("u0", "u1", "u2", "u3"),
        initial_config={},
        classes=("B", "A"),
        expert_turns=(
            (ToolCall(name="a", arguments={}), ToolCall(name="b", arguments={})),
            (),
            (ToolCall(name="c", arguments={}),),
            (),
        ),
    )

    def test_turn_of_call_skips_empty_turns_and_ends_in_the_last(self) -> None:
        assert [self.task.turn_of_call(index) for index in range(4)] == [0, 0, 2, 3]

    def test_info(self) -> None:
        assert self.task.num_calls == 3
        assert [call.name for call in self.task.expert_calls] == ["a", "b", "c"]
        expected = TaskInfo(
            task_id="t", num_calls=3, num_turns=4, classes=("A", "B"), category="base", family="t"
        )
        assert self.task.info == expected

    def test_info_of_a_variant_names_its_family_and_the_turns_without_calls(self) -> None:
        changes = {"task_id": "multi_turn_miss_func_7", "category": "miss_func"}
        info = self.task.model_copy(update=changes).info
        assert (info.category, info.family, info.extra_turns) == (
            "miss_func",
            "multi_turn_base_7",
            2,
        )

    @pytest.mark.parametrize(
        ("category", "expected"), [("base", [0, 0, 2, 3]), ("miss_param", [0, 0, 1, 3])]
    )
    def test_first_turn_is_an_empty_one_only_where_that_is_the_point(
        self, category: str, expected: list[int]
    ) -> None:
        task = self.task.model_copy(update={"category": category})
        assert [task.first_turn(prefix_calls) for prefix_calls in range(4)] == expected

    def test_first_turn_goes_back_over_all_empty_turns(self) -> None:
        call = ToolCall(name="a", arguments={})
        turns: tuple[tuple[ToolCall, ...], ...] = ((), (), (call, call), (), ())
        task = self.task.model_copy(update={"category": "miss_func", "expert_turns": turns})
        assert [task.first_turn(prefix_calls) for prefix_calls in range(3)] == [0, 2, 3]

    def test_refused_before_spares_what_the_expert_calls_early(self) -> None:
        brought = {1: ("x",), 2: ("a", "c", "y")}
        task = self.task.model_copy(update={"category": "miss_func", "brought": brought})
        assert [task.refused_before(turn) for turn in range(4)] == [
            {"x", "c", "y"},
            {"c", "y"},
            set(),
            set(),
        ]


class TestParseExpertCall:
    def test_literals(self) -> None:
        text = " f(a=-1, b=[1, 'x'], c={'k': None}, d=True, e=1.5) "
        assert parse_expert_call(text, ()).arguments == {
            "a": -1,
            "b": [1, "x"],
            "c": {"k": None},
            "d": True,
            "e": 1.5,
        }

    @pytest.mark.parametrize(
        "text",
        [
            "__import__('os').system('touch PWNED')",
            "f(a=__import__('os').system('touch PWNED'))",
            "f(a=open('x'))",
            "f(**{'a': 1})",
            "f(a=1",
            "f",
            "1 + 1",
            "f(a=g(1))",
            "",
        ],
    )
    def test_what_is_not_a_plain_call_with_literals_is_refused(
        self, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(RecordError, match="expected name"):
            parse_expert_call(text, ())
        assert not list(tmp_path.iterdir())


HIDE_BFCL = """
import sys

class Hide:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            return None
        return self.finder.find_spec(name, path, target)

HIDDEN = {hidden!r}
sys.meta_path = [Hide(finder) for finder in sys.meta_path]
from miniverl_dist.errors import MissingDependencyError
from rollout_server.bfcl import environment, tasks, verdict
assert not [name for name in sys.modules if name.split(".")[0] in {{"bfcl_eval", "torch", "ray"}}]
try:
    session = environment.BfclEnvironment().start("multi_turn_base_0", prefix_calls=0)
except MissingDependencyError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("hidden", "what"),
    [
        ("bfcl_eval", "the package bfcl-eval"),
        pytest.param("mpmath", "the module mpmath", marks=needs_bfcl),
    ],
)
def test_imports_without_the_package_and_names_the_command(hidden: str, what: str) -> None:
    code = HIDE_BFCL.format(hidden={hidden})
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert what in result.stdout
    assert "scripts/install_bfcl.sh" in result.stdout


def write_lines(path: Path, rows: list[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def small_data(folder: Path, row: dict[str, Any], answer: list[list[str]]) -> Path:
    """A data folder with one task and one documented function."""
    from rollout_server.bfcl.package import DOC_FILES

    for name in DOC_FILES.values():
        write_lines(folder / "multi_turn_func_doc" / name, [])
    document = {"name": "sort", "description": "", "parameters": {"type": "dict", "properties": {}}}
    write_lines(folder / "multi_turn_func_doc" / DOC_FILES["GorillaFileSystem"], [document])
    whole = {
        "id": "x_1",
        "question": [[{"role": "user", "content": "sort\u2028it"}]],
        "initial_config": {},
        "involved_classes": ["GorillaFileSystem"],
    } | row
    write_lines(folder / "BFCL_v4_multi_turn_base.json", [whole])
    answers = [{"id": "x_1", "ground_truth": answer}]
    write_lines(folder / "possible_answer" / "BFCL_v4_multi_turn_base.json", answers)
    return folder


@pytest.fixture(scope="module")
def data() -> BfclData:
    return load_data()


class TestLoadData:
    pytestmark = needs_bfcl

    def test_counts(self, data: BfclData) -> None:
        tasks = data.tasks.values()
        calls = [task.num_calls for task in tasks]
        turns = [len(task.turns) for task in tasks]
        assert (len(tasks), sum(calls), min(calls), max(calls)) == (200, 1142, 2, 10)
        assert (min(turns), max(turns)) == (1, 7)
        assert list(data.tasks) == [f"multi_turn_base_{number}" for number in range(200)]
        assert sum(len(schemas) for schemas in data.schemas.values()) == 128

    def test_empty_expert_turns(self, data: BfclData) -> None:
        empty = {
            task_id: [turn for turn, calls in enumerate(task.expert_turns) if not calls]
            for task_id, task in data.tasks.items()
            if not all(task.expert_turns)
        }
        assert empty == {"multi_turn_base_167": [4], "multi_turn_base_180": [3, 4]}

    def test_positional_arguments_get_the_signature_s_names(self) -> None:
        expected = {"file_name": "a", "mode": "w"}
        assert parse_expert_call("wc('a', 'w')", ["GorillaFileSystem"]).arguments == expected
        assert parse_expert_call("wc('a', mode='w')", ["GorillaFileSystem"]).arguments == expected
        for text in ("wc('a', 'w', 3)", "wc('a', file_name='b')", "nothing('a')"):
            with pytest.raises(RecordError):
                parse_expert_call(text, ["GorillaFileSystem"])

    def test_excluded_functions_are_no_tools(self, data: BfclData) -> None:
        excluding = [task for task in data.tasks.values() if task.excluded]
        assert len(excluding) == 18
        for task in excluding:
            names = {tool.name for tool in data.tools(task)}
            assert not names & set(task.excluded)
            assert len(names) + len(task.excluded) == sum(
                len(data.schemas[name]) for name in task.classes
            )

    def test_provenance(self, data: BfclData) -> None:
        assert data.provenance == {
            "package": "bfcl-eval",
            "version": "2026.3.23",
            "category": "multi_turn_base",
            "num_tasks": "200",
            "data_sha256": "7134a76ad655353cc5f6e2d0bb7f1d34ee5e31223e8506ea76d9652d2a82bc35",
        }

    def test_categories_in_the_order_given(self) -> None:
        data = load_data(categories=("miss_func", "base"))
        assert len(data.tasks) == 400
        assert next(iter(data.tasks)) == "multi_turn_miss_func_0"
        assert data.provenance["category"] == "multi_turn_miss_func,multi_turn_base"
        assert data.provenance["num_tasks"] == "400"
        digests = {
            load_data(categories=chosen).provenance["data_sha256"]
            for chosen in (("base",), ("miss_func",), ("base", "miss_func"), ("miss_func", "base"))
        }
        assert len(digests) == 4

    @pytest.mark.parametrize(
        ("category", "num_calls", "num_empty"),
        [("long_context", 1203, 3), ("miss_func", 1140, 203), ("miss_param", 1140, 203)],
    )
    def test_counts_of_the_other_categories(
        self, category: BfclCategory, num_calls: int, num_empty: int
    ) -> None:
        tasks = load_data(categories=(category,)).tasks
        assert list(tasks) == [f"multi_turn_{category}_{number}" for number in range(200)]
        assert sum(task.num_calls for task in tasks.values()) == num_calls
        empty = [not calls for task in tasks.values() for calls in task.expert_turns]
        assert sum(empty) == num_empty
        assert {task.info.category for task in tasks.values()} == {category}

    def test_a_turn_that_brings_functions_has_the_package_s_words(self) -> None:
        task = load_data(categories=("miss_func",)).task("multi_turn_miss_func_0")
        assert task.brought == {3: ("sort",)}
        assert task.turns[3].startswith("I have updated some more functions")

    def test_unknown_task_names_close_ids(self, data: BfclData) -> None:
        with pytest.raises(TaskNotFoundError, match="multi_turn_base_19"):
            data.task("multi_turn_base_1999")

    def test_real_splits(self, data: BfclData) -> None:
        tasks = {task_id: task.info for task_id, task in data.tasks.items()}
        train, tail = split(tasks, "tail")
        assert (len(train), len(tail), tail[0]) == (170, 30, "multi_turn_base_170")
        assert all("TravelAPI" in tasks[task_id].classes for task_id in tail)
        train, stratified = split(tasks, "stratified")
        assert (len(train), len(stratified)) == (170, 30)
        seen = {name for task_id in stratified for name in tasks[task_id].classes}
        assert seen == set(data.schemas)

    def test_a_line_separator_inside_a_text_ends_no_line(self, tmp_path: Path) -> None:
        rows = small_data(tmp_path, {}, [["sort('a')"]]) / "BFCL_v4_multi_turn_base.json"
        rows.write_text(rows.read_text().replace("\\u2028", "\u2028"), encoding="utf-8")
        assert load_data(tmp_path).task("x_1").turns == ("sort\u2028it",)

    def test_the_digest_covers_every_file_that_is_read(self, tmp_path: Path) -> None:
        first = load_data(small_data(tmp_path / "a", {}, [["sort('a')"]])).provenance
        second = load_data(small_data(tmp_path / "b", {}, [["sort('b')"]])).provenance
        assert first["data_sha256"] != second["data_sha256"]

    @pytest.mark.parametrize(
        ("row", "answer", "message"),
        [
            ({"involved_classes": ["Nothing"]}, [["sort(file_name='a')"]], "'Nothing'"),
            ({}, [["sort('a')"], []], "1 user turns, 2 turns"),
            ({}, [["ls()"]], r"undocumented functions \['ls'\]"),
            ({"excluded_function": ["sort"]}, [["sort('a')"]], "undocumented functions"),
            ({"question": [[]]}, [["sort('a')"]], "exactly one user message"),
            ({"missed_function": {"0": ["ls"]}}, [["sort('a')"]], r"undocumented .* \['ls'\]"),
            ({"id": "x_2"}, [["sort('a')"]], "no entry 'x_2'"),
        ],
    )
    def test_rows_that_contradict_themselves(
        self, tmp_path: Path, row: dict[str, Any], answer: list[list[str]], message: str
    ) -> None:
        with pytest.raises(RecordError, match=message):
            load_data(small_data(tmp_path, row, answer))

    def test_damaged_files(self, tmp_path: Path) -> None:
        folder = small_data(tmp_path, {}, [["sort('a')"]])
        rows = folder / "BFCL_v4_multi_turn_base.json"
        rows.write_text(rows.read_text() + '{"id": "x_2", "ques')
        with pytest.raises(RecordError, match=r"multi_turn_base.json, line 2: not JSON"):
            load_data(folder)
        rows.unlink()
        with pytest.raises(RecordError, match=r"multi_turn_base.json is missing"):
            load_data(folder)

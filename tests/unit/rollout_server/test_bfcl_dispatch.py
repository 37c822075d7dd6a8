from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import getcontext
from pathlib import Path
from threading import Event
from typing import Any, Self

import pytest

from miniverl_dist.errors import EnvironmentFaultError
from miniverl_dist.schemas.messages import CallError, ParsedCall, ParseStatus, ToolCall
from rollout_server.bfcl import package
from rollout_server.bfcl.dispatch import CallResult, ToolHost, faults, tool_classes
from rollout_server.bfcl.tasks import BfclTask, load_data

pytestmark = [
    pytest.mark.bfcl,
    pytest.mark.skipif(
        importlib.util.find_spec("bfcl_eval") is None,
        reason="bfcl-eval is not installed: scripts/install_bfcl.sh",
    ),
]

FILES = {
    "root": {
        "home": {
            "type": "directory",
            "contents": {
                "a.txt": {"type": "file", "content": "beta\nalpha"},
                "docs": {"type": "directory", "contents": {}},
            },
        }
    }
}


def make_task(*classes: str, excluded: tuple[str, ...] = (), **config: object) -> BfclTask:
    return BfclTask(
        task_id="made_up",
        turns=("go",),
        initial_config=config,
        classes=classes or tuple(package.DOC_FILES),
        excluded=excluded,
        expert_turns=((),),
    )


def make_host(*classes: str, call_deadline_s: float = 5.0, **config: object) -> ToolHost:
    config.setdefault("GorillaFileSystem", FILES)
    task = make_task(*classes, **config)
    return ToolHost(task, load_data().tools(task), call_deadline_s=call_deadline_s)


def run(host: ToolHost, name: str, /, **arguments: object) -> CallResult:
    return host.call(ToolCall(name=name, arguments=arguments))


def test_allowed_functions_can_be_called_from_then_on() -> None:
    task = make_task("GorillaFileSystem", GorillaFileSystem=FILES)
    tools = load_data().tools(task)
    host = ToolHost(task, [t for t in tools if t.name != "ls"], call_deadline_s=5.0)
    assert "Unknown function 'ls'" in run(host, "ls").text
    host.allow([t for t in tools if t.name == "ls"])
    assert not run(host, "ls").is_error


def test_only_long_contexts_have_classes_of_their_own() -> None:
    task = make_task("TravelAPI", "GorillaFileSystem")
    assert tool_classes(task)["TravelAPI"] is package.tool_class("TravelAPI")
    long = task.model_copy(update={"category": "long_context"})
    first, second = tool_classes(long), tool_classes(long)
    assert set(first) == {"TravelAPI", "GorillaFileSystem"}
    assert len({first["TravelAPI"], second["TravelAPI"], package.tool_class("TravelAPI")}) == 3


class TestCalls:
    def test_result_is_written_as_the_checkers_compare_it(self) -> None:
        host = make_host()
        assert run(host, "sort", file_name="a.txt").text == '{"sorted_content": "alpha\\nbeta"}'
        assert run(host, "mkdir", dir_name="new") == CallResult(text="None", is_error=False)
        assert run(host, "get_user_tweets", username="x").text == "[]"
        precise = run(host, "square_root", number=2, precision=3)
        assert precise == CallResult(text="{'result': Decimal('1.41')}", is_error=False)

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("cat", {"file_name": "nothing"}),  # {"error": ...}
            ("get_user_tickets", {}),  # [{"error": ...}]
            ("get_order_history", {}),
            ("get_watchlist", {}),  # ["Error: ..."]
            ("displayCarStatus", {"option": "soul"}),
            ("get_flight_cost", {  # raises
                "travel_from": "X", "travel_to": "Y", "travel_date": "", "travel_class": "first",
            }),
        ],
    )  # fmt: skip
    def test_failures_that_tools_return_or_raise_are_errors(
        self, name: str, arguments: dict[str, Any]
    ) -> None:
        assert run(make_host(), name, **arguments).is_error

    def test_a_raised_error_is_written_as_the_package_s_executor_writes_it(self) -> None:
        result = run(make_host(), "lockDoors", unlock=True, door=["boot"])
        assert result == CallResult(
            text="Error during execution: 'boot'", is_error=True, error=CallError.EXECUTION
        )

    @pytest.mark.parametrize(
        ("name", "arguments", "kind"),
        [
            ("sortt", {}, CallError.UNKNOWN_TOOL),
            ("sort", {}, CallError.ARGUMENTS),
            ("sort", {"file_name": "a.txt", "by": 1}, CallError.ARGUMENTS),
            ("sort", {"file_name": "no such file"}, CallError.EXECUTION),
        ],
    )
    def test_an_error_says_of_what_kind_it_is(
        self, name: str, arguments: dict[str, Any], kind: CallError
    ) -> None:
        assert run(make_host(), name, **arguments).error is kind
        unreadable = ParsedCall(status=ParseStatus.MALFORMED, raw="x")
        assert make_host().run(unreadable).error is None

    def test_unknown_function_names_similar_ones(self) -> None:
        result = run(make_host(), "sortt", file_name="a.txt")
        assert result.is_error
        assert "Unknown function 'sortt'; similar functions: sort" in result.text

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "missing arguments ['source', 'destination']"),
            ({"source": "a.txt", "to": "b"}, "missing arguments ['destination']; unexpected"),
            ({"source": "a", "destination": "b", "x": 1}, "unexpected arguments ['x'], expected"),
            ({"source": "a", "destination": "b", "self": 1}, "unexpected arguments ['self']"),
        ],
    )
    def test_wrong_arguments(self, arguments: dict[str, Any], message: str) -> None:
        result = run(make_host(), "mv", **arguments)
        assert result.is_error
        assert message in json.loads(result.text)["error"]

    @pytest.mark.parametrize(
        ("name", "arguments", "message"),
        [
            ("echo", {"content": "x" * 20_001}, "echo: the arguments hold more than 20000 char"),
            ("square_root", {"number": 2, "precision": 10**6}, "square_root: precision must be"),
        ],
    )
    def test_what_the_limits_forbid_is_not_run(
        self, name: str, arguments: dict[str, Any], message: str
    ) -> None:
        result = run(make_host(), name, **arguments)
        assert result.is_error
        assert message in json.loads(result.text)["error"]

    def test_excluded_function_is_unknown(self) -> None:
        task = make_task("GorillaFileSystem", excluded=("sort",), GorillaFileSystem=FILES)
        host = ToolHost(task, load_data().tools(task), call_deadline_s=5.0)
        assert "Unknown function" in run(host, "sort", file_name="a.txt").text

    def test_functions_of_other_classes_are_unknown(self) -> None:
        assert "Unknown function" in run(make_host("MathAPI"), "sort", file_name="a.txt").text

    @pytest.mark.parametrize("status", [s for s in ParseStatus if s is not ParseStatus.OK])
    def test_peer_24_malformed_call_is_an_error_observation(self, status: ParseStatus) -> None:
        parsed = ParsedCall(status=status, raw='{"a":1', error="the JSON object is not closed")
        result = make_host().run(parsed)
        assert result.is_error
        assert status.value in result.text
        assert "the JSON object is not closed" in result.text

    def test_a_malformed_call_never_runs_even_if_a_name_was_read(self) -> None:
        host = make_host()
        call = ToolCall(name="rm", arguments={"file_name": "a.txt"})
        host.run(ParsedCall(status=ParseStatus.TRUNCATED, call=call, raw="rm("))
        assert "a.txt" in run(host, "ls").text


ATTACKS = [
    "__import__('os').system('touch PWNED')",
    "__import__('os').system",
    "os.system",
    "eval",
    "exec",
    "__init__",
    "__class__",
    "_load_scenario",
    "_current_dir._add_file",
    "instances",
    "sort('a.txt') or __import__('os').system('touch PWNED')",
    "sort.__globals__",
    "cd\n__import__('os').system('touch PWNED')",
]


class TestSecurity:
    @pytest.fixture(autouse=True)
    def _empty_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(tmp_path)
        yield
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", ATTACKS)
    def test_code_as_a_name_never_runs(self, name: str) -> None:
        result = run(make_host(), name, scenario={}, file_name="a.txt")
        assert result.is_error
        assert "Unknown function" in result.text

    @pytest.mark.parametrize("text", ATTACKS)
    def test_code_as_an_argument_never_runs_anywhere(self, text: str) -> None:
        task = make_task(GorillaFileSystem=FILES)
        tools = load_data().tools(task)
        for tool in tools:
            host = ToolHost(task, tools, call_deadline_s=5.0)
            names = list(tool.parameters["properties"])
            run(host, tool.name, **dict.fromkeys(names, text))
            run(host, tool.name, **{key: [text] for key in names})
            run(host, tool.name, **{text: text})

    def test_code_in_a_file_stays_text(self) -> None:
        host = make_host()
        run(host, "echo", content=ATTACKS[0], file_name="a.txt")
        assert json.loads(run(host, "cat", file_name="a.txt").text)["file_content"] == ATTACKS[0]


class Meeting(float):
    """A number that, while mpmath reads it, announces itself and waits a moment for another."""

    def __new__(cls, value: float, announce: Event, await_: Event) -> Self:
        number = super().__new__(cls, value)
        number.announce, number.await_ = announce, await_
        return number

    announce: Event
    await_: Event

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __ne__(self, other: object) -> bool:
        self.announce.set()
        self.await_.wait(0.05)
        return super().__ne__(other)

    __hash__ = float.__hash__


class TestIsolation:
    def test_arguments_are_copied(self) -> None:
        host = make_host(TwitterAPI={"authenticated": True})
        posted = ToolCall(name="post_tweet", arguments={"content": "x", "mentions": ["@a"]})
        host.call(posted)
        run(host, "mention", tweet_id=0, mentioned_usernames=["@b"])
        assert '"@b"' in run(host, "get_tweet", tweet_id=0).text
        assert posted.arguments == {"content": "x", "mentions": ["@a"]}

    def test_a_tool_s_mutable_default_is_not_shared_between_episodes(self) -> None:
        first, second = (make_host(TwitterAPI={"authenticated": True}) for _ in range(2))
        run(first, "post_tweet", content="x")
        run(first, "mention", tweet_id=0, mentioned_usernames=["@leak"])
        assert "@leak" in run(first, "get_tweet", tweet_id=0).text
        run(second, "post_tweet", content="x")
        assert "@leak" not in run(second, "get_tweet", tweet_id=0).text

    def test_the_start_state_is_copied(self) -> None:
        config = {"authenticated": True, "tweets": {"0": {"mentions": []}}}
        run(make_host(TwitterAPI=config), "mention", tweet_id=0, mentioned_usernames=["@x"])
        assert config["tweets"] == {"0": {"mentions": []}}

    def test_number_precision_does_not_outlive_a_call(self) -> None:
        import mpmath

        before = (getcontext().prec, mpmath.mp.prec)
        host = make_host()
        run(host, "square_root", number=2, precision=7)
        run(host, "logarithm", value=2, base=10, precision=7)
        assert (getcontext().prec, mpmath.mp.prec) == before

    def test_threads_do_not_change_each_other_s_digits(self) -> None:
        first_inside, second_inside, first_done = Event(), Event(), Event()

        def logarithm(value: float, precision: int) -> str:
            return run(
                make_host("MathAPI"), "logarithm", value=value, base=3, precision=precision
            ).text

        def second() -> str:
            first_inside.wait(1.0)
            return logarithm(Meeting(7.0, second_inside, first_done), 300)

        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(second)
            short = logarithm(Meeting(7.0, first_inside, second_inside), 5)
            first_done.set()
        assert short == logarithm(7.0, 5) == "{'result': mpf('1.771244')}"
        assert long.result() == logarithm(7.0, 300)


class TestFaults:
    def test_a_start_state_that_cannot_be_loaded(self) -> None:
        with pytest.raises(EnvironmentFaultError, match="made_up, building the start state"):
            make_host(VehicleControlAPI={"doorStatus": None})

    def test_a_documented_function_that_no_class_has(self) -> None:
        task = make_task("MathAPI")
        tools = load_data().tools(make_task("TicketAPI"))
        with pytest.raises(EnvironmentFaultError, match="has a public method"):
            ToolHost(task, tools, call_deadline_s=5.0)

    def test_a_slow_call_is_a_fault_of_the_harness(self) -> None:
        host = make_host(call_deadline_s=1e-9)
        with pytest.raises(EnvironmentFaultError, match="CPU seconds, the deadline is"):
            run(host, "square_root", number=2, precision=1000)

    def test_faults_keep_their_own_kind(self) -> None:
        with pytest.raises(EnvironmentFaultError, match=r"^inner$"), faults("outer"):
            raise EnvironmentFaultError("inner")
        with pytest.raises(EnvironmentFaultError, match="raised KeyError"), faults("outer"):
            raise KeyError("x")

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import EnvironmentFaultError
from miniverl_dist.schemas.messages import ToolCall
from miniverl_dist.schemas.trajectory import Termination
from rollout_server.policies import DONE_TEXT
from rollout_server.tool_calls import parse_hermes_json
from rollout_server.traces import Trace, TraceMaker, common_prefix_bytes
from tests.fake_stage import ScriptedEnvironment, call, stage, wire
from tests.fakes import FakeClock

TASKS = {
    "a": [[call(x="α1", y=1), call(x="α2", y=2)], [call("g", z="last")]],
    "b": [[call("h", x="β", y=9)], []],
    "c": [[call("g", z="one"), call("h", x="γ", y=8)]],
}
TOOLS = ("f", "g", "h")


async def made(
    noisy_fraction: float,
    *,
    per_task: int = 1,
    tail: int = 3,
    seed: int = 0,
    environment: ScriptedEnvironment | None = None,
    ids: tuple[str, ...] = ("a", "b", "c"),
) -> list[Trace]:
    environment = environment or ScriptedEnvironment(TASKS, TOOLS)
    maker = TraceMaker(stage(environment), lambda calls: wire(*calls), FakeClock(), seed=seed)
    return await maker.make(
        ids, max_tail_calls=tail, per_task=per_task, noisy_fraction=noisy_fraction
    )


def calls_of(text: str) -> list[ToolCall]:
    return [parsed.call for parsed in parse_hermes_json(text).calls if parsed.call is not None]


class TestClean:
    async def test_clean_traces_pass_at_every_horizon(self) -> None:
        traces = await made(0.0, per_task=2)
        played = [(t.trajectory.task_id, t.trajectory.tail_calls) for t in traces]
        # Every horizon from 1 to the smaller of 3 and N, each twice.
        expected = [("a", t) for t in (1, 2, 3)] + [("b", 1)] + [("c", t) for t in (1, 2)]
        assert played == [place for place in expected for _ in range(2)]
        for trace in traces:
            assert trace.trajectory.passed
            assert trace.trajectory.termination is Termination.FINAL_ANSWER
            assert trace.clean_texts == {}

    async def test_nothing_of_a_trace_is_sampled(self) -> None:
        for trace in await made(0.5, per_task=3):
            assert trace.trajectory.sampled_spans == ()
            assert not any(trace.trajectory.loss_mask)

    async def test_written_spans_are_prefix_calls_and_scripted_turns(self) -> None:
        [trace] = await made(0.0, tail=1, ids=("a",))
        texts = [
            trace.trajectory.messages[s.message_index or 0].content for _, s in trace.written_spans
        ]
        assert texts == [
            wire(call(x="α1", y=1)),
            wire(call(x="α2", y=2)),
            wire(call("g", z="last")),
            DONE_TEXT,
        ]
        for index, span in trace.written_spans:
            assert trace.trajectory.spans[index] == span
            assert trace.divergence(span) is None


class TestNoise:
    async def test_the_share_is_that_of_the_config(self) -> None:
        traces = await made(0.4, per_task=100)
        share = sum(bool(t.clean_texts) for t in traces) / len(traces)
        # 600 traces: 0.4 within four standard deviations.
        assert len(traces) == 600
        assert share == pytest.approx(0.4, abs=4 * (0.4 * 0.6 / 600) ** 0.5)

    async def test_only_the_last_call_of_the_last_busy_user_turn_is_spoilt(self) -> None:
        for trace in await made(1.0, per_task=20):
            told = trace.trajectory
            [(index, clean)] = trace.clean_texts.items()
            expected, found = calls_of(clean), calls_of(told.messages[index].content)
            assert found[: len(expected) - 1] == expected[:-1]
            assert found != expected
            later = [m for m in told.messages[index + 1 :] if m.role == "assistant"]
            assert [m.content for m in later] == [DONE_TEXT] * len(later)
            assert not told.passed

    async def test_all_four_kinds_occur(self) -> None:
        kinds = set()
        for trace in await made(1.0, per_task=30):
            [(index, clean)] = trace.clean_texts.items()
            expected = calls_of(clean)[-1]
            text = trace.trajectory.messages[index].content
            found = calls_of(text)
            if len(found) < len(calls_of(clean)):
                kinds.add("no call")
                assert found or text == DONE_TEXT
            elif found[-1].name != expected.name:
                kinds.add("another function")
                assert found[-1] in [c for turns in TASKS.values() for t in turns for c in t]
            elif found[-1].arguments.keys() < expected.arguments.keys():
                kinds.add("dropped argument")
                assert len(found[-1].arguments) == len(expected.arguments) - 1
            else:
                kinds.add("wrong argument")
                differing = [
                    k for k, v in expected.arguments.items() if found[-1].arguments[k] != v
                ]
                assert len(differing) == 1
        assert kinds == {"no call", "another function", "dropped argument", "wrong argument"}

    async def test_the_observations_are_the_environments_real_answers(self) -> None:
        environment = ScriptedEnvironment(TASKS, TOOLS)
        for trace in await made(1.0, per_task=5, environment=environment):
            told = trace.trajectory
            assert len(told.exec_successes) == len(told.tool_calls)
        for session in environment.sessions[3:]:
            assert session.num_finishes == 1
            assert session.num_closes >= 1

    async def test_a_tool_that_may_not_be_called_is_never_put_in(self) -> None:
        environment = ScriptedEnvironment(TASKS, ("f", "g"))
        for trace in await made(1.0, per_task=20, environment=environment, ids=("a", "b", "c")):
            for index, clean in trace.clean_texts.items():
                spoilt = calls_of(trace.trajectory.messages[index].content)
                if spoilt and spoilt[-1].name != calls_of(clean)[-1].name:
                    assert spoilt[-1].name in ("f", "g")

    async def test_a_single_call_without_arguments_can_be_spoilt(self) -> None:
        environment = ScriptedEnvironment({"a": [[call("f")]]})
        for trace in await made(1.0, per_task=10, environment=environment, ids=("a",)):
            [(index, _)] = trace.clean_texts.items()
            assert trace.trajectory.messages[index].content == DONE_TEXT

    async def test_it_is_a_function_of_the_seed(self) -> None:
        def texts(traces: list[Trace]) -> list[list[str]]:
            return [[m.content for m in t.trajectory.messages] for t in traces]

        one, same, other = [await made(0.6, per_task=10, seed=seed) for seed in (1, 1, 2)]
        assert texts(one) == texts(same)
        assert texts(one) != texts(other)
        assert [t.trajectory.seed for t in one] == [t.trajectory.seed for t in same]


class TestDivergence:
    async def test_it_is_where_the_bytes_part(self) -> None:
        found = 0
        for trace in await made(1.0, per_task=10):
            for _, span in trace.written_spans:
                where = trace.divergence(span)
                if where is None:
                    continue
                found += 1
                assert span.message_index is not None
                spoilt = trace.trajectory.messages[span.message_index].content.encode()
                clean = trace.clean_texts[span.message_index].encode()
                assert spoilt[:where] == clean[:where]
                assert spoilt[where : where + 1] != clean[where : where + 1]
        assert found == 60

    @settings(deadline=None)
    @given(st.binary(max_size=9), st.binary(max_size=5), st.binary(max_size=5))
    def test_common_prefix(self, common: bytes, left: bytes, right: bytes) -> None:
        length = common_prefix_bytes(common + left, common + right)
        assert length >= len(common)
        assert (common + left)[:length] == (common + right)[:length]
        shortest = min(len(common + left), len(common + right))
        assert length == shortest or (common + left)[length] != (common + right)[length]


async def test_a_fault_of_the_environment_is_no_trace() -> None:
    environment = ScriptedEnvironment(TASKS, TOOLS)
    environment.finish_fault = True
    with pytest.raises(EnvironmentFaultError, match=r"scripted trace of a at K = 2 ended as"):
        await made(0.0, environment=environment)

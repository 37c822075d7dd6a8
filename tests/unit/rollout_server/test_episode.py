from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from miniverl_dist.errors import (
    EngineError,
    EngineLostError,
    MalformedReplyError,
    PrefixPropertyError,
    RequestRejectedError,
    ServerUnavailableError,
    TaskNotFoundError,
)
from miniverl_dist.generate_api.wire import GenerateReply
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.messages import Message, ParseStatus
from miniverl_dist.schemas.trajectory import (
    HARNESS_TERMINATIONS,
    SpanKind,
    Termination,
    Trajectory,
)
from rollout_server.episode import EVALUATION_BUDGET, TRAINING_BUDGET, EpisodePlayer, _Episode
from tests.fake_stage import (
    CHAT,
    ScriptedEngine,
    ScriptedEnvironment,
    assignment,
    call,
    engine_policy,
    play,
    reply,
    stage,
    wire,
)
from tests.fakes import FakeClock

LONG = assignment(prefix_calls=0, tail_calls=3)
"""Three calls in two user turns; at most six turns of the model."""


def different_calls(count: int = 20) -> list[str]:
    return [wire(call("f", x=index)) for index in range(100, 100 + count)]


async def start_fault() -> Trajectory:
    environment = ScriptedEnvironment()
    environment.start_fault = True
    return await play("x", environment=environment)


SCENARIOS: dict[Termination, Callable[[], Awaitable[Trajectory]]] = {
    Termination.FINAL_ANSWER: lambda: play(wire(call(x=2)), "done"),
    Termination.MAX_TURNS: lambda: play(*different_calls()),
    Termination.MAX_TOKENS: lambda: play(reply("so lo", end=None, kind="length")),
    Termination.PARSE_ERROR_LIMIT: lambda: play("<tool_call>{", place=LONG),
    Termination.TOOL_ERROR_LIMIT: lambda: play(
        *(wire(call("fail", x=i)) for i in range(9)), place=LONG
    ),
    Termination.REPEATED_CALL_LIMIT: lambda: play(wire(call(x=7)), place=LONG),
    Termination.EOS_WITHOUT_FINAL: lambda: play(reply("so", end="<|stop|>")),
    Termination.DEADLINE: lambda: play(asyncio.Event(), episode_deadline_s=0.02),
    Termination.ENVIRONMENT_ERROR: lambda: play(wire(call("fault"))),
    Termination.ENGINE_ERROR: lambda: play(EngineError("it died")),
}


class TestTerminations:
    @pytest.mark.parametrize("termination", Termination)
    async def test_every_reason_is_reached(self, termination: Termination) -> None:
        told = await SCENARIOS[termination]()
        assert told.termination is termination

    async def test_the_context_may_be_full_before_or_during_an_episode(self) -> None:
        told = await play("x", max_context_tokens=20)
        assert told.termination is Termination.MAX_TOKENS
        assert not told.is_trainable
        engine = ScriptedEngine(*different_calls())
        told = await play(engine=engine, max_context_tokens=300, max_new_tokens=200)
        assert told.termination is Termination.MAX_TOKENS
        rooms = [300 - len(r.input_ids) for r in engine.requests]
        assert [r.sampling_params.max_new_tokens for r in engine.requests] == [
            min(200, room) for room in rooms
        ]
        assert rooms[-1] > 0

    async def test_limits_count_what_happens_in_a_row(self) -> None:
        # Two failures, a success, two failures: three of four fail, never three in a row.
        names = ("fail", "fail", "f", "fail", "fail")
        answers = [wire(call(name, x=i)) for i, name in enumerate(names)]
        told = await play(*answers, "done", place=LONG)
        assert told.termination is Termination.MAX_TURNS
        assert told.exec_successes == (False, False, True, False, False)
        broken, good = "<tool_call>{", wire(call(x=5))
        told = await play(broken, broken, good, broken, broken, "x", place=LONG, tool_error_limit=9)
        assert told.termination is Termination.MAX_TURNS

    async def test_errors_of_one_message_count_one_by_one(self) -> None:
        told = await play(wire(*(call("fail", x=i) for i in range(3))), place=LONG)
        assert told.termination is Termination.TOOL_ERROR_LIMIT

    async def test_a_message_with_one_call_that_can_be_read_is_no_parse_error(self) -> None:
        mixed = "<tool_call>{</tool_call>"
        answers = [mixed + wire(call(x=index)) for index in range(9)]
        told = await play(*answers, place=LONG)
        assert told.termination is Termination.MAX_TURNS

    async def test_the_order_of_arguments_does_not_hide_a_repetition(self) -> None:
        one, other = wire(call(x=1, y=2)), wire(call(y=2, x=1))
        told = await play(one, other, one, other, place=LONG)
        assert told.termination is Termination.REPEATED_CALL_LIMIT
        told = await play(one, other, wire(call(x=1, y=3)), one, other, "x", place=LONG)
        assert told.termination is Termination.MAX_TURNS

    async def test_limits_are_those_of_config(self) -> None:
        told = await play("<tool_call>{", place=LONG, parse_error_limit=1)
        assert (told.termination, len(told.tool_calls)) == (Termination.PARSE_ERROR_LIMIT, 1)
        told = await play(wire(call("fail")), tool_error_limit=1)
        assert (told.termination, len(told.tool_calls)) == (Termination.TOOL_ERROR_LIMIT, 1)
        told = await play(wire(call(x=1)), place=LONG, repeated_call_limit=2)
        assert (told.termination, len(told.tool_calls)) == (Termination.REPEATED_CALL_LIMIT, 2)


class TestHarnessFaults:
    @pytest.mark.parametrize("termination", sorted(HARNESS_TERMINATIONS))
    async def test_defect_they_are_not_scored(self, termination: Termination) -> None:
        told = await SCENARIOS[termination]()
        assert (told.reward, told.passed, told.verdict, told.reward_parts) == (0.0, False, {}, {})
        assert not told.is_trainable
        assert told.notes["error"]

    @pytest.mark.parametrize(
        "error",
        [
            ServerUnavailableError("503"),
            RequestRejectedError("too long"),
            MalformedReplyError("no JSON"),
        ],
    )
    async def test_what_an_engine_can_say_is_an_engine_error(self, error: Exception) -> None:
        told = await play(wire(call(x=2)), error)
        assert told.termination is Termination.ENGINE_ERROR
        assert told.notes["error"] == str(error)
        assert len(told.sampled_spans) == 1  # what was sampled before stays on record

    async def test_a_lost_engine_is_no_fault_of_the_episode(self) -> None:
        """Whoever keeps the engines plays it again elsewhere."""
        with pytest.raises(EngineLostError, match="its server has ended"):
            await play(wire(call(x=2)), EngineLostError("its server has ended"))

    @pytest.mark.parametrize("logprob", [None, float("-inf"), float("nan"), 0.5, -65504.0])
    async def test_defect_a_logprob_that_cannot_be_one_is_an_engine_error(
        self, logprob: float | None
    ) -> None:
        told = await play(reply("so", logprob=logprob))
        assert told.termination is Termination.ENGINE_ERROR
        assert "unusable" in told.notes["error"]

    async def test_an_engine_without_a_version_is_an_engine_error(self) -> None:
        told = await play(reply("so", versions=("default",)))
        assert told.termination is Termination.ENGINE_ERROR
        assert "weight version ['default']" in told.notes["error"]

    async def test_the_engines_own_deadline_counts_too(self) -> None:
        policy = engine_policy(ScriptedEngine(asyncio.Event()), deadline_s=0.02)
        player = EpisodePlayer(stage(), policy, seed=0, clock=FakeClock())
        told = await player.rollout(assignment(), 0)
        assert told.termination is Termination.DEADLINE
        assert "deadlines.generate_s" in told.notes["error"]

    async def test_the_environment_may_fail_at_any_point(self) -> None:
        assert (await start_fault()).termination is Termination.ENVIRONMENT_ERROR
        environment = ScriptedEnvironment()
        environment.finish_fault = True
        told = await play(wire(call(x=2)), "done", environment=environment)
        assert (told.termination, told.reward) == (Termination.ENVIRONMENT_ERROR, 0.0)
        assert told.notes["error"] == "the verifier is gone"

    async def test_the_session_is_closed_however_it_ends(self) -> None:
        for termination in Termination:
            environment = ScriptedEnvironment()
            engine = {
                Termination.ENGINE_ERROR: ScriptedEngine(EngineError("it died")),
                Termination.ENVIRONMENT_ERROR: ScriptedEngine(wire(call("fault"))),
            }.get(termination, ScriptedEngine(wire(call(x=2)), "done"))
            told = await play(environment=environment, engine=engine)
            [session] = environment.sessions
            assert session.num_closes >= 1
            assert session.num_finishes == (told.termination is Termination.FINAL_ANSWER)

    async def test_a_stop_in_the_middle_closes_the_session(self) -> None:
        environment = ScriptedEnvironment()
        playing = asyncio.ensure_future(play(asyncio.Event(), environment=environment))
        for _ in range(10):
            await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert environment.sessions[0].num_closes >= 1

    async def test_an_unknown_task_is_no_episode(self) -> None:
        with pytest.raises(TaskNotFoundError):
            await play("x", place=assignment(task_id="nowhere"))


class TestCalls:
    async def test_defect_all_calls_of_a_message_run_in_order(self) -> None:
        environment = ScriptedEnvironment()
        calls = [call(x=0), call("g"), call(x=1)]
        told = await play(wire(*calls), "next", "done", environment=environment, place=LONG)
        made = environment.sessions[0].made
        assert [parsed.call for parsed in made] == calls
        assert [parsed.call for parsed in told.tool_calls] == calls
        results = [m.content for m in told.messages if m.role == "tool"]
        assert results == ["f ok", "g ok", "f ok"]

    async def test_peer_23_two_calls_in_one_message_are_two(self) -> None:
        told = await play(wire(call(x=1), call(x=2)), "done")
        assert len(told.tool_calls) == len(told.exec_successes) == 2

    async def test_peer_24_a_malformed_call_is_an_error_observation(self) -> None:
        told = await play('<tool_call>{"a":1</tool_call>', "done")
        assert told.termination is Termination.FINAL_ANSWER
        [parsed] = told.tool_calls
        assert parsed.status is ParseStatus.MALFORMED
        assert told.exec_successes == (False,)
        results = [m.content for m in told.messages if m.role == "tool"]
        assert results[-1].startswith("error: no valid JSON")

    async def test_a_call_cut_by_its_cap_is_an_error_and_the_episode_goes_on(self) -> None:
        told = await play(wire(call("slow")), wire(call(x=2)), "done")
        assert told.termination is Termination.FINAL_ANSWER
        assert told.exec_successes == (False, True)
        assert told.is_trainable

    async def test_a_call_cut_by_the_token_cap_is_an_error_and_the_episode_goes_on(self) -> None:
        cut = reply('<tool_call>{"name"', end=None, kind="length")
        engine = ScriptedEngine(cut, "done")
        told = await play(engine=engine)
        assert told.termination is Termination.FINAL_ANSWER
        assert told.tool_calls[0].status is ParseStatus.TRUNCATED
        # The turn end that the model did not write is context: not sampled, not trained.
        span = told.sampled_spans[0]
        assert told.token_ids[span.end] == CHAT.turn_end_id
        assert not told.loss_mask[span.end]
        assert span.end - span.start == len(cut.output_ids)

    async def test_a_turn_end_as_the_last_token_allowed_ends_the_turn(self) -> None:
        told = await play(reply("done", kind="length"))
        assert told.termination is Termination.FINAL_ANSWER
        assert told.token_ids == (await play(reply("done", kind="stop"))).token_ids

    async def test_no_call_hands_over_to_the_next_user_turn(self) -> None:
        told = await play(wire(call(x=0), call(x=1)), "next", wire(call(x=2)), "done", place=LONG)
        assert [m.content for m in told.messages if m.role == "user"] == ["do 0", "do 1"]
        assert told.passed
        assert told.reward == 1.0

    async def test_a_turn_that_its_cap_cut_does_not_hand_over(self) -> None:
        environment = ScriptedEnvironment()
        cut = reply("so lo", end=None, kind="length")
        told = await play(cut, environment=environment, place=LONG)
        assert environment.sessions[0].turn == 0
        assert told.spans[-1].kind is SpanKind.ASSISTANT_TEXT

    async def test_peer_21_every_tool_name_stands_in_the_prompt(self) -> None:
        engine = ScriptedEngine("done")
        await play(engine=engine, environment=ScriptedEnvironment(tools=("alpha", "beta")))
        prompt = CHAT.tokenizer.decode(engine.requests[0].input_ids)
        assert "alpha" in prompt
        assert "beta" in prompt


class TestTokens:
    async def episode(self) -> tuple[Trajectory, ScriptedEngine]:
        engine = ScriptedEngine(wire(call(x=0), call(x=1)), "next", wire(call(x=2)), "done")
        return await play(engine=engine, place=LONG), engine

    async def test_peer_19_and_20_every_prompt_extends_the_former_one_with_its_reply(self) -> None:
        told, engine = await self.episode()
        prompts = [request.input_ids for request in engine.requests]
        replies = [
            told.token_ids[len(prompt) : span.end]
            for prompt, span in zip(prompts, told.sampled_spans, strict=True)
        ]
        for (before, after), answer in zip(pairwise(prompts), replies, strict=False):
            assert after[: len(before) + len(answer)] == (*before, *answer)
        assert told.token_ids[: len(prompts[-1])] == prompts[-1]
        assert CHAT.tokenizer.decode(replies[0]) == wire(call(x=0), call(x=1))

    async def test_defect_sampled_ids_are_kept_as_they_were_sampled(self) -> None:
        # Two bytes that are no UTF-8: decoding and encoding again would give other ids.
        ids = (0xFF, 0xC3, CHAT.turn_end_id)
        entries = tuple((-0.5, token, None) for token in ids)
        meta = replace(reply().meta_info, output_token_logprobs=entries)
        told = await play(GenerateReply(meta_info=meta, output_ids=ids))
        [span] = told.sampled_spans
        assert told.token_ids[span.start : span.end] == ids
        assert told.messages[-1].content == "\ufffd\ufffd"

    async def test_spans_tile_openings_and_closings_included(self) -> None:
        told, engine = await self.episode()
        opening = CHAT.assistant_opening().token_ids
        for span, request in zip(told.sampled_spans, engine.requests, strict=True):
            assert span.start == len(request.input_ids)
            assert told.token_ids[span.start - len(opening) : span.start] == opening
        kinds = [span.kind.value for span in told.spans]
        assert kinds == [
            "system",
            "user",
            "assistant_tool_call",
            "tool_result",
            "assistant_text",
            "user",
            "assistant_tool_call",
            "tool_result",
            "assistant_final",
        ]
        tool = told.spans[3]
        assert told.token_ids[tool.start] == ord("\n")  # the closing of the turn before

    async def test_each_span_names_its_message(self) -> None:
        told, _ = await self.episode()
        for span in told.spans[1:]:
            assert span.message_index is not None
            message = told.messages[span.message_index]
            text = CHAT.tokenizer.decode(told.token_ids[span.start : span.end])
            assert message.content in text
        assert [span.segment_key for span in told.sampled_spans] == [
            f"assistant:{i}" for i in range(4)
        ]

    async def test_logprobs_and_versions_are_those_of_the_engine(self) -> None:
        told = await play(reply("a", logprob=-0.125, versions=("5", "4")), engine=None)
        [span] = told.sampled_spans
        assert told.rollout_logprobs[span.start : span.end].tolist() == [-0.125, -0.125]
        assert np.isnan(told.rollout_logprobs[: span.start]).all()
        assert span.weight_versions == (4, 5)
        assert told.oldest_version == 4

    async def test_prefix_calls_are_context(self) -> None:
        told = await play("done", place=assignment(prefix_calls=2))
        written = [s for s in told.spans if s.kind is SpanKind.ASSISTANT_TOOL_CALL]
        assert [span.sampled for span in written] == [False, False]
        assert [span.weight_versions for span in written] == [(), ()]
        assert len(told.sampled_spans) == 1

    async def test_the_record_says_what_was_played(self) -> None:
        told = await play(wire(call(x=2)), "done", member=3)
        assert (told.trajectory_id, told.group_id) == ("000004.0.3", "000004.0")
        assert (told.task_id, told.environment) == ("a", "scripted")
        assert (told.prefix_calls, told.tail_calls) == (2, 1)
        assert told.tokenizer_fingerprint == CHAT.tokenizer.fingerprint
        assert (told.sampling.temperature, told.sampling.max_new_tokens) == (1.0, 200)
        assert Trajectory.model_validate_json(told.model_dump_json()).token_ids == told.token_ids


class TestBudget:
    @pytest.mark.parametrize(
        ("tail_calls", "expected"), [(1, 4), (2, 4), (3, 6), (7, 14), (8, 16), (9, 16), (40, 16)]
    )
    def test_training_takes_two_turns_per_call_within_bounds(
        self, tail_calls: int, expected: int
    ) -> None:
        assert TRAINING_BUDGET.turns(tail_calls, 16) == expected

    @pytest.mark.parametrize("tail_calls", range(1, 9))
    def test_evaluation_takes_two_turns_per_call(self, tail_calls: int) -> None:
        assert EVALUATION_BUDGET.turns(tail_calls, 16) == 2 * tail_calls

    async def test_an_episode_keeps_to_its_budget(self) -> None:
        for budget, expected in ((TRAINING_BUDGET, 4), (EVALUATION_BUDGET, 2)):
            told = await play(*different_calls(), budget=budget)
            assert len(told.sampled_spans) == expected
        told = await play(*different_calls(), place=LONG, max_turns=3)
        assert len(told.sampled_spans) == 3


class TestSeeds:
    async def seeds(self, place: Assignment, member: int, seed: int = 0) -> list[int | None]:
        engine = ScriptedEngine(wire(call(x=2)), "done")
        await play(engine=engine, place=place, member=member, seed=seed)
        return [request.sampling_params.sampling_seed for request in engine.requests]

    async def test_defect_one_default_seed_makes_a_whole_group_identical(self) -> None:
        place = assignment()
        others = [
            place.model_copy(update=change)
            for change in ({"ticket": 5}, {"attempt": 1}, {"prefix_calls": 2})
        ]
        drawn = [await self.seeds(place, member) for member in range(8)]
        drawn += [await self.seeds(other, 0) for other in others[:2]]
        drawn += [await self.seeds(place, 0, seed=1)]
        flat = [seed for seeds in drawn for seed in seeds]
        assert None not in flat
        assert len(set(flat)) == len(flat) == 22

    async def test_the_same_place_gets_the_same_seeds(self) -> None:
        assert await self.seeds(assignment(), 2) == await self.seeds(assignment(), 2)


def test_peer_19_a_former_token_that_changes_is_found() -> None:
    player = EpisodePlayer(stage(), engine_policy(ScriptedEngine("x")), seed=0, clock=FakeClock())
    episode = _Episode(player, assignment(), 0, seed=0)
    episode._transcript.add_messages([Message(role="user", content="go")])
    episode._seen = episode._extended_prompt()
    episode._transcript.token_ids[1] += 1
    with pytest.raises(PrefixPropertyError, match="at token 1"):
        episode._extended_prompt()

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from miniverl_dist.errors import (
    DeadlineError,
    EngineError,
    NotFiniteError,
    ReplyMismatchError,
)
from miniverl_dist.generate_api.wire import FinishType, GenerateReply
from miniverl_dist.schemas.routing import RoutingShape, encode_engine_rows
from rollout_server.policies import (
    DONE_TEXT,
    Moment,
    Turn,
    null_policy,
    oracle_policy,
    turn_seed,
)
from tests.fake_stage import (
    CHAT,
    ScriptedEngine,
    ScriptedEnvironment,
    ScriptedSession,
    call,
    engine_policy,
    reply,
    wire,
)

END, STOP = CHAT.turn_end_id, CHAT.tokenizer.special_id("<|stop|>")
MOMENT = Moment(seed=77, room=50, turns_since_user=0)


def session(prefix_calls: int = 0) -> ScriptedSession:
    return ScriptedEnvironment().start("a", prefix_calls=prefix_calls)


async def act(answer: GenerateReply, moment: Moment = MOMENT) -> Turn:
    return await engine_policy(ScriptedEngine(answer)).act([1, 2], session(), moment)


class TestRequest:
    async def test_it_asks_with_ids_seed_and_all_stop_tokens(self) -> None:
        engine = ScriptedEngine("hi")
        await engine_policy(engine).act([5, 6, 7], session(), MOMENT)
        [request] = engine.requests
        assert request.input_ids == (5, 6, 7)
        assert request.return_logprob
        params = request.sampling_params
        assert (params.temperature, params.sampling_seed) == (0.7, 77)
        assert params.stop_token_ids == (END, STOP)
        assert (params.top_p, params.top_k, params.min_p) == (1.0, -1, 0.0)

    @pytest.mark.parametrize(("room", "expected"), [(50, 50), (200, 200), (999, 200), (1, 1)])
    async def test_no_more_tokens_than_fit_and_than_config_allows(
        self, room: int, expected: int
    ) -> None:
        engine = ScriptedEngine("hi")
        await engine_policy(engine).act([1], session(), Moment(0, room, 0))
        assert engine.requests[0].sampling_params.max_new_tokens == expected


class TestReply:
    @pytest.mark.parametrize(
        ("end", "kind", "finish"),
        [
            ("<|end|>", "stop", "turn_end"),
            ("<|end|>", "length", "turn_end"),
            ("<|stop|>", "stop", "other_end"),
            (None, "stop", "other_end"),
            (None, "length", "length"),
        ],
    )
    async def test_how_a_turn_ended(self, end: str | None, kind: FinishType, finish: str) -> None:
        assert (await act(reply("hi", end=end, kind=kind))).finish == finish

    async def test_ids_and_logprobs_are_kept_stop_token_included(self) -> None:
        answer = reply("hi", logprob=-0.25)
        turn = await act(answer)
        assert turn.token_ids == answer.output_ids
        assert turn.token_ids[-1] == END
        assert turn.logprobs == (-0.25,) * 3

    async def test_an_empty_reply_ends_the_episode_as_no_answer(self) -> None:
        turn = await act(reply("", end=None))
        assert (turn.token_ids, turn.logprobs, turn.finish) == ((), (), "other_end")

    async def test_versions_come_oldest_first(self) -> None:
        assert (await act(reply("a", versions=("10", "9")))).weight_versions == (9, 10)
        assert (await act(reply("a", versions=()))).weight_versions == (3,)

    @pytest.mark.parametrize("versions", [("default",), ("3", "v4"), ("",)])
    async def test_an_unknown_version_is_refused(self, versions: tuple[str, ...]) -> None:
        with pytest.raises(EngineError, match="expected the number of a published policy version"):
            await act(reply("a", versions=versions))

    @pytest.mark.parametrize("value", [None, float("nan"), float("-inf"), -65504.0, 0.25])
    async def test_defect_no_logprob_is_never_zero(self, value: float | None) -> None:
        with pytest.raises(NotFiniteError, match="unusable"):
            await act(reply("hi", logprob=value))

    async def test_logprobs_of_other_ids_are_refused(self) -> None:
        answer = reply("hi")
        other = reply("ho").meta_info
        shorter = replace(
            answer.meta_info,
            output_token_logprobs=(answer.meta_info.output_token_logprobs or ())[1:],
        )
        missing = replace(answer.meta_info, output_token_logprobs=None)
        for meta, words in ((other, "other ids"), (shorter, "other ids"), (missing, "missing")):
            with pytest.raises(EngineError, match=f"returned 3 ids whose logprobs are .*{words}"):
                await act(GenerateReply(meta_info=meta, output_ids=answer.output_ids))

    async def test_an_aborted_request_is_an_engine_error(self) -> None:
        with pytest.raises(EngineError, match="aborted"):
            await act(reply("hi", kind="abort"))

    async def test_an_engine_that_does_not_answer_is_a_deadline(self) -> None:
        policy = engine_policy(ScriptedEngine(asyncio.Event()), deadline_s=0.01)
        with pytest.raises(DeadlineError, match=r"scripted-0 gave no reply in 0\.01 s"):
            await policy.act([1], session(), MOMENT)


class TestScripts:
    async def test_the_null_policy_says_that_it_is_done(self) -> None:
        turn = await null_policy(CHAT).act([1], session(), MOMENT)
        assert CHAT.tokenizer.decode(turn.token_ids) == DONE_TEXT
        assert turn.token_ids[-1] == END
        assert (turn.logprobs, turn.weight_versions, turn.finish) == (None, (), "turn_end")

    async def test_the_oracle_makes_all_calls_of_a_user_turn_and_then_hands_over(self) -> None:
        policy, playing = oracle_policy(CHAT, lambda calls: wire(*calls)), session()
        turn = await policy.act([1], playing, MOMENT)
        assert CHAT.tokenizer.decode(turn.token_ids) == wire(call(x=0), call(x=1))
        later = Moment(seed=0, room=50, turns_since_user=1)
        assert CHAT.tokenizer.decode((await policy.act([1], playing, later)).token_ids) == DONE_TEXT

    async def test_the_oracle_makes_only_what_is_still_due(self) -> None:
        policy = oracle_policy(CHAT, lambda calls: wire(*calls))
        turn = await policy.act([1], session(prefix_calls=1), MOMENT)
        assert CHAT.tokenizer.decode(turn.token_ids) == wire(call(x=1))


def test_turns_of_one_episode_and_of_another_have_seeds_of_their_own() -> None:
    seeds = {turn_seed(episode, turn) for episode in range(20) for turn in range(20)}
    assert len(seeds) == 400


class TestRouting:
    SHAPE = RoutingShape(num_layers=2, experts_per_token=2, num_experts=8)

    async def act(self, routed_experts: str | None) -> tuple[Turn, ScriptedEngine]:
        made = reply("x")
        meta = replace(made.meta_info, routed_experts=routed_experts)
        engine = ScriptedEngine(replace(made, meta_info=meta))
        policy = engine_policy(engine, routing=self.SHAPE)
        return await policy.act([1, 2, 3], session(), MOMENT), engine

    async def test_it_is_asked_for_and_covers_all_but_the_last_token(self) -> None:
        rows = np.random.default_rng(0).integers(0, 8, (4, 2, 2)).astype("uint8")
        turn, engine = await self.act(encode_engine_rows(rows))
        assert engine.requests[0].return_routed_experts
        np.testing.assert_array_equal(turn.routed_experts, rows)

    async def test_without_a_replay_it_is_neither_asked_for_nor_taken(self) -> None:
        made = reply("x")
        meta = replace(made.meta_info, routed_experts="%%%%")
        engine = ScriptedEngine(replace(made, meta_info=meta))
        turn = await engine_policy(engine).act([1], session(), MOMENT)
        assert not engine.requests[0].return_routed_experts
        assert turn.routed_experts is None

    async def test_an_engine_that_leaves_it_out_has_failed(self) -> None:
        with pytest.raises(EngineError, match="--enable-return-routed-experts"):
            await self.act(None)

    async def test_another_models_routing_is_refused(self) -> None:
        with pytest.raises(ReplyMismatchError, match="expected 4 rows of 2 layers"):
            await self.act(encode_engine_rows(np.zeros((4, 3, 2), dtype="uint8")))

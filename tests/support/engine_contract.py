"""What every rollout engine does, whatever samples: one set of checks for all of them.

A check gets a ``Subject`` and may leave any version of the weights behind. Versions rise from check
to check, since an engine may be shared by all of them.

Shapes: T tokens, V vocabulary rows.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miniverl_dist.errors import EngineError, GenerateApiError, PublishError
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest, SamplingParams
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import weights_checksum
from rollout_server.engines.base import Engine

Tensors = dict[str, NDArray[Any]]


@dataclass
class Subject:
    """An engine, the weights it can be given, and what they say without any engine."""

    engine: Engine
    tensors: Callable[[int], Tensors]
    """Weights by seed."""
    logits: Callable[[int, Sequence[int]], NDArray[np.float32]]
    """[T, V] of the weights of a seed, for real ids."""
    ids: Sequence[int]
    """The vocabulary: real ids, in the order of its rows."""
    max_context_tokens: int
    tolerance: float
    """Nats, between engine and plain model."""
    is_running: Callable[[], bool]
    """Whether a request has got beyond the engine's door."""
    versions: Any = field(default_factory=lambda: itertools.count(1))

    async def load(self, seed: int) -> int:
        """Give the engine the weights of a seed as a new version, which is returned."""
        version = next(self.versions)
        tensors = self.tensors(seed)
        snapshot = WeightSnapshot(version, tensors, weights_checksum(tensors))
        assert await self.engine.load_weights(snapshot) == snapshot.checksum
        assert self.engine.weight_version == version
        return version

    async def until_running(self) -> None:
        """Wait until a request runs."""
        async with asyncio.timeout(10):
            while not self.is_running():  # noqa: ASYNC110 - an engine has no event for it
                await asyncio.sleep(0)

    def prompt(self, length: int, seed: int = 0) -> tuple[int, ...]:
        rng = np.random.default_rng(seed)
        return tuple(int(i) for i in rng.choice(np.asarray(self.ids), length))

    async def ask(self, prompt: Sequence[int], **params: Any) -> GenerateReply:
        request = GenerateRequest(tuple(prompt), SamplingParams(**params), return_logprob=True)
        return await asyncio.wait_for(self.engine.generate(request), 60)

    def expected(
        self, seed: int, prompt: Sequence[int], output: Sequence[int], temperature: float
    ) -> NDArray[np.float64]:
        """[len(output)] nats of the output after the prompt."""
        text = [*prompt, *output]
        logits = self.logits(seed, text)[len(prompt) - 1 : -1].astype(np.float64) / temperature
        top = logits.max(axis=-1, keepdims=True)
        totals = top[:, 0] + np.log(np.exp(logits - top).sum(axis=-1))
        rows = [list(self.ids).index(token) for token in output]
        chosen: NDArray[np.float64] = logits[np.arange(len(output)), rows] - totals
        return chosen

    def error(
        self, seed: int, prompt: Sequence[int], reply: GenerateReply, temperature: float = 1.0
    ) -> float:
        """Largest difference in nats between a reply's logprobs and the plain model's."""
        entries = reply.meta_info.output_token_logprobs
        assert entries is not None
        assert tuple(entry[1] for entry in entries) == reply.output_ids
        found = np.array([entry[0] for entry in entries], dtype=np.float64)
        expected = self.expected(seed, prompt, reply.output_ids, temperature)
        return float(np.abs(found - expected).max())


async def refuses_to_sample_without_weights(subject: Subject) -> None:
    """Only for an engine that has never had any."""
    assert subject.engine.weight_version == -1
    with pytest.raises(EngineError, match="weights"):
        await subject.ask(subject.prompt(3), max_new_tokens=1)


async def logprobs_are_those_after_temperature(subject: Subject) -> None:
    await subject.load(0)
    prompt = subject.prompt(17)
    for temperature in (1.0, 0.7, 1.6):
        reply = await subject.ask(prompt, max_new_tokens=12, temperature=temperature)
        assert subject.error(0, prompt, reply, temperature) < subject.tolerance
        # A logprob of another temperature would be far off.
        assert subject.error(0, prompt, reply, temperature + 0.5) > 100 * subject.tolerance


async def temperature_zero_takes_the_best_token(subject: Subject) -> None:
    await subject.load(0)
    prompt = subject.prompt(9)
    reply = await subject.ask(prompt, max_new_tokens=8, temperature=0.0)
    text = [*prompt, *reply.output_ids]
    best = subject.logits(0, text)[len(prompt) - 1 : -1].argmax(axis=-1)
    assert [subject.ids[row] for row in best] == list(reply.output_ids)
    assert subject.error(0, prompt, reply) < subject.tolerance


async def top_k_top_p_and_min_p_narrow_the_choice(subject: Subject) -> None:
    await subject.load(0)
    prompt = subject.prompt(9)
    greedy = await subject.ask(prompt, max_new_tokens=6, temperature=0.0)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        reply = await subject.ask(prompt, max_new_tokens=6, temperature=1.5, **narrow)
        assert reply.output_ids == greedy.output_ids, narrow
        # Logprobs ignore the narrowing: they are those of the whole vocabulary. But SGLang takes a
        # top-k of 1 for greedy decoding, whose temperature is 1.
        if "top_k" not in narrow:
            assert subject.error(0, prompt, reply, 1.5) < subject.tolerance, narrow


async def stop_ids_end_the_text_and_stay_in_it(subject: Subject) -> None:
    await subject.load(0)
    prompt = subject.prompt(9)
    free = await subject.ask(prompt, max_new_tokens=6, temperature=0.0)
    assert free.meta_info.finish_reason is not None
    assert free.meta_info.finish_reason.type == "length"
    assert free.meta_info.finish_reason.length == len(free.output_ids) == 6
    stop = free.output_ids[3]
    end = free.output_ids.index(stop) + 1
    foreign = max(subject.ids) + 1
    reply = await subject.ask(
        prompt, max_new_tokens=6, temperature=0.0, stop_token_ids=(stop, foreign)
    )
    assert reply.output_ids == free.output_ids[:end]
    assert reply.meta_info.finish_reason is not None
    assert reply.meta_info.finish_reason.type == "stop"
    assert reply.meta_info.finish_reason.matched == stop


async def outputs_end_where_the_context_does(subject: Subject) -> None:
    await subject.load(0)
    prompt = subject.prompt(subject.max_context_tokens - 3)
    reply = await subject.ask(prompt, max_new_tokens=50)
    assert len(reply.output_ids) == 3
    assert reply.meta_info.finish_reason is not None
    assert reply.meta_info.finish_reason.type == "length"
    assert subject.error(0, prompt, reply) < subject.tolerance


async def wrong_requests_are_refused_and_harm_nobody(subject: Subject) -> None:
    await subject.load(0)
    good = subject.prompt(5)
    beside = asyncio.create_task(subject.ask(good, max_new_tokens=30))
    foreign = next(i for i in itertools.count() if i not in set(subject.ids))
    prompts: list[tuple[Sequence[int], dict[str, Any]]] = [
        ((), {}),
        ((*good, foreign), {}),
        ((*good, max(subject.ids) + 10_000), {}),
        ((*good, -1), {}),
        (subject.prompt(subject.max_context_tokens), {}),
        (good, {"temperature": -1.0}),
        (good, {"temperature": float("nan")}),
        (good, {"top_p": 0.0}),
        (good, {"top_k": 0}),
        (good, {"min_p": 1.5}),
    ]
    for prompt, params in prompts:
        with pytest.raises(GenerateApiError):
            await subject.ask(prompt, **{"max_new_tokens": 4} | params)
    assert len((await beside).output_ids) == 30


async def many_requests_get_their_own_answers(subject: Subject) -> None:
    await subject.load(0)
    prompts = [subject.prompt(3 + index % 7, seed=index) for index in range(20)]
    # Siblings share a prompt, and draw differently.
    prompts += [prompts[0]] * 4
    asked = (subject.ask(prompt, max_new_tokens=16) for prompt in prompts)
    replies = await asyncio.gather(*asked)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert subject.error(0, prompt, reply) < subject.tolerance
    siblings = {reply.output_ids for reply in (replies[0], *replies[-4:])}
    assert len(siblings) == 5


async def a_cancelled_request_frees_what_it_held(subject: Subject) -> None:
    await subject.load(0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(
            subject.ask(subject.prompt(4), max_new_tokens=subject.max_context_tokens), 0.02
        )
    await subject.load(1)
    assert len((await subject.ask(subject.prompt(4), max_new_tokens=3)).output_ids) == 3


async def new_weights_serve_everything_asked_after_them(subject: Subject) -> None:
    """The whole prompt lies in the cache when the weights change."""
    prompt = subject.prompt(60)
    for seed in (0, 1, 0):
        version = await subject.load(seed)
        for _ in range(2):
            reply = await subject.ask(prompt, max_new_tokens=4, temperature=0.7)
            assert {span.version for span in reply.meta_info.weight_versions} == {str(version)}
            assert subject.error(seed, prompt, reply, 0.7) < subject.tolerance
    assert subject.error(1, prompt, reply, 0.7) > 100 * subject.tolerance


async def running_requests_end_under_the_weights_they_began_with(subject: Subject) -> None:
    version = await subject.load(0)
    prompt = subject.prompt(5)
    running = asyncio.create_task(subject.ask(prompt, max_new_tokens=60))
    await subject.until_running()
    await subject.load(1)
    reply = await running
    assert {span.version for span in reply.meta_info.weight_versions} == {str(version)}
    assert subject.error(0, prompt, reply) < subject.tolerance


async def foreign_weights_are_refused_and_the_former_ones_kept(subject: Subject) -> None:
    version = await subject.load(0)
    tensors = subject.tensors(1)
    name = sorted(tensors)[len(tensors) // 2]
    spoilt: dict[str, Tensors] = {
        "a tensor is missing": {key: value for key, value in tensors.items() if key != name},
        "one that the model does not have": tensors | {"model.nope.weight": tensors[name]},
        "another shape": tensors | {name: np.concatenate([tensors[name]] * 2)},
        "another dtype": tensors | {name: tensors[name].astype(np.float64)},
    }
    prompt = subject.prompt(6)
    for case, bad in spoilt.items():
        with pytest.raises(PublishError):
            await subject.engine.load_weights(WeightSnapshot(99_999, bad, weights_checksum(bad)))
        assert subject.engine.weight_version == version, case
        reply = await subject.ask(prompt, max_new_tokens=4)
        assert reply.meta_info.weight_version == str(version)
        assert subject.error(0, prompt, reply) < subject.tolerance, case


async def a_snapshot_that_changed_on_its_way_is_noticed(subject: Subject) -> None:
    """The checksum that comes back is that of the weights held, not the one that was sent."""
    sent, arrived = subject.tensors(0), subject.tensors(1)
    checksum = weights_checksum(sent)
    version = next(subject.versions)
    assert await subject.engine.load_weights(WeightSnapshot(version, arrived, checksum)) != checksum


async def closing_ends_requests_as_abort(subject: Subject) -> None:
    """Leaves the engine closed."""
    await subject.load(0)
    running = [
        asyncio.create_task(subject.ask(subject.prompt(4), max_new_tokens=100)) for _ in range(3)
    ]
    await subject.until_running()
    await subject.engine.close()
    for reply in await asyncio.gather(*running):
        assert reply.meta_info.finish_reason is not None
        assert reply.meta_info.finish_reason.type == "abort"
    await subject.engine.close()
    with pytest.raises(EngineError):
        await subject.ask(subject.prompt(4), max_new_tokens=1)
    with pytest.raises(PublishError):
        await subject.load(0)


Check = Callable[[Subject], Awaitable[None]]

SHARED: tuple[Check, ...] = (
    logprobs_are_those_after_temperature,
    temperature_zero_takes_the_best_token,
    top_k_top_p_and_min_p_narrow_the_choice,
    stop_ids_end_the_text_and_stay_in_it,
    outputs_end_where_the_context_does,
    wrong_requests_are_refused_and_harm_nobody,
    many_requests_get_their_own_answers,
    a_cancelled_request_frees_what_it_held,
    new_weights_serve_everything_asked_after_them,
    running_requests_end_under_the_weights_they_began_with,
    foreign_weights_are_refused_and_the_former_ones_kept,
    a_snapshot_that_changed_on_its_way_is_noticed,
)
"""Checks in any order; an engine may be shared by them."""


def name_of(check: Check) -> str:
    """For test ids."""
    return check.__name__

"""A teacher's servers in a recipe, and what of it the client gets."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from actors.teacher_scoring import breaker_events, client_limits, prefix_limits, teacher_scorer
from miniverl_dist.config.roles import BreakerConfig, TeacherConfig
from miniverl_dist.errors import ServerUnavailableError
from miniverl_dist.generate_api.breaker import BreakerLimits
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.observability.events import Event
from tests.support.faulty_server import entries_of, reply_with
from tests.support.http_faults import RESET, Act, FakeClock, reply, scripted_server

URL = "http://one:30000"
ON_FAILURE = ("drop", "wait", "fail")


def teacher(**changes: Any) -> TeacherConfig:
    fields = {"url": URL, "rendering": "raw"} | changes
    return TeacherConfig.model_validate_json(json.dumps(fields))


def refused(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        teacher(**changes)
    [found] = caught.value.errors()
    return str(found["ctx"]["error"])


def test_more_servers_stand_beside_the_first() -> None:
    assert teacher().all_urls == (URL,)
    assert teacher(urls=["http://two", "https://three/x"]).all_urls == (
        URL,
        "http://two",
        "https://three/x",
    )
    model = {"model": {"kind": "hf", "path": "somewhere"}, "url": None}
    assert teacher(**model).all_urls == ()
    assert "give that one as well" in refused(**model, urls=["http://two"])


@pytest.mark.parametrize("url", ["two:30000", "ftp://t", "", "http://"])
def test_every_url_says_how_to_ask(url: str) -> None:
    assert refused(urls=[url]) == f"teacher.url: expected http(s)://host[:port], found {url!r}"


@pytest.mark.parametrize("urls", [[URL], [URL + "/"], ["http://two", "http://two"]])
def test_no_server_is_named_twice(urls: list[str]) -> None:
    assert "repeat a server" in refused(urls=urls)


def test_defaults_of_config_and_client_are_the_same() -> None:
    assert replace(client_limits(teacher()), outlast_breaker=False) == ClientLimits()
    assert BreakerLimits(**BreakerConfig().model_dump()) == BreakerLimits()


def test_every_limit_of_the_client_comes_from_config() -> None:
    changed = {
        "deadline_s": 7.0,
        "request_deadline_s": 3.0,
        "request_deadline_s_per_1k_tokens": 0.5,
        "max_retries": 9,
        "retry_backoff_s": 0.25,
        "max_inflight_tokens": 1234,
        "breaker": {"failures_in_a_row": 2, "failure_share": 0.9, "window": 3, "open_s": 1.5},
    }
    assert asdict(client_limits(teacher(**changed))) == changed | {"outlast_breaker": True}


def test_a_teacher_that_is_away_is_waited_for_where_a_score_may_come_late() -> None:
    waits = {how: client_limits(teacher(on_failure=how)).outlast_breaker for how in ON_FAILURE}
    assert waits == {"drop": True, "wait": True, "fail": False}
    # A server of the run's own is started anew instead, by whoever hears of it.
    own = teacher(model={"kind": "hf", "path": "somewhere"}, url=None)
    assert not client_limits(own).outlast_breaker


def test_prefix_scoring_needs_a_server_and_a_smaller_share() -> None:
    assert not teacher().prefix_scoring
    model = {"model": {"kind": "hf", "path": "somewhere"}, "url": None}
    assert "teacher.prefix_scoring goes with `url`" in refused(**model, prefix_scoring=True)
    little = {"max_inflight_tokens": 40_000}
    teacher(**little)  # says nothing where it is off
    assert "at most max_inflight_tokens (40000)" in refused(**little, prefix_scoring=True)
    teacher(**little, prefix_scoring=True, prefix_inflight_tokens=40_000)


def test_prefix_scores_have_a_client_of_their_own() -> None:
    asked = teacher(
        prefix_scoring=True, prefix_inflight_tokens=99, max_retries=7, urls=["http://two"]
    )
    limits = prefix_limits(asked)
    assert (limits.max_inflight_tokens, limits.max_retries) == (99, 0)
    shared = {"max_inflight_tokens": 1, "max_retries": 1, "outlast_breaker": True}
    assert not limits.outlast_breaker  # the first to be left out
    assert replace(limits, **shared) == replace(client_limits(asked), **shared)


def right(body: dict[str, Any]) -> Act:
    return reply(body=reply_with(body, entries_of(body)))


async def test_a_run_is_told_when_a_server_is_left_alone_and_when_it_is_back() -> None:
    told: list[tuple[Event, str, str]] = []
    clock = FakeClock()
    breaker = {"failures_in_a_row": 1, "open_s": 4.0}
    limits = client_limits(teacher(max_retries=0, breaker=breaker, on_failure="fail"))
    async with (
        scripted_server(RESET, right) as server,
        GenerateClient(
            server.url,
            limits=limits,
            clock=clock,
            on_breaker=breaker_events(lambda *event: told.append(event)),
        ) as client,
    ):
        for _ in range(3):
            with pytest.raises(ServerUnavailableError):
                await client.score((1, 2, 3), 1)
        clock.time += 4
        await client.score((1, 2, 3), 1)
    assert [(event, url) for event, url, _ in told] == [
        (Event.TEACHER_LEFT_ALONE, server.url),
        (Event.TEACHER_TRIED, server.url),
        (Event.TEACHER_BACK, server.url),
    ]


@pytest.mark.parametrize("is_own", [False, True], ids=["elsewhere", "of the run"])
async def test_a_server_with_a_shorter_context_is_an_event_before_the_run(is_own: bool) -> None:
    told: list[tuple[Event, str, str]] = []
    info = reply(body={"model_path": "m", "max_context_tokens": 384})
    async with scripted_server(info) as server:
        config = teacher(url=server.url, probe=False, tokenizer="qwen3.6")
        side: Any = None  # nothing is rendered
        async with teacher_scorer(
            config,
            side,
            Path(),
            FakeClock(),
            served_at=server.url if is_own else None,
            tell=lambda *event: told.append(event),
        ):
            pass
        url = server.url
    if is_own:  # it is as long as the model that the run has chosen
        assert told == []
    else:
        [(event, where, reason)] = told
        assert (event, where) == (Event.TEACHER_CONTEXT_SHORT, url)
        assert "at most 384 tokens, teacher.max_prefill_tokens is 32768" in reason


async def test_a_server_that_is_not_there_names_its_field_before_the_run() -> None:
    async with scripted_server(RESET) as server:
        side: Any = None
        config = teacher(url=server.url, probe=False, tokenizer="qwen3.6")
        with pytest.raises(ServerUnavailableError, match=r"^teacher\.url: .*resume RUN"):
            async with teacher_scorer(config, side, Path(), FakeClock()):
                pass
        with pytest.raises(ServerUnavailableError, match=r"^http"):
            async with teacher_scorer(config, side, Path(), FakeClock(), served_at=server.url):
                pass

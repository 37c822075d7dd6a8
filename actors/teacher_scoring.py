"""Who asks the teacher for scores: its model in this process, or a client of its servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.student_side import StudentSide
from actors.teacher_files import TEACHER_FOLDER
from actors.teacher_side import Renderer, teacher_tokenizer
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import (
    BackboneTeacherConfig,
    HFModelConfig,
    TeacherConfig,
)
from miniverl_dist.generate_api.breaker import BreakerLimits, BreakerState
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.generate_api.endpoints import OnBreaker
from miniverl_dist.generate_api.headers import read_headers_file
from miniverl_dist.generate_api.probe import probe_text
from miniverl_dist.observability.events import Event
from miniverl_dist.ports import Clock, TeacherScorer
from miniverl_dist.tokens.tokenizer import TokenizerLike
from teacher_server.client import (
    HttpTeacher,
    LocalTeacher,
    TeacherIdentity,
    explained_at_start,
)
from teacher_server.prefix_scoring import KeptScores, PrefixScorer

if TYPE_CHECKING:
    from miniverl_dist.backends.hf_teacher import BackboneTeacher
    from teacher_server.scorer import PrefillScorer

PROBE_TEXT = (
    "def add(first, second):\n    return first + second\n\n"
    "The sum of 19 and 23 is 42; a list of them, sorted, is [19, 23].\n"
) * 2
"""Scored before a run starts; long enough that the second time comes from the prefix cache."""
_BREAKER_EVENTS = {
    BreakerState.OPEN: Event.TEACHER_LEFT_ALONE,
    BreakerState.HALF_OPEN: Event.TEACHER_TRIED,
    BreakerState.CLOSED: Event.TEACHER_BACK,
}


@asynccontextmanager
async def teacher_scorer(
    config: TeacherConfig,
    side: StudentSide,
    run_dir: Path,
    clock: Clock,
    *,
    served_at: str | None = None,
    tell: Callable[[Event, str, str], None] | None = None,
    kept_scores: KeptScores | None = None,
    backbone: BackboneTeacher | None = None,
) -> AsyncIterator[TeacherScorer]:
    """The teacher behind its port: called directly, or over HTTP when ``url`` is set.

    Args:
        config: Of the teacher.
        side: The student's half of the run.
        run_dir: Where a fitted teacher lies.
        clock: For deadlines.
        served_at: URL of a server that the run has launched for a model of its own.
        tell: Takes event, server and reason when a server is left alone, or is back.
        kept_scores: Of `prefix_scorer`, where there is one.
        backbone: The teacher that shares the student's, where it is that one.

    Raises:
        TokenizerMismatchError: the server reads ids of another tokenizer.
        GenerateApiError: the server does not answer.
        TeacherError: it scores a text differently each time.
    """
    tokenizer = teacher_tokenizer(config, run_dir)
    renderer = Renderer(config, side, tokenizer)
    urls = config.all_urls if served_at is None else (served_at,)
    if not urls:
        scorer = load_teacher(config, run_dir, backbone)
        local = _local_teacher(config, scorer, renderer, tokenizer, clock)
        try:
            yield local
        finally:
            await local.close()
        return
    headers = read_headers_file(config.headers_file) if config.headers_file else {}
    async with GenerateClient(
        urls,
        limits=client_limits(config),
        headers=headers,
        clock=clock,
        on_breaker=None if tell is None else breaker_events(tell),
    ) as client:
        teacher = _http_teacher(config, client, renderer, tokenizer, clock)
        if kept_scores is not None:
            teacher.reuse(kept_scores)
        is_own = served_at is not None
        with nullcontext() if is_own else explained_at_start():
            await _check_servers(config, teacher, tokenizer, None if is_own else tell)
        yield teacher


def _http_teacher(
    config: TeacherConfig,
    client: GenerateClient,
    renderer: Renderer,
    tokenizer: TokenizerLike,
    clock: Clock,
) -> HttpTeacher:
    return HttpTeacher(
        client,
        renderer,
        TeacherIdentity("http-teacher", tokenizer.fingerprint, tokenizer.name),
        max_prefill_tokens=config.max_prefill_tokens,
        deadline_s=config.deadline_s,
        wait=config.on_failure == "wait",
        clock=clock,
    )


async def _check_servers(
    config: TeacherConfig,
    teacher: HttpTeacher,
    tokenizer: TokenizerLike,
    tell: Callable[[Event, str, str], None] | None,
) -> None:
    """Before a run: what the servers read, and that their scores stay; see `teacher_scorer`."""
    await teacher.require_same_tokenizer()
    if config.probe:
        text = probe_text(tokenizer.encode(PROBE_TEXT))
        await teacher.require_stable_scores(text, tolerance=config.probe_tolerance)
    for url, limit in teacher.short_contexts.items():
        reason = (
            f"it takes texts of at most {limit} tokens, teacher.max_prefill_tokens is "
            f"{config.max_prefill_tokens}: longer ones are refused as too_long"
        )
        if tell is not None:
            tell(Event.TEACHER_CONTEXT_SHORT, url, reason)


def prefix_scorer(
    config: RunConfig, side: StudentSide, run_dir: Path, clock: Clock
) -> PrefixScorer | None:
    """What scores episodes while they run, with connections of its own; None where it is off."""
    teacher = config.teacher
    if teacher is None or not teacher.prefix_scoring or not config.uses_teacher:
        return None
    headers = read_headers_file(teacher.headers_file) if teacher.headers_file else {}
    return PrefixScorer(
        GenerateClient(
            teacher.all_urls, limits=prefix_limits(teacher), headers=headers, clock=clock
        ),
        Renderer(teacher, side, teacher_tokenizer(teacher, run_dir)),
        max_prefill_tokens=teacher.max_prefill_tokens,
    )


def prefix_limits(config: TeacherConfig) -> ClientLimits:
    """What scores of running episodes may take: less, and never twice."""
    return replace(
        client_limits(config),
        max_inflight_tokens=config.prefix_inflight_tokens,
        max_retries=0,
        outlast_breaker=False,
    )


def breaker_events(tell: Callable[[Event, str, str], None]) -> OnBreaker:
    """Tell of a server that is left alone, tried, or back."""
    return lambda url, state: tell(_BREAKER_EVENTS[state], url, "hangs or broken connections")


def client_limits(config: TeacherConfig) -> ClientLimits:
    """What config lets the client of the teacher take."""
    return ClientLimits(
        deadline_s=config.deadline_s,
        request_deadline_s=config.request_deadline_s,
        request_deadline_s_per_1k_tokens=config.request_deadline_s_per_1k_tokens,
        max_retries=config.max_retries,
        retry_backoff_s=config.retry_backoff_s,
        max_inflight_tokens=config.max_inflight_tokens,
        breaker=BreakerLimits(**config.breaker.model_dump()),
        # Nobody starts a teacher behind `url` anew: its own restart is waited for.
        outlast_breaker=config.url is not None and config.on_failure != "fail",
    )


def load_teacher(
    config: TeacherConfig, run_dir: Path, backbone: BackboneTeacher | None = None
) -> PrefillScorer:
    """The teacher's model, in this process; that over the student's backbone is given.

    Its softmax covers its tokenizer's ids, as the student's does, and no padding of its projection.
    """
    from teacher_server.batching import BatchLimits
    from teacher_server.scorer import PrefillScorer, load_scorer

    if backbone is not None:
        return PrefillScorer(backbone, name=_name(config))
    if isinstance(config.model, HFModelConfig):
        return load_scorer(
            config.model.path,
            dtype=config.model.dtype,
            limits=BatchLimits(),
            num_ids=teacher_tokenizer(config, run_dir).vocab_size,
        )
    return load_scorer(run_dir / TEACHER_FOLDER)


def _name(config: TeacherConfig) -> str:
    """What scores say of a teacher in this process; no path."""
    model = config.model
    if isinstance(model, HFModelConfig):
        return model.path.name
    if isinstance(model, BackboneTeacherConfig):
        adapter = "" if model.adapter is None else f" with adapter {model.adapter.name}"
        return f"the student's backbone{adapter}"
    return "toy-teacher"


def _local_teacher(
    config: TeacherConfig,
    scorer: PrefillScorer,
    renderer: Renderer,
    tokenizer: TokenizerLike,
    clock: Clock,
) -> LocalTeacher:
    return LocalTeacher(
        scorer,
        renderer,
        TeacherIdentity(_name(config), tokenizer.fingerprint),
        max_prefill_tokens=min(config.max_prefill_tokens, scorer.max_context_tokens),
        deadline_s=config.deadline_s,
        clock=clock,
    )

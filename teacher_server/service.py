"""Our own scorer as a service: from its config to a server that runs until a signal."""

from __future__ import annotations

import json
from collections.abc import Callable
from urllib.parse import urlsplit

from miniverl_dist.config.serve import LocalTeacherService
from miniverl_dist.errors import ConfigError, MissingDependencyError, install_hint
from miniverl_dist.generate_api.app import serve_until_signal
from miniverl_dist.generate_api.bearer import read_token_file
from teacher_server.app import ServiceLimits, build_teacher_app
from teacher_server.batching import BatchLimits, TextScorer

Announce = Callable[[str, str], None]
"""Told (base URL, model) once the server answers."""


def announcement(url: str, model: str) -> str:
    """The JSON line that says where a server answers."""
    return json.dumps({"url": url, "port": urlsplit(url).port, "model": model})


async def serve_local(
    config: LocalTeacherService, announce: Announce, stopping: Callable[[], None] = lambda: None
) -> None:
    """Load the model, serve it, and drain at SIGTERM or SIGINT.

    Raises:
        ConfigError: no model, no usable token, or a queue that is too short for the model.
        MissingDependencyError: torch or transformers is not installed.
        OSError: the port is taken.
    """
    token = None if config.token_file is None else read_token_file(config.token_file)
    scorer = load_local(config)
    if config.max_queued_tokens < scorer.max_context_tokens:
        raise ConfigError(
            f"max_queued_tokens is {config.max_queued_tokens}, but one text may have "
            f"{scorer.max_context_tokens} tokens and would never be admitted: raise it"
        )
    await serve_until_signal(
        build_teacher_app(scorer, limits=service_limits(config), token=token),
        host=config.host,
        port=config.port,
        shutdown_deadline_s=config.drain_deadline_s,
        announce=lambda url: announce(url, scorer.name),
        stopping=stopping,
    )


def load_local(config: LocalTeacherService) -> TextScorer:
    """The scorer that a config names."""
    try:
        from teacher_server.scorer import load_scorer, set_num_threads
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"scoring needs {error.name}: {install_hint('local')}"
        ) from error

    if config.num_threads is not None:
        set_num_threads(config.num_threads)
    limits = BatchLimits(
        max_batch_tokens=config.max_batch_tokens,
        prefix_cache_tokens=config.prefix_cache_tokens,
    )
    return load_scorer(config.model, dtype=config.dtype, device=config.device, limits=limits)


def service_limits(config: LocalTeacherService) -> ServiceLimits:
    """The server's part of a config."""
    return ServiceLimits(
        max_queued_tokens=config.max_queued_tokens,
        max_body_bytes=config.max_body_bytes,
        max_batch_size=config.max_batch_size,
        max_requests=config.max_requests,
        max_top_logprobs=config.max_top_logprobs,
        body_deadline_s=config.body_deadline_s,
        score_deadline_s=config.score_deadline_s,
        max_retry_after_s=config.max_retry_after_s,
    )

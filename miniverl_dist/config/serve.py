"""The teacher as a service of its own: what `miniverl-dist serve teacher` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from miniverl_dist.config.base import (
    ConfigModel,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from miniverl_dist.config.sglang_options import TEACHER_OPTIONS, refused_options
from miniverl_dist.config.urls import server_url

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
Port = Annotated[int, Field(ge=0, le=65_535)]
Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
"""One line."""
Seconds = Annotated[float, Field(ge=0.1, le=604_800)]
"""A deadline that something can be done in; at most a week."""


def _require_token(host: str, token_file: Path | None) -> None:
    if host not in LOOPBACK_HOSTS and token_file is None:
        raise ValueError(
            f"host {host!r} can be reached from other machines: give a `token_file`, or keep to "
            "127.0.0.1"
        )


class LocalTeacherService(ConfigModel):
    """Our own scorer: a toy model, or a causal LM that transformers can load."""

    kind: Literal["local"]
    name: Name
    model: Path
    """Folder of a toy model, or of a Hugging Face one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of a Hugging Face model's weights."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")] = "cpu"
    """``cpu``, ``cuda``, ``cuda:1``; a toy model: ``cpu`` only."""
    num_threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Of torch; None leaves it to torch."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Port = 0
    """0 picks a free one; the line that the command prints says which."""
    token_file: Path | None = None
    """File with one word; requests have to bring it as ``Authorization: Bearer WORD``."""
    max_queued_tokens: PositiveInt = 1_048_576
    """Prompt tokens that wait or are at work; more get 429 and an estimate of when to come back."""
    max_requests: PositiveInt = 1024
    """Prompts that wait or are at work."""
    max_batch_size: PositiveInt = 256
    """Prompts in one HTTP request."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 67_108_864
    max_top_logprobs: NonNegativeInt = 64
    """Most likely tokens that a request may ask for at each position."""
    max_batch_tokens: PositiveInt = 8192
    """Hugging Face models: positions of one forward pass, padding included; a longer text goes
    alone."""
    prefix_cache_tokens: NonNegativeInt = 65_536
    """Hugging Face models: tokens of recent texts whose keys and values are remembered; 0: none."""
    body_deadline_s: Seconds = 60.0
    """For the body of a request to arrive."""
    score_deadline_s: Seconds = 600.0
    """For one prompt, the wait in the queue included."""
    max_retry_after_s: Annotated[float, Field(ge=1, le=604_800)] = 60.0
    """Upper end of the estimate that a 429 carries, in whole seconds."""
    drain_deadline_s: Annotated[float, Field(ge=0, le=604_800)] = 60.0
    """After SIGTERM, for the requests at work; what is not done by then is answered with 503."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_token(self.host, self.token_file)
        if self.max_batch_size > self.max_requests:
            raise ValueError(
                f"max_batch_size is {self.max_batch_size}, but max_requests ({self.max_requests}) "
                "prompts may wait or be at work at all: such a batch would be refused for ever"
            )
        return self


class SglangLaunch(ConfigModel):
    """One ``sglang.launch_server`` process and everything that it starts."""

    # Default paths are not validated: the strict rules for files take text only.

    python: Path = Field(default=Path("python3"), validate_default=False)
    """Interpreter of the environment that SGLang is installed in."""
    model: str
    """Folder, or name that SGLang resolves."""
    host: str = "127.0.0.1"
    port: PositiveInt = 30_000
    token_file: Path | None = None
    """File with one word; becomes SGLang's API key without showing up in the process list."""
    device: Literal["cuda", "cpu"] = "cuda"
    dtype: str = "auto"
    tensor_parallel: PositiveInt = 1
    data_parallel: PositiveInt = 1
    expert_parallel: PositiveInt = 1
    context_length: PositiveInt | None = None
    """None: the model's own."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of a GPU's memory, for weights and cache; None lets SGLang choose."""
    chunked_prefill_size: PositiveInt | None = None
    """Tokens of a long prompt computed at once."""
    max_running_requests: PositiveInt | None = None
    max_queued_requests: PositiveInt | None = None
    """Beyond it SGLang answers 503, which the client retries."""
    max_total_tokens: PositiveInt | None = None
    """Size of the cache; None: what the memory gives. On a CPU it has to be set."""
    enable_metrics: bool = True
    extra_args: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further options by their names without dashes in front: ``kv-cache-dtype: fp8_e4m3``; true
    gives the bare flag."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables on top of the command's own environment."""
    log_file: Path = Field(default=Path("teacher-sglang.log"), validate_default=False)
    """Gets what the server prints; appended to."""
    start_deadline_s: PositiveFloat = 1800.0
    """Until it answers: loading and warm-up."""
    stop_deadline_s: PositiveFloat = 60.0
    """From SIGTERM to SIGKILL of the whole process group."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_token(self.host, self.token_file)
        if self.device == "cpu" and self.max_total_tokens is None:
            raise ValueError(
                "max_total_tokens is missing: on a CPU, SGLang would size its cache by the memory "
                "of the whole machine"
            )
        if taken := refused_options(self.extra_args, TEACHER_OPTIONS):
            raise ValueError(
                f"extra_args: {', '.join(taken)} has a field of its own here, would show a secret "
                "in the process list, or moves the server to another address"
            )
        return self


class SglangTeacherService(ConfigModel):
    """SGLang as the teacher: launched here, or running already."""

    kind: Literal["sglang"]
    name: Name
    """Also what the server says its model is called."""
    launch: SglangLaunch | None = None
    url: str | None = None
    """Of a server that runs already: it is checked, and nothing is started."""
    attach_deadline_s: PositiveFloat = 60.0
    """For such a server to answer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.launch is None) == (self.url is None):
            raise ValueError(
                "give either `launch` (start a server) or `url` (one that runs already), found "
                f"{'both' if self.url else 'neither'}"
            )
        if self.url is not None:
            try:
                server_url(self.url)
            except ValueError as error:
                raise ValueError(f"url: {error}") from None
        return self


TeacherServiceConfig = LocalTeacherService | SglangTeacherService
TEACHER_SERVICES: dict[str, type[TeacherServiceConfig]] = {
    "local": LocalTeacherService,
    "sglang": SglangTeacherService,
}
"""By ``kind``."""

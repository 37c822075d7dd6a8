"""Who acts and who teaches: student, teacher, their models and tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from miniverl_dist.config.base import (
    ConfigModel,
    Fraction,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.config.urls import server_url


class ToyModelConfig(ConfigModel):
    """A small decoder (RMSNorm, RoPE, SwiGLU, tied embeddings) over a declared sub-vocabulary.

    Its softmax covers the real ids that occur in the task set, all byte tokens and the control
    tokens; manifest and report say so.
    """

    kind: Literal["toy"]
    num_layers: PositiveInt = 2
    hidden_size: PositiveInt = 96
    num_heads: PositiveInt = 4
    ffn_size: PositiveInt = 256
    max_context_tokens: PositiveInt = 512
    """Positions of the KV cache; longer episodes end as ``max_tokens``."""
    batch_slots: PositiveInt = 64
    """Episodes decoded at once; part of the fixed shape that makes decoding batch-invariant."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of 2 * num_heads "
                f"({2 * self.num_heads}): rotary embeddings turn pairs within a head"
            )
        return self


class HFModelConfig(ConfigModel):
    """A causal LM in a local folder that transformers can load."""

    kind: Literal["hf"]
    path: Path
    dtype: Literal["float32", "bfloat16"] = "float32"


class LoraConfig(ConfigModel):
    """Low-rank adapters: W x + (alpha / rank) B A x with W frozen, A [rank, in] and B [out, rank].

    Source:
        arXiv:2106.09685.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the adapters' inputs, in gradient passes only. The proximal pass has none, so that above 0
    ratios differ from 1 already in the first optimizer step, as if the policy had moved."""
    target_modules: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
    )
    """Last parts of the names of the linear layers that get one; the defaults are those of the
    Qwen and Llama families."""


class HFStudentConfig(ConfigModel):
    """Any causal LM in a local folder, trained on one device with transformers' own code."""

    kind: Literal["hf"]
    path: Path
    """``config.json`` and safetensors; code and pickles in it are never run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that are computed with; the optimizer keeps float32 masters, and adapters are
    float32 always."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: a GPU where there is one."""
    lora: LoraConfig | None = None
    """Train adapters and leave the folder's weights as they are; None trains every weight."""
    quantization: Literal["none", "int8", "nf4"] = "none"
    """Of the frozen weights under ``lora``; needs CUDA and bitsandbytes. Engines sample from the
    same weights taken back to ``dtype``."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations."""
    max_context_tokens: PositiveInt = 16_384
    max_microbatch_tokens: PositiveInt = 16_384
    """Padded tokens of one microbatch; a longer sequence gets one of its own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quantization != "none" and self.lora is None:
            raise ValueError(
                f"quantization {self.quantization} rounds weights that a step could not move: add "
                "`lora`, or use `quantization: none`"
            )
        if self.quantization != "none" and self.device == "cpu":
            raise ValueError(
                f"quantization {self.quantization} computes with CUDA kernels of bitsandbytes: use "
                "`device: cuda`, or `quantization: none`"
            )
        return self


class MegatronModelConfig(ConfigModel):
    """A decoder of the Qwen3 family, trained by megatron-core and sampled by another engine."""

    kind: Literal["megatron"]
    config: Path
    """Hugging Face ``config.json`` of a ``qwen3``, ``qwen3_moe`` or ``qwen3_5_moe`` text model."""
    weights: Path | None = None
    """Hugging Face folder with safetensors; None draws the weights from the run's seed."""
    vocabulary: Literal["full", "restricted"] = "full"
    """``restricted``: the softmax covers only the real ids of the task set, all byte tokens and the
    control tokens, as a toy's does; only without ``weights``. Manifest and report say so."""
    parallel: ParallelConfig = ParallelConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that are computed with; the optimizer keeps float32 masters."""
    distributed_optimizer: bool = True
    """Optimizer state is split over the data-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, those of attention, or all."""
    max_context_tokens: PositiveInt = 16_384
    max_microbatch_tokens: PositiveInt = 16_384
    """Padded tokens of one microbatch; a longer sequence gets one of its own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.vocabulary == "restricted" and self.weights is not None:
            raise ValueError(
                "vocabulary: restricted keeps only some rows of the embedding and is meant for "
                "models drawn from the seed: remove `weights`, or use `vocabulary: full`"
            )
        return self


class BackboneTeacherConfig(ConfigModel):
    """The student's own frozen weights as the teacher: in memory once, for both.

    Worth something where the teacher sees more than the student (``mode: privileged_context``), or
    has an adapter that knows more.
    """

    kind: Literal["student_backbone"]
    adapter: Path | None = None
    """Folder with a LoRA adapter over the same weights, as ``export --format adapter`` writes it;
    None teaches with the weights as they are without any."""


ModelConfig = Annotated[ToyModelConfig | HFModelConfig, Field(discriminator="kind")]
TeacherModelConfig = Annotated[
    ToyModelConfig | HFModelConfig | BackboneTeacherConfig, Field(discriminator="kind")
]
StudentModelConfig = Annotated[
    ToyModelConfig | HFStudentConfig | MegatronModelConfig, Field(discriminator="kind")
]


class SftConfig(ConfigModel):
    """Supervised steps on oracle traces, some of them spoilt on purpose."""

    num_steps: NonNegativeInt
    traces_per_task: PositiveInt = 16
    """Scripted episodes of each task at each horizon."""
    max_tail_calls: PositiveInt = 1
    """Horizons T of the traces: 1 up to this."""
    batch_size: PositiveInt = 16
    learning_rate: LearningRate = 5e-3
    noisy_fraction: Fraction = 0.6
    """Share of traces with a spoilt tail (wrong argument, wrong function, dropped argument, no
    call). They leave the variance within a group that GRPO needs."""
    mask_divergence: bool = False
    """``teacher.fit`` only: leave the first spoilt token of a noisy trace out of the loss. The
    teacher sees errors, and how texts go on after them, but does not learn to begin them."""
    input_dropout: Fraction = 0.0
    """Share of model-written input tokens replaced by random ones."""


class StudentConfig(ConfigModel):
    """The policy that is trained."""

    tokenizer: str = "qwen3.6"
    """``qwen3.6`` or a folder with a Hugging Face tokenizer."""
    model: StudentModelConfig = ToyModelConfig(kind="toy")
    warmup: SftConfig | None = None
    """Supervised warm-up before the first rollout; recorded apart from RL."""
    warm_start: Path | None = None
    """Start from the weights of a run, of one of its checkpoints, or of a student's folder, and
    from nothing else of it; ``warmup`` is skipped then."""


class BreakerConfig(ConfigModel):
    """When a server that hangs or cannot be reached is left alone."""

    failures_in_a_row: PositiveInt = 5
    """Hangs and broken connections, one after the other, that open the breaker."""
    failure_share: Fraction = 0.5
    """Share of them among the last ``window`` requests that opens it as well."""
    window: PositiveInt = 20
    open_s: PositiveFloat = 10.0
    """Until one request is let through to see whether the server is back."""


NATIVE_TOKENIZERS = ("deepseek-v4", "qwen3.6")
"""Those whose chat format is known."""


class TeacherConfig(ConfigModel):
    """The model of another family that scores what the student wrote."""

    tokenizer: str = "deepseek-v4"
    """``deepseek-v4``, ``qwen3.6`` or a folder with a Hugging Face tokenizer."""
    mode: Literal["standard", "privileged_context"] = "standard"
    """``privileged_context``: the teacher also reads the oracle's solution, which the student never
    sees."""
    rendering: Literal["native", "raw", "verbatim"] = "native"
    """``native``: the teacher's own role markers, the student's wire bytes verbatim; ``raw``: the
    student's text without markers; ``verbatim``: the student's very ids, for a teacher with the
    student's tokenizer."""
    text_start: str | None = None
    """Control token that its texts begin with under ``raw``: ``<bos>`` for Gemma, whose scores mean
    nothing without it. Under ``native`` the chat format knows."""
    url: str | None = None
    """Score over HTTP there (SGLang's ``/generate``) instead of in this process."""
    urls: tuple[str, ...] = ()
    """More servers of the same model beside ``url``: a group's siblings go to one of them, another
    takes over where that one has no room or does not answer."""
    vocabulary: Path | None = None
    """Stored sub-vocabulary of the tokenizer: the ids that a toy teacher behind ``url`` reads."""
    headers_file: Path | None = None
    """File with one ``Name: value`` header a line (secrets stay out of the config)."""
    model: TeacherModelConfig | None = None
    """The model to load in this process; required unless ``url`` is set."""
    fit: SftConfig | None = None
    """Toy teacher only: fit it on oracle traces before the run starts."""
    fitted: Path | None = None
    """Run that has fitted this very teacher: it is taken over instead of being fitted again."""
    on_failure: Literal["drop", "wait", "fail"] = "drop"
    """Under ``opd``: a trajectory without a score keeps its GRPO advantage (``drop``), is asked for
    again until the deadline (``wait``; of a teacher over HTTP), or ends the step (``fail``)."""
    max_drop_fraction: Fraction = 0.5
    """Above this share of trajectories without scores, or without the distributions of ``distill``,
    in a step the run fails loudly."""
    deadline_s: PositiveFloat = 120.0
    """For one score under ``opd``: in this process, those before it included; over HTTP, retries,
    the wait for a slot, and that for a teacher at ``url`` to be back. Distributions have none."""
    request_deadline_s: PositiveFloat = 60.0
    """For one HTTP request, beside what its length adds."""
    request_deadline_s_per_1k_tokens: NonNegativeFloat = 1.0
    """Added to it for each 1,000 tokens."""
    max_retries: NonNegativeInt = 4
    """Of one score, while a server answers or its breaker is closed: what is tried while none can
    be reached does not count (``on_failure: fail`` alone does not wait for them)."""
    retry_backoff_s: Annotated[float, Field(ge=0, le=3600)] = 0.5
    """First pause before a retry; doubles, with jitter."""
    max_inflight_tokens: PositiveInt = 200_000
    """At each server."""
    prefix_scoring: bool = False
    """Have each turn scored while its episode still runs, so that the last call is short; only with
    ``url``. Helps where a server remembers prefixes; scores differ from those of one call by no
    more than what it computes differently behind a remembered prefix."""
    prefix_inflight_tokens: PositiveInt = 50_000
    """Of those calls at each server, from each process that plays episodes; they are not retried.
    At most ``max_inflight_tokens``, so that final scores come first."""
    breaker: BreakerConfig = BreakerConfig()
    probe: bool = True
    """Before the run starts, every server scores a short text twice."""
    probe_tolerance: NonNegativeFloat = 0.1
    """Nats per token that two scores of one text may differ by (bfloat16 rounds differently with
    the batch it is in)."""
    max_prefill_tokens: PositiveInt = 32_768
    """Longer renderings are refused as ``too_long`` without asking."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.url is None) == (self.model is None):
            raise ValueError(
                "teacher: give either `url` (score over HTTP) or `model` (score in this process), "
                f"found {'both' if self.url else 'neither'}"
            )
        if self.fit is not None and (self.model is None or self.model.kind != "toy"):
            raise ValueError("teacher.fit: only a toy teacher in this process can be fitted")
        if self.fit is None and self.model is not None and self.model.kind == "toy":
            raise ValueError(
                "teacher.fit is missing: a toy teacher in this process starts from nothing and has "
                "to be fitted on scripted traces"
            )
        if self.fitted is not None and self.fit is None:
            raise ValueError("teacher.fitted goes with `fit`, which says how it was fitted there")
        if self.vocabulary is not None and self.url is None:
            raise ValueError(
                "teacher.vocabulary goes with `url`; a toy teacher in this process has its own"
            )
        if self.rendering == "native" and self.tokenizer not in NATIVE_TOKENIZERS:
            raise ValueError(
                f"teacher.rendering: native needs the teacher's chat format, and there is none for "
                f"tokenizer {self.tokenizer!r}; use `rendering: raw`, or one of the tokenizers "
                f"{', '.join(NATIVE_TOKENIZERS)}"
            )
        if self.text_start is not None and self.rendering != "raw":
            raise ValueError(
                f"teacher.text_start goes with `rendering: raw`, found {self.rendering}: there the "
                "chat format or the student's ids say how a text begins; remove it"
            )
        self._check_urls()
        self._check_prefix_scoring()
        return self

    def _check_prefix_scoring(self) -> None:
        if not self.prefix_scoring:
            return
        if self.url is None:
            raise ValueError(
                "teacher.prefix_scoring goes with `url`: a teacher in this process computes every "
                "text as a whole"
            )
        if self.mode == "privileged_context":
            raise ValueError(
                "teacher.prefix_scoring does not go with mode privileged_context: a running "
                "episode does not say where the policy took over, and the oracle's calls depend "
                "on it; turn prefix_scoring off"
            )
        if self.prefix_inflight_tokens > self.max_inflight_tokens:
            raise ValueError(
                f"teacher.prefix_inflight_tokens is {self.prefix_inflight_tokens}, expected at "
                f"most max_inflight_tokens ({self.max_inflight_tokens}): final scores come first"
            )

    def _check_urls(self) -> None:
        if self.urls and self.url is None:
            raise ValueError("teacher.urls are servers beside `url`: give that one as well")
        try:
            servers = {server_url(url) for url in self.all_urls}
        except ValueError as error:
            raise ValueError(f"teacher.url: {error}") from None
        if len(servers) < len(self.all_urls):
            raise ValueError(f"teacher.url and teacher.urls: {list(self.all_urls)} repeat a server")

    @property
    def all_urls(self) -> tuple[str, ...]:
        """``url`` and ``urls``; empty for a teacher in this process."""
        return () if self.url is None else (self.url, *self.urls)

"""Everything about the student that is not its weights: tokenizer, chat format, stage, traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.tasks import make_environment, resolve_tasks
from miniverl_dist.backends.megatron.architecture import Architecture, read_architecture
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import (
    HFModelConfig,
    HFStudentConfig,
    MegatronModelConfig,
    ToyModelConfig,
)
from miniverl_dist.environments.base import Environment
from miniverl_dist.errors import ConfigError, TokenizerError
from miniverl_dist.ports import ChatFormat, Clock
from miniverl_dist.schemas.routing import RoutingShape
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.tokens.load import load_tokenizer
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike
from miniverl_dist.training.sft import SftExample
from rollout_server.chat_format import PlainChatMLFormat, Qwen36ChatFormat
from rollout_server.episode import Stage
from rollout_server.tool_calls import parser, writer
from rollout_server.traces import Trace, TraceMaker

STUDENT_VOCABULARY_FILE = "student-vocabulary.json"
STUDENT_FOLDER = "student"
"""A Megatron student's ``config.json``, and its initial weights where they are drawn."""
STUDENT_SEAL_FILE = "student.json"
WIRE_FORMAT = "qwen_xml"
WRITE_CALLS = writer(WIRE_FORMAT)
_CHAT_FORMATS: dict[str, Callable[[TokenizerLike], ChatFormat]] = {"qwen3.6": Qwen36ChatFormat}
_OTHER_END = "<|endoftext|>"
_CHATML = ("<|im_start|>", "<|im_end|>")
"""Control tokens without which Qwen's turns cannot be written."""
_THINK = "<think>"
ActingModel = ToyModelConfig | HFModelConfig | HFStudentConfig | MegatronModelConfig


@dataclass(frozen=True)
class StudentSide:
    """The student's half of a run."""

    tokenizer: TokenizerLike
    chat: ChatFormat
    stage: Stage
    environment: Environment
    train_ids: tuple[str, ...]
    eval_ids: tuple[str, ...]
    other_stop_ids: tuple[int, ...]
    """End tokens besides the turn end; sampling one ends the episode as ``eos_without_final``."""


def student_chat(config: RunConfig, tokenizer: TokenizerLike) -> ChatFormat:
    """The chat format that belongs to the student's tokenizer.

    Raises:
        ConfigError: there is none.
    """
    make = _CHAT_FORMATS.get(config.student.tokenizer)
    if make is not None:
        return make(tokenizer)
    missing = [token for token in _CHATML if not _has_special(tokenizer, token)]
    if missing:
        raise ConfigError(
            f"student.tokenizer: there is no chat format for {config.student.tokenizer!r}: it has "
            f"no control token {' and no '.join(missing)}; known are "
            f"{', '.join(sorted(_CHAT_FORMATS))}, and folders whose tokenizer has ChatML's tokens"
        )
    # Spelled in pieces, it is a text that the model was never trained on.
    thinks = len(tokenizer.encode(_THINK)) == 1
    return Qwen36ChatFormat(tokenizer) if thinks else PlainChatMLFormat(tokenizer)


def named_tokenizer(field: str, name_or_path: str) -> TokenizerLike:
    """The tokenizer that a field of the recipe names.

    Raises:
        ConfigError: there is none, or one that cannot be used.
        MissingDependencyError: what reads it is not installed.
    """
    try:
        return load_tokenizer(name_or_path)
    except TokenizerError as error:
        raise ConfigError(f"{field}: {error}") from error


def _has_special(tokenizer: TokenizerLike, text: str) -> bool:
    try:
        tokenizer.special_id(text)
    except TokenizerError:
        return False
    return True


def stage_for(
    chat: ChatFormat, environment: Environment, config: RunConfig, model: ActingModel
) -> Stage:
    """The stage on which ``model`` plays in this chat format, with the student's wire format."""
    limit = config.rollout.max_context_tokens
    if not isinstance(model, HFModelConfig):
        limit = min(limit, model.max_context_tokens)
    limits = config.rollout.model_copy(update={"max_context_tokens": limit})
    return Stage(environment, chat, parser(WIRE_FORMAT), limits)


def routing_shape(config: RunConfig) -> RoutingShape | None:
    """What the engine's routed experts look like; None where they are not replayed.

    Raises:
        ConfigError: they are to be, but the student has no experts.
    """
    model = config.student.model
    if config.rollout.routing_replay == "off" or not isinstance(model, MegatronModelConfig):
        return None
    arch = read_architecture(model.config)
    if arch.experts is None:
        raise ConfigError(
            f"rollout.routing_replay is on, but {model.config.name} describes a {arch.model_type} "
            "decoder, which has no experts: set it off"
        )
    return RoutingShape(arch.num_layers, arch.experts.experts_per_token, arch.experts.num_experts)


def require_rows(architecture: Architecture, name: str, tokenizer: TokenizerLike) -> None:
    """Raise unless a model has an embedding row for every id of a tokenizer.

    Raises:
        ConfigError: it has fewer.
    """
    if architecture.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"{name} has {architecture.vocab_size} vocabulary rows, tokenizer {tokenizer.name} has "
            f"{tokenizer.vocab_size} ids: use `vocabulary: restricted`, or the config.json that "
            "belongs to the tokenizer"
        )


def has_declared_vocabulary(config: RunConfig) -> bool:
    """Whether the student's softmax covers a declared part of its tokenizer only."""
    model = config.student.model
    if isinstance(model, MegatronModelConfig):
        return model.vocabulary == "restricted"
    return isinstance(model, ToyModelConfig)


def student_tokenizer(config: RunConfig, run_dir: Path) -> TokenizerLike:
    """The student's tokenizer, or the part of it that the run declared."""
    base = load_tokenizer(config.student.tokenizer)
    if not has_declared_vocabulary(config):
        return base
    return SubVocabulary.load(run_dir / STUDENT_VOCABULARY_FILE, base)


async def declare_vocabulary(config: RunConfig, clock: Clock) -> SubVocabulary:
    """Real ids that the task set needs: all that occur in its scripted traces, and all bytes.

    Evaluation tasks contribute their clean traces, so that both are spelled the same way; nothing
    is trained on here.
    """
    base = load_tokenizer(config.student.tokenizer)
    side = student_side(config, base)
    traces = await warmup_traces(config, side.stage, side.train_ids, clock)
    maker = TraceMaker(side.stage, WRITE_CALLS, clock, seed=config.seed)
    traces += await maker.make(
        side.eval_ids,
        max_tail_calls=_longest_evaluated(config, side),
        per_task=1,
        noisy_fraction=0.0,
    )
    occurring = {i for trace in traces for i in trace.trajectory.token_ids}
    return SubVocabulary(base, occurring | {side.chat.turn_end_id, *side.other_stop_ids})


def _longest_evaluated(config: RunConfig, side: StudentSide) -> int:
    tail_calls = config.evaluation.tail_calls
    if tail_calls != "all":
        return tail_calls
    tasks = side.environment.tasks()
    return max(tasks[task_id].num_calls for task_id in side.eval_ids)


async def warmup_traces(
    config: RunConfig, stage: Stage, train_ids: Sequence[str], clock: Clock
) -> list[Trace]:
    """The student's warm-up traces; without a warm-up, one clean trace per task."""
    sft = config.student.warmup
    return await TraceMaker(stage, WRITE_CALLS, clock, seed=config.seed).make(
        train_ids,
        max_tail_calls=sft.max_tail_calls if sft else 1,
        per_task=sft.traces_per_task if sft else 1,
        noisy_fraction=sft.noisy_fraction if sft else 0.0,
    )


def student_side(config: RunConfig, tokenizer: TokenizerLike) -> StudentSide:
    """The student side around a tokenizer (the full one, or its sub-vocabulary).

    Raises:
        MissingDependencyError: bfcl-eval is not installed.
        TaskNotFoundError, ConfigError: see `actors.tasks.resolve_tasks`.
    """
    environment = make_environment(config, WRITE_CALLS)
    train_ids, eval_ids = resolve_tasks(config, environment.tasks())
    chat = student_chat(config, tokenizer)
    return StudentSide(
        tokenizer,
        chat,
        stage_for(chat, environment, config, config.student.model),
        environment,
        train_ids,
        eval_ids,
        (tokenizer.special_id(_OTHER_END),) if _has_special(tokenizer, _OTHER_END) else (),
    )


def student_examples(traces: Iterable[Trace]) -> list[SftExample]:
    """Supervised sequences of the student: every written span is learned, turn ends included."""
    return [_student_example(trace) for trace in traces]


def _student_example(trace: Trace) -> SftExample:
    spans = [span for _, span in trace.written_spans]
    token_ids = np.asarray(trace.trajectory.token_ids[: spans[-1].end], dtype=np.int64)
    written = np.zeros(len(token_ids), dtype=bool)
    for span in spans:
        written[span.start : span.end] = True
    return SftExample(token_ids, written, written)


def sft_seed(config: RunConfig, role: str) -> int:
    """Seed of the supervised steps of a role."""
    return derive_seed(config.seed, "sft", role)

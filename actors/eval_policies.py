"""Who can be evaluated beside the run's own policies: a model folder, or a server by its URL."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from actors.sources import player_of
from actors.student_side import WRITE_CALLS, StudentSide, student_chat
from actors.teacher_scoring import client_limits
from actors.teacher_side import teacher_chat, teacher_tokenizer
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ConfigError, TokenizerError
from miniverl_dist.generate_api.chat import ChatClient, ChatLimits
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.generate_api.headers import read_headers_file
from miniverl_dist.generate_api.wire import SamplingParams
from miniverl_dist.ports import ChatFormat, Clock, RolloutSource
from miniverl_dist.schemas.messages import ToolSchema
from miniverl_dist.tokens.load import load_tokenizer
from miniverl_dist.tokens.tokenizer import TokenizerLike
from rollout_server.episode import Stage
from rollout_server.first_faults import EarlyStop
from rollout_server.policies import EnginePolicy
from rollout_server.remote_policies import (
    CallForm,
    ChatPolicy,
    ChatSettings,
    ServedEngine,
    check_chat,
    served_engine,
    served_model,
)

if TYPE_CHECKING:
    from actors.deployed import DeployKind
    from rollout_server.engines.base import Engine

PolicyKind = Literal["student", "teacher", "null", "oracle", "hf", "openai", "sglang"]
OWN_POLICIES: Final[Mapping[str, PolicyKind]] = {
    "student": "student",
    "teacher": "teacher",
    "null": "null",
    "oracle": "oracle",
}
_FOREIGN: Final[Mapping[str, PolicyKind]] = {"hf": "hf", "openai": "openai", "sglang": "sglang"}
_FORMS: Final = (
    "student, teacher, null, oracle, hf:FOLDER, openai:http://HOST:PORT/v1 or "
    "sglang:http://HOST:PORT"
)
_OTHER_END: Final = "<|endoftext|>"
_TOKENIZER_FILE: Final = "tokenizer.json"


@dataclass(frozen=True)
class PolicySpec:
    """A policy as the command line names it."""

    kind: PolicyKind
    target: str = ""
    """Folder or URL; empty for the run's own policies."""


@dataclass(frozen=True)
class ForeignOptions:
    """How foreign policies are asked."""

    model: str | None = None
    """Name at an OpenAI-compatible server; None where it serves one."""
    headers_file: Path | None = None
    calls: CallForm = "tools"
    thinking: bool | None = None
    """None leaves it to the server."""
    max_new_tokens: int | None = None
    """Of a turn; None takes ``rollout.max_new_tokens``."""


@dataclass(frozen=True)
class ForeignPolicy:
    """A policy that answers: its name in tables, and who plays it."""

    name: str
    source: RolloutSource
    weights: str = ""
    """Checksum, where they lie in a folder."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What decides how it plays, beside its weights and the recipe; nothing secret."""


def parse_policy(text: str) -> PolicySpec:
    """Read ``--policy``.

    Raises:
        ConfigError: it names no policy.
    """
    if (own := OWN_POLICIES.get(text)) is not None:
        return PolicySpec(own)
    scheme, colon, target = text.partition(":")
    kind = _FOREIGN.get(scheme)
    if kind is None or not colon or not target:
        hint = ""
        if scheme in ("http", "https"):
            hint = f": say which API it speaks, for instance openai:{text}"
        raise ConfigError(f"--policy {text!r} names no policy{hint}; expected {_FORMS}")
    if kind != "hf" and not target.startswith(("http://", "https://")):
        raise ConfigError(f"--policy {text!r}: expected {kind}:http://HOST:PORT or https")
    return PolicySpec(kind, target)


class ForeignPolicies:
    """Opens foreign policies: each is asked whether it can play before anything is played.

    Args:
        config: Tasks, limits, temperature and deadlines.
        side: The run's half of an episode: environment, wire format, record.
        run_dir: Gets the logs of servers that are started.
        options: How they are asked.
        clock: For deadlines.
    """

    def __init__(
        self,
        config: RunConfig,
        side: StudentSide,
        run_dir: Path,
        options: ForeignOptions,
        clock: Clock,
    ) -> None:
        self._config, self._side, self._run_dir = config, side, run_dir
        self._options, self._clock = options, clock

    async def open(self, spec: PolicySpec, stack: AsyncExitStack) -> ForeignPolicy:
        """Find out whether the policy can play; what it holds is closed with the stack.

        Raises:
            ConfigError: it cannot; one message says why and what to do.
        """
        if spec.kind == "openai":
            return await self._openai(spec.target, stack)
        if spec.kind == "sglang":
            return await self._sglang(spec.target, stack)
        if spec.kind == "teacher":
            return await self._served_teacher(stack)
        return await self._folder(Path(spec.target), stack)

    async def _openai(self, url: str, stack: AsyncExitStack) -> ForeignPolicy:
        config, side, options = self._config, self._side, self._options
        deadline_s = config.deadlines.generate_s
        client = ChatClient(
            url,
            # A request that hangs is given up in time to be asked once more.
            limits=ChatLimits(deadline_s=deadline_s, request_deadline_s=deadline_s / 2),
            headers=self._headers(),
            clock=self._clock,
        )
        stack.push_async_callback(client.close)
        settings = ChatSettings(
            model=await served_model(client, options.model),
            form=options.calls,
            temperature=config.evaluation.temperature,
            max_new_tokens=self._max_new_tokens,
            thinking=options.thinking,
        )
        await check_chat(client, settings, self._tools())
        policy = ChatPolicy(client, settings, side.chat, side.stage.parse, WRITE_CALLS)
        stage = self._stage(side.chat)
        asked = EarlyStop(policy, settings.name)
        source = player_of(config, stage, asked, self._clock, settings.max_new_tokens)
        return ForeignPolicy(settings.name, source, settings=policy.identity)

    async def _sglang(self, url: str, stack: AsyncExitStack) -> ForeignPolicy:
        deadline_s = self._config.deadlines.generate_s
        limits = ClientLimits(deadline_s=deadline_s, request_deadline_s=deadline_s / 2)
        client = GenerateClient(url, limits=limits, headers=self._headers(), clock=self._clock)
        stack.push_async_callback(client.close)
        engine = await served_engine(client, self._side.tokenizer.vocab_size)
        source = self._sampled(engine, self._side.chat, self._side.other_stop_ids)
        return ForeignPolicy(engine.name, source, settings={**engine.identity, **self._sampling()})

    async def _served_teacher(self, stack: AsyncExitStack) -> ForeignPolicy:
        """The teacher behind ``teacher.url``, in its own tokens and roles."""
        teacher = self._config.teacher
        if teacher is None or teacher.url is None:
            raise ConfigError(f"policy teacher: {self._config.acting_teacher_problem}")
        tokenizer = teacher_tokenizer(teacher, self._run_dir)
        chat = teacher_chat(teacher, tokenizer)
        headers = read_headers_file(teacher.headers_file) if teacher.headers_file else {}
        client = GenerateClient(
            teacher.all_urls, limits=client_limits(teacher), headers=headers, clock=self._clock
        )
        stack.push_async_callback(client.close)
        engine = await served_engine(client, tokenizer.vocab_size)
        return ForeignPolicy(
            "teacher",
            self._sampled(engine, chat, ()),
            settings={**engine.identity, **self._sampling()},
        )

    async def _folder(self, folder: Path, stack: AsyncExitStack) -> ForeignPolicy:
        """A model's folder, sampled by transformers in this process."""
        from actors.deployed import hf_folder_engine
        from actors.hf_files import folder_sha256, read_hf_files

        read_hf_files(folder, f"policy hf:{folder}")
        tokenizer = self.folder_tokenizer(folder)
        chat = self._folder_chat(folder, tokenizer)
        engine = await hf_folder_engine(self._config, folder, tokenizer, stack)
        weights = folder_sha256(folder)
        source = self._sampled(engine, chat, _other_ends(tokenizer))
        return ForeignPolicy(
            f"hf:{folder.name}@{weights[:8]}", source, weights, settings=self._sampling()
        )

    def folder_tokenizer(self, folder: Path) -> TokenizerLike:
        """Of a model's folder; without one in it, the run's own."""
        if (folder / _TOKENIZER_FILE).is_file():
            return load_tokenizer(str(folder))
        return self._side.tokenizer

    def _folder_chat(self, folder: Path, tokenizer: TokenizerLike) -> ChatFormat:
        if tokenizer is self._side.tokenizer:
            return self._side.chat
        named = self._config.student.model_copy(update={"tokenizer": str(folder)})
        try:
            return student_chat(self._config.model_copy(update={"student": named}), tokenizer)
        except ConfigError as error:
            raise ConfigError(
                f"policy hf:{folder}: a model without a chat format that is known here cannot act "
                f"({error}). Serve it with its own template and use --policy openai:URL/v1 "
                "(--calls text where it takes no tools); a base model has none: as a teacher, "
                "`rendering: raw` scores with it"
            ) from None

    async def open_export(
        self, folder: Path, kind: DeployKind, work_dir: Path, stack: AsyncExitStack
    ) -> ForeignPolicy:
        """What this run has exported, on an engine of its own.

        Args:
            folder: From `export`.
            kind: Of the engine.
            work_dir: Of a server that is started.
            stack: Closes what is opened.
        """
        from actors.deployed import hf_folder_engine, sglang_folder_engine
        from actors.hf_files import folder_sha256

        side = self._side
        if kind == "hf":
            engine = await hf_folder_engine(self._config, folder, side.tokenizer, stack)
        else:
            engine = await sglang_folder_engine(
                self._config, folder, side.tokenizer, work_dir, stack
            )
        source = self._sampled(engine, side.chat, side.other_stop_ids)
        return ForeignPolicy(engine.name, source, folder_sha256(folder), self._sampling())

    def _sampled(
        self, engine: Engine | ServedEngine, chat: ChatFormat, other_stop_ids: tuple[int, ...]
    ) -> RolloutSource:
        max_new_tokens = self._max_new_tokens
        policy = EnginePolicy(
            engine,
            chat,
            SamplingParams(
                temperature=self._config.evaluation.temperature, max_new_tokens=max_new_tokens
            ),
            other_stop_ids=other_stop_ids,
            deadline_s=self._config.deadlines.generate_s,
        )
        asked = EarlyStop(policy, engine.name)
        return player_of(self._config, self._stage(chat), asked, self._clock, max_new_tokens)

    @property
    def _max_new_tokens(self) -> int:
        return self._options.max_new_tokens or self._config.rollout.max_new_tokens

    def _sampling(self) -> dict[str, str]:
        """What `_sampled` asks an engine for, as a chat policy's identity spells it."""
        return {
            "temperature": repr(self._config.evaluation.temperature),
            "max_new_tokens": str(self._max_new_tokens),
        }

    def _stage(self, chat: ChatFormat) -> Stage:
        """The run's stage; the student's own context is no limit of another model."""
        return Stage(self._side.environment, chat, self._side.stage.parse, self._config.rollout)

    def _tools(self) -> Mapping[str, ToolSchema]:
        session = self._side.environment.start(self._side.eval_ids[0], prefix_calls=0)
        try:
            return session.call_schemas()
        finally:
            session.close()

    def _headers(self) -> dict[str, str]:
        path = self._options.headers_file
        return {} if path is None else read_headers_file(path)


def _other_ends(tokenizer: TokenizerLike) -> tuple[int, ...]:
    try:
        return (tokenizer.special_id(_OTHER_END),)
    except TokenizerError:
        return ()


def is_foreign(spec: PolicySpec, config: RunConfig) -> bool:
    """Whether `ForeignPolicies` opens it; a teacher behind a URL is asked like any server."""
    if spec.kind != "teacher":
        return spec.kind not in OWN_POLICIES
    return config.teacher is not None and config.teacher.url is not None

"""Policies that other servers play: OpenAI-compatible chat completions, and SGLang's /generate.

A chat model shows no tokens here. Its turns are recorded as the run's own tokenizer spells them, as
scripted turns are: with no logprob, not sampled, and so never trained on. SGLang's ``/generate`` is
asked token by token in the student's chat format, for a server of a model with its tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from miniverl_dist.environments.base import Session
from miniverl_dist.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    GenerateApiError,
    MalformedReplyError,
    RequestRejectedError,
)
from miniverl_dist.generate_api.chat import ChatChoice, ChatClient, ChatReply
from miniverl_dist.generate_api.client import GenerateClient
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest, SamplingParams
from miniverl_dist.ports import ChatFormat, WeightSnapshot
from miniverl_dist.schemas.messages import ParsedMessage, ToolSchema
from rollout_server.model_names import checked_name, shown_name, shown_names
from rollout_server.off_loop import OffLoop
from rollout_server.policies import Moment, Turn
from rollout_server.remote_calls import (
    as_wire_text,
    declared_tools,
    read_message,
    text_history,
    tools_history,
    without_thinking,
)
from rollout_server.tool_calls import ToolCallParser, ToolCallWriter, holds_a_call

CallForm = Literal["tools", "text"]
_ENDPOINT_CHARS = 8
_SEED_BITS = 31
"""Servers differ in how large a seed they take."""
_FINISHES: Mapping[str, Literal["turn_end", "length"]] = {
    "stop": "turn_end",
    "tool_calls": "turn_end",
    "function_call": "turn_end",
    "length": "length",
}
_CALL_FINISHES = frozenset({"tool_calls", "function_call"})
_MAX_FINISH_CHARS = 40


@dataclass(frozen=True)
class ChatSettings:
    """How a chat model is asked."""

    model: str
    form: CallForm
    temperature: float
    max_new_tokens: int
    """Of one turn, reasoning included, in the model's own tokens."""
    thinking: bool | None = None
    """None leaves it to the server."""

    @property
    def name(self) -> str:
        """The policy's name in tables; the server's address is no part of it."""
        suffix = {None: "", True: "+thinking", False: "-thinking"}[self.thinking]
        return f"openai:{self.model}:{self.form}{suffix}"

    @property
    def identity(self) -> Mapping[str, str]:
        """Everything here that changes how episodes go."""
        return {
            "model": self.model,
            "form": self.form,
            "temperature": repr(self.temperature),
            "max_new_tokens": str(self.max_new_tokens),
            "thinking": str(self.thinking),
        }


def endpoint_digest(urls: str | Sequence[str]) -> str:
    """A name for one server, or several of one model in any order, that does not show where it is.

    Args:
        urls: As ``config.urls.server_url`` writes them.
    """
    ordered = sorted([urls] if isinstance(urls, str) else urls)
    return hashlib.sha256("\n".join(ordered).encode()).hexdigest()[:_ENDPOINT_CHARS]


class ChatPolicy:
    """Asks an OpenAI-compatible server for each turn; implements `policies.Policy`.

    Args:
        client: Of the server.
        settings: Model and form.
        chat: Spells what was said for the record.
        parse: Reads the run's wire format.
        write_calls: Writes it.
        num_threads: Read and tokenise replies, which may be long; see `OffLoop`.
    """

    def __init__(
        self,
        client: ChatClient,
        settings: ChatSettings,
        chat: ChatFormat,
        parse: ToolCallParser,
        write_calls: ToolCallWriter,
        *,
        num_threads: int = 1,
    ) -> None:
        self._client, self._settings, self._chat = client, settings, chat
        self._parse, self._write_calls = parse, write_calls
        self._off_loop = OffLoop(num_threads)
        self._takes_calls_out = False
        """The server has sent a structured call: it has a parser, and what that leaves in the text
        is no call of the model's kind."""

    @property
    def identity(self) -> Mapping[str, str]:
        """What two evaluations must have in common to be of one policy; nothing of it is secret."""
        return {"endpoint": endpoint_digest(self._client.base_url), **self._settings.identity}

    async def act(self, prompt: Sequence[int], session: Session, moment: Moment) -> Turn:
        """See `Policy.act`; the prompt's tokens are not sent, its messages are.

        Raises:
            EngineError: a reply that does not tell what the model did. Nobody can score that: a
                finish that is not known; calls that were announced and not sent, sent where none
                were asked for, or left in the text by a server that has never taken one out; a turn
                that a filter has withheld, which is not what the model wrote. A model that declines
                in its own words has answered.
        """
        schemas = session.call_schemas()
        # Waits for a thread; bounded by the length of an episode.
        body = await self._off_loop.run(lambda: self.request(schemas, moment))
        # Waits for the server; retries included, bounded by the client's deadline.
        reply = await self._client.complete(body)
        # Waits for a thread; bounded by the length that the client lets a reply have.
        return await self._off_loop.run(lambda: self._turn(reply))

    def request(self, schemas: Mapping[str, ToolSchema], moment: Moment) -> dict[str, Any]:
        """The body of a request; the same moment gives the same bytes."""
        settings = self._settings
        body: dict[str, Any] = {
            "model": settings.model,
            "temperature": settings.temperature,
            "max_tokens": settings.max_new_tokens,
            "seed": moment.seed % 2**_SEED_BITS,
            "n": 1,
            "stream": False,
        }
        if settings.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": settings.thinking}
        if settings.form == "tools":
            body["messages"] = tools_history(moment.messages, self._parse)
            if schemas:
                body["tools"] = declared_tools(schemas)
        else:
            body["messages"] = text_history(moment.messages, schemas)
        return body

    def _turn(self, reply: ChatReply) -> Turn:
        choice = reply.choices[0]
        finish = self._finish(choice)
        parsed = None
        if self._settings.form == "tools":
            parsed = read_message(choice.message, is_cut=finish == "length")
            self._check_taken_out(parsed)
            text = as_wire_text(parsed, self._write_calls)
        else:
            text = without_thinking(choice.message.text)
        ids = tuple(self._chat.tokenizer.encode_bytes(text.encode("utf-8", "replace")))
        end = () if finish == "length" else (self._chat.turn_end_id,)
        return Turn((*ids, *end), None, (), finish, parsed=parsed)

    def _check_taken_out(self, parsed: ParsedMessage) -> None:
        """Raise ``EngineError`` where the server seems to have no parser for the model's calls."""
        if parsed.calls:
            self._takes_calls_out = True
        elif not self._takes_calls_out and holds_a_call(parsed.text):
            raise EngineError(
                f"{self._client.base_url} left a call in the text, and has sent none in "
                "`tool_calls` so far: start it with the tool-call parser of its model, or use "
                "--calls text"
            )

    def _finish(self, choice: ChatChoice) -> Literal["turn_end", "length"]:
        """How a turn ended; no reason given counts as ``stop``. Raises ``EngineError``."""
        reason = choice.finish_reason or "stop"
        problem = _finish_problem(reason, self._settings.form, has_calls=bool(choice.message.calls))
        if problem is not None:
            shown = shown_name(reason[:_MAX_FINISH_CHARS])
            raise EngineError(f"{self._client.base_url} ended a turn as {shown!r}, {problem}")
        return _FINISHES[reason]


def _finish_problem(reason: str, form: CallForm, *, has_calls: bool) -> str | None:
    """Why a reply does not tell what the model did; None where it does."""
    if reason == "content_filter":
        return "so a filter has withheld what the model wrote"
    if reason not in _FINISHES:
        return f"expected one of {', '.join(_FINISHES)}"
    if reason in _CALL_FINISHES and not has_calls:
        return (
            "but sent no call: see what its tool-call parser does, or use --calls text with a "
            "server that leaves the text as it is"
        )
    if has_calls and form == "text":
        return (
            "with calls taken out of the text, which was to stay as it is: start it without a "
            "tool-call parser, or use --calls tools"
        )
    return None


async def served_model(client: ChatClient, model: str | None) -> str:
    """The model's name, once the server says that it has it; asks nothing of the model.

    Raises:
        ConfigError: no such server, no such model, several and none was named, or a name that
            tables cannot show.
    """
    try:
        found = await client.models()
    except (GenerateApiError, DeadlineError) as error:
        raise _not_this_api(client.base_url, "/models", error) from error
    listed = shown_names(found)
    if model is None and len(found) == 1:
        model = found[0]
    if model is None:
        raise ConfigError(
            f"policy openai: {client.base_url} serves {len(found)} models ({listed}): choose one "
            "with --model"
        )
    if model not in found:
        raise ConfigError(
            f"policy openai: {client.base_url} has no model {model!r}; it serves {listed}"
        )
    return checked_name(model, f"policy openai: {client.base_url}")


async def check_chat(
    client: ChatClient, settings: ChatSettings, schemas: Mapping[str, ToolSchema]
) -> None:
    """Have one word written as episodes will ask for it, so that what is wrong shows at once.

    Raises:
        ConfigError: the server refuses the model's chat template, the tools, or the request.
    """
    body: dict[str, Any] = {
        "model": settings.model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 1,
        "temperature": settings.temperature,
        "n": 1,
        "stream": False,
    }
    if settings.form == "tools" and schemas:
        body["tools"] = declared_tools(schemas)
    if settings.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": settings.thinking}
    try:
        await client.complete(body)
    except RequestRejectedError as error:
        raise ConfigError(f"policy {settings.name}: {_advice(str(error), settings)}") from error
    except (GenerateApiError, DeadlineError) as error:
        raise _not_this_api(client.base_url, "/chat/completions", error) from error


def _advice(said: str, settings: ChatSettings) -> str:
    """What to do about a request that the server refuses."""
    lowered = said.lower()
    if "template" in lowered:
        return (
            f"the model has no chat template ({said}): it is a base model; start its server with "
            "a template, or serve it with SGLang and use --policy sglang:URL, which sends tokens "
            "(as a teacher such a model needs `rendering: raw`)"
        )
    if "tool" in lowered and settings.form == "tools":
        return (
            f"the server takes no structured tool calls ({said}): start it with a tool-call "
            "parser, or use --calls text"
        )
    return f"the server refuses a first request: {said}"


def _not_this_api(url: str, path: str, error: Exception) -> ConfigError:
    if isinstance(error, MalformedReplyError):
        found = "what answers there is no OpenAI-compatible server"
    elif isinstance(error, RequestRejectedError) and error.status == 404:
        found = f"there is no {path} there; such a URL mostly ends with /v1"
    elif isinstance(error, RequestRejectedError) and error.status in (401, 403):
        found = "the server wants a key: give --headers-file"
    else:
        found = "the server does not answer"
    return ConfigError(f"policy openai: {url}: {found} ({error})")


class ServedEngine:
    """A server that somebody else runs, as `EnginePolicy` asks it; its weights are not ours.

    Implements `engines.base.Engine` as far as sampling goes. Its turns count as version 0.
    """

    def __init__(self, client: GenerateClient, name: str) -> None:
        self._client, self.name, self.weight_version = client, name, 0

    @property
    def identity(self) -> Mapping[str, str]:
        """Which server and model; how it is asked is its policy's own."""
        urls = [endpoint.url for endpoint in self._client.endpoints]
        return {"endpoint": endpoint_digest(urls), "model": self.name}

    async def start(self) -> None:
        """Nothing: it runs already."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Ask the server; see ``Engine.generate``."""
        reply = await self._client.generate(request)
        meta = msgspec.structs.replace(reply.meta_info, weight_version="0", weight_versions=())
        return msgspec.structs.replace(reply, meta_info=meta)

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        """Refused: the weights belong to the server.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"{self.name} serves weights of its own and takes none")

    async def close(self) -> None:
        """Close the connections; the server stays."""
        await self._client.close()


async def served_engine(client: GenerateClient, vocab_size: int) -> ServedEngine:
    """An engine around a running SGLang server, once it has said what it serves.

    Args:
        client: Of the server.
        vocab_size: Ids that prompts are made of; the server has to know them all.

    Raises:
        ConfigError: no SGLang server, one that cannot read these ids, or a model's name that
            tables cannot show.
    """
    try:
        info = await client.model_info()
        reply = await client.generate(_first_word())
    except (GenerateApiError, DeadlineError) as error:
        raise ConfigError(
            f"policy sglang: {client.base_url} does not answer as SGLang does ({error}): give the "
            "server's root, without /v1, or use --policy openai:URL/v1"
        ) from error
    if any(not 0 <= token < vocab_size for token in reply.output_ids):
        raise ConfigError(
            f"policy sglang: {client.base_url} answers with token {max(reply.output_ids)}, the "
            f"student's tokenizer has {vocab_size} ids: it serves a model of another tokenizer; "
            "use --policy openai:URL/v1, which sends text"
        )
    folder = info.model_path.rstrip("/").rpartition("/")[2]
    return ServedEngine(
        client, f"sglang:{checked_name(folder, f'policy sglang: {client.base_url}')}"
    )


def _first_word() -> GenerateRequest:
    return GenerateRequest(
        input_ids=(0,), sampling_params=SamplingParams(temperature=0.0, max_new_tokens=1)
    )

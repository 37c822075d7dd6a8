"""Tool calls in model text: parsers and writers of three wire formats.

    qwen_xml      <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    hermes_json   <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
    deepseek      V4's DSML: <｜DSML｜tool_calls><｜DSML｜invoke name="NAME">...

A parser takes any text and never raises: what looks like a call and cannot be read is a call with
a typed status and an error that the model can act on. All calls of a message are found, in order,
up to ``MAX_CALLS``: whatever begins behind them is one malformed call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from miniverl_dist.errors import ConfigError, RecordError
from miniverl_dist.schemas.messages import (
    ParsedCall,
    ParsedMessage,
    ParseStatus,
    ToolCall,
    ToolSchema,
)
from miniverl_dist.tokens.byte_table import without_surrogates
from rollout_server.strict_json import dumps, loads

Schemas = Mapping[str, ToolSchema]

MAX_CALLS = 512
"""Of one message; reading hundreds of thousands of markers takes seconds."""

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
"""What models write for JSON's words when a tool's documentation speaks Python."""

_CALL_TAG = re.compile(r"</?tool_call>")
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]*)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_BARE_FUNCTION = re.compile(r"<function=.*?(?:</function>|\Z)", re.DOTALL)

_DSML_OPEN, _DSML_CLOSE = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
_DSML_INVOKE = re.compile(r'\s*<｜DSML｜invoke name="([^"\n]*)">(.*?)</｜DSML｜invoke>', re.DOTALL)
_DSML_PARAMETER = re.compile(
    r'\s*<｜DSML｜parameter name="([^"\n]*)" string="(true|false)">(.*?)</｜DSML｜parameter>',
    re.DOTALL,
)


_Part = tuple[int, str | ParsedCall]
"""Where it begins in the message, and a text or a call there."""


class ToolCallParser(Protocol):
    """Reads the calls of an assistant text."""

    def __call__(self, text: str, schemas: Schemas | None = None) -> ParsedMessage:
        """Take the text apart; never raises.

        Args:
            text: What the model wrote, without its turn end.
            schemas: Declared tools by name. XML needs them to know which values are not strings:
                a value is a string unless its parameter is declared as something else.
        """


ToolCallWriter = Callable[[Sequence[ToolCall]], str]
"""Writes calls as the model would; raises ``RecordError`` for what its format cannot express."""


def parser(name: str) -> ToolCallParser:
    """The parser of a wire format. Raises ``ConfigError`` for an unknown name."""
    return _lookup(_PARSERS, name)


def writer(name: str) -> ToolCallWriter:
    """The writer of a wire format. Raises ``ConfigError`` for an unknown name."""
    return _lookup(_WRITERS, name)


def holds_a_call(text: str) -> bool:
    """Whether the text holds a well-formed call in any of the wire formats."""
    return any(
        call.status is ParseStatus.OK for parse in _PARSERS.values() for call in parse(text).calls
    )


def parse_qwen_xml(text: str, schemas: Schemas | None = None) -> ParsedMessage:
    """Read Qwen's XML calls; see `ToolCallParser`."""
    text = without_surrogates(text)
    return _message(text, _xml_parts(text, schemas or {}))


def _xml_parts(text: str, schemas: Schemas) -> Iterator[_Part]:
    for block in _blocks(text):
        if not block.is_text:
            yield block.start, block.failure() or _read_xml(block, schemas)
            continue
        end = 0
        for bare in _BARE_FUNCTION.finditer(block.raw):
            yield block.start + end, block.raw[end : bare.start()]
            yield block.start + bare.start(), _bare_function(bare[0], is_last=block.is_last)
            end = bare.end()
        yield block.start + end, block.raw[end:]


def parse_hermes_json(text: str, schemas: Schemas | None = None) -> ParsedMessage:
    """Read Hermes' JSON calls; ``schemas`` is not needed: JSON carries its types."""
    text = without_surrogates(text)
    parts = (
        (block.start, block.raw if block.is_text else block.failure() or _read_json(block))
        for block in _blocks(text)
    )
    return _message(text, parts)


def parse_deepseek(text: str, schemas: Schemas | None = None) -> ParsedMessage:
    """Read V4's DSML calls; ``schemas`` is not needed: parameters say whether they are strings."""
    text = without_surrogates(text)
    return _message(text, _dsml_parts(text))


def _dsml_parts(text: str) -> Iterator[_Part]:
    position = 0
    while (start := text.find(_DSML_OPEN, position)) >= 0:
        yield position, text[position:start]
        close = text.find(_DSML_CLOSE, start)
        is_closed, body = close >= 0, start + len(_DSML_OPEN)
        end = close if is_closed else len(text)
        yield from _read_dsml(text, body, end, is_closed=is_closed)
        position = end + len(_DSML_CLOSE) if is_closed else end
    yield position, text[position:]


def _message(text: str, parts: Iterable[_Part]) -> ParsedMessage:
    """Texts and calls in their order; no further call is read behind the last that counts."""
    texts: list[str] = []
    calls: list[ParsedCall] = []
    for start, part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif len(calls) < MAX_CALLS:
            calls.append(part)
        else:
            told = f"more than {MAX_CALLS} calls in one message; make fewer at once"
            calls.append(_malformed(told).as_call(text[start:]))
            break
    return ParsedMessage(text="".join(texts).strip(), calls=tuple(calls))


def write_qwen_xml(calls: Sequence[ToolCall]) -> str:
    """Write calls as Qwen3.6 does: strings as they are, other values as JSON.

    Raises:
        RecordError: a name or value holds what the format uses as a marker, or is not JSON.
    """
    texts = []
    for call in calls:
        values = {key: _as_text(value) for key, value in call.arguments.items()}
        parameters = "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
        )
        text = f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"
        if not _reads_back(text, call.name, values):
            raise _unwritable("qwen_xml", call)
        texts.append(text)
    return "\n".join(texts)


def write_hermes_json(calls: Sequence[ToolCall]) -> str:
    """Write calls as JSON in Hermes' tags.

    Raises:
        RecordError: an argument is not JSON.
    """
    texts = []
    for call in calls:
        body = dumps({"name": call.name, "arguments": call.arguments})
        # A tag can only stand in a string, where JSON can spell its first letter otherwise.
        body = _CALL_TAG.sub(lambda tag: "\\u003c" + tag[0][1:], body)
        texts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(texts)


def write_deepseek(calls: Sequence[ToolCall]) -> str:
    """Write calls as DSML, all in one block.

    Raises:
        RecordError: a name or value holds what the format uses as a marker, or is not JSON.
    """
    if not calls:
        return ""
    texts = []
    for call in calls:
        text = _dsml_invoke(call)
        read = parse_deepseek(f"{_DSML_OPEN}{text}{_DSML_CLOSE}")
        if read.text or [found.call for found in read.calls] != [call]:
            raise _unwritable("deepseek", call)
        texts.append(text)
    return "\n".join([_DSML_OPEN, *texts, _DSML_CLOSE])


class _UnreadableError(Exception):
    """A call that cannot be read; never leaves this module."""

    def __init__(self, status: ParseStatus, message: str) -> None:
        super().__init__(message)
        self.status = status

    def as_call(self, raw: str) -> ParsedCall:
        return ParsedCall(status=self.status, raw=raw, error=str(self))


@dataclass(frozen=True)
class _Block:
    """A stretch of text: free text, or one ``<tool_call>`` with its tags."""

    start: int
    """Where it begins in the message."""
    raw: str
    is_text: bool
    is_closed: bool = True
    is_last: bool = False

    @property
    def body(self) -> str:
        return self.raw.removeprefix("<tool_call>").removesuffix("</tool_call>")

    def failure(self) -> ParsedCall | None:
        """What is wrong with a block before its body is read."""
        if self.is_closed:
            return None
        if self.is_last:
            return _truncated(self.raw)
        return _malformed("a second <tool_call> starts before </tool_call>").as_call(self.raw)


def _blocks(text: str) -> Iterator[_Block]:
    """Cut ``text`` at the call tags; a closing tag that closes nothing is text."""
    position, opened = 0, -1
    for tag in _CALL_TAG.finditer(text):
        if tag[0] == "<tool_call>":
            if opened < 0:
                yield _Block(position, text[position : tag.start()], is_text=True)
            else:
                yield _Block(opened, text[opened : tag.start()], is_text=False, is_closed=False)
            opened = tag.start()
        elif opened >= 0:
            position = tag.end()
            yield _Block(opened, text[opened:position], is_text=False)
            opened = -1
    if opened < 0:
        yield _Block(position, text[position:], is_text=True, is_last=True)
    else:
        yield _Block(opened, text[opened:], is_text=False, is_closed=False, is_last=True)


def _malformed(message: str) -> _UnreadableError:
    return _UnreadableError(ParseStatus.MALFORMED, message)


def _truncated(raw: str) -> ParsedCall:
    message = "the message ends inside the tool call; make shorter calls, or fewer at once"
    return _UnreadableError(ParseStatus.TRUNCATED, message).as_call(raw)


def _require_name(name: object) -> str:
    if not isinstance(name, str) or not name.strip():
        raise _UnreadableError(ParseStatus.MISSING_NAME, "the call does not name a function")
    return name.strip()


def _collect(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Arguments by name; a repeated name has no single meaning."""
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        if not key or key in arguments:
            raise _malformed(f"parameter {key!r} is {'given twice' if key else 'not named'}")
        arguments[key] = value
    return arguments


def _bare_function(raw: str, *, is_last: bool) -> ParsedCall:
    if is_last and not raw.endswith("</function>"):
        return _truncated(raw)
    return _malformed("<function=...> must stand inside <tool_call> and </tool_call>").as_call(raw)


def _read_xml(block: _Block, schemas: Schemas) -> ParsedCall:
    try:
        name, values = _xml_contents(block.body)
    except _UnreadableError as error:
        return error.as_call(block.raw)
    declared = _properties(schemas.get(name))
    arguments = {key: _typed(value, declared.get(key)) for key, value in values.items()}
    call = ToolCall(name=name, arguments=arguments)
    return ParsedCall(status=ParseStatus.OK, call=call, raw=block.raw)


def _xml_contents(body: str) -> tuple[str, dict[str, str]]:
    """Function name and values as written."""
    found = _FUNCTION.fullmatch(body)
    if found is None:
        raise _malformed(
            "expected <function=NAME> ... </function> and nothing else inside <tool_call>"
        )
    name, inside, position = _require_name(found[1]), found[2], 0
    pairs = []
    while parameter := _PARAMETER.match(inside, position):
        pairs.append((parameter[1].strip(), _unwrapped(parameter[2])))
        position = parameter.end()
    if inside[position:].strip():
        raise _malformed(
            f"expected <parameter=NAME> ... </parameter>, found {inside[position:].strip()[:40]!r}"
        )
    return name, _collect(pairs)


def _unwrapped(value: str) -> str:
    """A value without the line breaks that the format puts around it, one on each side."""
    return value.removeprefix("\n").removesuffix("\n")


def _properties(schema: ToolSchema | None) -> Mapping[str, Any]:
    properties = schema.parameters.get("properties") if schema else None
    return properties if isinstance(properties, dict) else {}


def _typed(raw: str, declared: object) -> Any:  # noqa: ANN401 - any JSON
    """``raw`` as JSON where the declaration says that it is not a string.

    Text that is no JSON stays a string: the environment, not the parser, judges a wrong type.
    """
    kind = declared.get("type") if isinstance(declared, dict) else None
    if kind is None or kind == "string" or (isinstance(kind, list) and "string" in kind):
        return raw
    try:
        return loads(raw)
    except ValueError:
        return _PYTHON_WORDS.get(raw.strip(), raw)


def _read_json(block: _Block) -> ParsedCall:
    try:
        contents = loads(block.body)
        if not isinstance(contents, dict):
            raise _malformed('expected a JSON object with "name" and "arguments"')
        name, arguments = _require_name(contents.get("name")), contents.get("arguments")
        if not isinstance(arguments, dict):
            raise _malformed('"arguments" must be a JSON object')
        call = ToolCall(name=name, arguments=arguments)
    except _UnreadableError as error:
        return error.as_call(block.raw)
    except ValueError as error:
        return _malformed(f"no valid JSON inside <tool_call>: {error}").as_call(block.raw)
    return ParsedCall(status=ParseStatus.OK, call=call, raw=block.raw)


def _read_dsml(text: str, start: int, end: int, *, is_closed: bool) -> Iterator[_Part]:
    """The invokes of one block, and what is left over as a failure."""
    position = start
    while invoke := _DSML_INVOKE.match(text, position, end):
        yield position, _dsml_call(invoke[0].strip(), invoke[1], invoke[2])
        position = invoke.end()
    rest = text[position:end].strip()
    if not rest and position > start:
        return
    raw = rest or _DSML_OPEN
    wrong = _malformed('expected <｜DSML｜invoke name="NAME"> blocks only')
    yield position, wrong.as_call(raw) if is_closed else _truncated(raw)


def _dsml_call(raw: str, name: str, inside: str) -> ParsedCall:
    pairs = []
    position = 0
    try:
        while parameter := _DSML_PARAMETER.match(inside, position):
            is_string, value = parameter[2] == "true", parameter[3]
            pairs.append((parameter[1], value if is_string else loads(value)))
            position = parameter.end()
        if rest := inside[position:].strip():
            raise _malformed(f"expected <｜DSML｜parameter ...> blocks, found {rest[:40]!r}")
        call = ToolCall(name=_require_name(name), arguments=_collect(pairs))
    except _UnreadableError as error:
        return error.as_call(raw)
    except ValueError as error:
        return _malformed(f'a parameter with string="false" is no JSON: {error}').as_call(raw)
    return ParsedCall(status=ParseStatus.OK, call=call, raw=raw)


def _dsml_invoke(call: ToolCall) -> str:
    lines = [f'<｜DSML｜invoke name="{call.name}">']
    for key, value in call.arguments.items():
        is_string = "true" if isinstance(value, str) else "false"
        lines.append(
            f'<｜DSML｜parameter name="{key}" string="{is_string}">{_as_text(value)}'
            "</｜DSML｜parameter>"
        )
    return "\n".join([*lines, "</｜DSML｜invoke>"])


def _reads_back(text: str, name: str, values: Mapping[str, str]) -> bool:
    """Whether one written XML call is read as one call of exactly these values."""
    blocks = [block for block in _blocks(text) if block.raw]
    try:
        return len(blocks) == 1 and _xml_contents(blocks[0].body) == (name, values)
    except _UnreadableError:
        return False


def _unwritable(wire_format: str, call: ToolCall) -> RecordError:
    return RecordError(
        f"a call of {call.name!r} cannot be written as {wire_format}: a name or value holds text "
        "that the format uses as a marker; write it as hermes_json, or change the value"
    )


def _as_text(value: Any) -> str:  # noqa: ANN401 - any JSON
    return value if isinstance(value, str) else dumps(value)


_FormatPart = TypeVar("_FormatPart")


def _lookup(table: Mapping[str, _FormatPart], name: str) -> _FormatPart:
    if name not in table:
        raise ConfigError(f"no wire format {name!r}; there are {sorted(table)}")
    return table[name]


_PARSERS: dict[str, ToolCallParser] = {
    "qwen_xml": parse_qwen_xml,
    "hermes_json": parse_hermes_json,
    "deepseek": parse_deepseek,
}
_WRITERS: dict[str, ToolCallWriter] = {
    "qwen_xml": write_qwen_xml,
    "hermes_json": write_hermes_json,
    "deepseek": write_deepseek,
}

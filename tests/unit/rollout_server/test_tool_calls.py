from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import ConfigError, RecordError
from miniverl_dist.schemas.messages import ParsedMessage, ParseStatus, ToolCall, ToolSchema
from rollout_server.tool_calls import (
    parse_deepseek,
    parse_hermes_json,
    parse_qwen_xml,
    parser,
    write_deepseek,
    write_hermes_json,
    write_qwen_xml,
    writer,
)

FORMATS = ("qwen_xml", "hermes_json", "deepseek")
OK, MALFORMED, TRUNCATED = ParseStatus.OK, ParseStatus.MALFORMED, ParseStatus.TRUNCATED


def schema(name: str, **types: object) -> ToolSchema:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return ToolSchema(name=name, description="", parameters=parameters)


MOVE = schema("mv", source="string", count="integer", deep="boolean", rate="number", tags="array")
SCHEMAS = {"mv": MOVE}


def xml(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def statuses(message: ParsedMessage) -> list[ParseStatus]:
    return [call.status for call in message.calls]


def only_call(message: ParsedMessage) -> ToolCall:
    assert statuses(message) == [OK]
    call = message.calls[0].call
    assert call is not None
    return call


# --- round trips -----------------------------------------------------------------------------

NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,11}", fullmatch=True)
PLAIN = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NASTY = st.lists(
    st.sampled_from(
        ["\n", " ", "</parameter>", "<", ">", "</function>", '"', "\\", "x", "null", "3"]
    ),
    max_size=5,
).map("".join)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(NAMES, PLAIN | NASTY | JSON_VALUES, max_size=4)
CALLS = st.lists(st.builds(ToolCall, name=NAMES, arguments=ARGUMENTS), max_size=3)


def kind_of(value: object) -> str:
    return "string" if isinstance(value, str) else "object"


def schemas_for(calls: list[ToolCall]) -> dict[str, ToolSchema] | None:
    """Schemas that say which arguments are strings, or None where two calls disagree."""
    kinds: dict[str, dict[str, str]] = {}
    for call in calls:
        for key, value in call.arguments.items():
            known = kinds.setdefault(call.name, {})
            if known.setdefault(key, kind_of(value)) != kind_of(value):
                return None
    return {name: schema(name, **known) for name, known in kinds.items()}


@pytest.mark.parametrize("wire_format", FORMATS)
@settings(deadline=None)
@given(calls=CALLS)
def test_what_is_written_is_read_again(wire_format: str, calls: list[ToolCall]) -> None:
    schemas = schemas_for(calls)
    try:
        text = writer(wire_format)(calls)
    except RecordError:
        assert wire_format != "hermes_json"  # JSON can express everything
        return
    if schemas is not None:
        message = parser(wire_format)(text, schemas)
        assert [call.call for call in message.calls] == calls
        assert message.text == ""


def test_qwen_wire_text() -> None:
    calls = [
        ToolCall(name="mv", arguments={"source": "a b\n", "count": 2, "deep": True, "tags": ["é"]}),
        ToolCall(name="pwd", arguments={}),
    ]
    assert write_qwen_xml(calls) == (
        "<tool_call>\n<function=mv>\n<parameter=source>\na b\n\n</parameter>\n"
        "<parameter=count>\n2\n"
        '</parameter>\n<parameter=deep>\ntrue\n</parameter>\n<parameter=tags>\n["é"]\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=pwd>\n</function>\n</tool_call>"
    )


@pytest.mark.parametrize(
    "value", ["</tool_call>", "<tool_call>", "x</parameter>\n<parameter=y>\nz"]
)
def test_qwen_refuses_what_it_cannot_express(value: str) -> None:
    with pytest.raises(RecordError, match="qwen_xml"):
        write_qwen_xml([ToolCall(name="f", arguments={"x": value})])
    call = ToolCall(name="f", arguments={"x": value})
    assert only_call(parse_hermes_json(write_hermes_json([call]))) == call


@pytest.mark.parametrize("name", ["", " f", "f>", "f\ng"])
def test_names_that_cannot_be_written(name: str) -> None:
    with pytest.raises(RecordError):
        write_qwen_xml([ToolCall(name=name, arguments={})])


def test_deepseek_refuses_what_it_cannot_express() -> None:
    with pytest.raises(RecordError, match="deepseek"):
        write_deepseek([ToolCall(name="f", arguments={"x": "</｜DSML｜parameter>"})])
    with pytest.raises(RecordError, match="deepseek"):
        write_deepseek([ToolCall(name='f"', arguments={})])
    assert write_deepseek([]) == ""


@pytest.mark.parametrize("wire_format", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), {1, 2}, float("inf")])
def test_arguments_that_are_no_json(wire_format: str, value: object) -> None:
    with pytest.raises(RecordError, match="not JSON"):
        writer(wire_format)([ToolCall(name="f", arguments={"x": value})])


# --- any text --------------------------------------------------------------------------------

FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
            "<function=",
            "</function>",
            "<parameter=x>",
            "<parameter=>",
            "</parameter>",
            "\n",
            '{"name": "f", "arguments": {"x": 1}}',
            '{"name": "f"',
            '{"name": 3, "arguments": {}}',
            "[" * 100_000,
            "[" * 70 + "]" * 70,
            "9" * 5000,
            '"\\ud800"',
            "1e999",
            "NaN",
            "\ud800",
            "<｜DSML｜tool_calls>",
            "</｜DSML｜tool_calls>",
            '<｜DSML｜invoke name="f">',
            "</｜DSML｜invoke>",
            '<｜DSML｜parameter name="x" string="false">',
            "</｜DSML｜parameter>",
        ]
    )
    | st.text(max_size=5),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("wire_format", FORMATS)
@settings(deadline=None, max_examples=200)
@given(text=FRAGMENTS | st.text(st.characters()))
def test_no_text_makes_a_parser_raise(wire_format: str, text: str) -> None:
    message = parser(wire_format)(text, {"f": schema("f", x="integer")})
    for call in message.calls:
        assert (call.call is None) == (call.status is not OK)
        assert (call.error is None) == (call.status is OK)
        assert call.raw
    assert ParsedMessage.model_validate_json(message.model_dump_json()) == message


@pytest.mark.parametrize("wire_format", FORMATS)
@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "<function=f>",
        "<parameter=x>",
        "</parameter>\n",
        "</function>\n",
        "<｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="f">',
        "\n",
    ],
)
@pytest.mark.parametrize("end", ["", "!</function></tool_call>", "</｜DSML｜tool_calls>"])
def test_time_grows_with_the_text(wire_format: str, unit: str, end: str) -> None:
    text = "<tool_call><function=f><parameter=x>" + unit * 20_000 + end
    started = time.process_time()
    parser(wire_format)(text, None)
    assert time.process_time() - started < 2.0  # a quadratic scan takes minutes


# --- one call cut or broken ------------------------------------------------------------------


@pytest.mark.parametrize("wire_format", FORMATS)
def test_a_call_cut_anywhere_is_truncated(wire_format: str) -> None:
    text = writer(wire_format)([ToolCall(name="mv", arguments={"source": "a", "count": 2})])
    opening = text.index(">") + 1
    for cut in range(opening, len(text)):
        message = parser(wire_format)(text[:cut], SCHEMAS)
        assert statuses(message)[-1:] == [TRUNCATED] or (
            wire_format == "deepseek" and statuses(message) == [OK]  # only the block is open
        ), text[:cut]
        assert message.text == ""


def test_dsml_calls_before_the_cut_are_kept() -> None:
    text = write_deepseek(
        [ToolCall(name="a", arguments={}), ToolCall(name="b", arguments={"x": 1})]
    )
    message = parse_deepseek(text[: text.index('string="false"')])
    assert statuses(message) == [OK, TRUNCATED]


def test_a_call_that_the_next_one_interrupts_is_malformed() -> None:
    text = "<tool_call>\n<function=pwd>" + xml("pwd")
    assert statuses(parse_qwen_xml(text)) == [MALFORMED, OK]


def test_peer_22_the_other_wire_format_is_an_error_not_silence() -> None:
    as_json = write_hermes_json([ToolCall(name="pwd", arguments={})])
    assert statuses(parse_qwen_xml(as_json)) == [MALFORMED]
    assert statuses(parse_hermes_json(xml("pwd"))) == [MALFORMED]
    bare = "I call <function=pwd>\n</function>"
    assert statuses(parse_qwen_xml(bare)) == [MALFORMED]
    assert statuses(parse_qwen_xml("<function=pwd>\n<param")) == [TRUNCATED]


@pytest.mark.parametrize("wire_format", FORMATS)
def test_peer_23_parallel_calls_are_all_found_in_order(wire_format: str) -> None:
    calls = [ToolCall(name="a", arguments={"x": "1"}), ToolCall(name="b", arguments={"y": "2"})]
    message = parser(wire_format)("Both.\n\n" + writer(wire_format)(calls))
    assert [call.call for call in message.calls] == calls
    assert message.text == "Both."


def test_peer_24_malformed_json_is_an_observation_not_a_crash() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a":1\n</tool_call>'
    message = parse_hermes_json(text)
    assert statuses(message) == [MALFORMED]
    assert message.calls[0].raw == text
    assert "delimiter" in str(message.calls[0].error)
    assert statuses(parse_hermes_json('<tool_call>\n{"name": "f", "arguments": {"a":1')) == [
        TRUNCATED
    ]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"name": "f", "arguments": []}', MALFORMED),
        ('{"name": "f", "arguments": "{}"}', MALFORMED),
        ('{"name": "f"}', MALFORMED),
        ('[{"name": "f", "arguments": {}}]', MALFORMED),
        ('{"arguments": {}}', ParseStatus.MISSING_NAME),
        ('{"name": " ", "arguments": {}}', ParseStatus.MISSING_NAME),
        ('{"name": "f", "arguments": {"x": NaN}}', MALFORMED),
        ('{"name": "f", "arguments": {"x": 1e999}}', MALFORMED),
        ('{"name": "f", "arguments": {"x": "\\ud83d"}}', MALFORMED),
        ('{"name": "f", "arguments": {"x": ' + "[" * 70 + "]" * 70 + "}}", MALFORMED),
        ('{"name": "f", "arguments": {}} extra', MALFORMED),
        ('{"name": "f", "arguments": {"x": ' + "[" * 100_000, MALFORMED),
        ("", MALFORMED),
    ],
)
def test_json_that_is_no_call(body: str, status: ParseStatus) -> None:
    assert statuses(parse_hermes_json(f"<tool_call>{body}</tool_call>")) == [status]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("<function=></function>", ParseStatus.MISSING_NAME),
        ("<function=f>", MALFORMED),
        ("<function=f>loose text</function>", MALFORMED),
        ("<function=f><parameter=x>1</function>", MALFORMED),
        ("<function=f></function> and more", MALFORMED),
        ("<function=f><parameter=>1</parameter></function>", MALFORMED),
        ("<function=f><parameter=x>1</parameter><parameter=x>2</parameter></function>", MALFORMED),
    ],
)
def test_xml_that_is_no_call(body: str, status: ParseStatus) -> None:
    assert statuses(parse_qwen_xml(f"<tool_call>{body}</tool_call>")) == [status]


@pytest.mark.parametrize(
    ("inner", "status"),
    [
        ("", MALFORMED),
        ("text", MALFORMED),
        ('<｜DSML｜invoke name=""></｜DSML｜invoke>', ParseStatus.MISSING_NAME),
        ('<｜DSML｜invoke name="f">text</｜DSML｜invoke>', MALFORMED),
        (
            '<｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="false">{'
            "</｜DSML｜parameter></｜DSML｜invoke>",
            MALFORMED,
        ),
    ],
)
def test_dsml_that_is_no_call(inner: str, status: ParseStatus) -> None:
    text = f"<｜DSML｜tool_calls>{inner}</｜DSML｜tool_calls>"
    assert statuses(parse_deepseek(text)) == [status]


# --- types of XML values ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("source", "5", "5"),
        ("source", '"quoted"', '"quoted"'),
        ("source", " two\nlines ", " two\nlines "),
        ("source", "", ""),
        ("count", "5", 5),
        ("count", "five", "five"),
        ("count", "1e999", "1e999"),
        ("rate", "5.0", 5.0),
        ("deep", "true", True),
        ("deep", "True", True),
        ("deep", "None", None),
        ("tags", '["a", 1]', ["a", 1]),
        ("undeclared", "5", "5"),
    ],
)
def test_values_are_typed_by_the_schema(key: str, written: str, read: object) -> None:
    value = only_call(parse_qwen_xml(xml("mv", **{key: written}), SCHEMAS)).arguments[key]
    assert value == read
    assert type(value) is type(read)


def test_values_are_strings_without_a_schema() -> None:
    assert only_call(parse_qwen_xml(xml("mv", count="5"))).arguments == {"count": "5"}
    assert only_call(parse_qwen_xml(xml("rm", count="5"), SCHEMAS)).arguments == {"count": "5"}


def test_a_value_may_hold_what_closes_a_value() -> None:
    call = ToolCall(name="f", arguments={"x": "a</parameter> b", "y": "</function>"})
    assert only_call(parse_qwen_xml(write_qwen_xml([call]))) == call


def test_strange_schemas_do_no_harm() -> None:
    strange: list[dict[str, Any]] = [
        {},
        {"properties": None},
        {"properties": {"x": None}},
        {"properties": {"x": {"type": ["string", "null"]}}},
        {"properties": {"x": {"enum": ["5"]}}},
    ]
    for parameters in strange:
        tool = ToolSchema(name="f", description="", parameters=parameters)
        assert only_call(parse_qwen_xml(xml("f", x="5"), {"f": tool})).arguments == {"x": "5"}


def test_values_on_one_line_are_read_too() -> None:
    text = "<tool_call><function=mv><parameter=count>5</parameter></function></tool_call>"
    assert only_call(parse_qwen_xml(text, SCHEMAS)).arguments == {"count": 5}


def test_free_text_around_calls_is_kept() -> None:
    message = parse_qwen_xml(f"Before {xml('pwd')} after </tool_call> end")
    assert message.text == "Before  after </tool_call> end"
    assert statuses(message) == [OK]


def test_hermes_tags_inside_of_strings_survive() -> None:
    call = ToolCall(name="say", arguments={"text": "</tool_call><tool_call>"})
    text = write_hermes_json([call])
    assert text.count("<tool_call>") == 1
    assert only_call(parse_hermes_json(text)) == call
    assert json.loads(text.splitlines()[1])["arguments"] == call.arguments


@pytest.mark.parametrize("registry", [parser, writer])
def test_unknown_formats(registry: Callable[[str], object]) -> None:
    with pytest.raises(ConfigError, match=r"yaml.*qwen_xml"):
        registry("yaml")

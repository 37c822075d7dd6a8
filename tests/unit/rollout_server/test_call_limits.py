"""How many calls of one message are read."""

from __future__ import annotations

import time

import pytest

from miniverl_dist.schemas.messages import ParsedMessage, ParseStatus
from rollout_server.tool_calls import MAX_CALLS, parse_deepseek, parser

OK, MALFORMED = ParseStatus.OK, ParseStatus.MALFORMED
MANY = 200_000
DSML = "｜DSML｜"
INVOKE = f'<{DSML}invoke name="f"></{DSML}invoke>'


def statuses(message: ParsedMessage) -> list[ParseStatus]:
    return [call.status for call in message.calls]


@pytest.mark.parametrize(
    ("wire_format", "one"),
    [
        ("qwen_xml", "<tool_call>"),
        ("hermes_json", "<tool_call>"),
        ("qwen_xml", "<tool_call><function=f></function></tool_call>"),
        ("hermes_json", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("qwen_xml", "<function=f></function>"),
        ("deepseek", f"<{DSML}tool_calls>{INVOKE}</{DSML}tool_calls>"),
        ("deepseek", f"<{DSML}tool_calls></{DSML}tool_calls>"),
    ],
)
def test_the_calls_of_one_message_are_bounded(wire_format: str, one: str) -> None:
    read, started = parser(wire_format), time.thread_time()
    message = read(f"Before {one * MANY} after")
    assert time.thread_time() - started < 2
    assert len(message.calls) == MAX_CALLS + 1
    assert message.text.startswith("Before")
    rest = message.calls[-1]
    assert (rest.status, rest.call) == (MALFORMED, None)
    assert rest.error == "more than 512 calls in one message; make fewer at once"
    # A block of DSML has begun when its first call turns out to be one too many.
    assert rest.raw == f"{one * (MANY - MAX_CALLS)} after".removeprefix(f"<{DSML}tool_calls>")
    fits = read(one * (MAX_CALLS - 1) + "x")
    assert not any("more than" in (call.error or "") for call in fits.calls)


def test_the_invokes_of_one_block_are_bounded() -> None:
    message = parse_deepseek(f"<{DSML}tool_calls>{INVOKE * MANY}</{DSML}tool_calls> after")
    assert statuses(message) == [OK] * MAX_CALLS + [MALFORMED]
    assert message.calls[-1].raw.count(INVOKE) == MANY - MAX_CALLS
    assert message.text == ""
    exactly = parse_deepseek(f"<{DSML}tool_calls>{INVOKE * MAX_CALLS}</{DSML}tool_calls> after")
    assert statuses(exactly) == [OK] * MAX_CALLS
    assert exactly.text == "after"

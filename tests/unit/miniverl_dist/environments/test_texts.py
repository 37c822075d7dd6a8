from __future__ import annotations

from miniverl_dist.environments.texts import cut, write_json_lines
from miniverl_dist.schemas.messages import ToolCall


def test_the_default_writer_writes_json_lines() -> None:
    calls = [ToolCall(name="a", arguments={"x": "é"}), ToolCall(name="b", arguments={})]
    text = '{"name": "a", "arguments": {"x": "é"}}\n{"name": "b", "arguments": {}}'
    assert write_json_lines(calls) == text


def test_cut_keeps_to_the_limit_and_says_so() -> None:
    assert cut("x" * 20, 20) == "x" * 20
    assert cut("x" * 21, 20) == "x" * 11 + " ...[cut]"
    assert [len(cut("x" * 50, size)) for size in (1, 5, 9, 10, 49)] == [1, 5, 9, 10, 49]

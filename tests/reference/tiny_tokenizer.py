"""Tokenizers small enough to reason about, in the form of a ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miniverl_dist.tokens.hf import HfTokenizer, byte_level_text, prepare

QWEN_LIKE = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<think>", False),
    ("</think>", False),
)
DEEPSEEK_LIKE = (
    ("<｜begin▁of▁sentence｜>", True),
    ("<｜end▁of▁sentence｜>", True),
    ("<｜User｜>", False),
    ("<｜Assistant｜>", False),
    ("<think>", False),
    ("</think>", False),
)


def added_token(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def byte_level_spec(
    words: Sequence[str] = (),
    added: Sequence[tuple[str, bool]] = (),
    *,
    missing: bytes = b"",
    normalizer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Byte tokens (id = byte where none is missing), then ``words`` with all their prefixes."""
    tokens = [bytes([byte]) for byte in range(256) if byte not in missing]
    merges: list[list[str]] = []
    for word in words:
        data = word.encode()
        for end in range(2, len(data) + 1):
            if data[:end] not in tokens:
                tokens.append(data[:end])
                pair = data[: end - 1], data[end - 1 : end]
                merges.append([byte_level_text(part) for part in pair])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(len(tokens) + n, content, special=special)
            for n, (content, special) in enumerate(added)
        ],
        "normalizer": normalizer,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "vocab": {byte_level_text(token): i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def marked_spec(words: Sequence[str] = ()) -> dict[str, Any]:
    """SentencePiece style: U+2581 for a blank, ``<0xNN>`` for what the vocabulary lacks."""
    letters = sorted({*"abcdefghijklmnopqrstuvwxyzH.=15!\u2581", *"".join(words)})
    tokens = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges: list[list[str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append([word[: end - 1], word[end - 1]])
    return {
        "version": "1.0",
        "added_tokens": [
            added_token(0, "<unk>", special=True),
            added_token(1, "<bos>", special=True),
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def tokenizer(spec: dict[str, Any], name: str = "tiny") -> HfTokenizer:
    return HfTokenizer(name, prepare(spec, name))


def qwen_like(*words: str) -> HfTokenizer:
    return tokenizer(byte_level_spec(words, QWEN_LIKE), "qwen-like")


def deepseek_like(*words: str) -> HfTokenizer:
    return tokenizer(byte_level_spec(words, DEEPSEEK_LIKE), "deepseek-like")

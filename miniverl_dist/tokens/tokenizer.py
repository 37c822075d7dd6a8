"""The tokenizer protocol: real ids, exact bytes, no hidden template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from miniverl_dist.tokens.byte_table import ByteTable


class TokenizerLike(Protocol):
    """What the rest of the system needs from a tokenizer.

    ``encode`` never produces a *special* (control) token from text: a user who types
    ``<|im_end|>`` gets ordinary tokens. Added tokens that are not special (``<tool_call>``,
    ``<think>``) are matched in text, as the model's own tokenizer does.
    """

    @property
    def name(self) -> str:
        """Short name, for instance ``qwen3.6``."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over vocabulary, merges and added tokens (hex); equal means interchangeable."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""

    @property
    def byte_table(self) -> ByteTable:
        """The bytes that each id stands for."""

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text."""

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids that spell exactly ``data``; only invalid UTF-8 bytes become byte tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids' bytes; invalid UTF-8 becomes U+FFFD, special tokens vanish."""

    def special_id(self, text: str) -> int:
        """Id of a special token by its text. Raises ``TokenizerError`` when there is none."""

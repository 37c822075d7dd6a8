"""A tokenizer restricted to a declared set of its own ids.

A toy model has a softmax over a few hundred rows, not a quarter of a million. The ids stay real
ids of the base tokenizer; text beyond the set is spelled in byte tokens, so every text can be
written and its bytes stay exact.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from miniverl_dist.errors import ChecksumError, TokenizerError, TokenizerMismatchError
from miniverl_dist.tokens.byte_table import ByteTable
from miniverl_dist.tokens.tokenizer import TokenizerLike

_FORMAT = 1


class SubVocabulary:
    """`TokenizerLike` over the declared ids, all byte tokens included.

    Trajectories of a model with this vocabulary carry this object's fingerprint, not the base's.

    Args:
        base: The tokenizer whose ids these are.
        ids: Declared ids; the base's byte tokens are added.

    Raises:
        TokenizerError: an id that the base does not have.
    """

    def __init__(self, base: TokenizerLike, ids: Iterable[int]) -> None:
        byte_ids = base.byte_table.byte_ids.tolist()
        chosen = {*ids, *(byte_id for byte_id in byte_ids if byte_id >= 0)}
        foreign = sorted(i for i in chosen if not 0 <= i < base.vocab_size)
        if foreign:
            raise TokenizerError(
                f"ids {foreign[:5]} are not ids of {base.name} (0 .. {base.vocab_size - 1})"
            )
        self._base = base
        self._ids = tuple(sorted(chosen))
        self._rows = MappingProxyType({token_id: row for row, token_id in enumerate(self._ids)})
        self._fingerprint = hashlib.sha256(
            json.dumps([base.fingerprint, self._ids]).encode()
        ).hexdigest()

    @classmethod
    def from_texts(
        cls, base: TokenizerLike, texts: Iterable[str], special_texts: Iterable[str]
    ) -> SubVocabulary:
        """The ids that occur in ``texts``, and the special tokens named.

        Raises:
            TokenizerError: the base has no special token of such a text.
        """
        occurring = {token_id for text in texts for token_id in base.encode(text)}
        return cls(base, occurring | {base.special_id(text) for text in special_texts})

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by contents."""
        return SubVocabulary, (self._base, self._ids)

    @property
    def base(self) -> TokenizerLike:
        """The tokenizer whose ids these are."""
        return self._base

    @property
    def ids(self) -> tuple[int, ...]:
        """Real ids, ascending; entry r is the id of softmax row r."""
        return self._ids

    @property
    def rows(self) -> Mapping[int, int]:
        """Real id -> softmax row."""
        return self._rows

    @property
    def name(self) -> str:
        """Base name and number of ids."""
        return f"{self._base.name}[{len(self._ids)}]"

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the base's fingerprint and the ids (hex)."""
        return self._fingerprint

    @property
    def vocab_size(self) -> int:
        """Number of ids of the base: ids here range as far; `ids` counts the rows."""
        return self._base.vocab_size

    @property
    def byte_table(self) -> ByteTable:
        """The base's table."""
        return self._base.byte_table

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text, all of them in the set."""
        return self._restricted(self._base.encode(text))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids that spell exactly ``data``, all of them in the set."""
        return self._restricted(self._base.encode_bytes(data))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids' bytes."""
        return self._base.decode(ids)

    def special_id(self, text: str) -> int:
        """Id of a special token by its text.

        Raises:
            TokenizerError: the base has none, or it is not in the set.
        """
        token_id = self._base.special_id(text)
        if token_id not in self._rows:
            raise TokenizerError(
                f"special token {text!r} of {self._base.name} is not in this sub-vocabulary; name "
                "it in special_texts when the set is declared"
            )
        return token_id

    def save(self, path: Path) -> None:
        """Write the declaration as JSON with a checksum."""
        contents = {
            "format": _FORMAT,
            "base": self._base.name,
            "base_fingerprint": self._base.fingerprint,
            "ids": self._ids,
        }
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(contents | {"sha256": _checksum(contents)}))
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path, base: TokenizerLike) -> SubVocabulary:
        """Read what `save` wrote.

        Raises:
            ChecksumError: a truncated, changed or foreign file.
            TokenizerMismatchError: it was declared over another base.
        """
        contents = _read(path)
        if contents["base_fingerprint"] != base.fingerprint:
            raise TokenizerMismatchError(
                f"{path} was declared over {contents['base']} "
                f"({contents['base_fingerprint'][:12]}), found {base.name} "
                f"({base.fingerprint[:12]})"
            )
        return cls(base, contents["ids"])

    def _restricted(self, ids: list[int]) -> list[int]:
        if all(token_id in self._rows for token_id in ids):
            return ids
        table = self._base.byte_table
        restricted: list[int] = []
        for token_id in ids:
            if token_id in self._rows:
                restricted.append(token_id)
            else:
                restricted += table.spell(table.pieces[token_id])
        return restricted


def _checksum(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise TokenizerError(
            f"cannot read the sub-vocabulary {path}: {error.strerror or error}"
        ) from None
    except UnicodeDecodeError:
        text = ""
    try:
        contents = dict(json.loads(text))
        checksum = contents.pop("sha256")
        is_sound = contents["format"] == _FORMAT and checksum == _checksum(contents)
    except (ValueError, KeyError, TypeError):
        is_sound = False
    if not is_sound:
        raise ChecksumError(
            f"{path} is not a sub-vocabulary of format {_FORMAT} with a matching checksum; it is "
            "truncated or changed: write it again, or take it from another checkpoint"
        )
    return contents

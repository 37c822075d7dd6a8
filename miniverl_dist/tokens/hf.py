"""Tokenizers in the ``tokenizers`` library's JSON form: byte-level or SentencePiece-style BPE.

Both families map ids back to exact bytes: the first through the GPT-2 byte alphabet, the second
through its ``<0xNN>`` tokens and the mark U+2581 for a blank. Anything else is refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from miniverl_dist.errors import MissingDependencyError, TokenizerError, install_hint
from miniverl_dist.tokens.byte_table import ByteTable, without_surrogates
from miniverl_dist.tokens.cache import cached

FORMAT = 1
"""Version of the cached form; part of every entry's name."""
INSTALL_HINT = install_hint("local")

_LONG_CHARS = 10_000
"""Milliseconds of work."""
_INVALID_BYTES = re.compile("([\udc80-\udcff]+)")
_CONTROL_FORM = re.compile(r"<([|｜]).*\1>")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK_MARK = "\u2581"
_PROBES = ("a", "Hello world", " lead", "two  blanks\n\n\tend ", "x=1.5", "né", "漢字", "🙂!")


class Prepared(msgspec.Struct, frozen=True):
    """What loading needs, as it lies in the cache."""

    tokenizer_json: str
    """Without truncation, padding, post-processing or dropout; control tokens flagged special."""
    fingerprint: str
    pieces: bytes
    lengths: bytes
    """[V] int32, little-endian."""
    special: bytes
    """[V] bool."""
    byte_level: bool
    """Bytes through the GPT-2 alphabet; else through ``<0xNN>`` and the U+2581 mark."""

    def byte_table(self) -> ByteTable:
        """The table that the arrays describe."""
        lengths = np.frombuffer(self.lengths, dtype="<i4").astype(np.int32)
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        pieces = tuple(
            self.pieces[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)
        )
        return ByteTable(pieces, lengths, np.frombuffer(self.special, dtype=np.bool_))


def prepare(spec: dict[str, Any], source: str) -> Prepared:
    """Check a ``tokenizer.json`` and derive its fingerprint and byte table.

    Args:
        spec: The parsed file; changed in place.
        source: Where it comes from, for errors.

    Raises:
        TokenizerError: not a BPE whose ids map back to exact bytes.
    """
    byte_level = _is_byte_level(spec, source)
    # Any of these would change or cut what is encoded, or add tokens to it.
    spec.update(truncation=None, padding=None, post_processor=None)
    spec["model"]["dropout"] = None
    for token in spec["added_tokens"]:
        token["special"] = is_control(token)
        token["lstrip"] = token["rstrip"] = False  # else a match eats blanks around it
    table = _byte_table(spec, byte_level=byte_level)
    return Prepared(
        tokenizer_json=json.dumps(spec, ensure_ascii=False),
        fingerprint=_fingerprint(spec),
        pieces=b"".join(table.pieces),
        lengths=table.lengths.astype("<i4").tobytes(),
        special=table.special.tobytes(),
        byte_level=byte_level,
    )


def is_control(token: dict[str, Any]) -> bool:
    """Whether an added token controls the conversation: flagged special, or spelled ``<|...|>``.

    DeepSeek's file leaves its role markers unflagged; text that could make one would let a user
    speak as the assistant.
    """
    return bool(token["special"]) or _CONTROL_FORM.fullmatch(token["content"]) is not None


def prepare_cached(
    name: str, source: bytes, build: Callable[[], dict[str, Any]], where: str
) -> Prepared:
    """Like `prepare`, through the user's cache; the entry is keyed by ``source``'s checksum."""
    key = f"{name}-{hashlib.sha256(source).hexdigest()[:32]}.v{FORMAT}"
    encoded = cached(key, lambda: msgspec.msgpack.encode(prepare(build(), where)))
    return msgspec.msgpack.decode(encoded, type=Prepared)


def package_file(package: str, *parts: str) -> Path:
    """A data file of an installed package, without importing the package.

    Raises:
        MissingDependencyError: the package, or the file in it, is not there.
    """
    found = importlib.util.find_spec(package)
    folders = found.submodule_search_locations if found else None
    path = Path(folders[0], *parts) if folders else None
    if path is None or not path.is_file():
        raise MissingDependencyError(
            f"{'/'.join((package, *parts))} is not installed; the tokenizers come with "
            f"{INSTALL_HINT}"
        )
    return path


class HfTokenizer:
    """`TokenizerLike` over the ``tokenizers`` library.

    Args:
        name: Short name.
        prepared: From `prepare`.

    Raises:
        MissingDependencyError: the ``tokenizers`` package is not installed.
        TokenizerError: encoding does not give back the bytes of ordinary text.
    """

    def __init__(self, name: str, prepared: Prepared) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingDependencyError(
                f"tokenizer {name!r} needs the package tokenizers: {INSTALL_HINT}"
            ) from error
        self._name = name
        self._prepared = prepared
        self._table = prepared.byte_table()
        self._tokenizer = Tokenizer.from_str(prepared.tokenizer_json)
        # The library's switch: control tokens in text are spelled like any other text.
        self._tokenizer.encode_special_tokens = True
        self._normalizer = self._take_normalizer()
        self._special = {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._special_ids = frozenset(self._special.values())
        self._check_probes()

    @classmethod
    def from_folder(cls, folder: Path) -> HfTokenizer:
        """Load ``folder/tokenizer.json``.

        Raises:
            TokenizerError: no such file, not JSON, or a kind of tokenizer that is refused.
        """
        path = folder / "tokenizer.json"
        try:
            source = path.read_bytes()
        except OSError as error:
            raise TokenizerError(
                f"no tokenizer at {path}: {error.strerror}; expected a folder that holds "
                "tokenizer.json (transformers' save_pretrained of a fast tokenizer writes it)"
            ) from error
        prepared = prepare_cached("hf", source, lambda: _parse(source, path), str(path))
        return cls(folder.resolve().name, prepared)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by contents: the library's own pickle forgets ``encode_special_tokens``."""
        return HfTokenizer, (self._name, self._prepared)

    @property
    def name(self) -> str:
        """Short name."""
        return self._name

    @property
    def fingerprint(self) -> str:
        """SHA-256 over vocabulary, merges and added tokens (hex)."""
        return self._prepared.fingerprint

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens and holes included."""
        return len(self._table.pieces)

    @property
    def byte_table(self) -> ByteTable:
        """The bytes that each id stands for."""
        return self._table

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text, normalised as the model's own tokenizer does.

        A character that the vocabulary cannot spell becomes U+FFFD.
        """
        text = without_surrogates(text)
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        ids = self._raw(text)
        if (self._table.byte_ids < 0).any() and not self._spells(ids, text):
            lost = self._inexact_characters(text)
            ids = self._raw("".join("\ufffd" if c in lost else c for c in text))
        return ids

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids that spell exactly ``data``, without normalisation.

        Raises:
            TokenizerError: the vocabulary has no token for one of the bytes.
        """
        ids: list[int] = []
        # surrogateescape turns each invalid byte, and nothing else, into one of U+DC80..U+DCFF.
        for part in _INVALID_BYTES.split(data.decode("utf-8", "surrogateescape")):
            if _INVALID_BYTES.match(part):
                ids += self._table.spell(part.encode("utf-8", "surrogateescape"))
            elif part:
                ids += self._exact(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids' bytes; invalid UTF-8 becomes U+FFFD, special tokens vanish."""
        return self._table.join(ids).decode("utf-8", "replace")

    def special_id(self, text: str) -> int:
        """Id of a control token by its text.

        Raises:
            TokenizerError: no control token is spelled so.
        """
        found = self._special.get(text)
        if found is None:
            raise TokenizerError(
                f"tokenizer {self._name!r} has no special token {text!r}; it has "
                f"{sorted(self._special)[:12]}"
            )
        return found

    def _take_normalizer(self) -> Any | None:  # noqa: ANN401 - an untyped package
        """Split a byte-level tokenizer's normaliser off: its raw path must keep all bytes.

        With the U+2581 mark it stays: it is what turns blanks into marks.
        """
        if not self._prepared.byte_level:
            return None
        normalizer, self._tokenizer.normalizer = self._tokenizer.normalizer, None
        return normalizer

    def _raw(self, text: str) -> list[int]:
        if len(text) < _LONG_CHARS:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        else:
            # Of the library's ways only this one lets other threads, and so deadlines, go on.
            ids = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        if self._special_ids.isdisjoint(ids):
            return ids
        # A vocabulary may hold a control token as an ordinary entry, too.
        return [part for token_id in ids for part in self._unspecial(token_id)]

    def _unspecial(self, token_id: int) -> list[int]:
        if token_id not in self._special_ids:
            return [token_id]
        text = next(text for text, special_id in self._special.items() if special_id == token_id)
        return self._table.spell(text.encode())

    def _spells(self, ids: Sequence[int], text: str) -> bool:
        return self._table.join(ids) == text.encode()

    def _exact(self, text: str) -> list[int]:
        """Ids of ``text``; characters that the tokenizer changes become byte tokens."""
        ids = self._raw(text)
        if self._spells(ids, text):
            return ids
        lost = self._inexact_characters(text)
        ids = []
        for part in re.split(f"([{re.escape(''.join(sorted(lost)))}])", text) if lost else [text]:
            kept = [] if part in lost else self._raw(part)
            ids += kept if self._spells(kept, part) else self._table.spell(part.encode())
        return ids

    def _inexact_characters(self, text: str) -> set[str]:
        return {c for c in set(text) if not self._spells(self._raw(c), c)}

    def _check_probes(self) -> None:
        for probe in _PROBES:
            found = self._table.join(self._raw(probe))
            if found != probe.encode():
                raise TokenizerError(
                    f"tokenizer {self._name!r} spells {probe!r} as {found!r}; expected the same "
                    "bytes (a blank that it adds in front, a lower-casing or an incomplete "
                    "alphabet cannot be used: scores are aligned byte by byte)"
                )


def _parse(source: bytes, path: Path) -> dict[str, Any]:
    try:
        spec = json.loads(source)
        spec["model"]["vocab"], spec["added_tokens"]
    except (ValueError, KeyError, TypeError) as error:
        raise TokenizerError(
            f"{path} is not a tokenizer.json: {type(error).__name__}: {error}; write it again "
            "with transformers' save_pretrained"
        ) from error
    return dict(spec)


def _is_byte_level(spec: dict[str, Any], source: str) -> bool:
    model, decoders = spec["model"], set(_types(spec.get("decoder")))
    if model.get("type", "BPE") == "BPE":
        if "ByteLevel" in decoders:
            return True
        if model.get("byte_fallback") and decoders >= {"Replace", "ByteFallback"}:
            return False
    raise TokenizerError(
        f"{source}: found a {model.get('type')} model with decoders {sorted(decoders)}; expected "
        "byte-level BPE, or BPE with byte fallback and the U+2581 mark: only their ids map back "
        "to exact bytes"
    )


def _byte_table(spec: dict[str, Any], *, byte_level: bool) -> ByteTable:
    vocab, added = spec["model"]["vocab"], spec["added_tokens"]
    size = 1 + max([*vocab.values(), *(token["id"] for token in added)])
    pieces, special = [b""] * size, [True] * size  # holes carry nothing
    piece_of = _byte_level_piece if byte_level else _marked_piece
    for token, token_id in vocab.items():
        pieces[token_id], special[token_id] = piece_of(token), False
    for entry in added:
        text = entry["content"]
        pieces[entry["id"]] = text.encode() if byte_level else _marked_piece(text)
        special[entry["id"]] = entry["special"]
    return ByteTable.from_pieces(pieces, special)


def _types(part: Any) -> Iterable[str]:  # noqa: ANN401 - any JSON
    if isinstance(part, dict):
        yield part["type"]
        for inner in part.get("decoders", []):
            yield from _types(inner)


def _byte_alphabet() -> dict[int, str]:
    """Character of the GPT-2 byte alphabet -> character with that byte's code.

    Source: printable Latin-1 bytes stand for themselves, the others are numbered from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {b: chr(b) for b in plain} | {0x100 + n: chr(b) for n, b in enumerate(others)}


_ALPHABET = _byte_alphabet()
_LETTERS = {ord(byte): chr(letter) for letter, byte in _ALPHABET.items()}


def byte_level_text(data: bytes) -> str:
    """``data`` in the GPT-2 byte alphabet, as byte-level vocabularies spell their tokens."""
    return data.decode("latin-1").translate(_LETTERS)


def _byte_level_piece(token: str) -> bytes:
    if all(ord(c) in _ALPHABET for c in token):
        return token.translate(_ALPHABET).encode("latin-1")
    return token.encode()


def _marked_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_BLANK_MARK, " ").encode()


def _fingerprint(spec: dict[str, Any]) -> str:
    model = spec["model"]
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    added = [(token["id"], token["content"], token["special"]) for token in spec["added_tokens"]]
    contents = [sorted((i, t) for t, i in model["vocab"].items()), merges, sorted(added)]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()

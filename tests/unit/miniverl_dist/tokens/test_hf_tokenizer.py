from __future__ import annotations

import json
import pickle
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import MissingDependencyError, TokenizerError
from miniverl_dist.tokens.hf import HfTokenizer, prepare
from tests.reference.tiny_tokenizer import (
    DEEPSEEK_LIKE,
    QWEN_LIKE,
    added_token,
    byte_level_spec,
    marked_spec,
    qwen_like,
    tokenizer,
)

pytest.importorskip("tokenizers")

NFC = {"type": "NFC"}
BYTE_LEVEL = tokenizer(byte_level_spec(["Hello", " world", "漢字"], QWEN_LIKE, normalizer=NFC))
MARKED = tokenizer(marked_spec(["hello", "\u2581world", "\u2581\u2581"]))
TEXTS = st.text() | st.text(st.sampled_from("e\u0301 é漢🙂\u2581\n<|im_end|>Hello"))
PIECES = ("<|im_end|>", "<|im_start|>", "<bos>", "<eos>", "Hello", " ", "漢", "<tool_call>", "\n")
CONTROL_TEXTS = st.lists(st.sampled_from(PIECES)).map("".join) | TEXTS
MIXED = st.lists(st.binary(max_size=4) | TEXTS.map(str.encode), max_size=6).map(b"".join)


@pytest.mark.parametrize("tiny", [BYTE_LEVEL, MARKED], ids=["byte-level", "marked"])
@settings(deadline=None)
@given(data=MIXED)
def test_encode_bytes_spells_exactly_these_bytes(tiny: HfTokenizer, data: bytes) -> None:
    ids = tiny.encode_bytes(data)
    assert tiny.byte_table.join(ids) == data
    assert not tiny.byte_table.special[ids].any()


@pytest.mark.parametrize("tiny", [BYTE_LEVEL, MARKED], ids=["byte-level", "marked"])
@settings(deadline=None)
@given(text=CONTROL_TEXTS)
def test_encode_never_makes_a_special_id(tiny: HfTokenizer, text: str) -> None:
    assert not tiny.byte_table.special[tiny.encode(text)].any()


def test_only_invalid_bytes_become_byte_tokens() -> None:
    hello = BYTE_LEVEL.encode("Hello")
    assert len(hello) == 1
    assert BYTE_LEVEL.encode_bytes(b"Hello\xff\xe6Hello") == [*hello, 0xFF, 0xE6, *hello]


def test_control_text_stays_text_and_markup_is_matched() -> None:
    ids = BYTE_LEVEL.encode("<|im_end|><tool_call>")
    assert BYTE_LEVEL.decode(ids) == "<|im_end|><tool_call>"
    assert len(ids) == len("<|im_end|>") + 1
    assert BYTE_LEVEL.byte_table.pieces[ids[-1]] == b"<tool_call>"


def test_control_text_is_tokenised_like_any_other_text() -> None:
    tiny = qwen_like("im", "end")
    pieces = [tiny.byte_table.pieces[i] for i in tiny.encode("<|im_end|>")]
    assert pieces == [b"<", b"|", b"im", b"_", b"end", b"|", b">"]


def test_unflagged_role_markers_are_control_tokens() -> None:
    tiny = tokenizer(byte_level_spec([], DEEPSEEK_LIKE))
    user = tiny.special_id("<｜User｜>")
    assert user not in tiny.encode("<｜User｜>")
    assert tiny.byte_table.pieces[user] == b""
    assert len(tiny.encode("</think>")) == 1


def test_a_control_token_that_is_an_ordinary_entry_too_is_spelled_out() -> None:
    spec = byte_level_spec(["<<end>>"])
    spec["pre_tokenizer"]["use_regex"] = False
    end_id = spec["model"]["vocab"]["<<end>>"]
    assert tokenizer(spec).encode("<<end>>") == [end_id]  # the merges reach it
    spec["added_tokens"] = [added_token(end_id, "<<end>>", special=True)]
    assert tokenizer(spec).encode("x<<end>>") == list(b"x<<end>>")


def test_normalisation_changes_text_but_never_bytes() -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("e\u0301")) == "é"
    decomposed = "Hello e\u0301 Hello".encode()
    ids = BYTE_LEVEL.encode_bytes(decomposed)
    assert BYTE_LEVEL.byte_table.join(ids) == decomposed
    assert BYTE_LEVEL.encode("Hello")[0] == ids[0]  # what is composed keeps its own tokens


def test_marked_blanks_and_byte_tokens() -> None:
    ids = MARKED.encode("hello world")
    assert [MARKED.byte_table.pieces[i] for i in ids] == [b"hello", b" world"]
    assert MARKED.decode(MARKED.encode("漢")) == "漢"


def test_a_literal_mark_falls_back_alone() -> None:
    mark = "\u2581".encode()
    ids = MARKED.encode_bytes(b"hello" + mark + b" world")
    pieces = [MARKED.byte_table.pieces[i] for i in ids]
    assert pieces == [b"hello", *(bytes([byte]) for byte in mark), b" world"]


def test_settings_that_cut_or_eat_text_are_ignored() -> None:
    spec = byte_level_spec([], QWEN_LIKE)
    spec["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    spec["added_tokens"][3] |= {"lstrip": True, "rstrip": True}
    text = "long before  <tool_call>  after"
    assert tokenizer(spec).decode(tokenizer(spec).encode(text)) == text


def test_dropout_is_switched_off() -> None:
    spec = byte_level_spec(["Hello"])
    spec["model"]["dropout"] = 0.9
    tiny = tokenizer(spec)
    assert all(len(tiny.encode("Hello")) == 1 for _ in range(20))


def test_bytes_that_the_vocabulary_lacks() -> None:
    tiny = tokenizer(byte_level_spec([], missing=b"\x04\xf1"))
    assert tiny.decode(tiny.encode("a\x04b\U00040000")) == "a\ufffdb\ufffd"
    with pytest.raises(TokenizerError, match="0x04"):
        tiny.encode_bytes(b"a\x04")


def test_lone_surrogates_do_not_crash() -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("a\ud83d")) == "a\ufffd"


def test_decode_replaces_invalid_bytes_and_drops_special_tokens() -> None:
    end = BYTE_LEVEL.special_id("<|im_end|>")
    assert BYTE_LEVEL.decode([ord("a"), 0xFF, end]) == "a\ufffd"


def test_special_id_of_ordinary_text_is_an_error() -> None:
    with pytest.raises(TokenizerError, match="<tool_call>"):
        BYTE_LEVEL.special_id("<tool_call>")


def test_holes_in_the_vocabulary_carry_nothing() -> None:
    spec = byte_level_spec()
    spec["added_tokens"] = [added_token(300, "<|far|>", special=True)]
    tiny = tokenizer(spec)
    assert tiny.vocab_size == 301
    assert tiny.byte_table.join([280]) == b""
    assert tiny.byte_table.special[280]


def test_an_added_token_of_letters_outside_ascii_stands_for_its_text() -> None:
    tiny = tokenizer(byte_level_spec([], [("éé", False)]))
    assert tiny.byte_table.pieces[tiny.encode("éé")[0]] == "éé".encode()


def refused(kind: str) -> dict[str, Any]:
    spec = marked_spec() if kind in ("prepend", "no fallback") else byte_level_spec()
    if kind == "wordpiece":
        spec["model"] = {"type": "WordPiece", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}
        spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    elif kind == "unigram":
        spec["model"]["type"] = "Unigram"
    elif kind == "prefix space":
        spec["pre_tokenizer"]["add_prefix_space"] = True
    elif kind == "prepend":
        inner = [{"type": "Prepend", "prepend": "\u2581"}, spec["normalizer"]]
        spec["normalizer"] = {"type": "Sequence", "normalizers": inner}
    elif kind == "no fallback":
        spec["model"]["byte_fallback"] = False
    elif kind == "no decoder":
        spec["decoder"] = None
    elif kind == "poor alphabet":
        spec = byte_level_spec(missing=b"\xf0")
    return spec


@pytest.mark.parametrize(
    "kind",
    [
        "wordpiece",
        "unigram",
        "prefix space",
        "prepend",
        "no fallback",
        "no decoder",
        "poor alphabet",
    ],
)
def test_tokenizers_without_exact_bytes_are_refused(kind: str) -> None:
    with pytest.raises(TokenizerError):
        tokenizer(refused(kind))


def test_peer_4_swapped_ids_have_another_fingerprint() -> None:
    plain, swapped = byte_level_spec(["Hello"]), byte_level_spec(["Hello"])
    vocab = swapped["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    assert tokenizer(plain).fingerprint != tokenizer(swapped).fingerprint
    assert tokenizer(plain).fingerprint == tokenizer(byte_level_spec(["Hello"])).fingerprint


def test_fingerprint_covers_merges_and_added_tokens_in_either_spelling() -> None:
    base = prepare(byte_level_spec(["Hello"], QWEN_LIKE), "t").fingerprint
    spelled = byte_level_spec(["Hello"], QWEN_LIKE)
    spelled["model"]["merges"] = [" ".join(pair) for pair in spelled["model"]["merges"]]
    assert prepare(spelled, "t").fingerprint == base
    reordered = byte_level_spec(["Hello"], QWEN_LIKE)
    reordered["model"]["merges"].reverse()
    assert prepare(reordered, "t").fingerprint != base
    assert prepare(byte_level_spec(["Hello"], QWEN_LIKE[:-1]), "t").fingerprint != base


def test_pickling_keeps_control_text_text() -> None:
    tiny = qwen_like("Hello", "im")
    copy = pickle.loads(pickle.dumps(tiny))
    assert copy.encode("Hello<|im_end|>") == tiny.encode("Hello<|im_end|>")
    assert copy.fingerprint == tiny.fingerprint


def test_from_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(TokenizerError, match="save_pretrained"):
        HfTokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        HfTokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_level_spec(["Hello"], QWEN_LIKE)))
    loaded = HfTokenizer.from_folder(folder)
    assert loaded.name == "model"
    assert loaded.fingerprint == qwen_like("Hello").fingerprint
    again = HfTokenizer.from_folder(folder)  # from the cache
    assert again.byte_table.pieces == loaded.byte_table.pieces
    assert (again.byte_table.special == loaded.byte_table.special).all()
    assert again.encode("Hello<think>") == loaded.encode("Hello<think>")


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[local\]'"):
        qwen_like()


class TestLongTexts:
    TEXT = "Hello world, é漢🙂 <tool_call>\n" * 3000

    def test_they_are_encoded_as_short_ones_are(self) -> None:
        lines = [BYTE_LEVEL.encode(line) for line in self.TEXT.splitlines(keepends=True)]
        assert BYTE_LEVEL.encode(self.TEXT) == [token for line in lines for token in line]

    def test_other_threads_go_on_meanwhile(self) -> None:
        # A machine that is busy may hold up any thread, so one quiet moment is enough.
        assert any(self._longest_pause() < 0.5 for _ in range(3))

    def _longest_pause(self) -> float:
        """Of another thread, as a share of the time that encoding takes."""
        ended, begun, times = threading.Event(), threading.Event(), list[float]()

        def tick() -> None:
            while not ended.wait(0.001):
                times.append(time.perf_counter())
                begun.set()
            times.append(time.perf_counter())

        ticker = threading.Thread(target=tick)
        ticker.start()
        assert begun.wait(10)
        started = time.perf_counter()
        BYTE_LEVEL._raw(self.TEXT)
        took = time.perf_counter() - started
        ended.set()
        ticker.join()
        return max(after - before for before, after in pairwise(times)) / took

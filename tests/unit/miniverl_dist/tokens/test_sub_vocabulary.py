from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import ChecksumError, TokenizerError, TokenizerMismatchError
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from tests.reference.tiny_tokenizer import qwen_like

pytest.importorskip("tokenizers")

BASE = qwen_like("Hello", " world", " other")
SUB = SubVocabulary.from_texts(BASE, ["Hello <tool_call>"], ["<|im_end|>"])


@settings(deadline=None)
@given(st.binary() | st.text(st.sampled_from("Helo wrdth<tool_call>é🙂")).map(str.encode))
def test_every_text_is_spelled_exactly_within_the_set(data: bytes) -> None:
    ids = SUB.encode_bytes(data)
    assert SUB.byte_table.join(ids) == data
    assert set(ids) <= set(SUB.ids)


def test_known_ids_stay_and_the_others_become_bytes() -> None:
    assert SUB.encode("Hello world<tool_call>") == [
        *BASE.encode("Hello"),
        *b" world",
        *BASE.encode("<tool_call>"),
    ]


def test_rows_number_the_sorted_ids() -> None:
    assert list(SUB.ids) == sorted(set(SUB.ids))
    assert [SUB.rows[i] for i in SUB.ids] == list(range(len(SUB.ids)))
    assert set(range(256)) <= set(SUB.ids)
    assert SUB.vocab_size == BASE.vocab_size


def test_special_tokens_must_be_declared() -> None:
    assert SUB.special_id("<|im_end|>") == BASE.special_id("<|im_end|>")
    with pytest.raises(TokenizerError, match="special_texts"):
        SUB.special_id("<|im_start|>")
    with pytest.raises(TokenizerError):
        SubVocabulary.from_texts(BASE, [], ["<|none|>"])


def test_foreign_ids_are_refused() -> None:
    with pytest.raises(TokenizerError, match="999999"):
        SubVocabulary(BASE, [999_999])
    with pytest.raises(TokenizerError, match="-1"):
        SubVocabulary(BASE, [-1])


def test_fingerprint_is_its_own() -> None:
    larger = SubVocabulary(BASE, [*SUB.ids, *BASE.encode(" world")])
    same = SubVocabulary(BASE, reversed(SUB.ids))
    other_base = SubVocabulary(qwen_like("Hello", " world", " otter"), SUB.ids)
    assert len({SUB.fingerprint, BASE.fingerprint, larger.fingerprint, other_base.fingerprint}) == 4
    assert same.fingerprint == SUB.fingerprint


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "sub.json"
    SUB.save(path)
    loaded = SubVocabulary.load(path, BASE)
    assert (loaded.ids, loaded.fingerprint) == (SUB.ids, SUB.fingerprint)
    assert [p.name for p in tmp_path.iterdir()] == ["sub.json"]
    with pytest.raises(TokenizerMismatchError, match="qwen-like"):
        SubVocabulary.load(path, qwen_like("Hello"))


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "sub.json"
    SUB.save(path)
    text = path.read_text()
    contents = json.loads(text)
    for damaged in (
        text[:-20],
        "",
        "[]",
        "{}",
        text.replace("300", "301", 1) if "300" in text else text.replace("25", "26", 1),
        json.dumps(contents | {"ids": contents["ids"][:-1]}),
        json.dumps(contents | {"format": 2}),
    ):
        path.write_text(damaged)
        with pytest.raises(ChecksumError, match=r"sub\.json"):
            SubVocabulary.load(path, BASE)


def test_it_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(SUB))
    assert copy.fingerprint == SUB.fingerprint
    assert copy.encode("Hello other") == SUB.encode("Hello other")

from __future__ import annotations

import pytest

from miniverl_dist.tokens.identity import base_of, declared_ids, knows_every_id
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from tests.reference.tiny_tokenizer import qwen_like

pytest.importorskip("tokenizers")

WHOLE = qwen_like("Hello")
MORE = range(256, 260)
NARROW, WIDE = SubVocabulary(WHOLE, MORE[:1]), SubVocabulary(WHOLE, MORE)


def test_the_whole_and_its_parts() -> None:
    assert base_of(WHOLE) is base_of(NARROW) is WHOLE
    assert declared_ids(NARROW) == {*range(257)}
    assert declared_ids(WHOLE) == {*range(WHOLE.vocab_size)}


def test_a_reader_knows_the_ids_of_its_own_kind_and_of_parts() -> None:
    known = [(WHOLE, WHOLE), (WHOLE, NARROW), (WIDE, NARROW), (NARROW, NARROW)]
    again = SubVocabulary(qwen_like("Hello"), MORE[:1])
    assert all(knows_every_id(reader, writer) for reader, writer in [*known, (again, NARROW)])
    unknown = [(NARROW, WIDE), (NARROW, WHOLE), (WIDE, WHOLE)]
    assert not any(knows_every_id(reader, writer) for reader, writer in unknown)


def test_another_tokenizer_reads_other_bytes_in_the_same_ids() -> None:
    other = qwen_like("Hellx")
    assert other.vocab_size == WHOLE.vocab_size
    for reader in (other, SubVocabulary(other, MORE)):
        assert not knows_every_id(reader, NARROW)
        assert not knows_every_id(reader, WHOLE)

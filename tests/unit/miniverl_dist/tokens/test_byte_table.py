from __future__ import annotations

import numpy as np
import pytest

from miniverl_dist.errors import TokenizerError
from miniverl_dist.tokens.byte_table import ByteTable, without_surrogates

TABLE = ByteTable.from_pieces(
    [b"a", b"b", b"ab", "é".encode(), b"<|end|>", b"a"], [False, False, False, False, True, False]
)


def test_special_ids_carry_no_bytes() -> None:
    assert TABLE.pieces[4] == b""
    assert TABLE.lengths.tolist() == [1, 1, 2, 2, 0, 1]
    assert TABLE.join([2, 4, 3]) == "abé".encode()


def test_ends_count_bytes_not_characters() -> None:
    assert TABLE.ends([2, 3, 4, 0]).tolist() == [2, 4, 4, 5]
    assert TABLE.ends([]).tolist() == []


def test_byte_ids_are_the_lowest_and_minus_one_where_missing() -> None:
    assert TABLE.byte_ids[ord("a")] == 0
    assert TABLE.byte_ids[ord("b")] == 1
    assert (TABLE.byte_ids >= 0).sum() == 2


def test_spell_names_the_byte_it_lacks() -> None:
    assert TABLE.spell(b"aba") == [0, 1, 0]
    assert TABLE.spell(b"") == []
    with pytest.raises(TokenizerError, match="0x7a"):
        TABLE.spell(b"abz")


@pytest.mark.parametrize("foreign", [-1, 6])
def test_ids_outside_of_the_vocabulary_are_errors(foreign: int) -> None:
    with pytest.raises(TokenizerError, match=str(foreign)):
        TABLE.join([0, foreign])
    with pytest.raises(TokenizerError, match=str(foreign)):
        TABLE.ends(np.array([0, foreign]))


def test_lone_surrogates_are_replaced() -> None:
    assert without_surrogates("a\ud800b\udfffc😀") == "a\ufffdb\ufffdc😀"

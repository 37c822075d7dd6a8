from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from miniverl_dist.reporting.token_text import TokenTexts, load_token_texts
from miniverl_dist.reporting.token_view import token_strips
from miniverl_dist.schemas.token_analysis import TokenAnalysis
from miniverl_dist.schemas.trajectory import SpanKind
from miniverl_dist.tokens.byte_table import ByteTable
from tests.support.sample_run import trajectory


class Tokenizer:
    """Ten ids; one control token."""

    name, fingerprint, vocab_size = "ten", "f" * 64, 10
    byte_table = ByteTable.from_pieces(
        [b"a", b"b", b"c", b"d", b"e", b"f", b"<x", b"\n", b"\xc3", b""], [False] * 9 + [True]
    )

    def special_id(self, text: str) -> int:
        from miniverl_dist.errors import TokenizerError

        if text != "<|im_end|>":
            raise TokenizerError("no such token")
        return 9

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    encode_bytes = decode = encode  # type: ignore[assignment]


def analysis(**changes: object) -> TokenAnalysis:
    fields: dict[str, object] = {
        "trajectory_id": "a",
        "group_id": "000001.0",
        "positions": (6, 7, 8),
        "token_ids": (6, 7, 8),
        "kinds": (SpanKind.ASSISTANT_TOOL_CALL,) * 3,
        "rollout_logprobs": (-0.5, -0.25, -2.0),
        "advantages": (0.123456, -1.0, 0.0),
        "units": (0, 0, None),
        "unit_reverse_kl": (1.25,),
        "opd_weights": (1.25, 1.25, None),
        "is_stopped": (False, False, True),
    }
    return TokenAnalysis.model_validate(fields | changes)


def test_a_strip_holds_what_was_made_of_each_token() -> None:
    [(message, strip)] = token_strips(trajectory("a"), analysis(), TokenTexts(Tokenizer())).items()
    assert message == 3
    assert strip == {
        "text": ["<x", "\n", "\\xc3"],
        "unit": [0, 0, None],
        "logprob": [-0.5, -0.25, -2.0],
        "weight": [1.25, 1.25, None],
        "advantage": [0.1235, -1.0, 0.0],
        "stopped": [0, 0, 1],
        "kind": ["assistant_tool_call"] * 3,
        "ratio": [1.25],
        "teacher": [-2.0],  # -0.75 of the student for the unit, 1.25 less than that
        "units": [0],
    }


def test_units_are_counted_anew_in_each_turn_and_keep_their_number() -> None:
    changed = analysis(units=(None, 4, 5), unit_reverse_kl=(0.0,) * 4 + (math.inf, 2.0))
    [strip] = token_strips(trajectory("a"), changed, TokenTexts(None)).values()
    assert strip["units"] == [4, 5]
    assert strip["unit"] == [None, 0, 1]
    assert strip["ratio"] == [None, 2.0]  # JSON has no infinity
    assert strip["text"] == ["#6 ", "#7 ", "#8 "]


def test_control_tokens_are_named_and_unknown_ids_are_not_guessed() -> None:
    texts = TokenTexts(Tokenizer())
    assert texts.show(9) == "<|im_end|>"
    assert texts.show(10) == "#10 "
    assert texts.show(-1) == "#-1 "


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "names no tokenizer"),
        ({"student": {"tokenizer": "nowhere"}}, "neither one of"),
    ],
)
def test_without_the_tokenizer_ids_stand_for_texts_and_a_note_says_why(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    notes: list[str] = []
    assert load_token_texts(tmp_path, config, "f" * 64, notes).show(6) == "#6 "
    assert message in notes[0]


@pytest.mark.tokenizers
def test_a_tokenizer_of_another_fingerprint_is_not_used(tmp_path: Path) -> None:
    from miniverl_dist.tokens.load import load_tokenizer

    config, notes = {"student": {"tokenizer": "qwen3.6"}}, list[str]()
    assert load_token_texts(tmp_path, config, "f" * 64, notes).show(6) == "#6 "
    assert "the episodes' is ffffffffffff" in notes[0]
    real = load_tokenizer("qwen3.6")
    assert load_token_texts(tmp_path, config, real.fingerprint, notes).show(6) == real.decode([6])
    assert len(notes) == 1


def test_arrays_of_the_sample_agree() -> None:
    sample = trajectory("a")
    assert np.flatnonzero(sample.loss_mask).tolist() == list(analysis().positions)

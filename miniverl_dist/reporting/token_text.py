"""What a token id spells, in a form that a page can show, where its tokenizer is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from miniverl_dist.errors import MiniverlError, TokenizerError, TokenizerMismatchError
from miniverl_dist.tokens.load import load_tokenizer
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike

VOCABULARY_FILE: Final = "student-vocabulary.json"
"""Beside the records of a run whose student's softmax is restricted."""
_CONTROL_TEXTS: Final = (
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
)
"""Turn ends that a model samples; any other control token is shown by its id."""


class TokenTexts:
    """Texts of the ids of one tokenizer; None: there is none, and ids stand for themselves."""

    def __init__(self, tokenizer: TokenizerLike | None) -> None:
        self._pieces = () if tokenizer is None else tokenizer.byte_table.pieces
        self._control: dict[int, str] = {}
        for text in _CONTROL_TEXTS if tokenizer is not None else ():
            with suppress(TokenizerError):
                self._control[tokenizer.special_id(text)] = text  # type: ignore[union-attr]

    def show(self, token_id: int) -> str:
        r"""Text of a token; bytes that are no whole character are written ``\xNN``."""
        if not 0 <= token_id < len(self._pieces):
            return f"#{token_id} "
        piece = self._pieces[token_id]
        if not piece:
            return self._control.get(token_id, f"<control token {token_id}>")
        return piece.decode("utf-8", "backslashreplace")


def load_token_texts(
    run_dir: Path, config: Mapping[str, Any], fingerprint: str, notes: list[str]
) -> TokenTexts:
    """Texts for the trajectories of a run; what is in the way becomes a note.

    Args:
        run_dir: Of the run.
        config: Resolved config of the run; ``student.tokenizer`` names the tokenizer.
        fingerprint: Of the tokenizer that the trajectories were written with.
        notes: Get a line where ids have to stand for texts.
    """
    student = config.get("student")
    name = student.get("tokenizer") if isinstance(student, Mapping) else None
    try:
        if not isinstance(name, str):
            raise TokenizerError("the config names no tokenizer of the student")
        base = load_tokenizer(name)
        vocabulary = run_dir / VOCABULARY_FILE
        found = SubVocabulary.load(vocabulary, base) if vocabulary.exists() else base
        if found.fingerprint != fingerprint:
            raise TokenizerMismatchError(
                f"{name} here is {found.fingerprint[:12]}, the episodes' is {fingerprint[:12]}"
            )
    except (MiniverlError, OSError) as error:
        notes.append(f"tokens are shown as ids, for want of the student's tokenizer: {error}")
        return TokenTexts(None)
    return TokenTexts(base)

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miniverl_dist.errors import TokenizerError
from miniverl_dist.tokens.load import load_tokenizer
from tests.reference.tiny_tokenizer import QWEN_LIKE, byte_level_spec

pytest.importorskip("tokenizers")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"qwen3\.6.*deepseek-v4"):
        load_tokenizer("qwen9")


def test_a_folder_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level_spec(["Hello"], QWEN_LIKE)))
    assert len(load_tokenizer(str(tmp_path)).encode("Hello")) == 1

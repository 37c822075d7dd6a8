"""A base model as teacher, a student without thinking blocks, an earlier checkpoint exported."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from actors.export import export_run
from actors.student_side import StudentSide, student_chat
from actors.teacher_side import Renderer
from miniverl_dist.config.load import load_config
from miniverl_dist.config.roles import TeacherConfig
from miniverl_dist.errors import ConfigError, TokenizerError
from miniverl_dist.tokens.load import load_tokenizer
from rollout_server.chat_format import PlainChatMLFormat, Qwen36ChatFormat
from teacher_server.rendering import TeacherRendering
from tests.reference.tiny_tokenizer import QWEN_LIKE, marked_spec, tokenizer
from tests.support.hf_run import RECIPE, hf_run, tokenizer_folder
from tests.support.tiny_episodes import CHAT, END, encode, play

MARKED = tokenizer(marked_spec(["hello"]))
TRAJECTORY = play(
    ("user", "Q."),
    ("sampled", [*encode("Hello"), END]),
    ("user", "bye"),
    ("sampled", [*encode("so long"), END]),
)


class _Session:
    """A task without tools."""

    def tools(self) -> list[object]:
        return []

    def close(self) -> None:
        """Nothing is held."""


def renderer(**changes: object) -> Renderer:
    fields: dict[str, Any] = {"url": "http://t", "tokenizer": "x", "rendering": "raw"}
    config = TeacherConfig.model_validate_json(json.dumps(fields | changes))
    environment = SimpleNamespace(start=lambda task_id, prefix_calls: _Session())
    side = SimpleNamespace(chat=CHAT, environment=environment)
    return Renderer(config, cast(StudentSide, side), MARKED)


def texts(rendering: TeacherRendering) -> list[str]:
    return [MARKED.decode(rendering.token_ids[s.start : s.end]) for s in rendering.spans]


def test_a_text_begins_with_its_start_and_nothing_else_changes() -> None:
    plain, started = renderer()(TRAJECTORY), renderer(text_start="<bos>")(TRAJECTORY)
    assert started.token_ids == (MARKED.special_id("<bos>"), *plain.token_ids)
    assert texts(started) == texts(plain) == ["Hello", "so long"]
    assert [s.byte_ends for s in started.spans] == [s.byte_ends for s in plain.spans]
    assert [(s.start, s.end) for s in started.segments][:2] == [(0, 1), (1, started.spans[0].start)]
    ends = [(s.start, s.end) for s in started.segments]
    assert [end for _, end in ends[:-1]] == [start for start, _ in ends[1:]]
    assert ends[-1][1] == len(started.token_ids)


def test_a_start_that_the_tokenizer_lacks_is_refused() -> None:
    with pytest.raises(TokenizerError, match="has no special token '<s>'"):
        renderer(text_start="<s>")


@pytest.mark.parametrize("rendering", ["native", "verbatim"])
def test_other_renderings_know_how_a_text_begins(rendering: str) -> None:
    fields = {"url": "http://t", "rendering": rendering, "text_start": "<bos>"}
    with pytest.raises(ValidationError, match=f"goes with `rendering: raw`, found {rendering}"):
        TeacherConfig.model_validate_json(json.dumps(fields))


@pytest.mark.parametrize(("thinks", "opening"), [(True, "<think>\n\n</think>\n\n"), (False, "")])
def test_a_model_that_does_not_think_gets_no_thinking_block(
    thinks: bool, opening: str, tmp_path: Path
) -> None:
    added = QWEN_LIKE if thinks else tuple(t for t in QWEN_LIKE if "think" not in t[0])
    folder = tokenizer_folder(tmp_path / "tokenizer", added)
    text = RECIPE.replace("TOKENIZER", str(folder)).replace("MODEL", "{kind: hf, path: base}")
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(tmp_path / "run.yaml").config
    chat = student_chat(config, load_tokenizer(str(folder)))
    assert type(chat) is (Qwen36ChatFormat if thinks else PlainChatMLFormat)
    piece = chat.assistant_opening()
    assert piece.token_ids[0] == chat.tokenizer.special_id("<|im_start|>")
    assert chat.tokenizer.decode(piece.token_ids) == f"assistant\n{opening}"


async def test_an_earlier_checkpoint_can_be_exported(tmp_path: Path) -> None:
    run, _ = await hf_run(tmp_path)
    checkpoints = run / "checkpoints"
    (checkpoints / "step-000002").rename(checkpoints / "step-000009")
    with pytest.raises(ConfigError, match=r"no such checkpoint; .* has step-000009"):
        export_run(run, tmp_path / "out", checkpoint="step-000002")
    assert not (tmp_path / "out").exists()

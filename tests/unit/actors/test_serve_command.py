"""`miniverl-dist serve teacher`: what cannot be served is one error that names the field."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from actors.serve import serve_teacher
from miniverl_dist.config.serve import LocalTeacherService, SglangLaunch, SglangTeacherService
from miniverl_dist.errors import ConfigError


def local(**changes: Any) -> LocalTeacherService:
    fields = {"kind": "local", "name": "t", "model": Path("models/none")}
    return LocalTeacherService.model_validate(fields | changes)


def launched(**changes: Any) -> SglangTeacherService:
    launch = SglangLaunch.model_validate({"model": "m"} | changes)
    return SglangTeacherService(kind="sglang", name="t", launch=launch)


def said(config: LocalTeacherService | SglangTeacherService) -> str:
    with pytest.raises(ConfigError) as caught:
        serve_teacher(config, lambda line: None)
    return str(caught.value)


def test_a_folder_that_is_not_there_is_named_with_the_option() -> None:
    assert said(local()).startswith(
        "model: models/none is no model folder: name one with `-o model=FOLDER`"
    )


def test_a_token_that_cannot_be_used_names_its_field(tmp_path: Path) -> None:
    token = tmp_path / "token"
    assert said(local(token_file=token)).startswith("token_file: token file")
    token.write_text("short")
    assert "expected one word of at least 16" in said(local(token_file=token))
    assert said(launched(token_file=token)).startswith("launch.token_file: token file")


def test_a_port_that_is_taken_says_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert said(local(model=tmp_path, port=port)) == (
            f"127.0.0.1:{port}: Address already in use: choose another port with `-o port=PORT` "
            "(0 picks a free one)"
        )
        # Else the other server's answers would pass for those of the one that was launched.
        assert said(launched(port=port)).endswith("`-o launch.port=PORT`")

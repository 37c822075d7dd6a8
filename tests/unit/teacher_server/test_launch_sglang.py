"""SGLang's command line, its secrets, and the life of its process group; a stand-in is launched."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from miniverl_dist.config.load import load_teacher_service
from miniverl_dist.config.serve import SglangLaunch, SglangTeacherService
from miniverl_dist.errors import ConfigError, DeadlineError, EngineError
from teacher_server.launch_sglang import attached_model, sglang_command, sglang_teacher
from tests.support.ports import free_ports
from tests.support.processes import are_gone
from tests.support.sglang_stand_in import sglang_stand_in

ROOT = Path(__file__).resolve().parents[3]
SECRET = "0123456789abcdef"


def launch(tmp_path: Path, **changes: Any) -> SglangLaunch:
    program, _ = sglang_stand_in(tmp_path)
    [port] = free_ports(1)
    fields = {
        "python": program,
        "model": "a-model",
        "port": port,
        "log_file": tmp_path / "sglang.log",
        "start_deadline_s": 20.0,
        "stop_deadline_s": 5.0,
    }
    return SglangLaunch(**fields | changes)


def test_the_command_line_spells_out_the_config() -> None:
    config = load_teacher_service(ROOT / "configs" / "teacher_dsv4_flash_4xb200.yaml")
    assert isinstance(config, SglangTeacherService)
    assert config.launch is not None
    command = sglang_command(config.launch, config.name, Path("secrets.yaml"))
    assert command[:5] == [
        ".venv-sglang/bin/python",
        "-m",
        "sglang.launch_server",
        "--config",
        "secrets.yaml",
    ]
    pairs = dict(zip(command[5::2], command[6::2], strict=False))
    assert pairs["--tp-size"] == "4"
    assert pairs["--context-length"] == "32768"
    assert pairs["--max-running-requests"] == "24"
    assert "--enable-metrics" in command
    assert "--max-total-tokens" not in command  # null: SGLang's own choice
    assert not any("token" in word and "teacher" in word for word in command)


def test_further_options_and_flags() -> None:
    extra = {"kv-cache-dtype": "fp8_e4m3", "--page-size": 64, "disable-x": True, "enable-y": False}
    command = sglang_command(SglangLaunch(model="m", extra_args=extra), "n", None)
    assert command[-5:] == ["--kv-cache-dtype", "fp8_e4m3", "--page-size", "64", "--disable-x"]
    assert "--config" not in command


async def test_a_server_is_launched_without_showing_its_secret_and_ended_with_its_children(
    tmp_path: Path,
) -> None:
    (tmp_path / "token").write_text(SECRET + "\n")
    config = launch(tmp_path, token_file=tmp_path / "token", env={"MARK": "marked"})
    async with sglang_teacher(config, "the-teacher") as teacher:
        assert teacher.url == f"http://127.0.0.1:{config.port}"
        assert teacher.is_alive
        started = json.loads((tmp_path / "started.json").read_text())
        assert started["secrets"] == f'api-key: "{SECRET}"\n'
        assert (started["mode"], started["mark"]) == (0o600, "marked")
        assert not any(SECRET in word for word in started["arguments"])
        assert (await attached_model(teacher.url, deadline_s=5)).model_path == "the-teacher"
    assert not teacher.is_alive
    assert are_gone(*started["pids"])
    secrets = Path(started["arguments"][started["arguments"].index("--config") + 1])
    assert not secrets.parent.exists()


async def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    config = launch(tmp_path, model="broken", token_file=tmp_path / "token")
    with pytest.raises(EngineError, match=r"(?s)SGLang \(n\) ended.*no such arch") as caught:
        async with sglang_teacher(config, "n"):
            pass
    # The server prints its arguments, the secret among them: for the eyes of this user only.
    assert SECRET in config.log_file.read_text()
    assert config.log_file.stat().st_mode & 0o777 == 0o600
    assert 'api-key: "(secret)"' in str(caught.value)
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match="token file"):
        async with sglang_teacher(launch(tmp_path, token_file=tmp_path / "none"), "n"):
            pass


async def test_nothing_to_attach_to_is_an_error_by_the_deadline() -> None:
    [port] = free_ports(1)
    with pytest.raises(DeadlineError, match=r"does not answer after 2 s: .*127.0.0.1"):
        await attached_model(f"http://127.0.0.1:{port}", deadline_s=2.0)


async def test_what_listens_and_stays_silent_is_said_to_be_without_a_reply() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeadlineError, match=rf"{url} does not answer after 0.2 s: .* reply"):
            await attached_model(url, deadline_s=0.2)

"""The same command again: lost episodes are played, other servers and settings are other rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from actors import launch
from actors.cli import app
from actors.eval_jobs import EvaluationRequest
from actors.eval_policies import ForeignOptions
from actors.student_side import WRITE_CALLS
from actors.tasks import make_environment, resolve_tasks
from miniverl_dist.config.load import LoadedConfig, load_config
from miniverl_dist.errors import ConfigError
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow
from tests.support.chat_server import MODEL, Fault, Player, chat_server

pytestmark = [pytest.mark.tokenizers, pytest.mark.timeout(120)]
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
CONFIG = FIXTURES / "tiny_lab.yaml"
NAME = f"openai:{MODEL}:tools"


@pytest.fixture(scope="module")
def config() -> LoadedConfig:
    return load_config(CONFIG, ["rollout.max_context_tokens=4000", "evaluation.max_concurrency=1"])


@pytest.fixture(scope="module")
def players(config: LoadedConfig) -> Callable[[int], Player]:
    environment = make_environment(config.config, WRITE_CALLS)
    _, ids = resolve_tasks(config.config, environment.tasks())
    return lambda wrong_of: Player.of(environment, ids, wrong_of=wrong_of)


def evaluate(
    config: LoadedConfig, output: Path, *policies: str, tag: str = "initial", **options: Any
) -> EvaluationReport:
    request = EvaluationRequest(policies, tag, foreign=ForeignOptions(**options))
    return launch.evaluate_request(config, request, output=output, progress=SilentProgress())


def outcome(row: EvaluationRow) -> tuple[float | None, int, int]:
    return row.pass_rate, row.num_episodes, row.num_faults


def refuses_from(first: int) -> Fault:
    """A server that takes no request from this one on."""

    async def fault(number: int) -> web.StreamResponse | None:
        if number < first:
            return None
        return web.json_response({"error": {"message": "no"}}, status=400)

    return fault


def test_a_server_that_died_half_way_is_asked_again(
    config: LoadedConfig, players: Callable[[int], Player], tmp_path: Path
) -> None:
    with chat_server(players(3)) as server:
        [whole] = evaluate(config, tmp_path / "whole", f"openai:{server.url}").rows
    ill = True

    async def fault(number: int) -> web.StreamResponse | None:
        return await refuses_from(4)(number) if ill else None

    with chat_server(players(3), fault=fault) as server:
        policy = f"openai:{server.url}"
        try:
            [half] = evaluate(config, tmp_path / "out", policy).rows
        except ConfigError:  # it may be given up at some number of faults in a row
            half = None
        ill = False
        num_asked = len(server.requests)
        [row] = evaluate(config, tmp_path / "out", policy).rows
        assert server.requests[num_asked:]
        num_asked = len(server.requests)
        evaluate(config, tmp_path / "out", policy)
        assert len(server.requests) <= num_asked + 1  # it was asked whether it is there
    assert half is None or (half.num_episodes, half.num_faults) != (6, 0)
    assert outcome(row) == outcome(whole)
    assert row.tasks == whole.tasks


def test_two_servers_of_one_model_are_two_rows(
    config: LoadedConfig, players: Callable[[int], Player], tmp_path: Path
) -> None:
    with chat_server(players(0)) as good, chat_server(players(1)) as bad:
        urls = [f"openai:{server.url}" for server in (good, bad)]
        first, second = evaluate(config, tmp_path, *urls).rows
        assert (first.policy, first.pass_rate) == (NAME, 1.0)
        assert (second.policy, second.pass_rate) == (f"{NAME}@{second.job[:8]}", 0.0)
        assert first.settings["endpoint"] != second.settings["endpoint"]
        again = evaluate(config, tmp_path, *reversed(urls))
        assert again.rows == (first, second)
    assert not any(
        server.url.split("//")[1].split("/")[0] in (tmp_path / "eval.json").read_text()
        for server in (good, bad)
    )


def test_another_limit_is_not_measured_already(
    config: LoadedConfig, players: Callable[[int], Player], tmp_path: Path
) -> None:
    with chat_server(players(0)) as server:
        policy = f"openai:{server.url}"
        evaluate(config, tmp_path, policy, max_new_tokens=8)
        rows = evaluate(config, tmp_path, policy, max_new_tokens=4096).rows
        assert {body["max_tokens"] for body in server.requests} == {1, 8, 4096}
    assert [row.settings["max_new_tokens"] for row in rows] == ["8", "4096"]
    assert len({row.policy for row in rows}) == 2


def test_null_and_oracle_are_not_played_for_every_checkpoint(
    config: LoadedConfig, tmp_path: Path
) -> None:
    first = evaluate(config, tmp_path, "null", "oracle", tag="step-000001")
    second = evaluate(config, tmp_path, "null", "oracle", tag="step-000002")
    assert first.rows == second.rows
    assert [row.policy_version for row in first.rows] == [None, None]


@pytest.mark.bfcl
def test_the_limits_that_forbid_the_oracle_are_said_by_command_and_summary(tmp_path: Path) -> None:
    """A student without a declared vocabulary: no scripted episode is played before."""
    limits = ("student.model.vocabulary=full", "rollout.max_context_tokens=60")
    command = ["eval", str(FIXTURES / "tiny_megatron.yaml"), "--policy", "oracle"]
    for limit in limits:
        command += ["-o", limit]
    result = CliRunner().invoke(
        app, [*command, "--tail-calls", "all", "--output", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    note = "2 of 2 tasks cannot be solved within the limits at one T or more (how they ended: max_"
    assert f"note: oracle 0.500 at T = all: {note}" in result.stdout
    summary = (tmp_path / "out" / "summary.md").read_text()
    first = summary.partition("## Read this first")[2].partition("## ")[0]
    assert note in first
    assert "warmed up" not in first
    assert "on-policy" not in first
    assert "| rollout.max_context_tokens | 60 |" in summary


def test_the_settings_of_the_recipe_stand_with_the_rows(
    config: LoadedConfig, tmp_path: Path
) -> None:
    settings = evaluate(config, tmp_path, "null").settings
    assert settings["seed"] == "0"
    assert settings["environment.prompt"] == "compact"
    assert settings["rollout.max_new_tokens"] == "24"
    assert settings["rollout.episode_deadline_s"] == "null"
    assert {name for name in settings if name.startswith("environment.reward.")}
    # A file of an earlier version gets them with the next row.
    old = json.loads((tmp_path / "eval.json").read_text())
    del old["settings"]
    (tmp_path / "eval.json").write_text(json.dumps(old))
    assert evaluate(config, tmp_path, "null", "oracle").settings == settings

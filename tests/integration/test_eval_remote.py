"""Policies behind a URL, and evaluations that are cut off: the table stays the same."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
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
from miniverl_dist.errors import ConfigError, DeadlineError
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.reporting.run_data import parse_trajectory
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow
from tests.support.chat_server import MODEL, ChatServer, Json, Player, chat_server

pytestmark = [pytest.mark.tokenizers, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "fixtures" / "tiny_lab.yaml"
TASKS = "[calculator_easy_000, calculator_easy_001, calculator_easy_002]"


def recipe(*overrides: str) -> LoadedConfig:
    return load_config(CONFIG, ["rollout.max_context_tokens=4000", *overrides])


def player(config: LoadedConfig, *, wrong_of: int = 3) -> Player:
    environment = make_environment(config.config, WRITE_CALLS)
    _, ids = resolve_tasks(config.config, environment.tasks())
    return Player.of(environment, ids, wrong_of=wrong_of)


class Silent(Player):
    """Makes no call."""

    def __init__(self) -> None:
        super().__init__({})

    def answer(self, body: Json) -> Json:
        return {"role": "assistant", "content": "No."}


def evaluate(
    config: LoadedConfig, output: Path, *policies: str, tail_calls: Any = None, **foreign: Any
) -> EvaluationReport:
    request = EvaluationRequest(
        policies, "initial", tail_calls=tail_calls, foreign=ForeignOptions(**foreign)
    )
    return launch.evaluate_request(config, request, output=output, progress=SilentProgress())


def scores(row: EvaluationRow) -> dict[str, Any]:
    return row.model_dump(exclude={"policy", "job", "settings"})


def episodes(folder: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (folder / "eval_trajectories.jsonl").read_text().splitlines()))


class TestBothForms:
    @pytest.mark.parametrize("tail_calls", [1, 2, "all"])
    def test_structured_and_text_calls_give_one_score(
        self, tmp_path: Path, tail_calls: Any
    ) -> None:
        config = recipe("evaluation.episodes_per_task=6")
        with chat_server(player(config)) as server:
            for form in ("tools", "text"):
                report = evaluate(
                    config, tmp_path, f"openai:{server.url}", calls=form, tail_calls=tail_calls
                )
        by_form = {
            form: [scores(row) for row in report.rows if row.policy == f"openai:{MODEL}:{form}"]
            for form in ("tools", "text")
        }
        assert by_form["tools"] == by_form["text"]
        assert 0 < report.rows[0].pass_rate < 1
        assert report.rows[0].num_faults == 0

    def test_an_expert_behind_a_url_scores_as_the_oracle(self, tmp_path: Path) -> None:
        config = recipe()
        with chat_server(player(config, wrong_of=0)) as server:
            report = evaluate(config, tmp_path, "oracle", "null", f"openai:{server.url}")
        assert [row.pass_rate for row in report.rows] == [1.0, 0.0, 1.0]

    def test_what_a_server_wrote_is_recorded_but_never_trained_on(self, tmp_path: Path) -> None:
        config = recipe()
        with chat_server(player(config)) as server:
            evaluate(config, tmp_path, f"openai:{server.url}")
        for number, line in enumerate(
            (tmp_path / "eval_trajectories.jsonl").read_bytes().splitlines(keepends=True)
        ):
            told = parse_trajectory(line, f"line {number}")
            assert not told.is_trainable
            assert not any(told.loss_mask)
            assert server.url not in line.decode()

    def test_no_more_at_once_than_the_recipe_says(self, tmp_path: Path) -> None:
        config = recipe("evaluation.max_concurrency=2", "evaluation.episodes_per_task=6")
        with chat_server(player(config)) as server:
            evaluate(config, tmp_path, f"openai:{server.url}")
        assert server.most_at_once == 2


class TestRequests:
    def test_thinking_headers_and_sampling_go_with_the_request(self, tmp_path: Path) -> None:
        config = recipe("evaluation.temperature=0.5", "evaluation.episodes_per_task=1")
        (tmp_path / "headers").write_text("Authorization: Bearer something-secret\n")
        with chat_server(player(config)) as server:
            report = evaluate(
                config,
                tmp_path / "out",
                f"openai:{server.url}",
                thinking=False,
                headers_file=tmp_path / "headers",
                max_new_tokens=77,
            )
        assert report.rows[0].policy == f"openai:{MODEL}:tools-thinking"
        for body in server.requests[1:]:
            assert body["chat_template_kwargs"] == {"enable_thinking": False}
            assert (body["temperature"], body["max_tokens"]) == (0.5, 77)
            assert {tool["function"]["name"] for tool in body["tools"]}
            assert "<think>" not in json.dumps(body["messages"])
        assert server.headers[0]["Authorization"] == "Bearer something-secret"

    def test_a_request_that_fails_is_asked_again_word_for_word(self, tmp_path: Path) -> None:
        config = recipe("evaluation.episodes_per_task=3")

        async def flaky(number: int) -> web.StreamResponse | None:
            if number % 3 == 1:
                status = (429, 500, 503)[number // 3 % 3]
                return web.json_response({"error": {"message": "later"}}, status=status)
            return None

        with chat_server(player(config)) as server:
            plain = evaluate(config, tmp_path / "plain", f"openai:{server.url}")
        with chat_server(player(config), fault=flaky) as server:
            failing = evaluate(config, tmp_path / "failing", f"openai:{server.url}")
        assert [*map(scores, failing.rows)] == [*map(scores, plain.rows)]
        bodies = [json.dumps(body, sort_keys=True) for body in server.requests[1:]]
        assert len(set(bodies)) < len(bodies)

    def test_an_episode_whose_server_is_gone_is_a_fault_and_not_a_failure(
        self, tmp_path: Path
    ) -> None:
        config = recipe("evaluation.episodes_per_task=1")

        async def refuses(number: int) -> web.StreamResponse | None:
            if number == 2:
                return web.json_response({"error": {"message": "too long"}}, status=400)
            return None

        with chat_server(player(config, wrong_of=0), fault=refuses) as server:
            [row] = evaluate(config, tmp_path, f"openai:{server.url}").rows
        assert (row.num_faults, row.num_episodes, row.pass_rate) == (1, 2, 1.0)
        assert row.terminations["engine_error"] == 1

    def test_a_server_that_fails_every_request_is_soon_left_alone(self, tmp_path: Path) -> None:
        config = recipe("evaluation.max_concurrency=1", "evaluation.episodes_per_task=8")

        async def locked(number: int) -> web.StreamResponse | None:
            if number:
                return web.json_response({"error": {"message": "key expired"}}, status=401)
            return None

        with (
            chat_server(player(config), fault=locked) as server,
            pytest.raises(ConfigError, match=r"none of its requests .* the last 8 .* key expired"),
        ):
            evaluate(config, tmp_path, f"openai:{server.url}")
        assert len(server.requests) == 1 + 8
        assert len(episodes(tmp_path)) == 7
        with chat_server(player(config), port=server.port) as server:
            mended = evaluate(config, tmp_path, f"openai:{server.url}")
        assert (mended.rows[0].num_episodes, mended.rows[0].num_faults) == (24, 0)

    def test_two_servers_of_one_model_are_two_policies(self, tmp_path: Path) -> None:
        config = recipe("evaluation.episodes_per_task=1")
        with chat_server(player(config, wrong_of=0)) as one, chat_server(Silent()) as other:
            report = evaluate(config, tmp_path, f"openai:{one.url}", f"openai:{other.url}")
        assert [row.pass_rate for row in report.rows] == [1.0, 0.0]
        assert len({row.policy for row in report.rows}) == 2


class TestOneClearError:
    """Nothing is played before it."""

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("/page", r"no OpenAI-compatible server .*text/html"),
            ("", r"no /models there; such a URL mostly ends with /v1"),
        ],
    )
    def test_what_answers_is_another_server(self, tmp_path: Path, path: str, message: str) -> None:
        with chat_server() as server:
            url = server.url.removesuffix("/v1") + path
            with pytest.raises(ConfigError, match=message):
                evaluate(recipe(), tmp_path, "null", f"openai:{url}")
        assert not (tmp_path / "eval_trajectories.jsonl").exists()

    def test_nobody_answers(self, tmp_path: Path) -> None:
        config = recipe("deadlines.generate_s=0.3", "deadlines.take_s=1")
        with pytest.raises(ConfigError, match=r"the server does not answer"):
            evaluate(config, tmp_path, "openai:http://127.0.0.1:9/v1")

    def test_a_model_that_the_server_does_not_have(self, tmp_path: Path) -> None:
        with (
            chat_server() as server,
            pytest.raises(ConfigError, match=f"no model 'other'; it serves {MODEL}"),
        ):
            evaluate(recipe(), tmp_path, f"openai:{server.url}", model="other")

    def test_several_models_and_none_is_named(self, tmp_path: Path) -> None:
        with (
            chat_server(models=("a", "b")) as server,
            pytest.raises(ConfigError, match=r"serves 2 models \(a, b\): choose one with --model"),
        ):
            evaluate(recipe(), tmp_path, f"openai:{server.url}")

    @pytest.mark.parametrize(
        ("said", "message"),
        [
            ("default chat template is no longer allowed", "no chat template .* sglang:URL"),
            ('"auto" tool choice requires --enable-auto-tool-choice', "use --calls text"),
            ("n must be 1", "refuses a first request: .*n must be 1"),
        ],
    )
    def test_a_first_request_is_refused(self, tmp_path: Path, said: str, message: str) -> None:
        async def refuse(number: int) -> web.StreamResponse:
            return web.json_response({"error": {"message": said}}, status=400)

        with (
            chat_server(fault=refuse) as server,
            pytest.raises(ConfigError, match=message),
        ):
            evaluate(recipe(), tmp_path, f"openai:{server.url}")
        assert len(server.requests) == 1

    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            ("nobody", "names no policy; expected student, teacher"),
            ("http://127.0.0.1:9/v1", "say which API it speaks, for instance openai:http://"),
            ("ftp:x", "names no policy"),
            ("openai:127.0.0.1:9", "expected openai:http://HOST:PORT or https"),
            ("sglang:", "names no policy"),
            ("hf:/nowhere", "policy hf:/nowhere holds no Hugging Face model"),
        ],
    )
    def test_what_names_no_policy(self, tmp_path: Path, policy: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            evaluate(recipe(), tmp_path / "out", policy)

    def test_sglang_is_asked_at_its_root(self, tmp_path: Path) -> None:
        with (
            chat_server() as server,
            pytest.raises(ConfigError, match="does not answer as SGLang does"),
        ):
            evaluate(recipe(), tmp_path, f"sglang:{server.url}")


class TestCutOff:
    """An evaluation that was interrupted, and started again."""

    @pytest.mark.parametrize("num_before", [0, 1, 4, 8])
    def test_it_plays_only_what_is_missing_and_gives_the_same_table(
        self, tmp_path: Path, num_before: int
    ) -> None:
        config = recipe("evaluation.max_concurrency=1", "evaluation.episodes_per_task=3")
        policy = "openai:{}"
        with chat_server(player(config)) as server:
            whole = evaluate(config, tmp_path / "whole", policy.format(server.url))
        asked = [json.dumps(body, sort_keys=True) for body in server.requests[1:]]
        stored = episodes(tmp_path / "whole")
        self._cut(tmp_path / "whole", num_before)
        with chat_server(player(config), port=server.port) as server:
            again = evaluate(config, tmp_path / "whole", policy.format(server.url))
        # How long an episode took is part of its record, so the file's length may differ.
        assert again == whole.model_copy(update={"num_episode_bytes": again.num_episode_bytes})
        ids = [line["trajectory"]["trajectory_id"] for line in episodes(tmp_path / "whole")]
        assert sorted(ids) == sorted(line["trajectory"]["trajectory_id"] for line in stored)
        asked_again = [json.dumps(body, sort_keys=True) for body in server.requests[1:]]
        assert asked_again == asked[len(asked) - len(asked_again) :]
        assert (len(asked_again) == len(asked)) == (num_before == 0)

    @staticmethod
    def _cut(folder: Path, num_kept: int) -> None:
        """Leave a directory as a process that was killed in the middle of a write leaves it."""
        (folder / "eval.json").unlink()
        file = folder / "eval_trajectories.jsonl"
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(lines[:num_kept]) + lines[num_kept][:50])

    def test_a_deadline_keeps_what_has_been_played(self, tmp_path: Path) -> None:
        config = recipe("evaluation.max_concurrency=1")
        # Of the same digest: only what hangs meets the short deadline.
        deadlines = config.config.deadlines.model_copy(update={"evaluate_s": 4.0})
        hasty = replace(config, config=config.config.model_copy(update={"deadlines": deadlines}))

        async def hangs(number: int) -> web.StreamResponse | None:
            await asyncio.sleep(30 if number == 4 else 0)
            return None

        with chat_server(player(config), fault=hangs) as server:
            with pytest.raises(DeadlineError, match=r"deadlines\.evaluate_s"):
                evaluate(hasty, tmp_path / "out", f"openai:{server.url}")
            num_before = len(episodes(tmp_path / "out"))
            again = evaluate(config, tmp_path / "out", f"openai:{server.url}")
        with chat_server(player(config), port=server.port) as server:
            whole = evaluate(config, tmp_path / "whole", f"openai:{server.url}")
        assert num_before > 0
        assert again.rows == whole.rows

    def test_other_episodes_are_not_taken_for_its_own(self, tmp_path: Path) -> None:
        config = recipe("evaluation.max_concurrency=1")
        with chat_server(player(config)) as server:
            first = evaluate(config, tmp_path, f"openai:{server.url}", tail_calls=1)
            (tmp_path / "eval.json").unlink()
            server.requests.clear()
            second = evaluate(config, tmp_path, f"openai:{server.url}", tail_calls=2)
            assert len(server.requests) > 1 + 6
            text = evaluate(config, tmp_path, f"openai:{server.url}", calls="text")
        assert [row.tail_calls for row in (*first.rows, *second.rows)] == [1, 2]
        assert len(text.rows) == 2

    def test_the_process_is_killed(self, tmp_path: Path) -> None:
        config = recipe("evaluation.max_concurrency=2", "evaluation.episodes_per_task=4")
        file, killed = tmp_path / "out" / "eval_trajectories.jsonl", threading.Event()

        async def stalls(number: int) -> web.StreamResponse | None:
            """Nothing more is answered once two episodes are stored: it cannot reach its end."""
            while not killed.is_set() and _num_lines(file) >= 2:  # noqa: ASYNC110 -- a file
                await asyncio.sleep(0.02)
            return None

        with chat_server(player(config)) as server:
            whole = evaluate(config, tmp_path / "whole", f"openai:{server.url}")
        with chat_server(player(config), fault=stalls, port=server.port) as server:
            self._kill_after_two(tmp_path / "out", server)
            killed.set()
            played = [line["trajectory"] for line in episodes(tmp_path / "out")]
            again = evaluate(config, tmp_path / "out", f"openai:{server.url}")
        assert 2 <= len(played) < 12
        assert again.rows == whole.rows
        kept = [line["trajectory"] for line in episodes(tmp_path / "out")][: len(played)]
        assert kept == played

    @staticmethod
    def _kill_after_two(folder: Path, server: ChatServer) -> None:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "actors.launch", "eval", str(CONFIG)),
                *("--policy", f"openai:{server.url}", "--output", str(folder)),
                *("-o", "rollout.max_context_tokens=4000"),
                *("-o", "evaluation.max_concurrency=2", "-o", "evaluation.episodes_per_task=4"),
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            file = folder / "eval_trajectories.jsonl"
            until = time.monotonic() + 60
            while _num_lines(file) < 2:
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(10)
        file.write_bytes(file.read_bytes()[: file.read_bytes().rfind(b"\n") + 1])


def _num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_the_same_command_goes_on_in_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("eval", str(CONFIG), "--policy", "null", "--json")
    first, second, other = (
        CliRunner().invoke(app, [*command, *more]) for more in ((), (), ("-o", "seed=9"))
    )
    assert [result.exit_code for result in (first, second, other)] == [0, 0, 0]
    results = [json.loads(r.stdout.splitlines()[-1])["result"] for r in (first, second, other)]
    assert results[0] == results[1]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "tiny_lab-eval",
        "tiny_lab-eval-2",
    }


@pytest.mark.bfcl
def test_a_teacher_that_only_scores_cannot_play(tmp_path: Path) -> None:
    with chat_server() as server:
        url = server.url.removesuffix("/v1")
        http = ["teacher.model=null", "teacher.fit=null", f"teacher.url={url}"]
        config = load_config(ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml", http)
        with pytest.raises(ConfigError, match=f"{url} does not answer as SGLang does"):
            evaluate(config, tmp_path, "teacher")


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.eval: found a list of 0, expected at least 1"):
        recipe("tasks={kind: ids, train: [calculator_easy_000], eval: []}")

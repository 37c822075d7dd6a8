"""What is sent to a cluster, and what `scripts/submit.sh` refuses to send, without a cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from miniverl_dist.config.load import load_config
from miniverl_dist.errors import ConfigError
from scripts.job_request import (
    ROOT,
    JobRequest,
    checkout_files,
    resume_request,
    stage,
    train_request,
)
from tests.support.ports import free_ports
from tests.support.ray_head import environment

CONFIG = ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml"


def request(**changes: Any) -> JobRequest:
    given: dict[str, Any] = {"run_dir": "/shared/run", "runs": None, "submission_id": None}
    given |= {"env_vars": {}, "arguments": ()} | changes
    return train_request(given.pop("config", CONFIG), given.pop("arguments"), **given)


class TestFiles:
    def checkout(self, root: Path) -> Path:
        for name in (
            *("actors/launch.py", "configs/a.yaml", "notes.txt"),
            *(".git/HEAD", ".venv/bin/python", ".env", "runs/a/metrics.jsonl", "dist/a.whl"),
            "secrets/teacher-token",
            *("actors/__pycache__/launch.pyc", "a.egg-info/PKG-INFO", "actors/stale.pyc"),
        ):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("x" * 1000)
        return root

    def test_sources_go_and_results_caches_and_hidden_files_stay(self, tmp_path: Path) -> None:
        found = [path.as_posix() for path in checkout_files(self.checkout(tmp_path))]
        assert found == ["notes.txt", "actors/launch.py", "configs/a.yaml"]

    def test_links_to_folders_are_not_followed(self, tmp_path: Path) -> None:
        root, data = self.checkout(tmp_path / "root"), tmp_path / "data"
        data.mkdir()
        (data / "huge.bin").write_text("x")
        (root / "data").symlink_to(data)
        assert len(list(checkout_files(root))) == 3

    def test_a_copy_holds_what_was_measured(self, tmp_path: Path) -> None:
        root, target = self.checkout(tmp_path / "root"), tmp_path / "target"
        assert stage(root, target, max_bytes=3000) == 3000
        assert sorted(p.name for p in target.rglob("*") if p.is_file()) == [
            "a.yaml",
            "launch.py",
            "notes.txt",
        ]

    def test_too_much_is_refused_with_the_largest_files(self, tmp_path: Path) -> None:
        root = self.checkout(tmp_path / "root")
        (root / "weights.bin").write_bytes(b"x" * 3_000_000)
        with pytest.raises(ConfigError, match=r"weights\.bin \(2\.9 MiB\).*--max-mib"):
            stage(root, tmp_path / "target", max_bytes=3_000_000)
        assert not (tmp_path / "target").exists()

    def test_this_checkout_is_small_and_complete(self) -> None:
        found = {path.as_posix(): (ROOT / path).stat().st_size for path in checkout_files(ROOT)}
        assert {"pyproject.toml", "actors/launch.py", "miniverl_dist/__init__.py"} <= set(found)
        assert sum(found.values()) < 16 * 1024 * 1024


class TestTrain:
    def test_metadata_describe_the_run_with_its_overrides(self) -> None:
        overrides = ["loop.num_steps=2", "seed=5"]
        arguments = ("-o", overrides[0], f"--override={overrides[1]}", "--json")
        found = request(arguments=arguments).metadata
        assert found["config_digest"] == load_config(CONFIG, overrides).digest
        assert found["config_digest"] != load_config(CONFIG).digest
        assert (found["name"], found["objective"]) == ("tiny_bfcl", "grpo_opd")
        assert found["config"] == "tests/fixtures/tiny_bfcl.yaml"
        assert all(isinstance(value, str) for value in found.values()), "as Ray demands"

    def test_the_run_directory_is_named_like_the_job(self) -> None:
        found = request(run_dir=None, runs="/shared")
        assert found.submission_id.startswith("tiny_bfcl-")
        assert str(found.run_dir) == f"/shared/{found.submission_id}"
        assert found.metadata["run_dir"] == str(found.run_dir)
        assert request().submission_id != found.submission_id

    def test_a_given_name_and_directory_are_kept(self) -> None:
        found = request(runs="/shared", submission_id="mine")
        assert (found.submission_id, str(found.run_dir)) == ("mine", "/shared/run")

    @pytest.mark.parametrize("run_dir", [None, "runs/a"])
    def test_a_run_without_a_place_that_lasts_is_refused(self, run_dir: str | None) -> None:
        with pytest.raises(ConfigError, match="storage that all nodes share"):
            request(run_dir=run_dir)

    def test_a_wrong_recipe_is_refused_here(self) -> None:
        with pytest.raises(ConfigError, match=r"loop\.num_steps: found 'x'"):
            request(arguments=("-o", "loop.num_steps=x"))

    def test_a_recipe_from_elsewhere_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_bytes(CONFIG.read_bytes())
        with pytest.raises(ConfigError, match="copy it to configs/"):
            request(config=tmp_path / "a.yaml")


def test_a_resumed_run_need_not_be_visible_here() -> None:
    found = resume_request("/shared/run", submission_id=None, env_vars={})
    assert found.submission_id.startswith("run-resumed-")
    assert found.config is None
    with pytest.raises(ConfigError, match="relative"):
        resume_request("runs/a", submission_id=None, env_vars={})


def submit(
    *arguments: object, home: Path, check: bool = True, **variables: str
) -> tuple[dict[str, str], list[str], str]:
    """Lines of a dry run: what it says, the request; and the error."""
    env = environment(PYTHON=sys.executable, HOME=os.fspath(home)) | variables
    if "RAY_AUTH_MODE" not in variables:
        del env["RAY_AUTH_MODE"]
    result = subprocess.run(
        ["sh", ROOT / "scripts" / "submit.sh", "--dry-run", *map(str, arguments)],
        cwd=home,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode == 0) == check, result.stdout + result.stderr
    assert check or result.returncode == 2
    lines = result.stdout.splitlines()
    start = lines.index("--address") if "--address" in lines else len(lines)
    said = dict(line.split(": ", 1) for line in lines[:start])
    return said, lines[start:], result.stderr


LOCAL = ("--address", "http://127.0.0.1:8265")
RUN = ("--run-dir", "/shared/run")


class TestScript:
    def test_the_whole_request(self, tmp_path: Path) -> None:
        options = (*LOCAL, *RUN, "--env", "A=b c", "--env", "D=$(e)", "--stop-wait", 60)
        options += ("--no-wait", "--entrypoint-resources", '{"head": 1}', "--python", "/opt/p y")
        said, sent, _ = submit(CONFIG, *options, "--", "-o", "seed=3", home=tmp_path)
        values = dict(pairwise(sent))
        assert said["submission id"] == values["--submission-id"]
        assert said["run directory"] == "/shared/run"
        assert json.loads(values["--runtime-env-json"]) == {
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60", "A": "b c", "D": "$(e)"}
        }
        assert json.loads(values["--metadata-json"])["name"] == "tiny_bfcl"
        assert values["--entrypoint-resources"] == '{"head": 1}'
        assert "--no-wait" in sent
        entrypoint = ["/opt/p y", "-m", "actors.launch", "train", "tests/fixtures/tiny_bfcl.yaml"]
        assert sent[sent.index("--") + 1 :] == [*entrypoint, *RUN, "-o", "seed=3"]
        assert not Path(values["--working-dir"]).exists(), "the copy is removed"

    def test_an_evaluation(self, tmp_path: Path) -> None:
        asked = ("--policy", "teacher", "-o", "seed=3")
        _, sent, _ = submit(CONFIG, "--eval", *LOCAL, *RUN, "--", *asked, home=tmp_path)
        entrypoint = ["python", "-m", "actors.launch", "eval", "tests/fixtures/tiny_bfcl.yaml"]
        assert sent[sent.index("--") + 1 :] == [*entrypoint, "--output", "/shared/run", *asked]

    def test_an_evaluation_of_a_run_where_it_lies(self, tmp_path: Path) -> None:
        asked = ("--policy", "student", "--checkpoint", "step-000010")
        _, sent, _ = submit("/shared/run", "--eval", *LOCAL, "--", *asked, home=tmp_path)
        entrypoint = ["python", "-m", "actors.launch", "eval", "/shared/run"]
        assert sent[sent.index("--") + 1 :] == [*entrypoint, *asked]

    def test_defaults(self, tmp_path: Path) -> None:
        said, sent, _ = submit(
            CONFIG, *LOCAL, home=tmp_path, MINIVERL_RUNS="/shared", RAY_ADDRESS="http://other:1"
        )
        values = dict(pairwise(sent))
        assert values["--address"] == LOCAL[1], "the option wins"
        assert '"RAY_JOB_STOP_WAIT_TIME_S": "300"' in values["--runtime-env-json"]
        assert said["run directory"] == f"/shared/{said['submission id']}"
        assert "--no-wait" not in sent
        assert values["--"] == "python"

    def test_resume(self, tmp_path: Path) -> None:
        _, sent, _ = submit("--resume", "/shared/run", *LOCAL, home=tmp_path)
        entrypoint = ["python", "-m", "actors.launch", "resume", "/shared/run"]
        assert sent[sent.index("--") + 1 :] == entrypoint

    @pytest.mark.parametrize(
        ("address", "variables", "mode"),
        [
            (LOCAL[1], {}, "disabled"),
            ("http://localhost:8265", {}, "disabled"),
            (LOCAL[1], {"RAY_AUTH_TOKEN": "t"}, "token"),
            ("http://head:8265", {"RAY_AUTH_TOKEN_PATH": "/t"}, "token"),
            ("http://head:8265", {"RAY_AUTH_MODE": "disabled"}, "disabled"),
            (LOCAL[1], {"RAY_AUTH_MODE": "token"}, "token"),
        ],
    )
    def test_authentication(
        self, address: str, variables: dict[str, str], mode: str, tmp_path: Path
    ) -> None:
        said, _, _ = submit(CONFIG, *RUN, "--address", address, home=tmp_path, **variables)
        assert said["RAY_AUTH_MODE"] == mode

    def test_a_token_file_counts(self, tmp_path: Path) -> None:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("t")
        said, _, _ = submit(CONFIG, *RUN, *LOCAL, home=tmp_path)
        assert said["RAY_AUTH_MODE"] == "token"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((CONFIG, *RUN), "no cluster: give --address"),
            ((CONFIG, *RUN, "--address", "http://head:8265"), "RAY_AUTH_MODE is not set"),
            ((CONFIG, *LOCAL), "no run directory"),
            ((*LOCAL, *RUN), "no CONFIG"),
            ((CONFIG, CONFIG, *LOCAL, *RUN), "one CONFIG is expected"),
            ((CONFIG, *LOCAL, "--resume", "/a"), "leave"),
            (("--resume", "/a", *LOCAL, "--eval"), "leave --eval out"),
            (("--resume", "/a", *LOCAL, "--", "-o", "seed=1"), "takes no arguments"),
            ((CONFIG, *LOCAL, *RUN, "--eval"), "--eval needs a policy"),
            ((CONFIG, *LOCAL, *RUN, "--stop-wait", "soon"), "expected whole seconds"),
            ((CONFIG, *LOCAL, *RUN, "--env", "A"), "expected NAME=VALUE"),
            ((CONFIG, *LOCAL, *RUN, "--max-mib", "0"), "at most 0 are expected"),
            ((CONFIG, *LOCAL, *RUN, "--seed", "3"), "unknown option --seed"),
            (("nothing.yaml", *LOCAL, *RUN), "nothing.yaml"),
        ],
    )
    def test_refusals(self, arguments: tuple[object, ...], message: str, tmp_path: Path) -> None:
        _, sent, error = submit(*arguments, home=tmp_path, check=False)
        assert sent == []
        assert message in error
        assert error.startswith("error: ")
        assert len(error.splitlines()) == 1

    def test_option_without_a_value(self, tmp_path: Path) -> None:
        script = ROOT / "scripts" / "submit.sh"
        result = subprocess.run(
            ["sh", script, CONFIG, "--address"], capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stdout) == (2, "")
        assert "--address needs a value" in result.stderr

    def test_help_names_every_option(self) -> None:
        script = ROOT / "scripts" / "submit.sh"
        text = subprocess.run(
            ["sh", script, "--help"], capture_output=True, text=True, check=True
        ).stdout
        loop = script.read_text().split("while [ $# -gt 0 ]")[1].split("\ndone")[0]
        options = set(re.findall(r"--[a-z-]{2,}", loop))
        assert {option for option in options - {"--help"} if option not in text} == set()
        assert len(options) > 10

    def test_a_cluster_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        [port] = free_ports(1)
        address = f"http://127.0.0.1:{port}"
        result = subprocess.run(
            ["sh", ROOT / "scripts" / "submit.sh", CONFIG, *RUN, "--address", address],
            env=environment(PYTHON=sys.executable),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 2
        assert f"no job server answers at {address}" in result.stderr
        assert "Traceback" not in result.stderr

from __future__ import annotations

import getpass
import json
import re
import socket
from pathlib import Path

import pytest

from miniverl_dist.observability.environment import (
    environment_record,
    git_commit,
    installed_versions,
    numeric_variables,
    without_paths,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_the_record_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada.lovelace")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("NCCL_ALGO", "/home/ada.lovelace/tuning")
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.chdir(tmp_path)
    text = json.dumps(environment_record())
    for private in (
        socket.gethostname(),
        "ada.lovelace",
        "hunter2",
        str(tmp_path),
        str(Path.cwd()),
    ):
        assert private not in text
    assert not re.search(r'"[^"]*/[^"]*"', text)
    assert getpass.getuser() not in json.loads(text).values()


def test_the_record_says_what_numbers_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    record = environment_record()
    assert record["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert record["packages"]["numpy"] == installed_versions()["numpy"]
    assert record["python"].startswith("3.")
    assert record["num_cpus"] >= 1


def test_only_listed_variables_and_no_paths() -> None:
    assert numeric_variables({"PATH": "/bin", "PYTHONHASHSEED": "0", "NCCL_PROTO": "a b"}) == {
        "PYTHONHASHSEED": "0",
        "NCCL_PROTO": "(set)",
    }


class TestGitCommit:
    def git(self, root: Path, **files: str) -> Path:
        for name, text in files.items():
            path = root / ".git" / name.replace("__", "/").replace("packed_refs", "packed-refs")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return root

    def test_detached_loose_and_packed(self, tmp_path: Path) -> None:
        assert git_commit(self.git(tmp_path / "a", HEAD=COMMIT)) == COMMIT
        loose = self.git(tmp_path / "b", HEAD="ref: refs/heads/main", refs__heads__main=COMMIT)
        assert git_commit(loose) == COMMIT
        packed = f"# pack-refs\n{'f' * 40} refs/heads/other\n{COMMIT} refs/heads/main"
        assert (
            git_commit(self.git(tmp_path / "c", HEAD="ref: refs/heads/main", packed_refs=packed))
            == COMMIT
        )

    def test_a_worktree(self, tmp_path: Path) -> None:
        main = self.git(
            tmp_path / "main",
            refs__heads__x=COMMIT,
            worktrees__w__HEAD="ref: refs/heads/x",
            worktrees__w__commondir="../..",
        )
        tree = tmp_path / "tree"
        tree.mkdir()
        (tree / ".git").write_text(f"gitdir: {main}/.git/worktrees/w\n")
        assert git_commit(tree) == COMMIT

    def test_none_where_there_is_no_commit(self, tmp_path: Path) -> None:
        assert git_commit(tmp_path) is None
        assert git_commit(self.git(tmp_path / "new", HEAD="ref: refs/heads/main")) is None
        assert git_commit(self.git(tmp_path / "odd", HEAD="what")) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot write /home/ada/runs/x/metrics.jsonl: full", "cannot write …/metrics.jsonl: full"),
        ("PosixPath('/home/ada')", "PosixPath('…/ada')"),
        ("see https://example.org/a/b and runs/x/y", "see https://example.org/a/b and runs/x/y"),
        ("and/or a</div>", "and/or a</div>"),
    ],
)
def test_paths_are_cut_to_their_last_part(text: str, shown: str) -> None:
    assert without_paths(text) == shown

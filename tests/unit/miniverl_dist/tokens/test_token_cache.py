from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miniverl_dist.tokens.cache import cache_folder, cached

RACER = """
import sys
from miniverl_dist.tokens.cache import cached
payload = cached("entry", lambda: bytes(range(256)) * 20_000)
sys.exit(payload != bytes(range(256)) * 20_000)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "miniverl-dist"


def refuse() -> bytes:
    raise AssertionError("the entry should have been read")


def test_the_second_time_reads_what_the_first_made(folder: Path) -> None:
    assert cached("entry", lambda: b"made") == b"made"
    assert cached("entry", refuse) == b"made"
    assert [path.name for path in folder.iterdir()] == ["entry"]


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "short"])
def test_a_damaged_entry_is_made_again(folder: Path, damage: str) -> None:
    cached("entry", lambda: b"made at first")
    path = folder / "entry"
    data = path.read_bytes()
    path.write_bytes(
        {
            "truncated": data[:-3],
            "empty": b"",
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "short": data[:10],
        }[damage]
    )
    assert cached("entry", lambda: b"made again") == b"made again"
    assert cached("entry", refuse) == b"made again"


def test_an_empty_payload_is_an_entry() -> None:
    cached("entry", lambda: b"")
    assert cached("entry", refuse) == b""


def test_a_folder_that_cannot_be_written_costs_only_time(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_bytes(b"a file where the folder should be")
    assert cached("entry", lambda: b"made") == b"made"
    assert "cannot be written" in caplog.text


def test_a_failing_build_leaves_nothing_behind(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        cached("entry", lambda: bytes(1 // 0))
    assert not folder.exists()


def test_processes_may_race(folder: Path) -> None:
    racers = [subprocess.Popen([sys.executable, "-c", RACER], env=os.environ) for _ in range(3)]
    assert [racer.wait(60) for racer in racers] == [0, 0, 0]
    assert [path.name for path in folder.iterdir()] == ["entry"]


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "miniverl-dist"

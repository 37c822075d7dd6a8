from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from actors import cache_commands
from miniverl_dist.lab.cache_files import read_index
from miniverl_dist.lab.teacher_cache import TeacherCache
from miniverl_dist.observability.run_dir import RunDirectory
from tests.support.cli import outcome
from tests.support.sample_run import write_run
from tests.support.stored_targets import filled

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
sys.argv = ["miniverl-dist", *sys.argv[1:]]
from actors.cli import main
try:
    main()
finally:
    heavy = {"torch", "ray", "transformers", "tokenizers", "megatron", "sglang", "bfcl_eval"}
    print("loaded:", sorted(heavy & {name.split(".")[0] for name in sys.modules}), file=sys.stderr)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path)
    filled(folder / "teacher-cache")
    return folder


def call(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of `miniverl-dist cache` in this process."""
    return outcome("cache", *arguments)


def flip(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(bytes(data))


class TestStats:
    def test_what_is_stored(self, run: Path) -> None:
        code, out, err = call("stats", run)
        size = sum(path.stat().st_size for path in (run / "teacher-cache").glob("shard-*"))
        assert (code, err) == (0, "")
        assert out.splitlines() == [
            "Teacher        toy, weights aaaaaaaaaaaa",
            "Asked          mode standard, rendering native, selection all_model_tokens",
            "Rows           top_k 5, temperature 1",
            "Tokenizers     student bbbbbbbbbbbb, teacher cccccccccccc",
            "Entries        6, 15 rows of 36 candidates (41.7%)",
            "Versions       0: 2 entries, 1: 2 entries, 2: 2 entries",
            f"Shards         3, {size} bytes, 0 of them of replaced entries",
        ]

    def test_as_json(self, run: Path) -> None:
        code, out, _ = call("stats", run, "--json")
        found = json.loads(out)
        assert code == 0
        assert found == TeacherCache.read(run / "teacher-cache").stats().model_dump(mode="json")
        assert (found["num_entries"], found["identity"]["teacher"]) == (6, "toy")

    @pytest.mark.parametrize("command", [["stats"], ["validate"], ["prune", "--max-bytes", "1"]])
    def test_no_run_and_no_cache(self, tmp_path: Path, command: list[str]) -> None:
        (tmp_path / "folder").mkdir()
        code, out, err = call(command[0], tmp_path / "folder", *command[1:])
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {tmp_path}/folder is not a run directory")
        without = write_run(tmp_path, name="without")
        code, out, err = call(command[0], without, *command[1:])
        assert (code, out) == (2, "")
        assert (
            err == f"error: {without}/teacher-cache holds no teacher cache: it has no index.json\n"
        )


class TestValidate:
    def test_a_sound_cache(self, run: Path) -> None:
        assert call("validate", run) == (0, f"ok: {run}: 6 entries with right checksums\n", "")
        code, out, _ = call("validate", run, "--json")
        assert (code, json.loads(out)) == (0, {"num_entries": 6, "problems": []})

    def test_one_line_per_damaged_entry(self, run: Path) -> None:
        folder = run / "teacher-cache"
        entries = read_index(folder).entries
        for number in (1, 4, 5):
            flip(folder / entries[number].shard, entries[number].start + 3)
        code, out, err = call("validate", run)
        assert (code, out) == (2, "")
        lines = err.splitlines()
        assert len(lines) == 3
        for line, number in zip(lines, (1, 4, 5), strict=True):
            entry = entries[number]
            where = f"error: teacher-cache/{entry.shard}, entry '{entry.trajectory_id}': SHA-256 "
            assert line.startswith(where)
        code, out, err = call("validate", run, "--json")
        assert (code, err) == (2, "")
        assert [f"error: {line}" for line in json.loads(out)["problems"]] == lines

    def test_a_damaged_index(self, run: Path) -> None:
        flip(run / "teacher-cache" / "index.json", 200)
        code, out, err = call("validate", run)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "error: teacher-cache/index.json differs from its checksum" in err
        code, out, err = call("validate", run, "--json")
        assert (code, err, len(json.loads(out)["problems"])) == (2, "", 1)

    def test_a_run_that_prunes_meanwhile_is_no_damage(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other process prunes right after the index was read, twice."""
        opened, folder = cache_commands._open, run / "teacher-cache"
        left = [2, 1]

        def overtaken(path: Path) -> TeacherCache:
            cache = opened(path)
            if left:
                TeacherCache.read(folder).prune(keep_versions=left.pop(0))
            return cache

        monkeypatch.setattr(cache_commands, "_open", overtaken)
        assert call("validate", run) == (0, f"ok: {run}: 2 entries with right checksums\n", "")


class TestPrune:
    def test_versions(self, run: Path) -> None:
        folder = run / "teacher-cache"
        size = (folder / "shard-000000.safetensors").stat().st_size
        code, out, err = call("prune", run, "--keep-versions", 2)
        assert (code, err) == (0, "")
        assert out == (
            f"removed 2 entries, {size} bytes; policy versions of which nothing is left: 0\n"
        )
        assert TeacherCache.read(folder).stats().entries_by_version == {1: 2, 2: 2}

    def test_bytes_as_json(self, run: Path) -> None:
        folder = run / "teacher-cache"
        size = (folder / "shard-000000.safetensors").stat().st_size
        code, out, _ = call("prune", run, "--max-bytes", size, "--json")
        assert code == 0
        assert json.loads(out) == {"num_entries": 4, "num_bytes": 2 * size, "versions": [0, 1]}
        assert len(TeacherCache.read(folder)) == 2

    def test_nothing_to_remove(self, run: Path) -> None:
        _, out, _ = call("prune", run, "--keep-versions", 9)
        assert out.startswith("removed 0 entries, 0 bytes;")
        assert out.endswith("nothing is left: none\n")

    def test_how_much_is_to_be_kept_must_be_said(self, run: Path) -> None:
        code, _, err = call("prune", run)
        assert (code, err) == (
            2,
            "error: cache prune: give --keep-versions or --max-bytes, found neither\n",
        )
        assert call("prune", run, "--keep-versions", 0)[0] == 2
        assert len(TeacherCache.read(run / "teacher-cache")) == 6

    def test_not_while_the_run_goes_on(self, run: Path) -> None:
        with RunDirectory.open(run, writable=True):
            code, out, err = call("prune", run, "--keep-versions", 1)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert "another process" in err
        assert len(TeacherCache.read(run / "teacher-cache")) == 6
        assert call("prune", run, "--keep-versions", 1)[0] == 0  # and the lock is given back


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["stats", "RUN"], 0),
        (["validate", "RUN"], 0),
        (["prune", "RUN", "--keep-versions", "1"], 0),
        (["--help"], 0),
    ],
)
def test_nothing_heavy_is_loaded(run: Path, command: list[str], code: int) -> None:
    arguments = [str(run) if word == "RUN" else word for word in command]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, "cache", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr.splitlines()[-1]) == (code, "loaded: []")
    assert result.stdout

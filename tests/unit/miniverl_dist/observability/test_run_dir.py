from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pydantic import BaseModel

from miniverl_dist.errors import CheckpointError, ConfigError, RecordError
from miniverl_dist.observability import run_dir
from miniverl_dist.observability.run_dir import RunDirectory, disk_errors, write_atomic


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs" / "one")


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=Path(__file__).parents[4],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class TestOpening:
    def test_create_refuses_a_folder_that_holds_something(self, tmp_path: Path) -> None:
        (tmp_path / "note").touch()
        with pytest.raises(ConfigError, match="not an empty folder: choose another"):
            RunDirectory.create(tmp_path)
        with pytest.raises(ConfigError, match="not an empty folder"):
            RunDirectory.create(tmp_path / "note")
        assert [path.name for path in tmp_path.iterdir()] == ["note"]

    def test_create_takes_an_empty_folder(self, tmp_path: Path) -> None:
        RunDirectory.create(tmp_path).close()

    def test_open_refuses_what_is_no_run(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(ConfigError, match="is not a run directory: expected"):
                RunDirectory.open(path)

    def test_open_for_reading_leaves_no_trace_and_refuses_to_append(
        self, run: RunDirectory
    ) -> None:
        run.write_json("manifest.json", {})
        run.close()
        before = sorted(path.name for path in run.path.iterdir())
        reader = RunDirectory.open(run.path)
        with pytest.raises(RecordError, match="for reading only"):
            reader.append("events.jsonl", {})
        with pytest.raises(RecordError, match="for reading only"):
            reader.truncate({"events.jsonl": 0})
        assert sorted(path.name for path in run.path.iterdir()) == before


class TestLock:
    def test_two_writers_are_refused_and_a_reader_is_not(self, run: RunDirectory) -> None:
        run.write_json("manifest.json", {"name": "x"})
        with pytest.raises(ConfigError, match="being written by another process"):
            RunDirectory.open(run.path, writable=True)
        assert RunDirectory.open(run.path).read_json("manifest.json") == {"name": "x"}
        run.close()
        run.close()
        RunDirectory.open(run.path, writable=True).close()

    def test_who_only_asks_for_the_lock_keeps_no_writer_out(
        self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run.write_json("manifest.json", {})
        run.close()
        asking = os.open(run.path / ".lock", os.O_RDONLY)
        fcntl.flock(asking, fcntl.LOCK_SH)
        pauses: list[float] = []

        def pause(duration_s: float) -> None:
            pauses.append(duration_s)
            fcntl.flock(asking, fcntl.LOCK_UN)

        monkeypatch.setattr(run_dir.time, "sleep", pause)
        RunDirectory.open(run.path, writable=True).close()
        os.close(asking)
        assert len(pauses) == 1

    def test_the_lock_dies_with_its_process(self, run: RunDirectory) -> None:
        run.write_json("manifest.json", {})
        run.close()
        holder = python(
            """
            import sys, time
            from pathlib import Path
            from miniverl_dist.observability.run_dir import RunDirectory
            run = RunDirectory.open(Path(sys.argv[1]), writable=True)
            print("held", flush=True)
            time.sleep(60)
            """,
            run.path,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process"):
            RunDirectory.open(run.path, writable=True)
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
        RunDirectory.open(run.path, writable=True).close()


class TestWholeFiles:
    def test_json_is_indented_and_read_back(self, run: RunDirectory) -> None:
        class Model(BaseModel):
            a: int = 1

        run.write_json("manifest.json", {"a": "é"})
        assert (run.path / "manifest.json").read_text() == '{\n  "a": "é"\n}\n'
        run.write_json("eval.json", Model())
        assert run.read_json("eval.json") == {"a": 1}

    def test_a_value_that_is_not_json_leaves_the_old_file(self, run: RunDirectory) -> None:
        run.write_json("manifest.json", {"a": 1})
        for bad in (float("nan"), Path("x"), {1, 2}):
            with pytest.raises(RecordError, match=r"manifest\.json: not a JSON value"):
                run.write_json("manifest.json", {"a": bad})
        assert run.read_json("manifest.json") == {"a": 1}

    def test_reading_names_what_is_wrong(self, run: RunDirectory) -> None:
        with pytest.raises(RecordError, match=r"cannot read .*eval.json: No such file"):
            run.read_json("eval.json")
        run.write_text("eval.json", "{")
        with pytest.raises(RecordError, match=r"eval.json: not valid JSON"):
            run.read_json("eval.json")
        run.write_text("eval.json", "[1]")
        with pytest.raises(RecordError, match="expected a JSON object, found list"):
            run.read_json("eval.json")

    def test_a_full_disk_leaves_the_old_file_and_no_rest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "checkpoint.json"
        write_atomic(path, b"old")

        def no_space(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", no_space)
        with pytest.raises(CheckpointError, match=r"cannot write .*checkpoint.json: no space left"):
            write_atomic(path, b"new", CheckpointError)
        assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.json"]
        assert path.read_bytes() == b"old"

    def test_other_disk_errors_say_what_happened(self, tmp_path: Path) -> None:
        with pytest.raises(RecordError, match="cannot write x: Permission denied"):  # noqa: SIM117
            with disk_errors(Path("x")):
                raise PermissionError(13, "Permission denied")
        with pytest.raises(RecordError, match="No such file or directory"):
            write_atomic(tmp_path / "missing" / "f", b"")


class TestRecords:
    def test_lines_are_on_disk_at_once(self, run: RunDirectory) -> None:
        class Model(BaseModel):
            x: float = float("nan")

        run.append("events.jsonl", {"a": 1})
        run.append("events.jsonl", Model())
        path = run.path / "events.jsonl"
        assert path.read_text() == '{"a":1}\n{"x":null}\n'
        assert run.read_jsonl("events.jsonl") == [{"a": 1}, {"x": None}]
        assert run.read_jsonl("metrics.jsonl") == []

    def test_undeclared_files_and_values_are_refused(self, run: RunDirectory) -> None:
        with pytest.raises(RecordError, match=r"'other.jsonl' is not a record file"):
            run.append("other.jsonl", {})
        with pytest.raises(RecordError, match=r"'other.jsonl' is not a record file"):
            run.read_jsonl("other.jsonl")
        with pytest.raises(RecordError, match=r"metrics.jsonl: not a JSON value"):
            run.append("metrics.jsonl", {"x": float("inf")})
        assert not (run.path / "metrics.jsonl").exists()

    @pytest.mark.parametrize(
        ("tail", "message"),
        [
            ('{"b": 2', r"events.jsonl, line 2: the line is cut off after 7 bytes"),
            ("null\n", r"events.jsonl, line 2: expected a JSON object, found NoneType"),
            ("{]\n", r"events.jsonl, line 2: not valid JSON: .*column 2"),
            ("\n", r"events.jsonl, line 2: not valid JSON"),
        ],
    )
    def test_bad_lines_are_named(self, run: RunDirectory, tail: str, message: str) -> None:
        run.append("events.jsonl", {"a": 1})
        with (run.path / "events.jsonl").open("a") as file:
            file.write(tail)
        with pytest.raises(RecordError, match=message):
            run.read_jsonl("events.jsonl")
        assert next(run.iter_jsonl("events.jsonl")) == {"a": 1}

    @pytest.mark.parametrize("length", [3, 70_000, 200_000])
    @pytest.mark.parametrize("before", [[], [{"a": 1}]])
    def test_an_unfinished_line_is_removed_before_the_next_one(
        self, run: RunDirectory, length: int, before: list[dict[str, int]]
    ) -> None:
        path = run.path / "events.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in before) + "x" * length)
        run.append("events.jsonl", {"b": 2})
        assert run.read_jsonl("events.jsonl") == [*before, {"b": 2}]

    def test_a_line_that_does_not_fit_on_the_disk_leaves_the_file_as_it_was(
        self, run: RunDirectory
    ) -> None:
        run.write_json("manifest.json", {})
        run.close()
        writer = python(
            """
            import resource, signal, sys
            from pathlib import Path
            from miniverl_dist.errors import RecordError
            from miniverl_dist.observability.run_dir import RunDirectory
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            run = RunDirectory.open(Path(sys.argv[1]), writable=True)
            run.append("events.jsonl", {"a": 1})
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
            try:
                run.append("events.jsonl", {"b": "x" * 9000})
            except RecordError as error:
                print(error)
            run.append("events.jsonl", {"c": 3})
            """,
            run.path,
        )
        out, errors = writer.communicate()
        assert errors == ""
        assert "events.jsonl: no space left (disk or quota)" in out
        assert run.read_jsonl("events.jsonl") == [{"a": 1}, {"c": 3}]


class TestPositions:
    def test_truncate_goes_back_to_a_position(self, run: RunDirectory) -> None:
        names = ["metrics.jsonl", "trajectories.jsonl"]
        run.append("metrics.jsonl", {"step": 1})
        positions = run.positions(names)
        assert positions == {"metrics.jsonl": 11, "trajectories.jsonl": 0}
        run.append("metrics.jsonl", {"step": 2})
        run.append("trajectories.jsonl", {"id": "a"})
        run.truncate(positions)
        run.append("metrics.jsonl", {"step": 3})
        assert run.read_jsonl("metrics.jsonl") == [{"step": 1}, {"step": 3}]
        assert run.read_jsonl("trajectories.jsonl") == []

    def test_a_file_that_is_shorter_than_claimed_stops_everything(self, run: RunDirectory) -> None:
        run.append("metrics.jsonl", {"step": 1})
        with pytest.raises(RecordError, match=r"events.jsonl: 0 bytes, but .* made with 5"):
            run.truncate({"metrics.jsonl": 0, "events.jsonl": 5})
        assert run.read_jsonl("metrics.jsonl") == [{"step": 1}]

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from actors.cli import app
from actors.watch import RunView, follow, look
from actors.watch_view import LiveFrames, duration, frame, show_once, sparkline
from miniverl_dist.errors import ConfigError
from miniverl_dist.observability.events import Event, EventLog
from miniverl_dist.observability.metrics import MetricsWriter
from miniverl_dist.observability.run_dir import RunDirectory
from tests.support.sample_run import metrics, write_run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def text_of(view: RunView, *, width: int = 120) -> str:
    stream = io.StringIO()
    show_once(view, Console(file=stream, width=width), now=lambda: 100.0)
    return stream.getvalue()


def say(run: Path, **changes: object) -> None:
    manifest = json.loads((run / "manifest.json").read_text()) | changes
    (run / "manifest.json").write_text(json.dumps(manifest))


def contents(run: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


class TestLook:
    def test_a_finished_run(self, run: Path) -> None:
        view = look(run)
        assert (view.status, view.step, view.num_steps, view.eta_s) == ("finished", 3, 3, None)
        assert view.is_over
        assert view.problems == []
        assert len(view.evaluation) == 4

    def test_it_writes_nothing_and_leaves_the_lock_alone(self, run: Path) -> None:
        before = contents(run)
        (run / ".lock").unlink()
        look(run)
        assert not (run / ".lock").exists()
        assert contents(run) == {name: v for name, v in before.items() if ".lock" not in name}

    def test_it_reads_a_run_that_another_process_holds(self, run: Path) -> None:
        say(run, status="running")
        with RunDirectory.open(run, writable=True):
            assert look(run).status == "running"

    def test_a_line_that_is_being_written_is_passed_over_in_silence(self, run: Path) -> None:
        say(run, status="running")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "pass_r')
        view = look(run)
        assert (view.step, view.problems) == (3, [])
        say(run, status="failed")
        assert look(run).problems == ["metrics.jsonl: the last line is cut off"]

    def test_long_silence_is_said(self, run: Path) -> None:
        say(run, status="running")
        written = max((run / name).stat().st_mtime for name in ("manifest.json", "events.jsonl"))
        assert look(run, now=lambda: written + 30).status == "running"
        silent = look(run, now=lambda: written + 300)
        assert silent.status == "silent"
        assert not silent.is_over
        assert "a long step, a stall, or a killed process" in text_of(silent)

    def test_a_clock_behind_the_run_is_no_silence(self, run: Path) -> None:
        assert look(run, now=lambda: 0.0).age_s == 0.0

    def test_the_end_is_reckoned_from_the_gaps_between_steps(self, run: Path) -> None:
        say(run, status="running")
        (run / "events.jsonl").write_text(
            "".join(
                json.dumps({"time_s": at, "event": "step_finished", "step": step}) + "\n"
                for step, at in ((1, 10.0), (2, 20.0), (3, 50.0), (4, 60.0))
            )
        )
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text(lines[0])
        view = look(run)
        assert (view.seconds_per_step, view.eta_s) == (10.0, 20.0)

    def test_each_damaged_file_is_named_and_the_rest_is_shown(self, run: Path) -> None:
        (run / "manifest.json").write_text('{"name": "samp')
        (run / "eval.json").write_text("[1]")
        (run / "config.resolved.yaml").write_text("a: 1\na: 2\n")
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text(lines[0] + "\x00\xff\n" + lines[2])
        (run / "events.jsonl").write_bytes(b"\xff\xfe\n" + (run / "events.jsonl").read_bytes())
        view = look(run)
        assert view.status == "finished"  # the events know
        assert [record["step"] for record in view.metrics] == [1, 3]
        assert [problem.split(" ")[0] for problem in view.problems] == [
            "manifest.json",
            "config.resolved.yaml",
            "metrics.jsonl",
            "events.jsonl",
            "eval.json",
        ]
        assert "damaged: metrics.jsonl is damaged: 1 unreadable line(s)" in text_of(view)

    @pytest.mark.parametrize("kept", ["manifest.json", "metrics.jsonl", "events.jsonl"])
    def test_one_file_is_enough(self, run: Path, kept: str) -> None:
        for path in list(run.iterdir()):
            if path.is_file() and path.name != kept:
                path.unlink()
        view = look(run)
        assert view.problems == []
        assert text_of(view)

    def test_values_of_the_wrong_kind_break_nothing(self, run: Path) -> None:
        say(run, status=["x"], objective={"a": 1})
        (run / "metrics.jsonl").write_text(
            '{"step": 5, "pass_rate": "high", "loss": null, "grad_norm": true, "reward_mean": 1'
            + 400 * "0"
            + '}\n{"step": "six"}\n'
        )
        (run / "events.jsonl").write_text('{"event": 3, "time_s": "noon"}\n{}\n')
        (run / "eval.json").write_text('{"rows": [3, {"policy": "student"}]}')
        assert "step 5 of 3" in text_of(look(run))

    def test_what_is_no_run_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is not a run directory"):
            look(tmp_path)


class TestFollow:
    def test_it_ends_with_the_run_and_sees_what_a_thread_writes(self, tmp_path: Path) -> None:
        path = write_run(tmp_path)
        say(path, status="running")
        writer = threading.Thread(target=self.write, args=(path,))
        seen: list[RunView] = []

        def show(view: RunView) -> None:
            seen.append(view)
            if len(seen) == 1:
                writer.start()

        follow(path, show, interval_s=0.001)
        writer.join()
        assert (seen[0].status, seen[0].step) == ("running", 3)
        assert (seen[-1].status, seen[-1].step) == ("stopped", 40)
        assert all(view.problems == [] for view in seen)
        assert [view.step for view in seen] == sorted(view.step for view in seen)

    @staticmethod
    def write(path: Path) -> None:
        with RunDirectory.open(path, writable=True) as run:
            log, lines = EventLog(run), MetricsWriter(run)
            for step in range(4, 41):
                lines.write(metrics(step))
                log.emit(Event.STEP_FINISHED, step=step, version=step)
                with (path / "trajectories.jsonl").open("a") as file:
                    file.write("half a li")
            say_atomically(run, "stopped")

    def test_it_ends_at_once_where_the_run_is_over(self, run: Path) -> None:
        seen: list[RunView] = []
        follow(run, seen.append, interval_s=1e6)
        assert len(seen) == 1


def say_atomically(run: RunDirectory, status: str) -> None:
    run.write_json("manifest.json", run.read_json("manifest.json") | {"status": status})


class TestFrame:
    def test_everything_a_reader_looks_for(self, run: Path) -> None:
        text = text_of(look(run))
        for part in (
            "sample  finished  grpo",
            "step 3 of 3",
            "pass_rate (fraction)",
            "▁▄█",
            "seconds_take",
            "teacher_refused",
            "what: no call",
            "student  after",
            "0.600 to 0.800",
        ):
            assert part in text, part

    def test_a_models_words_cannot_steer_the_terminal(self, run: Path) -> None:
        with RunDirectory.open(run, writable=True) as writer:
            EventLog(writer).emit(
                Event.ALARM, what="\x1b[2J\x1b]0;owned\x07\u202e[bold]x[/bold]\r\nnext"
            )
        say(run, policy_label="\x1b[31mred")
        text = text_of(look(run), width=200)
        assert not set(text) & set("\x1b\x07\r\u202e")
        assert "[bold]x[/bold] next" in text

    def test_a_narrow_terminal_keeps_when_and_what(self, run: Path) -> None:
        text = text_of(look(run), width=60)
        assert max(map(len, text.splitlines())) <= 60
        assert "run_finished" in text
        assert "…" in text.split("teacher_refused")[1].splitlines()[0]  # one line per event

    @pytest.mark.parametrize("width", [12, 24, 40, 60, 66, 80, 100])
    def test_no_number_is_ever_cut(self, run: Path, width: int) -> None:
        """Columns are left out whole; what stays of a cell is all of it."""
        with RunDirectory.open(run, writable=True) as writer:
            record = {"step": 4, "pass_rate": 0.123456, "response_tokens_mean": 1234.5678}
            writer.append("metrics.jsonl", record)
        wide = text_of(look(run), width=200).split("Events")[0].split()
        numbers = {word for word in wide if word[0].isdigit()}
        lines = text_of(look(run), width=width).split("Metrics")[1].split("Events")[0].splitlines()
        assert max(map(len, lines)) <= width
        found = {word for line in lines for word in line.split() if word[0].isdigit()}
        assert found <= numbers
        assert "0.1235" in found

    def test_the_last_value_is_that_of_the_last_step(self, run: Path) -> None:
        """An old healthy number in its place would say that all is well."""
        with RunDirectory.open(run, writable=True) as writer:
            lines = MetricsWriter(writer)
            for step in (4, 5):
                lines.write({"step": step, "reward_mean": float("nan"), "reverse_kl_mean": 0.5})
        shown = {line.split("  ")[0]: line for line in text_of(look(run)).splitlines()}
        assert shown["reward_mean (reward)"].split()[2:9] == [
            *("not", "a", "number", "2", "steps", "0.3", "0.3")
        ]
        assert shown["reverse_kl_mean (nats)"].split()[2] == "0.5"
        assert shown["pass_rate (fraction)"].split()[2] == "-"  # not measured in that step

    def test_what_the_run_never_measured_is_not_shown(self, run: Path) -> None:
        assert "entropy" not in text_of(look(run))
        assert "not a number" not in text_of(look(run))

    def test_an_evaluation_counts_its_episodes(self, run: Path) -> None:
        (run / "metrics.jsonl").unlink()
        say(run, status="evaluation", evaluation_status="running")
        view = look(run)
        assert (view.status, view.num_played, view.is_over) == ("running", 1, False)
        head = text_of(view).splitlines()[:2]
        assert head[0].startswith("sample  running  evaluation, nothing is trained here")
        assert head[1].startswith("1 episodes played  last write")
        written = max((run / name).stat().st_mtime for name in ("manifest.json", "events.jsonl"))
        assert look(run, now=lambda: written + 300).status == "silent"
        for told in ("finished", "stopped", "failed"):
            say(run, evaluation_status=told)
            view = look(run)
            assert (view.status, view.is_over) == (told, True)

    def test_without_data_there_are_no_empty_tables(self) -> None:
        text = text_of(RunView("new", status="created"))
        assert text == "new  created\nstep 0\n"

    @pytest.mark.parametrize(
        ("values", "shown"),
        [
            ([], ""),
            ([None, "x"], ""),
            ([1, 1], "▁▁"),
            ([0, None, 7], "▁ █"),
            ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "▁▂▃▄▅▆▇█"),
            ([float("nan"), 1.0, 2.0], " ▁█"),
        ],
    )
    def test_sparklines(self, values: list[object], shown: str) -> None:
        assert sparkline(values) == shown

    def test_a_long_sparkline_shows_the_newest_values(self) -> None:
        shown = sparkline([*range(200, 100, -1), *range(30)])
        assert (len(shown), shown[0], shown[-1]) == (30, "▁", "█")

    @pytest.mark.parametrize(
        ("seconds", "shown"),
        [
            (0.0, "0.0 s"),
            (45.0, "45 s"),
            (750.0, "12 min"),
            (12_000.0, "3 h 20 min"),
            (188_000.0, "2 d 4 h"),
        ],
    )
    def test_durations(self, seconds: float, shown: str) -> None:
        assert duration(seconds) == shown

    def test_on_a_terminal_the_frame_is_redrawn_elsewhere_printed_again(self, run: Path) -> None:
        texts = []
        for is_terminal in (True, False):
            stream = io.StringIO()
            console = Console(file=stream, force_terminal=is_terminal, width=100, height=60)
            with LiveFrames(console, now=lambda: 0.0) as frames:
                frames.show(look(run))
                frames.show(look(run))
            texts.append(stream.getvalue())
        assert "\x1b[1A" in texts[0]  # a line up
        assert "\x1b" not in texts[1]
        assert texts[1].count("step 3 of 3") == 2


class TestCommand:
    def test_once_prints_a_frame(self, run: Path) -> None:
        result = CliRunner().invoke(app, ["watch", str(run), "--once"])
        assert result.exit_code == 0
        assert "step 3 of 3" in result.output
        assert "\x1b" not in result.output

    def test_without_once_it_ends_with_the_run(self, run: Path) -> None:
        result = CliRunner().invoke(app, ["watch", str(run), "--interval", "0.1"])
        assert result.exit_code == 0
        assert result.output.count("step 3 of 3") == 1

    def test_a_folder_that_is_no_run_is_one_clear_error(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(app, ["watch", str(tmp_path), "--once"])
        assert result.exit_code == 2
        assert "is not a run directory" in result.output

    def test_it_follows_another_process(self, tmp_path: Path) -> None:
        path = write_run(tmp_path)
        say(path, status="running")
        for writer in self.writing(path):
            result = CliRunner().invoke(app, ["watch", str(path), "--interval", "0.1"])
            assert writer.wait(timeout=60) == 0
        assert result.exit_code == 0
        assert "damaged" not in result.output
        assert "step 9 of 3" in result.output.split("sample  ")[-1]

    @staticmethod
    def writing(path: Path) -> Iterator[subprocess.Popen[bytes]]:
        code = (
            "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]);"
            "from tests.support.sample_run import metrics;"
            "from miniverl_dist.observability.run_dir import RunDirectory;"
            "run = RunDirectory.open(Path(sys.argv[1]), writable=True);"
            "[run.append('metrics.jsonl', metrics(step)) for step in range(4, 10)];"
            "run.write_json('manifest.json', run.read_json('manifest.json') |"
            " {'status': 'finished'})"
        )
        with subprocess.Popen([sys.executable, "-c", code, str(path), str(ROOT)]) as writer:
            yield writer


def test_a_frame_is_made_without_a_console() -> None:
    assert frame(RunView("x"), now_s=0.0) is not None

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miniverl_dist.errors import ConfigError, RecordError
from miniverl_dist.observability.events import Event, EventLog
from miniverl_dist.observability.run_dir import RunDirectory
from miniverl_dist.reporting.report import write_report
from miniverl_dist.reporting.run_data import load_run_data, parse_evaluation, parse_trajectory
from miniverl_dist.reporting.summary import identity
from miniverl_dist.schemas.token_analysis import TokenAnalysisLine
from miniverl_dist.schemas.trajectory import SpanKind
from tests.support.sample_run import scored, trajectory, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def test_a_finished_run_is_complete(run: Path) -> None:
    data = load_run_data(run)
    assert data.notes == []
    assert data.status == "finished"
    assert [record["step"] for record in data.metrics] == [1, 2, 3]
    assert data.config["seed"] == 3
    assert len(data.events) == 4
    assert data.evaluation is not None
    assert data.label == "sample"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        load_run_data(tmp_path)


def test_status_tells_a_running_run_from_a_killed_one(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text()) | {"status": "running"}
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert load_run_data(run).status == "killed"
    with RunDirectory.open(run, writable=True) as writer:
        assert load_run_data(run).status == "running"
        assert writer.is_being_written
    assert load_run_data(run).status == "killed"


def test_everything_but_metrics_missing(run: Path) -> None:
    for path in [*run.glob("*.json"), *run.glob("*.yaml"), *run.glob("[!m]*.jsonl")]:
        path.unlink()
    data = load_run_data(run)
    assert len(data.metrics) == 3
    assert data.notes == [
        "manifest.json is missing",
        "config.resolved.yaml is missing",
        "events.jsonl is missing",
        "eval.json is missing: nothing has been evaluated yet",
        "trajectories.jsonl is missing",
    ]


def test_damage_becomes_notes_and_the_rest_is_read(run: Path) -> None:
    (run / "manifest.json").write_text("{")
    (run / "config.resolved.yaml").write_text("a: 1\na: 2\n")
    (run / "eval.json").write_text('{"rows": []}')
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0] + "oops\n" + lines[2] + '{"step": 4')
    lines = (run / "trajectories.jsonl").read_text().splitlines(keepends=True)
    (run / "trajectories.jsonl").write_text("".join(lines) + lines[0].replace("999", "0")[:50])
    data = load_run_data(run)
    assert [record["step"] for record in data.metrics] == [1, 3]
    assert len(data.samples) == 5
    assert [note.split(":")[0] for note in data.notes] == [
        "manifest.json",
        "config.resolved.yaml",
        "metrics.jsonl",
        "metrics.jsonl",
        "eval.json",
        "trajectories.jsonl, line 1 from the end",
    ]
    assert "2 unreadable line(s) left out, the first is line 2" in data.notes[2]
    assert "found step 3, expected 2" in data.notes[3]
    assert "environment: missing, but required" in data.notes[4]
    assert str(run) not in " ".join(data.notes)


NO_JSON = ("NaN", "Infinity", "-Infinity", "1e999", "1" + 400 * "0", "[NaN]", "[[1e999]]")


@pytest.mark.parametrize("value", NO_JSON)
def test_numbers_that_json_cannot_hold_are_null_in_every_record(run: Path, value: str) -> None:
    """Another writer, or a damaged one, leaves them; no reader may stumble, whatever the file."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 4, "pass_rate": {value}, "num_trajectories": {value}}}\n')
        file.write(f'{{"step": {value}, "loss_by_span_type": {{"a": {value}}}}}\n')
    with (run / "events.jsonl").open("a") as file:
        file.write(f'{{"event": "alarm", "step": {value}, "what": {value}}}\n')
    manifest = (run / "manifest.json").read_text().rstrip().removesuffix("}")
    (run / "manifest.json").write_text(f'{manifest}, "seed": {value}, "odd": {{"a": {value}}}}}')
    config = (run / "config.resolved.yaml").read_text()
    (run / "config.resolved.yaml").write_text(config + "odd: .inf\nopd: {clip: .inf}\n")
    data = load_run_data(run)
    held = (data.metrics, data.events, data.manifest, data.config)
    json.dumps([*held, data.losses], allow_nan=False)
    assert [record["step"] for record in data.metrics] == [1, 2, 3, 4]
    page = write_report(run).page.read_text()
    assert "Infinity," not in page.split('id="data">')[1].split("</script>")[0]


def test_an_evaluation_row_that_is_no_number_is_a_note(run: Path) -> None:
    text = (run / "eval.json").read_text()
    (run / "eval.json").write_text(text.replace('"reward_mean": 0.7', '"reward_mean": NaN'))
    data = load_run_data(run)
    assert data.evaluation is None
    [note] = data.notes
    assert "eval.json: reward_mean of the row student (after) is not a number" in note


def test_a_line_nested_beyond_reason_is_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x": ' + 100_000 * "[" + 100_000 * "]" + "}\n")
    data = load_run_data(run)
    assert len(data.metrics) == 3
    assert "1 unreadable line(s) left out, the first is line 4" in data.notes[0]


class TestEvaluationFolder:
    def test_nothing_of_a_training_is_missed(self, run: Path) -> None:
        evaluation_of(run)
        data = load_run_data(run)
        assert data.notes == []
        assert (data.is_evaluation, data.status, data.num_played) == (True, "finished", 1)
        assert dict(identity(data))["Status"] == (
            "evaluation, finished, 1 episodes played, nothing is trained"
        )

    def test_its_status_is_that_of_the_evaluation(self, run: Path) -> None:
        for told in ("stopped", "failed", "finished"):
            evaluation_of(run, evaluation_status=told)
            assert load_run_data(run).status == told
        evaluation_of(run, evaluation_status="running")
        assert load_run_data(run).status == "killed"
        with RunDirectory.open(run, writable=True):
            assert load_run_data(run).status == "running"

    def test_before_its_first_row(self, run: Path) -> None:
        evaluation_of(run)
        (run / "eval.json").unlink()
        (run / "events.jsonl").unlink()
        data = load_run_data(run)
        assert data.status == "stopped"
        assert data.notes == ["eval.json is missing: nothing has been evaluated yet"]


def evaluation_of(run: Path, **changes: object) -> None:
    """Make the sample run's folder what an evaluation of its own leaves."""
    for name in ("metrics.jsonl", "trajectories.jsonl", "token_analysis.jsonl"):
        (run / name).unlink(missing_ok=True)
    told = json.loads((run / "manifest.json").read_text()) | {"status": "evaluation"} | changes
    (run / "manifest.json").write_text(json.dumps(told))


def test_a_step_that_was_done_again_counts_once_and_the_last_one_counts(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "pass_rate": 0.9}\n{"step": 0}\n{"pass_rate": 1}\n')
    data = load_run_data(run)
    assert [record["step"] for record in data.metrics] == [0, 1, 2, 3]
    assert data.metrics[2]["pass_rate"] == 0.9


def test_samples_are_the_first_and_the_newest_passed_and_failed_in_turn(run: Path) -> None:
    found = [sample.trajectory_id for sample in load_run_data(run, num_samples=4).samples]
    assert found == ["t1-pass", "t3-pass", "t3-fail", "t2-pass"]
    assert load_run_data(run, num_samples=0).samples == []


def analysis(name: str, token_ids: tuple[int, ...] = (6, 7, 8)) -> TokenAnalysisLine:
    return TokenAnalysisLine(
        step=1,
        trajectory_id=name,
        group_id="000001.0",
        positions=(6, 7, 8),
        token_ids=token_ids,
        kinds=(SpanKind.ASSISTANT_TOOL_CALL,) * 3,
        rollout_logprobs=(-0.5,) * 3,
        advantages=(0.0,) * 3,
        units=(None,) * 3,
        unit_reverse_kl=(),
        opd_weights=(None,) * 3,
        is_stopped=(False,) * 3,
    )


class TestAnalysedSamples:
    def test_analysed_episodes_come_first_however_old_they_are(self, run: Path) -> None:
        with RunDirectory.open(run, writable=True) as writer:
            writer.append("token_analysis.jsonl", analysis("t2-pass"))
            for number in range(30):
                writer.append("trajectories.jsonl", scored(trajectory(f"new-{number}")))
        data = load_run_data(run, num_samples=4)
        names = [sample.trajectory_id for sample in data.samples]
        assert names == ["t1-pass", "t2-pass", "new-29", "new-28"]
        assert set(data.analyses) == {"t2-pass"}

    def test_an_analysis_of_other_tokens_is_not_shown(self, run: Path) -> None:
        with RunDirectory.open(run, writable=True) as writer:
            writer.append("token_analysis.jsonl", analysis("t1-pass", (6, 7, 9)))
        assert load_run_data(run).analyses == {}

    def test_a_damaged_analysis_is_a_note(self, run: Path) -> None:
        (run / "token_analysis.jsonl").write_text('{"step": 1}\n{"st')
        data = load_run_data(run)
        assert len(data.samples) == 5
        assert [note.split(":")[0] for note in data.notes] == [
            "token_analysis.jsonl, line 1",
            "token_analysis.jsonl, line 1 from the end",
        ]


def test_events_of_single_groups_are_passed_over_and_losses_counted(run: Path) -> None:
    with RunDirectory.open(run, writable=True) as writer:
        log = EventLog(writer)
        log.emit(Event.GROUP_STARTED, group_id="g")
        log.emit(Event.GROUP_DROPPED, group_id="g", reason="old")
    data = load_run_data(run)
    assert [event["event"] for event in data.events][-2:] == ["run_finished", "group_dropped"]
    assert data.losses["group dropped: old"] == {1: 1}


class TestParseTrajectory:
    def test_all_three_line_forms(self) -> None:
        plain = trajectory("a")
        forms = [
            plain.model_dump_json(),
            scored(plain).model_dump_json(),
            json.dumps({"tag": "x", "policy": "null", "trajectory": plain.model_dump(mode="json")}),
        ]
        for form in forms:
            assert parse_trajectory(form.encode() + b"\n", "f").trajectory_id == "a"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"loss_mask": [False] * 10}, "line 3: .*stored loss_mask differs from the mask"),
            ({"rollout_logprobs": [0.0] * 10}, "token 0 has .*rollout logprob"),
            ({"token_ids": [1, 2]}, "loss_mask has 10 entries for 2 tokens"),
            ({"reward": "high"}, "line 3: reward: found 'high', expected a number"),
            ({"termination": "bored"}, "line 3: termination: found 'bored', expected 'final_answ"),
            ({"extra": 1}, "line 3: extra: unknown key"),
        ],
    )
    def test_what_does_not_hold_is_named(self, changes: dict[str, object], message: str) -> None:
        record = trajectory("a").model_dump(mode="json") | changes
        with pytest.raises(RecordError, match=message):
            parse_trajectory(json.dumps(record).encode() + b"\n", "f.jsonl, line 3")

    def test_a_damaged_score_is_named(self) -> None:
        record = scored(trajectory("a")).model_dump(mode="json")
        del record["teacher"]["detail"]
        with pytest.raises(RecordError, match=r"^f: teacher\.\w+: missing, but required"):
            parse_trajectory(json.dumps(record).encode() + b"\n", "f")

    def test_a_truncated_line_is_named(self) -> None:
        with pytest.raises(RecordError, match="line 3: the line is cut off after 20 bytes"):
            parse_trajectory(trajectory("a").model_dump_json().encode()[:20], "f.jsonl, line 3")


def test_evaluations_name_the_field() -> None:
    with pytest.raises(RecordError, match=r"e\.json: task_ids: missing, but required"):
        parse_evaluation(b'{"environment": "bfcl"}', "e.json")
    with pytest.raises(RecordError, match=r"e.json: .*JSON"):
        parse_evaluation(b"{", "e.json")


def test_steps_that_are_missing_or_there_twice_are_noted(run: Path) -> None:
    path = run / "metrics.jsonl"
    first, second, third = path.read_text().splitlines(keepends=True)
    path.write_text(first + third)
    missing = "metrics.jsonl: found step 3, expected 2: a line is missing (1 such places)"
    assert load_run_data(run).notes == [missing]
    assert missing in write_report(run).text
    path.write_text(first + second + second + first + third)
    assert load_run_data(run).notes == [
        "metrics.jsonl: found step 2, expected 3: a line is there twice, or out of place "
        "(3 such places)"
    ]

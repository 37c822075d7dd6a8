from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from miniverl_dist.errors import ConfigError
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.run_dir import RunDirectory
from miniverl_dist.reporting.report import write_report
from miniverl_dist.reporting.summary import NOTABLE_EVENTS
from tests.support.sample_run import RECIPE, scored, trajectory, write_run

HOSTILE = '</pre><script>alert("x")</script><img src=http://evil.example/x onerror=alert(1)>'


class Page(HTMLParser):
    """Elements with their attributes, text outside of scripts, and script bodies."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.text += data

    def figures(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.scripts[0])["figures"]
        return found


def page_of(run: Path, *compare: Path) -> Page:
    return Page(write_report(run, compare).page.read_text())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


class TestPage:
    def test_tables_caveats_curves_and_episodes(self, run: Path) -> None:
        page = page_of(run)
        for text in ("Memorisation", "restricted to 900 of 248077", "+0.26 to +0.54"):
            assert text in page.text
        titles = [figure["title"] for figure in page.figures()]
        assert titles[:3] == [
            "Evaluated pass rate",
            "Pass rate in training",
            "Reward and its parts",
        ]
        assert "Advantage parts" not in page.text
        assert "Go to folder a." in page.text
        assert page.text.count("T = 1 after 1 expert calls") == 5
        charts = [attrs["id"] for tag, attrs in page.elements if "id" in attrs and tag == "div"]
        charts.remove("tip")
        assert charts == [f"chart-{index}" for index in range(len(titles))]

    def test_it_opens_without_a_network(self, run: Path) -> None:
        page = page_of(run)
        for tag, attrs in page.elements:
            assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
            assert not {"src", "href", "srcset", "action", "data"} & set(attrs), (tag, attrs)
        policy = next(attrs["content"] for _, attrs in page.elements if "http-equiv" in attrs)
        assert policy is not None
        assert policy.startswith("default-src 'none';")
        assert "http" not in policy
        styles = re.search(r"<style>.*?</style>", (run / "report.html").read_text(), re.DOTALL)
        assert styles is not None
        assert "url(" not in styles[0]
        assert "@import" not in styles[0]

    def test_plotly_is_embedded_once(self, run: Path) -> None:
        page = page_of(run)
        assert sum("plotly.js v" in script for script in page.scripts) == 1
        assert len(page.scripts) == 3

    def test_nothing_a_model_wrote_becomes_markup(self, run: Path) -> None:
        with RunDirectory.open(run, writable=True) as writer:
            writer.append("trajectories.jsonl", scored(trajectory(HOSTILE, text=HOSTILE)))
            writer.append(
                "events.jsonl", {"time_s": 1, "event": "alarm", "what": HOSTILE + " a | b"}
            )
        manifest = json.loads((run / "manifest.json").read_text())
        manifest["name"] = HOSTILE
        manifest["roles"][HOSTILE] = {"kind": HOSTILE, "tokenizer": HOSTILE}
        (run / "manifest.json").write_text(json.dumps(manifest))
        page = page_of(run)
        assert HOSTILE in page.text
        assert len(page.scripts) == 3
        assert not any(tag == "img" for tag, _ in page.elements)
        assert not any("alert" in script for script in (page.scripts[0], page.scripts[2]))
        assert "<script" not in (run / "summary.md").read_text()
        assert "<img" not in (run / "summary.md").read_text()

    def test_a_label_cannot_end_the_script_that_holds_the_figures(self, tmp_path: Path) -> None:
        one, other = write_run(tmp_path, name="one"), write_run(tmp_path, name="other")
        hostile = other.rename(tmp_path / "<script>alert(1)<!--")
        page = page_of(one, hostile)
        assert len(page.scripts) == 3
        assert "<" not in page.scripts[0]
        assert any("<script>" in str(figure["data"]) for figure in page.figures())

    def test_paths_of_this_machine_stay_out(self, run: Path) -> None:
        evaluation = json.loads((run / "eval.json").read_text())
        evaluation["environment"] = ["/home/ada/tasks"]
        evaluation["task_ids"] = "/home/ada/tasks"
        (run / "eval.json").write_text(json.dumps(evaluation))
        assert "found '…/tasks', expected a list" in page_of(run).text
        for name in ("report.html", "summary.md"):
            text = (run / name).read_text()
            assert str(run) not in text
            assert "/home/ada" not in text


class TestDamage:
    def test_a_run_that_has_only_begun(self, tmp_path: Path) -> None:
        with RunDirectory.create(tmp_path / "new") as run:
            run.write_json("manifest.json", {"name": "new", "status": "running"})
            page = page_of(run.path)
        assert "status: running" in page.text
        assert "metrics.jsonl is missing" in page.text
        assert page.figures() == []
        assert "plotly.js v" not in "".join(page.scripts)

    def test_a_damaged_run_says_what_is_missing(self, run: Path) -> None:
        (run / "eval.json").write_text("{")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "pass')
        written = write_report(run)
        assert len(written.notes) == 2
        assert "metrics.jsonl: 1 unreadable line(s) left out, the first is line 4" in written.text
        assert "eval.json: " in Page(written.page.read_text()).text

    def test_what_is_no_run_gets_no_files(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError):
            write_report(tmp_path)
        assert list(tmp_path.iterdir()) == []


class TestSummary:
    def test_totals_and_losses_by_reason(self, run: Path) -> None:
        text = write_report(run).text
        assert "| teacher_dropped | 3 |" in text
        assert "| teacher refused: too_long | 1 |" in text
        assert "| alarm | what: no call, path: …/x |" in text
        assert "| pass_rate | 0.2 | 0.6 | fraction |" in text
        assert text == (run / "summary.md").read_text()

    def test_table_cells_cannot_break_the_table(self, run: Path) -> None:
        with RunDirectory.open(run, writable=True) as writer:
            writer.append("events.jsonl", {"time_s": 1, "event": "alarm", "what": "a | b\nc `d`"})
        assert "| alarm | what: a \\| b c 'd' |" in write_report(run).text

    def test_a_run_that_diverged_does_not_look_flat(self, run: Path) -> None:
        with RunDirectory.open(run, writable=True) as writer:
            for step in (4, 5):
                lines = {"step": step, "pass_rate": 0.6, "grad_norm": None, "rollout_tokens": None}
                writer.append("metrics.jsonl", lines)
        text = write_report(run).text
        assert "| grad_norm | not measured | not a number (in 2 of 5 steps) | norm |" in text
        assert "| rollout_tokens | 0 without 2 steps that are not a number |" in text
        assert "| Metric | Mean of the first 2 of 5 steps | Mean of the last 2 of 5 steps |" in text

    def test_what_falls_is_shown_of_a_run_that_compares_distributions(self, run: Path) -> None:
        assert "| loss |" not in write_report(run).text
        lines = [
            {"step": step, "loss": 2.0 / step, "divergence_mean": 1.0 / step, "num_target_rows": 9}
            for step in (1, 2, 3)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        text = write_report(run).text
        assert "| loss | 2 | 0.6667 | loss |" in text
        assert "| divergence_mean | 1 | 0.3333 | nats |" in text
        for name in ("entropy_mean", "mismatch_mean_abs", "pass_rate"):
            assert f"| {name} |" not in text

    def test_a_run_is_not_compared_with_itself(self, run: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(run)
        for compared in ([run], [tmp_path / "link"], [run / "." / ".." / "sample"]):
            with pytest.raises(ConfigError, match="is given twice: compared with itself, a run"):
                write_report(run, compared)
        other = write_run(tmp_path, name="other")
        with pytest.raises(ConfigError, match="is given twice"):
            write_report(run, [other, other])
        assert not (run / "summary.md").exists()

    def test_two_folders_of_one_name_are_told_apart(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        one, other = (write_run(tmp_path / name) for name in ("a", "b"))
        text = write_report(one, [other]).text
        assert "# Run `a/sample`" in text.replace("'", "`")
        assert "| Policy | When | T | a/sample | b/sample |" in text
        assert "| student | after | 1 | 0.700 | 0.700 |" in text

    def test_a_comparison_prints_both_runs_and_writes_one(self, tmp_path: Path) -> None:
        one = write_run(tmp_path, name="one")
        other = write_run(tmp_path, name="other", recipe=RECIPE.replace("seed: 3", "seed: 4"))
        text = write_report(one, [other]).text
        assert "# Run `one`" in text
        assert "# Run `other`" in text
        assert text.count("## Evaluation") == 2
        assert not (other / "summary.md").exists()
        page = page_of(one, other)
        names = [trace["name"] for trace in page.figures()[2]["data"]]
        assert names == ["reward_mean", "reward_mean (other)"]
        assert "Runs compared: last steps" in page.text
        assert "where the recipes differ" in page.text
        assert "Runs compared" not in page_of(one).text


def test_every_notable_event_is_one_that_is_written() -> None:
    assert {event.value for event in Event} >= NOTABLE_EVENTS
    assert {"teacher_left_alone", "engine_lost", "student_lost"} <= NOTABLE_EVENTS

"""docs/small_models.md says what the files say, and no more."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from miniverl_dist.errors import ConfigError
from scripts.small_models import chart, conclusion, document, measure, read_bits, steps_table
from tests.support.eval_rows import row


def bits(**values: float) -> dict[str, dict[str, Any]]:
    return {n: {"bits_per_byte": v, "num_tokens": 9, "num_bytes": 20} for n, v in values.items()}


def write_bits(folder: Path, name: str, value: float, texts: str = "a") -> None:
    found = {"texts_sha256": texts, "models": bits(**{name: value})}
    (folder / f"bits_{name}.json").write_text(json.dumps(found))


def finished(folder: Path) -> Path:
    run = folder / "run"
    run.mkdir()
    for name, value in (("base", 1.02), ("warm", 0.31), ("trained", 0.25)):
        write_bits(folder, name, value)
    rows = [row("before", 0, 0, 0, policy="null"), row("warm", 0, 0, 1), row("after", 1, 1, 1)]
    (run / "eval.json").write_text(json.dumps({"rows": rows}))
    versions = {"torch": "2.13.0", "transformers": "5.24.0"}
    machine = {"machine": "x86_64", "num_cpus": 2, "packages": versions}
    (run / "environment.json").write_text(json.dumps(machine))
    step = {"step": 1, "seconds_step": 90.0, "peak_rss_bytes": 2**32, "reward_mean": 0.25}
    lines = [step | {"reward_mean": 0.75}, step, step | {"step": 2}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_numbers_of_the_files_are_in_it(tmp_path: Path) -> None:
    text = document(finished(tmp_path))
    assert "| student as it comes | 1.020 | 9 |" in text
    assert "| student, after | 0.250 | 0.50 (0.25 to 0.75) | 1.5 | 6 |" in text
    assert "(small_models.svg)" in text
    assert "lowered the student's bits per byte" in text
    assert "0.310 after the warm-up, 0.250 at the end" in text
    assert "2 steps took 3 minutes" in text
    assert "4.0 GiB" in text
    assert text.count("| 1 | 0.25 |") == 1  # the step that was done again counts once
    assert "teacher without it" not in text


def test_before_anything_has_run_it_says_so(tmp_path: Path) -> None:
    text = document(tmp_path)
    assert "The run has not been made yet." in text
    assert "lowered" not in text


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ((2, 2, 2, 2), "The pass rate rose: 0.50 after the warm-up, 1.00 at the end, +0.500"),
        ((2, 0, 1, 1), "No change of the pass rate is shown"),
        ((0, 0, 0, 0), "The pass rate fell"),
    ],
)
def test_a_change_within_the_interval_of_the_difference_is_none(
    after: tuple[int, ...], verdict: str
) -> None:
    found = conclusion({}, [row("warm", 1, 1, 1, 1), row("after", *after)])
    assert verdict in found
    assert "paired by task, over 4 tasks" in found


def test_the_chart_holds_every_step_and_leaves_gaps() -> None:
    steps = [{"step": n, "reward_mean": n / 4, "pass_rate": 0.5} for n in (1, 2, 3)]
    steps[1]["reward_mean"] = None  # type: ignore[assignment]
    found = chart(steps)
    assert chart(steps) == found
    points = re.findall(r'points="([^"]*)"', found)
    assert [len(each.split()) for each in points] == [2, 3, 0]
    assert (">step 1<" in found, ">3<" in found) == (True, True)
    assert ElementTree.fromstring(found).tag.endswith("svg")


def test_bits_that_rise_are_not_called_lower() -> None:
    found = conclusion(bits(warm=0.3, trained=0.31), [])
    assert "did not lower the student's bits per byte" in found


def test_measurements_of_different_texts_do_not_meet(tmp_path: Path) -> None:
    write_bits(tmp_path, "base", 1.0)
    write_bits(tmp_path, "trained", 0.5, texts="b")
    with pytest.raises(ConfigError, match="measured on different texts"):
        read_bits(tmp_path)


def test_a_finished_measurement_is_not_made_again(tmp_path: Path) -> None:
    write_bits(tmp_path, "base", 1.0)
    before = (tmp_path / "bits_base.json").read_bytes()

    def folder() -> Path:
        raise AssertionError("nothing needs to be exported")

    measure(tmp_path / "no-config", tmp_path, "base", folder)
    assert (tmp_path / "bits_base.json").read_bytes() == before


def test_a_failed_measurement_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ended with exit code"):
        measure(tmp_path / "no-config.yaml", tmp_path, "base", lambda: tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_measured_stays_empty() -> None:
    assert "|  |" in steps_table([{"step": 3, "reward_mean": None, "pass_rate": 1.0}])

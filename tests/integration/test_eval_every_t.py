"""An evaluation of every T, from the command to the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.cli import app
from miniverl_dist.reporting.run_data import parse_evaluation

pytestmark = [pytest.mark.tokenizers, pytest.mark.timeout(300)]
RECIPE = Path(__file__).resolve().parents[2] / "configs" / "lab_calculator.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("every") / "eval"
    command = ["eval", str(RECIPE), "--policy", "null", "--policy", "oracle"]
    command += ["-o", "evaluation.tail_calls=all"]
    told = CliRunner().invoke(app, [*command, "--output", str(output)])
    assert told.exit_code == 0, told.output
    assert "Differences of pass rates" in told.output
    return output


def test_null_passes_nothing_and_the_oracle_everything_at_every_t(folder: Path) -> None:
    report = parse_evaluation((folder / "eval.json").read_bytes(), "eval.json")
    tails = {row.tail_calls for row in report.rows}
    assert {1, 2, "all"} <= tails
    assert {(row.policy, row.tail_calls) for row in report.rows} == {
        (policy, tail) for policy in ("null", "oracle") for tail in tails
    }
    for row in report.rows:
        assert (row.pass_rate, row.num_faults) == (float(row.policy == "oracle"), 0)
        assert row.errors == dict.fromkeys(row.errors, 0)
    together = next(row for row in report.rows if row.tail_calls == "all")
    apart = [r for r in report.rows if r.policy == together.policy and r.tail_calls != "all"]
    assert together.num_tasks == apart[0].num_tasks == len(report.task_ids)
    assert sorted(together.tasks, key=str) == sorted((o for r in apart for o in r.tasks), key=str)
    assert report.split == "ids"
    assert set(report.classes) == set(report.task_ids)


def test_the_rows_compare_with_each_other(folder: Path) -> None:
    rows = ["--row-a", "null:initial:all", "--row-b", "oracle:initial:all"]
    told = CliRunner().invoke(app, ["eval", "compare", str(folder), str(folder), *rows, "--json"])
    assert told.exit_code == 0, told.output
    [row] = json.loads(told.output)["result"]["rows"]
    assert (row["passes"]["difference"], row["passes"]["low"]) == (1.0, 1.0)

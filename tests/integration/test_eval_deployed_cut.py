"""A deployed evaluation that was cut off, and started again, gives the same table."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from actors import launch
from actors.eval_jobs import EvaluationRequest
from miniverl_dist.config.load import load_run_config
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.schemas.evaluation import EvaluationReport
from tests.support.hf_run import hf_run

pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers, pytest.mark.timeout(300)]
NAME = "step-000002"


def evaluate(run_dir: Path) -> EvaluationReport:
    request = EvaluationRequest(("student",), NAME, run_dir / "checkpoints" / NAME, deploy="hf")
    return launch.evaluate_request(
        load_run_config(run_dir), request, output=run_dir, progress=SilentProgress()
    )


@pytest.mark.parametrize("num_kept", [0, 1, 3, 5, 7])
def test_what_is_missing_is_played_and_nothing_else(num_kept: int, tmp_path: Path) -> None:
    run_dir = asyncio.run(hf_run(tmp_path))[0]
    whole = evaluate(run_dir)
    episodes = run_dir / "eval_trajectories.jsonl"
    lines = episodes.read_bytes().splitlines(keepends=True)
    assert len(lines) == 8  # four of the base, four of the checkpoint
    # As a process leaves it that was killed in the middle of a write.
    (run_dir / "eval.json").unlink()
    episodes.write_bytes(b"".join(lines[:num_kept]) + lines[num_kept][:50])
    again = evaluate(run_dir)
    assert again == whole.model_copy(update={"num_episode_bytes": again.num_episode_bytes})
    kept = episodes.read_bytes().splitlines(keepends=True)
    assert kept[:num_kept] == lines[:num_kept]

    def told(found: list[bytes]) -> list[tuple[str, str, list[int]]]:
        records = map(json.loads, found)
        return sorted(
            (r["tag"], r["trajectory"]["trajectory_id"], r["trajectory"]["token_ids"])
            for r in records
        )

    assert told(kept) == told(lines)

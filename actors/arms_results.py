"""What a finished run of a benchmark has come to, read from its run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miniverl_dist.config.yaml_text import parse_yaml
from miniverl_dist.errors import RecordError
from miniverl_dist.lab.arms import Measured
from miniverl_dist.observability.run_dir import CONFIG_RESOLVED, MANIFEST, RecordFile, RunDirectory
from miniverl_dist.schemas.eval_settings import measuring_settings
from miniverl_dist.schemas.evaluation import EvaluationRow
from miniverl_dist.training.evaluator import read_evaluation

_STARTS = ("warm", "before")
"""Tags of the student's row before training, the later one first."""


def measure(run_dir: Path) -> Measured:
    """Read a finished run.

    Raises:
        RecordError: a record is damaged, or the trained student was not evaluated.
    """
    run = RunDirectory.open(run_dir)
    rows = _student_rows(run)
    if "after" not in rows:
        raise RecordError(
            f"{run_dir.name}: eval.json has no row of the trained student: the evaluation failed "
            "(see events.jsonl), or `evaluation.after` is off"
        )
    return _measured(run, rows["after"], rows, run.read_jsonl(RecordFile.METRICS))


def measure_start(run_dir: Path, checkpoint: str | None) -> Measured:
    """Read a finished cold start, measured where the arms begin.

    Args:
        run_dir: Of the run.
        checkpoint: The commit that they take the weights of; None: the newest.

    Raises:
        RecordError: a record is damaged, or no row is of those very weights.
    """
    run = RunDirectory.open(run_dir)
    rows, steps = _student_rows(run), run.read_jsonl(RecordFile.METRICS)
    version = _version_at(run, steps, checkpoint)
    tags = [tag for tag in ("after", *_STARTS, checkpoint) if tag in rows]
    tag = next((tag for tag in tags if rows[tag].policy_version == version), None)
    if tag is None:
        measured = ", ".join(f"{tag} (version {rows[tag].policy_version})" for tag in rows)
        raise RecordError(
            f"{run_dir.name}: the arms begin with {checkpoint or 'its last weights'} (policy "
            f"version {version}), and eval.json has the student at {measured or 'no time'}: switch "
            "`evaluation.warm` (behind a warm-up) or `evaluation.after` (the last) on in "
            "cold_start.overrides"
        )
    return _measured(run, rows[tag], rows, steps)


def _version_at(
    run: RunDirectory, steps: Sequence[Mapping[str, Any]], checkpoint: str | None
) -> int:
    """Policy version of a commit; commits are named by the step behind which they stand."""
    step = None if checkpoint is None else int(checkpoint.rpartition("-")[2])
    versions = {0: 0} | {line["step"]: line["policy_version"] for line in steps}
    at = max(versions) if step is None else step
    if at not in versions:
        raise RecordError(
            f"{run.path.name}: no step {at} was trained, so {checkpoint} cannot be measured"
        )
    return int(versions[at])


def _measured(
    run: RunDirectory,
    after: EvaluationRow,
    rows: Mapping[str, EvaluationRow],
    steps: Sequence[Mapping[str, Any]],
) -> Measured:
    start = next((rows[tag] for tag in _STARTS if tag in rows), None)
    if after.pass_rate is None or after.reward_mean is None:
        raise RecordError(
            f"{run.path.name}: row student {after.tag} of eval.json has no episode that counts: "
            f"all {after.num_faults} were lost to the harness (see eval_trajectories.jsonl)"
        )
    resolved = _resolved(run)

    def total(name: str) -> int:
        return int(sum(step.get(name) or 0 for step in steps))

    return Measured(
        pass_rate_start=None if start is None else start.pass_rate,
        reward_start=None if start is None else start.reward_mean,
        pass_rate=after.pass_rate,
        reward=after.reward_mean,
        num_eval_episodes=after.num_episodes,
        sampled_groups=total("num_groups"),
        sampled_episodes=total("num_trajectories"),
        zero_variance=str(resolved["grpo"]["zero_variance"]),
        zero_variance_groups=total("num_zero_variance_groups"),
        refilled_groups=total("num_refilled_groups"),
        sampled_tokens=total("rollout_tokens"),
        optimizer_steps=total("num_optimizer_steps"),
        teacher_scored_tokens=_teacher_scored_tokens(run),
        teacher_asked_rows=total("num_target_rows") if _asks_for_rows(resolved) else 0,
        start_sha256=(run.read_json(MANIFEST).get("warm_start") or {}).get("weights_sha256"),
        measured_as=measuring_settings(resolved),
    )


def _resolved(run: RunDirectory) -> dict[str, Any]:
    """As the run was started; read without the checks that a later version may make."""
    return dict(parse_yaml(run.read_bytes(CONFIG_RESOLVED), CONFIG_RESOLVED).data)


def _asks_for_rows(resolved: Mapping[str, Any]) -> bool:
    """Under sft the rows are the written tokens' own: no teacher is asked for them."""
    distill = resolved.get("distill")
    return distill is not None and distill["divergence"] != "sampled_nll"


def _student_rows(run: RunDirectory) -> dict[str, EvaluationRow]:
    report = read_evaluation(run)
    return {row.tag: row for row in (report.rows if report else ()) if row.policy == "student"}


def _teacher_scored_tokens(run: RunDirectory) -> int:
    """The teacher's tokens in the trained trajectories' scores."""
    count = 0
    for line in run.iter_jsonl(RecordFile.TRAJECTORIES):
        spans = (line.get("teacher") or {}).get("spans") or ()
        count += sum(len(span["logprobs"]) for span in spans)
    return count

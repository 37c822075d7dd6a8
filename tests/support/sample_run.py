"""A small run directory written with the real writers, for tests of what reads one."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from miniverl_dist.config.load import LoadedConfig, load_config
from miniverl_dist.observability.environment import environment_record
from miniverl_dist.observability.events import Event, EventLog
from miniverl_dist.observability.metrics import MetricsWriter
from miniverl_dist.observability.run_dir import RecordFile, RunDirectory
from miniverl_dist.ports import ScoredTrajectory
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow
from miniverl_dist.schemas.messages import Message, ParsedCall, ParseStatus, ToolCall
from miniverl_dist.schemas.run_state import CheckpointFile, CheckpointManifest, RunState
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal
from miniverl_dist.schemas.trajectory import (
    SamplingRecord,
    Span,
    SpanKind,
    Termination,
    Trajectory,
)

RECIPE = """\
# the sample recipe
name: sample
objective: grpo
seed: 3
tasks: {kind: ids, train: [multi_turn_base_1, multi_turn_base_2], eval: [multi_turn_base_1]}
student: {}
loop: {num_steps: 3, num_groups: 2, group_size: 2}
"""


def trajectory(name: str, *, passed: bool = True, text: str = "cd(folder='a')") -> Trajectory:
    """Ten tokens: system, user, a prefix call, a sampled call, its result."""
    spans = (
        Span(kind=SpanKind.SYSTEM, start=0, end=2, segment_key="system:0", message_index=0),
        Span(kind=SpanKind.USER, start=2, end=4, segment_key="user:1", message_index=1),
        Span(
            kind=SpanKind.ASSISTANT_TOOL_CALL,
            start=4,
            end=6,
            segment_key="assistant:2",
            message_index=2,
        ),
        Span(
            kind=SpanKind.ASSISTANT_TOOL_CALL,
            start=6,
            end=9,
            segment_key="assistant:3",
            sampled=True,
            message_index=3,
            weight_versions=(2,),
        ),
        Span(kind=SpanKind.TOOL_RESULT, start=9, end=10, segment_key="tool:4", message_index=4),
    )
    mask = tuple(6 <= position < 9 for position in range(10))
    call = ToolCall(name="cd", arguments={"folder": "a"})
    return Trajectory(
        trajectory_id=name,
        group_id="000001.0",
        task_id="task_1",
        environment="bfcl",
        prefix_calls=1,
        tail_calls=1,
        tokenizer_fingerprint="f" * 64,
        token_ids=tuple(range(10)),
        spans=spans,
        loss_mask=mask,
        rollout_logprobs=[-0.5 if sampled else math.nan for sampled in mask],
        messages=(
            Message(role="system", content="You call tools."),
            Message(role="user", content="Go to folder a."),
            Message(role="assistant", content="<call>ls()</call>"),
            Message(role="assistant", content=text, tool_calls=(call,)),
            Message(role="tool", content='{"current": "a"}'),
        ),
        tool_calls=(ParsedCall(status=ParseStatus.OK, call=call, raw=text),),
        exec_successes=(passed,),
        reward=1.0 if passed else 0.25,
        reward_parts={"mean_partial": 0.9},
        passed=passed,
        verdict={"state_only": passed, "official_per_turn": False},
        termination=Termination.FINAL_ANSWER if passed else Termination.MAX_TURNS,
        sampling=SamplingRecord(temperature=1.0, max_new_tokens=16),
        seed=1,
    )


def row(policy: str, tag: str, rate: float, **changes: object) -> EvaluationRow:
    """An evaluation row with plausible columns; with ``tasks``, as many episodes as they have."""
    tasks: Any = changes.get("tasks", ())
    values: dict[str, Any] = {
        "policy": policy,
        "tag": tag,
        "policy_version": 0,
        "tail_calls": 1,
        "num_tasks": 10,
        "num_episodes": sum(o.num_episodes for o in tasks) if tasks else 40,
        "num_faults": 0,
        "pass_rate": rate,
        "pass_low": max(0.0, rate - 0.1),
        "pass_high": min(1.0, rate + 0.1),
        "official_per_turn_rate": rate,
        "state_only_rate": rate,
        "reward_mean": rate,
        "reward_parts": {},
        "calls_per_episode": 1.0,
        "tokens_per_episode": 20.0,
        "terminations": {},
    }
    return EvaluationRow(**(values | changes))


def report(*rows: EvaluationRow, trains_on_eval_tasks: bool = False) -> EvaluationReport:
    """An evaluation of one task."""
    return EvaluationReport(
        environment="bfcl",
        task_ids=("task_1",),
        trains_on_eval_tasks=trains_on_eval_tasks,
        temperature=1.0,
        rows=rows,
    )


def metrics(step: int) -> dict[str, Any]:
    """A step record whose pass rate rises."""
    return {
        "step": step,
        "policy_version": step,
        "pass_rate": 0.2 * step,
        "reward_mean": 0.3,
        "reverse_kl_mean": 0.5,
        "calls_per_trajectory": 1.0,
        "seconds_take": 0.5,
        "seconds_step": 1.5,
        "teacher_dropped": 1,
        "num_trajectories": 4,
    }


def manifest(config: LoadedConfig) -> dict[str, Any]:
    """What a run says about itself."""
    return {
        "name": config.config.name,
        "objective": config.config.objective,
        "policy_label": config.config.policy_label,
        "config_digest": config.digest,
        "seed": config.config.seed,
        "roles": {
            "student": {
                "kind": "toy",
                "tokenizer": "qwen3.6",
                "fingerprint": "f" * 64,
                "restricted_softmax": {"num_ids": 900, "vocab_size": 248077},
            }
        },
        "environment": {"package": "bfcl-eval"},
        "warmup": {"num_steps": 10},
        "created_s": 1.0,
        "status": "finished",
    }


def write_run(folder: Path, *, recipe: str = RECIPE, name: str = "sample") -> Path:
    """A finished run of three steps with one checkpoint."""
    source = folder / f"{name}.yaml"
    source.write_text(recipe)
    config = load_config(source)
    with RunDirectory.create(folder / name) as run:
        config.save(run)
        run.write_json("manifest.json", manifest(config))
        run.write_json("environment.json", environment_record())
        log, writer = EventLog(run, now=lambda: 1.0), MetricsWriter(run)
        log.emit(Event.RUN_STARTED)
        for step in (1, 2, 3):
            writer.write(metrics(step))
            for passed in (True, False):
                sample = trajectory(f"t{step}-{'pass' if passed else 'fail'}", passed=passed)
                run.append(RecordFile.TRAJECTORIES, scored(sample))
        log.emit(Event.TEACHER_REFUSED, trajectory_id="t1", reason="too_long", detail="x")
        log.emit(Event.ALARM, what="no call", path="/home/ada/runs/x")
        evaluated = trajectory("e1").model_dump(mode="json")
        run.append(
            RecordFile.EVAL_TRAJECTORIES,
            {"tag": "after", "policy": "student", "trajectory": evaluated},
        )
        run.write_json(
            "eval.json",
            report(
                row("null", "before", 0.0),
                row("student", "before", 0.1),
                row("student", "warm", 0.3),
                row("student", "after", 0.7, policy_version=3),
                trains_on_eval_tasks=True,
            ),
        )
        log.emit(Event.RUN_FINISHED)
        write_checkpoint(run.path / "checkpoints" / "step-000003", config, run)
    return folder / name


def scored(sample: Trajectory) -> ScoredTrajectory:
    """The trajectory as training stores it, refused by the teacher."""
    refusal = TeacherRefusal(
        trajectory_id=sample.trajectory_id, reason=RefusalReason.TOO_LONG, detail="x"
    )
    return ScoredTrajectory(trajectory=sample, teacher=refusal)


def write_checkpoint(folder: Path, config: LoadedConfig, run: RunDirectory) -> None:
    """One file of weights and its completion marker."""
    folder.mkdir(parents=True)
    data = b"weights"
    (folder / "student.bin").write_bytes(data)
    state = RunState(
        step=3,
        policy_version=3,
        num_publishes=4,
        next_ticket=6,
        curriculum={},
        counters={},
        file_positions=run.positions(["metrics.jsonl", "trajectories.jsonl"]),
        config_digest=config.digest,
        seed=3,
        warmup_done=True,
    )
    file = CheckpointFile(
        path="student.bin", num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )
    marker = CheckpointManifest(format_version=1, name=folder.name, state=state, files=(file,))
    (folder / "checkpoint.json").write_bytes(marker.to_bytes())

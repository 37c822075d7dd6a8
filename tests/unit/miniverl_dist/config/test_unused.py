"""A setting that nothing would read is one message; one that has an effect is taken."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from miniverl_dist.config.arms import load_benchmark
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig

ROOT = Path(__file__).resolve().parents[4]
Changes = dict[str, Any]

TEACHER: Changes = {"rendering": "raw", "model": {"kind": "toy"}, "fit": {"num_steps": 1}}
SAME: Changes = TEACHER | {"tokenizer": "qwen3.6", "rendering": "verbatim"}
HTTP: Changes = {"rendering": "raw", "url": "http://teacher:30000"}
HF_TEACHER: Changes = {"rendering": "raw", "model": {"kind": "hf", "path": "m"}}
BACKBONE: Changes = {
    "tokenizer": "qwen3.6",
    "rendering": "verbatim",
    "model": {"kind": "student_backbone"},
}
LORA: Changes = {"model": {"kind": "hf", "path": "m", "lora": {}}}
MEGATRON: Changes = {"model": {"kind": "megatron", "config": "config.json"}}

GRPO: Changes = {"objective": "grpo"}
SFT: Changes = {"objective": "sft", "demonstrations": {}}
KD: Changes = {
    "objective": "offline_kd",
    "demonstrations": {},
    "teacher": TEACHER,
    "distill": {},
}
CREDIT: Changes = {"objective": "opd", "teacher": TEACHER, "opd": {}}
OPD: Changes = {"objective": "opd", "teacher": TEACHER, "distill": {}}
BOTH: Changes = OPD | {"objective": "grpo_opd"}
EXACT: Changes = {"support": "exact_full_vocab"}
STORED = SFT | {"demonstrations": {"trajectories": "trajectories.jsonl"}}

SAMPLED = "where the student samples"
ADVANTAGE = "where tokens have an advantage"
SERVED = "for a teacher that is asked over HTTP"


def recipe(changes: Changes) -> RunConfig:
    base: Changes = {
        "name": "x",
        "tasks": {"kind": "split"},
        "student": {},
        "loop": {"num_steps": 3, "num_groups": 2, "group_size": 4},
    }
    return RunConfig.model_validate_json(json.dumps(base | changes))


def loop(**changes: object) -> Changes:
    return {"loop": {"num_steps": 3, "num_groups": 2, "group_size": 4} | changes}


def taught(base: Changes, teacher: Changes) -> Changes:
    return base | {"teacher": base["teacher"] | teacher}


def demonstrated(**section: object) -> Changes:
    return SFT | {"demonstrations": section}


def engine(**section: object) -> Changes:
    sglang = {"kind": "sglang"} | section
    return GRPO | {"student": MEGATRON, "rollout": {"engine": sglang}}


OF_DIVERGENCE: list[tuple[Changes, str, str]] = [
    (GRPO | {"memory": {"strategy": "swap"}}, "memory.strategy", "that asks a teacher"),
    (SFT | {"memory": {"limit_bytes": 1}}, "memory.limit_bytes", "that asks a teacher"),
    (
        OPD | {"memory": {"strategy": "swap", "limit_bytes": 1}},
        "memory.limit_bytes",
        "with memory.strategy auto",
    ),
    (OPD | {"distill": {"beta": 0.1}}, "distill.beta", "with distill.divergence jsd"),
    (
        OPD | {"teacher": SAME, "distill": EXACT | {"top_k": 8}},
        "distill.top_k",
        "with distill.support top_k_tail",
    ),
    (
        SFT | {"distill": {"divergence": "sampled_nll", "top_k": 8}},
        "distill.top_k",
        "with a divergence from a teacher",
    ),
    (
        SFT | {"distill": EXACT | {"divergence": "sampled_nll"}},
        "distill.support",
        "with a divergence from a teacher",
    ),
    (
        OPD | {"selection": {"kind": "tool_and_final", "ratio": 0.5}},
        "selection.ratio",
        "with selection.kind uniform_ratio or hybrid",
    ),
]
OF_LOSS: list[tuple[Changes, str, str]] = [
    (SFT | {"loss": {"kind": "cispo"}}, "loss.kind", SAMPLED),
    (KD | {"loss": {"clip_high": 0.3}}, "loss.clip_high", SAMPLED),
    (KD | {"loss": {"reduction": "trajectory_mean"}}, "loss.reduction", SAMPLED),
    (SFT | {"loss": {"mismatch_alarm_mean": 1.0}}, "loss.mismatch_alarm_mean", SAMPLED),
    (SFT | {"loss": {"mismatch_alarm_ratio": 2.0}}, "loss.mismatch_alarm_ratio", SAMPLED),
    (SFT | {"loss": {"kl_estimator": "k1_in_reward"}}, "loss.kl_estimator", SAMPLED),
    (OPD | {"loss": {"kind": "gspo_token"}}, "loss.kind", ADVANTAGE),
    (OPD | {"loss": {"clip_low": 0.1}}, "loss.clip_low", ADVANTAGE),
    (OPD | {"loss": {"clip_high": 0.1}}, "loss.clip_high", ADVANTAGE),
    (OPD | {"loss": {"dual_clip": 5.0}}, "loss.dual_clip", ADVANTAGE),
    (OPD | {"loss": {"mismatch_cap": 5.0}}, "loss.mismatch_cap", "or with loss.kl_coef above 0"),
    (OPD | {"loss": {"reduction": "trajectory_mean"}}, "loss.reduction", ADVANTAGE),
    (OPD | {"loss": {"kl_coef": 0.1, "clip_low": 0.1}}, "loss.clip_low", ADVANTAGE),
    (
        GRPO | {"loss": {"kl_estimator": "k1_in_reward"}},
        "loss.kl_estimator",
        "with loss.kl_coef above 0",
    ),
    (GRPO | {"loss": {"kind": "cispo", "dual_clip": 5.0}}, "loss.dual_clip", "with loss.kind ppo"),
]
OF_REWARDS: list[tuple[Changes, str, str]] = [
    (CREDIT | {"grpo": {"normalize_std": True}}, "grpo.normalize_std", "a group advantage"),
    (OPD | {"grpo": {"zero_variance": "drop"}}, "grpo.zero_variance", "a group advantage"),
    (OPD | {"grpo": {"std_floor": 0.1}}, "grpo.std_floor", "a group advantage"),
    (SFT | {"grpo": {"max_refills": 1}}, "grpo.max_refills", SAMPLED),
    (GRPO | {"grpo": {"std_floor": 0.1}}, "grpo.std_floor", "with grpo.normalize_std"),
]
OF_EPISODES: list[tuple[Changes, str, str]] = [
    (GRPO | {"tasks": {"kind": "split", "seed": 1}}, "tasks.seed", "split stratified"),
    (engine(bucket_bytes=2048), "rollout.engine.bucket_bytes", "load_weights_by distributed"),
    (
        GRPO | {"student": {"warmup": {"num_steps": 1, "mask_divergence": True}}},
        "student.warmup.mask_divergence",
        "in teacher.fit",
    ),
    (
        GRPO | {"curriculum": {"schedule": "fixed", "pass_threshold": 0.9}},
        "curriculum.pass_threshold",
        "with curriculum.schedule on_success",
    ),
    (SFT | {"curriculum": {"schedule": "fixed"}}, "curriculum.schedule", SAMPLED),
    (KD | {"curriculum": {"initial_tail_calls": 2}}, "curriculum.initial_tail_calls", SAMPLED),
    (KD | {"rollout": {"temperature": 0.7}}, "rollout.temperature", SAMPLED),
    (SFT | loop(analysed_groups=2), "loop.analysed_groups", SAMPLED),
    (demonstrated(only_passed=False), "demonstrations.only_passed", "for stored episodes"),
    *[
        (
            STORED | {"demonstrations": STORED["demonstrations"] | {name: value}},
            f"demonstrations.{name}",
            "for scripted episodes",
        )
        for name, value in (("traces_per_task", 9), ("noisy_fraction", 0.3), ("max_tail_calls", 2))
    ],
]
OF_CLIENTS: Changes = {
    "headers_file": "headers",
    "request_deadline_s": 1.0,
    "request_deadline_s_per_1k_tokens": 2.0,
    "max_retries": 9,
    "retry_backoff_s": 0.1,
    "max_inflight_tokens": 100,
    "probe": False,
    "probe_tolerance": 0.5,
}
OF_BREAKERS: Changes = {
    "failures_in_a_row": 1,
    "failure_share": 0.1,
    "window": 2,
    "open_s": 1.0,
}
OF_TEACHER: list[tuple[Changes, str, str]] = [
    *[
        (taught(CREDIT, {name: value}), f"teacher.{name}", SERVED)
        for name, value in OF_CLIENTS.items()
    ],
    *[
        (taught(CREDIT, {"breaker": {name: value}}), f"teacher.breaker.{name}", SERVED)
        for name, value in OF_BREAKERS.items()
    ],
    *[
        (base | {"teacher": teacher | {"max_retries": 9}}, "teacher.max_retries", SERVED)
        for base, teacher in (
            (CREDIT, HF_TEACHER),
            (CREDIT | {"student": LORA}, BACKBONE),
            (OPD | {"student": LORA}, BACKBONE),
            (CREDIT | {"runtime": "single_actor"}, TEACHER),
            (GRPO | {"runtime": "cluster"}, TEACHER),
        )
    ],
    (taught(CREDIT, {"on_failure": "wait"}), "teacher.on_failure", SERVED),
    (taught(OPD, {"on_failure": "fail"}), "teacher.on_failure", "with an `opd` section"),
    (taught(OPD, {"deadline_s": 9.0}), "teacher.deadline_s", "with an `opd` section"),
    (
        GRPO | {"teacher": HTTP | {"prefix_scoring": True}},
        "teacher.prefix_scoring",
        "with an `opd` section",
    ),
    (
        GRPO | {"teacher": TEACHER | {"max_drop_fraction": 0.1}},
        "teacher.max_drop_fraction",
        "where training asks the teacher",
    ),
    (
        GRPO | {"teacher": HTTP | {"max_prefill_tokens": 9}},
        "teacher.max_prefill_tokens",
        "where training asks the teacher",
    ),
    (
        CREDIT | {"teacher": HTTP | {"probe": False, "probe_tolerance": 0.5}},
        "teacher.probe_tolerance",
        "with teacher.probe",
    ),
    (
        CREDIT | {"teacher": HTTP | {"prefix_inflight_tokens": 9}},
        "teacher.prefix_inflight_tokens",
        "with teacher.prefix_scoring",
    ),
]


@pytest.mark.parametrize(
    ("changes", "field", "only"),
    [*OF_DIVERGENCE, *OF_LOSS, *OF_REWARDS, *OF_EPISODES, *OF_TEACHER],
    ids=str,
)
def test_a_setting_without_an_effect_is_refused(changes: Changes, field: str, only: str) -> None:
    with pytest.raises(ValidationError) as caught:
        recipe(changes)
    [found] = caught.value.errors()
    said = str(found["ctx"]["error"])
    assert said.startswith(f"{field} has a meaning only ")
    assert only in said
    assert "leave it out (or at its default, " in said


@pytest.mark.parametrize(
    "changes",
    [
        OPD | {"distill": {"beta": 0.5}},
        OPD | {"distill": {"divergence": "jsd", "beta": 0.1}},
        OPD | {"teacher": SAME, "distill": EXACT | {"top_k": 32}},
        OPD | {"memory": {"limit_bytes": 1}},
        *[OPD | {"selection": {"kind": k, "ratio": 0.5}} for k in ("uniform_ratio", "hybrid")],
        SFT | {"loss": {"dual_clip": None, "mismatch_cap": None, "mismatch_alarm_mean": None}},
        SFT | {"grpo": {"zero_variance": "keep"}, "rollout": {"temperature": 1.0}},
        GRPO | {"loss": {"kind": "gspo_token"}, "rollout": {"temperature": 0.7}},
        # The engine's mismatch is measured wherever something is sampled.
        OPD | {"loss": {"mismatch_alarm_mean": 1.0, "chunk_size": 8}},
        OPD | {"loss": {"kl_coef": 0.1, "mismatch_cap": 5.0, "reduction": "trajectory_mean"}},
        OPD | {"loss": {"kl_coef": 0.1, "kl_estimator": "k1_in_reward", "clip_low": 0.1}},
        CREDIT | {"loss": {"kind": "cispo", "mismatch_cap": 5.0}},
        BOTH | {"loss": {"dual_clip": 5.0}, "grpo": {"zero_variance": "drop"}},
        # A group without an episode to train on is refilled, whatever rewards are for.
        *[base | {"grpo": {"max_refills": 1}} for base in (GRPO, CREDIT, OPD)],
        GRPO | {"grpo": {"normalize_std": True, "std_floor": 0.1}},
        GRPO | {"tasks": {"kind": "split", "split": "stratified", "seed": 1}},
        engine(bucket_bytes=2048, load_weights_by="distributed"),
        GRPO | {"student": {"warmup": {"num_steps": 1, "input_dropout": 0.1}}},
        GRPO | {"curriculum": {"schedule": "fixed", "initial_tail_calls": 2}},
        GRPO | {"curriculum": {"pass_threshold": 0.9}},
        GRPO | loop(analysed_groups=2),
        # What an evaluation of stored episodes' student reads.
        SFT | {"rollout": {"max_new_tokens": 9, "max_turns": 3, "environment_threads": 0}},
        STORED | {"demonstrations": STORED["demonstrations"] | {"only_passed": False}},
        demonstrated(traces_per_task=9, noisy_fraction=0.3, max_tail_calls=2),
        CREDIT | {"teacher": HTTP | OF_CLIENTS | {"probe": True, "breaker": OF_BREAKERS}},
        CREDIT | {"teacher": HTTP | {"prefix_scoring": True, "prefix_inflight_tokens": 9}},
        # `eval --policy teacher` asks that server with these limits.
        GRPO | {"teacher": HTTP | {"max_retries": 9, "deadline_s": 9.0, "on_failure": "fail"}},
        taught(CREDIT, {"on_failure": "fail", "deadline_s": 9.0, "max_prefill_tokens": 9}),
        taught(OPD, {"max_drop_fraction": 0.1, "max_prefill_tokens": 9}),
        # A cluster launches servers for its teacher, and asks them over HTTP.
        taught(CREDIT, OF_CLIENTS | {"probe": True, "breaker": OF_BREAKERS, "on_failure": "wait"})
        | {"runtime": "cluster"},
    ],
    ids=str,
)
def test_a_default_or_an_effect_is_taken(changes: Changes) -> None:
    """A run directory holds every field, so a default is no statement."""
    config = recipe(changes)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def documented() -> Iterator[tuple[Path, list[str]]]:
    """The recipes and overrides of docs/lab.md, as they stand there."""
    text = (ROOT / "docs" / "lab.md").read_text().replace("\\\n", " ")
    for line in re.findall(r"miniverl-dist train (configs/.*)", text):
        recipe_path, *rest = shlex.split(line)
        yield ROOT / recipe_path, [word for word in rest if word != "-o"]


def test_what_the_documentation_shows_is_taken() -> None:
    commands = list(documented())
    assert len(commands) >= 2
    for path, overrides in commands:
        assert load_config(path, overrides).config.objective


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests" / "fixtures").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_fixtures_are_taken(path: Path) -> None:
    assert load_config(path).config.objective


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "benchmarks").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_arms_of_every_plan_are_taken(path: Path) -> None:
    plan = load_benchmark(path)
    arms = [arm.overrides for arm in plan.config.arms.values()]
    cold_start = plan.config.cold_start
    for overrides in [*arms, {} if cold_start is None else cold_start.overrides]:
        assert plan.recipe(overrides).config.objective

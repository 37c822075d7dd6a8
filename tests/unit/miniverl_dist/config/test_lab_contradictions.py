"""Recipes of the lab that contradict themselves: refused before anything is loaded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from miniverl_dist.config.models import RunConfig

TOY = {"kind": "toy"}
FIT = {"num_steps": 1}
TEACHER: dict[str, Any] = {"rendering": "raw", "model": TOY, "fit": FIT}
SAME: dict[str, Any] = TEACHER | {"tokenizer": "qwen3.6", "rendering": "verbatim"}
MEGATRON = {"model": {"kind": "megatron", "config": "config.json"}}
HF_TEACHER: dict[str, Any] = {"rendering": "raw", "model": {"kind": "hf", "path": "m"}}
QUANTIZED = {"kind": "hf", "path": "m", "lora": {}, "quantization": "nf4"}
SFT: dict[str, Any] = {"objective": "sft", "demonstrations": {}}
KD: dict[str, Any] = {
    "objective": "offline_kd",
    "demonstrations": {},
    "teacher": TEACHER,
    "distill": {},
}
OPD: dict[str, Any] = {"objective": "opd", "teacher": TEACHER, "distill": {}}


def recipe(changes: dict[str, Any]) -> RunConfig:
    base: dict[str, Any] = {
        "name": "x",
        "tasks": {"kind": "split"},
        "student": {},
        "loop": {"num_steps": 3, "num_groups": 2, "group_size": 4},
    }
    return RunConfig.model_validate_json(json.dumps(base | changes))


@pytest.mark.parametrize(
    "changes",
    [
        SFT,
        SFT | {"distill": {"divergence": "sampled_nll"}},
        SFT | {"loop": {"num_steps": 3, "group_size": 1}},
        KD,
        KD | {"memory": {"strategy": "resident"}},
        OPD,
        OPD | {"objective": "grpo_opd"},
        OPD | {"selection": {"kind": "hybrid", "ratio": 0.1}},
        OPD | {"teacher": SAME, "distill": {"support": "exact_full_vocab"}},
        OPD | {"teacher": SAME | {"mode": "privileged_context"}},
        OPD | {"runtime": "single_actor"},
    ],
    ids=str,
)
def test_what_makes_sense_is_taken(changes: dict[str, Any]) -> None:
    assert recipe(changes).row_loss is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "sft"}, "learns from stored episodes: add a `demonstrations`"),
        (KD | {"demonstrations": None}, "add a `demonstrations`"),
        (OPD | {"demonstrations": {}}, "samples its own episodes: remove `demonstrations`"),
        (SFT | {"teacher": TEACHER, "distill": {}}, "use offline_kd to learn distributions"),
        (KD | {"teacher": None}, "offline_kd needs a `teacher`"),
        (KD | {"distill": None}, "offline_kd needs a `teacher` and a `distill`"),
        (KD | {"distill": {"divergence": "sampled_nll"}}, "offline_kd needs"),
        (KD | {"loss": {"kl_coef": 0.1}}, "kl_coef must be 0"),
        (KD | {"loop": {"num_steps": 3, "max_policy_lag": 1}}, "max_policy_lag"),
        (SFT | {"opd": {}}, "has no OPD term"),
        (OPD | {"objective": "grpo"}, "objective grpo asks no teacher"),
        (OPD | {"distill": {"divergence": "sampled_nll"}}, "whatever was sampled more likely"),
        ({"objective": "grpo", "selection": {"kind": "hybrid"}}, "selection has a meaning only"),
        (OPD | {"student": MEGATRON}, "runs on one device"),
        (OPD | {"runtime": "cluster"}, "runs on one device"),
        (OPD | {"loop": {"num_steps": 3, "accumulate": True}}, "accumulate does not go with"),
        (OPD | {"teacher": {"rendering": "raw", "url": "http://t"}}, "distill needs teacher.model"),
        (
            OPD | {"distill": {"support": "exact_full_vocab"}, "teacher": HF_TEACHER},
            "compares token by token",
        ),
        (OPD | {"distill": {"support": "exact_full_vocab"}}, "needs one vocabulary for both"),
        (
            OPD
            | {
                "teacher": TEACHER | {"mode": "privileged_context"},
                "evaluation": {"baselines": ["teacher"]},
            },
            "acts without the oracle's calls",
        ),
        (
            OPD
            | {
                "teacher": SAME,
                "distill": {"support": "exact_full_vocab"},
                "memory": {"strategy": "swap"},
            },
            "store the whole vocabulary",
        ),
        (
            OPD | {"student": {"model": QUANTIZED}, "memory": {"strategy": "swap"}},
            "swap does not go with student.model.quantization",
        ),
        (OPD | {"teacher": TEACHER | {"rendering": "verbatim"}}, "the student's own ids"),
        (
            {
                "objective": "grpo",
                "teacher": TEACHER | {"mode": "privileged_context"},
            },
            "objective grpo asks no teacher",
        ),
        (
            OPD | {"distill": {"divergence": "forward_kl", "entropy_aware": {}}},
            "mixes forward KL into reverse_kl or jsd",
        ),
    ],
    ids=str,
)
def test_a_contradiction_is_one_message(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        recipe(changes)
    [found] = caught.value.errors()
    assert words in str(found["ctx"]["error"])


def test_sft_learns_the_written_tokens_unless_told_otherwise() -> None:
    loss = recipe(SFT).row_loss
    assert loss is not None
    assert loss.divergence == "sampled_nll"
    assert not recipe(SFT).uses_targets
    assert recipe(SFT).policy_label == "supervised, on stored episodes"

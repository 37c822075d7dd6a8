"""Recipes that contradict themselves: each is refused before anything is loaded, in one message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.recipe import DeadlineConfig
from miniverl_dist.config.roles import TeacherConfig, ToyModelConfig

HTTP = {"url": "http://teacher:30000", "rendering": "raw"}
TOY = {"model": {"kind": "toy"}, "fit": {"num_steps": 1}}
WITH_TEACHER: dict[str, Any] = {"objective": "grpo_opd", "teacher": HTTP, "opd": {}}


def recipe(**changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "name": "x",
        "objective": "grpo",
        "tasks": {"kind": "split"},
        "student": {},
        "loop": {"num_steps": 3, "num_groups": 2, "group_size": 4},
    }
    for section, value in changes.items():
        merges = isinstance(value, dict) and isinstance(base.get(section), dict)
        base[section] = base[section] | value if merges else value
    return RunConfig.model_validate_json(json.dumps(base))


def message(error: ValidationError) -> str:
    """The one message; a contradiction never comes as a list of consequences."""
    [found] = error.errors()
    assert found["type"] == "value_error", found
    return str(found["ctx"]["error"])


def refused(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        recipe(**changes)
    return message(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        WITH_TEACHER,
        WITH_TEACHER | {"objective": "opd", "loop": {"group_size": 1}},
        {"teacher": HTTP},
        {"teacher": TOY, "evaluation": {"baselines": ["teacher", "null"]}},
        {"rollout": {"temperature": 0.7}},
        {"grpo": {"zero_variance": "drop"}},
        {"loop": {"num_minibatches": 8}},
        {"curriculum": {"initial_tail_calls": 3, "max_tail_calls": 3}},
        {"rollout": {"top_k": -1, "top_p": 1.0, "min_p": 0.0}},
    ],
    ids=str,
)
def test_what_makes_sense_is_taken(changes: dict[str, Any]) -> None:
    recipe(**changes)


class TestObjective:
    @pytest.mark.parametrize("objective", ["opd", "grpo_opd"])
    def test_opd_needs_a_teacher_and_its_section(self, objective: str) -> None:
        assert refused(objective=objective, opd={}) == (
            f"objective {objective} needs a `teacher` section"
        )
        assert refused(objective=objective, teacher=HTTP) == (
            f"objective {objective} needs an `opd` section (credit of sampled tokens) or a "
            "`distill` section (whole distributions), found neither"
        )
        found = refused(objective=objective, teacher=HTTP, opd={}, distill={})
        assert found.endswith("found both")

    def test_grpo_has_no_opd_section(self) -> None:
        assert "remove the `opd` section" in refused(teacher=HTTP, opd={})

    @pytest.mark.parametrize("objective", ["opd", "grpo_opd"])
    def test_a_teacher_needs_a_say(self, objective: str) -> None:
        found = refused(**WITH_TEACHER | {"objective": objective, "opd": {"coef": 0.0}})
        assert found.startswith("opd.coef is 0: use `objective: grpo`")

    def test_a_teacher_that_is_not_there_cannot_be_measured(self) -> None:
        assert "names the teacher" in refused(evaluation={"baselines": ["teacher"]})

    @pytest.mark.parametrize(
        ("teacher", "why"),
        [
            (HTTP, "a teacher behind `url` is asked for scores only"),
            (
                {"model": {"kind": "hf", "path": "x"}, "rendering": "raw"},
                "an hf teacher is asked for scores only",
            ),
            (TOY | {"tokenizer": "models/own", "rendering": "raw"}, "there is no chat format"),
        ],
        ids=["url", "hf", "format"],
    )
    def test_a_teacher_that_cannot_act_is_no_baseline(
        self, teacher: dict[str, Any], why: str
    ) -> None:
        evaluation = {"baselines": ["null", "teacher"]}
        found = refused(teacher=teacher, evaluation=evaluation)
        assert found.startswith(f"evaluation.baselines names the teacher, but {why}")
        assert found.endswith("remove it from the list")
        assert recipe(teacher=teacher).acting_teacher_problem is not None

    @pytest.mark.parametrize("objective", ["grpo", "grpo_opd"])
    def test_siblings_are_at_least_two(self, objective: str) -> None:
        changes = WITH_TEACHER if objective == "grpo_opd" else {}
        found = refused(**changes | {"loop": {"group_size": 1}})
        assert found == (f"objective {objective} compares siblings: group_size must be at least 2")

    def test_variance_matters_only_where_rewards_do(self) -> None:
        changes = WITH_TEACHER | {"objective": "opd", "grpo": {"zero_variance": "drop"}}
        assert "zero_variance has a meaning only with a group advantage" in refused(**changes)


class TestSampling:
    @pytest.mark.parametrize("rollout", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}], ids=str)
    def test_training_refuses_truncated_sampling(self, rollout: dict[str, Any]) -> None:
        assert "training refuses top_p < 1, top_k and min_p" in refused(rollout=rollout)

    @pytest.mark.parametrize("temperature", [0.7, 1.3])
    def test_the_teacher_scores_at_temperature_one(self, temperature: float) -> None:
        rollout = {"temperature": temperature}
        found = refused(**WITH_TEACHER | {"rollout": rollout})
        assert found.startswith(f"rollout.temperature is {temperature}, but prefill scores ignore")
        recipe(**WITH_TEACHER | {"rollout": rollout, "opd": {"allow_untempered_teacher": True}})


class TestRoutingReplay:
    def test_a_toy_student_has_no_experts(self) -> None:
        found = refused(rollout={"routing_replay": "on"})
        assert found.startswith("rollout.routing_replay: a toy student replays no experts")
        assert recipe().rollout.routing_replay == "off"
        moe = {"model": {"kind": "megatron", "config": "configs/models/tiny_qwen3_moe.json"}}
        assert recipe(student=moe, rollout={"routing_replay": "on"})


class TestEngine:
    @pytest.mark.parametrize("engine", [None, {"kind": "hf"}], ids=["none", "hf"])
    def test_transformers_takes_one_gpu(self, engine: dict[str, Any] | None) -> None:
        cluster = {"rollout": {"gpus_per_actor": 2.0}}
        changes: dict[str, Any] = {
            "runtime": "cluster",
            "student": {"model": {"kind": "megatron", "config": "configs/models/tiny_qwen3.json"}},
            "rollout": {"engine": engine},
        }
        found = refused(**changes, cluster=cluster)
        assert found.startswith("cluster.rollout.gpus_per_actor is 2, but rollout.engine is")
        assert recipe(**changes, cluster={"rollout": {"gpus_per_actor": 1.0}})
        sglang = changes | {"rollout": {"engine": {"kind": "sglang", "tensor": 2}}}
        assert recipe(**sglang, cluster=cluster)


class TestSizes:
    def test_an_optimizer_step_needs_a_trajectory(self) -> None:
        assert refused(loop={"num_minibatches": 9}) == "loop.num_minibatches 9 > 8 trajectories"

    def test_the_curriculum_starts_below_its_end(self) -> None:
        found = refused(curriculum={"initial_tail_calls": 4, "max_tail_calls": 3})
        assert found == "curriculum.initial_tail_calls exceeds curriculum.max_tail_calls"

    def test_a_generation_may_not_outlast_the_trainers_patience(self) -> None:
        with pytest.raises(ValidationError) as caught:
            DeadlineConfig(take_s=10.0, generate_s=11.0)
        assert "deadlines.generate_s (11.0) exceeds take_s (10.0)" in message(caught.value)
        DeadlineConfig(take_s=10.0, generate_s=10.0)

    @pytest.mark.parametrize("hidden_size", [97, 100, 4])
    def test_heads_are_made_of_pairs(self, hidden_size: int) -> None:
        with pytest.raises(ValidationError) as caught:
            ToyModelConfig(kind="toy", hidden_size=hidden_size, num_heads=4)
        assert f"hidden_size {hidden_size} must be a multiple of 2 * num_heads (8)" in message(
            caught.value
        )


class TestAccumulation:
    def test_what_needs_the_whole_batch_is_refused(self) -> None:
        loop = {"accumulate": True}
        found = refused(loop=loop | {"num_minibatches": 2})
        assert found == (
            "loop.accumulate does not go with loop.num_minibatches 2: all groups of a batch go "
            "into one optimizer step; change it, or leave accumulate out"
        )
        changes = WITH_TEACHER | {"loop": loop, "opd": {"baseline": "leave_one_out"}}
        assert refused(**changes).startswith(
            "loop.accumulate does not go with opd.baseline leave_one_out: it is taken over the"
        )

    @pytest.mark.parametrize("reduction", ["token_mean", "trajectory_mean"])
    def test_everything_else_goes(self, reduction: str) -> None:
        recipe(
            **WITH_TEACHER | {"loop": {"accumulate": True, "max_policy_lag": 1}},
            loss={"reduction": reduction, "kl_coef": 0.1},
            grpo={"normalize_std": True, "zero_variance": "drop"},
        )


class TestTeacher:
    def refused(self, **fields: object) -> str:
        with pytest.raises(ValidationError) as caught:
            TeacherConfig.model_validate_json(json.dumps(fields))
        return message(caught.value)

    def test_it_is_asked_over_http_or_lives_here(self) -> None:
        toy = {"kind": "toy"}
        assert "found neither" in self.refused()
        assert "found both" in self.refused(**HTTP, model=toy)
        TeacherConfig.model_validate_json(json.dumps(HTTP))
        assert "teacher.fit is missing" in self.refused(model=toy)
        TeacherConfig.model_validate_json(json.dumps({"model": toy, "fit": {"num_steps": 1}}))

    @pytest.mark.parametrize(
        "where", [HTTP, {"model": {"kind": "hf", "path": "m"}}], ids=["http", "hf"]
    )
    def test_only_a_toy_teacher_can_be_fitted(self, where: dict[str, Any]) -> None:
        found = self.refused(**where, fit={"num_steps": 3})
        assert found == "teacher.fit: only a toy teacher in this process can be fitted"

    def test_native_rendering_needs_the_teachers_chat_format(self) -> None:
        fields = {"url": "http://t", "tokenizer": "some-folder"}
        found = self.refused(**fields, rendering="native")
        assert "there is none for tokenizer 'some-folder'; use `rendering: raw`" in found
        TeacherConfig.model_validate_json(json.dumps(fields | {"rendering": "raw"}))

    @pytest.mark.parametrize("url", ["teacher:30000", "ftp://t", "", "http://", "https:///x"])
    def test_the_url_says_how_to_ask(self, url: str) -> None:
        found = self.refused(url=url, rendering="raw")
        assert found == f"teacher.url: expected http(s)://host[:port], found {url!r}"


class TestLabels:
    @pytest.mark.parametrize(
        ("loop", "label"),
        [
            ({}, "strictly on-policy"),
            ({"num_minibatches": 2}, "minibatched"),
            ({"max_policy_lag": 2}, "off-policy (lag <= 2)"),
            ({"max_policy_lag": 1, "num_minibatches": 2}, "off-policy (lag <= 1)"),
        ],
        ids=str,
    )
    def test_a_run_claims_no_more_than_it_is(self, loop: dict[str, Any], label: str) -> None:
        assert recipe(loop=loop).policy_label == label

    @pytest.mark.parametrize(
        ("objective", "teacher", "rewards"),
        [("grpo", False, True), ("opd", True, False), ("grpo_opd", True, True)],
    )
    def test_objectives_say_what_they_use(
        self, objective: str, teacher: bool, rewards: bool
    ) -> None:
        changes = {} if objective == "grpo" else WITH_TEACHER | {"objective": objective}
        config = recipe(**changes)
        assert (config.uses_teacher, config.uses_group_advantage) == (teacher, rewards)


def test_peer_39_sampling_ahead_needs_a_bound_on_the_importance_weight() -> None:
    assert "mismatch_cap" in refused(loop={"max_policy_lag": 1}, loss={"mismatch_cap": None})
    recipe(loop={"max_policy_lag": 1})
    recipe(loss={"mismatch_cap": None})


def test_repeated_tasks_are_refused() -> None:
    tasks = {"kind": "ids", "train": ["a"], "eval": ["b", "c", "b"]}
    assert "tasks.eval: b given more than once" in refused(tasks=tasks)


def test_a_discount_without_return_to_go_is_refused() -> None:
    assert "opd.discount" in refused(**(WITH_TEACHER | {"opd": {"discount": 0.5}}))
    recipe(**(WITH_TEACHER | {"opd": {"discount": 0.5, "lookahead": "return_to_go"}}))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"terminal_pass": 0.5}, "mean_partial, first_call, exec_score and terminal_pass sum to"),
        ({"call_structure": 0.6}, "call_name, call_known, call_schema_valid and call_structure"),
        ({"structure_values": 0.4}, "structure_name, structure_values and the larger of"),
        ({"structure_keys_overlap": 0.4}, "sum to 1.1, expected at most 1"),
    ],
)
def test_weights_of_a_reward_above_1_are_refused(weights: dict[str, float], words: str) -> None:
    assert words in refused(environment={"reward": weights})
    recipe(environment={"reward": dict.fromkeys(weights, 0.0)})


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"temperature": 1e-7}},
        {"rollout": {"temperature": 0.009}},
        WITH_TEACHER | {"teacher": HTTP | {"retry_backoff_s": 1e308}},
    ],
)
def test_what_could_only_go_wrong_is_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"(temperature|retry_backoff_s)\n"):
        recipe(**changes)

"""A toy teacher that reads the student's very ids, and one that reads the oracle's calls too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from actors import launch
from actors.single import SingleActor
from actors.student_side import WRITE_CALLS, StudentSide, student_side
from actors.teacher_side import (
    Renderer,
    declare_teacher_vocabulary,
    teacher_chat,
    teacher_tokenizer,
)
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import NATIVE_TOKENIZERS
from miniverl_dist.errors import ConfigError, TokenizerMismatchError
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.observability.run_dir import RunDirectory
from miniverl_dist.ports import ScoredTrajectory
from miniverl_dist.schemas.messages import Message, ToolCall, ToolSchema
from miniverl_dist.schemas.running_episode import RunningEpisode
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.tokens.load import load_tokenizer
from miniverl_dist.training.recorder import Recorder
from rollout_server.tool_calls import parse_qwen_xml
from rollout_server.traces import Trace, TraceMaker
from teacher_server.canvas import PRIVILEGED_KEY
from teacher_server.privileged import HEADING
from teacher_server.scorer import PrefillScorer, load_scorer
from teacher_server.views import teacher_view

pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers]

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "local_bfcl_same_tokenizer.yaml"
TINY = (
    "tasks.train=[multi_turn_base_11]",
    "tasks.eval=[multi_turn_base_11]",
    "student.model={kind: toy, num_layers: 1, hidden_size: 32, num_heads: 2, ffn_size: 64, "
    "max_context_tokens: 256, batch_slots: 8}",
    "student.warmup.num_steps=6",
    "student.warmup.batch_size=4",
    "student.warmup.traces_per_task=2",
    "teacher.model={kind: toy, num_layers: 1, hidden_size: 32, num_heads: 2, ffn_size: 64, "
    "max_context_tokens: 512, batch_slots: 8}",
    "teacher.fit.num_steps=4",
    "teacher.fit.batch_size=4",
    "teacher.fit.traces_per_task=2",
    "rollout.max_new_tokens=16",
    "rollout.max_context_tokens=256",
    "rollout.num_workers=1",
    "loop={num_steps: 1, num_groups: 1, group_size: 2, num_minibatches: 1}",
    "evaluation={before: false, after: true, episodes_per_task: 1, baselines: [teacher]}",
)
PRIVILEGED = ("teacher.mode=privileged_context", 'evaluation.baselines=["null"]')


def tiny(*overrides: str) -> RunConfig:
    return load_config(RECIPE, [*TINY, *overrides]).config


def train(run: Path, *overrides: str) -> Path:
    launch.train(load_config(RECIPE, [*TINY, *overrides]), run_dir=run, progress=SilentProgress())
    return run


def trajectories(run: Path) -> list[Trajectory]:
    lines = (run / "trajectories.jsonl").read_text().splitlines()
    return [ScoredTrajectory.model_validate_json(line).trajectory for line in lines]


@pytest.fixture(scope="module")
def verbatim_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("verbatim") / "run")


@pytest.fixture(scope="module")
def privileged_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("privileged") / "run", *PRIVILEGED)


# --- the student's very ids ------------------------------------------------------------------


def test_every_episode_is_scored_by_a_teacher_with_the_students_vocabulary(
    verbatim_run: Path,
) -> None:
    (metrics,) = map(json.loads, (verbatim_run / "metrics.jsonl").read_text().splitlines())
    assert metrics["teacher_scored_fraction"] == 1.0
    roles = json.loads((verbatim_run / "manifest.json").read_text())["roles"]
    for name in ("tokenizer", "fingerprint", "restricted_softmax"):
        assert roles["teacher"][name] == roles["student"][name]
    rows = json.loads((verbatim_run / "eval.json").read_text())["rows"]
    assert "teacher" in {row["policy"] for row in rows}  # it acts in the student's roles


def test_a_teacher_with_the_students_weights_agrees_with_it(verbatim_run: Path) -> None:
    """Log-probabilities by another path to the same model: rows, roles and ids are the same."""
    config = tiny()
    assert config.teacher is not None
    tokenizer = teacher_tokenizer(config.teacher, verbatim_run)
    renderer = Renderer(config.teacher, student_side(config, tokenizer), tokenizer)
    scorer = load_scorer(verbatim_run / "checkpoints" / "step-000000")
    for trajectory in trajectories(verbatim_run):
        rendering = renderer(trajectory)
        assert rendering.token_ids == trajectory.token_ids
        (span,) = rendering.spans
        scores = scored(scorer, rendering.token_ids, span.start)
        assert scores == pytest.approx(trajectory.rollout_logprobs[span.start :], abs=1e-4)
        view = teacher_view(
            trajectory,
            rendering,
            student=tokenizer,
            teacher=tokenizer,
            turn_ends=renderer.turn_ends,
        )
        assert np.array_equal(view.student_positions, np.flatnonzero(trajectory.loss_mask))


def test_a_turn_end_counts_where_the_teacher_reads_one(verbatim_run: Path) -> None:
    """Or student and teacher would end apart, and no batch could be built."""
    found = {}
    for rendering in ("verbatim", "native", "raw"):
        loaded = load_config(RECIPE, [*TINY, f"teacher.rendering={rendering}"])
        recorder = Recorder(RunDirectory.open(verbatim_run), SilentProgress(), SystemClock())
        actor = SingleActor(loaded, recorder)
        found[rendering] = actor.byte_ends([*b"ab", actor.side.chat.turn_end_id]).tolist()
    assert found == {"verbatim": [1, 2, 3], "native": [1, 2, 3], "raw": [1, 2, 2]}


def scored(scorer: PrefillScorer, ids: Sequence[int], first: int) -> list[float]:
    return [float(score) for score in scorer.score(ids, first)]


def test_a_whole_vocabulary_is_too_large_for_a_toy(verbatim_run: Path) -> None:
    config = tiny()
    assert config.teacher is not None
    whole = student_side(config, load_tokenizer("qwen3.6"))
    with pytest.raises(ConfigError, match="a row for each of the student's 248077 ids"):
        declare_teacher_vocabulary(config.teacher, whole, [])
    declared = student_side(config, teacher_tokenizer(config.teacher, verbatim_run))
    foreign = config.teacher.model_copy(update={"tokenizer": "deepseek-v4"})
    with pytest.raises(TokenizerMismatchError, match=r"is not the student's qwen3\.6"):
        declare_teacher_vocabulary(foreign, declared, [])


def test_the_known_chat_formats_are_those_that_config_knows() -> None:
    config = tiny()
    assert config.teacher is not None
    for name in NATIVE_TOKENIZERS:
        teacher = config.teacher.model_copy(update={"tokenizer": name})
        tokenizer = load_tokenizer(name)
        assert teacher_chat(teacher, tokenizer).tokenizer is tokenizer
    other = config.teacher.model_copy(update={"tokenizer": "folder"})
    with pytest.raises(ConfigError, match="there is no chat format for 'folder'"):
        teacher_chat(other, load_tokenizer("qwen3.6"))


# --- the oracle's calls ----------------------------------------------------------------------


def test_the_oracles_calls_are_in_the_teachers_text_and_nowhere_else(privileged_run: Path) -> None:
    """Whatever a run writes is searched for them; they would be found, as what is shown is."""
    config = tiny(*PRIVILEGED)
    assert config.teacher is not None
    tokenizer = teacher_tokenizer(config.teacher, privileged_run)
    side = student_side(config, tokenizer)
    renderer = Renderer(config.teacher, side, tokenizer)
    played = trajectories(privileged_run)
    assert played
    shown, hidden = played[0].messages[0].content, HEADING
    for trajectory in played:
        rendering = renderer(trajectory)
        (block,) = [s for s in rendering.segments if s.key == PRIVILEGED_KEY]
        text = tokenizer.decode(rendering.token_ids[block.start : block.end])
        due = calls_due(side, trajectory)
        assert text.startswith(f"user\n{HEADING}\n\n")
        assert [
            found.call for found in parse_qwen_xml(text, schemas(side, trajectory)).calls
        ] == due
        assert HEADING not in tokenizer.decode(trajectory.token_ids)
        assert not set(WRITE_CALLS(due).splitlines()) & {
            line for message in trajectory.messages for line in message.content.splitlines()
        }
    found = {
        word: {
            path.name
            for path in privileged_run.rglob("*")
            if path.is_file() and word.encode() in path.read_bytes()
        }
        for word in (json.dumps(shown)[1:-1], hidden)
    }
    assert {"trajectories.jsonl", "eval_trajectories.jsonl"} <= found[json.dumps(shown)[1:-1]]
    assert found[hidden] == set()


def calls_due(side: StudentSide, trajectory: Trajectory) -> list[ToolCall]:
    session = side.environment.start(trajectory.task_id, prefix_calls=trajectory.prefix_calls)
    return [call for turn in session.expert_tail() for call in turn]


def opening(side: StudentSide, trajectory: Trajectory) -> list[Message]:
    place = trajectory.task_id, trajectory.prefix_calls
    return side.environment.start(place[0], prefix_calls=place[1]).opening()


def schemas(side: StudentSide, trajectory: Trajectory) -> Mapping[str, ToolSchema]:
    return side.environment.start(trajectory.task_id, prefix_calls=0).call_schemas()


def test_a_privileged_teacher_scores_the_same_tokens_otherwise(
    verbatim_run: Path, privileged_run: Path
) -> None:
    (metrics,) = map(json.loads, (privileged_run / "metrics.jsonl").read_text().splitlines())
    assert metrics["teacher_scored_fraction"] == 1.0
    ours, theirs = trajectories(privileged_run), trajectories(verbatim_run)
    assert [t.token_ids for t in ours] == [t.token_ids for t in theirs]  # the student saw the same
    (plain,) = map(json.loads, (verbatim_run / "metrics.jsonl").read_text().splitlines())
    assert metrics["reverse_kl_mean"] != plain["reverse_kl_mean"]


@pytest.mark.parametrize("rendering", ["native", "raw", "verbatim"])
@pytest.mark.parametrize("prompt", ["compact", "full"])
def test_real_episodes_differ_by_the_block_alone(rendering: str, prompt: str) -> None:
    """Prefix calls, several turns, tool lists; written spans as a teacher is fitted on them."""
    limits = [
        f"environment.prompt={prompt}",
        "rollout.max_context_tokens=100000",
        "student.model.max_context_tokens=100000",
        f"teacher.rendering={rendering}",
        f"teacher.tokenizer={'qwen3.6' if rendering == 'verbatim' else 'deepseek-v4'}",
    ]
    config, privileged = tiny(*limits), tiny(*limits, *PRIVILEGED)
    assert config.teacher is not None
    assert privileged.teacher is not None
    side = student_side(config, load_tokenizer("qwen3.6"))
    reader = load_tokenizer(config.teacher.tokenizer)
    standard, other = (Renderer(c, side, reader) for c in (config.teacher, privileged.teacher))
    most_prefix = 0
    for trace in scripted(side):
        one = standard.render(trace.trajectory, every_written=True)
        two = other.render(trace.trajectory, every_written=True)
        (block,) = [s for s in two.segments if s.key == PRIVILEGED_KEY]
        assert two.token_ids[: block.start] + two.token_ids[block.end :] == one.token_ids
        behind = [span.start >= block.end for span in two.spans]
        num_prefix = sum(message.role == "assistant" for message in opening(side, trace.trajectory))
        most_prefix = max(most_prefix, num_prefix)
        assert behind == [False] * num_prefix + [True] * (len(behind) - num_prefix)
        text = reader.decode(two.token_ids[block.start : block.end])
        due = calls_due(side, trace.trajectory)
        assert WRITE_CALLS(due[-1:]) in text
        assert text.count("<function=") == len(due)
    assert (most_prefix > 0) is (prompt == "full")


def scripted(side: StudentSide) -> list[Trace]:
    maker = TraceMaker(side.stage, WRITE_CALLS, SystemClock(), seed=1)
    return asyncio.run(
        maker.make(["multi_turn_base_11"], max_tail_calls=2, per_task=1, noisy_fraction=0.0)
    )


def test_a_running_episode_has_no_oracle() -> None:
    config = tiny(*PRIVILEGED)
    assert config.teacher is not None
    tokenizer = load_tokenizer("qwen3.6")
    renderer = Renderer(config.teacher, student_side(config, tokenizer), tokenizer)
    episode = RunningEpisode("t", "g", "multi_turn_base_11", tokenizer.fingerprint, (), (), ())
    with pytest.raises(ConfigError, match=r"turn teacher\.prefix_scoring off"):
        renderer(episode)

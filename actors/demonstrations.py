"""What ``sft`` and ``offline_kd`` learn from: scripted episodes, or those that a run has stored."""

from __future__ import annotations

from actors.student_side import WRITE_CALLS, StudentSide
from miniverl_dist.config.lab import DemonstrationConfig
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ConfigError
from miniverl_dist.lab.demonstrations import StoredEpisodes, read_episodes
from miniverl_dist.ports import Clock
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.trajectory import Trajectory
from rollout_server.traces import TraceMaker


async def stored_episodes(
    config: RunConfig, demonstrations: DemonstrationConfig, side: StudentSide, clock: Clock
) -> StoredEpisodes:
    """Everything that the run will be trained on.

    Raises:
        ConfigError: a training task without an episode, or a file that cannot be used.
        RecordError, TokenizerMismatchError: see ``lab.demonstrations.read_episodes``.
    """
    if demonstrations.trajectories is None:
        told = await _scripted(config, demonstrations, side, clock)
    else:
        told = read_episodes(
            demonstrations.trajectories,
            tokenizer_fingerprint=side.tokenizer.fingerprint,
            only_passed=demonstrations.only_passed,
        )
    episodes = StoredEpisodes(
        told, seed=derive_seed(config.seed, "demonstrations"), group_size=config.loop.group_size
    )
    missing = sorted(set(side.train_ids) - set(episodes.task_ids))
    if missing:
        raise ConfigError(
            f"demonstrations hold no episode of {len(missing)} of {len(side.train_ids)} training "
            f"tasks, for instance {missing[0]!r}; leave them out of tasks.train"
        )
    return episodes


async def _scripted(
    config: RunConfig, demonstrations: DemonstrationConfig, side: StudentSide, clock: Clock
) -> list[Trajectory]:
    maker = TraceMaker(
        side.stage, WRITE_CALLS, clock, seed=derive_seed(config.seed, "demonstrations")
    )
    traces = await maker.make(
        side.train_ids,
        max_tail_calls=demonstrations.max_tail_calls,
        per_task=demonstrations.traces_per_task,
        noisy_fraction=demonstrations.noisy_fraction,
    )
    return [
        trace.trajectory.model_copy(update={"trajectory_id": f"demo-{number:06d}"})
        for number, trace in enumerate(traces)
    ]

"""A recipe's trackers beside a run: told what the recorder writes, left alone when they fail."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, Final

from miniverl_dist.config.load import LoadedConfig
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.tracking import (
    MlflowConfig,
    TensorBoardConfig,
    TrackingConfig,
    WandbConfig,
)
from miniverl_dist.errors import MissingDependencyError, install_hint
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.run_dir import RecordFile
from miniverl_dist.observability.step_names import named_step
from miniverl_dist.observability.tracking.adapters import (
    MlflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandbTracker,
)
from miniverl_dist.observability.tracking.base import RunEnd, TrackedRun, Tracker
from miniverl_dist.observability.tracking.follower import Follower, FollowerState
from miniverl_dist.training.recorder import Recorder

ALARMS: Final = frozenset({Event.ALARM, Event.ENGINE_MISMATCH})
EVALUATIONS: Final = frozenset({Event.BASELINE_EVALUATED, Event.EVALUATION_FINISHED})


def require_trackers(config: RunConfig) -> None:
    """Fail before anything is written when a tracker that the recipe names is not installed.

    Raises:
        MissingDependencyError: names the packages and the command that installs them.
    """
    names = dict.fromkeys(name for one in config.tracking for name in _packages(one))
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        raise MissingDependencyError(
            f"tracking: this environment lacks {', '.join(missing)}: "
            f"{install_hint('tracking')}, or take the tracker out of the recipe"
        )


def _is_installed(name: str) -> bool:
    """Whether there is such a package; a folder of data called ``wandb`` is none."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


def _packages(config: TrackingConfig) -> Iterator[str]:
    yield config.kind
    if isinstance(config, MlflowConfig) and config.uri.startswith("sqlite:"):
        yield from ("sqlalchemy", "alembic")


class Tracking:
    """All trackers of one run. Made when the run starts; `close` ends it.

    Args:
        config: Of the run.
        recorder: Whose records and events are handed on.
    """

    def __init__(self, config: LoadedConfig, recorder: Recorder) -> None:
        self._recorder, self._step = recorder, 0
        self._followers = [
            _follower(one, f"{number}-{one.kind}", config, recorder)
            for number, one in enumerate(config.config.tracking)
        ]
        self._unreported = list(self._followers)
        if self._followers:
            recorder.sinks.append(self._take_step)
            recorder.listeners.append(self._take_event)

    async def close(self, end: RunEnd) -> None:
        """Tell every tracker how the run ended; bounded by their deadlines, at the same time."""
        for follower in self._followers:
            follower.close(end)
        # Waits for the trackers' threads.
        await asyncio.gather(*(asyncio.to_thread(one.wait) for one in self._followers))
        self._report_failures()

    def _take_step(self, record: Mapping[str, float | int]) -> None:
        self._step = int(record["step"])
        numbers = finite_numbers(record)
        for follower in self._followers:
            follower.step(numbers, self._step)
        self._report_failures()

    def _take_event(self, event: Event, fields: Mapping[str, Any]) -> None:
        if event is Event.RESUMED:
            self._step = int(fields["step"])
            self._catch_up()
        elif event in EVALUATIONS:
            numbers = evaluation_numbers(fields)
            for follower in self._followers:
                follower.evaluation(numbers, self._step)
        elif event in ALARMS:
            text = str(fields.get("what", event.value))
            for follower in self._followers:
                follower.alarm(text, self._step)

    def _catch_up(self) -> None:
        """Hand over committed steps that a tracker missed: it had failed, or was cut off."""
        for line in self._recorder.run.iter_jsonl(RecordFile.METRICS):
            for follower in self._followers:
                follower.step(finite_numbers(line), int(line["step"]))

    def _report_failures(self) -> None:
        for follower in [one for one in self._unreported if one.failure is not None]:
            self._unreported.remove(follower)
            self._recorder.event(
                Event.TRACKING_FAILED, tracker=follower.name, reason=follower.failure
            )
            self._recorder.progress.message(
                f"tracker {follower.name} failed and is left alone: {follower.failure}"
            )


def finite_numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The fields of a record that are finite numbers, but for the step itself."""
    return {
        prefix + name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if name != "step"
    }


def evaluation_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """A row under ``eval/<policy>/…``, or ``eval_<tag>/<policy>/…`` where it is not of a series.

    The series is what the student is measured at while it trains: after the warm-up, and every n
    steps.
    """
    tag, policy = str(row["tag"]), row["policy"]
    is_of_series = policy == "student" and (tag == "warm" or named_step(tag) is not None)
    prefix = f"{'eval' if is_of_series else f'eval_{tag}'}/{policy}/"
    numbers = finite_numbers(row, prefix)
    for name, value in row.items():
        if isinstance(value, Mapping):
            numbers |= finite_numbers(value, f"{prefix}{name}/")
    return numbers


def _follower(
    config: TrackingConfig, name: str, loaded: LoadedConfig, recorder: Recorder
) -> Follower:
    state = FollowerState(recorder.run, name)
    shown = None if isinstance(config, TensorBoardConfig) else config.name
    run = TrackedRun(
        name=shown or recorder.run.path.name,
        folder=recorder.run.path,
        config=loaded.config.model_dump(mode="json"),
        config_digest=loaded.digest,
        known_id=state.id,
    )
    return Follower(name, make_tracker(config), run, state, deadline_s=config.deadline_s)


def make_tracker(config: TrackingConfig) -> Tracker:
    """The adapter of a tracker; its library is imported when a run opens it."""
    if isinstance(config, TensorBoardConfig):
        return TensorBoardTracker(config.folder)
    if isinstance(config, WandbConfig):
        return WandbTracker(config.project, config.entity, config.mode, config.folder)
    if isinstance(config, MlflowConfig):
        return MlflowTracker(config.uri, config.project)
    return TrackioTracker(config.project, config.uri)

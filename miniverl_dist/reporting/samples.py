"""Episodes that a report shows, with what was made of their tokens where that is recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from miniverl_dist.config.problems import explain_in_line
from miniverl_dist.errors import RecordError
from miniverl_dist.observability.run_dir import RecordFile, RunDirectory, parse_json_line
from miniverl_dist.ports import ScoredTrajectory
from miniverl_dist.reporting.record_tail import lines_from_end
from miniverl_dist.schemas.token_analysis import TokenAnalysis, TokenAnalysisLine
from miniverl_dist.schemas.trajectory import Trajectory

_CANDIDATES: Final = 12
"""Newest trajectories, and newest analysed ones, that samples are chosen from."""
_MAX_BYTES: Final = 256 << 20
"""Of a record file's end that are searched for them."""


def choose_samples(
    run: RunDirectory, num_samples: int, notes: list[str]
) -> tuple[list[Trajectory], dict[str, TokenAnalysis]]:
    """The first episode, then the newest, passed and failed in turn, analysed ones before others.

    Returns:
        The episodes, and the analyses of their tokens by trajectory id. Damage goes into ``notes``.
    """
    path = run.path / RecordFile.TRAJECTORIES
    if not path.exists():
        notes.append(f"{path.name} is missing")
        return [], {}
    if num_samples == 0:
        return [], {}
    analyses = _analyses(run.path / RecordFile.TOKEN_ANALYSIS, notes)
    found = [
        trajectory
        for where, line in _candidates(path, set(analyses))
        if (trajectory := _parsed(line, where, notes)) is not None
    ]
    samples = _varied(found, num_samples, set(analyses))
    kept = {
        sample.trajectory_id: analyses[sample.trajectory_id]
        for sample in samples
        if _belongs(analyses.get(sample.trajectory_id), sample)
    }
    return samples, kept


def parse_trajectory(raw: bytes, where: str) -> Trajectory:
    """One line of a trajectory file, its mask derived from its spans again.

    A line is a trajectory, or holds one under ``trajectory`` beside the teacher's score (training)
    or the policy's name (evaluation).

    Raises:
        RecordError: naming the place, the field, what was found and expected.
    """
    record = parse_json_line(raw, where)
    model: type[ScoredTrajectory | Trajectory] = Trajectory
    if "trajectory" in record and "teacher" in record:
        model = ScoredTrajectory
    elif "trajectory" in record:
        raw = json.dumps(record["trajectory"]).encode()
    try:
        parsed = model.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise RecordError(f"{where}: {explain_in_line(error, model)}") from None
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from None
    return parsed.trajectory if isinstance(parsed, ScoredTrajectory) else parsed


def _analyses(path: Path, notes: list[str]) -> dict[str, TokenAnalysis]:
    """The first analysis and the newest ones, by trajectory id; the file need not be there."""
    if not path.exists():
        return {}
    found: dict[str, TokenAnalysis] = {}
    for where, line in _first_and_newest(path, _CANDIDATES):
        try:
            parse_json_line(line, where)
            analysis = TokenAnalysisLine.model_validate_json(line, strict=True)
        except ValidationError as error:
            notes.append(f"{where}: {explain_in_line(error, TokenAnalysisLine)}")
        except RecordError as error:
            notes.append(str(error))
        else:
            found.setdefault(analysis.trajectory_id, analysis)
    return found


def _first_and_newest(path: Path, count: int) -> Iterator[tuple[str, bytes]]:
    """First line of a file, then its last ``count`` ones, the newest first, each with its place."""
    with path.open("rb") as file:
        first = file.readline()
    yield f"{path.name}, line 1", first
    newest = lines_from_end(path, max_bytes=_MAX_BYTES)
    for index, line in enumerate(islice(newest, count), start=1):
        if line != first:
            yield f"{path.name}, line {index} from the end", line


def _candidates(path: Path, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    """Lines of trajectories: the first, the newest, and those of the ``wanted`` ids."""
    yield from _first_and_newest(path, _CANDIDATES)
    needles = {name: json.dumps(name, ensure_ascii=False).encode() for name in wanted}
    for index, line in enumerate(lines_from_end(path, max_bytes=_MAX_BYTES), start=1):
        if not needles:
            return
        # The id stands at a line's start; reading every line as JSON would take minutes.
        start = line[:200]
        for name in [name for name, needle in needles.items() if needle in start]:
            del needles[name]
            if index > _CANDIDATES:
                yield f"{path.name}, line {index} from the end", line


def _parsed(line: bytes, where: str, notes: list[str]) -> Trajectory | None:
    try:
        return parse_trajectory(line, where)
    except RecordError as error:
        notes.append(str(error))
        return None


def _belongs(analysis: TokenAnalysis | None, trajectory: Trajectory) -> bool:
    """Whether an analysis is about the very tokens of a trajectory."""
    if analysis is None or analysis.positions[-1:] >= (len(trajectory.token_ids),):
        return False
    ids = trajectory.token_ids
    return all(
        ids[place] == token_id
        for place, token_id in zip(analysis.positions, analysis.token_ids, strict=True)
    )


def _varied(found: list[Trajectory], count: int, analysed: set[str]) -> list[Trajectory]:
    unique: dict[str, Trajectory] = {}
    for trajectory in found:
        unique.setdefault(trajectory.trajectory_id, trajectory)
    first, rest = [*unique.values()][:1], [*unique.values()][1:]
    rest.sort(key=lambda trajectory: trajectory.trajectory_id not in analysed)  # stable
    passed = [trajectory for trajectory in rest if trajectory.passed]
    failed = [trajectory for trajectory in rest if not trajectory.passed]
    mixed = first
    while (passed or failed) and len(mixed) < count:
        mixed.extend(pool.pop(0) for pool in (passed, failed) if pool)
    return mixed[:count]

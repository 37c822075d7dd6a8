"""Scored batches that are trained on but not yet committed.

A batch is written here before its update. After a crash the run resumes from the last checkpoint
and trains on these batches again instead of sampling anew; a commit clears them.

    {"sha256": ...}                                           of all that follows
    {"step": ..., "config_digest": ..., "policy_version": ...}  whose batch it is
    [...]                                                     its scored groups
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from miniverl_dist.errors import ChecksumError, ResumeError
from miniverl_dist.observability.run_dir import write_atomic
from miniverl_dist.observability.step_names import named_step, step_name
from miniverl_dist.ports import ScoredGroup
from miniverl_dist.schemas.messages import FrozenModel

_GROUPS = TypeAdapter(tuple[ScoredGroup, ...])
_REMEDY = "remove it to sample that step again (the run is then no longer bit-exact)"


class _Head(FrozenModel):
    """Whose batch it is: a file that was moved or copied here is as well sealed as any other."""

    step: int
    config_digest: str
    policy_version: int
    """Of the student that is trained on it, before the update."""


class Journal:
    """One file per batch of one run.

    Args:
        folder: Of the files; made when the first is written.
        config_digest: Of the run.
    """

    def __init__(self, folder: Path, config_digest: str) -> None:
        self._folder, self._config_digest = folder, config_digest

    def write(self, step: int, policy_version: int, groups: Sequence[ScoredGroup]) -> None:
        """Store the batch of ``step`` (counted from 0) durably.

        Batches of later steps were sampled by a student that this batch is about to change in
        another way; they are forgotten first.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for path, number in self._batches():
            if number > step:
                path.unlink()
        head = _Head(step=step, config_digest=self._config_digest, policy_version=policy_version)
        sealed = head.model_dump_json().encode() + b"\n" + _GROUPS.dump_json(tuple(groups))
        write_atomic(self._path(step), _seal(sealed) + b"\n" + sealed)

    def read(self, step: int, policy_version: int) -> list[ScoredGroup] | None:
        """The batch of ``step``, or None where none was journalled.

        Args:
            step: Counted from 0.
            policy_version: Of the student that is about to be trained on it.

        Raises:
            ChecksumError: the file is damaged.
            ResumeError: it is the batch of another step, run or policy version.
        """
        path = self._path(step)
        if not path.exists():
            return None
        head, groups = self._load(path, step)
        if head.policy_version != policy_version:
            raise ResumeError(
                f"journal/{path.name} was sampled for policy version {head.policy_version}, but "
                f"the student is at {policy_version} before step {step}: {_REMEDY}"
            )
        return groups

    def verify(self) -> int:
        """Read every batch; returns their number.

        Raises:
            ChecksumError, ResumeError: as `read`; or versions that do not rise with the steps.
        """
        heads = [
            self._load(path, step)[0]
            for path, step in sorted(self._batches(), key=lambda found: found[1])
        ]
        for former, head in pairwise(heads):
            if head.policy_version <= former.policy_version:
                raise ResumeError(
                    f"journal/{self._path(head.step).name} is of policy version "
                    f"{head.policy_version}, step {former.step} before it of "
                    f"{former.policy_version}: {_REMEDY}"
                )
        return len(heads)

    def clear(self, *, before_step: int) -> None:
        """Forget the batches of steps below ``before_step``; call after that step's commit.

        Later ones stay: a replay that was stopped half-way goes on with them.
        """
        for path, number in self._batches():
            if number < before_step:
                path.unlink()

    def _load(self, path: Path, step: int) -> tuple[_Head, list[ScoredGroup]]:
        """A file's contents, once it is sure that they are of this run's ``step``."""
        seal, _, sealed = path.read_bytes().partition(b"\n")
        where = f"journal/{path.name}"
        if seal != _seal(sealed):
            raise ChecksumError(f"{where} differs from its checksum; {_REMEDY}")
        text, _, body = sealed.partition(b"\n")
        try:
            head = _Head.model_validate_json(text)
        except ValidationError:
            raise ResumeError(
                f"{where} does not say which step and run it is of; another version wrote it: "
                "finish the run with that version, or remove journal/ to go on from the last "
                "commit (its steps are sampled again, and the run is no longer bit-exact)"
            ) from None
        if head.config_digest != self._config_digest:
            raise ResumeError(
                f"{where} belongs to a run of config {head.config_digest[:12]}, this one is "
                f"{self._config_digest[:12]}: {_REMEDY}"
            )
        if head.step != step:
            raise ResumeError(
                f"{where} holds the batch of step {head.step}, expected step {step}: {_REMEDY}"
            )
        return head, list(_GROUPS.validate_json(body, strict=True))

    def _batches(self) -> list[tuple[Path, int]]:
        """Files of steps, in no order; whatever else lies there is not ours."""
        steps = ((path, named_step(path.stem)) for path in self._folder.glob("*.json"))
        return [(path, step) for path, step in steps if step is not None]

    def _path(self, step: int) -> Path:
        return self._folder / f"{step_name(step)}.json"


def require_lags(
    groups: Sequence[ScoredGroup], lags: Sequence[int], max_policy_lag: int, step: int
) -> None:
    """Refuse a replay of groups that the run could not have trained on here.

    Raises:
        ResumeError: a lag is below 0, or above the bound.
    """
    for group, lag in zip(groups, lags, strict=True):
        if not 0 <= lag <= max_policy_lag:
            raise ResumeError(
                f"journalled group {group.assignment.group_id} of step {step} has policy lag {lag},"
                f" expected 0 to {max_policy_lag} (loop.max_policy_lag): remove journal/ to go on "
                "from the last commit"
            )


def _seal(sealed: bytes) -> bytes:
    return json.dumps({"sha256": hashlib.sha256(sealed).hexdigest()}).encode()

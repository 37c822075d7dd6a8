"""Evaluations as jobs of their own: which policies are opened, measured, deployed and compared.

student, teacher, null, oracle are the run's own; its student is built only where it is asked for.
hf:FOLDER, openai:URL and sglang:URL come from `eval_policies`, which asks them before anything is
played. ``--deploy`` exports a checkpoint, starts an engine on it, and measures base and trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from actors.deployed import deploy_server
from actors.eval_policies import (
    ForeignOptions,
    ForeignPolicies,
    ForeignPolicy,
    PolicySpec,
    is_foreign,
    parse_policy,
)
from miniverl_dist.backends.weights_io import read_json
from miniverl_dist.config.load import LoadedConfig
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.errors import ConfigError
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.observability.run_dir import RunDirectory
from miniverl_dist.ports import RolloutSource
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow, TailCalls
from miniverl_dist.training import checkpoint as commits
from miniverl_dist.training.evaluator import Player, read_evaluation

if TYPE_CHECKING:
    from actors.deployed import DeployKind
    from actors.single import SingleActor

EXPORTS_FOLDER: Final = "exports"
ENGINES_FOLDER: Final = "engines"
BASE_TAG: Final = "initial"
BASE_TAGS: Final = ("warm", "before")
"""Rows of a run that show the student before reinforcement learning, the preferred one first."""


@dataclass(frozen=True)
class EvaluationRequest:
    """What one job measures."""

    policies: tuple[str, ...]
    """As the command line names them."""
    tag: str
    """Of the rows."""
    checkpoint: Path | None = None
    """Weights of the student; None takes its initial ones."""
    tail_calls: TailCalls | None = None
    """Instead of the config's."""
    foreign: ForeignOptions = field(default_factory=ForeignOptions)
    deploy: DeployKind | None = None
    """Measure the checkpoint as others would use it: exported, on this engine, beside the base."""

    @property
    def specs(self) -> tuple[PolicySpec, ...]:
        """The policies, read. Raises ``ConfigError``."""
        return tuple(map(parse_policy, self.policies))

    def row_tag(self, tag: str) -> str:
        """A tag with the horizon, where that is not the config's."""
        return tag if self.tail_calls is None else f"{tag}-T{self.tail_calls}"


def row_tag_of(checkpoint: Path | None, config: LoadedConfig) -> str:
    """A job's tag: the commit's name, and whose it is when it was made under another config.

    Raises:
        CheckpointError, ChecksumError: the checkpoint is not complete.
    """
    if checkpoint is None:
        return BASE_TAG
    found = commits.check_files(checkpoint).state.config_digest
    return checkpoint.name if found == config.digest else f"{checkpoint.name}@{found[:8]}"


def needs_student(request: EvaluationRequest) -> bool:
    """Whether the student's weights have to be loaded into the run's own parts."""
    return any(spec.kind == "student" for spec in request.specs)


def plays_own_teacher(request: EvaluationRequest, config: RunConfig) -> bool:
    """Whether the run's own teacher plays, which has to be there first."""
    return any(spec.kind == "teacher" and not is_foreign(spec, config) for spec in request.specs)


def check_request(request: EvaluationRequest, config: RunConfig) -> None:
    """Fail before anything is written when a job asks for what there is not.

    Raises:
        ConfigError: a policy that does not exist, or cannot act.
    """
    for spec in request.specs:
        problem = config.acting_teacher_problem
        if spec.kind == "teacher" and problem is not None and not is_foreign(spec, config):
            raise ConfigError(f"policy teacher: {problem}")
    if request.deploy is None:
        return
    if isinstance(config.student.model, ToyModelConfig):
        raise ConfigError(
            "--deploy: a toy student has no form that another engine loads; leave --deploy out"
        )
    if request.checkpoint is None:
        raise ConfigError("--deploy needs a checkpoint: give a RUN that has one, or --checkpoint")
    if request.deploy == "sglang":
        deploy_server(config)


class EvaluationRun:
    """Carries out one job.

    Args:
        config: Of the run.
        run: The directory that gets the rows, open for writing.
        actor: Builds the run's parts.
        request: What is measured.
    """

    def __init__(
        self, config: RunConfig, run: RunDirectory, actor: SingleActor, request: EvaluationRequest
    ) -> None:
        self._config, self._run, self._actor, self._request = config, run, actor, request

    async def measure(self) -> EvaluationReport:
        """Measure what was asked for and add the rows to ``eval.json``.

        Raises:
            ConfigError: a policy that cannot play; nothing has been played then.
        """
        request = self._request
        if request.deploy is not None and request.checkpoint is not None:
            await self._deployed(request.checkpoint, request.deploy)
            others = tuple(policy for policy in request.policies if policy != "student")
            self._request = replace(request, policies=others, deploy=None)
        if needs_student(self._request):
            await self._with_student()
        elif self._request.policies:
            await self._without_student()
        return read_evaluation(self._run) or self._actor.empty_evaluation()

    async def _with_student(self) -> None:
        actor, request = self._actor, self._request
        async with actor.reserved(), AsyncExitStack() as stack:
            await actor.prepare(with_teacher=plays_own_teacher(request, self._config))
            opened = actor.open(tail_calls=request.tail_calls, with_scorer=False)
            parts = await stack.enter_async_context(opened)
            names = await self._open(stack)
            students = parts.ports.students
            if request.checkpoint is not None:
                state = commits.verify(request.checkpoint).state
                await students.load(request.checkpoint, state.policy_version)
            receipt = await parts.ports.weights.publish(students.policy_version)
            for name in names:
                weights = receipt.checksum if name.name == "student" else name.weights
                await parts.evaluator.measure(
                    name.name,
                    request.row_tag(request.tag),
                    students.policy_version,
                    weights=weights or None,
                    player=name.player,
                )

    async def _without_student(self) -> None:
        actor, request = self._actor, self._request
        async with AsyncExitStack() as stack:
            fits_teacher = plays_own_teacher(request, self._config)
            await actor.prepare(with_teacher=fits_teacher, with_student=False)
            evaluator = actor.evaluator_alone(request.tail_calls)
            for name in await self._open(stack):
                await evaluator.measure(
                    name.name,
                    request.row_tag(request.tag),
                    0,
                    weights=name.weights or None,
                    player=name.player,
                )

    async def _open(self, stack: AsyncExitStack) -> Sequence[_Named]:
        """Open all policies before one of them plays."""
        found = []
        for spec in self._request.specs:
            if not is_foreign(spec, self._config):
                found.append(_Named(spec.kind))
                continue
            opened = await self._foreign().open(spec, stack)
            found.append(_Named(opened.name, opened.weights, _player(opened)))
        return found

    def _foreign(self) -> ForeignPolicies:
        return ForeignPolicies(
            self._config, self._actor.side, self._run.path, self._request.foreign, SystemClock()
        )

    async def _deployed(self, checkpoint: Path, kind: DeployKind) -> None:
        """Measure a checkpoint as others would use it, and the student that it came from."""
        config, request = self._config, self._request
        report = read_evaluation(self._run)
        if report is None or deployed_base(report, request) is None:
            base = replace(
                request, policies=("student",), tag=BASE_TAG, checkpoint=None, deploy=None
            )
            await EvaluationRun(config, self._run, self._actor, base).measure()
        folder = exported(checkpoint, self._run.path / EXPORTS_FOLDER / request.tag)
        tag = request.row_tag(deployed_tag(request))
        async with AsyncExitStack() as stack:
            await self._actor.prepare(with_teacher=False, with_student=False)
            evaluator = self._actor.evaluator_alone(request.tail_calls)
            work_dir = self._run.path / ENGINES_FOLDER / f"deployed-{request.tag}"
            opened = await self._foreign().open_export(folder, kind, work_dir, stack)
            version = commits.verify(checkpoint).state.policy_version
            await evaluator.measure(
                "student", tag, version, weights=opened.weights, player=_player(opened)
            )


def exported(checkpoint: Path, folder: Path) -> Path:
    """The folder of a checkpoint's weights for other engines; made unless it is there already.

    Raises:
        ConfigError: the folder holds something else.
    """
    from actors.export import EXPORT_FILE, export_run

    if (folder / EXPORT_FILE).is_file():
        found = read_json(folder / EXPORT_FILE)
        if found["checkpoint"]["sha256"] == commits.verify(checkpoint).sha256:
            return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    export_run(checkpoint.parent.parent, folder, checkpoint=checkpoint.name)
    return folder


def deployed_tag(request: EvaluationRequest) -> str:
    """Tag of the rows of a deployed checkpoint, the horizon left out."""
    return f"{request.tag}-deployed-{request.deploy}"


def deployed_base(report: EvaluationReport, request: EvaluationRequest) -> EvaluationRow | None:
    """The student as this run began with it, at the same horizon; None where it is not measured."""
    students = {row.tag: row for row in report.rows if row.policy == "student"}
    tags = map(request.row_tag, (*BASE_TAGS, BASE_TAG))
    return next((students[tag] for tag in tags if tag in students), None)


def deployed_lines(report: EvaluationReport, request: EvaluationRequest) -> list[str]:
    """Base, trained, and what lies between them, for people to read."""
    from miniverl_dist.reporting.evaluation import difference

    base = deployed_base(report, request)
    tag = request.row_tag(deployed_tag(request))
    trained = next(
        row for row in reversed(report.rows) if (row.policy, row.tag) == ("student", tag)
    )
    if base is None:
        return []
    lines = [
        f"base     ({base.tag}): {_pass_text(base)}",
        f"trained  ({tag}): {_pass_text(trained)}",
    ]
    found = difference(trained, base, base.tag)
    if found is None:
        return [*lines, "delta    -: one side has no episode that counts"]
    how = "over tasks" if found.is_paired else "of two independent samples"
    return [
        *lines,
        f"delta    {found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}], 95 % {how}",
    ]


def _pass_text(row: EvaluationRow) -> str:
    """``pass 0.500 [0.100, 0.900]``."""
    if row.pass_interval is None:
        return f"no episode that counts ({row.num_faults} faults)"
    rate, low, high = row.pass_interval
    return f"pass {rate:.3f} [{low:.3f}, {high:.3f}]"


@dataclass(frozen=True)
class _Named:
    """A policy that is ready to play."""

    name: str
    weights: str = ""
    player: Player | None = None
    """None: the run's own policy of that name."""


def _player(opened: ForeignPolicy) -> Player:
    async def made() -> RolloutSource:
        return opened.source

    return Player(made, opened.settings)

"""`miniverl-dist eval`: measure policies on the evaluation tasks of a recipe or run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from actors.run_folders import find_checkpoint, free_folder
from miniverl_dist.errors import ConfigError

if TYPE_CHECKING:
    from actors.deployed import DeployKind
    from actors.eval_jobs import EvaluationRequest
    from actors.eval_policies import ForeignOptions
    from miniverl_dist.config.load import LoadedConfig
    from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow, TailCalls

_SETTINGS: Final = ("evaluation.", "rollout.", "deadlines.", "tasks.")
"""Fields of a run that another evaluation may set otherwise."""


class Calls(StrEnum):
    """How a chat model says its calls."""

    TOOLS = "tools"
    TEXT = "text"


class Thinking(StrEnum):
    """Whether a chat model reasons first."""

    ON = "on"
    OFF = "off"


class Deploy(StrEnum):
    """The engine that an exported checkpoint is measured on."""

    HF = "hf"
    SGLANG = "sglang"


Source = Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="Recipe or run directory.")]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|SCHEME:PLACE",
        help="student, teacher, null, oracle, hf:FOLDER, openai:http://HOST:PORT/v1 or "
        "sglang:http://HOST:PORT; may be given several times.",
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="STEP|PATH",
        help="The student's weights; default for a RUN: its newest checkpoint.",
    ),
]
DeployOn = Annotated[
    Deploy | None,
    typer.Option(help="Export the checkpoint, serve it, and compare it with the beginning."),
]
Horizon = Annotated[
    str | None, typer.Option(metavar="T|all", help="T, the calls left to the policy; all: every T.")
]
Model = Annotated[
    str | None, typer.Option(help="openai: the model's name, where the server has several.")
]
CallForm = Annotated[
    Calls | None,
    typer.Option(help="openai: structured tool calls (default), or our wire format as text."),
]
Reasoning = Annotated[
    Thinking | None, typer.Option(help="openai: reason first or not; default: the server's.")
]
HeadersFile = Annotated[
    Path | None, typer.Option(help="openai, sglang: `Name: value` lines, for a key.")
]
MaxNewTokens = Annotated[
    int | None, typer.Option(min=1, help="hf, openai, sglang: of a turn; default: the recipe's.")
]
Output = Annotated[Path | None, typer.Option(help="Where rows go; default RUN, or runs/NAME-eval.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="For instance optim.lr=3e-6."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def evaluate(  # noqa: PLR0913 - the options of a command
    source: Source,
    policy: Policies = None,
    checkpoint: Checkpoint = None,
    deploy: DeployOn = None,
    tail_calls: Horizon = None,
    model: Model = None,
    calls: CallForm = None,
    thinking: Reasoning = None,
    headers_file: HeadersFile = None,
    max_new_tokens: MaxNewTokens = None,
    output: Output = None,
    override: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate policies on the evaluation tasks of a recipe or run.

    Started again, the same command plays only what is missing or was lost to faults. `eval compare
    A B` sets two evaluations beside each other.
    """
    from actors.eval_policies import ForeignOptions

    loaded, newest, folder = evaluation_source(source, override)
    folder = output or folder
    names = tuple(dict.fromkeys(policy or (["student"] if deploy else [])))
    if not names:
        raise ConfigError("eval: give --policy at least once, for instance --policy null")
    if checkpoint is not None:
        checkpoint = find_checkpoint(source, checkpoint)
    elif "student" in names or deploy is not None:
        checkpoint = newest
    given = {"--model": model, "--calls": calls, "--thinking": thinking}
    _require_asked(given, names, ("openai:",))
    _require_asked({"--headers-file": headers_file}, names, ("openai:", "sglang:"))
    served = ("hf:", "openai:", "sglang:", "teacher") + (("student",) if deploy else ())
    _require_asked({"--max-new-tokens": max_new_tokens}, names, served)
    foreign = ForeignOptions(
        model=model,
        headers_file=headers_file,
        calls=(calls or Calls.TOOLS).value,
        thinking=None if thinking is None else thinking is Thinking.ON,
        max_new_tokens=max_new_tokens,
    )
    chosen: DeployKind | None = None
    if deploy is not None:
        chosen = "hf" if deploy is Deploy.HF else "sglang"
    request = _request(loaded, names, checkpoint, _tail_calls(tail_calls), foreign, chosen)
    _measure(loaded, request, folder, as_json=as_json)


def _require_asked(
    given: Mapping[str, object], policies: Sequence[str], kinds: tuple[str, ...]
) -> None:
    """Raise where an option was given that none of the policies would look at."""
    for option, value in given.items():
        if value is not None and not any(policy.startswith(kinds) for policy in policies):
            raise ConfigError(
                f"{option} has no effect on {', '.join(policies)}: it goes with --policy "
                f"{' or '.join(kinds)}"
            )


def _request(
    loaded: LoadedConfig,
    policies: tuple[str, ...],
    checkpoint: Path | None,
    tail_calls: TailCalls | None,
    foreign: ForeignOptions,
    deploy: DeployKind | None,
) -> EvaluationRequest:
    from actors.eval_jobs import EvaluationRequest, row_tag_of

    tag = row_tag_of(checkpoint, loaded)
    return EvaluationRequest(policies, tag, checkpoint, tail_calls, foreign, deploy)


def _measure(
    loaded: LoadedConfig, request: EvaluationRequest, folder: Path, *, as_json: bool
) -> None:
    """Carry out a job and show what it found."""
    from actors import launch
    from actors.eval_jobs import deployed_lines
    from actors.inspection import evaluation_text
    from miniverl_dist.observability.progress import JsonProgress, progress_for
    from miniverl_dist.reporting.report import write_report

    progress = JsonProgress(sys.stdout) if as_json else progress_for(sys.stderr)
    before = _rows_of(folder)
    try:
        report = launch.evaluate_request(loaded, request, output=folder, progress=progress)
    except KeyboardInterrupt:
        progress.message(f"stopped: played episodes are in {folder}, the same command goes on")
        raise
    finally:
        progress.close()
    write_report(folder)
    if as_json:
        typer.echo(json.dumps({"result": report.model_dump(mode="json")}))
        return
    shown = _of_this_job(report, before)
    typer.echo("\n".join(evaluation_text(shown)))
    if len(shown.rows) < len(report.rows):
        typer.echo(f"\n{len(report.rows)} rows in all: {folder / 'summary.md'}")
    if request.deploy is not None:
        typer.echo("\n".join(deployed_lines(report, request)))
    typer.echo(f"written to {folder}")


def _rows_of(folder: Path) -> tuple[EvaluationRow, ...]:
    """What has been measured there; nothing in a folder that does not exist yet."""
    from miniverl_dist.observability.run_dir import MANIFEST, RunDirectory
    from miniverl_dist.training.evaluator import read_evaluation

    if not (folder / MANIFEST).is_file():
        return ()
    report = read_evaluation(RunDirectory.open(folder))
    return () if report is None else report.rows


def _of_this_job(report: EvaluationReport, before: Sequence[EvaluationRow]) -> EvaluationReport:
    """The rows that this command has measured, and those that they are compared with.

    Where all of it was there already, everything is shown.
    """
    from actors.eval_jobs import BASE_TAG, BASE_TAGS
    from miniverl_dist.training.eval_stats import STUDENT
    from miniverl_dist.training.evaluator import DETERMINISTIC_POLICIES

    new = [row for row in report.rows if row not in before]
    if not new:
        return report
    rows = tuple(
        row
        for row in report.rows
        if row in new
        or row.policy in DETERMINISTIC_POLICIES
        or (row.policy == STUDENT and row.tag in (*BASE_TAGS, BASE_TAG))
    )
    return report.model_copy(update={"rows": rows})


def _tail_calls(text: str | None) -> TailCalls | None:
    """Read ``--tail-calls``. Raises ``ConfigError``."""
    if text is None or text == "all":
        return text  # type: ignore[return-value]
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--tail-calls {text!r}: expected a number from 1, or all")
    return int(text)


def evaluation_source(
    source: Path, override: list[str] | None
) -> tuple[LoadedConfig, Path | None, Path]:
    """Config, newest checkpoint (None without one) and folder for the rows."""
    from miniverl_dist.config.load import load_config, load_run_config
    from miniverl_dist.observability.run_dir import CHECKPOINTS
    from miniverl_dist.training.checkpoint import list_checkpoints

    if not source.is_dir():
        loaded = load_config(source, override or [])
        return loaded, None, _evaluation_folder(loaded)
    _require_settings(override or [])
    loaded = load_run_config(source, override or [])
    checkpoints = list_checkpoints(source / CHECKPOINTS)
    # A run keeps the config it started with: rows under another one go elsewhere.
    folder = _evaluation_folder(loaded) if override else source
    return loaded, checkpoints[-1] if checkpoints else None, folder


def _require_settings(override: list[str]) -> None:
    """Raise unless a run's policies can be measured under these overrides."""
    for text in override:
        if not text.startswith(_SETTINGS):
            raise ConfigError(
                f"-o {text.partition('=')[0]}: a run is measured as the model that it trained; "
                f"what can be overridden is how: {', '.join(name + '*' for name in _SETTINGS)}"
            )


def _evaluation_folder(loaded: LoadedConfig) -> Path:
    """The evaluation of this very config under ``runs``, or a folder that does not exist yet.

    So the same command goes on where it was cut off, and adds no second row for what it has.
    """
    from miniverl_dist.errors import RecordError
    from miniverl_dist.observability.run_dir import MANIFEST, RunDirectory

    def is_the_same(folder: Path) -> bool:
        try:
            return bool(
                RunDirectory(folder, None).read_json(MANIFEST)["config_digest"] == loaded.digest
            )
        except (RecordError, KeyError):
            return False  # not an evaluation that can be gone on with

    return free_folder(f"{loaded.config.name}-eval", goes_on=is_the_same)

"""The command line. Each command imports what it needs when it runs: `--help` stays light."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from actors.cache_commands import cache
from actors.compare_command import compare_evals
from actors.eval_commands import evaluate
from actors.run_folders import RUNS, free_folder
from miniverl_dist.errors import ConfigError, MiniverlError

if TYPE_CHECKING:
    from miniverl_dist.config.load import LoadedConfig
    from miniverl_dist.observability.progress import Progress
    from miniverl_dist.training.loop import RunSummary

EXIT_PROBLEM: Final = 1
EXIT_ERROR: Final = 2
EXIT_INTERRUPTED: Final = 130


class Form(StrEnum):
    """How much of a config is shown."""

    VALIDATED = "validated"
    RESOLVED = "resolved"


class ExportForm(StrEnum):
    """What an exported folder holds."""

    HF = "hf"
    ADAPTER = "adapter"


class Commands(TyperGroup):
    """Turns our errors into one line and exit code 2; any other exception stays a traceback."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's own click has no public name
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except MiniverlError as error:
            typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
            raise SystemExit(EXIT_ERROR) from None
        except KeyboardInterrupt:
            raise SystemExit(EXIT_INTERRUPTED) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - as above
        """Read ``eval compare`` as the command it is; a recipe of that name is ``./compare``."""
        if args[:2] == ["eval", "compare"]:
            _, command, rest = super().resolve_command(ctx, ["compare-evals", *args[2:]])
            return "eval compare", command, rest
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    name="miniverl-dist",
    help="Train tool-using language models: GRPO and cross-tokenizer on-policy distillation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Recipe (YAML).")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="For instance optim.lr=3e-6."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.command()
def train(
    config: ConfigFile,
    override: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="New run directory; default runs/NAME, or NAME-2, …")
    ] = None,
    warm_start: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Start from the weights of a run, checkpoint or student folder (nothing else).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start a run."""
    if warm_start is not None:
        override = [*(override or []), f"student.warm_start={json.dumps(os.fspath(warm_start))}"]
    loaded = _load(config, override)
    folder = run_dir or free_folder(loaded.config.name)
    from actors import launch

    with _progress(as_json) as progress:
        summary = launch.train(loaded, run_dir=folder, progress=progress)
    _show_run(folder, summary, as_json=as_json)


@app.command()
def resume(run: RunFolder, as_json: AsJson = False) -> None:
    """Continue a run from its last commit."""
    from actors import launch

    with _progress(as_json) as progress:
        summary = launch.resume(run, progress=progress)
    _show_run(run, summary, as_json=as_json)


@app.command()
def benchmark(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="Arms over seeds (YAML).")],
    output: Annotated[
        Path | None, typer.Option(help="Folder of its runs; default runs/NAME. Goes on there.")
    ] = None,
    report_only: Annotated[
        bool, typer.Option(help="Run nothing; write the report of what has finished.")
    ] = False,
) -> None:
    """Compare arms over seeds; finished runs are kept, others resumed."""
    from actors.arms import run_benchmark
    from miniverl_dist.config.arms import load_benchmark

    loaded = load_benchmark(plan_file)
    folder = output or RUNS / loaded.config.name
    shown, is_complete = run_benchmark(
        loaded, folder, lambda line: typer.echo(line, err=True), report_only=report_only
    )
    typer.echo(shown, nl=False)
    if not (is_complete or report_only):
        raise SystemExit(EXIT_PROBLEM)


@app.command()
def validate(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Recipes, runs, checkpoints, record files."),
    ],
) -> None:
    """Check recipes, run directories, checkpoints and record files, line by line."""
    from actors.validation import validate_path

    failed = False
    for path in paths:
        try:
            typer.echo(f"ok: {path}: {validate_path(path)}")
        except MiniverlError as error:
            failed = True
            typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
    if failed:
        raise SystemExit(EXIT_ERROR)


@app.command()
def plan(
    config: ConfigFile,
    override: Overrides = None,
    gpu_memory_gib: Annotated[
        float, typer.Option(min=1, help="Memory of the GPU of a rank or engine.")
    ] = 80.0,
    reserve_gib: Annotated[
        float, typer.Option(min=0, help="Left free on each GPU for what no formula covers.")
    ] = 6.0,
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="[Nx]CPUS,GPUS", help="A node of the cluster; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show placement, ranks, memory and phases of a run; exit code 2 if it cannot fit."""
    from actors.plan import Device, make_plan, parse_nodes
    from actors.plan_view import render

    made = make_plan(
        _load(config, override).config,
        device=Device(gpu_memory_gib, reserve_gib),
        nodes=parse_nodes(node or []),
    )
    typer.echo(json.dumps(made.as_json()) if as_json else render(made), nl=as_json)
    made.require()


@app.command("show-config")
def show_config(
    config: ConfigFile,
    override: Overrides = None,
    form: Annotated[
        Form, typer.Option(help="validated: as written and merged; resolved: with all defaults.")
    ] = Form.RESOLVED,
    explain: Annotated[
        bool, typer.Option("--explain", help="With all defaults, and what each field means.")
    ] = False,
) -> None:
    """Print a recipe after `extends`, overrides and checks."""
    loaded = _load(config, override)
    if explain:
        from miniverl_dist.config.explained import explained_yaml

        typer.echo(explained_yaml(loaded.config), nl=False)
        return
    text = loaded.resolved_yaml() if form is Form.RESOLVED else loaded.validated_yaml()
    typer.echo(text, nl=False)


@app.command()
def inspect(
    run: RunFolder,
    step: Annotated[int | None, typer.Option(help="Every metric and event of one step.")] = None,
    trajectory: Annotated[str | None, typer.Option(help="One episode by its id.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run's state, one step, or one episode."""
    from actors.inspection import run_view, step_view, trajectory_view

    if step is not None and trajectory is not None:
        raise ConfigError("inspect: give either --step or --trajectory, found both")
    if trajectory is not None:
        view = trajectory_view(run, trajectory)
    else:
        view = run_view(run) if step is None else step_view(run, step)
    typer.echo(json.dumps(view.data, ensure_ascii=False) if as_json else view.text)


@app.command()
def report(
    run: RunFolder,
    compare: Annotated[
        list[Path] | None, typer.Option(help="Another run to overlay; may be repeated.")
    ] = None,
) -> None:
    """Write summary.md and report.html into a run directory."""
    from miniverl_dist.reporting.report import write_report

    written = write_report(run, compare or [])
    for note in written.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"wrote {written.summary} and {written.page}")


@app.command()
def watch(
    run: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 2.0,
) -> None:
    """Show a run as it goes, until it is over; reads only, from a mounted folder as well."""
    from rich.console import Console

    from actors.watch import follow, look
    from actors.watch_view import LiveFrames, show_once

    console = Console(highlight=False)
    if once:
        show_once(look(run), console)
        return
    with LiveFrames(console) as frames:
        follow(run, frames.show, interval_s=interval)


@app.command()
def export(
    run: RunFolder,
    output: Annotated[Path, typer.Option(metavar="DIR", help="New folder.")],
    form: Annotated[
        ExportForm,
        typer.Option("--format", help="hf: whole weights, adapters merged; adapter: LoRA alone."),
    ] = ExportForm.HF,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="STEP", help="Number or name; default: the newest.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's student as a folder that transformers, or peft, loads."""
    from actors.export import export_run

    written = export_run(run, output, form.value, checkpoint=checkpoint)
    if as_json:
        typer.echo(json.dumps({"result": written}))
        return
    typer.echo(f"{written['checkpoint']['name']} as {written['format']}: {output}")


serve = typer.Typer(cls=Commands, help="Serve one role of a run by itself.", no_args_is_help=True)
app.add_typer(serve, name="serve")
app.add_typer(cache, name="cache")
app.command("eval")(evaluate)
app.command("compare-evals", hidden=True)(compare_evals)


@serve.command("teacher")
def serve_teacher(config: ConfigFile, override: Overrides = None) -> None:
    """Serve a teacher until SIGTERM; prints its URL as one JSON line once it answers."""
    from actors import serve as services
    from miniverl_dist.config.load import load_teacher_service

    services.serve_teacher(
        load_teacher_service(config, override or []),
        typer.echo,
        lambda line: typer.echo(line, err=True),
    )


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has and lacks; exit code 1 if the local loop cannot run."""
    from actors.doctor import Status, run_checks

    checks = run_checks()
    if as_json:
        typer.echo(json.dumps([check.as_json() for check in checks], ensure_ascii=False))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            remedy = f"  ->  {check.remedy}" if check.remedy else ""
            typer.echo(f"{check.status.value:<8} {check.name:<{width}}  {check.found}{remedy}")
    if any(check.status is Status.MISSING for check in checks):
        raise SystemExit(EXIT_PROBLEM)


def _load(config: Path, override: list[str] | None) -> LoadedConfig:
    from miniverl_dist.config.load import load_config

    return load_config(config, override or [])


@contextmanager
def _progress(as_json: bool) -> Iterator[Progress]:
    from miniverl_dist.observability.progress import JsonProgress, progress_for

    progress = JsonProgress(sys.stdout) if as_json else progress_for(sys.stderr)
    try:
        yield progress
    finally:
        progress.close()


def _show_run(folder: Path, summary: RunSummary, *, as_json: bool) -> None:
    if as_json:
        result = {
            "run_dir": os.fspath(folder),
            "step": summary.step,
            "policy_version": summary.policy_version,
            "is_finished": summary.is_finished,
        }
        typer.echo(json.dumps({"result": result}))
        return
    word = "finished" if summary.is_finished else f"stopped (miniverl-dist resume {folder})"
    has_report = (folder / "report.html").exists()
    where = f"; see {folder}/summary.md and report.html" if has_report else ""
    typer.echo(f"{word} after step {summary.step}{where}")


def main() -> None:
    """Entry point of `miniverl-dist`."""
    app()


if __name__ == "__main__":
    main()

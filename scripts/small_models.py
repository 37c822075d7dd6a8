"""Run the two small models, measure them, and write docs/small_models.md from the run's files.

    python -m scripts.small_models --output runs/small_models            all that is missing
    python -m scripts.small_models --output runs/small_models --write    write from what is there

Stopped anywhere, the same command goes on: finished measurements stay, a run is resumed. The
document holds numbers of these files only; what they show follows by rule.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from actors.export import export_run
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import HFStudentConfig
from miniverl_dist.errors import ConfigError, MiniverlError
from miniverl_dist.lab.arms_table import markdown_table
from miniverl_dist.observability.run_dir import CHECKPOINTS
from miniverl_dist.reporting.evaluation import difference
from miniverl_dist.schemas.evaluation import EvaluationRow
from miniverl_dist.training.checkpoint import newest_checkpoint
from scripts.step_chart import Panel, step_chart

ROOT: Final = Path(__file__).resolve().parents[1]
CONFIG: Final = ROOT / "configs" / "cpu_smollm2_gemma3.yaml"
DOCUMENT: Final = ROOT / "docs" / "small_models.md"
CHART: Final = "small_models.svg"
PLOTTED: Final = "Reward, pass rate and reverse KL over the steps"
COMMAND: Final = "python -m scripts.small_models"
RUN: Final = "run"
AT_START: Final = "step-000000"
BASE, WARM, TRAINED = "base", "warm", "trained"
STAGES: Final = {
    BASE: "student as it comes",
    WARM: "student after the warm-up",
    TRAINED: "student after training",
    "teacher, shown the solution": "teacher, shown the solution",
    "teacher": "teacher without it",
}

INTRODUCTION: Final = f"""\
# Two real small models on a CPU

Written by `{COMMAND}` from the files of one run; do not edit.

Student: SmolLM2-135M-Instruct, LoRA. Teacher: Gemma-3-270m, a base model of another family with
another tokenizer. Both come as Python packages and are converted once; the weights are those of
4-bit files. The recipe is `configs/cpu_smollm2_gemma3.yaml`: arithmetic through calls, 48 tasks to
train on, 12 others to measure on. The teacher scores every token that the student sampled, aligned
byte by byte, and is shown the solution: by itself it knows neither the tools nor the form of a
call.

```
sh scripts/install_small_models.sh
python -m scripts.prepare_small_models --output models --accept-licences
{COMMAND} --output runs/small_models
```"""

LIMITS: Final = """\
## What this does not show

* That the method pays in general: one seed, one recipe, one kind of task. No arm without the
  teacher was run, so nothing here says how much of a change is the teacher's and how much the
  reward's; for that there is `docs/evidence.md`.
* That a teacher without privileged context would do: this one reads the solution. It is a source of
  dense credit from another family and another tokenizer, not an expert.
* Anything about models that are not quantised: both are what 4-bit files make of them.
* Skill beyond the recipe: evaluation tasks are others than the training tasks, but of one kind."""


def main() -> None:
    """Run, unless only the document is wanted; write it either way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/small_models"))
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--write", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    try:
        if not arguments.write:
            run_all(arguments.config, arguments.output)
        arguments.document.write_text(document(arguments.output))
        if metrics := read_lines(arguments.output / RUN / "metrics.jsonl"):
            arguments.document.with_name(CHART).write_text(chart(metrics))
    except MiniverlError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {arguments.document}")


def run_all(config_path: Path, output: Path) -> None:
    """Measure, train, measure; what is there already is kept.

    Raises:
        ConfigError: a recipe without an hf student, or a part that failed.
    """
    config = load_config(config_path).config
    if not isinstance(config.student.model, HFStudentConfig):
        raise ConfigError(f"{config_path}: student.model.kind must be hf, found another")
    output.mkdir(parents=True, exist_ok=True)
    measure(config_path, output, BASE, lambda: model_path(config), "--teacher")
    train(config_path, output / RUN)
    measure(config_path, output, WARM, lambda: exported(output, AT_START))
    measure(config_path, output, TRAINED, lambda: exported(output, None))
    shutil.rmtree(output / "exported", ignore_errors=True)


def model_path(config: RunConfig) -> Path:
    """The student's own folder."""
    model = config.student.model
    assert isinstance(model, HFStudentConfig)
    return model.path


def exported(output: Path, checkpoint: str | None) -> Path:
    """A checkpoint of the run as a folder that transformers loads; made again each time."""
    folder = output / "exported"
    shutil.rmtree(folder, ignore_errors=True)
    export_run(output / RUN, folder, checkpoint=checkpoint)
    return folder


def measure(
    config_path: Path, output: Path, name: str, folder: Callable[[], Path], *options: str
) -> None:
    """Bits per byte of one model, unless they are known."""
    path = output / f"bits_{name}.json"
    if path.exists():
        return
    partial = path.with_suffix(".partial")
    command = ["scripts.bits_per_byte", str(config_path), "--output", str(partial)]
    call([*command, "--model", f"{name}={folder()}", *options])
    partial.replace(path)


def train(config_path: Path, run_dir: Path) -> None:
    """Start the run, or go on with it."""
    if newest_checkpoint(run_dir / CHECKPOINTS) is not None:
        call(["actors.cli", "resume", str(run_dir)])
        return
    if run_dir.exists():  # stopped before its first commit: nothing to come back to
        shutil.rmtree(run_dir)
    call(["actors.cli", "train", str(config_path), "--run-dir", str(run_dir)])


def call(arguments: Sequence[str]) -> None:
    """Run a module in a process of its own, so that its memory is given back.

    Raises:
        ConfigError: it failed; its own message stands above.
    """
    print("running:", " ".join(arguments), flush=True)
    code = subprocess.run([sys.executable, "-m", *arguments], check=False).returncode
    if code:
        raise ConfigError(f"{arguments[0]} ended with exit code {code}; see its message above")


def document(output: Path) -> str:
    """The whole text, from the files below ``output``."""
    bits, rows = read_bits(output), read_rows(output / RUN)
    metrics = read_lines(output / RUN / "metrics.jsonl")
    parts = [INTRODUCTION, machine(output / RUN, metrics)]
    if not bits and not rows:
        return "\n\n".join(parts) + "\n"
    parts += ["## Before and after", bits_table(bits), rewards_table(rows)]
    parts += ["## What this shows", conclusion(bits, rows), LIMITS]
    parts += ["## Step by step", f"![{PLOTTED}]({CHART})", steps_table(metrics)]
    return "\n\n".join(parts) + "\n"


def read_bits(output: Path) -> dict[str, dict[str, Any]]:
    """Name -> what was measured; raises ``ConfigError`` where the texts differ."""
    found = [json.loads(path.read_bytes()) for path in sorted(output.glob("bits_*.json"))]
    if len({each["texts_sha256"] for each in found}) > 1:
        raise ConfigError(
            f"{output}: the bits per byte were measured on different texts; remove bits_*.json"
        )
    return {name: row for each in found for name, row in each["models"].items()}


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of the run's evaluations so far."""
    path = run_dir / "eval.json"
    rows: list[dict[str, Any]] = json.loads(path.read_bytes())["rows"] if path.exists() else []
    return rows


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON lines file; of a step that was done again, the last one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({record["step"]: record for record in map(json.loads, lines)}.values())


def machine(run_dir: Path, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Where the run was made, and how long it took."""
    path = run_dir / "environment.json"
    if not path.exists():
        return "The run has not been made yet."
    recorded = json.loads(path.read_bytes())
    packages = recorded["packages"]
    minutes = sum(m["seconds_step"] or 0.0 for m in metrics) / 60
    peak = max((m["peak_rss_bytes"] or 0 for m in metrics), default=0) / 2**30
    return (
        f"Machine: {recorded['machine']}, {recorded['num_cpus']} cores that other programs used\n"
        f"too, one thread, no accelerator; torch {packages['torch']}, transformers\n"
        f"{packages['transformers']}. {len(metrics)} steps took {minutes:.0f} minutes (without\n"
        f"evaluations, warm-up and loading), {peak:.1f} GiB of memory at most."
    )


def bits_table(bits: Mapping[str, Mapping[str, Any]]) -> str:
    """Bits per byte of the oracle's turns on the evaluation tasks."""
    rows = [
        [title, f"{bits[name]['bits_per_byte']:.3f}", str(bits[name]["num_tokens"])]
        for name, title in STAGES.items()
        if name in bits
    ]
    num_bytes = next((row["num_bytes"] for row in bits.values()), 0)
    head = (
        f"Bits per byte of the oracle's turns on the evaluation tasks ({num_bytes} bytes; fewer is "
        "better):"
    )
    return f"{head}\n\n{markdown_table(['model', 'bits per byte', 'tokens'], rows)}"


def rewards_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Evaluations of the run."""
    cells = [
        [
            f"{row['policy']}, {row['tag']}",
            f"{row['reward_mean']:.3f}",
            f"{row['pass_rate']:.2f} ({row['pass_low']:.2f} to {row['pass_high']:.2f})",
            f"{row['calls_per_episode']:.1f}",
            f"{row['num_episodes']}",
        ]
        for row in rows
    ]
    head = ["policy", "reward", "pass rate (95 % interval)", "calls", "episodes"]
    return f"Episodes on the evaluation tasks:\n\n{markdown_table(head, cells)}"


def conclusion(bits: Mapping[str, Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """What the numbers say, whatever they are."""
    lines = []
    if {WARM, TRAINED} <= bits.keys():
        before, after = (bits[name]["bits_per_byte"] for name in (WARM, TRAINED))
        lines.append(
            f"* Training {'lowered' if after < before else 'did not lower'} the student's bits per "
            f"byte on texts that it never saw: {before:.3f} after the warm-up, {after:.3f} at the "
            "end."
        )
    by_tag = {row["tag"]: row for row in rows if row["policy"] == "student"}
    if {"warm", "after"} <= by_tag.keys():
        lines.append(_reward_line(by_tag["warm"], by_tag["after"]))
    lines.append(
        "* Rollouts, alignment across tokenizers, the teacher's scores, update and publishing run "
        "together on real weights."
        if rows
        else "* Nothing yet: the run has not been made."
    )
    return "\n".join(lines)


def _reward_line(warm: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Whether the pass rate moved by more than the interval of the difference allows."""
    sides = [EvaluationRow.model_validate_json(json.dumps(row)) for row in (after, warm)]
    found = difference(*sides, WARM)
    how = "paired by task" if found.is_paired else "of two independent samples"
    if found.low > 0:
        verdict = "The pass rate rose"
    elif found.high < 0:
        verdict = "The pass rate fell"
    else:
        verdict = "No change of the pass rate is shown"
    return (
        f"* {verdict}: {warm['pass_rate']:.2f} after the warm-up, {after['pass_rate']:.2f} at the "
        f"end, {found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}] {how}, over "
        f"{after['num_tasks']} tasks: few, for an interval by task. Reward: "
        f"{warm['reward_mean']:.3f}, then {after['reward_mean']:.3f}."
    )


def chart(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Reward, pass rate and reverse KL of the training episodes."""

    def curve(name: str) -> list[float | None]:
        return [m.get(name) for m in metrics]

    distances = curve("reverse_kl_mean")
    high = max((value for value in distances if value is not None), default=1.0)
    panels = [
        Panel(
            "training episodes",
            [("reward", curve("reward_mean")), ("pass", curve("pass_rate"))],
            0,
            1,
        ),
        Panel("reverse KL, nats a token", [("student - teacher", distances)], 0, round(high, 1)),
    ]
    return step_chart([m["step"] for m in metrics], panels)


def steps_table(metrics: Sequence[Mapping[str, Any]]) -> str:
    """One row per step."""
    fields = {
        "reward_mean": ("reward", ".2f"),
        "pass_rate": ("pass", ".2f"),
        "reverse_kl_mean": ("reverse KL, nats", ".2f"),
        "opd_weight_abs_mean": ("OPD weight", ".2f"),
        "mismatch_mean_abs": ("mismatch", ".1e"),
        "num_loss_tokens": ("tokens", ".0f"),
        "seconds_take": ("take, s", ".0f"),
        "seconds_update": ("update, s", ".0f"),
    }
    rows = [
        [str(m["step"]), *(_shown(m.get(name), form) for name, (_, form) in fields.items())]
        for m in metrics
    ]
    return markdown_table(["step", *(title for title, _ in fields.values())], rows)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    main()

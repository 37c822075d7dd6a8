"""summary.md: a run on one page of Markdown; its parts also feed the HTML report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from miniverl_dist.observability.environment import without_paths
from miniverl_dist.observability.metrics import METRICS, NOT_A_NUMBER
from miniverl_dist.reporting.eval_tables import evaluation_tables
from miniverl_dist.reporting.evaluation import caveats
from miniverl_dist.reporting.run_compare import comparison
from miniverl_dist.reporting.run_data import RunData
from miniverl_dist.reporting.windows import (
    first_mean,
    is_number,
    last_mean,
    shown_fields,
    window_text,
)
from miniverl_dist.schemas.evaluation import EvaluationReport

_TRAINING_FIELDS: Final = (
    "pass_rate",
    "reward_mean",
    "reverse_kl_mean",
    "loss",
    "divergence_mean",
    "entropy_mean",
    "calls_per_trajectory",
    "response_tokens_mean",
    "tail_calls_mean",
    "mismatch_mean_abs",
    "grad_norm",
    "seconds_step",
)
_TOTALS: Final = (
    "num_trajectories",
    "rollout_tokens",
    "num_harness_faults",
    "teacher_dropped",
    "num_zero_variance_groups",
)
_LOSSES: Final = {"group_dropped": "group dropped", "teacher_refused": "teacher refused"}
NOTABLE_EVENTS: Final = frozenset(
    {
        "resumed",
        "replayed_step",
        "stopped",
        "run_failed",
        "alarm",
        "engine_mismatch",
        "baseline_failed",
        "evaluation_failed",
        "batch_empty",
        "engine_quarantined",
        "engine_lost",
        "engine_restarted",
        "student_lost",
        "student_rebuilt",
        "teacher_left_alone",
        "teacher_back",
        "teacher_context_short",
    }
)
_MAX_NOTABLE = 30


def markdown_summary(runs: Sequence[RunData]) -> str:
    """The page; a second run is a comparison and gets its own tables."""
    lines = [f"# {_plain(title(runs[0]))}"]
    for table in comparison(runs):
        lines += _section(f"## {_plain(table.title)}", _table(table.head, table.rows))
    for run in runs:
        if len(runs) > 1:
            lines += ["", f"# Run `{_plain(run.label)}`"]
        lines += [
            "",
            *_section("", [f"* {_plain(f'{label}: {text}')}" for label, text in identity(run)]),
        ]
        lines += _section("## Read this first", [f"* {_plain(text)}" for text in caveats(run)])
        if run.evaluation is not None:
            lines += _section("## Evaluation", _evaluation(run.evaluation))
        lines += _section("## Training", _table(training_head(run), training_rows(run)))
        lines += _section("## Totals", _table(("Field", "Sum over all steps"), total_rows(run)))
        lines += _section("## Notable events", _table(EVENT_HEAD, notable_events(run)))
        lines += _section(
            "## Missing or damaged", [f"* {_plain(without_paths(note))}" for note in run.notes]
        )
    return "\n".join(lines).rstrip() + "\n"


def title(run: RunData) -> str:
    """Name of the run, for a heading."""
    return f"Run {run.manifest.get('name') or run.label}"


def identity(run: RunData) -> list[tuple[str, str]]:
    """What the run is, as label and text."""
    manifest = run.manifest
    found = [("Status", _status(run))]
    labels = {"Objective": "objective", "On-policy": "policy_label", "Seed": "seed"}
    found += [(label, str(manifest[key])) for label, key in labels.items() if key in manifest]
    roles = manifest.get("roles")
    if isinstance(roles, Mapping):
        found += [
            (str(name).capitalize(), f"{role.get('kind')}, tokenizer {role.get('tokenizer')}")
            for name, role in roles.items()
            if isinstance(role, Mapping)
        ]
    if isinstance(manifest.get("config_digest"), str):
        found.append(("Config digest", manifest["config_digest"][:12]))
    return found


def _status(run: RunData) -> str:
    if run.is_evaluation:
        return f"evaluation, {run.status}, {run.num_played} episodes played, nothing is trained"
    return f"{run.status}, {len(run.metrics)} steps recorded"


def training_head(run: RunData) -> tuple[str, ...]:
    """Columns of ``training_rows``."""
    ends = (window_text(end, len(run.metrics)) for end in ("first", "last"))
    return ("Metric", *(text[0].upper() + text[1:] for text in ends), "Unit")


def training_rows(run: RunData) -> list[tuple[str, ...]]:
    """Means over the first and the last steps; what was not measured is left out."""
    return [
        (
            name,
            str(first_mean(run.metrics, name)),
            str(last_mean(run.metrics, name)),
            METRICS[name].unit_text,
        )
        for name in shown_fields(_TRAINING_FIELDS, run.metrics)
    ]


def total_rows(run: RunData) -> list[tuple[str, ...]]:
    """Sums over the run, dropped groups and refusals of the teacher by reason."""
    rows: list[tuple[str, ...]] = [
        (name, _total(run, name)) for name in shown_fields(_TOTALS, run.metrics)
    ]
    losses = Counter(
        f"{_LOSSES[str(event['event'])]}: {event.get('reason')}"
        for event in run.events
        if event.get("event") in _LOSSES
    )
    return rows + [(what, str(number)) for what, number in sorted(losses.items())]


EVENT_HEAD: Final = ("Event", "Details")


def notable_events(run: RunData) -> list[tuple[str, ...]]:
    """Events that a reader should know of, the newest ones if there are many."""
    rows: list[tuple[str, ...]] = []
    for event in run.events:
        name = str(event.get("event"))
        if name in NOTABLE_EVENTS:
            facts = {k: v for k, v in event.items() if k not in ("event", "time_s")}
            details = ", ".join(f"{key}: {value}" for key, value in facts.items())
            rows.append((name, without_paths(details)))
    left_out = len(rows) - _MAX_NOTABLE
    if left_out > 0:
        rows = [(f"{left_out} earlier ones", ""), *rows[left_out:]]
    return rows


def _evaluation(report: EvaluationReport) -> list[str]:
    lines: list[str] = []
    for table in evaluation_tables(report):
        lines += [*([""] if lines else []), f"### {table.title}", ""]
        lines += _table(table.head, table.rows)
    return lines


def _total(run: RunData, name: str) -> str:
    values = [record[name] for record in run.metrics if name in record]
    numbers = [value for value in values if is_number(value)]
    bad = len(values) - len(numbers)
    without = f" without {bad} steps that are {NOT_A_NUMBER}" if bad else ""
    return f"{sum(numbers):,.0f}{without}"


def _section(heading: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return [*(["", heading, ""] if heading else []), *lines]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines]


def _plain(text: str) -> str:
    """Text that Markdown neither takes as markup nor breaks a table over."""
    flat = " ".join(text.split())
    return flat.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")

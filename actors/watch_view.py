"""What `miniverl-dist watch` shows of a run: one frame, as wide as the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from actors.fitted_table import FittedTable
from actors.watch import RunView
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.metrics import NOT_A_NUMBER
from miniverl_dist.reporting.charts import PHASES
from miniverl_dist.reporting.windows import is_number, label, shown_fields

_TRENDS: Final = (
    "pass_rate",
    "reward_mean",
    "reverse_kl_mean",
    "opd_weight_abs_mean",
    "divergence_mean",
    "loss",
    "grad_norm",
    "entropy_mean",
    "clip_high_fraction",
    "mismatch_mean_abs",
    "policy_lag_max",
    "tail_calls_mean",
    "calls_per_trajectory",
    "response_tokens_mean",
    "teacher_dropped",
    "num_harness_faults",
    "seconds_step",
)
_ALARMS: Final = frozenset(
    {
        Event.ALARM,
        Event.ENGINE_MISMATCH,
        Event.RUN_FAILED,
        Event.BASELINE_FAILED,
        Event.EVALUATION_FAILED,
        Event.BATCH_EMPTY,
        Event.HARNESS_FAULT,
        Event.GROUP_DROPPED,
        Event.TEACHER_REFUSED,
        Event.TARGETS_REFUSED,
        Event.TEACHER_LEFT_ALONE,
        Event.ENGINE_LOST,
        Event.ENGINE_QUARANTINED,
        Event.STUDENT_LOST,
        Event.CHUNK_HALVED,
    }
)
_COLORS: Final = {
    "running": "green",
    "finished": "green",
    "stopped": "yellow",
    "silent": "yellow",
    "failed": "red",
}
_NUM_EVENTS: Final = 8
_BAR: Final = 30
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_MAX_DETAIL_CHARS: Final = 160


def frame(view: RunView, *, now_s: float) -> RenderableType:
    """One frame; parts without data are left out."""
    parts: list[RenderableType] = [*_head(view)]
    parts += [Text(f"damaged: {_plain(text)}", style="yellow") for text in view.problems]
    alarms = [event for event in view.events if event.get("event") in _ALARMS]
    others = [event for event in view.events if event.get("event") not in _ALARMS]
    # Alarms first: a low terminal cuts a frame at its foot.
    parts += _events("Alarms", alarms[-_NUM_EVENTS:], "red", now_s)
    for part in (_metrics(view), _phases(view), _evaluation(view)):
        if part is not None:
            parts += [Text(""), part]
    parts += _events("Events", others[-_NUM_EVENTS:], "", now_s)
    return Group(*parts)


def show_once(view: RunView, console: Console, *, now: Callable[[], float] = time.time) -> None:
    """Print one frame; needs no terminal."""
    console.print(frame(view, now_s=now()))


class LiveFrames:
    """Shows one frame in the place of the former one; on no terminal, one after the other."""

    def __init__(self, console: Console, *, now: Callable[[], float] = time.time) -> None:
        self._console, self._now = console, now
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> LiveFrames:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, view: RunView) -> None:
        """Replace the frame."""
        if self._console.is_terminal:
            self._live.update(frame(view, now_s=self._now()), refresh=True)
        else:
            show_once(view, self._console, now=self._now)


def sparkline(values: Sequence[object], width: int = _BAR) -> str:
    """The last ``width`` values as bars from their least to their greatest; a blank where none."""
    shown = [value if is_number(value) else None for value in values[-width:]]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(_LEVELS) - 1
    return "".join(
        " " if value is None else _LEVELS[round(top * (value - low) / span) if span else 0]
        for value in shown
    )


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _head(view: RunView) -> Iterator[Text]:
    line = Text(_plain(view.name), style="bold")
    line.append(f"  {_plain(view.status)}", style=_COLORS.get(view.status, ""))
    if view.is_evaluation:
        line.append("  evaluation, nothing is trained here")
    for key in ("objective", "policy_label"):
        if key in view.manifest:
            line.append(f"  {_plain(view.manifest[key])}", style="dim")
    yield line
    if view.status == "silent":
        yield Text("no byte was written for long: a long step, a stall, or a killed process")
    of = "" if view.num_steps is None else f" of {view.num_steps}"
    parts = [f"step {view.step}{of}"]
    if view.is_evaluation:
        parts = [f"{view.num_played} episodes played"]
    if view.num_steps:
        done = min(_BAR, round(_BAR * view.step / view.num_steps))
        parts.append("█" * done + "░" * (_BAR - done))
    if view.seconds_per_step is not None:
        parts.append(f"{duration(view.seconds_per_step)} a step")
    if view.eta_s is not None:
        parts.append(f"ETA {duration(view.eta_s)}")
    if view.age_s is not None:
        parts.append(f"last write {duration(view.age_s)} ago")
    yield Text("  ".join(parts))


def _metrics(view: RunView) -> FittedTable | None:
    """Fields that any of the steps measured; the last value is the last step's, whatever it is."""
    rows = []
    for name in shown_fields(_TRENDS, view.metrics):
        values = [record.get(name) for record in view.metrics]
        known = [value for value in values if is_number(value)]
        bad = sum(name in record and not is_number(record[name]) for record in view.metrics)
        ends = [f"{value:.4g}" for value in (min(known), max(known))] if known else ["-", "-"]
        last = _last(view.metrics[-1], name)
        rows.append((label(name), last, f"{bad} steps" if bad else "", *ends, sparkline(values)))
    head = ("", "last", NOT_A_NUMBER, "least", "greatest", "trend")
    table = FittedTable("Metrics", head, numeric=(1, 2, 3, 4), dispensable=(5, 3, 4, 2), rows=rows)
    return table if rows else None


def _last(record: Mapping[str, Any], name: str) -> str:
    if name not in record:
        return "-"
    return f"{record[name]:.4g}" if is_number(record[name]) else NOT_A_NUMBER


def _phases(view: RunView) -> FittedTable | None:
    last = view.metrics[-1] if view.metrics else {}
    found = {name: last[name] for name in PHASES if is_number(last.get(name))}
    total = sum(found.values())
    if total <= 0:
        return None
    rows = [
        (name, f"{seconds:.3g}", "█" * round(_BAR * seconds / total))
        for name, seconds in found.items()
    ]
    head = ("", "seconds", "share")
    return FittedTable("Time of the last step", head, numeric=(1,), dispensable=(2,), rows=rows)


def _evaluation(view: RunView) -> FittedTable | None:
    head = ("policy", "when", "T", "episodes", "pass rate", "95 %", "reward")
    rows = [
        (
            *(_plain(row.get(key, "?")) for key in ("policy", "tag", "tail_calls", "num_episodes")),
            _number(row.get("pass_rate")),
            " to ".join(_number(row.get(key)) for key in ("pass_low", "pass_high")),
            _number(row.get("reward_mean")),
        )
        for row in view.evaluation
    ]
    table = FittedTable("Evaluation", head, (2, 3, 4, 6), dispensable=(6, 3, 5, 2), rows=rows)
    return table if rows else None


def _events(
    title: str, events: Sequence[Mapping[str, Any]], style: str, now_s: float
) -> Iterator[Text]:
    """A heading and one line per event, none where there is none."""
    if events:
        yield Text("")
        yield Text(title, style="italic")
    for event in events:
        at = event.get("time_s")
        ago = f"{duration(max(0.0, now_s - at))} ago" if is_number(at) else "?"
        facts = {key: value for key, value in event.items() if key not in ("event", "time_s")}
        details = ", ".join(f"{key}: {_value(value)}" for key, value in facts.items())
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{ago:>16}  ", style="dim")
        line.append(f"{_plain(event.get('event', '?')):<20}", style=style)
        yield line.append(f"  {_cut(_plain(details))}")


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: object) -> str:
    return f"{value:.3f}" if is_number(value) else "?"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_DETAIL_CHARS else f"{text[: _MAX_DETAIL_CHARS - 1]}…"


def _plain(value: object) -> str:
    """One line without control characters: a model's words must not steer the terminal."""
    flat = " ".join(str(value).split())
    return "".join(character if character.isprintable() else "\ufffd" for character in flat)

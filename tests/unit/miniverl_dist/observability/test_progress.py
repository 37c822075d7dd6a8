from __future__ import annotations

import io
import json
import math

from rich.console import Console

from miniverl_dist.observability.progress import (
    JsonProgress,
    LineProgress,
    Progress,
    SilentProgress,
    TerminalProgress,
    progress_for,
    step_line,
)

STEP = {"step": 3, "pass_rate": 0.5, "reward_mean": math.nan, "seconds_step": 1.23, "loss": None}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(progress: Progress) -> None:
    progress.phase("warm-up", total=20)
    for _ in range(20):
        progress.advance(detail="loss 1")
    progress.phase("training [b]x[/b]")
    progress.step(STEP)
    progress.message("[red]done[/red]")
    progress.close()
    progress.close()


def test_lines_for_a_log() -> None:
    out = io.StringIO()
    work(progress_for(out))
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["warm-up (20)", "warm-up 2/20 loss 1"]
    assert len(lines) == 1 + 10 + 3
    told = "step 3  pass 0.50  reward not a number  s 1.2"
    assert lines[-2:] == [told, "[red]done[/red]"]


def test_what_was_lost_stands_in_the_line_of_its_step() -> None:
    lost = {"teacher_dropped": 3.0, "num_harness_faults": 1, "num_refilled_groups": 2}
    assert step_line(STEP | lost).endswith("s 1.2  unscored 3  faults 1  refilled 2")
    assert step_line(STEP | dict.fromkeys(lost, 0.0)) == step_line(STEP)


def test_what_was_not_measured_is_left_out() -> None:
    """No policy, no horizon, no lag: what a supervised step has is its loss."""
    step = {"step": 1, "loss": 0.5, "divergence_mean": 0.25, "num_target_rows": 9, "grad_norm": 2.0}
    assert step_line(step) == "step 1  loss 0.5000  divergence 0.2500  grad 2.00"
    assert step_line(step | {"loss": None}).startswith("step 1  loss not a number  ")
    assert step_line({"step": 1, "loss": 0.5, "entropy_mean": 0.0}) == "step 1  entropy 0.00"


def test_json_lines_are_json_whatever_the_numbers() -> None:
    out = io.StringIO()
    work(JsonProgress(out))
    JsonProgress(out).step({"step": 4, "loss_by_span_type": {"a": math.inf, "b": 1.0}})
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[0] == {"progress": "phase", "name": "warm-up", "total": 20}
    assert lines[1] == {"progress": "advance", "amount": 1, "detail": "loss 1"}
    assert lines[-3]["metrics"] == {**STEP, "reward_mean": None}
    assert lines[-2] == {"progress": "message", "text": "[red]done[/red]"}
    assert lines[-1]["metrics"]["loss_by_span_type"] == {"a": None, "b": 1.0}


def test_a_terminal_gets_a_bar_and_text_is_never_markup() -> None:
    out = Terminal()
    assert isinstance(progress_for(out), TerminalProgress)
    work(TerminalProgress(Console(file=out, force_terminal=True, width=100)))
    assert "[red]done[/red]" in out.getvalue()
    assert "warm-up" in out.getvalue()
    assert "step 3  pass 0.50" in out.getvalue()


def test_pipes_get_lines_and_silence_is_silent() -> None:
    assert isinstance(progress_for(io.StringIO()), LineProgress)
    work(SilentProgress())


def test_a_step_without_numbers() -> None:
    assert step_line({}) == "step ?"

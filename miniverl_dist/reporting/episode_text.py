"""One episode in a form that a person can read."""

from __future__ import annotations

from dataclasses import dataclass

from miniverl_dist.schemas.trajectory import Trajectory


@dataclass(frozen=True)
class Turn:
    """One message: who wrote it, and what."""

    author: str
    text: str


def turns(trajectory: Trajectory, *, max_chars: int | None = None) -> list[Turn]:
    """The messages in order; ``max_chars`` cuts each and says so."""
    sampled = {
        span.message_index for span in trajectory.sampled_spans if span.message_index is not None
    }
    found = []
    for index, message in enumerate(trajectory.messages):
        author: str = message.role
        if message.role == "assistant":
            author = "policy" if index in sampled else "script, not sampled"
        found.append(Turn(author, shortened(message.content, max_chars)))
    return found


def shortened(text: str, max_chars: int | None) -> str:
    """``text``, cut to ``max_chars`` with the number of characters left out."""
    if max_chars is None or len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n… ({len(text) - max_chars} more characters)"


def facts(trajectory: Trajectory) -> list[tuple[str, str]]:
    """The numbers of an episode, as label and text."""
    failed = sum(not success for success in trajectory.exec_successes)
    parts = ", ".join(f"{name} {value:.3f}" for name, value in trajectory.reward_parts.items())
    verdict = ", ".join(f"{name}: {_word(value)}" for name, value in trajectory.verdict.items())
    return [
        ("trajectory", trajectory.trajectory_id),
        ("task", trajectory.task_id),
        ("horizon", f"T = {trajectory.tail_calls} after {trajectory.prefix_calls} expert calls"),
        ("passed", _word(trajectory.passed)),
        ("reward", f"{trajectory.reward:.3f}" + (f" ({parts})" if parts else "")),
        ("verdict", verdict),
        ("ended by", trajectory.termination.value),
        ("calls", f"{len(trajectory.tool_calls)} attempted, {failed} failed"),
        ("tokens", f"{len(trajectory.token_ids)}, {sum(trajectory.loss_mask)} of them sampled"),
        ("policy version", str(trajectory.oldest_version)),
    ]


def episode_text(trajectory: Trajectory) -> str:
    """Facts, then the conversation, then the calls as they were parsed."""
    lines = [f"{label:<15}{text}" for label, text in facts(trajectory)]
    for turn in turns(trajectory):
        lines += ["", f"--- {turn.author} ---", turn.text]
    if trajectory.tool_calls:
        lines += ["", "--- calls of the policy, as parsed ---"]
    lines.extend(call_lines(trajectory))
    return "\n".join(lines)


def call_lines(trajectory: Trajectory) -> list[str]:
    """One line per attempted call: parse status, the call or the text, and whether it worked."""
    lines = []
    for parsed, success in zip(trajectory.tool_calls, trajectory.exec_successes, strict=True):
        if parsed.call is None:
            lines.append(f"{parsed.status.value}: {parsed.raw!r} ({parsed.error})")
            continue
        arguments = ", ".join(f"{name}={value!r}" for name, value in parsed.call.arguments.items())
        lines.append(f"{'ok' if success else 'failed'}: {parsed.call.name}({arguments})")
    return lines


def _word(value: bool | float | str | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else value

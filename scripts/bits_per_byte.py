"""How well models predict a fixed set of tool-call texts: bits per byte, on held-out tasks.

    python -m scripts.bits_per_byte CONFIG --output bits.json --model base=FOLDER --teacher

The texts are the oracle's episodes on the recipe's evaluation tasks, at every horizon; what counts
are the bytes of the assistant's turns, each predicted from all that stands before it. Bytes are
the measure that models with different tokenizers share:

    bits per byte = - sum of log2 p(token) / bytes of the tokens

Turn ends have no bytes, and a base model has none: they are left out for everyone. A student reads
the chat format it is trained in; the teacher reads what the recipe's rendering gives it, with and
without the solution where it is privileged.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from actors.student_side import WRITE_CALLS, StudentSide, student_side
from actors.teacher_side import Renderer
from miniverl_dist.alignment.spans import split_turn_end
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import HFModelConfig, TeacherConfig
from miniverl_dist.errors import ConfigError, MiniverlError
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.tokens.load import load_tokenizer
from rollout_server.traces import Trace, TraceMaker
from teacher_server.scorer import PrefillScorer, load_scorer

TRACE_SEED: Final = 20_000
"""Of the texts, whatever the run's seed is."""


@dataclass(frozen=True)
class Text:
    """A text, and the stretches of it that are scored; ``num_bytes`` is what these spell."""

    token_ids: tuple[int, ...]
    stretches: tuple[tuple[int, int], ...]
    num_bytes: int


@dataclass(frozen=True)
class Measured:
    """What one model makes of all texts."""

    bits_per_byte: float
    num_bytes: int
    num_tokens: int
    """Scored ones, of its own tokenizer."""


def main() -> None:
    """Measure and write; exit 2 with one message where that cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--teacher", action="store_true", help="measure the recipe's teacher too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        models = dict(_named(given) for given in arguments.model)
        found = measure(
            load_config(arguments.config).config, models, with_teacher=arguments.teacher
        )
    except MiniverlError as error:
        sys.exit(f"error: {error}")
    arguments.output.write_text(json.dumps(found, indent=2) + "\n")
    for name, row in found["models"].items():
        print(f"{name}: {row['bits_per_byte']:.3f} bits per byte")


def _named(given: str) -> tuple[str, Path]:
    name, separator, folder = given.partition("=")
    if not separator or not name:
        raise ConfigError(f"--model {given}: expected NAME=FOLDER")
    return name, Path(folder)


def measure(
    config: RunConfig, models: dict[str, Path], *, with_teacher: bool = False
) -> dict[str, Any]:
    """Bits per byte of every model on the same texts; JSON.

    Raises:
        ConfigError: a folder that holds no model, or a teacher that is not in this process.
    """
    side = student_side(config, load_tokenizer(config.student.tokenizer))
    traces = asyncio.run(held_out(side))
    found: dict[str, Measured] = {}
    for name, folder in models.items():
        found[name] = bits(load_scorer(folder), [student_text(t, side) for t in traces])
    if with_teacher:
        found |= teacher_bits(config, side, traces)
    return {
        "recipe": config.name,
        "tasks": list(side.eval_ids),
        "num_texts": len(traces),
        "texts_sha256": digest(traces),
        "models": {name: asdict(row) for name, row in found.items()},
    }


async def held_out(side: StudentSide) -> list[Trace]:
    """The oracle's episodes on the evaluation tasks, one at every horizon."""
    tasks = side.environment.tasks()
    longest = max(tasks[task_id].num_calls for task_id in side.eval_ids)
    maker = TraceMaker(side.stage, WRITE_CALLS, SystemClock(), seed=TRACE_SEED)
    return await maker.make(side.eval_ids, max_tail_calls=longest, per_task=1, noisy_fraction=0.0)


def digest(traces: Sequence[Trace]) -> str:
    """SHA-256 of all that was said, so that two measurements can be told to be of one set."""
    said = [[(m.role, m.content) for m in trace.trajectory.messages] for trace in traces]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def student_text(trace: Trace, side: StudentSide) -> Text:
    """The episode in the student's own ids."""
    ids, table = trace.trajectory.token_ids, side.tokenizer.byte_table
    stretches, num_bytes = [], 0
    for _, span in trace.written_spans:
        own, _ = split_turn_end(ids[span.start : span.end], side.chat.turn_end_id)
        stretches.append((span.start, span.start + len(own)))
        num_bytes += len(table.join(own))
    return Text(tuple(ids), tuple(stretches), num_bytes)


def teacher_bits(
    config: RunConfig, side: StudentSide, traces: Sequence[Trace]
) -> dict[str, Measured]:
    """The recipe's teacher, and the same without the solution where it is shown that.

    Raises:
        ConfigError: the recipe's teacher is none that this process can load.
    """
    teacher = config.teacher
    if teacher is None or not isinstance(teacher.model, HFModelConfig):
        raise ConfigError("--teacher: the recipe has no `teacher.model` of kind hf to measure")
    scorer = load_scorer(teacher.model.path, dtype=teacher.model.dtype)
    found = {}
    for mode in dict.fromkeys((teacher.mode, "standard")):
        shown = teacher.model_copy(update={"mode": mode})
        name = "teacher" if mode == "standard" else "teacher, shown the solution"
        found[name] = bits(scorer, list(_teacher_texts(shown, side, traces)))
    return found


def _teacher_texts(
    teacher: TeacherConfig, side: StudentSide, traces: Sequence[Trace]
) -> Iterator[Text]:
    tokenizer = load_tokenizer(teacher.tokenizer)
    renderer = Renderer(teacher, side, tokenizer)
    ends = renderer.turn_ends
    for trace in traces:
        rendering = renderer.render(trace.trajectory, every_written=True)
        stretches, num_bytes = [], 0
        for span in rendering.spans:
            ids = rendering.token_ids[span.start : span.end]
            own, _ = split_turn_end(ids, None if ends is None else ends[1])
            stretches.append((span.start, span.start + len(own)))
            num_bytes += len(tokenizer.byte_table.join(own))
        yield Text(rendering.token_ids, tuple(stretches), num_bytes)


def bits(scorer: PrefillScorer, texts: Sequence[Text]) -> Measured:
    """Score the stretches of every text.

    Raises:
        ConfigError: a text that the model cannot take, or a score that is no number.
    """
    total, num_tokens = 0.0, 0
    for text in texts:
        first = text.stretches[0][0]
        end = text.stretches[-1][1]
        scorer.check(text.token_ids[:end])
        logprobs = scorer.score(text.token_ids[:end], first)
        for start, stop in text.stretches:
            total -= float(logprobs[start - first : stop - first].sum())
            num_tokens += stop - start
    num_bytes = sum(text.num_bytes for text in texts)
    if not math.isfinite(total):
        raise ConfigError(f"{scorer.name}: the sum of its scores is {total}, expected a number")
    return Measured(total / math.log(2) / num_bytes, num_bytes, num_tokens)


if __name__ == "__main__":
    main()

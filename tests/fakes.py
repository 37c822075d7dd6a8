"""Fakes that implement the ports: a tiny world in which loop, workers and episodes can be tested.

What happens is written to one shared ``Log``, so that a test can ask in which order it happened.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import TokenizerError
from miniverl_dist.ports import (
    Assignment,
    Piece,
    PublishReceipt,
    ScoredGroup,
    ScoredTrajectory,
)
from miniverl_dist.schemas.batch import FloatArray, SftBatch, TrainBatch, UpdateResult
from miniverl_dist.schemas.messages import Message, ParsedCall, ParseStatus, ToolCall, ToolSchema
from miniverl_dist.schemas.teacher import (
    RefusalReason,
    SpanScore,
    TeacherRefusal,
    TeacherResult,
    TeacherScore,
)
from miniverl_dist.schemas.trajectory import (
    SamplingRecord,
    Span,
    SpanKind,
    Termination,
    Trajectory,
)
from miniverl_dist.tokens.byte_table import ByteTable

Log = list[str]


class FakeClock:
    """`ports.Clock` whose time moves only when told to (``sleep`` moves it at once)."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0)


class ByteTokenizer:
    """`TokenizerLike` over bytes and a few longer pieces, longest piece first."""

    def __init__(
        self,
        pieces: Sequence[bytes] = (),
        *,
        name: str = "bytes",
        specials: Sequence[str] = ("<|start|>", "<|end|>", "<|stop|>"),
    ) -> None:
        plain = [bytes([value]) for value in range(256)] + list(pieces)
        self.name = name
        self._ids = {piece: index for index, piece in enumerate(plain)}
        self._longest = max(map(len, plain))
        self._specials = {text: len(plain) + index for index, text in enumerate(specials)}
        self.byte_table = ByteTable.from_pieces(
            [*plain, *(text.encode() for text in specials)],
            [False] * len(plain) + [True] * len(specials),
        )
        self.vocab_size = len(plain) + len(specials)
        self.fingerprint = hashlib.sha256(repr((plain, specials)).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.encode_bytes(text.encode())

    def encode_bytes(self, data: bytes) -> list[int]:
        ids, position = [], 0
        while position < len(data):
            for length in range(min(self._longest, len(data) - position), 0, -1):
                found = self._ids.get(data[position : position + length])
                if found is not None:
                    ids.append(found)
                    position += length
                    break
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.byte_table.join(ids).decode("utf-8", "replace")

    def special_id(self, text: str) -> int:
        if text not in self._specials:
            raise TokenizerError(f"no special token {text!r}")
        return self._specials[text]


class PlainChat:
    """`ports.ChatFormat`: ``<|start|>u:hello<|end|>`` for every context message."""

    def __init__(self, tokenizer: ByteTokenizer | None = None) -> None:
        self.tokenizer = tokenizer or ByteTokenizer()
        self._start = self.tokenizer.special_id("<|start|>")
        self.turn_end_id = self.tokenizer.special_id("<|end|>")

    def _turn(self, text: str) -> tuple[int, ...]:
        return (self._start, *self.tokenizer.encode(text), self.turn_end_id)

    def system(self, tools: Sequence[ToolSchema]) -> Piece:
        names = ",".join(tool.name for tool in tools)
        return Piece(SpanKind.SYSTEM, self._turn(f"s:{names}") if tools else ())

    def user(self, content: str) -> Piece:
        return Piece(SpanKind.USER, self._turn(f"u:{content}"))

    def tool_results(self, contents: Sequence[str]) -> Piece:
        return Piece(SpanKind.TOOL_RESULT, self._turn("t:" + "|".join(contents)))

    def assistant_opening(self) -> Piece:
        return Piece(SpanKind.USER, (self._start, *self.tokenizer.encode("a:")))

    def assistant_closing(self) -> Piece:
        return Piece(SpanKind.USER, tuple(self.tokenizer.encode("\n")))

    def written(self, message: Message) -> Piece:
        kind = SpanKind.ASSISTANT_TOOL_CALL if message.tool_calls else SpanKind.ASSISTANT_TEXT
        return Piece(kind, (*self.tokenizer.encode(message.content), self.turn_end_id))


def ok_call(name: str, **arguments: object) -> ParsedCall:
    """A call that could be read."""
    call = ToolCall(name=name, arguments=arguments)
    return ParsedCall(status=ParseStatus.OK, call=call, raw=f"{name}({arguments})")


def trajectory(
    text: str = "hi",
    *,
    chat: PlainChat | None = None,
    place: Assignment | None = None,
    member: int = 0,
    group_id: str | None = None,
    reward: float = 0.0,
    passed: bool = False,
    logprob: float = -0.5,
    version: int = 0,
    termination: Termination = Termination.FINAL_ANSWER,
    calls: Sequence[ParsedCall] = (),
    context_after: str = "",
) -> Trajectory:
    """One user turn and one sampled turn; ``context_after`` adds a tool result behind it."""
    chat = chat or PlainChat()
    place = place or Assignment(ticket=0, task_id="a", prefix_calls=0, tail_calls=1)
    prompt = [*chat.user("go").token_ids, *chat.assistant_opening().token_ids]
    written = [*chat.tokenizer.encode(text), chat.turn_end_id]
    after = [*chat.tool_results([context_after]).token_ids] if context_after else []
    ends = np.cumsum([len(prompt), len(written), len(after)]).tolist()
    spans = [
        Span(kind=SpanKind.USER, start=0, end=ends[0], segment_key="user:0", message_index=0),
        Span(
            kind=SpanKind.ASSISTANT_TEXT,
            start=ends[0],
            end=ends[1],
            segment_key="assistant:0",
            sampled=True,
            message_index=1,
            weight_versions=(version,),
        ),
    ]
    messages = [Message(role="user", content="go"), Message(role="assistant", content=text)]
    if after:
        spans.append(
            Span(
                kind=SpanKind.TOOL_RESULT,
                start=ends[1],
                end=ends[2],
                segment_key="tool:0",
                message_index=2,
            )
        )
        messages.append(Message(role="tool", content=context_after))
    return Trajectory(
        trajectory_id=f"{group_id or place.group_id}.{member}",
        group_id=group_id or place.group_id,
        task_id=place.task_id,
        environment="fake",
        prefix_calls=place.prefix_calls,
        tail_calls=place.tail_calls,
        tokenizer_fingerprint=chat.tokenizer.fingerprint,
        token_ids=(*prompt, *written, *after),
        spans=tuple(spans),
        loss_mask=(False,) * len(prompt) + (True,) * len(written) + (False,) * len(after),
        rollout_logprobs=np.repeat(
            [np.nan, logprob, np.nan], [len(prompt), len(written), len(after)]
        ),
        messages=tuple(messages),
        tool_calls=tuple(calls),
        exec_successes=(True,) * len(calls),
        reward=reward,
        reward_parts={"mean_partial": reward},
        passed=passed,
        verdict={"state_only": passed, "official_per_turn": passed},
        termination=termination,
        sampling=SamplingRecord(temperature=1.0, max_new_tokens=16),
        seed=member,
        notes={"error": "broken"} if termination is Termination.ENGINE_ERROR else {},
    )


def at_version(told: Trajectory, version: int) -> Trajectory:
    """The same episode, sampled under another policy version."""
    spans = [
        span.model_copy(update={"weight_versions": (version,)}) if span.sampled else span
        for span in told.spans
    ]
    return told.model_copy(update={"spans": tuple(spans)})


def teacher_score(
    told: Trajectory,
    teacher: ByteTokenizer,
    logprob: float | Callable[[int], float] = -0.5,
    *,
    student: ByteTokenizer | None = None,
    version: int | None = None,
) -> TeacherScore:
    """Score every sampled span; ``logprob``: of all teacher tokens, or by index in the span."""
    table = (student or PlainChat().tokenizer).byte_table
    rate = logprob if callable(logprob) else lambda index: logprob
    spans = []
    for index, span in enumerate(told.spans):
        if not span.sampled:
            continue
        ids = teacher.encode_bytes(table.join(told.token_ids[span.start : span.end]))
        ends = [*teacher.byte_table.ends(ids).tolist()]
        ends.append((ends[-1] if ends else 0) + 1)
        ids.append(teacher.special_id("<|end|>"))
        spans.append(
            SpanScore(
                span_index=index,
                token_ids=tuple(ids),
                byte_ends=tuple(ends),
                logprobs=tuple(float(rate(i)) for i in range(len(ids))),
            )
        )
    return TeacherScore(
        trajectory_id=told.trajectory_id,
        teacher_id=teacher.name,
        tokenizer_fingerprint=teacher.fingerprint,
        policy_version=told.oldest_version if version is None else version,
        spans=tuple(spans),
        num_prefill_tokens=10,
        seconds=0.0,
    )


def group(
    place: Assignment, members: Sequence[Trajectory], *, num_publishes: int = 1
) -> ScoredGroup:
    """A group without teacher scores."""
    return ScoredGroup(
        assignment=place,
        members=tuple(ScoredTrajectory(trajectory=member) for member in members),
        num_publishes=num_publishes,
    )


@dataclass
class FakeTeacher:
    """`ports.TeacherScorer` in its own tokens."""

    log: Log = field(default_factory=list)
    teacher_id: str = "fake-teacher"
    refuse: Callable[[Trajectory], RefusalReason | None] = lambda told: None
    gate: asyncio.Event | None = None
    """Scoring waits for it."""
    tokenizer: ByteTokenizer = field(
        default_factory=lambda: ByteTokenizer((b"hi",), name="teacher")
    )

    async def score(self, told: Trajectory) -> TeacherResult:
        self.log.append(f"score {told.trajectory_id}")
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.log.append(f"score cancelled {told.trajectory_id}")
                raise
        reason = self.refuse(told)
        if reason is not None:
            return TeacherRefusal(
                trajectory_id=told.trajectory_id, reason=reason, detail="as the test asked"
            )
        return teacher_score(told, self.tokenizer)


class FakeRollouts:
    """`ports.RolloutSource`: rewards from a function of (assignment, member)."""

    def __init__(
        self,
        log: Log,
        version: Callable[[], int],
        play: Callable[[Assignment, int], Trajectory] | None = None,
    ) -> None:
        self.log, self._version, self._play = log, version, play
        self.gates: dict[tuple[int, int], asyncio.Event] = {}
        """(ticket, member) -> what the episode waits for."""

    async def rollout(self, assignment: Assignment, member: int) -> Trajectory:
        self.log.append(f"play {assignment.group_id}.{member}")
        gate, version = self.gates.get((assignment.ticket, member)), self._version()
        await (gate.wait() if gate is not None else asyncio.sleep(0))
        if self._play is not None:
            return at_version(self._play(assignment, member), version)
        return trajectory(
            place=assignment,
            member=member,
            reward=float(member),
            passed=bool(member),
            version=version,
            calls=[ok_call("f", x=member)],
        )


class FakeStudents:
    """`ports.StudentPool` with one weight, which follows from all batches so far in order."""

    def __init__(self, log: Log, *, num_optimizer_steps: int = 1) -> None:
        self.log = log
        self.policy_version = 0
        self.digest = "start"
        self.batches: list[TrainBatch] = []
        self._per_update = num_optimizer_steps

    async def update(self, batch: TrainBatch) -> UpdateResult:
        self.log.append("update")
        self.batches.append(batch)
        parts = [self.digest.encode(), batch.token_ids.tobytes(), batch.advantages.tobytes()]
        self.digest = hashlib.sha256(b"".join(parts)).hexdigest()
        self.policy_version += self._per_update
        return UpdateResult(self.policy_version, self._per_update, {"loss": 0.5})

    async def sft_update(self, batch: SftBatch, learning_rate: float) -> dict[str, float]:
        self.log.append("sft")
        self.digest = hashlib.sha256(self.digest.encode()).hexdigest()
        return {"loss": 1.0}

    async def finish_warmup(self) -> None:
        self.log.append("finish_warmup")

    async def logprobs(self, batch: TrainBatch) -> FloatArray:
        return np.zeros(len(batch.token_ids))

    async def save(self, directory: Path) -> None:
        self.log.append("save")
        state = json.dumps({"digest": self.digest, "version": self.policy_version})
        (directory / "student.json").write_text(state)

    async def load(self, directory: Path, policy_version: int) -> None:
        state = json.loads((directory / "student.json").read_text())
        assert state["version"] == policy_version
        self.digest, self.policy_version = state["digest"], policy_version

    async def rebuild(self) -> None:
        self.log.append("rebuild")
        self.digest, self.policy_version = "start", 0


class FakeWeightStore:
    """`ports.WeightStore`: one engine that confirms everything."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.versions: list[int] = []

    async def publish(self, policy_version: int) -> PublishReceipt:
        self.log.append(f"publish {policy_version}")
        self.versions.append(policy_version)
        return PublishReceipt(policy_version, "0" * 64, ("engine-0",))


class FakeCurriculum:
    """`ports.Curriculum`: tasks in turn; T is one more than the number of advances."""

    def __init__(self, log: Log | None = None, *, num_tasks: int = 5) -> None:
        self.log = [] if log is None else log
        self._num_tasks = num_tasks
        self.tail_calls = 1

    def assign(self, ticket: int) -> Assignment:
        self.log.append(f"assign {ticket}")
        return self._place(ticket, 0)

    def reassign(self, dropped: Assignment) -> Assignment:
        return self._place(dropped.ticket, dropped.attempt + 1)

    def _place(self, ticket: int, attempt: int) -> Assignment:
        return Assignment(
            ticket=ticket,
            attempt=attempt,
            task_id=f"task{(ticket + attempt) % self._num_tasks}",
            prefix_calls=9 - self.tail_calls,
            tail_calls=self.tail_calls,
        )

    def advance(self, groups: Sequence[ScoredGroup]) -> None:
        self.log.append("advance " + ",".join(str(g.assignment.ticket) for g in groups))
        self.tail_calls += 1

    def summary(self) -> dict[str, float]:
        return {"tail_calls_mean": float(self.tail_calls)}

    def state(self) -> dict[str, Any]:
        return {"tail_calls": self.tail_calls}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.tail_calls = state["tail_calls"]


def run_config(**changes: object) -> RunConfig:
    """A small recipe; ``changes`` are sections (mappings merge into the defaults here)."""
    base: dict[str, Any] = {
        "name": "fake",
        "objective": "grpo",
        "tasks": {"kind": "ids", "train": ["a"], "eval": ["a"]},
        "student": {},
        "loop": {"num_steps": 3, "num_groups": 2, "group_size": 2},
        "evaluation": {"before": False, "after": False, "baselines": []},
    }
    if changes.get("objective") in ("opd", "grpo_opd"):
        base |= {
            "opd": {"coef": 0.3},
            "teacher": {"url": "http://teacher", "rendering": "raw"},
        }
    for name, value in changes.items():
        is_section = isinstance(value, dict) and isinstance(base.get(name), dict)
        base[name] = base[name] | value if is_section else value
    return RunConfig.model_validate_json(json.dumps(base), strict=True)

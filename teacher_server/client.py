"""Two ways to ask the teacher: a scorer in this process, or a server of the ``/generate`` contract.

Both render a trajectory, ask once for all its sampled spans together, and turn whatever goes wrong
with the answer into a typed refusal: a score is what the teacher said, or it does not exist.

Shapes: R teacher tokens of one span, P tokens of the prefill.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import (
    ConfigError,
    DeadlineError,
    GenerateApiError,
    MalformedReplyError,
    NotFiniteError,
    ReplyMismatchError,
    RequestRejectedError,
    ServerUnavailableError,
    TeacherError,
    TokenizerMismatchError,
    UnspellableBytesError,
)
from miniverl_dist.generate_api.client import GenerateClient
from miniverl_dist.generate_api.probe import ProbeText, check_frozen
from miniverl_dist.generate_api.wire import checked_logprobs, version_key
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.ports import Clock
from miniverl_dist.schemas.teacher import (
    RefusalReason,
    SpanScore,
    TeacherRefusal,
    TeacherResult,
    TeacherScore,
)
from miniverl_dist.schemas.trajectory import Trajectory
from teacher_server.app import TextScorer
from teacher_server.prefix_scoring import KeptScores, first_unknown, with_known
from teacher_server.rendering import RenderedSpan, TeacherRendering

Renderer = Callable[[Trajectory], TeacherRendering]

_REASONS: tuple[tuple[type[Exception], RefusalReason], ...] = (
    (RequestRejectedError, RefusalReason.REJECTED),
    (NotFiniteError, RefusalReason.NOT_FINITE),
    (ServerUnavailableError, RefusalReason.UNAVAILABLE),
    (MalformedReplyError, RefusalReason.UNAVAILABLE),  # whatever answers is not the teacher
    (DeadlineError, RefusalReason.UNAVAILABLE),
)
_UNAUTHORIZED = frozenset({401, 403})
WAIT_PAUSE_S = 1.0
"""Between two rounds of retries under ``on_failure: wait``."""


@dataclass(frozen=True)
class TeacherIdentity:
    """Who scores; both go into every score."""

    teacher_id: str
    tokenizer_fingerprint: str
    tokenizer: str = "the teacher's tokenizer"
    """Its name, for messages."""


class _Teacher(ABC):
    """What both ways share; implements ``ports.TeacherScorer``."""

    def __init__(
        self,
        renderer: Renderer,
        identity: TeacherIdentity,
        *,
        max_prefill_tokens: int,
        deadline_s: float,
        clock: Clock | None,
    ) -> None:
        self._renderer = renderer
        self._identity = identity
        self._max_prefill_tokens = max_prefill_tokens
        self._deadline_s = deadline_s
        self._clock: Clock = clock or SystemClock()
        self._kept_scores: KeptScores | None = None
        self.num_kept_tokens = 0
        """Tokens of scored spans whose scores had been kept while their episodes ran."""
        self.refusals: Counter[RefusalReason] = Counter()
        """Trajectories that were not scored, by reason."""

    @property
    def teacher_id(self) -> str:
        """Name of the model that scores."""
        return self._identity.teacher_id

    async def score(self, trajectory: Trajectory) -> TeacherResult:
        """Score all sampled spans with one prefill, or refuse.

        Raises:
            RecordError, TokenizerMismatchError: the renderer cannot make sense of the trajectory.
        """
        result = await self._score(trajectory)
        if isinstance(result, TeacherRefusal):
            self.refusals[result.reason] += 1
        return result

    async def _score(self, trajectory: Trajectory) -> TeacherResult:
        started = self._clock.now()
        kept = self._kept_scores.take(trajectory.trajectory_id) if self._kept_scores else None
        try:
            rendering = self._renderer(trajectory)
        except UnspellableBytesError as exc:
            return _refusal(trajectory, RefusalReason.REJECTED, str(exc))
        scored = [span for span in rendering.spans if span.end > span.start]
        # What follows the last scored token changes no score.
        input_ids = rendering.token_ids[: max((span.end for span in scored), default=0)]
        if len(input_ids) > self._max_prefill_tokens:
            detail = f"{len(input_ids)} teacher tokens, the limit is {self._max_prefill_tokens}"
            return _refusal(trajectory, RefusalReason.TOO_LONG, detail)
        logprobs = with_known(input_ids, kept)
        first = first_unknown(scored, logprobs)
        self.num_kept_tokens += sum(
            int(np.isfinite(logprobs[span.start : span.end]).sum()) for span in scored
        )
        try:
            if first is not None:
                logprobs[first:] = await self._logprobs(input_ids, first, trajectory.group_id)
        except (GenerateApiError, DeadlineError) as exc:
            return _refusal(trajectory, _reason(exc), self._told(exc))
        return TeacherScore(
            trajectory_id=trajectory.trajectory_id,
            teacher_id=self._identity.teacher_id,
            tokenizer_fingerprint=self._identity.tokenizer_fingerprint,
            policy_version=trajectory.oldest_version,
            spans=tuple(_span_score(span, input_ids, logprobs) for span in rendering.spans),
            num_prefill_tokens=len(input_ids),
            seconds=self._clock.now() - started,
        )

    def _told(self, error: Exception) -> str:
        """The error in words, and what can be done about it."""
        return str(error)

    @abstractmethod
    async def _logprobs(
        self, input_ids: Sequence[int], first: int, group_id: str
    ) -> NDArray[np.float64]:
        """[P - first] checked nats of ``input_ids[first:]``; texts of a group share a prefix.

        Raises:
            GenerateApiError, DeadlineError: what becomes a refusal.
        """


class LocalTeacher(_Teacher):
    """Asks a scorer in this process.

    Args:
        scorer: called in a thread of its own, one text at a time.
        renderer: a trajectory in the teacher's tokens.
        identity: who scores.
        max_prefill_tokens: longer renderings are refused.
        deadline_s: for one score, the wait for those before it included.
        clock: for the seconds in scores.
    """

    def __init__(
        self,
        scorer: TextScorer,
        renderer: Renderer,
        identity: TeacherIdentity,
        *,
        max_prefill_tokens: int,
        deadline_s: float,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            renderer,
            identity,
            max_prefill_tokens=max_prefill_tokens,
            deadline_s=deadline_s,
            clock=clock,
        )
        self._scorer = scorer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="teacher")

    async def close(self) -> None:
        """End the scorer's thread."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def _logprobs(
        self, input_ids: Sequence[int], first: int, group_id: str
    ) -> NDArray[np.float64]:
        del group_id
        self._scorer.check(input_ids)
        work = asyncio.get_running_loop().run_in_executor(
            self._thread, self._scorer.score, input_ids, first
        )
        try:
            # Waits for the texts before it in the scorer's thread.
            async with asyncio.timeout(self._deadline_s):
                scores = await work
        except TimeoutError as exc:
            raise DeadlineError(f"the scorer took longer than {self._deadline_s:.3g} s") from exc
        if len(scores) != len(input_ids) - first:
            raise ReplyMismatchError(
                f"the scorer gave {len(scores)} logprobs, expected {len(input_ids) - first}"
            )
        return checked_logprobs(scores, first_position=first)


class HttpTeacher(_Teacher):
    """Asks a server of the ``/generate`` contract: ``teacher_server.app``, or SGLang.

    Args:
        client: holds deadlines per request, retries and the cap on tokens in flight.
        renderer: a trajectory in the teacher's tokens.
        identity: who scores.
        max_prefill_tokens: longer renderings are refused without asking.
        deadline_s: for one score, retries and the wait for a slot included.
        wait: ``on_failure: wait``: a teacher that is unavailable is asked again until the deadline,
            whatever the client's number of retries. Other refusals would repeat, and stand.
        clock: for deadlines, pauses and the seconds in scores.
        policy_version: of the weights that score, where these change (a student that teaches
            itself); prefixes cached under other weights are then not reused.
    """

    def __init__(
        self,
        client: GenerateClient,
        renderer: Renderer,
        identity: TeacherIdentity,
        *,
        max_prefill_tokens: int,
        deadline_s: float,
        wait: bool = False,
        clock: Clock | None = None,
        policy_version: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(
            renderer,
            identity,
            max_prefill_tokens=max_prefill_tokens,
            deadline_s=deadline_s,
            clock=clock,
        )
        self._client = client
        self._wait = wait
        self._policy_version = policy_version
        self.short_contexts: dict[str, int] = {}
        """Servers that take fewer tokens than ``max_prefill_tokens``, and how many, once they have
        been asked; longer texts are then refused without asking. SGLang does not say."""

    def reuse(self, kept_scores: KeptScores) -> None:
        """Ask only for what was not scored while the episode ran.

        Raises:
            ConfigError: the weights that score may change meanwhile.
        """
        if self._policy_version is not None:
            raise ConfigError(
                "scores are kept while an episode runs, but this teacher's weights change: turn "
                "teacher.prefix_scoring off"
            )
        self._kept_scores = kept_scores

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.close()

    async def require_same_tokenizer(self) -> None:
        """Ask every server whose ids it reads, and how many; SGLang does not say, and passes.

        Raises:
            TokenizerMismatchError: one reads those of another tokenizer.
            GenerateApiError: one does not answer.
        """
        expected, name = self._identity.tokenizer_fingerprint, self._identity.tokenizer
        for url, info in (await self._client.model_infos()).items():
            if info.tokenizer_fingerprint not in (None, expected):
                raise TokenizerMismatchError(
                    f"the teacher at {url} ({info.model_path}) reads ids of tokenizer "
                    f"{str(info.tokenizer_fingerprint)[:12]}, texts are rendered for {name} "
                    f"({expected[:12]}). A toy teacher reads only the ids of its own tasks: set "
                    "teacher.vocabulary to the file teacher-vocabulary.json of the run that fitted "
                    "it. For any other, set teacher.tokenizer to the server's"
                )
            if (limit := info.max_context_tokens) and limit < self._max_prefill_tokens:
                self.short_contexts[url] = limit
        self._max_prefill_tokens = min([self._max_prefill_tokens, *self.short_contexts.values()])

    async def require_stable_scores(self, text: ProbeText, *, tolerance: float) -> None:
        """Have every server score a short text twice: a teacher's weights do not change.

        Raises:
            TeacherError: two scores differ by more than ``tolerance`` nats.
            GenerateApiError, DeadlineError: there is no score.
        """
        problem = await check_frozen(
            self._client, text, tolerance=tolerance, deadline_s=self._deadline_s
        )
        if problem is not None:
            raise TeacherError(str(problem))

    def _told(self, error: Exception) -> str:
        if isinstance(error, ServerUnavailableError | DeadlineError):
            return f"{error} (teacher.deadline_s, teacher.max_retries, teacher.breaker)"
        return with_token_hint(error)

    async def _logprobs(
        self, input_ids: Sequence[int], first: int, group_id: str
    ) -> NDArray[np.float64]:
        deadline = self._clock.now() + self._deadline_s
        while True:
            try:
                return await self._ask(input_ids, first, group_id, deadline - self._clock.now())
            except (ServerUnavailableError, MalformedReplyError):
                if not self._wait or self._clock.now() + WAIT_PAUSE_S >= deadline:
                    raise
            # For the server to come back, or for its breaker to let somebody try.
            await self._clock.sleep(WAIT_PAUSE_S)

    async def _ask(
        self, input_ids: Sequence[int], first: int, group_id: str, time_left_s: float
    ) -> NDArray[np.float64]:
        extra_key = None if self._policy_version is None else version_key(self._policy_version())
        return await self._client.score(
            input_ids, first, extra_key=extra_key, deadline_s=time_left_s, key=group_id
        )


@contextmanager
def explained_at_start() -> Iterator[None]:
    """Questions to a server behind ``teacher.url`` before a run; their errors say what to do.

    Raises:
        RequestRejectedError: with a hint at the token where there was none, or a wrong one.
        ServerUnavailableError: nobody answers.
    """
    try:
        yield
    except RequestRejectedError as error:
        raise RequestRejectedError(with_token_hint(error), status=error.status) from error
    except (ServerUnavailableError, DeadlineError) as error:
        raise ServerUnavailableError(
            f"teacher.url: {error}. Start the teacher (`miniverl-dist serve teacher CONFIG` prints "
            "a line with its URL once it answers), then go on with `miniverl-dist resume RUN`"
        ) from error


def with_token_hint(error: Exception) -> str:
    """A refusal for want of a token names the field that it goes into."""
    if not isinstance(error, RequestRejectedError) or error.status not in _UNAUTHORIZED:
        return str(error)
    return (
        f"{error}; teacher.headers_file has to name a file with the line `Authorization: Bearer "
        "TOKEN`, TOKEN being the word in the server's token_file"
    )


def _span_score(
    span: RenderedSpan, input_ids: Sequence[int], logprobs: NDArray[np.float64]
) -> SpanScore:
    return SpanScore(
        span_index=span.span_index,
        token_ids=tuple(input_ids[span.start : span.end]),
        byte_ends=span.byte_ends,
        logprobs=tuple(logprobs[span.start : span.end].tolist()),
    )


def _reason(error: Exception) -> RefusalReason:
    """Everything else that breaks the contract is a reply that does not match its request."""
    found = (reason for kind, reason in _REASONS if isinstance(error, kind))
    return next(found, RefusalReason.MISMATCH)


def _refusal(trajectory: Trajectory, reason: RefusalReason, detail: str) -> TeacherRefusal:
    return TeacherRefusal(trajectory_id=trajectory.trajectory_id, reason=reason, detail=detail)

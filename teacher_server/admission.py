"""How many tokens may wait for the teacher at once, and when it is worth asking again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from miniverl_dist.errors import RequestRejectedError, ServerBusyError
from miniverl_dist.generate_api.wire import GenerateRequest

_NEWEST_WEIGHT = 0.3
"""Of the last batch in the measured speed; the rest is what was measured before."""


class TokenAdmission:
    """Admits requests while their prompts' tokens fit in the queue.

    Args:
        max_queued_tokens: Of all requests that wait or are at work.
        max_retry_after_s: Upper end of the estimate that a refusal carries.
    """

    def __init__(self, max_queued_tokens: int, *, max_retry_after_s: float = 60.0) -> None:
        self._capacity = max_queued_tokens
        self._max_retry_after_s = max_retry_after_s
        self._tokens_per_s: float | None = None
        self.num_tokens = 0
        """Admitted and not answered yet."""
        self.num_texts = 0

    @contextmanager
    def admit(self, prompts: Sequence[GenerateRequest]) -> Iterator[None]:
        """Hold the tokens of a request's prompts for the length of the block.

        Raises:
            ServerBusyError: they do not fit now; says when they may.
            RequestRejectedError: they never will, the queue is smaller (413).
        """
        num_tokens = sum(len(prompt.input_ids) for prompt in prompts if prompt.return_logprob)
        self._require_room(num_tokens)
        self.num_tokens += num_tokens
        self.num_texts += len(prompts)
        try:
            yield
        finally:
            self.num_tokens -= num_tokens
            self.num_texts -= len(prompts)

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Tell how long a batch of so many tokens, cached ones included, has taken."""
        speed = num_tokens / max(seconds, 1e-6)
        former = speed if self._tokens_per_s is None else self._tokens_per_s
        self._tokens_per_s = _NEWEST_WEIGHT * speed + (1 - _NEWEST_WEIGHT) * former

    def retry_after_s(self, num_tokens: int) -> int:
        """Whole seconds until ``num_tokens`` more should fit, at the measured speed; >= 1."""
        excess = self.num_tokens + num_tokens - self._capacity
        if self._tokens_per_s is None:
            return 1
        estimate = min(excess / self._tokens_per_s, self._max_retry_after_s)
        return max(1, math.ceil(estimate))

    def _require_room(self, num_tokens: int) -> None:
        if num_tokens > self._capacity:
            raise RequestRejectedError(
                f"the request has {num_tokens} tokens, the whole queue takes {self._capacity}: "
                "split the batch",
                status=413,
            )
        if self.num_tokens + num_tokens > self._capacity:
            raise ServerBusyError(
                f"{self.num_tokens} tokens are queued and {num_tokens} more exceed the limit of "
                f"{self._capacity}",
                retry_after_s=self.retry_after_s(num_tokens),
            )

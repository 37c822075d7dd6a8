"""What the teacher's server counts, in Prometheus' text form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

PREFIX = "miniverl_teacher_"
CONTENT_TYPE = "text/plain; version=0.0.4"
SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

COUNTERS = {
    "texts_total": "Texts scored.",
    "asked_tokens_total": "Tokens of the texts scored.",
    "cached_tokens_total": "Of these, tokens taken from a remembered prefix.",
    "prefilled_tokens_total": "Of these, tokens computed.",
    "padding_tokens_total": "Positions computed beside them to make texts equally long.",
    "batches_total": "Forward passes.",
    "scoring_seconds_total": "Seconds that the scoring thread was at work.",
}
GAUGES = {
    "queued_tokens": "Tokens admitted and not answered yet.",
    "queued_texts": "Texts admitted and not answered yet.",
    "kept_tokens": "Tokens of remembered prefixes.",
}


class ServiceMetrics:
    """Counters of one server.

    Args:
        gauges: One function for each of ``GAUGES``, asked when somebody looks.
    """

    def __init__(self, gauges: dict[str, Callable[[], float]]) -> None:
        self._gauges = gauges
        self._counts = dict.fromkeys(COUNTERS, 0.0)
        self._statuses: Counter[int] = Counter()
        self._in_bucket = [0] * (len(SECONDS_BUCKETS) + 1)
        self._seconds = 0.0

    def __getitem__(self, name: str) -> float:
        """The value of one of ``COUNTERS``."""
        return self._counts[name]

    def add(self, name: str, value: float) -> None:
        """Count up one of ``COUNTERS``; KeyError for another name."""
        self._counts[name] += value

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count an answer of ``/generate``; probes would hide them."""
        if path != "/generate":
            return
        self._statuses[status] += 1
        self._seconds += seconds
        self._in_bucket[sum(seconds > bound for bound in SECONDS_BUCKETS)] += 1

    def text(self) -> str:
        """All of it."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        for name, words in COUNTERS.items():
            yield from _family(name, "counter", words)
            yield f"{PREFIX}{name} {_number(self._counts[name])}"
        for name, words in GAUGES.items():
            yield from _family(name, "gauge", words)
            yield f"{PREFIX}{name} {_number(self._gauges[name]())}"
        yield from _family("requests_total", "counter", "Answers by status.")
        for status, count in sorted(self._statuses.items()):
            yield f'{PREFIX}requests_total{{status="{status}"}} {count}'
        yield from _family("request_seconds", "histogram", "From a request to its answer.")
        reached = 0
        for bound, count in zip(SECONDS_BUCKETS, self._in_bucket, strict=False):
            reached += count
            yield f'{PREFIX}request_seconds_bucket{{le="{bound:g}"}} {reached}'
        total = sum(self._in_bucket)
        yield f'{PREFIX}request_seconds_bucket{{le="+Inf"}} {total}'
        yield f"{PREFIX}request_seconds_sum {_number(self._seconds)}"
        yield f"{PREFIX}request_seconds_count {total}"


def _number(value: float) -> str:
    # All digits: a counter of many tokens must still move by one.
    return str(int(value)) if value == int(value) else repr(float(value))


def _family(name: str, kind: str, words: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {words}"
    yield f"# TYPE {PREFIX}{name} {kind}"

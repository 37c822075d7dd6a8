"""Prometheus' text form, read back by a parser of its grammar."""

from __future__ import annotations

import re

import pytest

from teacher_server.service_metrics import COUNTERS, GAUGES, PREFIX, ServiceMetrics

SAMPLE = re.compile(r'([a-z_]+)(\{[a-z]+="[^"]+"\})? (\S+)')


def samples(metrics: ServiceMetrics) -> dict[str, float]:
    found, declared = {}, set()
    for line in metrics.text().splitlines():
        if line.startswith("#"):
            assert re.fullmatch(rf"# (HELP|TYPE) {PREFIX}[a-z_]+ .+", line)
            declared.add(line.split()[2])
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert re.sub("_(bucket|sum|count)$", "", match[1]) in declared
        found[match[1].removeprefix(PREFIX) + (match[2] or "")] = float(match[3])
    return found


def metrics() -> ServiceMetrics:
    return ServiceMetrics({name: lambda: 2.5 for name in GAUGES})


def test_everything_declared_is_there_from_the_start() -> None:
    found = samples(metrics())
    assert {name: found[name] for name in COUNTERS} == dict.fromkeys(COUNTERS, 0)
    assert {name: found[name] for name in GAUGES} == dict.fromkeys(GAUGES, 2.5)
    with pytest.raises(KeyError):
        metrics().add("unheard_of", 1)


def test_large_counters_keep_every_digit() -> None:
    made = metrics()
    made.add("asked_tokens_total", 123_456_789_012)
    made.add("asked_tokens_total", 1)
    made.add("scoring_seconds_total", 0.1)
    assert samples(made)["asked_tokens_total"] == 123_456_789_013
    assert f"{PREFIX}scoring_seconds_total 0.1\n" in made.text()


def test_answers_are_counted_by_status_and_seconds_probes_are_not() -> None:
    made = metrics()
    for status, seconds in ((200, 0.02), (200, 0.1), (429, 0.001), (200, 1000.0)):
        made.answered("/generate", status, seconds)
    made.answered("/health", 200, 0.1)
    found = samples(made)
    assert found['requests_total{status="200"}'] == 3
    assert found['requests_total{status="429"}'] == 1
    assert found['request_seconds_bucket{le="0.01"}'] == 1
    assert found['request_seconds_bucket{le="0.03"}'] == 2
    assert found['request_seconds_bucket{le="0.1"}'] == 3
    assert found['request_seconds_bucket{le="100"}'] == 3
    assert found['request_seconds_bucket{le="+Inf"}'] == found["request_seconds_count"] == 4
    assert found["request_seconds_sum"] == pytest.approx(1000.121)

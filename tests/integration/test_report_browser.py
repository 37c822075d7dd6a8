"""The report in a real browser: what it draws, what it logs, what it asks the network for."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from miniverl_dist.observability.metrics import METRICS
from miniverl_dist.observability.run_dir import RecordFile, RunDirectory
from miniverl_dist.reporting.report import write_report
from miniverl_dist.schemas.token_analysis import TokenAnalysisLine
from miniverl_dist.schemas.trajectory import SpanKind
from tests.support.browser import Page, browser_path, open_page
from tests.support.sample_run import scored, trajectory, write_run

BROWSER = browser_path()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

READY = "document.body !== null && document.body.dataset.readyMs !== undefined"
HOSTILE = (
    '</pre></script><img src="http://evil.example/x" onerror="window.owned = 1"><script>owned=1'
)
NUM_STEPS = 10_000
MAX_BYTES = 8_000_000
MAX_CPU_S = 3.0
MIN_CONTRAST = 4.5
"""Of text against its ground. Source: WCAG 2.1, level AA."""


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    assert BROWSER is not None
    async with open_page(BROWSER, tmp_path / "profile") as page:
        yield page


def analysis(name: str) -> TokenAnalysisLine:
    """Of the three tokens of a sample trajectory: a unit of two, and one without."""
    return TokenAnalysisLine(
        step=1,
        trajectory_id=name,
        group_id="000001.0",
        positions=(6, 7, 8),
        token_ids=(6, 7, 8),
        kinds=(SpanKind.ASSISTANT_TOOL_CALL,) * 3,
        rollout_logprobs=(-0.5, -0.5, -0.5),
        advantages=(-0.75, 0.25, 0.5),
        units=(0, 0, None),
        unit_reverse_kl=(4.5,),
        opd_weights=(3.0, 3.0, None),
        is_stopped=(False, False, False),
    )


def hostile_run(folder: Path) -> Path:
    """Model text that tries to be markup, as a tool result, in a message, an id and an event."""
    run = write_run(folder)
    sample = trajectory("h-1", text=HOSTILE)
    result = sample.messages[-1].model_copy(update={"content": HOSTILE})
    sample = sample.model_copy(update={"messages": (*sample.messages[:-1], result)})
    with RunDirectory.open(run, writable=True) as writer:
        writer.append(RecordFile.TRAJECTORIES, scored(sample))
        writer.append(RecordFile.TOKEN_ANALYSIS, analysis("h-1"))
        reason = {"time_s": 1.0, "event": "group_dropped", "group_id": "g", "reason": HOSTILE[:39]}
        writer.append(RecordFile.EVENTS, reason)
        writer.append(RecordFile.EVENTS, {"time_s": 1.0, "event": "alarm", "what": HOSTILE})
    return run


async def test_charts_tokens_and_hover_without_a_network_or_an_error(
    page: Page, tmp_path: Path
) -> None:
    written = write_report(hostile_run(tmp_path))
    address = written.page.as_uri()
    await page.open(address, READY)
    titles = await page.evaluate("document.querySelectorAll('.charts > div').length")
    drawn = await page.evaluate("document.querySelectorAll('.js-plotly-plot .main-svg').length")
    assert titles >= 8
    assert drawn >= titles
    assert await page.evaluate("document.querySelectorAll('.token').length") == 0
    await page.evaluate("document.querySelectorAll('details.episode').forEach(d => d.open = true)")
    await page.evaluate("new Promise(done => setTimeout(done, 50))")
    assert await page.evaluate("document.querySelectorAll('.token').length") == 3
    shapes = await page.evaluate(
        "JSON.stringify([...document.querySelectorAll('.unit')].map(u => u.children.length))"
    )
    assert json.loads(shapes) == [2, 1]
    await page.point_at(".token")
    tip = await page.evaluate("document.getElementById('tip').innerText")
    for part in ("4.5 nats", "number 0, 2 tokens", "-0.75", "OPD weight", "3", "-5.5 nats"):
        assert part in tip
    assert await page.evaluate("window.owned") is None
    assert page.logs == []
    assert page.requests == [address]


async def test_colours_follow_the_choice_and_can_be_read(page: Page, tmp_path: Path) -> None:
    await page.open(write_report(hostile_run(tmp_path)).page.as_uri(), READY)
    await page.evaluate("document.querySelectorAll('details.episode').forEach(d => d.open = true)")
    await page.evaluate("new Promise(done => setTimeout(done, 50))")
    colors = (
        "JSON.stringify([...document.querySelectorAll('.token')].map(t =>"
        " getComputedStyle(t).backgroundColor))"
    )
    full, nothing = "rgb(179, 88, 6)", "rgba(0, 0, 0, 0)"
    assert json.loads(await page.evaluate(colors)) == [full, full, nothing]
    await page.evaluate(
        "(() => { const s = document.querySelector('.episode:has(.token) select');"
        " s.value = 'advantage'; s.dispatchEvent(new Event('change')); })()"
    )
    lowered, raised, most = json.loads(await page.evaluate(colors))
    assert lowered == full
    assert raised != most != nothing
    assert "pushed down" in await page.evaluate(
        "document.querySelector('.key').parentElement.innerText"
    )
    cells = json.loads(
        await page.evaluate(
            "JSON.stringify([...document.querySelectorAll('.scale span')].map(c =>"
            " [getComputedStyle(c).color, getComputedStyle(c).backgroundColor]))"
        )
    )
    assert len(cells) == 9
    assert min(contrast(*cell) for cell in cells) >= MIN_CONTRAST


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two ``rgb(...)`` colours. Source: WCAG 2.1."""
    dark, bright = sorted(map(luminance, (one, other)))
    return (bright + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    parts = [int(part) / 255 for part in color.removeprefix("rgb(").rstrip(")").split(",")]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


async def test_ten_thousand_steps_load_in_seconds(page: Page, tmp_path: Path) -> None:
    """CPU seconds of the page's main thread: on a busy machine a clock would measure others."""
    run = write_run(tmp_path)
    chance = random.Random(0)
    numbers = [name for name, metric in METRICS.items() if not metric.is_by_key]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, NUM_STEPS + 1):
            record = {name: chance.random() for name in numbers}
            kinds = {"assistant_text": chance.random(), "assistant_tool_call": chance.random()}
            record |= {"step": step, "num_trajectories": 64, "loss_by_span_type": kinds}  # type: ignore[dict-item]
            file.write(json.dumps(record) + "\n")
    with (run / "events.jsonl").open("a") as file:
        for step in range(1, NUM_STEPS + 1):
            refused = {"time_s": step, "event": "teacher_refused", "reason": "too_long"}
            finished = {"time_s": step, "event": "step_finished", "step": step}
            file.write(json.dumps(refused) + "\n" + json.dumps(finished) + "\n")
    written = write_report(run)
    assert written.page.stat().st_size < MAX_BYTES
    await page.call("Performance.enable", timeDomain="threadTicks")
    await page.open(written.page.as_uri(), READY)
    found = (await page.call("Performance.getMetrics"))["metrics"]
    seconds = next(metric["value"] for metric in found if metric["name"] == "ThreadTime")
    print(f"main thread {seconds:.2f} s, file {written.page.stat().st_size / 1e6:.2f} MB")
    assert seconds < MAX_CPU_S
    assert page.logs == []

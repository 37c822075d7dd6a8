"""A toy teacher's server as a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVER = ("-m", "teacher_server")
ONE_SHAPE_SERVER = (
    "-c",
    "import sys; from teacher_server import __main__, scorer; "
    "scorer.SMALLEST_BUCKET = 384; sys.exit(__main__.main(sys.argv[1:]))",
)
"""Texts of different lengths are padded to one: what they share then has the same bits."""


_GATED = """\
import pathlib, sys, time
from teacher_server.scorer import PrefillScorer
score_some = PrefillScorer.score_some
def gated(self, waiting):
    while not pathlib.Path({gate!r}).exists():
        time.sleep(0.01)
    return score_some(self, waiting)
PrefillScorer.score_some = gated
from {module} import main
"""


def gated(gate: Path, module: str, call: str) -> tuple[str, str]:
    """Arguments of an interpreter: a server that finishes no score before the file is there."""
    return "-c", _GATED.format(gate=str(gate), module=module) + f"sys.exit({call})"


@contextmanager
def toy_server(folder: Path, arguments: Sequence[str] = SERVER) -> Iterator[str]:
    """Serve a toy model's folder; yields the URL."""
    server = subprocess.Popen(
        [sys.executable, *arguments, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["url"]
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0

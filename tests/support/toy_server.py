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

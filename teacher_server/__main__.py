"""``python -m teacher_server MODEL_DIR``: score over HTTP until SIGTERM.

Once the server answers it prints one JSON line, ``{"url": ..., "port": ..., "model": ...}``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from miniverl_dist.config.problems import explain_in_line
from miniverl_dist.config.serve import LocalTeacherService
from miniverl_dist.errors import ConfigError, MiniverlError
from miniverl_dist.generate_api.app import LOOPBACK
from teacher_server.service import announcement, serve_local


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m teacher_server",
        description="Score texts over HTTP: SGLang's /generate with max_new_tokens 0.",
    )
    parser.add_argument("model_dir", type=Path, help="a toy model folder, or a Hugging Face one")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=0, help="0 picks a free port")
    parser.add_argument("--token-file", type=Path, help="asked of clients as a bearer token")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (toy: cpu only)")
    parser.add_argument("--num-threads", type=int, help="for torch; by default torch's choice")
    parser.add_argument("--shutdown-deadline-s", type=float, default=10.0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        asyncio.run(serve_local(_config(options), _announce))
    except (MiniverlError, OSError) as exc:  # a folder that is no model, a port that is taken
        sys.stderr.write(f"{exc}\n")
        return 2
    return 0


def _config(options: argparse.Namespace) -> LocalTeacherService:
    try:
        return LocalTeacherService(
            kind="local",
            name=options.model_dir.resolve().name,
            model=options.model_dir,
            dtype=options.dtype,
            device=options.device,
            num_threads=options.num_threads,
            host=options.host,
            port=options.port,
            token_file=options.token_file,
            drain_deadline_s=options.shutdown_deadline_s,
        )
    except ValidationError as exc:
        raise ConfigError(explain_in_line(exc, LocalTeacherService)) from None


def _announce(url: str, model: str) -> None:
    sys.stdout.write(announcement(url, model) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())

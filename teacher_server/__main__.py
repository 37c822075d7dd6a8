"""``python -m teacher_server MODEL_DIR``: score over HTTP until SIGTERM.

Once the server answers it prints one JSON line, ``{"url": ..., "port": ..., "model": ...}``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from miniverl_dist.errors import MiniverlError, MissingDependencyError
from miniverl_dist.generate_api.app import LOOPBACK, serve_until_signal
from teacher_server.app import TextScorer, build_teacher_app


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m teacher_server",
        description="Score texts over HTTP: SGLang's /generate with max_new_tokens 0.",
    )
    parser.add_argument("model_dir", type=Path, help="a toy model folder, or a Hugging Face one")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=0, help="0 picks a free port")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (toy: cpu only)")
    parser.add_argument("--num-threads", type=int, help="for torch; by default torch's choice")
    parser.add_argument("--shutdown-deadline-s", type=float, default=10.0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        scorer = _load(options)
        asyncio.run(
            serve_until_signal(
                build_teacher_app(scorer),
                host=options.host,
                port=options.port,
                shutdown_deadline_s=options.shutdown_deadline_s,
                announce=lambda url: _announce(url, scorer.name),
            )
        )
    except (MiniverlError, OSError) as exc:  # a folder that is no model, a port that is taken
        sys.stderr.write(f"{exc}\n")
        return 2
    return 0


def _load(options: argparse.Namespace) -> TextScorer:
    # Here, not at the top: a wrong command line should not wait for torch to be imported.
    try:
        from teacher_server.scorer import load_scorer, set_num_threads
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"scoring needs {error.name}: pip install 'miniverl-dist[local]'"
        ) from error

    if options.num_threads is not None:
        set_num_threads(options.num_threads)
    return load_scorer(options.model_dir, dtype=options.dtype, device=options.device)


def _announce(url: str, model: str) -> None:
    line = json.dumps({"url": url, "port": urlsplit(url).port, "model": model})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())

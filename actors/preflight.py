"""What is checked before a run directory is made or touched."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import MissingDependencyError

_INSTALL = {
    "torch": "pip install 'miniverl-dist[local]' (README: which torch)",
    "tokenizers": "pip install 'miniverl-dist[local]'",
    "bfcl_eval": "scripts/install_bfcl.sh",
    "megatron": "scripts/install_megatron.sh",
    "transformers": "pip install 'miniverl-dist[local]'",
    "ray": "pip install 'miniverl-dist[ray]'",
}


def require_local_packages(config: RunConfig) -> None:
    """Fail before anything is written when this process cannot do its part of the run.

    Raises:
        MissingDependencyError: names every missing package and the command that installs it.
    """
    missing = [name for name in _needed(config) if not _is_installed(name)]
    if missing:
        listed = "; ".join(f"{name}: {_INSTALL[name]}" for name in missing)
        raise MissingDependencyError(
            f"this command needs {', '.join(missing)}, which this environment lacks. {listed}"
        )


def _needed(config: RunConfig) -> Iterator[str]:
    yield from ("torch", "tokenizers", "bfcl_eval")
    if config.student.model.kind == "megatron":
        yield from ("megatron", "transformers")
    if config.runtime != "inprocess":
        yield "ray"


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None

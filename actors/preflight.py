"""What is checked before a run directory is made or touched."""

from __future__ import annotations

import importlib.util
import sys

from miniverl_dist.errors import MissingDependencyError

_NEEDED = {
    "torch": "pip install 'miniverl-dist[local]' (README: which torch)",
    "tokenizers": "pip install 'miniverl-dist[local]'",
    "bfcl_eval": "scripts/install_bfcl.sh",
}


def require_local_packages() -> None:
    """Fail before anything is written when the local loop cannot run.

    Raises:
        MissingDependencyError: names every missing package and the command that installs it.
    """
    missing = [name for name in _NEEDED if not _is_installed(name)]
    if missing:
        listed = "; ".join(f"{name}: {_NEEDED[name]}" for name in missing)
        raise MissingDependencyError(
            f"this command needs {', '.join(missing)}, which this environment lacks. {listed}"
        )


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None

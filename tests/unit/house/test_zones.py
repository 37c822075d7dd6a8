"""What may be imported where: measured on sys.modules in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("miniverl_dist", "rollout_server", "teacher_server", "actors")
TORCH_ZONE = (
    "miniverl_dist.objective",
    "miniverl_dist.backends",
    "miniverl_dist.lab.resident",
    "rollout_server.engines.toy",
    "rollout_server.engines.slots",
    "rollout_server.engines.hf",
    "rollout_server.engines.hf_check",
    "rollout_server.engines.hf_decoder",
    "rollout_server.engines.hf_routing",
    "rollout_server.engines.hf_weights",
    "rollout_server.engines.sglang_broadcast",
    "teacher_server.scorer",
    "teacher_server.scorer_batches",
    "teacher_server.scorer_hf",
    "teacher_server.scorer_hf_check",
    "actors.broadcast_group",
    "actors.builds",
    "actors.lab_builds",
    "actors.rollout_host",
    "actors.student_rank",
)
RAY_ZONE = (
    "actors.cluster",
    "actors.host",
    "actors.ray_calls",
    "actors.ray_session",
    "actors.weight_endpoints",
)
TORCH_FREE_BACKENDS = ("base", "megatron.architecture", "padding", "vocabulary", "weights_io")
"""What validation and planning need of the torch zone without torch."""
HEAVY = ("torch", "ray", "megatron", "sglang", "transformers", "bfcl_eval", "tokenizers")


def all_modules() -> list[str]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in found if not name.endswith("__main__")]


def in_zone(module: str, zones: tuple[str, ...]) -> bool:
    return any(module == zone or module.startswith(zone + ".") for zone in zones)


def imported_by(modules: list[str], *, prelude: str = "") -> dict[str, list[str]]:
    """Heavy packages in sys.modules after importing each module in one process, in order."""
    code = (
        f"{prelude}\n"
        "import importlib, json, sys\n"
        "heavy = sys.argv[2].split(',')\n"
        "seen, found = set(), {}\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(name)\n"
        "    new = {m.split('.')[0] for m in sys.modules} & set(heavy) - seen\n"
        "    found[name] = sorted(new)\n"
        "    seen |= new\n"
        "print(json.dumps(found))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps(modules), ",".join(HEAVY)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    loaded: dict[str, list[str]] = json.loads(result.stdout.splitlines()[-1])
    return loaded


def test_modules_outside_the_zones_load_nothing_heavy() -> None:
    free = [module for module in all_modules() if not in_zone(module, TORCH_ZONE + RAY_ZONE)]
    free += [f"miniverl_dist.backends.{name}" for name in TORCH_FREE_BACKENDS]
    assert len(free) > 50
    offenders = {module: heavy for module, heavy in imported_by(free).items() if heavy}
    assert offenders == {}


def test_torch_zone_loads_torch_but_no_runtime() -> None:
    wrappers = ("miniverl_dist.backends.megatron", "rollout_server.engines.hf")
    zone = [
        module
        for module in all_modules()
        if in_zone(module, TORCH_ZONE) and not module.startswith(wrappers)
    ]
    loaded = {name for heavy in imported_by(zone).values() for name in heavy}
    assert loaded == {"torch"}


def test_ray_zone_is_needed() -> None:
    """A module that no longer loads Ray has no place in its zone."""
    for module in RAY_ZONE:
        assert "ray" in imported_by([module])[module], module


def test_the_measurement_sees_a_heavy_import() -> None:
    found = imported_by(["miniverl_dist.errors"], prelude="import torch")
    assert found["miniverl_dist.errors"] == ["torch"]


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_ships_exactly_the_four_packages(package: str) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"{package}"' in text.split("[tool.hatch.build.targets.wheel]")[1].split("[")[1]

"""A real SGLang on the CPU: where it is installed, and engines over tiny models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from miniverl_dist.backends.megatron.architecture import read_architecture
from miniverl_dist.backends.vocabulary import Vocabulary
from miniverl_dist.config.recipe import SGLangEngineConfig
from rollout_server.engines.sglang import SGLangEngine
from rollout_server.engines.sglang_server import SGLangLaunch
from tests.support.engine_contract import Subject, Tensors
from tests.support.hf_models import tiny_architecture, write_hf_model

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
OVERLAY = ROOT / "tests" / "sglang" / "cpu_overlay"
IDS = tuple(range(10, 10 + 7 * 290, 7))
"""290 real ids with gaps: rows and ids never coincide, and the server pads 30 rows more."""
CONTEXT = 200


def sglang_python() -> Path:
    """Interpreter of the environment that scripts/install_sglang.sh makes; skips without one."""
    python = ROOT / os.environ.get("SGLANG_VENV", ".venv-sglang") / "bin" / "python"
    if not python.exists():
        pytest.skip("SGLang is not installed here: scripts/install_sglang.sh (make test-sglang)")
    return python


def sglang_config(**changes: Any) -> SGLangEngineConfig:
    """For a CPU without AMX; the threads of two servers must share a few cores."""
    values: dict[str, Any] = {
        "kind": "sglang",
        "python": sglang_python(),
        "device": "cpu",
        "attention_backend": "torch_native",
        "max_total_tokens": 4000,
        "max_running_requests": 16,
        "bucket_bytes": 64 * 1024,
        "extra_env": {"PYTHONPATH": str(OVERLAY), "OMP_NUM_THREADS": "1"},
    }
    return SGLangEngineConfig.model_validate(values | changes)


class TinyModels:
    """Models of one architecture by seed, made and run by transformers."""

    def __init__(self, directory: Path, model_type: str) -> None:
        self._directory = directory
        self._arch = tiny_architecture(model_type, len(IDS))
        self.vocabulary = Vocabulary(IDS)
        self._models: dict[int, Any] = {}

    def folder(self, seed: int) -> Path:
        folder = self._directory / f"seed-{seed}"
        return folder if folder.exists() else write_hf_model(self._arch, folder, seed)

    def tensors(self, seed: int) -> Tensors:
        return dict(load_file(self.folder(seed) / "model.safetensors"))

    def logits(self, seed: int, ids: Sequence[int]) -> NDArray[np.float32]:
        """[T, V]: the whole text in one pass, no cache, no company."""
        with torch.no_grad():
            logits = self._plain(seed)(torch.from_numpy(self.vocabulary.rows(ids))[None]).logits[0]
        found: NDArray[np.float32] = logits.float().numpy()
        return found

    def _plain(self, seed: int) -> Any:
        if seed not in self._models:
            self._models[seed] = AutoModelForCausalLM.from_pretrained(self.folder(seed)).eval()
        return self._models[seed]

    def launch(self, work_dir: Path, **changes: Any) -> SGLangLaunch:
        returns_experts = read_architecture(self.folder(0) / "config.json").experts is not None
        return SGLangLaunch(
            sglang_config(**changes),
            self.folder(0) / "config.json",
            work_dir,
            CONTEXT,
            "float32",
            returns_experts,
        )

    def engine(self, work_dir: Path, name: str, **changes: Any) -> SGLangEngine:
        launch = self.launch(work_dir, **changes)
        return SGLangEngine(launch, self.vocabulary, name=name, request_deadline_s=60.0)

    def subject(self, engine: SGLangEngine) -> Subject:
        return Subject(
            engine,
            self.tensors,
            self.logits,
            IDS,
            CONTEXT,
            tolerance=2e-5,
            is_running=lambda: engine.num_running > 0,
        )

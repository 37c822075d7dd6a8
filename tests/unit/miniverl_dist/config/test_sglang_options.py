"""Options of SGLang that may not be given beside the fields of a config."""

from __future__ import annotations

from typing import Any

import pytest

from miniverl_dist.config.recipe import SGLangEngineConfig
from miniverl_dist.config.serve import SglangLaunch
from rollout_server.engines.sglang_server import FIXED_ENV

BOTH = (
    "host",
    "hos",
    "port",
    "por",
    "model",
    "model-path",
    "api-key",
    "api-ke",
    "admin-api-key",
    "config",
    "conf",
    "tp",
    "tp-size",
    "tensor-parallel-size",
    "tensor-par",
    "dp-s",
    "data-parallel-size",
    "dtype",
    "device",
    "context-length",
    "max-total-tokens",
    "mem-fraction-static",
    "served-model-name",
    "ssl-certfile",
    "ssl-keyfile-password",
    "fastapi-root-path",
    "grpc-mode",
    "context_length",
)
ENGINE_ONLY = (
    "json-model-override-args",
    "json",
    "load-format",
    "kv-cache-dtype",
    "quantization",
    "quantiz",
    "sampling-defaults",
    "weight-version",
    "preferred-sampling-params",
    "skip-tokenizer-init",
    "attention-backend",
    "speculative-algorithm",
    "spec",
    "lora-paths",
    "enable-lora",
    "enable-watermark",
    "allow-auto-truncate",
    "forward-hooks",
    "pp-size",
    "tokenizer-path",
    "disaggregation-mode",
)
TEACHER_ONLY = ("ep", "ep-size", "expert-parallel-size", "chunked-prefill-size", "enable-metrics")


def engine(*arguments: str, **changes: Any) -> SGLangEngineConfig:
    return SGLangEngineConfig(kind="sglang", extra_args=arguments, **changes)


@pytest.mark.parametrize("name", [*BOTH, *ENGINE_ONLY])
def test_an_engine_is_what_the_trainer_takes_it_for(name: str) -> None:
    for arguments in ((f"--{name}", "1"), (f"--{name}=1",), ("--log-level", "info", f"--{name}")):
        with pytest.raises(ValueError, match=r"extra_args: .* is set by the engine itself"):
            engine(*arguments)


@pytest.mark.parametrize("name", [*BOTH, *TEACHER_ONLY])
def test_a_teachers_fields_have_no_side_door(name: str) -> None:
    for given in (name, f"--{name}", f"-{name}"):
        with pytest.raises(ValueError, match=r"extra_args: .* has a field of its own"):
            SglangLaunch(model="m", extra_args={given: "1"})


def test_the_rest_is_free() -> None:
    arguments = (
        *("--log-level", "info", "--watchdog-timeout", "300", "--random-seed", "-1"),
        *("--disable-cuda-graph", "--page-size=64", "--enable-deterministic-inference"),
        *("--decode-attention-backend", "triton", "--schedule-conservativeness", "-.5"),
    )
    assert engine(*arguments).extra_args == arguments
    options = {"kv-cache-dtype": "fp8_e4m3", "quantization": "fp8", "attention-backend": "triton"}
    assert SglangLaunch(model="m", extra_args=options | {"page-size": 64}).extra_args


def test_variables_that_the_engine_sets_are_refused() -> None:
    for name in FIXED_ENV:
        with pytest.raises(ValueError, match=f"extra_env: {name} is set by the engine itself"):
            engine(extra_env={name: "1"})
    assert engine(extra_env={"NCCL_DEBUG": "INFO"}).extra_env == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_total_tokens": 1}, "greater than or equal to 256"),
        ({"attention_backend": ""}, "at least 1 character"),
        ({"device": "cpu"}, "max_total_tokens is missing"),
    ],
)
def test_an_engine_that_could_not_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**changes)

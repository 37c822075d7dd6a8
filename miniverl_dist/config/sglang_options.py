"""Options of ``sglang.launch_server`` that a config may not give by the side door.

Source: the options of SGLang 0.5.23. Its parser takes every option by any unique beginning of its
name (``--hos`` for ``--host``), and the last one given wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_ADDRESS = frozenset(
    {
        "enable-http2",
        "fastapi-root-path",
        "grpc-mode",
        "grpc-port",
        "host",
        "port",
        "smg-grpc-mode",
        "ssl-",
        "use-ray",
    }
)
"""Where and in which protocol it answers."""
_SECRET = frozenset({"admin-api-key", "api-key", "config"})
"""Shown in the process list, or a file that may name every other option."""
_SIZES = frozenset(
    {
        "context-length",
        "device",
        "dtype",
        "max-running-requests",
        "max-total-tokens",
        "mem-fraction-static",
        "model",
        "model-path",
        "served-model-name",
        "tensor-parallel-size",
        "tp-size",
    }
)
"""Fields of both configs, under every name."""
TEACHER_OPTIONS = (
    _ADDRESS
    | _SECRET
    | _SIZES
    | {
        "chunked-prefill-size",
        "data-parallel-size",
        "dp-size",
        "enable-metrics",
        "ep",
        "ep-size",
        "expert-parallel-size",
        "max-queued-requests",
    }
)
"""Refused in ``SglangLaunch.extra_args``; a name with a dash at its end stands for a family."""
ENGINE_OPTIONS = (
    _ADDRESS
    | _SECRET
    | _SIZES
    | {
        "allow-auto-truncate",
        "attention-backend",
        "custom-weight-loader",
        "data-parallel-size",
        "decrypted-",
        "disaggregation-",
        "dist-init-addr",
        "dllm-",
        "dp-size",
        "elastic-ep-",
        "enable-lora",
        "enable-memory-saver",
        "enable-return-routed-experts",
        "enable-watermark",
        "encoder-",
        "forward-hooks",
        "gated-launch-port",
        "is-embedding",
        "json-model-override-args",
        "kt-",
        "kv-cache-dtype",
        "language-",
        "load-format",
        "lora-",
        "modelopt-",
        "model-loader-extra-config",
        "nccl-init-addr",
        "nnodes",
        "node-rank",
        "pipeline-parallel-size",
        "pp-size",
        "preferred-sampling-params",
        "prefill-kv-cache-dequant-dtype",
        "prefill-only-disable-kv-cache",
        "quantization",
        "quantization-param-path",
        "quantize-and-serve",
        "revision",
        "rl-quant-profile",
        "sampling-defaults",
        "sampling-mask-max-tokens",
        "skip-tokenizer-init",
        "speculative-",
        "tokenizer-path",
        "uno-lora-path",
        "watermark-config",
        "weight-version",
    }
)
"""Refused in ``SGLangEngineConfig.extra_args``: what the wrapper sets itself, and whatever else
would make the server's model or its sampling another one than the trainer's."""
ENGINE_VARIABLES = frozenset(
    {
        "HF_HUB_OFFLINE",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
    }
)
"""Set by ``rollout_server.engines.sglang_server``, whatever this process's environment says."""


def refused_options(arguments: Iterable[str], refused: Iterable[str]) -> list[str]:
    """Those of the option names that are, abbreviate or belong to something refused.

    Args:
        arguments: ``--name``, ``--name=value`` or ``name``.
        refused: names without dashes in front; one that ends with a dash stands for a family.
    """
    refused = frozenset(refused)
    found = []
    for argument in arguments:
        name = argument.lstrip("-").partition("=")[0].replace("_", "-")
        if any(
            option.startswith(name) or (option.endswith("-") and name.startswith(option))
            for option in refused
        ):
            found.append(name)
    return sorted(found)


def option_names(command_line: Iterable[str]) -> list[str]:
    """The words of a command line that are options and no values; -1 and -0.5 are numbers."""
    return [word for word in command_line if re.match(r"-(?!\.?\d)", word)]

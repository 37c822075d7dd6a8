"""What of a transformers model may be relied on: its logits, its device, and reused prefixes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from miniverl_dist.errors import ConfigError

REUSING_TYPES = frozenset(
    {
        "deepseek_v3",
        "gemma",
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "stablelm",
    }
)
"""Model types with a test that texts computed together or behind a prefix score as they do alone.
No probe can tell in general: a window or a switch of frequencies may begin behind any probe."""
_FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Their frequencies are the same whatever the length of a text. Longrope has two sets, for short
texts and for long ones: what a short text leaves behind is of no use to a long one."""
_INSTEAD = "serve the model with SGLang instead"
_GAINS = (1.0, 1024.0)
"""On hidden states: a cap hardly bends small logits, and bends enlarged ones in any case."""
_TOLERANCES = {torch.float32: 1e-4}
_ROUGH_TOLERANCE = 2e-2
"""Relative to the largest logit; what bfloat16 may differ by between two orders of summation."""
_PROBE_TOKENS = 8

Project = Callable[[torch.Tensor], torch.Tensor]


def tolerance(dtype: torch.dtype) -> float:
    """What two orders of summation may differ by, relative to the largest value."""
    return _TOLERANCES.get(dtype, _ROUGH_TOLERANCE)


def checked_device(name: str) -> torch.device:
    """The device.

    Raises:
        ConfigError: there is no such device here.
    """
    parts = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if parts is None:
        raise ConfigError(f"device {name!r}: expected cpu, cuda, or cuda:1 and the like")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name != "cpu" and int(parts[1] or 0) >= num_gpus:
        raise ConfigError(f"device {name!r}: torch finds {num_gpus} CUDA devices on this machine")
    return torch.device(name)


def require_uncapped(config: Any) -> None:  # noqa: ANN401 - transformers is optional and untyped
    """Refuse a config that names a cap on logits; one on attention is the model's own business.

    Raises:
        ConfigError: names the key.
    """
    for key, value in config.to_dict().items():
        if "cap" in key and "logit" in key and not key.startswith("att") and value:
            raise ConfigError(
                f"{config.model_type} caps its logits ({key}), which this scorer does not do; "
                f"{_INSTEAD}"
            )


@torch.inference_mode()
def require_plain_logits(
    model: Any,  # noqa: ANN401 - transformers is optional and untyped
    project: Project,
    max_tokens: int,
) -> int:
    """Compare logits of the model with its output projection of its last hidden states.

    Args:
        model: the whole of it.
        project: [n, H] -> [n, V].
        max_tokens: of a probe.

    Returns:
        V.

    Raises:
        ConfigError: they differ: a cap, a scale, another norm.
    """
    size = model.get_input_embeddings().num_embeddings
    count = min(_PROBE_TOKENS, size, max_tokens)
    ids = torch.linspace(0, size - 1, count, device=model.device).long()[None]
    num_rows = 0
    for gain in _GAINS:
        expected, states = _logits_with_gain(model, ids, gain)
        found = project(states).float()
        num_rows = found.shape[-1]
        difference = float((found - expected).abs().max() / expected.abs().max())
        if not difference <= tolerance(model.dtype):
            raise ConfigError(
                f"{model.config.model_type}: its logits differ from its output projection of its "
                f"last hidden states (by {difference:.3g} of the largest logit), so this scorer "
                f"cannot compute them; {_INSTEAD}"
            )
    return num_rows


def _logits_with_gain(
    model: Any,  # noqa: ANN401
    ids: torch.Tensor,
    gain: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, V] of the model's own making from the states that come with it, [n, H]."""
    states: list[torch.Tensor] = []

    def amplify(body: object, arguments: object, output: Any) -> Any:  # noqa: ANN401
        del body, arguments
        output.last_hidden_state = output.last_hidden_state * gain
        states.append(output.last_hidden_state[0])
        return output

    hook = model.base_model.register_forward_hook(amplify)
    try:
        return model(input_ids=ids, use_cache=False).logits[0].float(), states[-1]
    finally:
        hook.remove()


def why_not_reused(config: Any) -> str | None:  # noqa: ANN401
    """Why texts of this model are scored one at a time and whole; None where they need not be."""
    if config.model_type not in REUSING_TYPES:
        return f"nobody has checked {config.model_type}"
    fields = config.to_dict()
    if odd := set(fields.get("layer_types") or ()) - {"full_attention"}:
        return f"layers of type {', '.join(sorted(odd))}"
    if odd := set(_rope_types(fields)) - _FIXED_ROPES:
        return f"rotary embeddings that depend on the length of a text ({', '.join(sorted(odd))})"
    return None


def _rope_types(fields: Mapping[str, Any]) -> Iterator[str]:
    """Of all layers; their place in a config has changed over the versions of transformers."""
    for key, value in fields.items():
        if key in {"rope_parameters", "rope_scaling"} and isinstance(value, dict):
            for inner in (value, *(each for each in value.values() if isinstance(each, dict))):
                if found := inner.get("rope_type", inner.get("type")):
                    yield str(found)

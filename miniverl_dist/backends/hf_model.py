"""A transformers causal LM as something to train: hidden states, output projection, named weights.

Shapes: B sequences, L padded length, H hidden size, V rows of the output projection.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from miniverl_dist.backends.hf_adapters import LoraAdapters
from miniverl_dist.backends.hf_skeleton import UNLOADABLE, first_sentence
from miniverl_dist.config.roles import HFStudentConfig
from miniverl_dist.errors import BatchError, ConfigError, MissingDependencyError, install_hint

Named = Mapping[str, Tensor]
_PROBE_TOKENS = 8
_PROBE_TOLERANCE = 2e-2
"""Relative to the largest logit; what bfloat16 may differ by between two orders of summation."""
_NOT_ARCHITECTURE = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "quantization_config"}
)


def device_of(config: HFStudentConfig) -> torch.device:
    """The device that a recipe asks for, once it is known that it can do what is asked of it.

    Raises:
        ConfigError: there is no GPU, but one is needed.
        MissingDependencyError: quantisation without its packages.
    """
    has_gpu = torch.cuda.is_available()
    if not has_gpu and (config.device == "cuda" or config.quantization != "none"):
        asked = "device cuda" if config.quantization == "none" else config.quantization
        raise ConfigError(
            f"student.model asks for {asked}, which needs a GPU, and torch sees none here: use "
            "device: cpu and quantization: none, or run it where there is one"
        )
    for package in ("bitsandbytes", "accelerate") if config.quantization != "none" else ():
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"student.model.quantization {config.quantization} needs {package}: "
                f"pip install {package}"
            )
    return torch.device("cuda" if has_gpu and config.device != "cpu" else "cpu")


def load_module(config: HFStudentConfig) -> Any:  # noqa: ANN401 - untyped library
    """The folder's model on its device, in evaluation mode; nothing is downloaded or executed.

    Raises:
        MissingDependencyError: transformers is not installed, or what quantisation needs.
        ConfigError: the folder holds no causal LM with complete safetensors weights, or one whose
            logits are not its output projection of its last hidden states.
    """
    device, name = device_of(config), config.path.name
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise MissingDependencyError(
            f"an hf student needs transformers: {install_hint('local')}"
        ) from error
    logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype)}
    if config.quantization != "none":
        options |= _quantized(config, device)
    try:
        # Some modules draw numbers even so; whoever seeded torch must not notice.
        with torch.random.fork_rng(devices=[]):
            module, found = AutoModelForCausalLM.from_pretrained(
                config.path,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with their names
                **options,
            )
    except UNLOADABLE as error:
        raise ConfigError(
            f"student.model.path: {name}/ holds no causal LM that transformers can load from "
            f"safetensors: {first_sentence(error)}"
        ) from error
    unlike = {key if isinstance(key, str) else key[0] for key in found["mismatched_keys"]}
    missing = sorted({*found["missing_keys"], *unlike})
    if missing:
        raise ConfigError(
            f"student.model.path: the weights in {name}/ lack {missing[0]!r} ({len(missing)} "
            "tensors missing or of another shape); transformers would draw them at random"
        )
    if config.quantization == "none":
        module = module.to(device)
    _check_projection(module, name)
    return module.eval()


def _quantized(config: HFStudentConfig, device: torch.device) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    if config.quantization == "int8":
        how = BitsAndBytesConfig(load_in_8bit=True)
    else:
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=getattr(torch, config.dtype),
        )
    return {"quantization_config": how, "device_map": {"": device}}


@torch.no_grad()
def _check_projection(module: Any, name: str) -> None:  # noqa: ANN401 - untyped library
    """Compare the model's own logits with what the chunked projection will compute."""
    config, head = module.config, module.get_output_embeddings()
    if config.get_text_config() is not config:
        raise ConfigError(
            f"student.model.path: {name}/ holds a {config.model_type} model with more than text; "
            "store its text model in a folder of its own"
        )
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"student.model.path: the {config.model_type} model in {name}/ has "
            f"{'no output projection' if head is None else 'a bias in its output projection'}, "
            "which cannot be trained here"
        )
    length = min(_PROBE_TOKENS, head.weight.shape[0])
    rows = torch.arange(length, device=module.device)[None]
    expected = module(input_ids=rows, use_cache=False).logits[0].float()
    hidden = module.base_model(input_ids=rows, use_cache=False).last_hidden_state[0]
    difference = float((head(hidden).float() - expected).abs().max() / expected.abs().max())
    if not difference <= _PROBE_TOLERANCE:
        raise ConfigError(
            f"student.model.path: the logits of the {config.model_type} model in {name}/ are not "
            f"its output projection of its last hidden states (off by {difference:.3g} of the "
            "largest logit: a cap, a scale); it cannot be trained here"
        )


class HFModel:
    """A loaded module with the names that weights travel under.

    Args:
        module: From ``load_module``.
        config: The recipe's.
        vocab_rows: Ids that the tokenizer has; further rows of the projection are padding, and no
            softmax covers them.

    Raises:
        ConfigError: fewer rows than ids; layers that cannot be computed again.
    """

    def __init__(self, module: Any, config: HFStudentConfig, vocab_rows: int) -> None:  # noqa: ANN401
        self.module = module
        self.config = config
        self.device: torch.device = module.device
        self.weights: dict[str, nn.Parameter] = dict(module.named_parameters())
        """Each parameter once, a tied one under its first name."""
        self._body = module.base_model
        self._body_prefix = next(
            f"{name}." for name, part in module.named_modules() if part is self._body
        )
        head = module.get_output_embeddings().weight
        self._head_name = next(name for name, weight in self.weights.items() if weight is head)
        self._vocab_rows = vocab_rows
        if head.shape[0] < vocab_rows:
            raise ConfigError(
                f"{config.path.name}/ has {head.shape[0]} vocabulary rows, the tokenizer has "
                f"{vocab_rows} ids: another tokenizer's model?"
            )
        limit = getattr(module.config, "max_position_embeddings", None) or config.max_context_tokens
        self.max_context_tokens = min(config.max_context_tokens, limit)
        if config.gradient_checkpointing:
            self._recompute_layers()

    def hidden(self, rows: Tensor, weights: Named | None = None) -> Tensor:
        """[B, L, H] behind the final norm, of [B, L] tokens padded on the right.

        Attention is causal, so what pads a sequence on the right never reaches its tokens.

        Args:
            rows: On the model's device.
            weights: Compute with these instead of the model's own, which stay as they are.

        Raises:
            BatchError: L exceeds the positions of the model or of the recipe.
        """
        if rows.shape[1] > self.max_context_tokens:
            raise BatchError(
                f"a sequence of {rows.shape[1]} tokens exceeds max_context_tokens "
                f"{self.max_context_tokens} of the hf student"
            )
        inputs = {"input_ids": rows, "use_cache": False}
        if weights is None:
            output = self._body(**inputs)
        else:
            prefix = self._body_prefix
            own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
            output = functional_call(self._body, own, (), inputs)
        states: Tensor = output.last_hidden_state
        return states

    def head(self, weights: Named | None = None) -> Tensor:
        """[V, H], V being the tokenizer's ids."""
        weight = (self.weights if weights is None else weights)[self._head_name]
        return weight if weight.shape[0] == self._vocab_rows else weight[: self._vocab_rows]

    def plain(self, name: str) -> Tensor:
        """A weight in the recipe's dtype, taken back from its quantised form where it has one."""
        weight = self.weights[name]
        if weight.is_floating_point():
            return weight.detach()
        layer = self.module.get_submodule(name.rpartition(".")[0])
        return _dequantized(layer).to(getattr(torch, self.config.dtype))

    def merged(self, adapters: LoraAdapters | None, role: str) -> Iterator[tuple[str, Tensor]]:
        """Every weight with a role's adapter in it, one after the other.

        What has no adapter is the model's own tensor: copy it to keep it.
        """
        for name in self.weights:
            layer = name.removesuffix(".weight")
            weight = self.plain(name)
            if adapters is not None and name.endswith(".weight") and layer in adapters.layers:
                weight = adapters.merged(layer, weight, role)
            yield name, weight

    @property
    def architecture(self) -> dict[str, Any]:
        """What two models must share for the weights of one to fit the other; JSON."""
        given = self.module.config.to_dict()
        kept = {name: value for name, value in given.items() if name not in _NOT_ARCHITECTURE}
        found: dict[str, Any] = json.loads(json.dumps(kept, default=str))
        return found

    def _recompute_layers(self) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        try:
            self.module.activation_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise ConfigError(f"student.model.gradient_checkpointing: {error}") from error
        # Wanted by the reentrant way only; it would keep the embedding's gradient under LoRA.
        self.module.disable_input_require_grads()
        layers = [m for m in self.module.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise ConfigError(
                f"student.model.gradient_checkpointing: the layers of {self.config.path.name}/ "
                "cannot be computed again; leave it off"
            )
        for layer in layers:
            # Layers look at their own flag; those within stay in evaluation mode, without dropout.
            layer.training = True


def _dequantized(layer: nn.Module) -> Tensor:
    """The weight of a bitsandbytes layer as numbers."""
    bnb: Any = importlib.import_module("bitsandbytes.functional")
    weight: Any = layer.weight
    if (state := getattr(weight, "quant_state", None)) is not None:
        found: Tensor = bnb.dequantize_4bit(weight.data, state)
        return found
    scale: Tensor = weight.SCB
    data: Tensor = weight.data
    return data.float() * (scale.float()[:, None] / 127)

"""The toy decoder: a real transformer, small enough to train on one CPU core.

RMSNorm, rotary positions, SwiGLU, tied embeddings. Its softmax covers a declared sub-vocabulary:
row v of the embedding belongs to the v-th smallest of the real ids given to the constructor. An
id outside is an error, never another token.

One function, ``ToyModel.run``, is both the training forward and, with another ``attend``, the
cached inference of ``toy_inference``: the two cannot drift apart.

Shapes: B sequences, L padded length, H hidden size, V rows of the vocabulary, h heads,
d = H / h head size, ``*`` any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader expects
from numpy.typing import NDArray

from miniverl_dist.backends.vocabulary import Vocabulary
from miniverl_dist.backends.weights_io import ToyFolder, check_shapes, parameter_shapes
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.errors import BatchError
from miniverl_dist.schemas.batch import IntArray
from miniverl_dist.schemas.weights import NamedArrays

NORM_EPS = 1e-6
ROPE_BASE = 10_000.0

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q, k, v), each [*, h, d] with rotated q and k -> [*, h, d]."""


def _draw(config: ToyModelConfig, vocab_rows: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """Initial weights: 1 for norms, else normal with a spread that keeps activations near 1."""
    # Philox rather than torch's generator: its stream is specified, torch's may change.
    generator = np.random.Generator(np.random.Philox(key=seed % 2**64))
    residual_scale = 1 / sqrt(2 * config.num_layers)
    drawn = {}
    for name, shape in parameter_shapes(config, vocab_rows).items():
        if name.endswith("norm"):
            drawn[name] = np.ones(shape, dtype=np.float32)
            continue
        std = 1 / sqrt(shape[1])
        if name.endswith(("attn_out", "down")):
            std *= residual_scale
        drawn[name] = (std * generator.standard_normal(shape)).astype(np.float32)
    return drawn


def rope_table(config: ToyModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each [max_context, 1, 1, d / 2]."""
    half = config.hidden_size // config.num_heads // 2
    frequencies = ROPE_BASE ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.outer(np.arange(config.max_context_tokens, dtype=np.float64), frequencies)
    angles = angles[:, None, None, :]
    return (
        torch.from_numpy(np.cos(angles).astype(np.float32)),
        torch.from_numpy(np.sin(angles).astype(np.float32)),
    )


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + d / 2) of every head by their position's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _causal_attention(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Every position of [B, L, h, d] sees itself and what stands before it."""
    del layer
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class ToyModel:
    """Weights of a toy decoder and its forward pass.

    Args:
        config: Sizes.
        vocabulary_ids: The real ids its softmax covers.
        seed: Of the initial weights; equal seeds give equal bits.
    """

    def __init__(
        self, config: ToyModelConfig, vocabulary_ids: Sequence[int] | IntArray, seed: int = 0
    ) -> None:
        self.config = config
        self.vocabulary = Vocabulary(vocabulary_ids)
        drawn = _draw(config, len(self.vocabulary), seed)
        self.weights = {name: torch.from_numpy(array) for name, array in drawn.items()}
        self._cos, self._sin = rope_table(config)

    @classmethod
    def from_folder(cls, folder: ToyFolder) -> ToyModel:
        """The model that a folder holds."""
        model = cls(folder.config, folder.vocabulary_ids)
        model.load_arrays(folder.weights)
        return model

    @property
    def head(self) -> torch.Tensor:
        """[V, H] output projection, the embedding itself."""
        return self.weights["embed"]

    @property
    def num_parameters(self) -> int:
        """Trainable numbers."""
        return sum(tensor.numel() for tensor in self.weights.values())

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the weights."""
        return {name: tensor.detach().numpy().copy() for name, tensor in self.weights.items()}

    def load_arrays(self, tensors: NamedArrays) -> None:
        """Overwrite the weights in place; all of them, or none when one does not fit.

        Raises:
            CheckpointError: names, shapes or dtypes are those of another architecture.
        """
        check_shapes(tensors, self.config, len(self.vocabulary))
        with torch.no_grad():
            for name, tensor in self.weights.items():
                tensor.copy_(torch.from_numpy(np.array(tensors[name])))

    def run(self, rows: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states behind the final norm, [*, H].

        Args:
            rows: [*] vocabulary rows.
            positions: Positions that broadcast to ``rows``; rotary angles come from them.
            attend: Attention over whatever stands before each position.
        """
        config, weights = self.config, self.weights
        heads, size = config.num_heads, config.hidden_size // config.num_heads
        cos, sin = self._cos[positions], self._sin[positions]
        x = F.embedding(rows, weights["embed"])
        for layer in range(config.num_layers):
            prefix = f"layers.{layer}."
            normed = _norm(x, weights[prefix + "attn_norm"])
            qkv = F.linear(normed, weights[prefix + "qkv"])
            qkv = qkv.view(*rows.shape, 3, heads, size)
            q, k = _rotate(qkv[..., :2, :, :], cos, sin).unbind(-3)
            mixed = attend(layer, q, k, qkv[..., 2, :, :])
            x = x + F.linear(mixed.flatten(-2), weights[prefix + "attn_out"])
            gate_up = F.linear(_norm(x, weights[prefix + "ffn_norm"]), weights[prefix + "gate_up"])
            gate, up = gate_up.chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, weights[prefix + "down"])
        return _norm(x, weights["final_norm"])

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """Training forward of right-padded [B, L] rows -> [B, L, H].

        Attention is causal, so what pads a sequence on the right never reaches its tokens.

        Raises:
            BatchError: L exceeds the positions the model has.
        """
        length = rows.shape[1]
        if length > self.config.max_context_tokens:
            raise BatchError(
                f"a sequence of {length} tokens exceeds max_context_tokens "
                f"{self.config.max_context_tokens} of the toy model"
            )
        return self.run(rows, torch.arange(length), _causal_attention)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, NORM_EPS)

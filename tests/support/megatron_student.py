"""Tiny Megatron students: folders, batches, and a rank that tells its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.numpy import load_file

from miniverl_dist.backends.megatron import device
from miniverl_dist.backends.megatron.architecture import read_architecture
from miniverl_dist.backends.megatron.backend import MegatronBackend
from miniverl_dist.backends.megatron.optimizer_state import data_parallel_group
from miniverl_dist.backends.rank_address import RankAddress
from miniverl_dist.backends.vocabulary import FullVocabulary
from miniverl_dist.backends.weights_io import TokenizerIdentity
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.config.roles import MegatronModelConfig
from miniverl_dist.schemas.batch import SftBatch, TrainBatch
from tests.support.hf_models import ODD_VOCAB, tiny_architecture, write_hf_model
from tests.support.ranks import Rank

torch.set_num_threads(1)

NUM_ROWS = ODD_VOCAB
TOKENIZER = TokenizerIdentity("test", "f" * 64)
Arrays = dict[str, NDArray[Any]]

_ROOT = TemporaryDirectory(prefix="mg-")


@cache
def folder(model_type: str, seed: int) -> Path:
    """A model that transformers has drawn and written."""
    path = Path(_ROOT.name) / f"{model_type}-{seed}"
    return write_hf_model(tiny_architecture(model_type, NUM_ROWS), path, seed)


def tensors(model_type: str, seed: int) -> Arrays:
    return dict(load_file(folder(model_type, seed) / "model.safetensors"))


def train_batch(
    seed: int = 0,
    *,
    lengths: Sequence[int] = (7, 19, 12, 3, 26, 1, 15),
    num_minibatches: int = 1,
    temperature: float = 0.8,
) -> TrainBatch:
    """Uneven lengths, two sampled spans in each sequence, none in the shortest ones."""
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.concatenate([_two_spans(length) for length in lengths])
    minibatches = np.arange(len(lengths), dtype=np.int64) % num_minibatches
    of_token = np.repeat(minibatches, lengths)
    size = int(starts[-1])
    return TrainBatch(
        token_ids=rng.integers(0, NUM_ROWS, size),
        sequence_starts=starts,
        loss_mask=mask,
        advantages=np.where(mask, rng.normal(size=size), 0.0),
        rollout_logprobs=np.where(mask, -5 + 0.5 * rng.normal(size=size), np.nan),
        group_ids=tuple(f"g{i // 2}" for i in range(len(lengths))),
        minibatch_ids=minibatches,
        num_loss_tokens=tuple(int(mask[of_token == m].sum()) for m in range(num_minibatches)),
        num_sequences=tuple(int((minibatches == m).sum()) for m in range(num_minibatches)),
        policy_version=0,
        temperature=temperature,
    )


def _two_spans(length: int) -> NDArray[np.bool_]:
    position = np.arange(length)
    first = (position >= length // 4) & (position < length // 2)
    found: NDArray[np.bool_] = (first | (position >= 3 * length // 4)) & (position > 0)
    return found if length > 3 else np.zeros(length, dtype=np.bool_)


def sft_batch(seed: int = 0) -> SftBatch:
    batch = train_batch(seed)
    return SftBatch(batch.token_ids, batch.sequence_starts, batch.loss_mask)


class GradientRecorder(MegatronBackend):
    """Notes the gradients that every optimizer step is about to use."""

    gradients: list[Arrays]

    def _join(self, address: RankAddress, timeout_s: float) -> None:
        """Ranks that have met stay together: the next student only makes its own groups."""
        if dist.is_initialized():
            device.lay_out_ranks(self._config.parallel, timeout_s=timeout_s)
        else:
            super()._join(address, timeout_s)

    def close(self) -> None:
        if dist.get_world_size() == 1:
            super().close()
        else:
            self.model.release()

    def _count_step(self) -> None:
        super()._count_step()
        self.gradients = [*getattr(self, "gradients", []), hf_gradients(self)]


def student(
    rank: Rank | None,
    model_type: str,
    *,
    parallel: ParallelConfig | None = None,
    loss: LossConfig | None = None,
    optim: OptimConfig | None = None,
    tokenizer: TokenizerIdentity = TOKENIZER,
    **model_fields: Any,
) -> GradientRecorder:
    path = folder(model_type, 0)
    fields = {"kind": "megatron", "config": path / "config.json", "max_microbatch_tokens": 40}
    model = MegatronModelConfig.model_validate(
        fields | {"parallel": parallel or ParallelConfig()} | model_fields
    )
    return GradientRecorder(
        model,
        read_architecture(path / "config.json"),
        path,
        tokenizer,
        FullVocabulary(NUM_ROWS),
        loss=loss or LossConfig(),
        optim=optim or OptimConfig(lr=1e-3, grad_clip=0.5),
        num_steps=10,
        address=RankAddress() if rank is None else rank.address,
        timeout_s=30.0,
    )


def hf_gradients(backend: MegatronBackend) -> Arrays:
    """Whole gradients under Hugging Face names, on every rank: sent as if they were weights."""
    parameters = dict(backend.model.module.named_parameters())
    own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_whole_gradient(backend, name, parameter))
    found = dict(backend.snapshot().tensors)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(own[name])
    return found


def _whole_gradient(backend: MegatronBackend, name: str, parameter: Any) -> torch.Tensor:
    """The distributed optimizer leaves each rank the sum of its own elements only."""
    gradient: torch.Tensor = parameter.main_grad
    if not backend._config.distributed_optimizer:
        return gradient
    whole = torch.zeros_like(gradient).reshape(-1)
    slot = backend._state._slots.get(name)
    if slot is not None:
        whole[slot.elements] = gradient.reshape(-1)[slot.elements]
    dist.all_reduce(whole, group=data_parallel_group(parameter))
    return whole.view(gradient.shape)

"""Slow oracle of a training step: transformers, one sequence at a time, in double precision.

No padding, no chunks, no microbatches, no product code between the weights and the gradient: the
log-probabilities come from full logits, the loss from the per-token oracle, the gradient from
torch's autograd through transformers' own model.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from miniverl_dist.config.recipe import LossConfig
from miniverl_dist.schemas.batch import TrainBatch
from tests.reference.forced_routing import ForcedRouting
from tests.reference.policy_loss import OracleToken, slow_policy_loss


@dataclass(frozen=True)
class OracleStep:
    """Loss and gradient of the first optimizer step of a batch."""

    loss: float
    entropy: float
    """Mean over the trained tokens, nats."""
    gradients: dict[str, NDArray[np.float64]]
    """By the names that the model has on disk."""
    logprobs: NDArray[np.float64]
    """[N] nats by the policy; NaN at position 0."""

    @property
    def grad_norm(self) -> float:
        return float(np.sqrt(sum((g**2).sum() for g in self.gradients.values())))


def transformers_step(
    policy: Path, reference: Path, batch: TrainBatch, config: LossConfig
) -> OracleStep:
    """The step of a batch with one minibatch whose ids are vocabulary rows.

    The policy takes the batch's routing, the reference its own.
    """
    model, frozen = (_double(path) for path in (policy, reference))
    logprobs, entropy = _logprobs(model, batch, is_forced=batch.routed_experts is not None)
    with torch.no_grad():
        reference_logprobs = _logprobs(frozen, batch)[0].tolist()
    chosen = np.flatnonzero(batch.loss_mask)
    sequence_of = np.repeat(np.arange(len(batch.group_ids)), np.diff(batch.sequence_starts))
    values = logprobs.detach().numpy()
    tokens = [
        OracleToken(
            sequence=int(sequence_of[t]),
            policy=float(values[t]),
            proximal=float(values[t]),
            rollout=float(batch.rollout_logprobs[t]),
            advantage=float(batch.advantages[t]),
            reference=reference_logprobs[t],
        )
        for t in chosen
    ]
    found = slow_policy_loss(tokens, config, batch.num_loss_tokens[0], batch.num_sequences[0])
    logprobs[chosen].backward(torch.tensor(found.gradients, dtype=torch.float64))
    gradients = _gradients_on_disk(model)
    mean = float(entropy.detach()[chosen].mean())
    return OracleStep(found.loss, mean, gradients, values)


def _double(path: Path) -> Any:
    # Its grouped products exist up to single precision only.
    settings = {"dtype": torch.float64, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, **settings).eval()


def _logprobs(
    model: Any, batch: TrainBatch, *, is_forced: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] log-probability of each token and entropy of its row, NaN at position 0."""
    forced = ForcedRouting(model) if is_forced else None
    starts = batch.sequence_starts.tolist()
    nothing = torch.full((1,), torch.nan, dtype=torch.float64)
    logprobs, entropies = [], []
    for start, end in pairwise(starts):
        ids = torch.from_numpy(batch.token_ids[start:end])
        if forced is not None and batch.routed_experts is not None:
            forced.rows = torch.from_numpy(batch.routed_experts[start:end].astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
        rows = torch.log_softmax(logits / batch.temperature, -1)
        logprobs += [nothing, rows[torch.arange(len(ids) - 1), ids[1:]]]
        entropies += [nothing, -(rows.exp() * rows).sum(-1)]
    return torch.cat(logprobs), torch.cat(entropies)


def _gradients_on_disk(model: Any) -> dict[str, NDArray[np.float64]]:
    """Gradients under the names of a saved model: saved as if they were its weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return dict(load_file(Path(folder) / "model.safetensors"))

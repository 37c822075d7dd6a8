"""The update of a transformers model written as a loop: whole logits, one sequence at a time.

Adapters are multiplied out into the weights under autograd, and torch's own AdamW takes the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.schemas.batch import TrainBatch


class PlainStudent:
    """Args: a transformers model; ids that its softmax covers; the loss (ppo); the optimizer.

    ``factors`` are LoRA's by name (``<layer>.lora_A``); without them every weight is trained.
    ``transposed``: the model stores its matrices as [in, out].
    """

    def __init__(
        self,
        model: Any,
        num_ids: int,
        loss: LossConfig,
        optim: OptimConfig,
        factors: Mapping[str, Tensor] | None = None,
        scale: float = 0.0,
        *,
        transposed: bool = False,
    ) -> None:
        self.model, self.num_ids, self.loss, self.optim = model, num_ids, loss, optim
        self.scale, self.transposed = scale, transposed
        model.requires_grad_(factors is None)
        own = dict(model.named_parameters()) if factors is None else factors
        self.trained = {
            name: value if factors is None else value.detach().clone().requires_grad_()
            for name, value in own.items()
        }
        self.has_adapter = factors is not None
        self.reference = {name: value.detach().clone() for name, value in self.weights().items()}
        matrices = [w for w in self.trained.values() if w.dim() > 1]
        vectors = [w for w in self.trained.values() if w.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": optim.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps
        )

    def weights(self) -> dict[str, Tensor]:
        """Every weight as it acts."""
        found = dict(self.model.named_parameters())
        if not self.has_adapter:
            return found
        for name in [n for n in self.trained if n.endswith(".lora_A")]:
            layer = name.removesuffix(".lora_A")
            delta = self.scale * self.trained[f"{layer}.lora_B"] @ self.trained[name]
            weight = found[f"{layer}.weight"]
            found[f"{layer}.weight"] = weight + (delta.T if self.transposed else delta)
        return found

    def logprobs(self, ids: Tensor, temperature: float, weights: Mapping[str, Tensor]) -> Tensor:
        """[T - 1] nats of tokens 1 .. T - 1."""
        inputs = {"input_ids": ids[None], "use_cache": False}
        logits = functional_call(self.model, dict(weights), (), inputs).logits
        logits = logits[0, :-1, : self.num_ids] / temperature
        return torch.log_softmax(logits, -1).gather(1, ids[1:, None]).squeeze(1)

    def update(self, batch: TrainBatch, extra: Tensor | None = None) -> list[float]:
        """One optimizer step per minibatch, ``extra`` added to each loss; their losses."""
        starts = batch.sequence_starts.tolist()
        spans = list(pairwise(starts))
        rows, tau = torch.from_numpy(batch.token_ids), batch.temperature
        with torch.no_grad():
            proximal = [self.logprobs(rows[a:b], tau, self.weights()) for a, b in spans]
            reference = [self.logprobs(rows[a:b], tau, self.reference) for a, b in spans]
        losses = []
        for minibatch in range(batch.num_minibatches):
            total = torch.zeros(()) if extra is None else extra
            for index in np.flatnonzero(batch.minibatch_ids == minibatch):
                a, b = spans[index]
                mask = torch.from_numpy(batch.loss_mask[a + 1 : b])
                policy = self.logprobs(rows[a:b], tau, self.weights())[mask]
                arrays = [batch.rollout_logprobs, batch.advantages]
                rollout, advantage = (
                    torch.from_numpy(each[a + 1 : b]).float()[mask] for each in arrays
                )
                per_token = self._losses(
                    policy, proximal[index][mask], rollout, advantage, reference[index][mask]
                )
                if self.loss.reduction == "token_mean":
                    total = total + per_token.sum() / batch.num_loss_tokens[minibatch]
                else:
                    total = total + per_token.mean() / batch.num_sequences[minibatch]
            losses.append(self._step(total))
        return losses

    def sft_update(self, batch: TrainBatch) -> float:
        """One supervised step; its loss."""
        starts = batch.sequence_starts.tolist()
        rows = torch.from_numpy(batch.token_ids)
        chosen = [
            self.logprobs(rows[a:b], 1.0, self.weights())[
                torch.from_numpy(batch.loss_mask[a + 1 : b])
            ]
            for a, b in pairwise(starts)
        ]
        return self._step(-torch.cat(chosen).mean())

    def _step(self, total: Tensor) -> float:
        self.optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.trained.values(), self.optim.grad_clip)
        self.optimizer.step()
        return float(total.detach())

    def _losses(
        self, policy: Tensor, proximal: Tensor, rollout: Tensor, advantage: Tensor, frozen: Tensor
    ) -> Tensor:
        config = self.loss
        assert config.dual_clip is not None
        assert config.mismatch_cap is not None
        ratio = (policy - proximal).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        gain = torch.where(advantage < 0, torch.maximum(gain, config.dual_clip * advantage), gain)
        gap = frozen - policy
        kl = config.kl_coef * ratio * (gap.exp() - gap - 1)
        return (proximal - rollout).exp().clamp(max=config.mismatch_cap) * (kl - gain)

"""What needs torch at composition: building the student, fitting the toy teacher, engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.backends.toy import ToyBackend
from miniverl_dist.backends.weights_io import TokenizerIdentity, load_toy_folder
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.config.roles import SftConfig, ToyModelConfig
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.weights import weights_checksum
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.training.sft import SftExample, sft_batches
from rollout_server.engines.toy import ToyEngine


def build_student(config: RunConfig, vocabulary: SubVocabulary) -> ToyBackend:
    """The student with its initial weights, drawn from the run's seed."""
    return ToyBackend(
        config.student.model,
        vocabulary.ids,
        TokenizerIdentity(vocabulary.name, vocabulary.fingerprint),
        loss=config.loss,
        optim=config.optim,
        num_steps=config.loop.num_steps,
        seed=derive_seed(config.seed, "init", "student"),
    )


def fit_toy(
    model: ToyModelConfig,
    vocabulary: SubVocabulary,
    examples: Sequence[SftExample],
    fit: SftConfig,
    *,
    seed: int,
    on_step: Callable[[int, dict[str, float]], None],
) -> dict[str, NDArray[np.float32]]:
    """Fit a toy model on supervised sequences; returns its weights."""
    backend = ToyBackend(
        model,
        vocabulary.ids,
        TokenizerIdentity(vocabulary.name, vocabulary.fingerprint),
        loss=LossConfig(),
        optim=OptimConfig(),
        num_steps=max(fit.num_steps, 1),
        seed=seed,
    )
    batches = sft_batches(examples, fit, seed=seed, replacement_ids=vocabulary.ids)
    for step, batch in enumerate(batches):
        on_step(step, backend.sft_update(batch, fit.learning_rate))
    return backend.model.arrays()


def toy_engine(model: ToyModelConfig, vocabulary: SubVocabulary, name: str) -> ToyEngine:
    """A rollout engine that waits for its first publish."""
    return ToyEngine(model, vocabulary.ids, name)


def folder_snapshot(folder: Path) -> WeightSnapshot:
    """A toy folder's weights as version 0."""
    weights = load_toy_folder(folder).weights
    return WeightSnapshot(0, weights, weights_checksum(weights))

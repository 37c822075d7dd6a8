"""Does a model of an unknown family decode rightly in company? Found out by trying.

Shapes: V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from miniverl_dist.schemas.batch import IntArray
from miniverl_dist.schemas.routing import ExpertRows
from rollout_server.engines.hf_decoder import BatchDecoder, Logits

_TOLERANCE = 2e-2
"""Relative to the largest logit; what bfloat16 may differ by between two orders of summation."""


@dataclass(eq=False)
class _Probe:
    """A text whose next tokens are known beforehand; see ``hf_decoder.Running``."""

    prompt: IntArray
    output: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    routing: list[ExpertRows] = field(default_factory=list)


def decoding_problem(model: Any, decoder: BatchDecoder) -> str | None:  # noqa: ANN401 - untyped
    """What is wrong with decoding texts of different lengths together; None where nothing is.

    A longer text is decoded alone, then with a shorter one that joins it, which is padded on its
    left from then on. Their last logits are compared with those of a pass without cache, padding
    and company. The decoder is empty afterwards.

    Args:
        model: The decoder's, its weights filled.
        decoder: Of no request.
    """
    counted = replace(decoder.counters)
    ids = np.arange(12, dtype=np.int64) % decoder.num_vocabulary_rows
    long, short = _Probe(ids[:7]), _Probe(ids[8:11])
    decoder.step([long])
    long.output.append(int(ids[7]))
    decoder.step([long, short])
    for probe in (long, short):
        probe.output.append(int(ids[11]))
    found = decoder.step([long, short])
    decoder.clear()
    decoder.counters = counted
    for probe, logits in zip((long, short), found, strict=True):
        expected = _plain_logits(model, np.concatenate([probe.prompt, np.array(probe.output)]))
        gap = float(np.abs(logits - expected[: len(logits)]).max() / np.abs(expected).max())
        if not gap <= _TOLERANCE:
            return (
                f"a {model.config.model_type} model decodes other logits with a cache and in "
                f"company than without (off by {gap:.3g} of the largest): use another engine"
            )
    return None


@torch.inference_mode()
def _plain_logits(model: Any, text: IntArray) -> Logits:  # noqa: ANN401 - untyped library
    """[V] behind the last token."""
    rows = torch.from_numpy(text)[None].to(model.device)
    logits: Logits = model(input_ids=rows, use_cache=False).logits[0, -1].float().cpu().numpy()
    return logits

"""The hf engine under models it knows nothing of: they are tried before they are trusted."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from miniverl_dist.backends.vocabulary import FullVocabulary
from miniverl_dist.errors import PublishError
from miniverl_dist.ports import WeightSnapshot
from rollout_server.engines import hf_check
from rollout_server.engines.hf import HFEngine
from rollout_server.engines.hf_decoder import BatchDecoder
from rollout_server.engines.sampling import sample, uniforms
from tests.support.hf_student import NUM_IDS, full_logprobs, hf_student, lora, student_folder
from tests.support.tiny_hf import plain_logits
from tests.support.toy import request

VOCABULARY = FullVocabulary(NUM_IDS)


async def loaded(family: str, snapshot: WeightSnapshot, **changes: Any) -> HFEngine:
    made = HFEngine(
        student_folder(family, **changes), VOCABULARY, batch_slots=3, max_context_tokens=120
    )
    assert await made.load_weights(snapshot) == snapshot.checksum
    return made


@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("gpt2", False), ("llama", False)])
async def test_what_it_samples_is_what_the_student_would(family: str, tied: bool) -> None:
    """Prompts of different lengths in company, over an adapter that has been merged."""
    student = hf_student(family, tied=tied, lora=lora(family))
    with torch.no_grad():
        for name, factor in student.student.trained.items():
            if name.endswith("lora_B"):
                factor.add_(
                    torch.randn(factor.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1
                )
    engine = await loaded(family, student.snapshot(), tied=tied)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, NUM_IDS, n).tolist()) for n in (40, 3, 17, 8, 25)]
    requests = [request(p, seed, max_new_tokens=12) for seed, p in enumerate(prompts)]
    replies = await asyncio.gather(*(engine.generate(r) for r in requests))
    await engine.close()
    for asked, reply in zip(requests, replies, strict=True):
        text = (*asked.input_ids, *reply.output_ids)
        params = asked.sampling_params
        module = student.student.model.module
        logits = plain_logits(module, text, VOCABULARY)[len(asked.input_ids) - 1 : -1]
        draws = uniforms(params.sampling_seed, len(reply.output_ids))
        rows, logprobs = sample(logits, [params] * len(draws), draws)
        assert tuple(rows.tolist()) == reply.output_ids
        entries = reply.meta_info.output_token_logprobs
        assert entries is not None
        np.testing.assert_allclose([e[0] for e in entries], logprobs, rtol=0, atol=1e-5)
        own = full_logprobs(module, np.array(text)).detach().numpy()[-len(draws) :]
        np.testing.assert_allclose(own, logprobs, rtol=0, atol=1e-5)


async def test_a_model_that_decodes_wrongly_is_never_sampled_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here, because its padded positions are not masked."""
    whole = BatchDecoder._forward

    def unmasked(self: Any, tokens: Any, positions: Any, cache: Any, mask: Any) -> Any:
        return whole(
            self, tokens, positions, cache, None if mask is None else torch.ones_like(mask)
        )

    monkeypatch.setattr(BatchDecoder, "_forward", unmasked)
    engine = HFEngine(student_folder("gpt2"), VOCABULARY, batch_slots=3, max_context_tokens=120)
    with pytest.raises(PublishError, match="a gpt2 model decodes other logits with a cache"):
        await engine.load_weights(hf_student("gpt2").snapshot())
    assert engine.weight_version == -1
    await engine.close()


async def test_trying_leaves_no_trace() -> None:
    snapshot = hf_student("llama").snapshot()
    engine = await loaded("llama", snapshot)
    assert (engine.counters.num_prefilled_tokens, engine.counters.num_decoded_tokens) == (0, 0)
    assert engine.num_rows == 0
    assert hf_check.decoding_problem(engine._model, engine._decoder) is None
    await engine.close()

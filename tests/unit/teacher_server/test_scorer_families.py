"""Which transformers models may share work between texts, and which cannot be scored at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from miniverl_dist.errors import ConfigError
from teacher_server.batching import BatchLimits, ScoreJob
from teacher_server.scorer import PrefillScorer, load_scorer
from teacher_server.scorer_batches import PrefixBatcher
from teacher_server.scorer_hf import HFCausalLM, load_hf
from teacher_server.scorer_hf_check import REUSING_TYPES

VOCAB, CONTEXT, PREFIX = 97, 400, 240
IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON: dict[str, Any] = IDS | {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
FEW: dict[str, Any] = IDS | {"vocab_size": VOCAB, "hidden_size": 32}
OTHER_NAMES = {
    "gpt2": IDS
    | {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "gpt_neo": FEW | {"num_layers": 2, "num_heads": 4, "max_position_embeddings": CONTEXT},
    "mamba": FEW | {"num_hidden_layers": 2, "state_size": 4},
    "bloom": FEW | {"n_layer": 2, "n_head": 4},
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": EXPERTS
    | {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "gemma": {"head_dim": 8},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "phi3": {"sliding_window": None},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": EXPERTS | {"head_dim": 8, "num_experts": 4},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def made(model_type: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = OTHER_NAMES.get(model_type, COMMON)
    config = AutoConfig.for_model(model_type, **sizes | CHANGES.get(model_type, {}) | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:  # far from uniform, else any two softmaxes look alike
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def scorer_of(model: Any) -> PrefillScorer:
    hf = HFCausalLM(model)
    batcher = PrefixBatcher(hf, BatchLimits()) if hf.can_reuse else None
    return PrefillScorer(hf, name="x", batcher=batcher)


def alone(model: Any, ids: NDArray[np.int64], start: int) -> NDArray[np.float64]:
    """By transformers, the text by itself."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].double()
    table = torch.log_softmax(logits, -1).numpy()[start - 1 : -1]
    return np.asarray(table[np.arange(len(table)), ids[start:]])


def text(length: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def siblings() -> list[ScoreJob]:
    prefix = text(PREFIX, 9)
    tails = [text(length, seed) for seed, length in enumerate((30, 20, 34, 25))]
    return [ScoreJob(np.concatenate([prefix, tail]), PREFIX + 1) for tail in tails]


@pytest.mark.parametrize("model_type", sorted(REUSING_TYPES))
def test_what_is_computed_together_scores_as_alone(model_type: str) -> None:
    model = made(model_type)
    scorer = scorer_of(model)
    assert scorer._batcher is not None
    jobs = siblings()
    found = [*scorer.score_some(jobs[:1]).results.values()]
    found += [result for _, result in sorted(scorer.score_some(jobs[1:]).results.items())]
    assert [result.num_cached_tokens for result in found] == [0, PREFIX, PREFIX, PREFIX]
    others = [ScoreJob(text(length, length), 1) for length in (300, 280, 290)]
    rows = scorer.score_some(others).results
    assert len(rows) == 3
    for job, result in [*zip(jobs, found, strict=True), *((others[i], rows[i]) for i in rows)]:
        expected = alone(model, job.token_ids, job.start)
        np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=1e-4)


LONG_AND_SHORT = {
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 250,
    "factor": 8.0,
}
LONGROPE = LONG_AND_SHORT | {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.5, 3.5, 4.5],
}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"rope_parameters": LONGROPE}),
        ("llama", {"rope_parameters": LONG_AND_SHORT | {"rope_type": "dynamic"}}),
        ("mistral", {"sliding_window": 300}),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 80}),
        ("olmo", {}),  # may well do; nobody has looked
    ],
)
def test_what_was_seen_before_changes_nothing(model_type: str, changes: dict[str, Any]) -> None:
    model = made(model_type, **changes)
    scorer = scorer_of(model)
    assert not scorer.model.can_reuse  # type: ignore[attr-defined]
    # Beyond and below the 250 tokens at which frequencies switch, and back.
    jobs = [*siblings(), ScoreJob(text(380, 1), 1), *siblings(), ScoreJob(text(240, 2), 1)]
    for job in jobs:
        found = scorer.score(job.token_ids.tolist(), job.start)
        np.testing.assert_allclose(found, alone(model, job.token_ids, job.start), atol=1e-4)


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_frequencies_that_do_not_depend_on_the_length_may_be_shared(rope_type: str) -> None:
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
    model = made("llama", rope_parameters=LONG_AND_SHORT | {"rope_type": rope_type} | more)
    scorer = scorer_of(model)
    assert scorer.model.can_reuse  # type: ignore[attr-defined]
    scorer.score_some(siblings()[:1])
    job = siblings()[1]
    result = scorer.score_some([job]).results[0]
    assert result.num_cached_tokens == PREFIX
    np.testing.assert_allclose(result.logprobs, alone(model, job.token_ids, job.start), atol=1e-4)


class Bent(torch.nn.Module):
    """An output projection that is followed by a cap, under no name that a config would show."""

    def __init__(self, model: Any, cap: float) -> None:
        super().__init__()
        self.model, self.cap = model, cap

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "model" else getattr(self.model, name)

    def forward(self, **arguments: Any) -> Any:
        output = self.model(**arguments)
        output.logits = self.cap * torch.tanh(output.logits / self.cap)
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cap_that_logits_hardly_reach_is_found(dtype: torch.dtype) -> None:
    model = made("llama").to(dtype)
    with torch.no_grad():
        model.lm_head.weight *= 0.1  # logits of about 0.2: a cap at 30 moves them by 1e-5
    HFCausalLM(model)
    with pytest.raises(ConfigError, match=r"llama: its logits differ .* SGLang"):
        HFCausalLM(Bent(model, 30.0))


@pytest.mark.parametrize("key", ["logits_soft_cap", "final_logit_softcapping", "logit_cap"])
def test_a_cap_in_the_config_is_named(key: str) -> None:
    model = made("llama")
    setattr(model.config, key, 30.0)
    with pytest.raises(ConfigError, match=f"llama caps its logits \\({key}\\)"):
        HFCausalLM(model)
    setattr(model.config, key, None)
    model.config.attn_logit_softcapping = 50.0  # the body's own business
    HFCausalLM(model)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mamba", {}, "mamba: .* how long a text may be"),
        ("bloom", {}, "bloom: .* how long a text may be"),
        ("recurrent_gemma", {"attention_window_size": 64}, "caps its logits"),
        (
            "llama4_text",
            {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64},
            "llama4_text: this scorer cannot compute it",
        ),
    ],
)
def test_what_cannot_be_scored_is_one_clear_error(
    model_type: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    made(model_type, **changes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_scorer(tmp_path, limits=BatchLimits())


def test_a_falcon_with_slopes_for_positions_is_scored_whole() -> None:
    model = made("falcon", alibi=True)
    scorer = scorer_of(model)
    assert not scorer.model.can_reuse  # type: ignore[attr-defined]
    job = siblings()[0]
    expected = alone(model, job.token_ids, job.start)
    found = scorer.score(job.token_ids.tolist(), job.start)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("device", ["banana", "cuda:999", "cuda:-1", ""])
def test_a_device_that_is_not_there_is_named(device: str, tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"device '{device}'"):
        load_hf(tmp_path, device=device)


def test_more_top_tokens_than_there_are_gives_all_of_them() -> None:
    scorer = scorer_of(made("llama"))
    result = scorer.score_some([ScoreJob(text(12, 1), 5, num_top=VOCAB + 7)]).results[0]
    assert result.top is not None
    assert result.top.ids.shape == (7, VOCAB)
    assert (np.sort(result.top.ids, axis=-1) == np.arange(VOCAB)).all()

"""The prefill scorer against plain full-logits computations, toy and Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from miniverl_dist.backends.toy_inference import ToyDecoder
from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.backends.weights_io import TokenizerIdentity, save_toy_folder
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.errors import CheckpointError, ConfigError, RequestRejectedError
from teacher_server.scorer import PrefillScorer, ToyCausalLM, load_scorer
from teacher_server.scorer_hf import HFCausalLM, load_hf

CONFIG = ToyModelConfig(
    kind="toy", num_layers=2, hidden_size=32, num_heads=2, ffn_size=48, max_context_tokens=300
)
# Real ids of a large vocabulary, of which the toy knows every seventh.
IDS = list(range(3, 3 + 7 * 90, 7))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def toy(seed: int = 0) -> ToyModel:
    return ToyModel(CONFIG, IDS, seed=seed)


def toy_scorer(chunk_tokens: int = 32) -> PrefillScorer:
    return PrefillScorer(ToyCausalLM(toy()), name="toy", chunk_tokens=chunk_tokens)


def text(length: int, seed: int = 0) -> list[int]:
    return [IDS[i] for i in np.random.default_rng(seed).integers(0, len(IDS), length)]


def plain_toy_scores(ids: Sequence[int]) -> NDArray[np.float64]:
    """[L - 1] by unpadded full logits in float64."""
    model = toy()
    rows = torch.from_numpy(model.vocabulary.rows(ids))
    with torch.no_grad():
        logits = (model.hidden(rows[None])[0] @ model.head.T).double()
    logprobs = torch.log_softmax(logits, -1)
    return logprobs[:-1].gather(-1, rows[1:, None])[:, 0].numpy()


# ---- toy


@pytest.mark.parametrize("length", [2, 31, 128, 129, 300])
@pytest.mark.parametrize("chunk_tokens", [1, 32, 512])
def test_toy_scores_equal_full_logits(length: int, chunk_tokens: int) -> None:
    ids = text(length)
    plain = plain_toy_scores(ids)
    for start in {1, 1 + length // 2, length}:
        scores = toy_scorer(chunk_tokens).score(ids, start)
        assert scores.shape == (length - start,)
        np.testing.assert_allclose(scores, plain[start - 1 :], atol=1e-5)


def test_a_score_depends_on_the_tokens_before_it_only() -> None:
    ids = text(40)
    other = [*ids[:30], *text(10, seed=9)]
    first, second = toy_scorer().score(ids, 1), toy_scorer().score(other, 1)
    assert np.array_equal(first[:29], second[:29])
    assert not np.array_equal(first[29:], second[29:])


def test_toy_scores_are_the_same_bits_alone_and_in_company() -> None:
    scorer, ids = toy_scorer(), text(100)
    alone = toy_scorer().score(ids, 50)
    for seed, length in enumerate((5, 250, 100, 128, 300)):
        scorer.score(text(length, seed + 1), 1)
        assert np.array_equal(scorer.score(ids, 50), alone)


def test_toy_scores_are_the_same_bits_wherever_scoring_starts_or_the_text_ends() -> None:
    ids = text(120)
    whole = toy_scorer().score(ids, 1)
    for start in (2, 17, 33, 100):
        assert np.array_equal(toy_scorer().score(ids, start), whole[start - 1 :])
    # 20 and 120 tokens share a bucket; what pads a text does not reach its scores.
    assert np.array_equal(toy_scorer().score(ids[:20], 1), whole[:19])


def test_toy_scores_agree_with_the_cached_decoder() -> None:
    ids = text(60)
    model = toy()
    cached = ToyDecoder(model, 1).score(model.vocabulary.rows(ids))
    np.testing.assert_allclose(toy_scorer().score(ids, 1), cached[1:], atol=1e-5)


def test_ids_that_a_toy_does_not_have_are_rejected() -> None:
    scorer = toy_scorer()
    assert scorer.vocab_size == IDS[-1] + 1
    for bad in ([3, 4], [-4], [10**6]):
        with pytest.raises(RequestRejectedError, match="not among the 90 ids"):
            scorer.check(bad)
    scorer.check(text(300))
    for length in (0, 301):
        with pytest.raises(RequestRejectedError, match=f"{length} tokens, the model takes 1 to"):
            scorer.check(text(length))


def test_scoring_token_0_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        toy_scorer().score(text(5), 0)


class Recorder:
    """A model that counts the rows it projects; the logits of state t say token t + 1."""

    vocab_size = max_context_tokens = 1000

    def __init__(self) -> None:
        self.projected: list[int] = []
        self.num_forwards = 0

    def rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(token_ids)

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        return torch.arange(1.0, len(rows) + 1)[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.projected.append(len(hidden))
        table = torch.full((len(hidden), 1000), -torch.inf)
        return table.scatter(1, hidden.long(), 0.0)


def test_only_the_positions_asked_for_are_projected_a_chunk_at_a_time() -> None:
    model = Recorder()
    scorer = PrefillScorer(model, name="r", chunk_tokens=64)
    scores = scorer.score(list(range(1000)), 800)
    assert model.projected == [64, 64, 64, 64]
    # Token t is predicted by state t - 1: each was certain, none shifted.
    assert (scores == 0).all()
    assert scorer.score([0, 1, 5], 1).tolist() == [0.0, -np.inf]
    assert model.num_forwards == 2
    assert scorer.score([0, 1], 2).shape == (0,)
    assert model.num_forwards == 2


# ---- Hugging Face


def tiny_hf(kind: str, **changes: object) -> torch.nn.Module:
    import transformers

    sizes = {
        "vocab_size": 211,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 160,
        "initializer_range": 0.4,  # far from uniform, else any two softmaxes look alike
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def plain_hf_scores(model: torch.nn.Module, ids: list[int]) -> NDArray[np.float64]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    targets = torch.tensor(ids[1:])[:, None]
    return torch.log_softmax(logits, -1)[:-1].gather(-1, targets)[:, 0].numpy()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("Llama", {}), ("Qwen3", {}), ("Qwen3", {"tie_word_embeddings": True}), ("Qwen2", {})],
)
def test_hf_scores_equal_full_logits(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_hf(kind, **changes)
    model.save_pretrained(tmp_path / "teacher")
    scorer = load_scorer(tmp_path / "teacher")
    assert (scorer.name, scorer.vocab_size, scorer.max_context_tokens) == ("teacher", 211, 160)
    assert scorer.tokenizer_fingerprint is None
    ids = np.random.default_rng(1).integers(0, 211, 150).tolist()
    plain = plain_hf_scores(model, ids)
    assert plain.std() > 0.5
    for start in (1, 2, 77, 150):
        scores = scorer.score(ids, start)
        assert scores.shape == (150 - start,)
        np.testing.assert_allclose(scores, plain[start - 1 :], atol=1e-5)


def test_hf_ids_and_lengths_are_checked() -> None:
    scorer = PrefillScorer(HFCausalLM(tiny_hf("Llama")), name="x")
    for bad in ([211], [-1], [], [1] * 161):
        with pytest.raises(RequestRejectedError):
            scorer.check(bad)


def test_hf_bfloat16_stays_close(tmp_path: Path) -> None:
    model = tiny_hf("Llama", initializer_range=0.1)
    model.save_pretrained(tmp_path)
    ids = list(range(50))
    scores = load_scorer(tmp_path, dtype="bfloat16").score(ids, 1)
    np.testing.assert_allclose(scores, plain_hf_scores(model, ids), atol=0.1)
    assert not np.array_equal(scores, load_scorer(tmp_path).score(ids, 1))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Gemma2", {"initializer_range": 0.02}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Granite", {"logits_scaling": 8.0}),
    ],
)
def test_models_that_change_their_logits_afterwards_are_refused(
    kind: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="serve the model with SGLang"):
        HFCausalLM(tiny_hf(kind, **changes))


# ---- folders


def test_a_toy_folder_loads_with_its_tokenizer(tmp_path: Path) -> None:
    model = toy(seed=3)
    tokenizer = TokenizerIdentity("some", "f" * 64)
    save_toy_folder(tmp_path / "t", CONFIG, IDS, tokenizer, model.arrays())
    scorer = load_scorer(tmp_path / "t")
    assert (scorer.name, scorer.tokenizer_fingerprint) == ("t", "f" * 64)
    expected = PrefillScorer(ToyCausalLM(model), name="t").score(text(20), 1)
    assert np.array_equal(scorer.score(text(20), 1), expected)
    (tmp_path / "t" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError):
        load_scorer(tmp_path / "t")


def test_other_folders_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model folder"):
        load_scorer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no causal LM"):
        load_hf(tmp_path)

"""What is checked of an hf student before anything is loaded or written."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.hf_files import folder_sha256, read_hf_files, require_same_base
from actors.memory_estimate import hf_student_bytes
from actors.plan import make_plan
from actors.preflight import require_student_files
from actors.roles import role_graph
from actors.student_side import student_chat
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import HFStudentConfig
from miniverl_dist.errors import CheckpointError, ConfigError
from miniverl_dist.tokens.load import load_tokenizer
from rollout_server.chat_format import Qwen36ChatFormat
from tests.reference.tiny_tokenizer import QWEN_LIKE
from tests.support.hf_run import RECIPE, hf_run, qwen_folder, tokenizer_folder
from tests.support.hf_student import student_folder

LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}


def recipe(
    root: Path, tokenizer: str | Path, overrides: tuple[str, ...] = (), **model: Any
) -> RunConfig:
    described = {"kind": "hf", "path": str(root / "base"), "max_context_tokens": 150} | model
    text = RECIPE.replace("TOKENIZER", json.dumps(str(tokenizer)))
    (root / "run.yaml").write_text(text.replace("MODEL", json.dumps(described)))
    return load_config(root / "run.yaml", list(overrides)).config


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tokenizer_folder(tmp_path / "tokenizer")
    qwen_folder(tmp_path / "base")
    return tmp_path


def test_nothing_is_said_where_everything_fits(root: Path) -> None:
    require_student_files(recipe(root, root / "tokenizer"))


def test_a_tokenizer_without_the_tokens_of_a_chat_is_refused(root: Path) -> None:
    tokenizer_folder(root / "plain", [])
    with pytest.raises(ConfigError, match=r"^student\.tokenizer: there is no chat format .*im_"):
        require_student_files(recipe(root, root / "plain"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"asks for device cuda, .* torch sees none here"):
        require_student_files(recipe(root, root / "tokenizer", device="cuda"))


def without_weights(root: Path) -> None:
    (root / "base" / "model.safetensors").unlink()


def garbage(root: Path) -> None:
    (root / "base" / "model.safetensors").write_bytes(b"\xff" * 40)


def quantised(root: Path) -> None:
    edit_config(root, quantization_config={"quant_method": "fp8"})


def short(root: Path) -> None:
    edit_config(root, max_position_embeddings=100)


def narrow(root: Path) -> None:
    edit_config(root, vocab_size=100)


def cut_off(root: Path) -> None:
    weights = root / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def no_json(root: Path) -> None:
    (root / "base" / "config.json").write_text("{")


def no_object(root: Path) -> None:
    (root / "base" / "config.json").write_text("[]")


def unsized(root: Path) -> None:
    edit_config(root, vocab_size=None)


def unknown(root: Path) -> None:
    edit_config(root, model_type="qwen99")


def deeper(root: Path) -> None:
    edit_config(root, num_hidden_layers=3)


def longer(root: Path) -> None:
    edit_config(root, num_hidden_layers=3, layer_types=["full_attention"] * 3)


def wider(root: Path) -> None:
    edit_config(root, intermediate_size=48)


def sliding(root: Path) -> None:
    layers = ["sliding_attention", "full_attention"]
    edit_config(root, use_sliding_window=True, sliding_window=32, layer_types=layers)


def edit_config(root: Path, **changes: Any) -> None:
    path = root / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: shutil.rmtree(root / "base"), "holds no Hugging Face model"),
        (without_weights, r"holds no \*.safetensors: other formats can run code"),
        (garbage, "model.safetensors is no safetensors file"),
        (quantised, "holds weights that are quantised already"),
        (short, "episodes of 150 tokens exceed the 100 positions of base/"),
        (cut_off, r"base: model.safetensors is damaged: it has [\d,]+ bytes, its header describes"),
        (no_json, r"base: config.json: not valid JSON: Expecting property name"),
        (no_object, "base: config.json holds no JSON object"),
        (unsized, "describes no text model: vocab_size is None, expected a number of tokens"),
        (lambda root: edit_config(root, max_position_embeddings="many"), "gives 'many' positions"),
        (unknown, "has model type `qwen99` but Transformers does not recognize this architecture$"),
        (deeper, r"`num_hidden_layers` \(3\) must be equal to the number of `layer_types` \(2\)$"),
        (longer, r"describes a tensor 'model\.layers\.2\..*', which the weights lack"),
        (sliding, r"^student\.model\.path: .*SlidingWindowLayer caches .* cannot be padded"),
        (wider, r"'model\.layers\.0\..*proj\.weight' is stored as .*40.*, config.json describes"),
        (narrow, r"base/ has 100 vocabulary rows, tokenizer tokenizer has 26\d ids"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    spoil: Callable[[Path], None], message: str, root: Path
) -> None:
    spoil(root)
    for look in (require_student_files, make_plan):
        with pytest.raises(ConfigError, match=message) as caught:
            look(recipe(root, root / "tokenizer"))
        assert "\n" not in str(caught.value)
        assert "Error(" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("query_key_value", "has no linear layer 'query_key_value'; it has down_proj, gate_proj"),
        ("lm_head", "names the output projection"),
        ("embed_tokens", "has no linear layer 'embed_tokens'"),
    ],
)
def test_adapters_that_fit_no_layer_are_refused(target: str, message: str, root: Path) -> None:
    lora = LORA | {"target_modules": ["q_proj", target]}
    for look in (require_student_files, make_plan):
        with pytest.raises(ConfigError, match=message):
            look(recipe(root, root / "tokenizer", lora=lora))


def test_gpt2_says_its_positions_otherwise() -> None:
    found = read_hf_files(student_folder("gpt2"))
    assert (found.model_type, found.vocab_size, found.max_positions) == ("gpt2", 100, 160)


def test_a_chatml_folder_gets_qwens_turns(root: Path) -> None:
    config = recipe(root, root / "tokenizer")
    chat = student_chat(config, load_tokenizer(config.student.tokenizer))
    assert isinstance(chat, Qwen36ChatFormat)
    assert chat.tokenizer.decode(chat.user("Hello").token_ids[1:-2]) == "user\nHello"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (("<|im_end|>",), r"no control token <\|im_end\|>; known are qwen3.6, and folders"),
        (("<|im_start|>", "<|im_end|>"), r"no control token <\|im_start\|> and no <\|im_end\|>"),
    ],
)
def test_another_folder_is_told_what_it_lacks(
    missing: tuple[str, ...], message: str, root: Path
) -> None:
    kept = tuple(token for token in QWEN_LIKE if token[0] not in missing)
    tokenizer_folder(root / "other", kept)
    config = recipe(root, root / "other")
    with pytest.raises(ConfigError, match=message):
        student_chat(config, load_tokenizer(config.student.tokenizer))


def test_a_changed_folder_is_noticed(tmp_path: Path) -> None:
    run, _ = asyncio.run(hf_run(tmp_path))
    model = HFStudentConfig(kind="hf", path=tmp_path / "base")
    require_same_base(model, run)
    digest = folder_sha256(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("no weights")
    assert folder_sha256(tmp_path / "base") == digest
    edit_config(tmp_path, rms_norm_eps=1e-4)
    with pytest.raises(CheckpointError, match=f"expected {digest[:12]}"):
        require_same_base(model, run)
    assert str(tmp_path) not in "".join(p.read_text() for p in (run / "student").iterdir())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.engine={kind: sglang}", "an hf student is sampled by transformers, found sglang"),
        ("rollout.routing_replay=on", "an hf student replays no experts"),
    ],
)
def test_what_an_hf_student_cannot_do_is_refused(override: str, message: str, root: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(root, root / "tokenizer", (override,))


def test_the_plan_counts_what_is_there(root: Path) -> None:
    """24 -> 32 (q) and 40 -> 24 (down) in two layers, rank 4."""
    config = recipe(root, root / "tokenizer", lora=LORA)
    files = read_hf_files(root / "base")
    adapter = 2 * 4 * (24 + 32 + 40 + 24)
    (note,) = make_plan(config).notes
    assert f"{files.num_parameters:,} weights, of which {adapter:,} numbers are trained" in note
    model = config.student.model
    assert isinstance(model, HFStudentConfig)
    # Base in float32; adapter with gradient, two moments and itself.
    assert hf_student_bytes(config, model) == 4 * files.num_parameters + 16 * adapter
    whole = model.model_copy(update={"lora": None, "dtype": "bfloat16"})
    with_reference = config.model_copy(
        update={"loss": config.loss.model_copy(update={"kl_coef": 0.1})}
    )
    # 2 weight, 4 gradient, 8 moments, 4 master, 2 reference.
    assert hf_student_bytes(with_reference, whole) == 20 * files.num_parameters


def test_a_plan_names_what_it_could_not_check(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    notes = make_plan(recipe(root, root / "tokenizer")).notes
    assert notes[0].startswith("not checked: ")
    assert "transformers" in notes[0]


def test_roles_of_the_recipes(root: Path) -> None:
    kl = ("loss.kl_coef=0.1",)
    adapted = role_graph(recipe(root, root / "tokenizer", kl, lora=LORA))
    assert adapted.reference is not None
    assert adapted.actor.backbone == adapted.reference.backbone == "student base"
    assert (adapted.actor.adapter, adapted.reference.adapter) == ("actor", "reference")
    whole = role_graph(recipe(root, root / "tokenizer", kl))
    assert whole.reference is not None
    assert whole.actor.backbone != whole.reference.backbone
    assert role_graph(recipe(root, root / "tokenizer")).reference is None

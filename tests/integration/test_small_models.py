"""The converted models as student and teacher; a GGUF file of our own through the conversion.

The first need the folders that scripts/prepare_small_models.py writes (``SMALL_MODELS``, default
``models``), the second the packages it reads with (``SMALL_MODELS_VENV``, default
``.venv-small-models``).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from actors.student_side import StudentSide, student_side
from actors.teacher_side import Renderer
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.tokens.load import load_tokenizer
from scripts.bits_per_byte import Text, bits, held_out, student_text
from scripts.prepare_small_models import (
    MODELS,
    STAMP,
    Model,
    is_prepared,
    site_packages,
)
from teacher_server.scorer import load_scorer
from tests.reference.tiny_tokenizer import byte_level_spec

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("SMALL_MODELS", ROOT / "models"))
PACKAGES = Path(os.environ.get("SMALL_MODELS_VENV", ROOT / ".venv-small-models"))
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPEC = byte_level_spec(["ab"], [(token, True) for token in CONTROL])
NUM_PLAIN = len(SPEC["model"]["vocab"])

needs_models = pytest.mark.skipif(
    not all((FOLDER / model.name / STAMP).is_file() for model in MODELS),
    reason="the small models are not prepared (scripts/prepare_small_models.py)",
)
needs_packages = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="no packages to convert with (scripts/install_small_models.sh)"
)


@pytest.fixture(scope="module")
def recipe() -> RunConfig:
    """The repository's recipe, its folders where they are."""
    overrides = [
        f"student.tokenizer={json.dumps(str(FOLDER / MODELS[0].name))}",
        f"student.model.path={json.dumps(str(FOLDER / MODELS[0].name))}",
        f"teacher.tokenizer={json.dumps(str(FOLDER / MODELS[1].name))}",
        f"teacher.model.path={json.dumps(str(FOLDER / MODELS[1].name))}",
    ]
    return load_config(ROOT / "configs" / "cpu_smollm2_gemma3.yaml", overrides).config


@pytest.fixture(scope="module")
def side(recipe: RunConfig) -> StudentSide:
    return student_side(recipe, load_tokenizer(recipe.student.tokenizer))


@needs_models
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_folders_are_what_was_written(model: Model) -> None:
    folder = FOLDER / model.name
    dtype = json.loads((folder / STAMP).read_bytes())["dtype"]
    assert is_prepared(model, folder, dtype)
    for _, file in model.licence_files:
        assert (folder / Path(file).name).stat().st_size > 0


@needs_models
@pytest.mark.slow
def test_both_tokenizers_spell_the_oracles_bytes(recipe: RunConfig, side: StudentSide) -> None:
    assert recipe.teacher is not None
    teacher = load_tokenizer(recipe.teacher.tokenizer)
    renderer = Renderer(recipe.teacher, side, teacher)
    for trace in asyncio.run(held_out(side)):
        said = [m.content for m in trace.trajectory.messages if m.role == "assistant"]
        rendering = renderer.render(trace.trajectory, every_written=True)
        ids = [rendering.token_ids[span.start : span.end] for span in rendering.spans]
        assert [teacher.decode(each) for each in ids] == said
        assert teacher.special_id("<bos>") == rendering.token_ids[0]
        assert student_text(trace, side).num_bytes == sum(len(text.encode()) for text in said)


@needs_models
@pytest.mark.slow
def test_gemma_without_its_start_scores_nonsense(recipe: RunConfig) -> None:
    """The reason for ``teacher.text_start``."""
    assert recipe.teacher is not None
    tokenizer = load_tokenizer(recipe.teacher.tokenizer)
    scorer = load_scorer(FOLDER / MODELS[1].name)
    ids = tokenizer.encode("The capital of France is Paris, and that of Italy is Rome.")
    start = tokenizer.special_id("<bos>")
    size = len(tokenizer.byte_table.join(ids[1:]))
    with_start = Text((start, *ids), ((2, len(ids) + 1),), size)
    without = Text(tuple(ids), ((1, len(ids)),), size)
    assert bits(scorer, [with_start]).bits_per_byte < 1.0
    assert bits(scorer, [without]).bits_per_byte > 1.5 * bits(scorer, [with_start]).bits_per_byte


def tiny_llama() -> Any:
    config = LlamaConfig(
        vocab_size=NUM_PLAIN + len(CONTROL),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return AutoModelForCausalLM.from_config(config).eval()


def interleaved(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of a query or key projection in GGUF's order: rotary pairs side by side."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(model: Any, path: Path, gguf: Any) -> None:
    """The model as a GGUF file of float32 numbers, with a byte-level tokenizer."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, gguf)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        values = parameter.detach().numpy()
        part = theirs.split(".")[-2]
        writer.add_tensor(theirs, interleaved(values, heads[part]) if part in heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, gguf: Any) -> None:
    vocabulary = sorted(SPEC["model"]["vocab"], key=SPEC["model"]["vocab"].get)
    types = [gguf.TokenType.NORMAL] * NUM_PLAIN + [gguf.TokenType.CONTROL] * len(CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*vocabulary, *CONTROL])
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in SPEC["model"]["merges"]])
    writer.add_bos_token_id(NUM_PLAIN + 1)
    writer.add_eos_token_id(NUM_PLAIN + 2)
    writer.add_unk_token_id(NUM_PLAIN)
    writer.add_pad_token_id(NUM_PLAIN + 2)


@pytest.fixture
def packages() -> Iterator[Path]:
    folder = site_packages(PACKAGES)
    before = list(sys.path)
    sys.path.append(str(folder))
    yield folder
    sys.path[:] = before


def converting(code: str, *arguments: object) -> str:
    """Run in a process of its own: transformers looks for accelerate once, when it is imported.

    Returns:
        What it wrote to stderr.
    """
    head = "import sys; from pathlib import Path; from scripts.prepare_small_models import *; "
    command = [sys.executable, "-c", head + code, *(str(argument) for argument in arguments)]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stderr


@pytest.fixture
def source(packages: Path, tmp_path: Path) -> Path:
    path = tmp_path / "source.gguf"
    write_gguf(tiny_llama(), path, importlib.import_module("gguf"))
    return path


@needs_packages
def test_a_converted_model_is_the_same_function(
    source: Path, packages: Path, tmp_path: Path
) -> None:
    code = "convert(*(Path(given) for given in sys.argv[1:]), 'float32')"
    told = converting(code, source, tmp_path / "out", packages)
    assert (tmp_path / "out" / "config.json").is_file(), told
    ids = torch.arange(0, 240, 3)[None]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, tiny_llama()(ids).logits)
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    assert tokenizer.vocab_size == NUM_PLAIN + len(CONTROL)
    assert [tokenizer.special_id(token) - NUM_PLAIN for token in CONTROL] == [0, 1, 2]
    assert tokenizer.encode("ab") == [SPEC["model"]["vocab"]["ab"]]
    assert tokenizer.byte_table.join(tokenizer.encode("né 42")) == "né 42".encode()


@needs_packages
def test_a_model_that_predicts_nothing_is_refused(
    source: Path, packages: Path, tmp_path: Path
) -> None:
    """A random model stands for one whose weights went to the wrong places."""
    package = tmp_path / "packages" / "tiny"
    package.mkdir(parents=True)
    source.rename(package / "m.gguf")
    code = (
        f"sys.path.append({str(packages)!r}); root = Path(sys.argv[1]); "
        "sha256 = sha256_of(root / 'packages' / 'tiny' / 'm.gguf'); "
        "part = Part('tiny', 'm.gguf', sha256); "
        "tiny = Model('tiny', 'Tiny', (part,), sha256, 10, 'MIT', (), must_be_accepted=False); "
        "prepare(tiny, root / 'packages', root / 'out', 'float32')"
    )
    told = converting(code, tmp_path)
    assert "ConfigError: the converted model takes " in told
    assert "bits per byte of plain English, expected at most 2.0" in told
    assert list((tmp_path / "out").iterdir()) == []

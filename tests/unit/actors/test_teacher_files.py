"""What is checked of a teacher in this process, and what a run remembers of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.plan import make_plan
from actors.preflight import require_teacher_files
from actors.teacher_files import TEACHER_BASE_FILE, keep_teacher
from actors.teacher_scoring import load_teacher
from miniverl_dist.backends.weights_io import write_json
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import CheckpointError, ConfigError
from miniverl_dist.tokens.load import load_tokenizer
from tests.reference.tiny_tokenizer import QWEN_LIKE
from tests.support.hf_run import qwen_folder, tokenizer_folder

LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}
SAMPLED = {"objective": "opd", "opd": {"coef": 1.0}}
TOP_K = {"objective": "opd", "distill": {"top_k": 4}}
EXACT = {"objective": "opd", "distill": {"support": "exact_full_vocab"}}
TOY = {"kind": "toy", "num_layers": 1, "hidden_size": 32, "num_heads": 2, "ffn_size": 64}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tokenizer_folder(tmp_path / "tokenizer")
    for name in ("student", "teacher"):
        qwen_folder(tmp_path / name)
    return tmp_path


def recipe(
    root: Path,
    term: dict[str, Any],
    teacher: dict[str, Any] | None = None,
    student: dict[str, Any] | None = None,
) -> RunConfig:
    tokenizer = str(root / "tokenizer")
    model = {"kind": "hf", "path": str(root / "student"), "device": "cpu", "lora": LORA}
    described: dict[str, Any] = {
        "tokenizer": tokenizer,
        "rendering": "verbatim",
        "model": {"kind": "hf", "path": str(root / "teacher")},
    }
    run = {
        "name": "taught",
        "environment": {"kind": "calculator", "num_tasks": 2},
        "tasks": {"kind": "ids", "train": ["calculator_easy_000"], "eval": ["calculator_easy_000"]},
        "student": {"tokenizer": tokenizer, "model": student or model},
        "teacher": described | (teacher or {}),
        "rollout": {"max_context_tokens": 150},
        "loop": {"num_steps": 1, "num_groups": 1, "group_size": 2},
    }
    (root / "run.yaml").write_text(json.dumps(run | term))
    return load_config(root / "run.yaml").config


def refused(config: RunConfig, message: str) -> None:
    """By a start and by a plan alike."""
    for look in (require_teacher_files, make_plan):
        with pytest.raises(ConfigError, match=message) as caught:
            look(config)
        assert "\n" not in str(caught.value)
        assert "Error(" not in str(caught.value)


@pytest.mark.parametrize("term", [SAMPLED, TOP_K, EXACT])
def test_nothing_is_said_where_everything_fits(term: dict[str, Any], root: Path) -> None:
    require_teacher_files(recipe(root, term))


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_off(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, r"^teacher\.model\.path: .*no config\.json"),
        (without_weights, r"teacher holds no weights"),
        (cut_off, "teacher: model.safetensors is damaged"),
        (lambda f: (f / "config.json").write_text("{"), "teacher: config.json: not valid JSON"),
        (lambda f: edit_config(f, model_type="qwen99"), "does not recognize this architecture$"),
        (lambda f: edit_config(f, intermediate_size=48), "is stored as .* config.json describes"),
    ],
)
def test_a_folder_that_holds_no_such_teacher_is_refused(
    spoil: Callable[[Path], None], message: str, root: Path
) -> None:
    spoil(root / "teacher")
    refused(recipe(root, SAMPLED), message)
    require_teacher_files(recipe(root, {"objective": "grpo"}))


class TestVocabulary:
    @pytest.mark.parametrize("term", [SAMPLED, TOP_K, EXACT])
    def test_the_students_ids_need_a_row_each(self, term: dict[str, Any], root: Path) -> None:
        qwen_folder(root / "teacher", 200)
        refused(recipe(root, term), r"teacher/ has 200 vocabulary rows, .* has 26\d ids")

    def test_only_control_tokens_may_lack_one_under_another_rendering(self, root: Path) -> None:
        """They are behind all others here, as the images' token of a text model is."""
        tokenizer_folder(root / "tokenizer", sorted(QWEN_LIKE, key=lambda token: token[1]))
        tokenizer = load_tokenizer(str(root / "tokenizer"))
        last = int((~tokenizer.byte_table.special).nonzero()[0].max()) + 1
        assert last < tokenizer.vocab_size
        raw = {"rendering": "raw"}
        qwen_folder(root / "teacher", last)
        require_teacher_files(recipe(root, SAMPLED, raw))
        refused(recipe(root, SAMPLED), "set teacher.tokenizer to the folder")
        refused(recipe(root, EXACT, raw), "set teacher.tokenizer to the folder")
        qwen_folder(root / "teacher", last - 1)
        refused(recipe(root, SAMPLED, raw), "set teacher.tokenizer to the folder")

    def test_exact_needs_the_students_own_tokenizer(self, root: Path) -> None:
        tokenizer_folder(root / "teacher", QWEN_LIKE[:-1])
        require_teacher_files(recipe(root, TOP_K))
        refused(recipe(root, EXACT), "the tokenizer in teacher/ is not the student's")
        tokenizer_folder(root / "teacher")
        require_teacher_files(recipe(root, EXACT))

    def test_exact_does_not_go_with_a_declared_vocabulary(self, root: Path) -> None:
        toy = TOY | {"max_context_tokens": 256, "batch_slots": 2}
        refused(recipe(root, EXACT, student=toy), "a toy student has only a declared part")

    def test_a_toy_teacher_reads_a_toys_ids_only(self, root: Path) -> None:
        toy = {
            "model": TOY | {"max_context_tokens": 256, "batch_slots": 2},
            "fit": {"num_steps": 1},
        }
        refused(recipe(root, SAMPLED, toy), "verbatim with a toy teacher: .* a declared vocabulary")

    def test_the_teacher_of_a_run_has_its_tokenizers_ids(self, root: Path) -> None:
        config = recipe(root, SAMPLED)
        assert config.teacher is not None
        found = load_teacher(config.teacher, root)
        assert found.vocab_size == load_tokenizer(str(root / "tokenizer")).vocab_size < 300


class TestAdapter:
    def backbone(self, root: Path) -> RunConfig:
        model = {"kind": "student_backbone", "adapter": str(root / "adapter")}
        return recipe(root, SAMPLED, {"model": model})

    @pytest.fixture(autouse=True)
    def _adapter(self, root: Path) -> None:
        from safetensors.numpy import save_file

        self.folder = root / "adapter"
        self.folder.mkdir()
        self.describe(["q_proj"])
        save_file({}, self.folder / "adapter_model.safetensors")

    def describe(self, targets: list[str]) -> None:
        described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": targets}
        write_json(self.folder / "adapter_config.json", described)

    def test_it_fits(self, root: Path) -> None:
        require_teacher_files(self.backbone(root))

    def test_of_another_model(self, root: Path) -> None:
        self.describe(["c_attn"])
        refused(self.backbone(root), "another model's adapter: .* no linear layer 'c_attn'")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "describes no LoRA adapter: adapter_config.json: not valid JSON"),
            ("[]", "describes no LoRA adapter: it holds no JSON object"),
            ('{"peft_type": "LORA", "r": 4}', "describes no LoRA adapter: it has no 'lora_alpha'"),
            (
                '{"peft_type": "LORA", "r": "x", "lora_alpha": 1, "target_modules": ["q_proj"]}',
                "describes no LoRA adapter: rank: ",
            ),
        ],
    )
    def test_described_in_another_form(self, text: str, message: str, root: Path) -> None:
        (self.folder / "adapter_config.json").write_text(text)
        refused(self.backbone(root), message)

    def test_without_its_weights_or_with_half_of_them(self, root: Path) -> None:
        weights = self.folder / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        refused(self.backbone(root), "adapter_model.safetensors is")
        weights.unlink()
        refused(self.backbone(root), "holds no adapter_model.safetensors")

    def test_a_run_remembers_it(self, root: Path) -> None:
        keep_teacher(self.backbone(root), root)
        self.describe(["v_proj"])
        with pytest.raises(
            CheckpointError, match=r"^teacher\.model\.adapter: .* has changed since"
        ):
            keep_teacher(self.backbone(root), root)


class TestKeptTeacher:
    def test_another_one_is_refused_at_a_resume(self, root: Path) -> None:
        config = recipe(root, SAMPLED)
        keep_teacher(config, root)
        note = (root / TEACHER_BASE_FILE).read_text()
        assert str(root) not in note
        keep_teacher(config, root)
        assert (root / TEACHER_BASE_FILE).read_text() == note
        (root / "teacher" / "README.md").write_text("nothing of the model")
        keep_teacher(config, root)
        weights = root / "teacher" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
        with pytest.raises(CheckpointError, match=r"^teacher\.model\.path: .* has changed since"):
            keep_teacher(config, root)

    def test_a_folder_of_another_machine_is_not_missed(self, root: Path) -> None:
        shutil.rmtree(root / "teacher")
        keep_teacher(recipe(root, SAMPLED), root)
        assert not (root / TEACHER_BASE_FILE).exists()

    @pytest.mark.parametrize("note", ["[]", "{}"])
    def test_a_spoilt_note_is_refused(self, note: str, root: Path) -> None:
        (root / TEACHER_BASE_FILE).write_text(note)
        with pytest.raises(CheckpointError, match="has changed since"):
            keep_teacher(recipe(root, TOP_K), root)

    def test_nothing_is_kept_of_one_that_nobody_asks(self, root: Path) -> None:
        keep_teacher(recipe(root, {"objective": "grpo"}), root)
        assert not (root / TEACHER_BASE_FILE).exists()

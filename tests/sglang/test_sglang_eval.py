"""Evaluations on a real SGLang: one policy, asked in every form, gives one score.

The student is tiny, and has learnt two of three tasks by heart: a score that no accident gives. Its
chat template writes what our format writes, so that a server's prompts are those it was trained on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from typer.testing import CliRunner

from actors.cli import app
from rollout_server.chat_format import tools_text
from tests.support.hf_run import tokenizer_folder
from tests.support.sglang_engine import OVERLAY, sglang_python
from tests.support.sglang_server import sglang_server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
LEARNT = {"calculator_easy_000": 1, "calculator_easy_001": 1, "calculator_easy_002": 0}
"""Passes of each task: the third was never shown."""
RECIPE = """\
name: learnt
objective: grpo
environment: {kind: calculator, difficulty: easy, num_tasks: 3, seed: 0, prompt: full}
tasks:
  kind: ids
  train: [calculator_easy_000, calculator_easy_001]
  eval: [calculator_easy_000, calculator_easy_001, calculator_easy_002]
student:
  tokenizer: TOKENIZER
  model: {kind: hf, path: BASE, device: cpu, max_context_tokens: 2600, max_microbatch_tokens: 8000}
  warmup:
    {num_steps: 300, batch_size: 2, learning_rate: 2.0e-3, traces_per_task: 1, noisy_fraction: 0.0}
rollout: {max_new_tokens: 120, max_context_tokens: 2600, episode_deadline_s: null, num_workers: 1}
optim: {lr: 1.0e-6}
loop: {num_steps: 1, num_groups: 1, group_size: 2}
evaluation:
  before: false
  after: false
  baselines: []
  temperature: 0.0
  episodes_per_task: 1
  deploy_engine:
    kind: sglang
    python: INTERPRETER
    device: cpu
    attention_backend: torch_native
    max_total_tokens: 8000
    extra_env: {PYTHONPATH: SHIMS, OMP_NUM_THREADS: "1"}
checkpoint: {every_n_steps: 1}
"""
HEAD, FOOT = tools_text([]).split("<tools>")
TEMPLATE = (
    "{%- if tools -%}<|im_start|>system\n"
    + HEAD
    + "<tools>"
    + "{%- for tool in tools -%}{%- set f = tool.function if tool.function else tool -%}"
    + '{{ "\\n" }}{{ {"type": "function", "function": {"name": f.name, "description": '
    + 'f.description, "parameters": f.parameters}} | tojson }}{%- endfor -%}'
    + FOOT.replace("\n", '{{ "\\n" }}')
    + '<|im_end|>{{ "\\n" }}{%- endif -%}'
    + "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    + "{%- if messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{%- endif -%}"
    + '{{ "\\n" }}<tool_response>{{ "\\n" }}{{ m.content }}{{ "\\n" }}</tool_response>'
    + "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}"
    + '<|im_end|>{{ "\\n" }}{%- endif -%}'
    + "{%- elif m.role == 'assistant' -%}"
    + '<|im_start|>assistant{{ "\\n" }}<think>{{ "\\n\\n" }}</think>{{ "\\n\\n" }}'
    + "{{ m.content or '' }}{%- for call in m.tool_calls or [] -%}"
    + '{%- if not loop.first -%}{{ "\\n" }}{%- endif -%}'
    + '<tool_call>{{ "\\n" }}<function={{ call.function.name }}>{{ "\\n" }}'
    + "{%- for name, value in call.function.arguments.items() -%}"
    + '<parameter={{ name }}>{{ "\\n" }}'
    + "{{ value if value is string else value | tojson }}"
    + '{{ "\\n" }}</parameter>{{ "\\n" }}{%- endfor -%}'
    + '</function>{{ "\\n" }}</tool_call>{%- endfor -%}<|im_end|>{{ "\\n" }}'
    + "{%- else -%}<|im_start|>{{ m.role }}"
    + '{{ "\\n" }}{{ m.content }}<|im_end|>{{ "\\n" }}{%- endif -%}{%- endfor -%}'
    + "{%- if add_generation_prompt -%}"
    + '<|im_start|>assistant{{ "\\n" }}<think>{{ "\\n\\n" }}</think>{{ "\\n\\n" }}{%- endif -%}'
)
"""Turns, calls and results as ``Qwen36ChatFormat`` writes them."""


def call(*arguments: object) -> dict[str, Any]:
    """The result of a command."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])["result"]
    return found


def trained_run(root: Path) -> Path:
    """A run whose student does what it was shown, and nothing else."""
    tokenizer, base = root / "tokenizer", root / "base"
    tokenizer_folder(tokenizer)
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
    text = RECIPE.replace("TOKENIZER", str(tokenizer)).replace("BASE", str(base))
    text = text.replace("INTERPRETER", str(sglang_python())).replace("SHIMS", str(OVERLAY))
    (root / "learnt.yaml").write_text(text)
    call("train", root / "learnt.yaml", "--run-dir", root / "run")
    return root / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("learnt"))


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    """The run's export behind SGLang, with a chat template and a parser of its calls."""
    folder = run.parent / "served"
    call("export", run, "--output", folder)
    shutil.copy(run.parent / "tokenizer" / "tokenizer.json", folder)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    options = {"tool-call-parser": "qwen3_coder"}
    with sglang_server(folder, run.parent / "server.log", "learnt", **options) as found:
        yield found


def measured(run: Path, output: Path, *arguments: str) -> dict[str, Any]:
    """The last row of an evaluation."""
    result = call("eval", run, "--output", output, *arguments)
    assert result["rows"][-1]["num_faults"] == 0
    row: dict[str, Any] = result["rows"][-1]
    return row


def passes(row: dict[str, Any]) -> dict[str, int]:
    return {task["task_id"]: task["num_passed"] for task in row["tasks"]}


def rewards(row: dict[str, Any]) -> dict[str, float]:
    """Of the learnt tasks; in the other's babble a server's parser may read what ours refuses."""
    return {task["task_id"]: task["reward_sum"] for task in row["tasks"] if task["num_passed"]}


FORMS: dict[str, tuple[str, ...]] = {
    "tokens": ("--policy", "sglang:URL"),
    "text": ("--policy", "openai:URL/v1", "--calls", "text"),
    "tools": ("--policy", "openai:URL/v1", "--calls", "tools"),
}


def test_one_policy_has_one_score_in_every_form(run: Path, url: str, tmp_path: Path) -> None:
    own = measured(run, tmp_path / "own", "--policy", "student")
    assert passes(own) == LEARNT
    for form, arguments in FORMS.items():
        asked = [argument.replace("URL", url) for argument in arguments]
        row = measured(run, tmp_path / form, *asked)
        assert passes(row) == LEARNT, form
        assert rewards(row) == rewards(own), form


def test_a_checkpoint_is_deployed_on_a_server_of_its_own(run: Path, tmp_path: Path) -> None:
    options = ("--checkpoint", "step-000001", "--deploy")
    here = measured(run, tmp_path / "hf", *options, "hf")
    there = measured(run, tmp_path / "sglang", *options, "sglang")
    assert (here["tag"], there["tag"]) == (
        "step-000001-deployed-hf",
        "step-000001-deployed-sglang",
    )
    assert passes(here) == passes(there) == LEARNT
    assert there["tokens_per_episode"] == here["tokens_per_episode"]
    # The same command again measures nothing twice.
    before = (tmp_path / "sglang" / "eval.json").read_bytes()
    measured(run, tmp_path / "sglang", *options, "sglang")
    assert (tmp_path / "sglang" / "eval.json").read_bytes() == before

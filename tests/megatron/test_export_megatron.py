"""A Megatron student leaves as a folder that transformers loads."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from actors import launch
from actors.eval_jobs import EvaluationRequest, deployed_lines
from actors.export import export_run
from miniverl_dist.backends.base import StudentBackend
from miniverl_dist.config.load import load_run_config
from miniverl_dist.observability.progress import SilentProgress
from tests.support.hf_models import CONFIGS
from tests.support.hf_run import run_of
from tests.support.hf_student import hf_batch, sequences

NAME = "step-000002"


async def megatron_run(folder: Path, vocab_size: int = 300) -> tuple[Path, StudentBackend]:
    config = json.loads((CONFIGS / "tiny_qwen3.json").read_text()) | {"vocab_size": vocab_size}
    (folder / "tiny.json").write_text(json.dumps(config))
    described = {
        "kind": "megatron",
        "config": str(folder / "tiny.json"),
        "max_context_tokens": 150,
    }
    return await run_of(folder, described)


async def test_transformers_loads_the_student(tmp_path: Path) -> None:
    run, student = await megatron_run(tmp_path)
    batch = hf_batch(5)
    expected = student.logprobs(batch)
    student.close()
    told = export_run(run, tmp_path / "out")
    assert (told["format"], told["student"]["kind"]) == ("hf", "megatron")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    for span in sequences(batch):
        rows = torch.from_numpy(batch.token_ids[span])
        with torch.no_grad():
            logits = model(input_ids=rows[None]).logits[0, :-1].double()
        found = torch.log_softmax(logits, -1).gather(1, rows[1:, None]).squeeze(1).numpy()
        np.testing.assert_allclose(found, expected[span][1:], rtol=0, atol=1e-5)


def test_a_checkpoint_is_deployed_beside_where_the_run_began(tmp_path: Path) -> None:
    run, student = asyncio.run(megatron_run(tmp_path, vocab_size=267))  # no padding to sample
    student.close()
    checkpoint = run / "checkpoints" / NAME
    request = EvaluationRequest(("student",), NAME, checkpoint, deploy="hf")
    report = launch.evaluate_request(
        load_run_config(run), request, output=run, progress=SilentProgress()
    )
    assert [(row.tag, row.policy_version, row.num_faults) for row in report.rows] == [
        ("initial", 0, 0),
        (f"{NAME}-deployed-hf", 2, 0),
    ]
    said: dict[str, list[list[int]]] = {}
    for line in (run / "eval_trajectories.jsonl").read_text().split("\n")[:-1]:
        record = json.loads(line)
        said.setdefault(record["tag"], []).append(record["trajectory"]["token_ids"])
    first, trained = (sorted(each) for each in said.values())
    assert len(first) == len(trained)
    assert first != trained
    base, after, delta = deployed_lines(report, request)
    assert base.startswith("base     (initial): pass 0.000 [")
    assert after.startswith(f"trained  ({NAME}-deployed-hf): pass 0.000 [")
    assert delta.startswith("delta    +0.000 [")

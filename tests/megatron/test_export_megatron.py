"""A Megatron student leaves as a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from actors.export import export_run
from tests.support.hf_models import CONFIGS
from tests.support.hf_run import run_of
from tests.support.hf_student import hf_batch, sequences


async def test_transformers_loads_the_student(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "tiny_qwen3.json").read_text()) | {"vocab_size": 300}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    described = {
        "kind": "megatron",
        "config": str(tmp_path / "tiny.json"),
        "max_context_tokens": 150,
    }
    run, student = await run_of(tmp_path, described)
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

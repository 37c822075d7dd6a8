from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from miniverl_dist.errors import ChecksumError
from miniverl_dist.schemas.run_state import CheckpointFile, CheckpointManifest, RunState

STATE = RunState(
    step=3,
    policy_version=6,
    num_publishes=4,
    next_ticket=12,
    curriculum={"tail_calls": {"a": 2}},
    counters={"empty_batches": 1},
    file_positions={"metrics.jsonl": 77},
    config_digest="ab" * 32,
    seed=5,
    warmup_done=True,
)
MANIFEST = CheckpointManifest(
    format_version=1,
    name="step-000003",
    state=STATE,
    files=(CheckpointFile(path="w.bin", num_bytes=3, sha256="cd" * 32),),
)


def test_state_comes_back_from_json() -> None:
    assert RunState.model_validate_json(STATE.model_dump_json()) == STATE


def test_the_manifest_seals_itself_and_comes_back() -> None:
    assert len(MANIFEST.sha256) == 64
    assert CheckpointManifest.model_validate_json(MANIFEST.model_dump_json(indent=2)) == MANIFEST


@pytest.mark.parametrize("name", ["step", "policy_version", "num_publishes", "next_ticket", "seed"])
def test_another_number_in_the_state_is_noticed(name: str) -> None:
    record = json.loads(MANIFEST.model_dump_json())
    record["state"][name] += 1
    with pytest.raises(ChecksumError, match="checkpoint step-000003: SHA-256"):
        CheckpointManifest.model_validate_json(json.dumps(record))


def test_another_seal_is_noticed() -> None:
    record = json.loads(MANIFEST.model_dump_json()) | {"sha256": "00" * 32}
    with pytest.raises(ChecksumError):
        CheckpointManifest.model_validate_json(json.dumps(record))


def test_fields_are_neither_missing_nor_unknown() -> None:
    record = json.loads(STATE.model_dump_json())
    for wrong in (record | {"extra": 1}, {k: v for k, v in record.items() if k != "seed"}):
        with pytest.raises(ValidationError):
            RunState.model_validate_json(json.dumps(wrong))

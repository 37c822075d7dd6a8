from __future__ import annotations

import asyncio
import errno
import json
import random
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from miniverl_dist.errors import CheckpointError, ChecksumError
from miniverl_dist.observability.run_dir import CHECKPOINT_MARKER
from miniverl_dist.schemas.run_state import RunState
from miniverl_dist.training.checkpoint import (
    check_files,
    commit,
    discard_incomplete,
    list_checkpoints,
    newest_checkpoint,
    prune,
    read_manifest,
    seal,
    verify,
    verify_seal,
)

FILES = {"model.bin": bytes(range(256)) * 3, "ranks/0/optimizer.bin": b"moments", "empty": b""}


def state(step: int) -> RunState:
    return RunState(
        step=step,
        policy_version=step,
        num_publishes=step,
        next_ticket=2 * step,
        curriculum={"tail_calls": {"a": 1}},
        counters={},
        file_positions={"metrics.jsonl": 10},
        config_digest="d" * 64,
        seed=0,
        warmup_done=True,
    )


async def save(directory: Path) -> None:
    for name, data in FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def failing(error: BaseException) -> Callable[[Path], Awaitable[None]]:
    """A save that gets half of its files written."""

    async def save_half(directory: Path) -> None:
        (directory / "model.bin").write_bytes(b"half")
        raise error

    return save_half


async def made(folder: Path, step: int) -> Path:
    return await commit(folder, f"step-{step:06d}", state(step), save)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


class TestCommit:
    async def test_it_holds_what_was_saved_and_the_state(self, folder: Path) -> None:
        path = await made(folder, 4)
        manifest = verify(path)
        assert manifest.state == state(4)
        assert {file.path: file.num_bytes for file in manifest.files} == {
            name: len(data) for name, data in FILES.items()
        }
        assert all((path / name).read_bytes() == data for name, data in FILES.items())
        assert names(folder) == ["step-000004"]

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
            (OSError(errno.EIO, "Input/output error"), "Input/output error"),
            (CheckpointError("cannot write model.bin: No space left on device"), "No space left"),
        ],
    )
    async def test_a_save_that_fails_leaves_the_former_ones_intact(
        self, folder: Path, error: Exception, message: str
    ) -> None:
        await made(folder, 1)
        with pytest.raises(CheckpointError, match=message) as caught:
            await commit(folder, "step-000002", state(2), failing(error))
        assert "step-000002 was not written" in str(caught.value)
        assert "former checkpoints in checkpoints/ are intact" in str(caught.value)
        assert names(folder) == ["step-000001"]
        assert verify(folder / "step-000001").state.step == 1

    async def test_a_disk_that_fills_up_at_the_manifest_leaves_nothing(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await made(folder, 1)

        def no_space(self: Path, target: Path) -> Path:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "replace", no_space)
        with pytest.raises(CheckpointError, match="no space left"):
            await made(folder, 2)
        assert names(folder) == ["step-000001"]

    async def test_a_writer_that_hides_why_it_failed_is_explained_by_the_disk(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await made(folder, 1)
        usage = shutil.disk_usage(folder)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4096))
        error = CheckpointError("rank 1: cannot write weights: CheckpointException")
        with pytest.raises(CheckpointError, match="not written: the disk is full; former"):
            await commit(folder, "step-000002", state(2), failing(error))

    async def test_a_save_that_is_cancelled_leaves_nothing(self, folder: Path) -> None:
        with pytest.raises(asyncio.CancelledError):
            await commit(folder, "step-000002", state(2), failing(asyncio.CancelledError()))
        assert names(folder) == []

    async def test_an_unforeseen_error_keeps_its_type(self, folder: Path) -> None:
        with pytest.raises(ZeroDivisionError):
            await commit(folder, "step-000002", state(2), failing(ZeroDivisionError()))
        assert names(folder) == []

    async def test_what_a_killed_commit_left_is_discarded(self, folder: Path) -> None:
        await made(folder, 1)
        dead = folder / ".incomplete-step-000002"
        shutil.copytree(folder / "step-000001", dead)
        assert [path.name for path in list_checkpoints(folder)] == ["step-000001"]
        discard_incomplete(folder)
        assert names(folder) == ["step-000001"]
        shutil.copytree(folder / "step-000001", dead)
        await made(folder, 3)
        assert names(folder) == ["step-000001", "step-000003"]

    async def test_one_of_the_same_name_is_replaced(self, folder: Path) -> None:
        await made(folder, 1)
        (folder / "step-000001" / "stray").write_bytes(b"x")
        assert verify(await made(folder, 1)).state.step == 1


class TestFinding:
    async def test_oldest_first_by_step(self, folder: Path) -> None:
        for step in (999_999, 3, 20):
            await made(folder, step)
        steps = [read_manifest(path).state.step for path in list_checkpoints(folder)]
        assert steps == [3, 20, 999_999]

    async def test_a_millionth_step_comes_last(self, folder: Path) -> None:
        for step in (1_000_000, 999_999):
            await made(folder, step)
        assert newest_checkpoint(folder) == folder / "step-1000000"

    async def test_what_somebody_put_there_is_neither_gone_on_from_nor_pruned(
        self, folder: Path
    ) -> None:
        for step in (1, 2):
            await made(folder, step)
        for kept in ("step-000001-copy", "zz"):
            shutil.copytree(folder / "step-000001", folder / kept)
        (folder / "notes").mkdir()
        assert newest_checkpoint(folder) == folder / "step-000002"
        assert prune(folder, keep=1) == ["step-000001"]
        assert names(folder) == ["notes", "step-000001-copy", "step-000002", "zz"]

    async def test_a_damaged_manifest_is_listed_and_hides_no_other(self, folder: Path) -> None:
        for step in (1, 2, 3):
            await made(folder, step)
        (folder / "step-000002" / "checkpoint.json").write_bytes(b"{")
        found = [path.name for path in list_checkpoints(folder)]
        assert found == ["step-000001", "step-000002", "step-000003"]
        assert prune(folder, 1) == found[:2]

    async def test_a_folder_without_a_manifest_is_no_checkpoint(self, folder: Path) -> None:
        path = await made(folder, 1)
        (path / "checkpoint.json").unlink()
        assert list_checkpoints(folder) == []
        with pytest.raises(CheckpointError, match=r"has no checkpoint\.json.*use another"):
            verify(path)

    def test_a_run_without_a_commit_has_none(self, folder: Path) -> None:
        assert list_checkpoints(folder) == []

    async def test_prune_keeps_the_newest(self, folder: Path) -> None:
        for step in (5, 10, 15, 20):
            await made(folder, step)
        assert prune(folder, 2) == ["step-000005", "step-000010"]
        assert names(folder) == ["step-000015", "step-000020"]
        assert prune(folder, 5) == []


class TestVerify:
    async def test_missing_and_unknown_files_are_named(self, folder: Path) -> None:
        path = await made(folder, 1)
        (path / "other.bin").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"missing files \[\], unknown .*'other\.bin'"):
            verify(path)
        (path / "other.bin").unlink()
        (path / "model.bin").unlink()
        with pytest.raises(
            CheckpointError, match=r"missing files \['model\.bin'\], unknown .*\[\]"
        ):
            verify(path)

    async def test_a_shortened_file_is_named(self, folder: Path) -> None:
        path = await made(folder, 1)
        (path / "model.bin").write_bytes(FILES["model.bin"][:-1])
        with pytest.raises(ChecksumError, match=r"step-000001/model\.bin: 767 bytes, expected 768"):
            verify(path)
        with pytest.raises(ChecksumError, match="767 bytes, expected 768"):
            check_files(path)

    async def test_the_quick_check_knows_names_and_sizes_only(self, folder: Path) -> None:
        path = await made(folder, 1)
        changed = bytes([FILES["model.bin"][0] ^ 1]) + FILES["model.bin"][1:]
        (path / "model.bin").write_bytes(changed)
        assert check_files(path).state == state(1)
        (path / "model.bin").unlink()
        with pytest.raises(CheckpointError, match=r"missing files \['model\.bin'\]"):
            check_files(path)

    async def test_another_format_is_refused(self, folder: Path) -> None:
        path = await made(folder, 1)
        record = json.loads((path / "checkpoint.json").read_text()) | {"format_version": 9}
        (path / "checkpoint.json").write_text(json.dumps(record | {"sha256": ""}))
        with pytest.raises(CheckpointError, match="has format 9, expected 1"):
            verify(path)

    async def test_a_damaged_manifest_is_one_clear_error(self, folder: Path) -> None:
        path = await made(folder, 1)
        raw = (path / "checkpoint.json").read_bytes()
        (path / "checkpoint.json").write_bytes(raw[: len(raw) // 2])
        with pytest.raises(CheckpointError, match=r"step-000001/checkpoint\.json is damaged"):
            verify(path)

    async def test_every_flipped_byte_of_the_manifest_is_found(self, folder: Path) -> None:
        path = await made(folder, 1)
        original = (path / "checkpoint.json").read_bytes()
        draw = random.Random(0)
        for where in range(len(original)):
            write_flipped(path / "checkpoint.json", original, where, draw.randrange(8))
            with pytest.raises((CheckpointError, ChecksumError)):
                read_manifest(path)

    @pytest.mark.parametrize("name", ["model.bin", "ranks/0/optimizer.bin", "checkpoint.json"])
    async def test_every_flipped_byte_of_a_file_is_found(self, folder: Path, name: str) -> None:
        path = await made(folder, 1)
        original = (path / name).read_bytes()
        draw = random.Random(1)
        for where in {0, len(original) - 1, *draw.sample(range(len(original)), 7)}:
            write_flipped(path / name, original, where, draw.randrange(8))
            with pytest.raises((CheckpointError, ChecksumError)):
                verify(path)
        (path / name).write_bytes(original)
        verify(path)


def write_flipped(path: Path, original: bytes, where: int, bit: int) -> None:
    flipped = bytearray(original)
    flipped[where] ^= 1 << bit
    path.write_bytes(bytes(flipped))


def test_a_commit_that_lost_its_manifest_is_not_passed_over(tmp_path: Path) -> None:
    for name in ("step-000001", "step-000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CHECKPOINT_MARKER).write_text("{}")
    (tmp_path / ".incomplete-step-000003").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000002"
    (tmp_path / "step-000002" / CHECKPOINT_MARKER).unlink()
    with pytest.raises(CheckpointError, match=r"step-000002 has no checkpoint\.json"):
        newest_checkpoint(tmp_path)
    assert newest_checkpoint(tmp_path / "none") is None


def test_a_sealed_folder_shows_any_change(tmp_path: Path) -> None:
    folder, mark = tmp_path / "teacher", tmp_path / "teacher.json"
    folder.mkdir()
    (folder / "weights").write_bytes(b"12345")
    seal(folder, mark)
    verify_seal(folder, mark)
    (folder / "weights").write_bytes(b"12346")
    with pytest.raises(ChecksumError, match="teacher/weights"):
        verify_seal(folder, mark)
    (folder / "weights").unlink()
    with pytest.raises(CheckpointError, match="missing files"):
        verify_seal(folder, mark)
    mark.write_text("{")
    with pytest.raises(CheckpointError, match=r"teacher\.json is damaged"):
        verify_seal(folder, mark)

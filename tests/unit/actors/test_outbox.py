from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from actors.outbox import WeightOutbox, host_array
from miniverl_dist.config.cluster import PublishConfig
from miniverl_dist.errors import PublishError
from miniverl_dist.schemas.weights import combined_digest, weights_checksum
from rollout_server.inbox import BucketMessage, Bytes, TensorSpec, WeightInbox
from tests.support.weight_ends import FakeBackend, FakeEngine, copies, some_weights


def outbox(backend: FakeBackend, transport: str = "object_store", **given: Any) -> WeightOutbox:
    config = PublishConfig.model_validate({"transport": transport, "bucket_bytes": 4096})
    return WeightOutbox(backend, config, **({"put": copies} | given))


def messages(box: WeightOutbox) -> list[BucketMessage]:
    found = []
    while (message := box.next()) is not None:
        found.append(message)
    return found


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool],
)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 5), (7,)])
def test_torch_tensors_become_arrays_of_the_same_bits(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    array = host_array(tensor)
    assert (array.dtype.name, array.shape) == (str(dtype).removeprefix("torch."), shape)
    assert array.tobytes() == bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def test_what_is_contiguous_is_not_copied() -> None:
    tensor, array = torch.ones(8, requires_grad=True), np.ones((2, 3))
    assert host_array(tensor).__array_interface__["data"][0] == tensor.data_ptr()
    assert host_array(array) is array


def test_a_transposed_tensor_is_sent_in_its_own_order() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).T
    assert np.array_equal(host_array(tensor), np.array([[0, 3], [1, 4], [2, 5]], np.float32))
    assert host_array(np.arange(6).reshape(2, 3).T).flags.c_contiguous


def test_messages_describe_every_bucket_and_digests_all_of_them() -> None:
    weights = some_weights()
    buckets = [{n: weights[n]} for n in weights]
    box = outbox(FakeBackend([*buckets[:2], {}, *buckets[2:]]), rank=3)
    assert box.open(1) == 1
    found = messages(box)
    assert [m.index for m in found] == [0, 1, 2, 3, 4, 5]
    assert {m.sender for m in found} == {3}
    assert {m.policy_version for m in found} == {1}
    assert (found[2].tensors, found[2].payload) == ((), None)
    assert found[1].tensors == (TensorSpec("half", "bfloat16", (2, 3, 5)),)
    assert found[1].payload[0].tobytes() == weights["half"].tobytes()
    assert combined_digest(box.close()) == weights_checksum(weights)


def test_a_bucket_is_exported_when_it_is_asked_for() -> None:
    backend = FakeBackend([{"a": np.ones(1)}, {"b": np.ones(1)}])
    box = outbox(backend)
    box.open(1)
    assert backend.num_exported == 0
    box.next()
    assert backend.num_exported == 1


def test_a_second_open_starts_over() -> None:
    backend = FakeBackend([{"a": np.ones(1)}, {"b": np.ones(1)}])
    box = outbox(backend)
    box.open(1)
    box.next()
    backend.policy_version = 2
    assert box.open(2) == 2
    assert [(m.policy_version, m.index) for m in messages(box)] == [(2, 0), (2, 1)]
    assert box.close().keys() == {"a", "b"}


def test_an_update_in_between_is_noticed() -> None:
    backend = FakeBackend([{"a": np.ones(1)}, {"b": np.ones(1)}])
    box = outbox(backend)
    box.open(1)
    box.next()
    backend.policy_version = 2
    with pytest.raises(PublishError, match="holds policy version 2 while 1 is being published"):
        box.next()


def test_nothing_is_handed_out_before_open_and_behind_close() -> None:
    box = outbox(FakeBackend([{"a": np.ones(1)}]))
    with pytest.raises(PublishError, match="rank 0 holds"):
        box.next()
    box.open(1)
    box.close()
    with pytest.raises(PublishError, match="rank 0 holds"):
        box.next()


class TestDisk:
    async def test_shards_arrive_and_are_removed(self, tmp_path: Path) -> None:
        weights, engine = some_weights(), FakeEngine()
        box = outbox(FakeBackend([weights]), "disk", directory=tmp_path)
        inbox = WeightInbox(engine)
        box.open(1)
        await inbox.begin(1)
        [message] = messages(box)
        assert Path(message.payload) == tmp_path / "1" / "rank-00000-00000.safetensors"
        assert load_file(message.payload)["half"].dtype == ml_dtypes.bfloat16
        await inbox.add(message, message.payload)
        checksum = combined_digest(box.close())
        assert await inbox.finish(checksum) == (1, weights_checksum(weights))
        assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240 - a folder of this test

    def test_what_a_cut_off_publish_left_is_removed_but_not_another_ranks(
        self, tmp_path: Path
    ) -> None:
        backend = FakeBackend([{"a": np.ones(1)}])
        first = outbox(backend, "disk", directory=tmp_path)
        other = outbox(backend, "disk", directory=tmp_path, rank=1)
        for box in (first, other):
            box.open(1)
            box.next()
        backend.policy_version = 2
        first.open(2)
        assert [path.name for path in tmp_path.rglob("*.safetensors")] == [
            "rank-00001-00000.safetensors"
        ]
        other.open(2)
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        blocked = tmp_path / "publish"
        blocked.write_text("")
        box = outbox(FakeBackend([{"a": np.ones(1)}]), "disk", directory=blocked)
        box.open(1)
        with pytest.raises(PublishError, match=r"rank 0 cannot write .*: Not a directory"):
            box.next()

    def test_a_folder_is_needed(self) -> None:
        with pytest.raises(PublishError, match="needs a directory that all nodes share"):
            outbox(FakeBackend([]), "disk").open(1)


class FakeGroup:
    """Notes what is sent, and when all of it was waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def send(self, parts: Sequence[Bytes]) -> None:
        self.log.append(f"send {sum(part.nbytes for part in parts)}")

    def flush(self) -> None:
        self.log.append("flush")


def test_a_broadcast_waits_for_the_former_bucket_before_it_gathers_the_next() -> None:
    group = FakeGroup()

    class Watched(FakeBackend):
        def export(self, bucket_bytes: int) -> Any:
            for bucket in super().export(bucket_bytes):
                group.log.append("export")
                yield bucket

    buckets: list[Mapping[str, NDArray[Any]]] = [{"a": np.ones(1)}, {}, {"b": np.ones(2)}]
    box = outbox(Watched(list(buckets)), "broadcast", broadcast=lambda: group)
    box.open(1)
    assert [m.payload for m in messages(box)] == [None, None, None]
    steps = ["flush", "export", "send 8", "flush", "export", "flush", "export", "send 16", "flush"]
    assert group.log == steps


def test_a_broadcast_needs_a_group() -> None:
    box = outbox(FakeBackend([{"a": np.ones(1)}]), "broadcast")
    box.open(1)
    with pytest.raises(PublishError, match="rank 0 has no group to broadcast to"):
        box.next()

"""Routed experts: the engine's form, the form on disk, the form of a batch."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from miniverl_dist.errors import BatchError, RecordError, ReplyMismatchError
from miniverl_dist.schemas.routing import (
    ExpertRows,
    RoutingShape,
    check_distinct,
    decode_engine_rows,
    encode_engine_rows,
    pack_rows,
)
from miniverl_dist.schemas.trajectory import Trajectory
from tests.fakes import trajectory

SHAPE = RoutingShape(num_layers=2, experts_per_token=3, num_experts=8)


def rows(num_rows: int, dtype: str = "uint8", seed: int = 0) -> ExpertRows:
    noise = np.random.default_rng(seed).random((num_rows, 2, 8))
    return noise.argsort(-1)[..., :3].astype(dtype)


def routed(array: ExpertRows | None) -> Trajectory:
    told = trajectory("abc")
    fields = {name: getattr(told, name) for name in Trajectory.model_fields}
    return Trajectory.model_validate(fields | {"routed_experts": array})


def stored(num_rows: int = 4) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(routed(rows(num_rows)).model_dump_json())
    return record


class TestEngineForm:
    def test_the_recorded_form_is_read(self) -> None:
        """int32, row by row, layer by layer: 5 tokens in and out make 4 rows."""
        wire = base64.b64encode(np.arange(4 * 2 * 3, dtype="<i4") % 8).decode()
        found = decode_engine_rows(wire, SHAPE, 4)
        assert found.dtype == np.uint8
        assert found[0].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert found[3].tolist() == [[2, 3, 4], [5, 6, 7]]

    @pytest.mark.parametrize(
        ("num_experts", "dtype"), [(2, "uint8"), (256, "uint8"), (257, "uint16")]
    )
    def test_it_comes_back_in_the_smallest_type(self, num_experts: int, dtype: str) -> None:
        shape = RoutingShape(2, 3, num_experts)
        sent = np.random.default_rng(1).integers(0, num_experts, (5, 2, 3)).astype("uint16")
        sent[0, 0, 0] = num_experts - 1
        found = decode_engine_rows(encode_engine_rows(sent), shape, 5)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, sent)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("%%%%", "not base64"),
            (encode_engine_rows(rows(3)), "has 72 bytes, expected 4 rows of 2 layers and 3"),
            (encode_engine_rows(rows(4)[:, :1]), "serve the student's model"),
            (
                encode_engine_rows(rows(4) + np.uint8(1)),
                "names experts 1 to 8, the model has 0 to 7",
            ),
        ],
    )
    def test_what_cannot_be_this_models_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(ReplyMismatchError, match=message):
            decode_engine_rows(text, SHAPE, 4)

    def test_a_negative_index_is_no_expert(self) -> None:
        wire = np.zeros((4, 2, 3), dtype="<i4")
        wire[1, 1, 1] = -1
        with pytest.raises(ReplyMismatchError, match="names experts -1 to 0"):
            decode_engine_rows(base64.b64encode(wire).decode(), SHAPE, 4)

    def test_an_expert_that_is_named_twice_is_found(self) -> None:
        check_distinct(rows(9))
        check_distinct(rows(0))
        twice = rows(9)
        twice[7, 1] = [4, 2, 4]
        with pytest.raises(RecordError, match=r"row 7 in layer 1 are \[4, 2, 4\]"):
            check_distinct(twice)


class TestOnDisk:
    @settings(deadline=None)
    @given(
        hnp.arrays(
            st.sampled_from(["uint8", "uint16"]),
            st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 3)),
        )
    )
    def test_it_is_what_it_was(self, array: ExpertRows) -> None:
        line = routed(array).model_dump_json()
        found = Trajectory.model_validate_json(line, strict=True).routed_experts
        assert found is not None
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)

    def test_it_is_absent_where_nothing_was_asked_for(self) -> None:
        told = trajectory("abc")
        record = json.loads(told.model_dump_json())
        assert record["routed_experts"] is None
        del record["routed_experts"]  # as runs before it was there have written
        assert Trajectory.model_validate_json(json.dumps(record)).routed_experts is None

    def test_it_is_compact(self) -> None:
        same = np.zeros((6, 40, 8), dtype=np.uint8)
        assert len(json.dumps(json.loads(routed(same).model_dump_json())["routed_experts"])) < 150

    def test_it_cannot_be_changed_afterwards(self) -> None:
        mine = rows(4)
        held = routed(mine).routed_experts
        assert held is not None
        with pytest.raises(ValueError, match="read-only"):
            held[0, 0, 0] = 1
        mine[0, 0, 0] = 1  # the caller's own array is left as it was

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"data": "%%%%"}, "damaged"),
            ({"data": base64.b64encode(b"no stream").decode()}, "damaged"),
            ({"data": 7}, "damaged"),
            ({"data": base64.b64encode(zlib.compress(b"x" * 23)).decode()}, "23 bytes"),
            ({"data": base64.b64encode(zlib.compress(b"x" * 10**6)).decode()}, "ask for 24 bytes"),
            ({"data": base64.b64encode(zlib.compress(b"x" * 24) + b"y").decode()}, "damaged"),
            ({"data": base64.b64encode(zlib.compress(b"x" * 24)[:-2]).decode()}, "damaged"),
            ({"shape": [5, 2, 3]}, "ask for 30 bytes"),
            ({"shape": [24]}, r"shape is \[24\], expected \[rows, layers"),
            ({"shape": [-4, -2, 3]}, r"shape is \[-4, -2, 3\]"),
            ({"shape": None}, "shape is None"),
            ({"dtype": "uint16"}, "ask for 48 bytes"),
            ({"dtype": "object"}, "dtype is 'object', expected uint8 or uint16"),
            ({"extra": 1}, "found .*extra.*, expected data, dtype, shape"),
        ],
    )
    def test_damage_is_told(self, changes: dict[str, Any], message: str) -> None:
        record = stored()
        record["routed_experts"] |= changes
        with pytest.raises(RecordError, match=message):
            Trajectory.model_validate_json(json.dumps(record), strict=True)

    def test_every_changed_character_of_the_data_is_noticed(self) -> None:
        record = stored(9)
        data = record["routed_experts"]["data"]
        for index in range(len(data.rstrip("="))):
            other = "A" if data[index] != "A" else "B"
            record["routed_experts"]["data"] = data[:index] + other + data[index + 1 :]
            try:
                found = Trajectory.model_validate_json(json.dumps(record)).routed_experts
            except RecordError:
                continue
            # A bit that nobody reads: zlib's level, or the last character's spare ones.
            np.testing.assert_array_equal(found, rows(9))

    @pytest.mark.parametrize("bad", [rows(4).astype("int64"), rows(4)[0], "text", [1, 2]])
    def test_other_arrays_are_refused(self, bad: Any) -> None:
        with pytest.raises(RecordError, match="routed_experts"):
            routed(bad)

    def test_more_rows_than_tokens_are_refused(self) -> None:
        size = len(trajectory("abc").token_ids)
        assert routed(rows(size)).routed_experts is not None
        with pytest.raises(RecordError, match=f"has {size + 1} rows for {size} tokens"):
            routed(rows(size + 1))


class TestPacked:
    def test_rows_stand_at_their_tokens_and_gaps_say_so(self) -> None:
        short, long = rows(3, seed=1), rows(9, "uint16", seed=2)
        packed = pack_rows([short, None, long], [5, 2, 6])
        assert packed.dtype == np.int16
        np.testing.assert_array_equal(packed[:3], short)
        assert (packed[3:7] == -1).all()
        np.testing.assert_array_equal(packed[7:], long[:6])

    def test_two_models_in_one_batch_are_refused(self) -> None:
        with pytest.raises(BatchError, match=r"\[\(1, 3\), \(2, 3\)\], expected one"):
            pack_rows([rows(3), rows(3)[:, :1]], [3, 3])

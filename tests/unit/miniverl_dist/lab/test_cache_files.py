from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miniverl_dist.errors import ChecksumError, RecordError
from miniverl_dist.lab import cache_files
from miniverl_dist.lab.teacher_cache import TeacherCache
from tests.support.stored_targets import KEY, filled

REMEDY = "remove teacher-cache/ to ask the teacher again"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "teacher-cache"


class TestDamage:
    def test_the_entry_and_its_file_are_named(self, folder: Path) -> None:
        cache = filled(folder)
        entry = cache_files.read_index(folder).entries[3]
        flip(folder / entry.shard, entry.start)
        where = f"teacher-cache/{entry.shard}, entry '{entry.trajectory_id}': SHA-256"
        with pytest.raises(ChecksumError, match=where):
            cache.get(entry.trajectory_id, KEY, entry.policy_version)
        problems = cache.validate()
        assert len(problems) == 1
        assert where in problems[0]
        for other in cache_files.read_index(folder).entries:
            if other != entry:
                assert cache.get(other.trajectory_id, KEY, other.policy_version) is not None

    def test_a_missing_shard_and_a_cut_one(self, folder: Path) -> None:
        cache = filled(folder)
        (folder / "shard-000000.safetensors").unlink()
        whole = (folder / "shard-000001.safetensors").read_bytes()
        (folder / "shard-000001.safetensors").write_bytes(whole[:-1])
        (folder / "shard-000002.safetensors").write_bytes(
            (folder / "shard-000002.safetensors").read_bytes() + b"\0"
        )
        assert [line.removeprefix("teacher-cache/shard-00000") for line in cache.validate()] == [
            f"0.safetensors, entry 'ep-0.0': the file is missing; {REMEDY}",
            f"0.safetensors, entry 'ep-0.1': the file is missing; {REMEDY}",
            f"1.safetensors, entry 'ep-1.1': ends at byte {len(whole)}, the file has "
            f"{len(whole) - 1}: it was cut; {REMEDY}",
            f"2.safetensors: {len(whole) + 1} bytes, expected {len(whole)}; its 2 entries are "
            "intact",
        ]

    def test_damage_outside_of_the_entries(self, folder: Path) -> None:
        cache = filled(folder)
        flip(folder / "shard-000001.safetensors", 20)
        (problem,) = cache.validate()
        assert problem.startswith("teacher-cache/shard-000001.safetensors: SHA-256")
        assert problem.endswith("its 2 entries are intact")

    @pytest.mark.parametrize("data", [b"", b"{}", b'{"sha256":"', b"\xff" * 200, b"[]"])
    def test_an_index_that_is_none(self, folder: Path, data: bytes) -> None:
        filled(folder)
        (folder / "index.json").write_bytes(data)
        with pytest.raises(ChecksumError, match="differs from its checksum"):
            TeacherCache.read(folder)

    def test_a_folder_in_the_place_of_a_shard(self, folder: Path) -> None:
        cache = filled(folder)
        (folder / "shard-000001.safetensors").unlink()
        (folder / "shard-000001.safetensors").mkdir()
        assert len(cache.validate()) == 2


def flip(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(bytes(data))


def sealed(folder: Path, text: bytes) -> None:
    """An index with a right checksum, whatever it says."""
    body = text + b"}\n"
    digest = hashlib.sha256(body).hexdigest().encode()
    (folder / "index.json").write_bytes(b'{"sha256":"' + digest + b'","index":' + body)


def set_in(value: Any, *path_and_new: Any) -> None:
    *path, key, new = path_and_new
    for step in path:
        value = value[step]
    value[key] = new


FORGED: list[tuple[tuple[Any, ...], str]] = [
    (("entries", 0, "shard", "../x"), r"entries\.0\.shard: .*found '\.\./x'"),
    (("entries", 0, "shard", "/etc/passwd"), r"entries\.0\.shard"),
    (("shards", 0, "name", "../shard-000000.safetensors"), r"shards\.0\.name"),
    (("shards", 0, "name", "shard-000000.safetensors\n"), r"shards\.0\.name"),
    (("entries", 0, "shard", "shard-000009.safetensors"), "no shard of the index"),
    (("entries", 0, "start", -8), r"entries\.0\.start: .*found -8"),
    (("entries", 0, "start", 2**62), "takes bytes 4611686018427387904"),
    (("entries", 0, "num_rows", 2**62), "'ep-0.0' takes bytes"),
    (("entries", 0, "num_rows", -1), r"entries\.0\.num_rows"),
    (("entries", 0, "width", 6), "keeps 6 tokens a row, expected at most top_k 5"),
    (("entries", 0, "num_rows", 2.0), r"entries\.0\.num_rows: .*found 2\.0"),
    (("entries", 0, "num_rows", "2"), r"entries\.0\.num_rows"),
    (("entries", 0, "num_rows", True), r"entries\.0\.num_rows"),
    (("entries", 0, "trajectory_id", None), r"entries\.0\.trajectory_id"),
    (("entries", 0, "trajectory_id", "ep-0.1"), "two entries of one trajectory"),
    (("entries", 0, "sha256", "A" * 64), r"entries\.0\.sha256"),
    (("entries", 0, {}), r"entries\.0"),
    (("entries", 0, "class", "os.system"), r"entries\.0\.class"),
    (("entries", {"0": 1}), r"index\.json: entries: .*found \{'0': 1\}"),
    (("shards", 1, "name", "shard-000000.safetensors"), "names a shard twice"),
    (("next_shard", 1), "next_shard 1 is taken"),
    (("format_version", 2), "format_version"),
    (("identity", "temperature", 0), r"identity\.temperature"),
    (("identity", "mode", "other"), r"identity\.mode"),
]


class TestForgedIndex:
    """Right checksums, wrong contents: what somebody else's cache may hold."""

    def test_the_seal_of_this_test_is_the_real_one(self, folder: Path) -> None:
        filled(folder)
        before = (folder / "index.json").read_bytes()
        text = json.dumps(json.loads(before)["index"], separators=(",", ":"))
        sealed(folder, text.encode())
        assert (folder / "index.json").read_bytes() == before

    @pytest.mark.parametrize(("change", "message"), FORGED)
    def test_one_clear_error(self, folder: Path, change: tuple[Any, ...], message: str) -> None:
        filled(folder)
        index = json.loads((folder / "index.json").read_bytes())["index"]
        set_in(index, *change)
        sealed(folder, json.dumps(index).encode())
        with pytest.raises(RecordError, match=message) as caught:
            TeacherCache.read(folder)
        assert len(str(caught.value)) < 400

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (b"[" * 100_000, "not valid JSON"),
            (b"[" * 200 + b"]" * 200, "index.json"),
            (b"{", "not valid JSON"),
            (b'{"next_shard":1' + b"0" * 5000 + b"}", "not valid JSON"),
            (b'{"format_version":NaN}', "index.json"),
            (b"\xff\xfe", "not valid JSON"),
            (b'{"identity":{},"identity":{}}', "key 'identity' stands twice in one object"),
            (b'"index"', "index.json: the whole"),
        ],
    )
    def test_what_is_no_index_at_all(self, folder: Path, text: bytes, message: str) -> None:
        filled(folder)
        sealed(folder, text)
        with pytest.raises(RecordError, match=message):
            TeacherCache.read(folder)

    def test_a_key_twice_in_an_entry(self, folder: Path) -> None:
        filled(folder)
        text = json.dumps(json.loads((folder / "index.json").read_bytes())["index"])
        sealed(folder, text.replace('"num_rows": 2', '"num_rows": 2, "num_rows": 2', 1).encode())
        with pytest.raises(RecordError, match="key 'num_rows' stands twice"):
            TeacherCache.read(folder)

    def test_a_shard_larger_than_the_file(self, folder: Path) -> None:
        """The index alone is consistent; nothing is allocated for what the file does not have."""
        filled(folder)
        index = json.loads((folder / "index.json").read_bytes())["index"]
        set_in(index, "shards", 0, "num_bytes", 2**62)
        set_in(index, "entries", 0, "num_rows", 2**50)
        sealed(folder, json.dumps(index).encode())
        cache = TeacherCache.read(folder)
        with pytest.raises(ChecksumError, match="it was cut"):
            cache.get("ep-0.0", KEY, 0)
        assert any("it was cut" in problem for problem in cache.validate())
        with pytest.raises(ChecksumError, match="it was cut"):
            cache.prune(keep_versions=3)

    def test_bytes_that_are_no_targets(self, folder: Path) -> None:
        """Another range of the shard, with its right checksum."""
        filled(folder)
        index = json.loads((folder / "index.json").read_bytes())["index"]
        entry = index["entries"][0]
        data = (folder / entry["shard"]).read_bytes()
        size = 4 * entry["num_rows"] * (3 + 2 * entry["width"])
        entry |= {"start": 8, "sha256": hashlib.sha256(data[8 : 8 + size]).hexdigest()}
        sealed(folder, json.dumps(index).encode())
        cache = TeacherCache.read(folder)
        with pytest.raises(RecordError, match=r"entry 'ep-0\.0': holds no targets"):
            cache.get("ep-0.0", KEY, 0)
        assert any("holds no targets" in problem for problem in cache.validate())


HEADERS: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda data: struct.pack("<Q", 2**63) + data[8:], "a header of 9223372036854775808 bytes"),
    (lambda data: struct.pack("<Q", 0) + data[8:], "a header of 0 bytes"),
    (lambda data: data.replace(b'"I32"', b'"F32"', 1), "'F32'"),
    (lambda data: data.replace(b"[2,5]", b"[5,2]", 1), r"is \('I32', \(5, 2\)"),
    (lambda data: data.replace(b"[0,8]", b"[8,8]", 1), "in the header"),
    (lambda data: data.replace(b"[0,8]", b"[-,8]", 1), "not valid JSON"),
    (lambda data: data.replace(b"[0,8]", b"[0.8]", 1), "data_offsets"),
    (lambda data: data.replace(b"ep-0.0/tail", b"ep-0.0/tale", 1), "is None in the header"),
    (lambda data: data.replace(b"ep-0.1/positions", b"ep-0.0/positions", 1), "stands twice"),
    (lambda data: data.replace(b'"shape"', b'"dtype"', 1), "stands twice"),
    (lambda data: data.replace(b'"shape"', b'"chape"', 1), "chape|shape"),
]


@pytest.mark.parametrize(("change", "message"), HEADERS)
def test_a_forged_header_is_found(
    folder: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    """Shard and index have right checksums, but other readers would see other tensors."""
    cache = filled(folder)
    name = "shard-000000.safetensors"
    before = (folder / name).read_bytes()
    after = change(before)
    assert after != before
    assert len(after) == len(before)
    (folder / name).write_bytes(after)
    index = json.loads((folder / "index.json").read_bytes())["index"]
    index["shards"][0]["sha256"] = hashlib.sha256(after).hexdigest()
    sealed(folder, json.dumps(index).encode())
    problems = TeacherCache.read(folder).validate()
    assert problems
    assert all(problem.startswith(f"teacher-cache/{name}") for problem in problems)
    assert re.search(message, problems[0])
    assert cache.get("ep-0.0", KEY, 0) is not None  # we read by the index

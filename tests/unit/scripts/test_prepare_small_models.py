"""Small models from packages: what is taken, checked and refused, without the packages."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from miniverl_dist.errors import ChecksumError, ConfigError, MissingDependencyError
from scripts.prepare_small_models import (
    FORMAT,
    MODELS,
    STAMP,
    Model,
    Part,
    is_prepared,
    joined,
    located,
    prepare,
    require_accepted,
    require_room,
    site_packages,
)

ROOT = Path(__file__).parents[3]
DATA = {"pack_part1": b"first half, ", "pack_part2": b"second half"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def model(**changes: object) -> Model:
    made = Model(
        name="tiny",
        title="Tiny",
        parts=tuple(Part(name, "data/x.gguf", sha256(data)) for name, data in DATA.items()),
        sha256=sha256(b"".join(DATA.values())),
        num_parameters=10,
        licence="MIT",
        licence_files=(("pack_part1", "LICENSE"),),
        must_be_accepted=False,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    for name, data in DATA.items():
        (folder / name / "data").mkdir(parents=True)
        (folder / name / "data" / "x.gguf").write_bytes(data)
    return folder


def prepared(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    files = {"config.json": sha256(b"{}")}
    stamp = {"format": FORMAT, "source_sha256": model().sha256, "dtype": "float32", "files": files}
    (folder / STAMP).write_text(json.dumps(stamp | changes))
    return folder


def test_parts_are_joined_in_order(packages: Path, tmp_path: Path) -> None:
    files = [located(part, packages) for part in model().parts]
    joined(model(), files, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"first half, second half"
    with pytest.raises(ChecksumError, match="the 2 parts of tiny joined: SHA-256 "):
        joined(model(), files[::-1], tmp_path / "whole")


def test_a_file_that_is_missing_or_another_one_is_refused(packages: Path) -> None:
    part = model().parts[1]
    path = packages / "pack_part2" / "data" / "x.gguf"
    path.write_bytes(b"second halF")
    with pytest.raises(ChecksumError, match=f"x.gguf: SHA-256 .*expected {part.sha256}; install"):
        located(part, packages)
    path.unlink()
    with pytest.raises(MissingDependencyError, match=r"install_small_models\.sh"):
        located(part, packages)


def test_the_environment_or_its_packages_may_be_named(packages: Path, tmp_path: Path) -> None:
    assert site_packages(tmp_path / "venv") == site_packages(packages) == packages
    with pytest.raises(MissingDependencyError, match="no such folder; install the packages"):
        site_packages(tmp_path / "none")


def test_licences_are_shown_and_consent_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asking = model(title="Asking", licence="Terms", must_be_accepted=True)
    with pytest.raises(ConfigError, match=r"^Asking: the terms ask for your consent; read"):
        require_accepted((model(), asking), accepted=False)
    assert capsys.readouterr().out == "Tiny\n    licence: MIT\nAsking\n    licence: Terms\n"
    require_accepted((model(), asking), accepted=True)
    require_accepted((model(),), accepted=False)


def test_a_full_disk_is_noticed_beforehand(tmp_path: Path) -> None:
    require_room(model(), tmp_path, "float32", 0)
    huge = model(num_parameters=10**15)
    with pytest.raises(ConfigError, match=r"GiB free, tiny needs 18626\d\d\.\d GiB while"):
        require_room(huge, tmp_path, "bfloat16", 0)


class TestPreparedFolder:
    def test_it_is_left_alone(self, tmp_path: Path) -> None:
        assert not is_prepared(model(), tmp_path / "tiny", "float32")
        folder = prepared(tmp_path / "tiny")
        # Neither packages nor transformers are looked for.
        found = prepare(model(), tmp_path / "no-packages", tmp_path, "float32")
        assert found == f"{folder}: prepared already"

    def test_another_source_or_dtype_is_refused(self, tmp_path: Path) -> None:
        folder = prepared(tmp_path / "tiny")
        with pytest.raises(ConfigError, match=r"was prepared otherwise: found .*float32.*bfloat16"):
            is_prepared(model(), folder, "bfloat16")
        with pytest.raises(ConfigError, match="was prepared otherwise"):
            is_prepared(model(sha256="0" * 64), folder, "float32")

    def test_a_changed_or_lost_file_is_noticed(self, tmp_path: Path) -> None:
        folder = prepared(tmp_path / "tiny")
        (folder / "config.json").write_text("{ }")
        with pytest.raises(ChecksumError, match=r"config.json is missing or has changed"):
            is_prepared(model(), folder, "float32")
        (folder / "config.json").unlink()
        with pytest.raises(ChecksumError, match="to have it made again"):
            is_prepared(model(), folder, "float32")

    @pytest.mark.parametrize("stamp", [None, "{", "[]", '{"format": 1}'])
    def test_a_folder_of_somebody_else_is_not_touched(
        self, stamp: str | None, tmp_path: Path
    ) -> None:
        folder = tmp_path / "tiny"
        folder.mkdir()
        if stamp is not None:
            (folder / STAMP).write_text(stamp)
        with pytest.raises(ConfigError, match="was not written by this script"):
            prepare(model(), tmp_path, tmp_path, "float32")
        assert folder.is_dir()


def test_a_failure_leaves_nothing_behind(packages: Path, tmp_path: Path) -> None:
    whole = model(sha256="0" * 64)
    with pytest.raises(ChecksumError, match="joined"):
        prepare(whole, packages, tmp_path / "out", "float32")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_pinned_packages_are_those_that_are_read() -> None:
    lock = (ROOT / "scripts" / "lock" / "small_models.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", lock, re.MULTILINE))
    pinned = {name.replace("-", "_"): version for name, version in pins.items()}
    for each in MODELS:
        named = {part.package for part in each.parts} | {name for name, _ in each.licence_files}
        for name in named:
            package, _, rest = name.removesuffix(".dist-info").partition("-")
            assert package in pinned
            assert rest in ("", pinned[package])
    assert {"gguf", "accelerate"} <= pinned.keys()

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path

import pytest

from actors import doctor
from actors.doctor import Status
from miniverl_dist.errors import MissingDependencyError


def test_python_versions() -> None:
    assert doctor.python_version((3, 11)).status is Status.OK
    assert doctor.python_version((3, 13)) == doctor.Check(
        "python", Status.MISSING, "3.13", "use Python 3.11 or 3.12"
    )


def test_a_missing_package_names_the_command_that_installs_it() -> None:
    found = doctor.installed("no-such-package", doctor.LOCAL_HINT)
    assert (found.status, found.remedy) == (Status.MISSING, "pip install '.[local]' in a checkout")
    assert doctor.installed("no-such-package", "x", needed=False).status is Status.ABSENT
    assert doctor.installed("numpy", "x").status is Status.OK


class TestBfcl:
    def write(self, folder: Path, num_lines: int) -> Path:
        (folder / "BFCL_v4_multi_turn_base.json").write_text('{"id": 1}\n' * num_lines)
        return folder

    def test_all_tasks(self, tmp_path: Path) -> None:
        pytest.importorskip("bfcl_eval", reason="needs bfcl-eval (scripts/install_bfcl.sh)")
        assert doctor.bfcl_tasks(lambda: self.write(tmp_path, 200)).status is Status.OK

    def test_a_file_that_is_cut_off(self, tmp_path: Path) -> None:
        found = doctor.bfcl_tasks(lambda: self.write(tmp_path, 7))
        assert (found.status, found.found) == (Status.MISSING, "7 of 200 tasks")
        assert found.remedy == "scripts/install_bfcl.sh"

    def test_no_file_and_no_package(self, tmp_path: Path) -> None:
        assert doctor.bfcl_tasks(lambda: tmp_path).status is Status.MISSING

        def missing() -> Path:
            raise MissingDependencyError("no bfcl-eval")

        assert doctor.bfcl_tasks(missing).found == "bfcl-eval is not installed"


def test_tokenizer_data() -> None:
    found = doctor.tokenizer_data("Q", "no_such_package", "x")
    assert (found.status, found.remedy) == (Status.MISSING, doctor.LOCAL_HINT)


def test_torch_is_described_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('torch was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert doctor.torch_build().status is Status.MISSING
    (package / "version.py").write_text("__version__ = '9.9'\ncuda: Optional[str] = '13.1'\n")
    assert doctor.torch_build().found == "9.9, CUDA 13.1"
    (package / "version.py").write_text("__version__ = '9.9'\ncuda: Optional[str] = None\n")
    assert doctor.torch_build().found == "9.9, CPU only"


def test_memory_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.memory(1024**3).status is Status.WARNING
    assert doctor.memory(None).status is Status.WARNING
    assert doctor.memory(4 * 1024**3).found == "4.0 GiB"
    limit = doctor.memory_limit_bytes()
    assert limit is None or limit > 10**8
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert doctor.threads(2).remedy == "set OMP_NUM_THREADS to 2 or less"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert doctor.threads(2).status is Status.OK


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "free here" in doctor.disk(tmp_path).found
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 10**18)
    assert doctor.disk(tmp_path).status is Status.WARNING


def test_every_problem_has_a_remedy() -> None:
    for check in doctor.run_checks():
        assert check.status is Status.OK or check.remedy, check
        assert check.as_json()["status"] in ("ok", "missing", "absent", "warning")


class TestSglang:
    def installed(self, folder: Path) -> Path:
        (folder / "lib/python3.11/site-packages/sglang-0.5.23.dist-info").mkdir(parents=True)
        return folder

    def test_in_an_environment_of_its_own(self, tmp_path: Path) -> None:
        folder = self.installed(tmp_path)
        found = doctor.sglang(folder, frozenset({"avx2", "amx_tile"}), has_gpu=False)
        assert (found.status, found.found) == (Status.OK, f"0.5.23, {folder}/bin/python")
        assert doctor.sglang(folder, frozenset({"avx2"}), has_gpu=True).status is Status.OK
        assert doctor.sglang(folder, None, has_gpu=False).status is Status.OK

    def test_a_cpu_without_amx_needs_the_overlay(self, tmp_path: Path) -> None:
        found = doctor.sglang(self.installed(tmp_path), frozenset({"avx2"}), has_gpu=False)
        assert found.status is Status.WARNING
        assert "overlay: docs/engines.md" in found.remedy

    def test_it_is_not_needed(self, tmp_path: Path) -> None:
        if util.find_spec("sglang") is not None:
            pytest.skip("SGLang is in this environment")
        found = doctor.sglang(tmp_path, frozenset())
        assert (found.status, found.remedy) == (Status.ABSENT, "scripts/install_sglang.sh")

    def test_what_the_cpus_can_do_is_read(self) -> None:
        flags = doctor.cpu_flags()
        assert flags is None or flags

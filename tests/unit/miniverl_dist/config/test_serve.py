"""The configs of a teacher's service: what they take, and what they say about the rest."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from miniverl_dist.config.load import config_kind, load_config, load_teacher_service
from miniverl_dist.config.serve import LocalTeacherService, SglangTeacherService
from miniverl_dist.errors import ConfigError

ROOT = Path(__file__).resolve().parents[4]
LOCAL = "kind: local\nname: t\nmodel: models/t\n"
LAUNCH = "kind: sglang\nname: t\nlaunch: {model: m}\n"


def load(tmp_path: Path, text: str, *overrides: str) -> LocalTeacherService | SglangTeacherService:
    (tmp_path / "t.yaml").write_text(text)
    return load_teacher_service(tmp_path / "t.yaml", overrides)


def test_both_kinds_with_overrides_and_bases(tmp_path: Path) -> None:
    local = load(tmp_path, LOCAL, "port=9", "max_queued_tokens=100")
    assert isinstance(local, LocalTeacherService)
    assert (local.model, local.port, local.max_queued_tokens) == (Path("models/t"), 9, 100)
    assert local.host == "127.0.0.1"
    (tmp_path / "base.yaml").write_text(LAUNCH)
    derived = load(tmp_path, "extends: base.yaml\nlaunch: {tensor_parallel: 2}\n")
    assert isinstance(derived, SglangTeacherService)
    assert derived.launch is not None
    assert (derived.launch.model, derived.launch.tensor_parallel) == ("m", 2)
    assert config_kind(tmp_path / "base.yaml") == "sglang"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (LOCAL, ["host=0.0.0.0"], "give a `token_file`, or keep to 127.0.0.1"),
        (LAUNCH, ["launch.host=10.0.0.1"], "launch: host '10.0.0.1' can be reached"),
        (LOCAL, ["max_queued_tokens=0"], "max_queued_tokens: found 0, expected more than 0"),
        (LOCAL, ["port=70000"], "port: found 70000, expected at most 65535"),
        (LOCAL, ["nme=x"], "nme: unknown key"),
        (LAUNCH, ["launch.device=cpu"], "max_total_tokens is missing"),
        (LAUNCH, ["launch.extra_args={api-key: x}"], "extra_args: api-key"),
        (LAUNCH, ["launch.extra_args={--host: x}"], "extra_args: host"),
        (LAUNCH, ["launch.extra_args={context-length: 5}"], "extra_args: context-length"),
        (LOCAL, ["name=''"], "name: found ''"),
        (LOCAL, ['name="a\\nb"'], "name: found"),
        (LOCAL, ["host=''"], "host: found ''"),
        (LOCAL, ["device=banana"], "device: found 'banana'"),
        (LOCAL, ["device='cuda:'"], "device: found 'cuda:'"),
        (LOCAL, ["num_threads=1000000000"], "num_threads: found 1000000000, expected at most"),
        (LOCAL, ["max_body_bytes=1"], "max_body_bytes: found 1, expected at least 1024"),
        (LOCAL, ["max_requests=1", "max_batch_size=10"], "such a batch would be refused for ever"),
        (LOCAL, ["score_deadline_s=1e-9"], "score_deadline_s: found 1e-09, expected at least"),
        (LOCAL, ["body_deadline_s=1e-9"], "body_deadline_s: found 1e-09, expected at least"),
        (LOCAL, ["max_retry_after_s=0.1"], "max_retry_after_s: found 0.1, expected at least 1"),
        (LOCAL, ["drain_deadline_s=1e300"], "drain_deadline_s: found 1e+300, expected at most"),
        (LAUNCH, ["launch.extra_args={hos: x}"], "extra_args: hos"),
        (LAUNCH, ["name=''"], "name: found ''"),
        (LAUNCH, ["url=http://x:1"], "found both"),
        ("kind: sglang\nname: t\n", [], "found neither"),
        ("kind: sglang\nname: t\nurl: x:1\n", [], "url: expected http"),
        ("kind: sglang\nname: t\nurl: http://u:p@x\n", [], "url: the URL holds credentials"),
        ("name: t\n", [], "found no `kind`"),
        ("kind: remote\nname: t\n", [], "t.yaml:1: found kind 'remote', expected"),
        ("kind: [1]\nname: t\n", [], "expected the config of a teacher's service"),
        ("name: r\nloop: {num_steps: 1}\n", [], "found a run's recipe (`miniverl-dist train` ta"),
    ],
)
def test_what_is_wrong_is_one_clear_error(
    text: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    assert message in str(caught.value)
    assert "t.yaml" in str(caught.value) or "override" in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_no_token(host: str, tmp_path: Path) -> None:
    assert load(tmp_path, LOCAL, f"host='{host}'").name == "t"


def test_with_a_token_other_hosts_are_allowed(tmp_path: Path) -> None:
    assert load(tmp_path, LOCAL, "host=0.0.0.0", "token_file=secret").name == "t"


def test_the_config_of_a_service_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(LOCAL)
    with pytest.raises(ConfigError, match="`miniverl-dist serve teacher` takes it"):
        load_config(tmp_path / "t.yaml")


def test_the_reference_run_and_its_teacher_fit_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    service = load_teacher_service(Path("configs/teacher_dsv4_flash_4xb200.yaml"))
    teacher = load_config(Path("configs/bfcl_qwen36_35b_2x8_h100.yaml")).config.teacher
    assert isinstance(service, SglangTeacherService)
    assert service.launch is not None
    assert teacher is not None
    # A server that asks for a token needs a client that brings one.
    assert (service.launch.token_file is None) == (teacher.headers_file is None)
    assert urlsplit(teacher.url or "").port == service.launch.port
    assert teacher.max_prefill_tokens == service.launch.context_length

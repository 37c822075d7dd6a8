"""Images and manifests, as far as they can be checked without a container engine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ruamel.yaml import YAML

from miniverl_dist import __version__

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
SOURCE = "/opt/miniverl/source/"
"""Where the images keep what they copy."""
INSTRUCTIONS = {
    *("ARG", "FROM", "RUN", "USER", "ENV", "WORKDIR", "COPY", "VOLUME", "EXPOSE", "HEALTHCHECK"),
    *("ENTRYPOINT", "CMD"),
}
PIN = re.compile(r"(?<![\w.-])([A-Za-z][\w.-]*)(?:\[[\w,]+\])?==([\w.]+)")
STOP_WAIT_S = 300


class Instruction(NamedTuple):
    name: str
    text: str


SGLANG_LOCK = ROOT / "scripts" / "lock" / "sglang.txt"


def instructions(text: str) -> list[Instruction]:
    """One per instruction: comments dropped, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, rest = line.partition(" ")
        found.append(Instruction(name, rest.strip()))
    return found


def commands(text: str) -> list[list[str]]:
    """Words of each command of a RUN instruction."""
    words = shlex.shlex(text, posix=True, punctuation_chars=";&|<>")
    words.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set(";&|"):
            found.append([])
        else:
            found[-1].append(word)
    return found


def all_of(path: Path, name: str) -> list[str]:
    return [text for found, text in instructions(path.read_text()) if found == name]


def manifest(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe", pure=True).load(DOCKER / name)
    return loaded


def nodes(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from nodes(item)
    elif isinstance(value, list):
        for item in value:
            yield from nodes(item)


def locked() -> dict[str, str]:
    texts = [path.read_text() for path in (ROOT / "scripts" / "lock").glob("*.txt")]
    texts += [(ROOT / "scripts" / "install_torch.sh").read_text()]
    return {name.lower(): version for text in texts for name, version in PIN.findall(text)}


def images() -> list[str]:
    """Every image named in a Dockerfile or manifest."""
    found = [default for p in DOCKERFILES for default in all_of(p, "ARG") if "BASE=" in default]
    found = [text.removeprefix("BASE=") for text in found]
    found += [text for p in DOCKERFILES for text in all_of(p, "FROM") if "$" not in text]
    for name in ("compose.yaml", "rayjob.yaml"):
        found += [value for key, value in nodes(manifest(name)) if key in ("image", "BASE")]
    return found


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
class TestDockerfile:
    def test_it_parses(self, path: Path) -> None:
        found = instructions(path.read_text())
        assert {one.name for one in found} <= INSTRUCTIONS
        assert next(one.name for one in found if one.name != "ARG") == "FROM"
        for one in found:
            if one.name == "RUN":
                shlex.split(one.text)
            if one.name in ("ENTRYPOINT", "CMD"):
                assert isinstance(YAML(typ="safe").load(one.text), list), "exec form"

    def test_it_ends_as_a_user_without_rights(self, path: Path) -> None:
        users = all_of(path, "USER")
        assert users[-1:] == ["miniverl"]
        assert any("useradd" in text and " miniverl" in text for text in all_of(path, "RUN"))

    def test_it_says_when_it_is_healthy(self, path: Path) -> None:
        assert len(all_of(path, "HEALTHCHECK")) == 1

    def test_it_copies_what_the_build_context_holds(self, path: Path) -> None:
        kept = (ROOT / ".dockerignore").read_text().splitlines()
        assert "*" in kept
        for text in all_of(path, "COPY"):
            *sources, _ = [word for word in text.split() if not word.startswith("--")]
            for source in sources:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in kept, source

    def test_scripts_that_it_runs_exist(self, path: Path) -> None:
        copied = [word for text in all_of(path, "COPY") for word in text.split()[:-1]]
        texts = [*all_of(path, "RUN"), *all_of(path, "ENTRYPOINT")]
        named = re.findall(r"\b((?:scripts|docker)/[\w/.]+)", " ".join(texts))
        assert len(named) >= 2
        for name in named:
            assert (ROOT / name).is_file(), name
            assert name.split("/")[0] in copied, name

    def test_what_it_installs_is_pinned(self, path: Path) -> None:
        for text in all_of(path, "RUN"):
            for words in commands(text):
                if "install" not in words or "pip" not in words:
                    continue
                free = ("--constraint", "-r")
                names = [w for w in words[words.index("install") + 1 :] if not w.startswith("-")]
                names = [w for w in names if not w.startswith((".", "scripts/", "/tmp/"))]
                assert all("==" in name for name in names), words
                assert names or any(option in words for option in free), words

    def test_versions_are_those_of_the_lock_files(self, path: Path) -> None:
        pins = {name.lower(): version for name, version in PIN.findall(path.read_text())}
        assert pins["ray"].rpartition(".")[0] in (ROOT / "pyproject.toml").read_text()
        known = locked()
        assert {name: known.get(name, version) for name, version in pins.items()} == pins


def test_the_lock_files_name_a_version_once() -> None:
    """Two lock files with two versions of a package would make the order of installation matter.

    SGLang's are of an environment of their own.
    """
    versions: dict[str, set[str]] = {}
    for path in {*(ROOT / "scripts" / "lock").glob("*.txt")} - {SGLANG_LOCK}:
        for name, version in PIN.findall(path.read_text()):
            versions.setdefault(name.lower(), set()).add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}
    assert len(versions) > 60


def test_images_have_exact_tags() -> None:
    found = images()
    assert len(found) >= 8
    for image in found:
        repository, _, tag = image.rpartition(":")
        assert re.fullmatch(r"v?\d[\w.-]*", tag), image
        assert "latest" not in tag
        assert "." not in repository.split("/")[0], f"{image} names a registry"
        if repository.startswith("miniverl-dist/"):
            assert tag == __version__


def test_the_engine_image_checks_the_sglang_of_its_base() -> None:
    text = (DOCKER / "engine.Dockerfile").read_text()
    tag = re.search(r"^FROM lmsysorg/sglang:v(\S+)$", text, re.MULTILINE)
    assert tag
    assert f'v("sglang") == "{tag[1]}"' in text


class TestCompose:
    def test_two_nodes_share_the_runs_and_a_job_waits_for_both(self) -> None:
        compose = manifest("compose.yaml")
        services = compose["services"]
        assert set(services) == {"head", "worker", "submit"}
        for service in services.values():
            assert "runs:/runs" in service["volumes"]
        assert set(compose["volumes"]) == {"runs"}
        waits = services["submit"]["depends_on"]
        assert {name: wait["condition"] for name, wait in waits.items()} == {
            "head": "service_healthy",
            "worker": "service_healthy",
        }

    def test_keys_are_those_of_the_compose_format(self) -> None:
        compose = manifest("compose.yaml")
        assert set(compose) <= {"name", "services", "volumes", "x-node"}
        known = {"image", "build", "environment", "volumes", "shm_size", "stop_grace_period"}
        known |= {"healthcheck", "command", "entrypoint", "ports", "depends_on", "profiles"}
        for service in compose["services"].values():
            assert set(service) <= known
            assert all(isinstance(value, str) for value in service["environment"].values())
            assert (DOCKER / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()
            arguments = set(service["build"]["args"])
            assert arguments <= {
                text.split("=")[0] for text in all_of(DOCKER / "trainer.Dockerfile", "ARG")
            }

    def test_what_it_starts_exists(self) -> None:
        services = manifest("compose.yaml")["services"]
        assert (ROOT / services["submit"]["entrypoint"][1]).is_file()
        config = re.search(r":-(.+)\}", services["submit"]["command"][0])
        assert config
        assert (ROOT / config[1]).is_file()

    def test_a_stop_leaves_time_for_the_last_checkpoint(self) -> None:
        services = manifest("compose.yaml")["services"]
        for name in ("head", "worker"):
            grace = int(services[name]["stop_grace_period"].removesuffix("s"))
            assert int(services[name]["environment"]["RAY_JOB_STOP_WAIT_TIME_S"]) == STOP_WAIT_S
            assert grace >= STOP_WAIT_S + 10

    def test_the_job_server_is_published_to_this_machine_only(self) -> None:
        for service in manifest("compose.yaml")["services"].values():
            assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


class TestRayJob:
    def pods(self) -> dict[str, dict[str, Any]]:
        cluster = manifest("rayjob.yaml")["spec"]["rayClusterSpec"]
        groups = {"head": cluster["headGroupSpec"]}
        groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
        return groups

    def test_it_is_the_reference_run(self) -> None:
        spec = manifest("rayjob.yaml")["spec"]
        words = spec["entrypoint"].split()
        assert words[:4] == ["python", "-m", "actors.launch", "train"]
        assert words[4].startswith(SOURCE)
        assert (ROOT / words[4].removeprefix(SOURCE)).is_file()
        assert words[5] == "--run-dir"
        assert words[6].startswith("/runs/")
        assert spec["metadata"]["name"] == Path(words[4]).stem
        assert spec["shutdownAfterJobFinishes"] is True
        assert spec["rayClusterSpec"]["rayVersion"] == "2.60.0"

    def test_it_has_the_reference_hardware(self) -> None:
        gpus = {}
        for name, group in self.pods().items():
            [container] = group["template"]["spec"]["containers"]
            limits = container["resources"]["limits"]
            assert limits == container["resources"]["requests"]
            per_node = int(limits.get("nvidia.com/gpu", 0))
            gpus[name] = (group.get("replicas", 1), per_node)
            if name != "head":
                assert group["minReplicas"] == group["maxReplicas"] == group["replicas"]
        assert gpus == {"head": (1, 0), "student": (2, 8), "rollout": (1, 8)}

    def test_every_pod_stays_until_the_jobs_have_stopped(self) -> None:
        spec = manifest("rayjob.yaml")["spec"]
        env = YAML(typ="safe").load(spec["runtimeEnvYAML"])["env_vars"]
        assert env == {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
        for group in self.pods().values():
            pod = group["template"]["spec"]
            assert pod["terminationGracePeriodSeconds"] > STOP_WAIT_S + 10
            [container] = pod["containers"]
            hook = " ".join(container["lifecycle"]["preStop"]["exec"]["command"])
            script = re.search(rf"{SOURCE}(\S+\.py)", hook)
            assert script
            assert (ROOT / script[1]).is_file()
            within = re.search(r"--within-s=(\d+)", hook)
            assert within
            assert STOP_WAIT_S < int(within[1]) < pod["terminationGracePeriodSeconds"]

    def test_pods_run_without_rights_and_mount_what_they_name(self) -> None:
        for group in self.pods().values():
            pod = group["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"] is True
            uid = pod["securityContext"]["runAsUser"]
            assert f"--uid {uid} " in (DOCKER / "trainer.Dockerfile").read_text()
            [container] = pod["containers"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in pod["volumes"]}
            assert "/runs" in {mount["mountPath"] for mount in container["volumeMounts"]}

    def test_submitter_and_nodes_agree_on_authentication(self) -> None:
        spec = manifest("rayjob.yaml")["spec"]
        [submitter] = spec["submitterPodTemplate"]["spec"]["containers"]
        assert submitter["env"][0] == {"name": "RAY_AUTH_MODE", "value": "token"}
        for group in self.pods().values():
            [container] = group["template"]["spec"]["containers"]
            assert container["env"] == submitter["env"]


def test_secrets_and_results_stay_out_of_the_build_context() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if "!" in line]
    for name in (".git", ".venv", "runs", ".env", "tests"):
        assert not any(fnmatch(name, pattern) for pattern in kept)


BAD: list[tuple[str, str]] = [
    ("FROM a:1\nRUN pip install numpy\n", "test_what_it_installs_is_pinned"),
    ("FROM a:1\nUSER miniverl\nUSER root\n", "test_it_ends_as_a_user_without_rights"),
    ("FROM a:1\nCOPY nowhere .\n", "test_it_copies_what_the_build_context_holds"),
    ("FROM a:1\nCOPY tests .\n", "test_it_copies_what_the_build_context_holds"),
    ("FROM a:1\nCMD ls\n", "test_it_parses"),
    ("RUM a:1\n", "test_it_parses"),
    ("FROM a:1\nRUN pip install torch==1.0 ray==2.60.0\n", "test_versions_are_those"),
    ("FROM a:1\nRUN pip install ray==2.59.0\n", "test_versions_are_those"),
    ("FROM a:1\nRUN sh scripts/nothing.sh && sh scripts/no.sh\n", "test_scripts_that_it_runs"),
]


@pytest.mark.parametrize(("text", "name"), BAD)
def test_the_checks_see_a_fault(text: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.Dockerfile"
    path.write_text(text)
    [check] = [
        getattr(TestDockerfile(), one) for one in dir(TestDockerfile) if one.startswith(name)
    ]
    with pytest.raises(AssertionError):
        check(path)

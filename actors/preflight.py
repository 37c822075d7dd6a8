"""What is checked before a run directory is made or touched."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

from miniverl_dist.backends.megatron.architecture import Architecture, read_architecture
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import MegatronModelConfig
from miniverl_dist.errors import ConfigError, MissingDependencyError
from miniverl_dist.tokens.load import load_tokenizer
from miniverl_dist.tokens.tokenizer import TokenizerLike

_INSTALL = {
    "torch": "pip install 'miniverl-dist[local]' (README: which torch)",
    "tokenizers": "pip install 'miniverl-dist[local]'",
    "bfcl_eval": "scripts/install_bfcl.sh",
    "megatron": "scripts/install_megatron.sh",
    "transformers": "pip install 'miniverl-dist[local]'",
    "ray": "pip install 'miniverl-dist[ray]'",
}


def require_local_packages(config: RunConfig) -> None:
    """Fail before anything is written when this process cannot do its part of the run.

    Raises:
        MissingDependencyError: names every missing package and the command that installs it.
    """
    missing = [name for name in _needed(config) if not _is_installed(name)]
    if missing:
        listed = "; ".join(f"{name}: {_INSTALL[name]}" for name in missing)
        raise MissingDependencyError(
            f"this command needs {', '.join(missing)}, which this environment lacks. {listed}"
        )


def require_student_files(config: RunConfig) -> None:
    """Fail before anything is written when the student's model cannot be what the recipe says.

    Raises:
        ConfigError: a file is missing, of an architecture that is not supported, or does not fit
            the parallelism; an engine that cannot be launched.
    """
    model = config.student.model
    if not isinstance(model, MegatronModelConfig):
        return
    architecture = read_architecture(model.config)
    if problem := architecture.problem(model.parallel):
        raise ConfigError(f"student.model.parallel: {problem}")
    if model.vocabulary == "full":
        require_rows(architecture, model.config.name, load_tokenizer(config.student.tokenizer))
    if model.weights is not None and not (model.weights / "config.json").is_file():
        raise ConfigError(
            f"student.model.weights: {model.weights} holds no Hugging Face model (no config.json); "
            "give a folder that every node can read, or leave it out to draw weights from the seed"
        )
    engine = config.rollout.engine
    if engine is not None and engine.kind != "hf":
        raise ConfigError(
            f"rollout.engine.kind: found {engine.kind}, this version can launch `hf` engines only "
            "(`miniverl-dist plan` reads such a recipe all the same)"
        )


def require_rows(architecture: Architecture, name: str, tokenizer: TokenizerLike) -> None:
    """Raise unless a model has an embedding row for every id of a tokenizer.

    Raises:
        ConfigError: it has fewer.
    """
    if architecture.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"{name} has {architecture.vocab_size} vocabulary rows, tokenizer {tokenizer.name} has "
            f"{tokenizer.vocab_size} ids: use `vocabulary: restricted`, or the config.json that "
            "belongs to the tokenizer"
        )


def _needed(config: RunConfig) -> Iterator[str]:
    yield from ("torch", "tokenizers", "bfcl_eval")
    if config.student.model.kind == "megatron":
        yield from ("megatron", "transformers")
    if config.runtime != "inprocess":
        yield "ray"


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None

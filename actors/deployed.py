"""A model's folder on an engine of its own: what was exported, or what others have trained."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from actors.hf_files import CONFIG_FILE
from actors.preflight import require_engine
from miniverl_dist.backends.weights_io import VOCABULARY_FILE, read_json, read_tensors
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.recipe import HFEngineConfig, SGLangEngineConfig
from miniverl_dist.config.roles import HFStudentConfig
from miniverl_dist.errors import ConfigError, DeadlineError, MissingDependencyError
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import NamedArrays, weights_checksum
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike

if TYPE_CHECKING:
    from miniverl_dist.backends.vocabulary import AnyVocabulary
    from rollout_server.engines.base import Engine

DeployKind = Literal["hf", "sglang"]
_DTYPES: dict[Any, Literal["float32", "bfloat16"]] = {"bfloat16": "bfloat16", "float16": "bfloat16"}
"""How a folder's weights are computed with; whatever else it says, as float32."""


async def hf_folder_engine(
    config: RunConfig, folder: Path, tokenizer: TokenizerLike, stack: AsyncExitStack
) -> Engine:
    """A transformers engine that holds the folder's weights.

    Raises:
        ConfigError: another architecture, or fewer rows than the tokenizer has ids.
    """
    from miniverl_dist.backends.hf_model import device_of
    from rollout_server.engines.hf import HFEngine

    model = HFStudentConfig(kind="hf", path=folder, dtype=_dtype(folder))
    tensors = _loaded(model)
    own = config.rollout.engine
    engine = HFEngine(
        folder,
        folder_vocabulary(folder, tokenizer),
        batch_slots=own.batch_slots if isinstance(own, HFEngineConfig) else _default_slots(),
        max_context_tokens=_longest(config),
        dtype=model.dtype,
        name=f"hf:{folder.name}",
        device=str(device_of(model)),
    )
    return await _filled(engine, tensors, config, stack)


def deploy_server(config: RunConfig) -> SGLangEngineConfig:
    """How the server of ``--deploy sglang`` is launched.

    Raises:
        MissingDependencyError: there is no SGLang where the recipe says.
    """
    own, served = config.rollout.engine, config.evaluation.deploy_engine
    if served is None:
        served = own if isinstance(own, SGLangEngineConfig) else SGLangEngineConfig(kind="sglang")
    try:
        require_engine(served)
    except MissingDependencyError as error:
        said = str(error).replace("rollout.engine", "evaluation.deploy_engine")
        raise MissingDependencyError(f"--deploy sglang: {said}") from error
    return served


async def sglang_folder_engine(
    config: RunConfig, folder: Path, tokenizer: TokenizerLike, work_dir: Path, stack: AsyncExitStack
) -> Engine:
    """An SGLang server that holds the folder's weights; it ends with the stack.

    Raises:
        ConfigError: an architecture that cannot be served.
        MissingDependencyError: see ``deploy_server``.
    """
    from rollout_server.engines.sglang import SGLangEngine
    from rollout_server.engines.sglang_server import SGLangLaunch

    launch = SGLangLaunch(
        deploy_server(config),
        folder / CONFIG_FILE,
        work_dir,
        max_context_tokens=_longest(config),
        dtype=_dtype(folder),
    )
    engine = SGLangEngine(
        launch,
        _served_rows(folder, tokenizer),
        name=f"sglang:{folder.name}",
        request_deadline_s=config.deadlines.generate_s,
    )
    return await _filled(engine, _stored(folder), config, stack)


def folder_vocabulary(folder: Path, tokenizer: TokenizerLike) -> AnyVocabulary:
    """Which rows of a folder's embedding stand for which ids.

    Raises:
        ConfigError: it was exported with a restricted vocabulary that is not this run's.
    """
    from miniverl_dist.backends.vocabulary import FullVocabulary, Vocabulary

    if not (folder / VOCABULARY_FILE).is_file():
        return FullVocabulary(tokenizer.vocab_size)
    ids = [int(i) for i in read_json(folder / VOCABULARY_FILE)]
    if not isinstance(tokenizer, SubVocabulary) or list(tokenizer.ids) != ids:
        raise ConfigError(
            f"{folder.name}/{VOCABULARY_FILE} restricts the model to {len(ids)} ids that another "
            "run has declared: evaluate it with that run"
        )
    return Vocabulary(ids)


def _served_rows(folder: Path, tokenizer: TokenizerLike) -> AnyVocabulary:
    """A server samples from every row of the embedding, padding included.

    What is measured is what others will get: padding has the probability that its weights give it.
    """
    from miniverl_dist.backends.vocabulary import FullVocabulary

    declared = folder_vocabulary(folder, tokenizer)
    if not isinstance(declared, FullVocabulary):
        return declared
    return FullVocabulary(int(read_json(folder / CONFIG_FILE)["vocab_size"]))


async def _filled(
    engine: Engine, tensors: NamedArrays, config: RunConfig, stack: AsyncExitStack
) -> Engine:

    stack.push_async_callback(engine.close)
    snapshot = WeightSnapshot(0, tensors, weights_checksum(tensors))
    deadline_s = config.deadlines.publish_s
    try:
        async with asyncio.timeout(deadline_s):  # waits for the engine to stand and load
            await engine.start()
            await engine.load_weights(snapshot)
    except TimeoutError as error:
        raise DeadlineError(
            f"{engine.name} did not load its weights within {deadline_s} s (deadlines.publish_s)"
        ) from error
    return engine


def _loaded(model: HFStudentConfig) -> NamedArrays:
    """A folder's weights under transformers' names, in the dtype that is computed with."""
    from miniverl_dist.backends.hf_model import load_module
    from miniverl_dist.backends.tensors import as_numpy

    try:
        module = load_module(model.model_copy(update={"device": "cpu"}))
    except ConfigError as error:
        said = str(error).removeprefix("student.model.path: ")
        raise ConfigError(f"policy hf:{model.path}: {said}") from error
    return {name: as_numpy(weight) for name, weight in module.named_parameters()}


def _stored(folder: Path) -> NamedArrays:
    """A folder's weights under the names of its files."""
    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= read_tensors(file)
    return tensors


def _dtype(folder: Path) -> Literal["float32", "bfloat16"]:
    described = read_json(folder / CONFIG_FILE)
    stored = described.get("dtype", described.get("torch_dtype"))
    return _DTYPES.get(stored, "float32")


def _longest(config: RunConfig) -> int:
    """Tokens of an episode; a model with a shorter context has its own limit."""
    return config.rollout.max_context_tokens


def _default_slots() -> int:
    return HFEngineConfig(kind="hf").batch_slots

"""What the index of a torch_dist folder may name; torch-free.

torch keeps the index as a pickle and hands it to the unpickler, which calls whatever it names. So
its instructions are read first, without carrying them out, and only the classes of an index pass.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from pathlib import Path

from miniverl_dist.errors import CheckpointError

INDEX_CLASSES = {
    f"{module}.{name}"
    for module, names in {
        "torch": ("Size", "float32", "bfloat16"),
        "torch.serialization": ("_get_layout",),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.distributed.checkpoint.metadata": (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
    }.items()
    for name in names
}
_OTHER_WAYS_TO_CODE = {"INST", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}


def check_index(path: Path) -> None:
    """Read the names in an index without loading it.

    Raises:
        CheckpointError: it names something that no index holds.
        ValueError: it is cut off, or no pickle.
        OSError: it cannot be read.
    """
    for name in _names(path.read_bytes()):
        if name not in INDEX_CLASSES:
            raise CheckpointError(
                f"{path.name} names {name}, which no index holds: the file was tampered with"
            )


def _names(data: bytes) -> Iterator[str]:
    """What the pickle would import; ``?`` for a name that is not spelled out.

    A name of two strings counts only where two instructions that push a string, or one from the
    memo, stand right before it: then nothing else can lie on the stack there.
    """
    memo: dict[object, str] = {}
    last: list[str] = ["?", "?"]
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "MEMOIZE":
            memo[len(memo)] = last[-1]
        elif opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = last[-1]
        elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
            last = [last[-1], memo.get(argument, "?")]
        elif opcode.name == "STACK_GLOBAL":
            yield ".".join(last)
            last = ["?", "?"]
        elif opcode.name == "GLOBAL":
            yield str(argument).replace(" ", ".", 1)
            last = ["?", "?"]
        elif opcode.name in _OTHER_WAYS_TO_CODE:
            yield f"? ({opcode.name})"
        else:
            is_text = opcode.name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
            last = [last[-1], str(argument) if is_text else "?"]

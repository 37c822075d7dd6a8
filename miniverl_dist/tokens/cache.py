"""Files that are slow to make and can always be made again, in the user's cache folder.

An entry is a SHA-256 digest followed by its payload; whatever does not match its digest is made
again. Processes may race: each writes a file of its own and renames it into place.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

_LOGGER = logging.getLogger(__name__)
_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/miniverl-dist``, or ``~/.cache/miniverl-dist``."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is to be ignored.
    root = configured if configured.is_absolute() else Path.home() / ".cache"
    return root / "miniverl-dist"


def cached(name: str, build: Callable[[], bytes]) -> bytes:
    """The entry ``name``, made by ``build`` where it is missing, truncated or corrupted.

    A folder that cannot be written costs the time of ``build``, never the result.
    """
    path = cache_folder() / name
    payload = _read(path)
    if payload is None:
        payload = build()
        _write(path, payload)
    return payload


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, payload = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        _LOGGER.warning("cache entry %s does not match its checksum; it is made again", path.name)
        return None
    return payload


def _write(path: Path, payload: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(payload).digest())
                file.write(payload)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        _LOGGER.warning("cache entry %s cannot be written: %s", path.name, error)

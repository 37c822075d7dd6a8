"""A bearer token for a server: read from a file, compared in constant time, never shown."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from miniverl_dist.errors import ConfigError

SHORTEST_TOKEN = 16
_SCHEME = "Bearer "


class BearerToken:
    """A secret that prints as nothing."""

    def __init__(self, secret: str) -> None:
        self._expected = (_SCHEME + secret).encode()

    def matches(self, header: str) -> bool:
        """Whether an ``Authorization`` header carries it; as fast wherever it differs."""
        return hmac.compare_digest(header.encode("utf-8", errors="replace"), self._expected)

    def __repr__(self) -> str:
        return "BearerToken(...)"


def read_token_file(path: Path) -> BearerToken:
    """The only word of a file.

    Raises:
        ConfigError: it cannot be read, or holds no usable token; never shows what it holds.
    """
    return BearerToken(read_secret(path))


def read_secret(path: Path) -> str:
    """The only word of a file; raises as ``read_token_file``."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError as exc:
        raise ConfigError(f"token file {path}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"token file {path}: expected ASCII characters only") from None
    if len(text) < SHORTEST_TOKEN or not text.isprintable() or " " in text:
        raise ConfigError(
            f"token file {path}: expected one word of at least {SHORTEST_TOKEN} printable "
            f"characters, found {len(text)} characters in {len(text.split())} words"
        )
    return text


def require_token(token: BearerToken, *, open_paths: Collection[str]) -> Middleware:
    """Middleware that answers 401 to whoever does not bring the token."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in open_paths and not token.matches(
            request.headers.get("Authorization", "")
        ):
            raise web.HTTPUnauthorized(
                text="expected the header `Authorization: Bearer TOKEN` with this server's token",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return await handler(request)

    return guard

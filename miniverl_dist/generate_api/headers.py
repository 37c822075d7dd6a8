"""HTTP headers: those that hold secrets, from a file, and ``Retry-After``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from miniverl_dist.errors import ConfigError

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_OWN_HEADERS = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""They say how a body is sent, or what becomes of the connection."""


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a ``Retry-After`` header asks for; None without one that can be read.

    A date is taken relative to the reply's own ``Date``, so the two clocks need not agree.
    """
    value = headers.get("Retry-After", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        until = _http_date(value)
        if until is None:
            return None
        seconds = (
            until - (_http_date(headers.get("Date", "")) or datetime.now(UTC))
        ).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _http_date(value: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, OverflowError, IndexError, TypeError):
        # What a server sends is read by the rules for mail, which meet numbers of any size.
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def read_headers_file(path: Path) -> dict[str, str]:
    """Read ``Name: value`` lines; blank lines and lines that start with ``#`` are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is no header. The message never quotes the
            line, which may hold a secret.
    """
    try:
        # Other characters that end a line for Python are part of a value, and refused there.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"headers file {path}: {reason}") from None
    headers: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        problem = _header_problem(name, colon, value.strip(), headers)
        if problem:
            raise ConfigError(f"headers file {path}, line {number}: {problem}")
        headers[name] = value.strip()
    return headers


def _header_problem(name: str, colon: str, value: str, former: Mapping[str, str]) -> str | None:
    if not colon:
        return "expected `Name: value`, found no colon"
    if not _TOKEN.fullmatch(name):
        return "the name before the colon is no header name (letters, digits and -)"
    if not value or not value.isascii() or not value.isprintable():
        return f"the value of {name} is empty or holds characters outside printable ASCII"
    if name.lower() in _OWN_HEADERS:
        return f"{name} is set by the client itself"
    if name.lower() in {other.lower() for other in former}:
        return f"{name} occurs twice"
    return None

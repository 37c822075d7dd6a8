"""URLs of servers: one rule for all that a config, or a caller, may name."""

from __future__ import annotations

import re
from ipaddress import IPv6Address

_DEFAULT_PORTS = {"http": 80, "https": 443}
_URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?P<host>[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?|\[[0-9a-f:.]+\])"
    r"(?P<port>:[0-9]{1,5})?"
    r"(?P<path>/[A-Za-z0-9._~/-]*)?"
)


def server_url(url: str) -> str:
    """The URL in the one form in which two of the same server are equal.

    Args:
        url: ``http(s)://host[:port][/prefix]``.

    Raises:
        ValueError: it is anything else, or holds credentials; a URL that may hold some is not
            quoted.
    """
    if "@" in url:
        raise ValueError("the URL holds credentials: put them into a headers file")
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    parts = _URL.fullmatch(f"{scheme.lower()}://{host.lower()}{slash}{path}")
    # An unusual address may hold a secret in its query.
    found = repr(url) if url.isprintable() and "?" not in url else "something else"
    if parts is None or not _is_address(parts["host"]):
        raise ValueError(f"expected http(s)://host[:port], found {found}")
    port = int(parts["port"][1:]) if parts["port"] else _DEFAULT_PORTS[parts["scheme"]]
    if not 1 <= port <= 65_535:
        raise ValueError(f"expected a port from 1 to 65535, found {found}")
    shown = "" if port == _DEFAULT_PORTS[parts["scheme"]] else f":{port}"
    return f"{parts['scheme']}://{parts['host']}{shown}{parts['path'] or ''}".rstrip("/")


def _is_address(host: str) -> bool:
    if not host.startswith("["):
        return ".." not in host
    try:
        IPv6Address(host[1:-1])
    except ValueError:
        return False
    return True

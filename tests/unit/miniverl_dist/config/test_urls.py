"""Addresses of servers: the same rule in every config and in the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from miniverl_dist.config.roles import TeacherConfig
from miniverl_dist.config.serve import SglangTeacherService
from miniverl_dist.config.urls import server_url
from miniverl_dist.errors import ConfigError
from miniverl_dist.generate_api.client import GenerateClient

GOOD = {
    "http://h": "http://h",
    "http://h/": "http://h",
    "HTTP://H.Example:80//": "http://h.example",
    "http://h:01": "http://h:1",
    "https://h:443": "https://h",
    "https://h:80": "https://h:80",
    "http://127.0.0.1:30000/v1/Teacher": "http://127.0.0.1:30000/v1/Teacher",
    "http://[::1]:9": "http://[::1]:9",
    "http://[FE80::1]/x": "http://[fe80::1]/x",
    "http://node_1.cluster.local:8": "http://node_1.cluster.local:8",
}
BAD = (
    "",
    "h:80",
    "ftp://h",
    "http://",
    "http:///x",
    "http://:80",
    "http://h:99999",
    "http://h:0",
    "http://h:abc",
    "http://h:",
    "http://h?a=b",
    "http://h/#x",
    "http://h#x",
    "http://h/x ",
    " http://h",
    "http://h/a b",
    "http://h/%20",
    "http://h%2e",
    "http://h\\x",
    "http://h\n",
    "http://a..b",
    "http://-h",
    "http://[::1",
    "http://[::g]",
    "http://[12]",
    "http://hé",
)
SECRET = "http://me:hunter2@h:1"


@pytest.mark.parametrize(("url", "expected"), GOOD.items())
def test_one_server_has_one_form(url: str, expected: str) -> None:
    assert server_url(url) == expected
    assert server_url(expected) == expected


@pytest.mark.parametrize("url", BAD)
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected (http\(s\)://|a port)"):
        server_url(url)


def teacher(*urls: str) -> TeacherConfig:
    first, *others = urls
    return TeacherConfig(url=first, urls=tuple(others))


def second(url: str) -> TeacherConfig:
    return teacher("http://other", url)


def service(url: str) -> SglangTeacherService:
    return SglangTeacherService(kind="sglang", name="t", url=url)


@pytest.mark.parametrize("use", [teacher, second, service, GenerateClient])
@pytest.mark.parametrize("url", [SECRET, "http://hunter2@h", *BAD])
def test_all_who_take_a_url_refuse_the_same(use: Callable[[str], Any], url: str) -> None:
    with pytest.raises((ValueError, ConfigError)) as caught:
        use(url)
    if isinstance(caught.value, ConfigError):
        text = str(caught.value)
    else:  # of pydantic, what our own messages are made from
        text = str(caught.value.errors(include_url=False)[0]["ctx"]["error"])  # type: ignore[attr-defined]
    assert "hunter2" not in text
    assert ("headers file" in text) == ("@" in url)


@pytest.mark.parametrize(
    "urls",
    [
        ("http://h", "http://H/"),
        ("http://h:1", "http://h:01"),
        ("http://h", "http://h:80"),
        ("http://a", "http://h", "http://h"),
    ],
)
def test_a_server_given_twice_is_noticed(urls: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="repeat a server"):
        teacher(*urls)
    with pytest.raises(ConfigError, match="each once"):
        GenerateClient(urls)

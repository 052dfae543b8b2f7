"""TOML, which Python reads itself since 3.11."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.resources import files
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TomlError = tomllib.TOMLDecodeError


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a document.

    Raises:
        TomlError: It is no TOML; the message names line and column.
    """
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise TomlError("lists or tables inside each other too deep to be read") from None
    return document


@lru_cache
def read_toml(package: str, name: str) -> dict[str, Any]:
    """The tables of a document among this package's own files; they are shared, and not to be changed."""
    return parse_toml((files(package) / name).read_text(encoding="utf-8"))

"""TOML, which Python reads itself since 3.11."""

from __future__ import annotations

import sys
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

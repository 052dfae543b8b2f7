"""NVTX domains selected with ``--domain``."""

from __future__ import annotations

from collections.abc import Collection

DEFAULT = "default"
"""The default domain in ``--domain``; its actual name is empty."""


def named_domains(domain: str, known: Collection[str] = ()) -> tuple[str, ...]:
    """The domains selected with ``--domain``: one, or several separated by commas; ``''`` is the default domain.

    Args:
        domain: The value of ``--domain``.
        known: The domains of the capture; an exact match with one of them is not split at commas.
    """
    if domain in known:
        return (domain,)
    parts = (part if part in known else part.strip() for part in domain.split(","))
    return tuple(dict.fromkeys("" if part == DEFAULT and part not in known else part for part in parts))

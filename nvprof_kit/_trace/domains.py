"""NVTX domains selected with ``--domain``."""

from __future__ import annotations

from collections.abc import Collection

DEFAULT = "default"
"""The default domain in ``--domain``; its actual name is empty."""


def named_domains(domain: str, names: Collection[str] = ()) -> tuple[str, ...]:
    """The domains selected with ``--domain``: one, or several separated by commas; ``''`` is the default domain.

    Args:
        domain: The value of ``--domain``.
        names: The domains of the capture; an exact match with one of them is not split at commas.
    """
    if domain in names:
        return (domain,)
    parts = (name if name in names else name.strip() for name in domain.split(","))
    return tuple(dict.fromkeys("" if name == DEFAULT and name not in names else name for name in parts))

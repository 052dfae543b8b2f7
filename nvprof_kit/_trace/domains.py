"""Which NVTX domains a user means."""

from __future__ import annotations

from collections.abc import Collection

DEFAULT = "default"
"""What a user may write for the default domain, whose name is empty."""


def named_domains(domain: str, known: Collection[str] = ()) -> tuple[str, ...]:
    """The domains that ``--domain`` names: one, or several by commas; ``''`` is the default domain.

    Args:
        domain: What the user wrote.
        known: The domains of the capture; a name that one of them bears is taken as it stands.
    """
    if domain in known:
        return (domain,)
    parts = (part if part in known else part.strip() for part in domain.split(","))
    return tuple(dict.fromkeys("" if part == DEFAULT and part not in known else part for part in parts))

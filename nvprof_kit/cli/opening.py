"""A capture opened as every reading verb does: the domain and the meaning of its ranges from ``--rules``."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from nvprof_kit.cli.rules import domain_for

if TYPE_CHECKING:
    from nvprof_kit.analysis.rules import Rules
    from nvprof_kit.trace.schema import Trace


def opened(capture: str, domain: str, rules: Rules | None, optional: Collection[str]) -> Trace:
    """A capture with its ranges renamed by the rules.

    Args:
        capture: The file.
        domain: The NVTX domain that the user asked for.
        rules: How the captured program names its ranges; None where it follows the contract.
        optional: What to read besides.
    """
    from nvprof_kit.analysis.foreign import translate
    from nvprof_kit.trace.open import open_capture

    return translate(open_capture(capture, domain=domain_for(domain, rules), optional=optional), rules)

"""A finding names its rule and its severity, of which there is one list each."""

from __future__ import annotations

import pytest

from nvprof_kit import Finding


def test_a_rule_or_severity_without_a_name_is_refused() -> None:
    assert Finding("kernels", "kernels", "", severity="error").rule == "kernels"
    for rule, severity in (("guess", "error"), ("kernels", "dire")):
        with pytest.raises(ValueError, match=f"no rule '{rule}' of severity '{severity}'"):
            Finding(rule, "A guess", "", severity=severity)

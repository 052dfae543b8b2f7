"""What every view of a capture asks of its operations: whose each is, and of which class; told when first asked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from nvprof_kit.analysis.attribution import Attribution, attribute
from nvprof_kit.analysis.kernel_classes import KernelClasses, Rule, classify
from nvprof_kit.trace.schema import Trace


class Operations:
    """The operations of a capture.

    Args:
        trace: The capture, with the operations' names.
        own_rules: Rules for kernel classes, asked before the package's.
    """

    def __init__(self, trace: Trace, own_rules: Sequence[Rule] = ()) -> None:
        self.trace, self._own_rules = trace, own_rules

    @cached_property
    def owned(self) -> Attribution:
        """Who owns each operation."""
        return attribute(self.trace)

    @cached_property
    def classes(self) -> KernelClasses:
        """The class of each operation."""
        return classify(self.trace.ops, self._own_rules)

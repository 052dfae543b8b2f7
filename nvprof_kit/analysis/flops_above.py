"""Why a layer may seem to do more than the GPU can."""

from __future__ import annotations

MOST_BY_CLOCK = 1.2
"""A clock above the datasheet's explains no more than this: an H200's may be 1980 MHz, its peak is that of 1830."""

MOST_BY_HALVES = 2.0
"""What does half of the operations counted explains no more than this."""


def why_above(hfu: float, *, attention: bool, fp32: bool, own_peak: bool) -> str:
    """What may be the reason of a utilisation above 1, the likeliest first.

    Args:
        hfu: The utilisation.
        attention: Whether fused attention was counted.
        fp32: Whether products of 32-bit floats were.
        own_peak: Whether the user gave the peak.
    """
    reasons = [
        ("the peak given is too low", own_peak),
        ("a clock above the datasheet's", hfu <= MOST_BY_CLOCK),
        ("a causal mask, of which the count takes the whole", attention and hfu <= MOST_BY_HALVES),
        ("32-bit products that ran in TF32", fp32),
        ("it was counted on another input (batch, length) than was captured", True),
        ("2:4 sparsity", hfu <= MOST_BY_HALVES),
    ]
    return "above the peak: " + ", or ".join(reason for reason, possible in reasons if possible)

"""torch.compile: keep hooks out of compiled graphs, and emit ranges inside compiled code."""

"""The per-layer table: sums, model order, memory columns, and warnings."""

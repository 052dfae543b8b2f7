"""The per-layer table: sums, the order of the model, memory beside time, and warnings."""

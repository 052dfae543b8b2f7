"""Reports of Nsight Compute as tables."""

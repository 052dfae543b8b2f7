"""Which layer of a transformer costs what, from Nsight's own data."""

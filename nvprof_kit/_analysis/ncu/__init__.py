"""Hardware counters that ncu measured, per layer; which kernels to measure; the roofline."""

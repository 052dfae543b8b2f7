"""Meters of a loop: throughput, named timers, utilisation of CPU and GPU."""

"""Meters of a loop: throughput, named timers, CPU and GPU utilization."""

"""The ranks of a job compared: maps of each, clocks, which rank waits for which and why, the verdict, and a replay."""

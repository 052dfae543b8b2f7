"""Across the ranks of a job: clocks, who waits for whom and why, and what it costs."""

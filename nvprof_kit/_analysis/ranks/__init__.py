"""Analysis across the ranks of a job: clocks, which rank waits for which and why, and the cost."""

"""Which rank waits for which, and why."""

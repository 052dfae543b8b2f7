"""Who waited for whom, and why."""

"""What a caller holds: an opened capture, a job of many ranks, and the sources that need no capture."""

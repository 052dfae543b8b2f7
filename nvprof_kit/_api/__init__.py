"""What a caller opens: a capture, a job of many ranks, or a source that needs no capture."""

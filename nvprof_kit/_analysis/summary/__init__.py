"""Eight summaries of a capture, from the device to user ranges."""

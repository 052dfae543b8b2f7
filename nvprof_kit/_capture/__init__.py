"""What starts a capture: the embedded recorder, and where the recipes lie."""

"""Capture: the embedded recorder and the location of the recipes."""

"""Findings: rules over a capture, each with evidence and an estimated saving."""

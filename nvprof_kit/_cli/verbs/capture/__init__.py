"""Verbs that take, check and scrub captures."""

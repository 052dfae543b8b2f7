"""Captures for language model clients: a Model Context Protocol server and a skill file."""

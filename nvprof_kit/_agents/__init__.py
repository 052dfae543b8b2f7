"""Captures for programs that ask questions in words: a server of the Model Context Protocol."""

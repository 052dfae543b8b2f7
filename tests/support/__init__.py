"""Shared by tests: builders of small captures, and slow reference implementations to compare with."""

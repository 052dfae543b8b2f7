"""Builders of small captures, of maps of many ranks, and of results."""

"""Captures of one job: which file is which rank, and the maps that are kept of them."""

"""Captures of all supported tools and versions, read into tables."""

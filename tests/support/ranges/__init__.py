"""Backends that record ranges, and programs for the ranges in C and in Python."""

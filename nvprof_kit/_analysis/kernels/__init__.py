"""Kernels by class and by launch signature."""

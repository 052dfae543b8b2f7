"""Captures of Nsight Systems, its reports and their exports, as tables."""

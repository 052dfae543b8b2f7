"""Output: terminal tables, plots, pages and traces."""

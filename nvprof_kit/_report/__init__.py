"""Output: terminal tables, CSV, JSON, Markdown, Parquet, plots, pages and traces."""

"""Export formats: CSV, JSON, Markdown, Parquet, traces."""

"""Export formats: CSV, JSON, Markdown, Parquet, Perfetto."""

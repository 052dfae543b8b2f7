"""Results for other programs: csv, json, md, parquet, Perfetto."""

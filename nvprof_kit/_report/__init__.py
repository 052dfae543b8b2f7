"""Tables out of the program: terminal, csv, json, markdown, parquet, plots."""

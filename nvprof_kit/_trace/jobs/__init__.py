"""The maps of a job's ranks: their tables, and SQL over them."""

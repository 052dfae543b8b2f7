"""Two captures compared, with gates for CI."""

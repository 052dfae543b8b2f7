"""`count_flops`: counts floating point operations of operators as they run."""

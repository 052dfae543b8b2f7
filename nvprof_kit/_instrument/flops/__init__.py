"""`count_flops`: floating point operations counted where operators run."""

"""A file for each verb: parse, make one library call, write."""

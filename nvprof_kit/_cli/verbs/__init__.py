"""One file per verb: parse arguments, make one library call, write the result."""

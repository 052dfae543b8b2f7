"""The verbs, a module for each section of the help: parse arguments, make one library call, write the result."""

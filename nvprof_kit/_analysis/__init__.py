"""Tables in, tables out: whose every nanosecond is, and what follows from it."""

"""Time breakdown of a step: compute, communication, copies and idle, with the causes of idle time."""

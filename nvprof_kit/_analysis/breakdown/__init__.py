"""Where the time of a step goes: computing, communication, copies and idle, with the causes of idle."""

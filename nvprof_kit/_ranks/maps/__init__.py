"""The map of one rank: device and host activity between collectives."""

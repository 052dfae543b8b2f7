"""The map of one rank: what its device and its host did between collectives."""

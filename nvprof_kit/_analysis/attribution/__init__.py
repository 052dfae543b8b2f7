"""Which layer, phase and step every GPU operation belongs to: ranges, launches and their join."""

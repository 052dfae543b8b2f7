"""Files as such, whatever they hold: what kind they are, how they are packed, and how they are read in bulk."""

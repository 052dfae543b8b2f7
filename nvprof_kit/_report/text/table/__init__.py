"""Building blocks of terminal tables."""

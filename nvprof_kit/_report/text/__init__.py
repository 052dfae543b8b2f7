"""Text reports for the terminal."""

"""What every table in the terminal is made of."""

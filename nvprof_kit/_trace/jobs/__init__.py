"""The ranks of one job: their captures and other sources of collectives."""

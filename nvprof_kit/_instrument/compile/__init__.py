"""torch.compile: what to keep out of the compiler's sight, and ranges inside what it compiled."""

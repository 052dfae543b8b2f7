"""What every integration shares: the loop of a host, its models, and what goes wrong in them."""

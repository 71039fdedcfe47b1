"""Which domain a prompt belongs to."""

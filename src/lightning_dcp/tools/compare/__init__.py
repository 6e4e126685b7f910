"""``lightning-dcp compare``."""

"""``lightning-dcp plan``."""

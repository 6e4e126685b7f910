"""``lightning-dcp calibrate``."""

"""What a micro-batch costs: the model, figures of devices, and calibration."""

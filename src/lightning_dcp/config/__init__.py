"""Ground floor: configuration dataclasses and their checks; no torch, no Megatron, no Lightning."""

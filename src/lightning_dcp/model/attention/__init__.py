"""Attention for packed sequences under any CP group: a table of backends, one file for ours."""

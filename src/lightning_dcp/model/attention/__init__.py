"""Attention for packed sequences under any CP group: a table of backends, one file for ours."""

from lightning_dcp.model.attention.backends import BACKENDS, AttentionBackend, choose_backend
from lightning_dcp.model.attention.packed import PackedAttention, attend_packed, gather_sequences

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "PackedAttention",
    "attend_packed",
    "choose_backend",
    "gather_sequences",
]

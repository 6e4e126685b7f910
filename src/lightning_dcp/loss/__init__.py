"""Losses that never hold the logits: linear cross-entropy, log-probabilities, entropy."""

from lightning_dcp.loss._linear_cross_entropy import linear_cross_entropy
from lightning_dcp.loss._log_probs_at import linear_log_probs_at
from lightning_dcp.loss._rows import IGNORE_INDEX, check_labels

__all__ = ["IGNORE_INDEX", "check_labels", "linear_cross_entropy", "linear_log_probs_at"]

"""Losses that never hold the logits: linear cross-entropy, log-probabilities, entropy."""

from lightning_dcp.loss._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from lightning_dcp.loss._log_probs_at import linear_log_probs_at as linear_log_probs_at
from lightning_dcp.loss._rows import IGNORE_INDEX as IGNORE_INDEX
from lightning_dcp.loss._rows import check_labels as check_labels

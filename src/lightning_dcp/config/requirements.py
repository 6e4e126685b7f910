"""Optional packages: flags, true where one is installed, whose own text is the error."""

from __future__ import annotations

from lightning_utilities.core.imports import RequirementCache

TRANSFORMERS_AVAILABLE = RequirementCache("transformers>=5.0")
MATPLOTLIB_AVAILABLE = RequirementCache("matplotlib>=3.9")
PYARROW_AVAILABLE = RequirementCache("pyarrow>=17.0")

"""DataModules that emit jagged batches: text and parquet files, and synthetic tokens.

Lazy, since ``lightning-dcp plan`` needs the lengths alone and no torch.
"""

from typing import TYPE_CHECKING

from lightning_dcp._lazy import lazy_names

if TYPE_CHECKING:
    from lightning_dcp.data.collate import collate_jagged as collate_jagged
    from lightning_dcp.data.lengths import LengthDistribution as LengthDistribution
    from lightning_dcp.data.lengths import LengthTable as LengthTable
    from lightning_dcp.data.lengths import read_length_file as read_length_file
    from lightning_dcp.data.parquet import ParquetDataModule as ParquetDataModule
    from lightning_dcp.data.pieces import DocumentCounts as DocumentCounts
    from lightning_dcp.data.rollouts import SyntheticRollouts as SyntheticRollouts
    from lightning_dcp.data.synthetic import SyntheticDataModule as SyntheticDataModule
    from lightning_dcp.data.text import TextDataModule as TextDataModule
    from lightning_dcp.data.tokenizers import ByteTokenizer as ByteTokenizer
    from lightning_dcp.data.tokenizers import load_tokenizer as load_tokenizer

_MODULES = {
    "ByteTokenizer": "tokenizers",
    "DocumentCounts": "pieces",
    "LengthDistribution": "lengths",
    "LengthTable": "lengths",
    "ParquetDataModule": "parquet",
    "SyntheticDataModule": "synthetic",
    "SyntheticRollouts": "rollouts",
    "TextDataModule": "text",
    "collate_jagged": "collate",
    "load_tokenizer": "tokenizers",
    "read_length_file": "lengths",
}
__all__ = list(_MODULES)

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)

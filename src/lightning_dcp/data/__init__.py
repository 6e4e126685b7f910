"""DataModules that emit jagged batches: text and parquet files, and synthetic tokens."""

from lightning_dcp.data.collate import collate_jagged
from lightning_dcp.data.lengths import LengthDistribution, LengthTable, read_length_file
from lightning_dcp.data.parquet import ParquetDataModule
from lightning_dcp.data.pieces import DocumentCounts
from lightning_dcp.data.rollouts import SyntheticRollouts
from lightning_dcp.data.synthetic import SyntheticDataModule
from lightning_dcp.data.text import TextDataModule
from lightning_dcp.data.tokenizers import ByteTokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "DocumentCounts",
    "LengthDistribution",
    "LengthTable",
    "ParquetDataModule",
    "SyntheticDataModule",
    "SyntheticRollouts",
    "TextDataModule",
    "collate_jagged",
    "load_tokenizer",
    "read_length_file",
]

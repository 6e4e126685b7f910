"""Rows a second of packing, against loops that copy sequence by sequence.

One batch with long-tailed lengths is packed by ``pack_micro_batch`` and by two loops, all three in
turn in one run, and their results are compared. The loops are written as one would without an
index for all rows:

- ``pad``: slice a sequence, pad it, take its two zigzag chunks; concatenate at the end;
- ``write``: copy each run of tokens straight into a buffer made before, without temporaries.

Times are CPU time of this process, which is single-threaded: what else the machine does counts
little. Ratios are medians over the repetitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dcp.config.padding import row_alignment
from lightning_dcp.data.lengths import LengthDistribution
from lightning_dcp.packing import (
    IGNORE_INDEX,
    GlobalBatch,
    Jagged,
    MicroBatch,
    pack_micro_batch,
    read_global_batch,
)

# A mean of about 300 tokens, a few of several thousand.
LENGTHS = LengthDistribution(kind="long_tail", low=64, high=8192, alpha=1.15)
KEYS = ("input_ids", "labels", "loss_mask", "position_ids", "padding_mask")
type Rows = dict[str, Tensor]


def make_batch(num_sequences: int, *, extras: bool, seed: int = 0) -> GlobalBatch:
    """Tokens, a loss mask and, with ``extras``, old log-probabilities and expert routes."""
    lengths = LENGTHS.sample(num_sequences, np.random.default_rng(seed))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    num_tokens = int(lengths.sum())
    generator = torch.Generator().manual_seed(seed)
    keys = {
        "input_ids": torch.randint(0, 50_000, (num_tokens,), generator=generator),
        "loss_mask": torch.rand(num_tokens, generator=generator) < 0.9,
    }
    if extras:
        keys["old_log_probs"] = -torch.rand(num_tokens, generator=generator)
        keys["routes"] = torch.randint(
            0, 64, (num_tokens, 8), dtype=torch.int32, generator=generator
        )
    return read_global_batch(
        {key: torch.nested.nested_tensor_from_jagged(value, offsets) for key, value in keys.items()}
    )


def pack_by_padding(
    batch: GlobalBatch, sample_ids: Sequence[int], *, cp_size: int, cp_rank: int
) -> Rows:
    """Slice, pad, cut, append; one ``torch.cat`` a key."""
    align = row_alignment(cp_size)
    starts, lengths = batch.input_ids.starts.tolist(), batch.lengths.tolist()
    extras = _per_token(batch)
    cut = partial(_pad_and_cut, cp_size=cp_size, cp_rank=cp_rank)
    parts: dict[str, list[Tensor]] = {key: [] for key in (*KEYS, *extras)}
    for sample in sample_ids:
        length = lengths[sample]
        padding = -length % align
        tokens = slice(starts[sample], starts[sample] + length)
        targets = slice(tokens.start + 1, tokens.stop)
        parts["input_ids"] += cut(batch.input_ids.values[tokens], padding)
        parts["labels"] += cut(batch.labels.values[targets], padding + 1, fill=IGNORE_INDEX)
        parts["loss_mask"] += cut(batch.loss_mask.values[targets], padding + 1)
        parts["position_ids"] += cut(torch.arange(length + padding), 0)
        parts["padding_mask"] += cut(torch.zeros(length, dtype=torch.bool), padding, fill=1)
        for key, extra in extras.items():
            parts[key] += cut(extra.values[tokens], padding)
    packed = {key: torch.cat(rows) for key, rows in parts.items()}
    packed["labels"].masked_fill_(~packed["loss_mask"], IGNORE_INDEX)
    return packed


def _pad_and_cut(
    rows: Tensor, padding: int, *, fill: int = 0, cp_size: int, cp_rank: int
) -> list[Tensor]:
    """The chunks of one CP rank, of a sequence that gets ``padding`` rows at its end."""
    if padding:
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, padding), value=fill)
    if cp_size == 1:
        return [rows]
    size = len(rows) // (2 * cp_size)
    return [rows[chunk * size :][:size] for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank)]


def pack_by_writing(
    batch: GlobalBatch, sample_ids: Sequence[int], *, cp_size: int, cp_rank: int
) -> Rows:
    """Copies every run of consecutive tokens of this rank into its place."""
    align = row_alignment(cp_size)
    starts, lengths = batch.input_ids.starts.tolist(), batch.lengths.tolist()
    padded = [-(-lengths[sample] // align) * align for sample in sample_ids]
    num_rows = sum(padded) // cp_size
    extras = _per_token(batch)
    ids, labels = torch.zeros(num_rows, dtype=torch.int64), torch.full((num_rows,), IGNORE_INDEX)
    loss_mask = torch.zeros(num_rows, dtype=torch.bool)
    position_ids = torch.empty(num_rows, dtype=torch.int64)
    padding_mask = torch.ones(num_rows, dtype=torch.bool)
    outputs = {
        key: torch.zeros((num_rows, *extra.values.shape[1:]), dtype=extra.values.dtype)
        for key, extra in extras.items()
    }
    row = 0
    for sample, size in zip(sample_ids, padded, strict=True):
        length, half = lengths[sample], size // (2 * cp_size)
        runs = [(0, size)]
        if cp_size > 1:
            runs = [(cp_rank * half, half), ((2 * cp_size - 1 - cp_rank) * half, half)]
        for position, num in runs:
            first = starts[sample] + position
            torch.arange(position, position + num, out=position_ids[row : row + num])
            if (real := min(num, length - position)) > 0:
                ids[row : row + real] = batch.input_ids.values[first : first + real]
                padding_mask[row : row + real] = False
                for key, extra in extras.items():
                    outputs[key][row : row + real] = extra.values[first : first + real]
            if (real := min(num, length - 1 - position)) > 0:
                source = slice(first + 1, first + 1 + real)
                labels[row : row + real] = batch.labels.values[source]
                loss_mask[row : row + real] = batch.loss_mask.values[source]
            row += num
    labels.masked_fill_(~loss_mask, IGNORE_INDEX)
    return dict(zip(KEYS, (ids, labels, loss_mask, position_ids, padding_mask), strict=True)) | (
        outputs
    )


def _per_token(batch: GlobalBatch) -> dict[str, Jagged]:
    return {key: value for key, value in batch.extras.items() if isinstance(value, Jagged)}


def check_equal(micro_batch: MicroBatch, rows: Rows) -> None:
    found = {key: getattr(micro_batch, key) for key in KEYS} | micro_batch.extras
    assert found.keys() == rows.keys(), f"keys {sorted(found)} and {sorted(rows)}"
    for key, value in rows.items():
        assert torch.equal(found[key], value), f"{key} differs from the loop's"


def cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def measure(num_sequences: int, cp_size: int, *, extras: bool, repeats: int) -> str:
    """One line of the table; the work is that of the group's first rank."""
    batch = make_batch(num_sequences, extras=extras)
    sample_ids = np.random.default_rng(1).permutation(num_sequences).tolist()
    ours, pad, write = (
        partial(pack, batch, sample_ids, cp_size=cp_size, cp_rank=0)
        for pack in (pack_micro_batch, pack_by_padding, pack_by_writing)
    )
    micro_batch = ours()
    check_equal(micro_batch, pad())
    check_equal(micro_batch, write())
    times = [[cpu_seconds(function) for function in (ours, pad, write)] for _ in range(repeats)]
    num_rows = len(micro_batch.input_ids)
    speed = num_rows / median(own for own, _, _ in times) / 1e6
    to_pad = median(loop / own for own, loop, _ in times)
    to_write = median(loop / own for own, _, loop in times)
    return (
        f"{num_sequences:>9,} {cp_size:>3} {num_rows:>9,} {speed:>12.1f} {to_pad:>11.1f} "
        f"{to_write:>13.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Rows a second of packing, against loops that copy sequence by sequence.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[8, 64, 512, 2048], help="of a batch"
    )
    parser.add_argument("--cp-sizes", type=int, nargs="+", default=[1, 2, 4], help="CP sizes")
    parser.add_argument("--repeats", type=int, default=15, help="of each line of the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for extras in (False, True):
        print(
            "\nids, labels, loss mask, positions, padding mask"
            + (", and extras: float32 [tokens], int32 [tokens, 8]" if extras else "")
        )
        print("sequences  CP      rows  million rows/s  over pad  over write")
        for num_sequences in options.sequences:
            for cp_size in options.cp_sizes:
                print(measure(num_sequences, cp_size, extras=extras, repeats=options.repeats))


if __name__ == "__main__":
    main()

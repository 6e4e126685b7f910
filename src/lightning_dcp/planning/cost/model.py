"""What a micro-batch is predicted to cost, in seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.model_sizes import ModelSizes
from lightning_dcp.config.padding import TIGHT, PackPadding, rows_per_rank
from lightning_dcp.planning.cost.presets import DevicePreset

_BYTES = 2  # of a bfloat16


@dataclass(frozen=True, slots=True)
class CostParts:
    """Where the time of samples goes, by CP size and sample; seconds, ``[num_sizes, num_samples]``.

    Attributes:
        rows: Rows a rank holds, padding included; int64.
        linear: Linear layers, padded rows included.
        attention: Attention, the slowness of thin shards included.
        communication: Exchange of keys and values that attention does not hide.
    """

    rows: NDArray[np.int64]
    linear: NDArray[np.float64]
    attention: NDArray[np.float64]
    communication: NDArray[np.float64]

    @property
    def total(self) -> NDArray[np.float64]:
        """What each sample adds to the time of its micro-batch."""
        total: NDArray[np.float64] = self.linear + self.attention + self.communication
        return total

    def of_units(self, units: Sequence[Sequence[int]]) -> CostParts:
        """The same by unit, the sum of its samples.

        Args:
            units: The samples of each unit.
        """
        # [num_samples]: the unit of each.
        unit = np.empty(self.rows.shape[1], dtype=np.int64)
        for k, samples in enumerate(units):
            unit[list(samples)] = k

        def add_up(table: NDArray[Any]) -> NDArray[Any]:
            total = np.zeros((len(units), len(table)), dtype=table.dtype)
            # One after the other, so that it rounds alike on every machine.
            np.add.at(total, unit, table.T)
            return np.ascontiguousarray(total.T)

        return CostParts(*(add_up(getattr(self, part.name)) for part in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a micro-batch, forward and backward, and bytes of its activations.

    A micro-batch on a CP group of ``s`` ranks takes ``fixed(s) + sum over its samples of t(s)``.
    A sample has ``r`` rows on each rank, padding included, and so ``r * s`` tokens:

    - linear work: ``seconds_per_row * r``. Padded rows cost as much as others, those that fill up
      a pack too. Six operations for
      each weight that a token meets: two forward, four backward (Kaplan et al. 2020, 2.1).
    - attention: ``seconds_per_pair * s * r * (r + thin_rows)``. Causal attention over ``r * s``
      tokens costs ``2 * (r * s)**2`` operations for each query channel forward and 2.5 times that
      backward (Dao 2023, FlashAttention-2, 4.1), shared by ``s`` ranks. ``thin_rows`` is the
      inefficiency of thin shards: the kernel reaches ``r / (r + thin_rows)`` of its speed.
    - communication: each rank's keys and values pass the ``s - 1`` others, forward and backward,
      and their gradients once (Liu et al. 2023, Ring Attention; an all-gather and a
      reduce-scatter move as much): ``kv_seconds_per_row * r * (s - 1)``, with the bandwidth
      between nodes for groups of more than ``ranks_per_node`` ranks. Only what is longer than
      ``overlap`` times the attention is paid: ``max(0, communication - overlap * attention)``,
      sample by sample. A pack is exchanged at once, so that a long sample can hide a short one's
      exchange: then this is an overestimate. In return the time is a sum over samples.
    - fixed: ``fixed_seconds + hop_seconds * (s - 1)``: launches, and the linear layers' slowness
      on few rows. Layers that reach ``R / (R + half_rows)`` of their speed on ``R`` rows take
      ``seconds_per_row * (R + half_rows)``: a constant for each micro-batch.

    The default values are those of a dense 8B model (:data:`LLAMA_8B`) on :data:`H200`.

    Attributes:
        seconds_per_row: Linear work of a row.
        seconds_per_pair: Attention of a pair of rows; times ``s * r * (r + thin_rows)``.
        thin_rows: Rows of one sequence on a rank at which attention runs at half its speed.
        kv_seconds_per_row_within: Passing one row's keys and values, and their gradients, to the
            next rank of the node.
        kv_seconds_per_row_across: The same where the group spans nodes.
        hop_seconds_within: Latency for each further rank of the group, over all layers.
        hop_seconds_across: The same where the group spans nodes.
        fixed_seconds: Of each micro-batch.
        overlap: The part of the attention time that hides communication, 0 to 1.
        ranks_per_node: DPxCP ranks of a node.
        activation_bytes_per_row: Activations kept for the backward pass.
        model: :attr:`ModelSizes.fingerprint` of the model it is for; empty if unknown.
    """

    seconds_per_row: float = 9.11e-5
    seconds_per_pair: float = 2.062e-9
    thin_rows: float = 256.0
    kv_seconds_per_row_within: float = 1.092e-6
    kv_seconds_per_row_across: float = 9.83e-6
    hop_seconds_within: float = 3.84e-3
    hop_seconds_across: float = 5.76e-3
    fixed_seconds: float = 1.486e-2
    overlap: float = 0.8
    ranks_per_node: int = 8
    activation_bytes_per_row: float = 4_456_448.0
    model: str = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "model":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{f.name}={value!r} is a {type(value).__name__}; give a number")
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{f.name}={value} must be finite and 0 or more")
        if not self.seconds_per_row > 0:
            raise ValueError(f"seconds_per_row={self.seconds_per_row} must be above 0")
        if self.overlap > 1:
            raise ValueError(f"overlap={self.overlap} must be 0 to 1, a part of attention's time")
        if self.ranks_per_node < 1 or self.ranks_per_node != int(self.ranks_per_node):
            raise ValueError(f"ranks_per_node={self.ranks_per_node} must be an int of 1 or more")

    @classmethod
    def from_sizes(
        cls,
        model: ModelSizes,
        device: DevicePreset,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        ep_size: int = 1,
        recompute: bool = False,
    ) -> CostModel:
        """The cost model of a model that was not measured, in bfloat16.

        Args:
            model: Sizes of the model.
            device: Speeds of the device.
            tp_size: Tensor-parallel ranks that share each row's work.
            pp_size: Pipeline stages; the time is that of one stage.
            ep_size: Expert-parallel ranks. Sending tokens to their experts and back is linear
                work here; nothing hides it.
            recompute: Whether the backward pass runs each layer's forward pass again.
        """
        # Forward passes' worth of linear work, of attention, and of exchanges of keys and values.
        # One forward and two backward (2.5 in attention); recomputation runs one more forward.
        passes, attention_passes, kv_passes = (4, 4.5, 4) if recompute else (3, 3.5, 3)
        share = tp_size * pp_size
        rate = device.peak_flops * device.linear_utilisation * share
        shared = 2 * passes * model.shared_weights / rate
        experts = 2 * passes * model.expert_weights / rate
        # Rows go to experts and back, in each pass.
        dispatch = _dispatch_bytes(model, ep_size) * (6 if recompute else 4)
        width = model.num_attention_heads * model.head_dim
        pair = 2 * attention_passes * width * model.num_layers
        kv_bytes = kv_passes * model.key_value_bytes_per_row / share
        # Latency is not shared by tensor-parallel ranks: each exchanges its own heads.
        hops = kv_passes * model.num_layers / pp_size
        kept = model.layer_input_bytes_per_row if recompute else model.activation_bytes_per_row
        # An expert sees only its part of the rows, of all ranks that share the experts.
        spread = model.num_experts / (model.num_experts_per_tok * ep_size) if experts else 0.0
        return cls(
            seconds_per_row=shared + experts + dispatch / _bandwidth(device, ep_size) / share,
            seconds_per_pair=pair / (device.peak_flops * device.attention_utilisation * share),
            thin_rows=device.thin_rows,
            kv_seconds_per_row_within=kv_bytes / device.bandwidth_within,
            kv_seconds_per_row_across=kv_bytes / device.bandwidth_across,
            hop_seconds_within=hops * device.hop_seconds_within,
            hop_seconds_across=hops * device.hop_seconds_across,
            fixed_seconds=model.num_layers / pp_size * device.layer_seconds
            + device.half_rows * (shared + experts * spread),
            overlap=device.overlap,
            # Tensor-parallel ranks are neighbours: a DPxCP rank takes tp_size devices of a node.
            ranks_per_node=max(1, device.devices_per_node // tp_size),
            activation_bytes_per_row=kept / share,
            model=model.fingerprint,
        )

    @property
    def crossover_length(self) -> float:
        """Tokens at which a sequence's attention costs as much as its linear work, without CP."""
        if self.seconds_per_pair == 0:
            return math.inf
        return max(0.0, self.seconds_per_row / self.seconds_per_pair - self.thin_rows)

    def parts(
        self,
        lengths: NDArray[np.int64],
        sizes: Sequence[int],
        tp_size: int = 1,
        padding: PackPadding = TIGHT,
    ) -> CostParts:
        """Where the time of each sample would go at each CP size.

        Args:
            lengths: Tokens of each sample, without padding; ``[num_samples]``.
            sizes: Ranks of the CP groups; ``num_sizes`` of them.
            tp_size: Tensor-parallel size, for the padding.
            padding: How sequences are padded; the rows that fill up packs are no sample's.
        """
        rows = np.stack([rows_per_rank(lengths, size, tp_size, padding) for size in sizes])
        size = np.array(sizes, dtype=np.int64)[:, None]
        r = rows.astype(np.float64)
        attention = self.seconds_per_pair * size * r * (r + self.thin_rows)
        per_row = [self._kv_seconds_per_row(s) * (s - 1) for s in sizes]
        exchange = np.array(per_row)[:, None] * r
        exposed = np.maximum(0.0, exchange - self.overlap * attention)
        return CostParts(rows, self.seconds_per_row * r, attention, exposed)

    def sample_times(
        self, lengths: NDArray[np.int64], size: int = 1, tp_size: int = 1
    ) -> NDArray[np.float64]:
        """Seconds that each sample adds to a micro-batch on a CP group.

        Args:
            lengths: Tokens of each sample, without padding; ``[num_samples]``.
            size: Ranks of the CP group.
            tp_size: Tensor-parallel size, for the padding.

        Returns:
            Seconds, ``[num_samples]``.
        """
        times: NDArray[np.float64] = self.parts(lengths, (size,), tp_size).total[0]
        return times

    def fixed_time(self, size: int) -> float:
        """Seconds of a micro-batch on ``size`` ranks that do not depend on its samples."""
        return self.fixed_seconds + self.hop_time(size)

    def hop_time(self, size: int) -> float:
        """The part of :meth:`fixed_time` that communication causes."""
        within = size <= self.ranks_per_node
        hop = self.hop_seconds_within if within else self.hop_seconds_across
        return hop * (size - 1)

    def activation_bytes(self, rows: int) -> float:
        """Bytes of the activations of a micro-batch of ``rows`` rows a rank."""
        return self.activation_bytes_per_row * rows

    def rows_that_fit(self, memory_bytes: float) -> int:
        """The largest cap whose activations fit ``memory_bytes``, 0 if no row does.

        Args:
            memory_bytes: What weights, gradients and the optimizer leave free on a device.

        Raises:
            ValueError: ``activation_bytes_per_row`` is 0: the model says nothing of memory.
        """
        if self.activation_bytes_per_row == 0:
            raise ValueError("activation_bytes_per_row=0: this cost model says nothing of memory")
        return max(0, int(memory_bytes // self.activation_bytes_per_row))

    def _kv_seconds_per_row(self, size: int) -> float:
        within = size <= self.ranks_per_node
        return self.kv_seconds_per_row_within if within else self.kv_seconds_per_row_across


def _bandwidth(device: DevicePreset, num_devices: int) -> float:
    within = num_devices <= device.devices_per_node
    return device.bandwidth_within if within else device.bandwidth_across


def _dispatch_bytes(model: ModelSizes, ep_size: int) -> float:
    """Bytes of one row that leave its rank on the way to its experts, over all layers."""
    sent = model.num_experts_per_tok * (ep_size - 1) / ep_size
    return model.num_moe_layers * sent * model.hidden_size * _BYTES

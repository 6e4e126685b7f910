"""What the accelerators can do, for cost models of models that were not measured."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePreset:
    """Speeds of one device and of the links between devices.

    Attributes:
        name: For messages.
        peak_flops: Dense bfloat16 operations a second.
        linear_utilisation: The part of the peak that the linear layers reach on many rows, the
            memory-bound operations between them included.
        attention_utilisation: The part of the peak that fused causal attention reaches on long
            sequences, forward and backward.
        half_rows: Rows at which a linear layer runs at half its speed.
        thin_rows: Rows of one sequence on one rank at which attention runs at half its speed.
        bandwidth_within: Bytes a second that one device sends to others of its node.
        bandwidth_across: Bytes a second that one device sends to other nodes.
        devices_per_node: Devices of a node.
        hop_seconds_within: Latency of one exchange of keys and values with a neighbour, kernel
            launches and the correction of the partial result included.
        hop_seconds_across: The same between nodes.
        layer_seconds: Fixed cost of a layer's forward and backward pass, whatever the rows.
        overlap: The part of the attention time that can hide an exchange.
        memory_bytes: Memory of the device.
    """

    name: str
    peak_flops: float
    linear_utilisation: float
    attention_utilisation: float
    half_rows: float
    thin_rows: float
    bandwidth_within: float
    bandwidth_across: float
    devices_per_node: int
    hop_seconds_within: float
    hop_seconds_across: float
    layer_seconds: float
    overlap: float
    memory_bytes: float


H100 = DevicePreset(
    name="H100",
    # NVIDIA H100 SXM data sheet: 989 TFLOP/s dense bfloat16, 80 GB, NVLink 900 GB/s both ways.
    peak_flops=989e12,
    # Megatron-Core reports 41 to 48 % of the peak for whole training steps on H100.
    linear_utilisation=0.5,
    # FlashAttention-3 (Shah et al. 2024), causal, head width 128: about 0.6 of the peak forward
    # and 0.5 backward at 16K; the packed kernels under CP reach less.
    attention_utilisation=0.45,
    # Estimates, not measured here: one wave of 128-row tiles leaves half of the 132 processors
    # idle, and causal attention at 256 rows spends about half its time on masked tiles.
    half_rows=128.0,
    thin_rows=256.0,
    # 450 GB/s each way and one NDR port of 400 Gb/s a GPU, of which some 80 % reach the user.
    bandwidth_within=360e9,
    bandwidth_across=40e9,
    devices_per_node=8,
    # Estimates of one ring step, that a calibration replaces: a send and receive of NCCL takes 10
    # to 15 us for any small message, and attention, the reading of half sequences and the two
    # corrections of the partial result are four kernels more of 5 to 10 us each.
    hop_seconds_within=40e-6,
    hop_seconds_across=60e-6,
    layer_seconds=100e-6,
    overlap=0.8,
    memory_bytes=80e9,
)
"""H100 SXM: within a node over NVLink, across nodes over InfiniBand NDR."""

H200 = replace(H100, name="H200", memory_bytes=141e9)
"""H200 SXM (data sheet: an H100 with 141 GB); the same links."""

CPU = DevicePreset(
    name="CPU",
    # One core with two 256-bit fused multiply-adds a cycle at 3 GHz: 96 GFLOP/s in float32.
    peak_flops=96e9,
    # Estimates for plain PyTorch kernels; measure the machine and fit for anything better.
    linear_utilisation=0.5,
    attention_utilisation=0.25,
    half_rows=16.0,
    thin_rows=32.0,
    # Gloo over the loopback device.
    bandwidth_within=1e9,
    bandwidth_across=1e9,
    devices_per_node=64,
    hop_seconds_within=300e-6,
    hop_seconds_across=300e-6,
    layer_seconds=2e-3,
    overlap=0.0,
    memory_bytes=4e9,
)
"""One core of a CPU for each rank, gloo between processes."""


def preset_of(device_type: str, device_name: str = "") -> DevicePreset:
    """The preset of a run's device: what its plans are priced with before anybody calibrates.

    Args:
        device_type: torch's, ``"cpu"`` or ``"cuda"``.
        device_name: As ``torch.cuda.get_device_name`` says it; H200's figures for names that no
            preset has.
    """
    if device_type == "cpu":
        return CPU
    return H100 if "H100" in device_name else H200

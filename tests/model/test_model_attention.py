"""Attention over packs cut for CP against plain attention, one document at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from distributed import run_distributed
from lightning_dcp.config.padding import TIGHT, PackPadding
from lightning_dcp.model import ModelConfig
from lightning_dcp.model.attention.packed import PackedAttention, attend_packed, gather_sequences
from lightning_dcp.model.megatron_config import transformer_config
from lightning_dcp.packing import PackLayout
from lightning_dcp.parallel import BoundPackedSeqParams, ParallelSizes, quiet_megatron

WIDTH = 4


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of one document, ``[length, heads, width]``, written out."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeat, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[-1] ** -0.5)
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


class Pack:
    """Documents with queries, keys and values, and the rows that each CP rank holds of them."""

    def __init__(
        self,
        lengths: list[int],
        cp_size: int,
        heads: int,
        groups: int,
        tp_size: int = 1,
        padding: PackPadding = TIGHT,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lengths) + cp_size)
        self.layouts = [
            PackLayout.of(lengths, cp_size=cp_size, cp_rank=rank, tp_size=tp_size, padding=padding)
            for rank in range(cp_size)
        ]
        # Padding holds values as any token does: nothing may come of them.
        num_tokens = int(self.layouts[0].cu_seqlens_padded[-1])
        self.whole = [
            torch.randn(num_tokens, number, WIDTH, dtype=torch.float64, generator=generator)
            for number in (heads, groups, groups)
        ]
        self.cotangent = torch.randn(
            num_tokens, heads, WIDTH, dtype=torch.float64, generator=generator
        )

    def token_of_row(self, layout: PackLayout) -> Tensor:
        """For each row of a rank, which token of the pack it is."""
        starts = layout.cu_seqlens_padded[layout.sequence_of_row]
        return torch.from_numpy(starts + layout.positions).long()

    def documents(self) -> list[slice]:
        """The tokens of each document, without its padding."""
        layout = self.layouts[0]
        return [
            slice(start, start + length)
            for start, length in zip(
                layout.cu_seqlens_padded.tolist(), layout.lengths, strict=False
            )
        ]

    def run(self, scale: float | None = None) -> tuple[Tensor, list[Tensor]]:
        """Output and gradients in token order; every rank starts from rows of its own."""
        rows = [
            [part[self.token_of_row(layout)].requires_grad_() for part in self.whole]
            for layout in self.layouts
        ]
        key, value = (
            torch.cat([rank[which] for rank in rows])[self.layouts[0].gather_index]
            for which in (1, 2)
        )
        output = torch.zeros_like(self.cotangent)
        for layout, (query, _, _) in zip(self.layouts, rows, strict=True):
            mine = attend_packed(query, key, value, layout, scale=scale)
            output = output.index_copy(0, self.token_of_row(layout), mine)
        tokens = torch.cat([torch.arange(d.start, d.stop) for d in self.documents()])
        (output * self.cotangent)[tokens].sum().backward()
        grads = [torch.zeros_like(part) for part in self.whole]
        for layout, rank in zip(self.layouts, rows, strict=True):
            for grad, part in zip(grads, rank, strict=True):
                grad[self.token_of_row(layout)] = part.grad
        return output.detach(), grads


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 4, 5, 8]),
    st.sampled_from([(4, 2), (6, 2), (3, 3), (4, 1)]),
    st.sampled_from([1, 2]),
    st.sampled_from([None, 0.3]),
    st.sampled_from([None, 7, 100]),
)
def test_equals_dense_attention_of_each_document(lengths, cp_size, heads, tp_size, scale, bucket):
    padding = PackPadding(pad_to_length_bucket=bucket)
    pack = Pack(lengths, cp_size, *heads, tp_size=tp_size, padding=padding)
    output, grads = pack.run(scale)
    is_token = torch.zeros(len(output), dtype=torch.bool)
    for tokens in pack.documents():
        is_token[tokens] = True
        parts = [part[tokens].clone().requires_grad_() for part in pack.whole]
        wanted = dense(*parts, scale=scale)
        wanted.backward(pack.cotangent[tokens])
        torch.testing.assert_close(output[tokens], wanted.detach(), rtol=1e-10, atol=1e-12)
        for grad, part in zip(grads, parts, strict=True):
            torch.testing.assert_close(grad[tokens], part.grad, rtol=1e-10, atol=1e-12)
    for grad in grads:
        assert not grad[~is_token].any()


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_never_across_documents(cp_size):
    pack = Pack([7, 12, 1, 5], cp_size, 4, 2)
    before, _ = pack.run()
    first, second, third, fourth = pack.documents()
    for part in pack.whole[1:]:
        part[second] += 100.0
    after, _ = pack.run()
    for other in (first, third, fourth):
        assert torch.equal(after[other], before[other])
    assert not torch.equal(after[second], before[second])


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_rows_that_fill_up_a_pack_attend_to_nothing_but_keep_the_graph(cp_size):
    padding = PackPadding(pad_to_length_bucket=256)
    pack = Pack([3], cp_size, 2, 2, padding=padding)
    output, _ = pack.run()
    # A chunk without a token has one row that attends: ranks meet in its backward pass.
    assert int((output != 0).any(-1).any(-1).sum()) == 3 + max(2 * cp_size - 1, 0) - (cp_size == 1)
    for layout in pack.layouts:
        query, key, value = (part.clone().requires_grad_() for part in pack.whole)
        rows = query[pack.token_of_row(layout)]
        attend_packed(rows, key, value, layout).sum().backward()
        assert value.grad.any()


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_no_gradient_across_documents(cp_size):
    pack = Pack([7, 12, 1, 5], cp_size, 4, 2)
    first, second, *_ = pack.documents()
    pack.cotangent[:] = 0.0
    pack.cotangent[second] = 1.0
    _, grads = pack.run()
    for grad in grads:
        assert not grad[: second.start].any()
        assert not grad[second.stop :].any()
    # A constant shift of the scores aside, every value of the document counts.
    assert grads[2][second].all()
    assert not grads[2][first].any()


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_never_from_the_future(cp_size):
    pack = Pack([9], cp_size, 2, 2)
    before, _ = pack.run()
    for part in pack.whole[1:]:
        part[5:] -= 50.0
    after, _ = pack.run()
    torch.testing.assert_close(after[:5], before[:5], rtol=1e-12, atol=0)
    assert (after[5:9] != before[5:9]).any(-1).all()


def gather(lengths: list[int]) -> dict[str, np.ndarray]:
    """This rank's rows through the collective, forward and backward."""
    cp_size, rank = dist.get_world_size(), dist.get_rank()
    pack = Pack(lengths, cp_size, 2, 2)
    layout = pack.layouts[rank]
    key, value = (
        part[pack.token_of_row(layout)].requires_grad_() for part in (pack.whole[1], pack.whole[2])
    )
    sequences = BoundPackedSeqParams(layout=layout, cp_group=dist.group.WORLD)
    found = gather_sequences(key, value, sequences)
    # Each rank weighs what it got in its own way: the gradients of all come back summed.
    sum((rank + 1) * (each * pack.cotangent).sum() for each in found).backward()
    return {
        "key": found[0].detach().numpy(),
        "value": found[1].detach().numpy(),
        "key_grad": key.grad.numpy(),
        "value_grad": value.grad.numpy(),
    }


def test_gathered_sequences_and_their_gradients():
    lengths = [7, 4, 13]
    pack = Pack(lengths, 3, 2, 2)
    for rank, found in enumerate(run_distributed(gather, 3, lengths)):
        np.testing.assert_array_equal(found["key"], pack.whole[1])
        np.testing.assert_array_equal(found["value"], pack.whole[2])
        wanted = 6 * pack.cotangent[pack.token_of_row(pack.layouts[rank])]
        np.testing.assert_allclose(found["key_grad"], wanted, rtol=1e-12)
        np.testing.assert_allclose(found["value_grad"], wanted, rtol=1e-12)


def build(
    attention_type: str = "self", mask: AttnMaskType = AttnMaskType.causal
) -> PackedAttention:
    sizes = ModelConfig(hidden_size=8, num_attention_heads=2, num_query_groups=1)
    with quiet_megatron():
        config = transformer_config(
            sizes, ParallelSizes(world_size=1), dtype=torch.float32, cpu=True, fused=False
        )
    return PackedAttention(config, 1, mask, attention_type)


def test_the_module_attends_in_its_layout():
    pack = Pack([5, 3], 1, 2, 1)
    sequences = BoundPackedSeqParams(layout=pack.layouts[0])
    output = build()(*pack.whole, None, packed_seq_params=sequences)
    assert output.shape == (8, 2 * WIDTH)
    for tokens in pack.documents():
        wanted = dense(*(part[tokens] for part in pack.whole)).flatten(1)
        torch.testing.assert_close(output[tokens], wanted)


@pytest.mark.parametrize("unbound", [None, PackedSeqParams(qkv_format="thd")])
def test_boundaries_that_are_not_bound_are_refused(unbound):
    kind = type(unbound).__name__
    message = f"needs the packed_seq_params of a bound micro-batch, found {kind}"
    with pytest.raises(TypeError, match=message):
        build()(*Pack([5, 3], 1, 2, 1).whole, None, packed_seq_params=unbound)


def test_a_bias_is_refused():
    pack = Pack([5], 1, 2, 1)
    with pytest.raises(NotImplementedError, match="attention bias"):
        build()(
            *pack.whole,
            None,
            attention_bias=torch.zeros(1),
            packed_seq_params=BoundPackedSeqParams(layout=pack.layouts[0]),
        )


@pytest.mark.parametrize(
    ("attention_type", "mask", "message"),
    [
        ("cross", AttnMaskType.causal, "found cross attention with a causal mask"),
        ("self", AttnMaskType.padding, "found self attention with a padding mask"),
    ],
)
def test_other_attention_is_refused(attention_type, mask, message):
    with pytest.raises(ValueError, match=message):
        build(attention_type, mask)

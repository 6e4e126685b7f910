"""The micro-batch's CP group reaches attention, and the model is as before without the hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import sentinel

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from torch.utils.checkpoint import checkpoint

from lightning_dcp.packing import PackLayout, pack_micro_batch, read_global_batch
from lightning_dcp.parallel import (
    BoundPackedSeqParams,
    DynamicCPGroups,
    bind_micro_batch,
    install_cp_hooks,
)


class SeesItsGroup(Attention):
    """An attention module that writes down which CP group its forward finds."""

    def __init__(self, collection: Any) -> None:
        torch.nn.Module.__init__(self)
        self.pg_collection = collection
        self.seen: list[Any] = []
        self.others: list[Attention] = []

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward(
        self, x: torch.Tensor, packed_seq_params: Any = None, fail: bool = False
    ) -> torch.Tensor:
        self.seen.append(self.pg_collection.cp)
        self.seen += [other.pg_collection.cp for other in self.others]
        if fail:
            raise ArithmeticError("in the forward")
        return x * 2


def attention() -> tuple[SeesItsGroup, SimpleNamespace]:
    collection = SimpleNamespace(cp=sentinel.static, tp=sentinel.tp)
    return SeesItsGroup(collection), collection


def packed(group: Any) -> PackedSeqParams:
    return PackedSeqParams(qkv_format="thd", cp_group=group)


X = torch.ones(1)


def test_the_group_is_there_in_the_forward_only():
    module, collection = attention()
    install_cp_hooks(module)
    for group in (sentinel.two, sentinel.four):
        module(X, packed_seq_params=packed(group))
        assert module.pg_collection.cp is sentinel.static
    assert module.seen == [sentinel.two, sentinel.four]
    assert module.pg_collection.tp is sentinel.tp
    assert collection.cp is sentinel.static


def test_without_a_group_the_static_one_stays():
    module, _ = attention()
    install_cp_hooks(module)
    module(X)
    module(X, packed_seq_params=None)
    module(X, packed_seq_params=packed(None))
    assert module.seen == [sentinel.static] * 3


def test_the_group_is_put_back_when_the_forward_raises():
    module, _ = attention()
    install_cp_hooks(module)
    with pytest.raises(ArithmeticError, match="in the forward"):
        module(X, packed_seq_params=packed(sentinel.two), fail=True)
    assert module.seen == [sentinel.two]
    assert module.pg_collection.cp is sentinel.static


def test_a_recomputed_forward_sees_the_same_group():
    module, _ = attention()
    install_cp_hooks(module)
    x = torch.ones(1, requires_grad=True)

    def run(x: torch.Tensor, group: Any) -> torch.Tensor:
        # Squared, so that the backward pass needs what the forward gave.
        return module(x, packed_seq_params=packed(group)).square()

    first = checkpoint(run, x, sentinel.two, use_reentrant=False)
    second = checkpoint(run, x, sentinel.four, use_reentrant=False)
    (first + second).sum().backward()
    assert module.seen[:2] == [sentinel.two, sentinel.four]
    assert sorted(map(str, module.seen[2:])) == sorted(map(str, module.seen[:2]))
    assert float(x.grad) == 16.0


def test_two_modules_do_not_share_the_copy():
    first, collection = attention()
    second = SeesItsGroup(collection)
    install_cp_hooks(torch.nn.ModuleList([first, torch.nn.Linear(1, 1), second]))
    first.others = [second]
    first(X, packed_seq_params=packed(sentinel.two))
    assert first.seen == [sentinel.two, sentinel.static]
    assert len({id(each) for each in (collection, first.pg_collection, second.pg_collection)}) == 3


def test_removing_gives_the_collection_back():
    first, collection = attention()
    second = SeesItsGroup(collection)
    remove = install_cp_hooks(torch.nn.ModuleList([first, second]))
    assert first.pg_collection is not collection
    remove()
    remove()
    for module in (first, second):
        assert module.pg_collection is collection
        module(X, packed_seq_params=packed(sentinel.two))
        assert module.seen == [sentinel.static]
    assert collection == SimpleNamespace(cp=sentinel.static, tp=sentinel.tp)


def micro_batch(cp_size: int):
    ids = torch.nested.nested_tensor([torch.arange(4), torch.arange(3)], layout=torch.jagged)
    return pack_micro_batch(read_global_batch({"input_ids": ids}), [0, 1], cp_size=cp_size)


def test_binding_gives_the_group_and_padded_boundaries():
    groups = DynamicCPGroups((0, 1), 0, {1: sentinel.one, 2: sentinel.two})
    unbound = micro_batch(2)
    assert unbound.packed_seq_params is None
    bound = bind_micro_batch(unbound, groups)
    sequences = bound.packed_seq_params
    assert isinstance(sequences, PackedSeqParams)
    assert sequences.cp_group is sentinel.two
    assert sequences.local_cp_size == 2
    assert sequences.qkv_format == "thd"
    assert sequences.max_seqlen_q == sequences.max_seqlen_kv == 4
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(sequences, name).tolist() == [0, 4, 8]
        assert getattr(sequences, name).dtype == torch.int32
    assert sequences.layout is bound.layout
    assert bind_micro_batch(micro_batch(1), groups).packed_seq_params.cp_group is sentinel.one


def test_binding_refuses_a_size_without_a_group():
    groups = DynamicCPGroups((0, 1, 2), 2, {1: sentinel.one, 3: sentinel.three})
    with pytest.raises(ValueError, match="Rank 2 of a pool of 3 has no CP group of 2 ranks"):
        bind_micro_batch(micro_batch(2), groups)


def test_the_gather_index_is_moved_once():
    layout = PackLayout.of([4, 3], cp_size=2)
    sequences = BoundPackedSeqParams(layout=layout)
    index = sequences.on_device("gather_index", torch.device("cpu"))
    assert index.tolist() == layout.gather_index.tolist()
    assert sequences.on_device("gather_index", torch.device("cpu")) is index
    assert sequences.on_device("gather_index", torch.device("meta")).device.type == "meta"

"""CP groups of every pool size, on paper and on gloo; setting up and tearing down."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from distributed import run_distributed
from lightning_dcp.config.parallel import cp_sizes_of_pool
from lightning_dcp.parallel import (
    DynamicCPGroups,
    ParallelSizes,
    cpu_mode_is_active,
    setup_parallel,
)
from lightning_dcp.parallel.groups import all_groups

SIZES = {
    1: (1,),
    2: (1, 2),
    3: (1, 2, 3),
    4: (1, 2, 4),
    5: (1, 2, 4, 5),
    6: (1, 2, 4, 6),
    7: (1, 2, 4, 7),
    8: (1, 2, 4, 8),
}


@pytest.mark.parametrize("pool", SIZES)
def test_cp_sizes_of_a_pool(pool):
    assert cp_sizes_of_pool(pool) == SIZES[pool]


@pytest.mark.parametrize("pool", SIZES)
def test_groups_of_a_size_are_aligned_and_disjoint(pool):
    for size in SIZES[pool]:
        groups = [list(group) for group in all_groups(size, pool)]
        ranks = list(itertools.chain(*groups))
        # The ranks left over cannot fill another group.
        assert ranks == list(range(len(ranks)))
        assert pool - len(ranks) < size
        assert all(len(group) == size for group in groups)
        assert all(group[0] % size == 0 for group in groups)


def test_groups_of_a_pool_of_six():
    assert [list(group) for group in all_groups(2, 6)] == [[0, 1], [2, 3], [4, 5]]
    assert [list(group) for group in all_groups(4, 6)] == [[0, 1, 2, 3]]
    assert [list(group) for group in all_groups(6, 6)] == [[0, 1, 2, 3, 4, 5]]


def test_a_size_that_a_rank_has_no_group_of():
    groups = DynamicCPGroups((0, 2, 4), 2, {1: mock.sentinel.one, 3: mock.sentinel.three})
    assert groups[3] is mock.sentinel.three
    assert groups.sizes == (1, 3)
    message = "Rank 2 of a pool of 3 has no CP group of 2 ranks; it has groups of 1, 3"
    with pytest.raises(ValueError, match=message):
        groups[2]


def use_groups(tp: int) -> dict:
    """Sums over every group of this rank, in a context that is then torn down."""
    sizes = ParallelSizes(world_size=dist.get_world_size(), tensor_model_parallel_size=tp)
    context = setup_parallel(sizes)
    groups = context.cp_groups
    seen = {}
    for size in groups.sizes:
        value = torch.tensor([10 ** dist.get_rank()])
        dist.all_reduce(value, group=groups[size])
        members = dist.get_process_group_ranks(groups[size])
        seen[size] = (members, dist.get_rank(groups[size]), int(value))
    ours = [groups[size] for size in groups.sizes] + [context.host_group]
    ours += [group for group in vars(context.pg_collection).values() if group in alive()]
    found = {
        "pool_ranks": groups.pool_ranks,
        "pool_rank": context.pool_rank,
        "num_ranks": groups.num_ranks,
        "tp_rank": context.tp_rank,
        "device": str(context.device),
        "cpu_mode": (context.cpu_mode, cpu_mode_is_active()),
        "groups": seen,
    }
    context.destroy()
    context.destroy()
    found["left"] = len([group for group in ours if group in alive()])
    found["after"] = (groups.sizes, cpu_mode_is_active(), context.destroyed)
    found["megatron"] = parallel_state.model_parallel_is_initialized()
    return found


def alive() -> list[dist.ProcessGroup]:
    return list(distributed_c10d._world.pg_map)


@pytest.mark.parametrize(("world", "tp"), [(3, 1), (6, 1), (6, 2)])
def test_groups_on_gloo(world, tp):
    for rank, found in enumerate(run_distributed(use_groups, world, tp)):
        pool = tuple(range(rank % tp, world, tp))
        assert found["pool_ranks"] == pool
        assert found["num_ranks"] == len(pool) == world // tp
        mine = found["pool_rank"]
        assert pool[mine] == rank
        assert found["tp_rank"] == rank % tp
        assert found["device"] == "cpu"
        assert found["cpu_mode"] == (True, True)
        wanted = {}
        for size in SIZES[len(pool)]:
            first = mine // size * size
            members = list(pool[first : first + size])
            if len(members) == size:
                wanted[size] = (members, mine - first, sum(10**member for member in members))
        assert found["groups"] == wanted
        assert found["left"] == 0
        assert found["after"] == ((), False, True)
        assert found["megatron"] is False


def set_up_again() -> None:
    one, two = (ParallelSizes(world_size=2, tensor_model_parallel_size=tp) for tp in (1, 2))
    first = setup_parallel(one)
    # The same sizes, though not the same object.
    same = setup_parallel(ParallelSizes(world_size=2), current=first)
    assert same is first
    second = setup_parallel(two, current=first)
    assert first.destroyed
    assert not second.destroyed
    assert second.cp_groups.sizes == (1,)
    assert dist.get_world_size(second.pg_collection.tp) == 2
    second.destroy()
    third = setup_parallel(one, current=second)
    assert third is not first
    assert third.cp_groups.sizes == (1, 2)
    value = torch.ones(1)
    dist.all_reduce(value, group=third.cp_groups[2])
    assert int(value) == 2
    with pytest.raises(RuntimeError, match="initialised already, and not by this run"):
        setup_parallel(two)
    # The refusal leaves the context in force alone.
    assert cpu_mode_is_active()
    assert parallel_state.model_parallel_is_initialized()
    third.destroy()
    # One that was torn down is not in force, whatever its sizes.
    fourth = setup_parallel(one, current=third)
    assert fourth is not third
    assert fourth.cp_groups.sizes == (1, 2)
    fourth.destroy()


def test_set_up_again():
    run_distributed(set_up_again, 2)


def refuse() -> None:
    with pytest.raises(RuntimeError, match="process group has 2 ranks, the sizes are for 4"):
        setup_parallel(ParallelSizes(world_size=4))
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    with pytest.raises(RuntimeError, match=r"Call megatron\.core\.parallel_state\.destroy_model"):
        setup_parallel(ParallelSizes(world_size=2))
    assert not cpu_mode_is_active()
    assert parallel_state.model_parallel_is_initialized()
    parallel_state.destroy_model_parallel()
    with (
        mock.patch.object(DynamicCPGroups, "create", side_effect=OSError("no port")),
        pytest.raises(OSError, match="no port"),
    ):
        setup_parallel(ParallelSizes(world_size=2))
    assert not cpu_mode_is_active()
    assert not parallel_state.model_parallel_is_initialized()
    # A failed set-up does not stand in the way of the next.
    setup_parallel(ParallelSizes(world_size=2)).destroy()


def test_refused_set_ups():
    run_distributed(refuse, 2)


def test_there_must_be_a_process_group():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed\.init_process_group"):
        setup_parallel(ParallelSizes(world_size=1))
    assert not cpu_mode_is_active()


def groups_after_two_rounds() -> list[int]:
    counts = []
    for _ in range(2):
        setup_parallel(ParallelSizes(world_size=4, tensor_model_parallel_size=2)).destroy()
        counts.append(len(alive()))
    return counts


def test_no_group_is_left_after_a_teardown():
    for counts in run_distributed(groups_after_two_rounds, 4):
        assert counts == [1, 1]


def destroy_late() -> bool:
    context = setup_parallel(ParallelSizes(world_size=1))
    dist.destroy_process_group()
    context.destroy()
    return cpu_mode_is_active()


def test_a_teardown_after_the_process_group_is_gone():
    assert run_distributed(destroy_late, 1) == [False]

import pytest
import torch
import torch.distributed as dist

from distributed import WorkerError, run_distributed


def _sum_of_ranks():
    value = torch.tensor([dist.get_rank()])
    dist.all_reduce(value)
    return int(value)


def _fail_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def test_returns_one_value_a_rank():
    assert run_distributed(_sum_of_ranks, 3) == [3, 3, 3]


def test_a_failure_on_one_rank_carries_its_traceback():
    with pytest.raises(WorkerError, match="only here"):
        run_distributed(_fail_on_rank_one, 2)

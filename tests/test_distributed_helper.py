"""The helper's own promises: results by rank, failures with their text, and nothing left over."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from distributed import WorkerError, run_distributed


def sum_of_ranks():
    value = torch.tensor([dist.get_rank()])
    dist.all_reduce(value)
    return int(value)


def fail_on_rank_one():
    if dist.get_rank() == 1:
        print("said before")
        raise ValueError("only here")
    dist.barrier()


def die():
    os._exit(3)


def hang():
    time.sleep(1000)


def leave(what):
    if what == "variable":
        os.environ["LEFT_BY_A_TEST"] = "1"
    elif what == "thread":
        threading.Thread(target=time.sleep, args=(60,), name="LEFT_BY_A_TEST").start()


def seed_and_draw():
    drawn = torch.rand(3).tolist()
    torch.manual_seed(os.getpid())
    return os.getpid(), drawn


def test_returns_one_value_a_rank():
    assert run_distributed(sum_of_ranks, 3) == [3, 3, 3]
    assert run_distributed(sum_of_ranks, 2) == [1, 1]


def test_a_failure_on_one_rank_carries_its_traceback_and_output():
    with pytest.raises(WorkerError, match=r"(?s)only here.*said before"):
        run_distributed(fail_on_rank_one, 2)
    assert run_distributed(sum_of_ranks, 2) == [1, 1]


def test_a_process_that_dies_is_a_failure():
    with pytest.raises(WorkerError, match="died with exit code 3"):
        run_distributed(die, 1)
    assert run_distributed(sum_of_ranks, 1) == [0]


def test_a_process_that_hangs_fails_with_its_stack():
    with pytest.raises(WorkerError, match=r"(?s)did not finish in time.*in hang"):
        run_distributed(hang, 1, timeout=3.0)


@pytest.mark.parametrize("what", ["variable", "thread"])
def test_what_a_call_leaves_behind_is_a_failure(what):
    with pytest.raises(WorkerError, match=r"left behind: .*LEFT_BY_A_TEST"):
        run_distributed(leave, 1, what)


def test_calls_share_a_process_but_no_random_state():
    assert run_distributed(seed_and_draw, 1) == run_distributed(seed_and_draw, 1)

"""Plans made while the previous step runs.

A loader that is asked for a batch one step ahead (Lightning's does) hands its lengths to a thread
before it hands the batch out. The plan is found again by the lengths, so that it does not matter
what happens to the batch in between; a batch whose lengths were changed is planned when it arrives.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.packing import read_jagged
from lightning_dcp.planning import Plan

PlanFunction = Callable[[NDArray[np.int64]], Plan]

_MOST_KEPT = 16
"""Plans that nobody asked for, as after a break of the loop, are dropped beyond this many."""


class PlanAhead:
    """Makes plans in a thread of its own.

    Args:
        plan: Makes a plan of lengths; the same lengths give the same plan.
    """

    def __init__(self, plan: PlanFunction) -> None:
        self._plan = plan
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan-ahead")
        self._plans: OrderedDict[bytes, Future[Plan]] = OrderedDict()

    def submit(self, batch: Any) -> None:
        """Starts to plan a batch that will be asked for soon; what is no batch is left alone."""
        try:
            lengths = read_jagged(batch["input_ids"]).lengths
        except (TypeError, KeyError, IndexError):
            return  # Refused with a reason when the step gets it.
        key = _key(lengths)
        if key not in self._plans:
            self._plans[key] = self._thread.submit(self._plan, lengths)
        while len(self._plans) > _MOST_KEPT:
            self._plans.popitem(last=False)[1].cancel()

    def get(self, lengths: NDArray[np.int64]) -> tuple[Plan, float]:
        """The plan of ``lengths``, and the seconds that the caller had to wait for it.

        Raises:
            Exception: What the plan function raises.
        """
        start = time.perf_counter()
        future = self._plans.pop(_key(lengths), None)
        plan = self._plan(lengths) if future is None else future.result()
        return plan, time.perf_counter() - start

    def close(self) -> None:
        """Ends the thread; plans not yet begun are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._plans.clear()


class PlanningLoader:
    """A loader that submits each batch to be planned before it gives it out.

    Everything but the iteration is the wrapped loader's.

    Args:
        loader: Gives global batches.
        ahead: Where to plan them.
    """

    def __init__(self, loader: Iterable[Mapping[str, Any]], ahead: PlanAhead) -> None:
        self._loader = loader
        self._ahead = ahead

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._loader:
            self._ahead.submit(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError where it has no length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def _key(lengths: NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(lengths, np.int64).tobytes()

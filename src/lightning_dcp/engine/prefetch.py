"""Plans made while the previous step runs.

A loader that is asked for a batch one step ahead (Lightning's does) hands its lengths to a thread
before it hands the batch out. The plan is found again by what it was made from, the lengths and
the units of samples that stay together, so that it does not matter what happens to the batch in
between; a batch whose lengths were changed is planned when it arrives.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dcp.packing import GlobalBatch, read_jagged
from lightning_dcp.planning import Plan

UnitIds = NDArray[np.int64] | None
"""``[num_samples]``: samples with equal ids stay together; None leaves all of them free."""

_MOST_KEPT = 16
"""Plans that nobody asked for, as after a break of the loop, are dropped beyond this many."""


class PlanPrefetcher:
    """Makes plans in a thread of its own.

    Args:
        plan: Makes a plan of lengths and units; the same ones give the same plan.
    """

    def __init__(self, plan: Callable[[NDArray[np.int64], UnitIds], Plan]) -> None:
        self._plan = plan
        # One thread: plans are wanted in the order of the batches, and share the interpreter with
        # the step that runs meanwhile.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan-prefetch")
        self._plans: OrderedDict[bytes, Future[Plan]] = OrderedDict()

    def submit(self, batch: Any, *, keep_together: str | None = None) -> None:
        """Starts to plan a batch that will be asked for soon; what is no batch is left alone.

        Args:
            batch: As the step will get it.
            keep_together: The key of its unit ids, if samples must stay together.
        """
        try:
            lengths = read_jagged(batch["input_ids"]).lengths
            units = None if keep_together is None else read_units(batch[keep_together])
        except (TypeError, KeyError, IndexError):
            return  # Refused with a reason when the step gets it.
        key = _key(lengths, units)
        if key not in self._plans:
            self._plans[key] = self._thread.submit(self._plan, lengths, units)
        # The oldest first: batches come in order, so that nobody will ask for it any more.
        while len(self._plans) > _MOST_KEPT:
            self._plans.popitem(last=False)[1].cancel()

    def get(self, lengths: NDArray[np.int64], units: UnitIds = None) -> tuple[Plan, float]:
        """The plan, and the seconds that the caller had to wait for it; raises what planning does.

        ``lengths`` are tokens, ``[num_samples]``.
        """
        start = time.perf_counter()
        future = self._plans.pop(_key(lengths, units), None)
        # Not submitted (a loop of one's own), or changed since then: planned here and now.
        plan = self._plan(lengths, units) if future is None else future.result()
        return plan, time.perf_counter() - start

    def close(self) -> None:
        """Ends the thread; plans not yet begun are dropped."""
        # Not waited for: nobody wants the plan that is being made.
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._plans.clear()


class PlanningLoader:
    """A loader that submits each batch to be planned before it gives it out.

    Everything but the iteration is the wrapped loader's.

    Args:
        loader: Gives global batches.
        prefetcher: Where to plan them.
        keep_together: The key of their unit ids, if samples must stay together.
    """

    def __init__(
        self,
        loader: Iterable[Mapping[str, Any]],
        prefetcher: PlanPrefetcher,
        *,
        keep_together: str | None = None,
    ) -> None:
        self._loader = loader
        self._prefetcher = prefetcher
        self._keep_together = keep_together

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._loader:
            self._prefetcher.submit(batch, keep_together=self._keep_together)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError where it has no length

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for `__setstate__` before there is a `_loader` to ask.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def read_units(value: Any) -> NDArray[np.int64]:
    """The unit ids of a batch, ``[num_samples]``.

    Raises:
        TypeError: Not a dense tensor of one int a sample on the host.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dim() != 1:
        found = (
            f"a tensor of shape {tuple(value.shape)} and layout {value.layout}"
            if isinstance(value, Tensor)
            else f"a {type(value).__name__}"
        )
        raise TypeError(f"keep_together needs a dense tensor [num_samples], found {found}.")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"keep_together needs a tensor of ints, found {value.dtype}.")
    return value.cpu().numpy().astype(np.int64)


def units_of(batch: GlobalBatch, keep_together: str | None) -> UnitIds:
    """The unit ids of a checked batch under the key ``keep_together``, if it is given.

    Raises:
        ValueError: The batch has no such key.
        TypeError: As :func:`read_units`.
    """
    if keep_together is None:
        return None
    if keep_together not in batch.extras:
        raise ValueError(
            f"keep_together={keep_together!r}: the batch has no such key; its further keys are "
            f"{sorted(batch.extras)}."
        )
    return read_units(batch.extras[keep_together])


def _key(lengths: NDArray[np.int64], units: UnitIds) -> bytes:
    parts = [lengths] if units is None else [lengths, units]
    # Units are as many as samples, or the plan refuses them: no two requests have one key.
    return b"|".join(np.ascontiguousarray(part, np.int64).tobytes() for part in parts)

"""Plans made while the previous step runs.

A loader that is asked for a batch one step ahead hands its lengths to a thread before it hands the
batch out. The plan is found again by what it was made from, the lengths and
the units of samples that stay together, so that it does not matter what happens to the batch in
between; a batch whose lengths were changed is planned when it arrives.
"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_dcp.engine.agreement import (
    agree_on_end,
    agree_on_length,
    agree_on_start,
    raised_on_all,
)
from lightning_dcp.packing import GlobalBatch, read_jagged
from lightning_dcp.planning import Plan

UnitIds = NDArray[np.int64] | None
"""``[num_samples]``: samples with equal ids stay together; None leaves all of them free."""

_END = object()

_MOST_KEPT = 16
"""Plans that nobody asked for, as after a break of the loop, are dropped beyond this many."""


class PlanPrefetcher:
    """Makes plans in a thread of its own.

    Args:
        plan: Makes a plan of lengths and units; the same ones give the same plan.

    Attributes:
        given: Batches that the loader which was asked last has given out.
    """

    def __init__(self, plan: Callable[[NDArray[np.int64], UnitIds], Plan]) -> None:
        self.given = 0
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
        except (TypeError, ValueError, KeyError, IndexError):
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

    Everything but the iteration is the wrapped loader's. A torch DataLoader whose workers make
    batches ahead anyway is asked for each batch one step early; any other when its batch is wanted,
    since what it gives may depend on the weights of the moment.

    Args:
        loader: Gives global batches.
        prefetcher: Where to plan them.
        keep_together: The key of their unit ids, if samples must stay together.
        group: A gloo group of all ranks, which must then iterate alike: where the loader of one
            fails or ends before the others', that is an error on all. None leaves each alone.

    Raises:
        ValueError: The loaders of the ranks have different lengths; on all of them.
    """

    def __init__(
        self,
        loader: Iterable[Mapping[str, Any]],
        prefetcher: PlanPrefetcher,
        *,
        keep_together: str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._loader = loader
        self._prefetcher = prefetcher
        self._keep_together = keep_together
        self._group = group
        with raised_on_all("could not ask its loader for its length", group):
            length = _length_of(loader)
        self._is_early = length is not None and getattr(loader, "num_workers", 0) > 0
        if group is not None:
            agree_on_length(length, group)

    @classmethod
    def of(cls, loader: Iterable[Mapping[str, Any]], *args: Any, **options: Any) -> PlanningLoader:
        """The wrapped loader, with ``state_dict`` and ``load_state_dict`` if it has them."""
        # Lightning looks for these methods in the class.
        is_stateful = all(hasattr(loader, name) for name in ("state_dict", "load_state_dict"))
        return (_StatefulPlanningLoader if is_stateful else cls)(loader, *args, **options)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        batches = self._load()
        if self._is_early:
            batches = _one_ahead(batches)
        for given, batch in enumerate(batches, start=1):
            self._prefetcher.given = given
            yield batch

    def _load(self) -> Iterator[Any]:
        iterator: Iterator[Any] | None = None
        loaded = 0
        while True:
            with raised_on_all("could not load a batch", self._group):
                iterator = iter(self._loader) if iterator is None else iterator
                self._before_next()
                batch = next(iterator, _END)
                if batch is not _END:
                    self._prefetcher.submit(batch, keep_together=self._keep_together)
            if batch is _END:
                break
            loaded += 1
            if loaded == 1 and self._group is not None:
                # Lightning loads it at set-up: a rank without one must not be met in other calls.
                agree_on_start(self._group)
            yield batch
        self._at_end()
        if self._group is not None:
            agree_on_end(loaded, self._group)

    def _before_next(self) -> None:
        """Called before the loader is asked for a batch, and for its end."""

    def _at_end(self) -> None:
        """Called when the loader has no more."""

    @property
    def _iterator(self) -> Any:
        # Lightning sets a DataLoader's to None when it has ended its workers: the loader's own.
        return self._loader._iterator  # type: ignore[attr-defined]

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._loader._iterator = iterator  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError where it has no length

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for `__setstate__` before there is a `_loader` to ask.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class _StatefulPlanningLoader(PlanningLoader):
    """Of a loader that can go on where it stopped, as torchdata's StatefulDataLoader.

    A loader that is asked a step early is a batch further than the training: its state is then the
    one that it had before, so that the batch comes again after a resumption.
    """

    _earlier: Any = None

    def state_dict(self) -> Any:
        """The state after the batch that is in use."""
        return self._loader.state_dict() if self._earlier is None else self._earlier  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Goes on from a state with the next iteration."""
        self._earlier = None
        self._loader.load_state_dict(state)  # type: ignore[attr-defined]

    def _before_next(self) -> None:
        # Lightning itself asks a loader without a length a step early.
        if self._is_early or _length_of(self._loader) is None:
            self._earlier = copy.deepcopy(self._loader.state_dict())  # type: ignore[attr-defined]

    def _at_end(self) -> None:
        self._earlier = None


def _one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches; each next one is asked for before one is given."""
    ready = next(batches, _END)
    while ready is not _END:
        following = next(batches, _END)
        yield ready
        ready = following


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None  # As Lightning tells.


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

"""What a planner returns: steps, each of which cuts the DPxCP ranks into CP groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from lightning_dcp.config.padding import TIGHT, PackPadding
from lightning_dcp.config.parallel import Execution


class PlanError(ValueError):
    """A plan breaks one of the rules that :meth:`Plan.validate` lists."""


@dataclass(frozen=True, slots=True)
class Group:
    """The CP group of one micro-batch and what it holds.

    Attributes:
        first_rank: First rank of the group within the DPxCP pool.
        size: Number of consecutive ranks, the CP size of the micro-batch.
        sample_ids: Indices into :attr:`Plan.lengths`, ascending.
    """

    first_rank: int
    size: int
    sample_ids: tuple[int, ...]

    @property
    def ranks(self) -> range:
        """The ranks of the group within the DPxCP pool."""
        return range(self.first_rank, self.first_rank + self.size)


@dataclass(frozen=True, slots=True)
class Step:
    """One micro-batch for every rank of the pool.

    Attributes:
        groups: The groups that partition the pool, in rank order.
    """

    groups: tuple[Group, ...]

    def group_of(self, rank: int) -> Group:
        """The group that ``rank`` of the DPxCP pool belongs to.

        Raises:
            ValueError: No group of the step holds the rank.
        """
        for group in self.groups:
            if rank in group.ranks:
                return group
        raise ValueError(f"no group of this step holds rank {rank}: {_describe(self.groups)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What a cost model predicts of a plan.

    The shares are of the time of all ranks, ``num_ranks * predicted_seconds``.

    Attributes:
        predicted_seconds: Forward and backward passes of the global batch.
        bound_seconds: No plan of the same request is predicted to take less
            (:func:`~lightning_dcp.planning.bound.lower_bound`).
        tokens_per_second: Tokens of the global batch, without padding, over the predicted time.
        idle_share: Ranks that wait for others.
        padding_share: Linear work of padded rows.
        communication_share: Exchange of keys and values that attention does not hide, and its
            latency.
        peak_activation_bytes: Activations of the micro-batch with the most rows, on each rank.
        execution: Who waits for whom.
    """

    predicted_seconds: float
    bound_seconds: float
    tokens_per_second: float
    idle_share: float
    padding_share: float
    communication_share: float
    peak_activation_bytes: float
    execution: Execution

    @property
    def quality(self) -> float:
        """The bound over the predicted time: 1 is a plan that cannot be better."""
        return self.bound_seconds / self.predicted_seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """How one global batch runs on a pool of DPxCP ranks.

    Attributes:
        steps: Run in this order by every rank of the pool.
        lengths: Tokens of each sample of the global batch, without padding.
        num_ranks: Size of the DPxCP pool.
        max_seqlen_per_dp_cp_rank: The most rows a rank may hold in a step, padding included.
        tp_size: Tensor-parallel size; sequences are padded for sequence parallelism over it.
        planner: Name of the planner that made the plan.
        padding: How packs are padded beyond their sequences.
        keep_together: A unit id for each sample: samples with equal ids share a micro-batch;
            ``None`` if every sample is for itself.
        report: What the cost model of the request predicts; ``None`` for a plan made by hand.
            Plans are compared without it.
    """

    steps: tuple[Step, ...]
    lengths: tuple[int, ...] = field(repr=False)
    num_ranks: int
    max_seqlen_per_dp_cp_rank: int
    tp_size: int = 1
    planner: str = "balanced"
    padding: PackPadding = TIGHT
    keep_together: tuple[int, ...] | None = field(default=None, repr=False)
    report: PlanReport | None = field(default=None, compare=False, repr=False)

    @property
    def quality(self) -> float:
        """The lower bound on the time of any plan over this one's predicted time, 0 to 1.

        Raises:
            ValueError: The plan has no report.
        """
        if self.report is None:
            raise ValueError(
                "this plan was not predicted: quality needs a plan of plan_global_batch, or "
                "evaluate(plan, cost_model).quality"
            )
        return self.report.quality

    @property
    def num_tokens(self) -> int:
        """Tokens of the global batch, without padding."""
        return sum(self.lengths)

    @property
    def num_padded_tokens(self) -> int:
        """Rows that all ranks hold over all steps, padding included."""
        return sum(self.rows(group) * group.size for step in self.steps for group in step.groups)

    def rows(self, group: Group) -> int:
        """The rows each rank of ``group`` holds, padding included.

        Raises:
            ValueError: They are more than ``padding.pad_to_length``.
        """
        align = self.padding.sequence_alignment(group.size, self.tp_size)
        # rows_per_rank of each, written out, for speed: validate() asks for every group.
        chunks = sum([-(-self.lengths[sample] // align) for sample in group.sample_ids])
        return self.padding.pack_rows(chunks * (align // group.size), group.size, self.tp_size)

    def most_rows(self, step: Step) -> int:
        """The most rows that any rank holds in a step, padding included."""
        return max(map(self.rows, step.groups))

    def cp_sizes(self) -> dict[int, int]:
        """The number of groups (micro-batches) of each CP size, in ascending order of size."""
        sizes = Counter(group.size for step in self.steps for group in step.groups)
        return dict(sorted(sizes.items()))

    def validate(self) -> None:
        """Checks that the plan can run.

        Every sample is in exactly one group of one step. In each step the groups, in rank order,
        partition the pool; none is empty; each is the whole pool, or its size is a power of two
        and its first rank a multiple of it; sample ids ascend; the rows that a rank holds after
        padding do not exceed the cap; and samples of one unit are in one group.

        Raises:
            PlanError: A rule is broken; the message names the step, the ranks and the numbers.
        """
        for index, step in enumerate(self.steps):
            self._check_partition(index, step)
            for group in step.groups:
                self._check_group(index, group)
        self._check_samples()
        self._check_units()

    def _check_partition(self, index: int, step: Step) -> None:
        next_rank = 0
        for group in step.groups:
            if group.size >= 1 and group.first_rank == next_rank:
                next_rank += group.size
                continue
            where = f"step {index}, {_ranks(group)}"
            if group.size < 1:
                raise PlanError(f"{where}: a group of {group.size} ranks; a group needs 1 or more")
            if group.first_rank < next_rank:
                raise PlanError(
                    f"{where}: the group starts at rank {group.first_rank}, but the groups before "
                    f"it already take ranks 0-{next_rank - 1}: groups overlap or are out of order"
                )
            raise PlanError(
                f"{where}: ranks {next_rank}-{group.first_rank - 1} before the group are in no "
                f"group; the groups must partition ranks 0-{self.num_ranks - 1}"
            )
        if next_rank != self.num_ranks:
            raise PlanError(
                f"step {index}: the groups end before rank {next_rank}, the pool is ranks "
                f"0-{self.num_ranks - 1}; the groups must partition it: {_describe(step.groups)}"
            )

    def _check_group(self, index: int, group: Group) -> None:
        fault = self._fault_of(group)
        if fault:
            raise PlanError(f"step {index}, {_ranks(group)}: {fault}")

    def _fault_of(self, group: Group) -> str:
        """What is wrong with a group; empty if nothing is."""
        ids = group.sample_ids
        # Process groups exist for these alone; making one is a collective of the whole world.
        power_of_two = group.size & (group.size - 1) == 0
        if group.size != self.num_ranks and not (
            power_of_two and group.first_rank % group.size == 0
        ):
            return (
                f"size {group.size} at first rank {group.first_rank}; a group is the whole pool of "
                f"{self.num_ranks}, or its size is a power of two and its first rank a multiple of "
                "it"
            )
        if not ids:
            return "the group holds no sample, so its ranks have no work"
        ascends = list(ids) == sorted(ids)
        least, most = (ids[0], ids[-1]) if ascends else (min(ids), max(ids))
        if least < 0 or most >= len(self.lengths):
            return f"sample ids {ids} are not all within the batch of {len(self.lengths)} samples"
        if not ascends:
            return f"sample ids {ids} do not ascend"
        try:
            rows = self.rows(group)
        except ValueError as error:
            # Rows over pad_to_length.
            return f"{error}; samples {ids} of {[self.lengths[i] for i in ids]} tokens"
        if rows > self.max_seqlen_per_dp_cp_rank:
            return (
                f"{rows} rows a rank after padding, over the cap max_seqlen_per_dp_cp_rank="
                f"{self.max_seqlen_per_dp_cp_rank}; samples {ids} of "
                f"{[self.lengths[i] for i in ids]} tokens"
            )
        return ""

    def _check_samples(self) -> None:
        planned = [i for step in self.steps for group in step.groups for i in group.sample_ids]
        # The usual case at once; the loop below only finds which sample it is.
        # They are known to be within the batch.
        if len(planned) == len(self.lengths) == len(set(planned)):
            return
        seen: dict[int, str] = {}
        for index, step in enumerate(self.steps):
            for group in step.groups:
                where = f"step {index}, {_ranks(group)}"
                for sample in group.sample_ids:
                    if sample in seen:
                        raise PlanError(
                            f"{where}: sample {sample} of {self.lengths[sample]} tokens is "
                            f"already in {seen[sample]}"
                        )
                    seen[sample] = where
        if len(seen) < len(self.lengths):
            lost = [i for i in range(len(self.lengths)) if i not in seen]
            shown = ", ".join(f"{i} ({self.lengths[i]} tokens)" for i in islice(lost, 5))
            raise PlanError(
                f"steps 0-{len(self.steps) - 1}, ranks 0-{self.num_ranks - 1}: {len(seen)} of "
                f"{len(self.lengths)} samples are planned; in no group: sample {shown}"
                f"{' and others' if len(lost) > 5 else ''}"
            )

    def _check_units(self) -> None:
        if self.keep_together is None:
            return
        if len(self.keep_together) != len(self.lengths):
            raise PlanError(
                f"keep_together has {len(self.keep_together)} unit ids for {len(self.lengths)} "
                "samples"
            )
        first: dict[int, tuple[int, int, Group]] = {}
        for index, step in enumerate(self.steps):
            for group in step.groups:
                for sample in group.sample_ids:
                    unit = self.keep_together[sample]
                    # The first of a unit's samples says where all of them belong.
                    other, where, home = first.setdefault(unit, (sample, index, group))
                    if (where, home) != (index, group):
                        raise PlanError(
                            f"step {index}, {_ranks(group)}: sample {sample} is in unit {unit} "
                            f"with sample {other}, which is in step {where}, {_ranks(home)}; "
                            "samples of one unit must share a group"
                        )


def _ranks(group: Group) -> str:
    last = group.first_rank + group.size - 1
    return f"rank {last}" if group.size == 1 else f"ranks {group.first_rank}-{last}"


def _describe(groups: Sequence[Group]) -> str:
    return ", ".join(_ranks(group) for group in groups) or "no groups"

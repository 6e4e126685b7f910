"""SyntheticDataModule: random tokens with realistic lengths."""

from __future__ import annotations

from typing import override

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.data.base import GlobalBatchDataModule, PredictSplit
from lightning_dcp.data.lengths import LengthDistribution, read_length_file
from lightning_dcp.data.rollouts import SyntheticRollouts

_TRAIN, _VAL, _LANGUAGE = 0, 1, 2  # streams of random numbers of one seed
_PREDICTABLE = 0.75


class SyntheticTokens(Dataset[dict[str, Tensor]]):
    """Sequences of a small random language; sample ``i`` is a function of the seed and ``i``.

    The tokens form a first-order Markov chain, so that a model has something to learn. The seed
    puts the vocabulary in a circle; three times in four the next token is the next one of the
    circle, otherwise one drawn with a preference for few tokens (position ``vocab_size * u ** 3``,
    ``u`` uniform). The loss of a model that knows the chain is near 1.9 at a vocabulary of 256,
    against 5.5 for one that knows nothing. ``lengths`` are tokens of each sample,
    ``[num_samples]``; the other options are those of :class:`SyntheticDataModule`.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        *,
        vocab_size: int,
        seed: int,
        stream: int,
        rollouts: SyntheticRollouts | None = None,
    ) -> None:
        self.lengths = lengths
        self._rollouts = rollouts
        # Without the stream: training and validation samples differ, their language is the same.
        self._circle = np.random.default_rng([seed, _LANGUAGE]).permutation(vocab_size)
        self._seed = (seed, stream)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length, vocab_size = int(self.lengths[index]), len(self._circle)
        # A generator a sample: none depends on which worker made which samples before it.
        rng = np.random.default_rng([*self._seed, index])
        jumps = rng.random(length) >= _PREDICTABLE
        # The first token follows none.
        jumps[0] = True
        targets = (vocab_size * rng.random(length) ** 3).astype(np.int64)
        steps = np.arange(length)
        # A token is as many places around the circle as it is steps behind the last jump.
        last_jump = np.maximum.accumulate(np.where(jumps, steps, 0))
        positions = (targets[last_jump] + steps - last_jump) % vocab_size
        sample = {"input_ids": torch.from_numpy(self._circle[positions].astype(np.int64))}
        # Drawn last, so that the tokens are the same without rollouts.
        if self._rollouts is not None:
            sample |= self._rollouts.draw(length, vocab_size, rng)
        return sample


class SyntheticDataModule(GlobalBatchDataModule):
    """Random tokens with lengths from a length file or a distribution, as jagged global batches.

    Sample ``i`` depends on ``seed`` and ``i`` alone, not on ranks, workers or the epoch: every
    epoch yields the same batches in the same order, on every rank. The tokens are a Markov chain
    rather than noise (see :class:`SyntheticTokens`), so a loss falls.

    Args:
        vocab_size: Token ids are below it.
        lengths: Distribution of the lengths; none for a long tail from 64 to 1024 tokens.
        length_file: Path of a length file to draw lengths from instead: a CSV with the header
            ``length,count``, gzipped if its name ends in ``.gz``.
        global_batch_size: Samples in one optimizer step, over all ranks.
        num_batches: Training batches in an epoch.
        num_val_batches: Validation batches; 0 for no validation.
        max_length: Longer lengths are clipped to it, in tokens; how many is reported.
        min_length: Shorter lengths are raised to it, in tokens; how many is reported.
        seed: Seed of lengths and tokens.
        num_workers: Processes that make batches, on each rank; 0: the training process does.
        predict_split: Whose samples ``predict`` runs on, in order: the training or the validation
            data.
        rollouts: Old log-probabilities, advantages and routes beside the tokens, to try
            reinforcement learning on; none by default.

    Attributes:
        num_clipped: Training and validation samples that ``max_length`` or ``min_length`` changed;
            0 before ``setup``.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        lengths: LengthDistribution | None = None,
        length_file: str | None = None,
        global_batch_size: int = 32,
        num_batches: int = 100,
        num_val_batches: int = 0,
        max_length: int = 4096,
        min_length: int = 2,
        seed: int = 0,
        num_workers: int = 2,
        predict_split: PredictSplit = "train",
        rollouts: SyntheticRollouts | None = None,
    ) -> None:
        super().__init__(
            global_batch_size=global_batch_size,
            max_length=max_length,
            min_length=min_length,
            shuffle=False,
            seed=seed,
            num_workers=num_workers,
            predict_split=predict_split,
        )
        self.vocab_size = check_at_least("vocab_size", vocab_size, 2)
        self._num_batches = check_at_least("num_batches", num_batches)
        self._num_val_batches = check_at_least("num_val_batches", num_val_batches, 0)
        if lengths is not None and length_file is not None:
            raise ValueError(f"lengths={lengths} and length_file={length_file!r}: give only one")
        self._lengths = lengths or LengthDistribution()
        self._length_file = length_file
        self._rollouts = rollouts
        self.num_clipped = 0

    @property
    def longest_sample(self) -> int:
        """The most tokens that a sample can have; known before ``setup``."""
        longest = self._lengths.longest
        if self._length_file is not None:
            longest = int(read_length_file(self._length_file).lengths[-1])
        return longest if self.max_length is None else min(self.max_length, longest)

    @override
    def setup(self, stage: str | None = None) -> None:
        # Lightning sets up once for each stage: the lengths are the same, but would count twice.
        if self.train_set is not None:
            return
        self.train_set = self._tokens(_TRAIN, self._num_batches)
        if self._num_val_batches:
            self.val_set = self._tokens(_VAL, self._num_val_batches)
        total = (self._num_batches + self._num_val_batches) * self.global_batch_size
        rank_zero_info(
            f"Synthetic data: {self.num_clipped:,} of {total:,} lengths were clipped to"
            f" [{self._min_length}, {self.max_length}]"
        )

    def _tokens(self, stream: int, num_batches: int) -> SyntheticTokens:
        file, seed = self._length_file, self._seed
        distribution = self._lengths if file is None else read_length_file(file)
        # A generator a stream: more training batches leave the validation data as it is.
        rng = np.random.default_rng([seed, stream])
        drawn = distribution.sample(num_batches * self.global_batch_size, rng)
        lengths = np.clip(drawn, self._min_length, self.max_length)
        self.num_clipped += int((lengths != drawn).sum())
        return SyntheticTokens(
            lengths, vocab_size=self.vocab_size, seed=seed, stream=stream, rollouts=self._rollouts
        )

"""What Lightning does to loaders, where it would lose batches or states."""

from __future__ import annotations

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader


def restore_loaders(trainer: Trainer) -> None:
    """Gives train loaders the states of a checkpoint that Lightning has left lying.

    Lightning does so when it makes the loaders. ``Trainer.estimated_stepping_batches``, which a
    schedule with an end asks for in ``configure_optimizers``, has it make them before it reads the
    checkpoint's loops.
    """
    loop = trainer.fit_loop
    if loop.restarting and loop._combined_loader_states_to_load:
        loop._load_combined_loader_states()
        assert loop._data_fetcher is not None
        # The iterator there is has begun at the beginning, and may hold a first batch.
        iter(loop._data_fetcher)


def keep_batch_samplers(trainer: Trainer) -> None:
    """Leaves a DataLoader alone that was given a ``batch_sampler``.

    Lightning would put a sampler of its own in place of it, and give one sample a batch.
    """
    connector = trainer._data_connector
    injects = type(connector)._requires_distributed_sampler

    def requires_sampler(loader: DataLoader) -> bool:
        # torch's DataLoader has a batch size unless it got a batch sampler, or gives single items.
        has_own = loader.batch_sampler is not None and loader.batch_size is None
        return not has_own and injects(connector, loader)

    connector._requires_distributed_sampler = requires_sampler  # type: ignore[assignment,method-assign]

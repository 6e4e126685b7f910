"""Loaders that go on where a checkpoint left them."""

from __future__ import annotations

from lightning.pytorch import Trainer


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

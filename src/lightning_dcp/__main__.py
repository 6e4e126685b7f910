"""``python -m lightning_dcp`` is ``lightning-dcp``."""

from lightning_dcp.cli import main

if __name__ == "__main__":
    main()

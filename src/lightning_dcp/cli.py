"""The ``lightning-dcp`` command: our own commands by name, everything else is LightningCLI's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from jsonargparse import set_parsing_settings

from lightning_dcp.tools.mistakes import TRACEBACK, told_once

# Each is a folder of tools/ with a ``command.main``, imported when it runs.
_OURS = {
    "plan": "predict what dynamic context parallelism does for your lengths",
    "calibrate": "measure your model on this machine, for better predictions",
    "compare": "compare static and dynamic context parallelism on one config",
}
_OF_LIGHTNING = {
    "fit": "train a model",
    "validate": "evaluate a model on validation data",
    "test": "evaluate a model on test data",
    "predict": "log-probabilities and entropies of a data set, in its order",
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs ``lightning-dcp``.

    Args:
        args: The command line, without the command's name; that of the process by default.
    """
    given = list(sys.argv[1:] if args is None else args)
    if "--traceback" in given:
        # In the environment, where the processes that Lightning starts find it too.
        os.environ[TRACEBACK] = "1"
        # LightningCLI reads sys.argv itself, and does not know the option.
        given = [arg for arg in given if arg != "--traceback"]
        if args is None:
            sys.argv[1:] = given
    # The strings under the fields of our config dataclasses are their help texts.
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    if given in (["-h"], ["--help"]):
        # Our own text: LightningCLI's parser would import torch and Lightning for it.
        print(_help())
        return
    with told_once(given[0] if given else ""):
        if not given or (given[0][:1] != "-" and given[0] not in _OURS | _OF_LIGHTNING):
            near = get_close_matches(given[0], _OURS | _OF_LIGHTNING) if given else []
            raise ValueError(
                f"expected a command, {', '.join(_OF_LIGHTNING | _OURS)}, found "
                f"{given[0] if given else 'none'}{f'; did you mean {near[0]}?' if near else ''}"
            )
        if given[0] in _OURS:
            import_module(f"lightning_dcp.tools.{given[0]}.command").main(given[1:])
        else:
            from lightning_dcp.tools.lightning_cli import run_lightning

            run_lightning(None if args is None else given)


def _help() -> str:
    summaries = _OF_LIGHTNING | _OURS
    width = max(map(len, summaries))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in summaries.items()]
    return (
        "usage: lightning-dcp COMMAND [options]\n\n"
        "Dynamic context parallelism for PyTorch Lightning.\n\ncommands:\n"
        + "\n".join(lines)
        + "\n\nlightning-dcp COMMAND --help lists a command's options; each can be in a YAML file "
        "that --config names."
    )


if __name__ == "__main__":
    main()

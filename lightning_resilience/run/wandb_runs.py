"""One run of Weights & Biases for each fit of a script, over all restarts. Imports neither torch nor Lightning.

``launch`` gives the workers an id in the environment, which W&B takes where a script gives none. It is the first fit's,
and those of the others follow from it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

RUN_ID_VARIABLE = "WANDB_RUN_ID"
"""Where W&B looks for the id of the next run that is begun."""


def wandb_run_id(identity: str, fit: int = 0) -> str:
    """The id of the W&B run of a fit.

    Args:
        identity: Of the run directory.
        fit: Number of the fit, in the order in which the script makes them.
    """
    return f"{identity}-{fit}" if fit else identity


def begin_another(after: str, run_id: str) -> None:
    """Has this process begin the W&B run ``run_id`` next, unless the script has given an id of its own.

    Args:
        after: The id that was ours so far.
        run_id: The id from now on.
    """
    if os.environ.get(RUN_ID_VARIABLE) != after:
        return
    os.environ[RUN_ID_VARIABLE] = run_id
    wandb: Any = sys.modules.get("wandb")
    if getattr(wandb, "run", None) is not None:  # it has read the environment, and reads it once in a process
        with suppress(Exception):  # what is said about a training does not end it
            wandb.setup(settings=wandb.Settings(run_id=run_id))

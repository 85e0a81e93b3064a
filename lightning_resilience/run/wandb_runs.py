"""Gives each fit of a script one Weights & Biases run over all restarts. Imports neither torch nor Lightning.

``launch`` gives the workers a run id in the environment, which W&B uses if the script gives none. It is the id of the
first fit; the ids of later fits are derived from it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

RUN_ID_VARIABLE = "WANDB_RUN_ID"
"""Environment variable from which W&B takes the id of the next run."""


def wandb_run_id(identity: str, fit: int = 0) -> str:
    """The id of the W&B run of a fit.

    Args:
        identity: Identity of the run directory.
        fit: Number of the fit, in the order in which the script makes them.
    """
    return f"{identity}-{fit}" if fit else identity


def begin_another(after: str, run_id: str) -> None:
    """Makes this process begin the W&B run ``run_id`` next, unless the script has set its own id.

    Args:
        after: The id that this package has set before.
        run_id: The id from now on.
    """
    if os.environ.get(RUN_ID_VARIABLE) != after:
        return
    os.environ[RUN_ID_VARIABLE] = run_id
    wandb: Any = sys.modules.get("wandb")
    if getattr(wandb, "run", None) is not None:  # W&B has read the environment, which it does once in a process
        with suppress(Exception):  # an error of W&B must not end a training
            wandb.setup(settings=wandb.Settings(run_id=run_id))

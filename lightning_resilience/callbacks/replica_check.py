"""``ReplicaCheck``: compares the replicated state of all ranks, and rolls back if it differs."""

from __future__ import annotations

import os

from lightning_resilience._arguments import checked
from lightning_resilience.fit.joining import SessionCallback
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.replica_comparison import ReplicaComparison
from lightning_resilience.fit.session import FitSession


class ReplicaCheck(SessionCallback):
    """Finds a rank whose weights differ from the other ranks, names it, and rolls back.

    In DDP all ranks hold the same parameters and optimizer state, bit for bit. With replicas of FSDP2's shards (HSDP)
    all ranks with the same shard do. After a silent error (a bit that flips in memory, a core that miscalculates) one
    rank differs. Without this check nothing notices: the gradients of different models are averaged, and a checkpoint
    holds one of these models, or a mixture.

    Whenever the state is saved, each rank computes a digest of what it holds, and the digests are compared: for local
    saves (:class:`~lightning_resilience.LocalCheckpoint`) in the background, for global ones
    (:class:`~lightning_resilience.AutoResume`) where the ranks meet for the save. A step without a save costs nothing.
    If digests differ, that state does not count. The rank that differs from the majority is named (of two ranks, both),
    and the run rolls back to the newest checkpoint on which all ranks agreed, in the same processes, bitwise as a
    restart would. :class:`~lightning_resilience.NaNGuard` does not blame a non-finite loss with this cause on its
    batch.

    State that may differ between ranks is not compared: buffers, such as the statistics of batch normalization without
    synchronization; random states, metrics, the position in the data; parameters that were frozen when training began.
    Without replicas (FSDP, tensor parallelism, ``ZeroRedundancyOptimizer``, models that are averaged now and then, a
    single rank) the callback does nothing and logs that once.

    Args:
        max_rollbacks: Number of rollbacks for the same divergence, restarts included. Then the fit fails; a launcher
            restarts it within its budget, if possible without the node of the named rank.
        run_dir: The run directory, on storage that all nodes share. Default: ``resilience`` in the Trainer's
            ``default_root_dir``. Under ``launch``, its ``--run-dir`` takes precedence.

    Raises:
        ValueError: If an argument makes no sense.

    Example::

        trainer = Trainer(callbacks=[ReplicaCheck(), AutoResume(run_dir="runs/gpt")], max_epochs=2)
        trainer.fit(model, data)
    """

    @checked
    def __init__(self, max_rollbacks: int = 2, run_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        if max_rollbacks < 0:
            raise ValueError(f"max_rollbacks must not be negative, not {max_rollbacks}.")
        self.max_rollbacks = max_rollbacks
        self.run_dir = run_dir

    def _participate(self, session: FitSession) -> Participant:
        return ReplicaComparison(session, self.max_rollbacks, optional=self._injected)

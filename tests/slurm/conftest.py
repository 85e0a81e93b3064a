"""One real Slurm for all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, install, why_not
from tests.slurm.jobs import Chain


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    try:
        install()
    except Exception as error:
        pytest.skip(f"Slurm cannot be installed: {error}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # munged wants one whose parents all may enter
    cluster = Cluster(folder)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(folder)


@pytest.fixture
def chain(cluster: Cluster, tmp_path: Path) -> Iterator[Chain]:
    chain = Chain(cluster, tmp_path)
    yield chain
    chain.clean_up()

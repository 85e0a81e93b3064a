"""Ranks killed again and again, under ``launch`` with spare processes and with ``--elastic``, whose ranks wait for a
replacement or go on: see ``kill_campaign``.

The short version runs with the slow tests; ``make test-kills`` kills 300 times. ``SEED`` changes what is chosen.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests import kill_campaign
from tests.kill_campaign import AT_A_RANDOM_INSTANT, GO_ON, MODES, POINTS, SOON, STOPPED, Account, survive

SEED = os.environ.get("SEED", "1")
_BEFORE: dict[str, Account] = {}

SHORT = {
    "spares": [AT_A_RANDOM_INSTANT, "last bucket", SOON, "validation", "restoring"],
    "elastic": ["between batches", SOON, "buffer broadcast", "in the optimizer step", "joining"],
    GO_ON: [AT_A_RANDOM_INSTANT, SOON, AT_A_RANDOM_INSTANT],
}

TRAINERS: dict[str, dict[str, Any]] = {mode: {"devices": 2, "max_epochs": 8} for mode in SHORT}
TRAINERS[GO_ON] = {"devices": 3, "max_epochs": 8, "precision": "64-true"}


@pytest.mark.nvrx
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_some_kills(tmp_path: Path, mode: str) -> None:
    account = survive(tmp_path, SEED, SHORT[mode], mode, trainer=TRAINERS[mode], workers=1)
    assert not account.problems
    assert account.kills


@pytest.mark.campaign
@pytest.mark.nvrx
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(13))
def test_three_hundred_kills(tmp_path: Path, mode: str, number: int) -> None:
    chance = random.Random(f"{SEED}-{number}-{mode}")
    account = survive(tmp_path, f"{SEED}-{number}", kill_campaign.draw_points(chance, 12, POINTS.get(mode)), mode)
    total = _BEFORE.setdefault(mode, Account())
    total.add(account)
    print(f"\n{mode}, up to here:\n", *total.rows(), sep="\n")
    assert not account.problems


@pytest.mark.campaign
@pytest.mark.nvrx
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_stands_still_again_and_again(tmp_path: Path, mode: str) -> None:
    account = survive(tmp_path, SEED, [STOPPED] * 3, mode, trainer={"devices": 2, "max_epochs": 100})
    assert not account.problems
    assert account.kills[STOPPED]

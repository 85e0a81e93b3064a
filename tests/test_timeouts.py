"""Section timeouts: what is configured, what is calculated, and the file in which the next job finds it."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience import _files
from lightning_resilience.detect.hangs.progress import Section
from lightning_resilience.detect.hangs.timeouts import SectionTimeouts, calculate, load, save, selectable
from tests.test_checkpoint_file import killed_everywhere

LAYOUT = {"world_size": 8, "nodes": 2, "strategy": "DDPStrategy"}
DEFAULTS = SectionTimeouts()
ALL: set[Section] = {"setup", "step", "validation", "checkpointing", "out_of_section"}


def test_imports_neither_torch_nor_lightning() -> None:
    code = (
        "import lightning_resilience.detect.hangs.timeouts, sys; "
        "assert not {'torch', 'lightning', 'pytorch_lightning'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# What is configured


def test_the_defaults_hold_for_every_section() -> None:
    assert DEFAULTS.by_section() == {
        "setup": 600.0,
        "step": 180.0,
        "validation": 180.0,
        "checkpointing": 420.0,
        "out_of_section": 300.0,
        "start": 600.0,
    }


def test_none_is_no_limit() -> None:
    limits = SectionTimeouts(setup=None, step=None).by_section()
    assert limits["setup"] == limits["step"] == limits["validation"] == math.inf
    assert limits["checkpointing"] == 420.0
    assert SectionTimeouts(step=None, validation=5).by_section()["validation"] == 5
    # Nor is one calculated.
    limits = SectionTimeouts(step=None, calculated={"step": 30.0, "setup": 95.0}).by_section()
    assert (limits["step"], limits["validation"], limits["setup"]) == (math.inf, math.inf, 95.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", DEFAULTS),
        ("setup:600,step:180,checkpointing:420,out_of_section:300", DEFAULTS),
        (" step : 2.5 , validation:1e3,", SectionTimeouts(step=2.5, validation=1000.0)),
        ("setup:none,checkpointing:null,validation:None", SectionTimeouts(setup=None, checkpointing=None)),
    ],
)
def test_parse(text: str, expected: SectionTimeouts) -> None:
    assert SectionTimeouts.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("steps:5", "no section 'steps'; the sections are setup, step, validation, checkpointing, out_of_section"),
        ("left:5", "no section 'left'"),
        ("calculated:5", "no section 'calculated'"),
        ("step:fast", "section step must be seconds, or none, not 'fast'"),
        ("step:", "section step must be seconds, or none, not ''"),
        ("step", "NAME:SECONDS"),
        ("step=5", "not 'step=5'"),
        ("step:5,setup:6,step:7", "two timeouts for section step"),
        ("step:0", "section step must be a positive number of seconds, or None, not 0.0"),
        ("setup:-5", "section setup .* not -5.0"),
        ("step:nan", "section step .* not nan"),
        ("step:inf", "section step .* not inf"),
    ],
)
def test_what_cannot_be_parsed_is_named(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SectionTimeouts.parse(text)


@pytest.mark.parametrize("value", ["5", True, -1, 0, math.nan, math.inf, 10**400])
def test_a_timeout_is_a_positive_number(value: Any) -> None:
    with pytest.raises(ValueError, match="section validation"):
        SectionTimeouts(validation=value)
    with pytest.raises(ValueError, match="calculated timeout of section setup"):
        SectionTimeouts(calculated={"setup": value})


def test_the_minimum_is_not_above_what_is_configured() -> None:
    configured = SectionTimeouts(step=4.0, validation=None, checkpointing=None)
    found = calculate(configured, {"step": 0.1, "validation": 0.1, "checkpointing": 0.1, "setup": 0.1}, ALL)
    assert found.calculated == {"step": 4.0, "validation": 4.0, "checkpointing": 30.0, "setup": 30.0}
    assert calculate(found, {"step": 2.0}, {"step"}).calculated["step"] == 7.0


def test_what_is_written_is_read_again() -> None:
    numbers = random.Random(7)
    for _ in range(500):
        values = [numbers.choice([None, 5, 0.1, 10 ** numbers.uniform(-3, 9)]) for _ in ALL]
        timeouts = SectionTimeouts(*values)
        assert SectionTimeouts.parse(str(timeouts)) == timeouts, str(timeouts)


def test_what_is_shown_is_what_holds() -> None:
    assert str(DEFAULTS) == "setup:600,step:180,checkpointing:420,out_of_section:300"
    timeouts = SectionTimeouts(setup=None, step=2.5, calculated={"step": 45.0, "checkpointing": 100.0})
    assert str(timeouts) == "setup:none,step:45,validation:2.5,checkpointing:100,out_of_section:300"
    assert SectionTimeouts.parse(str(timeouts)).by_section() == timeouts.by_section()


# What is calculated

NOTHING_SEEN: dict[str, Any] = {
    "has_loaded": False,
    "train_iterations": 0,
    "has_validated": False,
    "has_saved": False,
    "saves_in_background": False,
    "is_end": False,
}
WHOLE_RUN = {"has_loaded": True, "train_iterations": 16, "has_validated": True, "has_saved": True, "is_end": True}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({}, set()),
        ({"is_end": True}, set()),
        ({"has_loaded": True}, {"setup"}),
        ({"train_iterations": 15}, set()),
        ({"train_iterations": 16}, {"step"}),
        ({"has_validated": True}, {"validation"}),
        ({"has_saved": True}, {"checkpointing"}),
        ({"has_saved": True, "saves_in_background": True}, set()),
        (WHOLE_RUN, ALL),
        ({**WHOLE_RUN, "is_end": False}, ALL - {"out_of_section"}),
        ({**WHOLE_RUN, "has_validated": False}, ALL - {"validation"}),
        ({**WHOLE_RUN, "has_loaded": False}, ALL - {"setup", "out_of_section"}),
        ({**WHOLE_RUN, "train_iterations": 15}, ALL - {"step", "out_of_section"}),
        ({**WHOLE_RUN, "has_saved": False}, ALL - {"checkpointing", "out_of_section"}),
        ({**WHOLE_RUN, "saves_in_background": True}, ALL - {"checkpointing"}),
    ],
)
def test_what_may_be_calculated(seen: dict[str, Any], expected: set[str]) -> None:
    assert selectable(**{**NOTHING_SEEN, **seen}) == expected


@pytest.mark.parametrize(
    ("before", "longest", "after"),
    [
        (None, 20.0, 100.0),  # five times the longest, whatever was configured
        (None, 2000.0, 10000.0),
        (None, 6.0, 30.0),
        (None, 0.01, 30.0),  # the minimum
        (None, 6.001, 31.0),  # rounded up
        (300.0, 20.0, 200.0),  # the mean with what had been calculated before
        (100.0, 40.0, 150.0),
        (50.0, 0.2, 30.0),
        (31.0, 1000.0, 2516.0),
    ],
)
def test_a_calculated_timeout(before: float | None, longest: float, after: float) -> None:
    current = SectionTimeouts(calculated={} if before is None else {"step": before})
    assert calculate(current, {"step": longest}, {"step"}).by_section()["step"] == after


def test_only_what_was_selected_and_seen_is_calculated() -> None:
    current = SectionTimeouts(setup=None, calculated={"checkpointing": 77.0})
    longest: dict[Section, float] = {"setup": 100.0, "step": 20.0, "checkpointing": 50.0, "validation": 0.0}
    new = calculate(current, longest, {"setup", "validation", "out_of_section"})
    assert new == SectionTimeouts(setup=None, calculated={"checkpointing": 77.0, "setup": 500.0})
    assert current.calculated == {"checkpointing": 77.0}


def test_a_first_validation_is_not_measured_by_the_training_before_it() -> None:
    trained = calculate(SectionTimeouts(step=180.0), {"step": 7.0}, {"step"})
    assert (trained.by_section()["step"], trained.by_section()["validation"]) == (35.0, 180.0)
    validated = calculate(trained, {"step": 7.0, "validation": 9.0}, {"validation"})
    assert (validated.by_section()["step"], validated.by_section()["validation"]) == (35.0, 45.0)


def test_no_history_makes_a_timeout_too_short_for_what_was_just_seen() -> None:
    numbers = random.Random(7)
    for _ in range(300):
        timeouts = DEFAULTS
        for _ in range(numbers.randrange(1, 12)):
            longest: dict[Section, float] = {section: 10 ** numbers.uniform(-4, 5) for section in sorted(ALL)}
            timeouts = calculate(timeouts, longest, ALL)
            for section, limit in timeouts.by_section().items():
                assert limit >= max(30.0, 2.5 * longest.get(section, 0.0))


@pytest.mark.parametrize("before", [30.0, 64.0, 1e6])
def test_calculating_again_from_the_same_times_comes_to_rest(before: float) -> None:
    timeouts = SectionTimeouts(calculated={"step": before})
    for _ in range(40):
        timeouts = calculate(timeouts, {"step": 12.34}, {"step"})
    assert 61.0 <= timeouts.by_section()["step"] <= 63.0
    assert calculate(timeouts, {"step": 12.34}, {"step"}) == timeouts


# What is kept for the next job


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ft_state.json"


OLD = SectionTimeouts(calculated={"step": 45.0, "setup": 120.0})
NEW = SectionTimeouts(calculated={"step": 90.0, "setup": 120.0, "out_of_section": 33.0})


def test_the_next_job_has_the_calculated_timeouts_and_its_own_configured_ones(path: Path) -> None:
    save(path, 0, SectionTimeouts(step=10.0, checkpointing=20.0, calculated=OLD.calculated), LAYOUT)
    configured = SectionTimeouts(step=99.0, checkpointing=None)
    found, problem = load(path, 0, LAYOUT, configured)
    assert problem is None
    assert found == SectionTimeouts(step=99.0, checkpointing=None, calculated=OLD.calculated)
    assert os.listdir(path.parent) == ["ft_state.json"]


def test_a_person_can_read_the_file(path: Path) -> None:
    save(path, 0, OLD, LAYOUT)
    text = path.read_text()
    content = json.loads(text)
    assert len(text.splitlines()) > 10
    assert content["version"] == 1
    assert content["fits"]["0"]["calculated"] == {"step": 45.0, "setup": 120.0}
    assert content["fits"]["0"]["layout"] == LAYOUT
    assert content["fits"]["0"]["time"].startswith("20")


def test_every_fit_has_its_own(path: Path) -> None:
    save(path, 0, OLD, LAYOUT)
    save(path, 1, NEW, {"world_size": 1})
    save(path, 0, NEW, LAYOUT)
    assert load(path, 0, LAYOUT, DEFAULTS) == (NEW, None)
    assert load(path, 1, {"world_size": 1}, DEFAULTS) == (NEW, None)
    assert load(path, 2, LAYOUT, DEFAULTS) == (None, None)


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "ft_state.json"
    assert load(path, 0, LAYOUT, DEFAULTS) == (None, None)
    save(path, 0, OLD, LAYOUT)
    assert load(path, 0, LAYOUT, DEFAULTS) == (OLD, None)


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({**LAYOUT, "world_size": 4}, "(world_size was 8 and is 4)"),
        ({**LAYOUT, "nodes": 1, "strategy": "FSDP"}, "(nodes was 2 and is 1, strategy was DDPStrategy and is FSDP)"),
        ({**LAYOUT, "device": "cpu"}, "(device was not known and is cpu)"),
        ({"world_size": 8, "nodes": 2}, "(strategy was DDPStrategy and is not known)"),
    ],
)
def test_another_layout_is_named(path: Path, layout: dict[str, Any], named: str) -> None:
    save(path, 0, OLD, LAYOUT)
    found, problem = load(path, 0, layout, DEFAULTS)
    assert found is None
    assert problem == f"{path} is ignored: Its timeouts are for another layout {named}."


def entry(**calculated: Any) -> dict[str, Any]:
    return {"version": 1, "fits": {"0": {"calculated": calculated, "layout": LAYOUT, "time": ""}}}


SOMETHING_ELSE = "It was not written by lightning-resilience."
UNUSABLE = {
    "empty": (b"", "not valid JSON"),
    "binary": (b"\x80\x04\x95\xff", "not valid JSON"),
    "zeros": (b"\0" * 300, "not valid JSON"),
    "nested": (b"[" * 200_000, "not valid JSON"),
    "too many digits": (b'{"version": ' + b"1" * 10_000 + b"}", "not valid JSON"),
    "list": ([1, 2], SOMETHING_ELSE),
    "text": ("step:5", SOMETHING_ELSE),
    "NVRx's": ({"section": {"section": {"step": 5.0}, "calculated_sections": ["step"]}}, SOMETHING_ELSE),
    "no fits": ({"version": 1}, SOMETHING_ELSE),
    "fits in a list": ({"version": 1, "fits": []}, SOMETHING_ELSE),
    "version in words": ({"version": "1", "fits": {}}, SOMETHING_ELSE),
    "later version": ({"version": 2}, "It has version 2, and this release reads version 1."),
    "no entry": ({"version": 1, "fits": {"0": 5}}, "The entry of this fit is damaged."),
    "no layout": ({"version": 1, "fits": {"0": {"calculated": {}}}}, "The entry of this fit is damaged."),
    "no timeouts": ({"version": 1, "fits": {"0": {"layout": LAYOUT}}}, "The entry of this fit is damaged."),
    "timeouts in a list": (
        {"version": 1, "fits": {"0": {"calculated": [5], "layout": LAYOUT}}},
        "The entry of this fit is damaged.",
    ),
    "negative": (entry(step=-5), "section step must be a positive number of seconds, not -5."),
    "nan": (entry(step=math.nan), "not nan."),
    "infinite": (entry(step=math.inf), "not inf."),
    "huge": (entry(step=10**400), "section step must be a positive number"),
    "null": (entry(step=None), "not None."),
    "string": (entry(step="45"), "not '45'."),
    "boolean": (entry(step=True), "not True."),
    "unknown section": (entry(step=45, steps=45), "no section 'steps'"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_is_of_no_use_is_ignored_for_a_stated_reason_and_replaced(path: Path, name: str) -> None:
    content, named = UNUSABLE[name]
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    found, problem = load(path, 0, LAYOUT, DEFAULTS)
    assert found is None
    assert problem is not None
    assert problem.startswith(f"{path} is ignored: ")
    assert problem.endswith(".")
    assert named in problem
    assert "\n" not in problem
    save(path, 0, OLD, LAYOUT)
    assert load(path, 0, LAYOUT, DEFAULTS) == (OLD, None)


def test_every_truncation_is_noticed(path: Path) -> None:
    save(path, 0, OLD, LAYOUT)
    content = path.read_bytes()
    for length in range(len(content) - 1):  # the last character is the line's end
        path.write_bytes(content[:length])
        found, problem = load(path, 0, LAYOUT, DEFAULTS)
        assert found is None
        assert problem is not None
        assert "not valid JSON" in problem


def test_any_damaged_byte_gives_valid_timeouts_or_a_reason(path: Path) -> None:
    save(path, 0, OLD, LAYOUT)
    content = path.read_bytes()
    numbers = random.Random(7)
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] = numbers.randrange(256)
        path.write_bytes(damaged)
        found, problem = load(path, 0, LAYOUT, DEFAULTS)
        assert found is None or problem is None
        assert found is None or min(found.by_section().values()) >= 30.0


def test_a_damaged_entry_does_no_harm_to_the_others(path: Path) -> None:
    save(path, 0, OLD, LAYOUT)
    content = json.loads(path.read_text())
    content["fits"]["1"] = {"calculated": {"step": "soon"}}
    path.write_text(json.dumps(content))
    assert load(path, 0, LAYOUT, DEFAULTS) == (OLD, None)
    assert load(path, 1, LAYOUT, DEFAULTS)[0] is None
    save(path, 1, NEW, LAYOUT)
    assert load(path, 0, LAYOUT, DEFAULTS) == (OLD, None)
    assert load(path, 1, LAYOUT, DEFAULTS) == (NEW, None)


def test_a_file_that_cannot_be_read(path: Path) -> None:
    path.mkdir()
    assert load(path, 0, LAYOUT, DEFAULTS) == (None, f"{path} is ignored: It cannot be read (Is a directory).")
    with pytest.raises(OSError, match=r"ft_state\.json"):
        save(path, 0, OLD, LAYOUT)
    assert os.listdir(path.parent) == ["ft_state.json"]


def test_killed_at_every_point_of_a_save(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        save(folder / "ft_state.json", 0, OLD, LAYOUT)
        save(folder / "ft_state.json", 1, OLD, LAYOUT)

    kills, published = 0, 0
    for folder in killed_everywhere(prepare, lambda folder: save(folder / "ft_state.json", 0, NEW, LAYOUT), tmp_path):
        path = folder / "ft_state.json"
        found, problem = load(path, 0, LAYOUT, DEFAULTS)
        assert problem is None
        assert found in (OLD, NEW)
        kills += 1
        published += found == NEW
        assert load(path, 1, LAYOUT, DEFAULTS) == (OLD, None)
        save(path, 0, NEW, LAYOUT)
        assert load(path, 0, LAYOUT, DEFAULTS) == (NEW, None)
        _files.clean_temporaries(folder)
        assert os.listdir(folder) == ["ft_state.json"]
    assert kills == 5  # open, write, sync, rename, sync of the directory
    assert published == 1  # the last of them


def test_killed_at_every_point_of_the_first_save(tmp_path: Path) -> None:
    published = 0
    for folder in killed_everywhere(
        lambda folder: None, lambda folder: save(folder / "new" / "ft_state.json", 0, NEW, LAYOUT), tmp_path
    ):
        found, problem = load(folder / "new" / "ft_state.json", 0, LAYOUT, DEFAULTS)
        assert problem is None
        assert found in (None, NEW)
        published += found == NEW
    assert published == 1

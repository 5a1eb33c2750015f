"""The benchmark of prompt following: what it keeps, goes on from and reports. No model runs here."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from PIL import Image

from cogvideox_flax.errors import InputError
from weights.toy_world.judge import prompt_following
from weights.toy_world.judge.prompt_following import Records, main, make_items, run, shuffled, summary, table
from weights.toy_world.world import held_out

SETTINGS = {"steps": 2}


@pytest.fixture(scope="module")
def items():
    return make_items(20, seed=0)


class Maker:
    """The true clips of a batch; stops as if by Ctrl-C when it has made enough."""

    def __init__(self, batches=99):
        self.batches, self.sizes = batches, []

    def __call__(self, part):
        if len(self.sizes) == self.batches:
            raise KeyboardInterrupt
        self.sizes.append(len(part))
        return np.stack([item.clip.video for item in part])


def test_half_of_the_prompts_are_held_out(items):
    assert [held_out(item.clip.scene.things[0]) for item in items] == [False] * 10 + [True] * 10
    assert [item.clip.prompt for item in items] != [item.clip.prompt for item in make_items(20, seed=1)]


@pytest.mark.further
def test_an_interrupted_run_goes_on(items, tmp_path):
    path = tmp_path / "new" / "a.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run("default", items, Maker(batches=2), 8, Records(path, SETTINGS))
    path.write_text(path.read_text()[:-100])  # killed while writing: one clip of the second batch is lost
    make, records = Maker(), Records(path, SETTINGS)
    assert len(records.found) == 15
    run("default", items, make, 8, records)
    assert make.sizes == [8, 8]  # the second again, and the third, filled up
    again = Records(path, SETTINGS)
    assert again.of("default", items) == records.of("default", items)
    run("default", items, Maker(batches=0), 8, again)


def test_other_settings_are_refused(tmp_path):
    Records(tmp_path / "a.jsonl", SETTINGS)
    with pytest.raises(InputError, match="another steps"):
        Records(tmp_path / "a.jsonl", {"steps": 3})


@pytest.mark.further
def test_shuffled_clips_are_judged_by_prompts_not_their_own(items):
    records = Records(None, SETTINGS)
    run("default", items, Maker(), 8, records)
    own = records.of("default", items)
    other = shuffled(own)
    assert all(r["score"]["all"] for r in own)
    assert [r["prompt"] for r in other] == [r["prompt"] for r in own]
    assert sorted(r["generated_from"] for r in other) == sorted(r["prompt"] for r in own)
    assert not any(r["generated_from"] == r["prompt"] for r in other)
    rows = summary(other)
    assert rows["all"]["rates"]["all"]["percent"] < 20 and rows["trained"]["clips"] == rows["held out"]["clips"] == 10
    assert len(table({"shuffled": rows}).splitlines()) == 2 + len(rows)


def test_the_command(monkeypatch, tmp_path, capsys):
    out, sheet = tmp_path / "a.json", tmp_path / "a.png"
    argv = ["prompt_following", "--modes", "truth", "--prompts", "6", "--json", str(out), "--sheet", str(sheet)]
    monkeypatch.setattr(sys, "argv", argv)
    main()
    assert "| truth | held out | 3 |" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert len(result["clips"]) == 6 and result["settings"]["world_seed"] == prompt_following.FIRST_SEED
    with Image.open(sheet) as image:
        assert image.width == 2 * (prompt_following.SHOWN * prompt_following.TILE + 16)


@pytest.mark.parametrize("more", [["--modes", "all"], ["--prompts", "0"], ["--seed", "-1"], ["--prompts", "3"]])
def test_what_cannot_be_served_is_refused(monkeypatch, more):
    monkeypatch.setattr(sys, "argv", ["prompt_following", *more])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2

"""Recipes and latents out of files of strangers: taken as what they must be, or refused with one line."""

from __future__ import annotations

import io
import json
import random
import zipfile

import numpy as np
import pytest

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.page import PageRow, write_page
from cogvideox_flax.generate.recipe import fields_of, read_latents_npz, read_recipe
from cogvideox_flax.io.video import save_video
from tests.support.commands import python

pytest_plugins = ["tests.support.commands"]

LATENTS = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(1, 2, 4, 4, 3)
RECIPE = {
    "prompt": "a red circle", "negative_prompt": "", "seed": 3, "release": "embedded",
    "version": "cogvideox-flax 1.0", "settings": {"num_inference_steps": 2, "height": 32},
}  # fmt: skip


def npz(path, recipe=RECIPE, save=np.savez, **arrays):
    save(path, **{"latents": LATENTS, "metadata": json.dumps(recipe)} | arrays)
    return path


def read(path):
    """All that is read from an npz of latents."""
    latents = read_latents_npz(path, 1, 3)
    return fields_of(read_recipe(path), path), latents


def change_member(path, change):
    """Write an npz again with other bytes of its latents."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, change(data) if name == "latents.npy" else data)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_is_read_as_it_was_written(tmp_path, save):
    path = npz(tmp_path / "x.npz", save=save)
    fields, latents = read(path)
    assert (fields["prompt"], fields["seed"], fields["height"]) == ("a red circle", 3, 32)
    np.testing.assert_array_equal(latents, LATENTS)
    path = npz(tmp_path / "y.npz", save=save, latents=np.asfortranarray(LATENTS.astype(">f8")))
    np.testing.assert_array_equal(read(path)[1], LATENTS)


def encrypted(path):
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(mark) + at] |= 1
    path.write_bytes(data)


def compressed_by_nobody(path):
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        data[data.index(mark) + at] = 99
    path.write_bytes(data)


def an_npy(path):
    with path.open("wb") as file:
        np.save(file, LATENTS)


def shape(text):
    return lambda path: change_member(path, lambda data: data.replace(b"(1, 2, 4, 4, 3)", text.ljust(15)))


def a_bomb(path):
    """128 MiB of zeros in 130 kB, above the limit of the test."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("latents.npy", bytes(2**27))


def a_lie_about_its_size(path):
    """More bytes than the archive states."""
    a_bomb(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\1\2") + 24
    data[at : at + 4] = (1000).to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (encrypted, "is encrypted"),
        (compressed_by_nobody, "compression method is not supported"),
        (an_npy, "not a zip file"),
        (shape(b"(9999999999, 9)"), r"not as long as its shape \[9999999999, 9\]"),
        (shape(b"(9**9**9, )"), "header of an array is damaged"),
        (shape(b"(-1, 2, 4)"), "header of an array is damaged"),
        (shape(b"((((((((((("), "header of an array is damaged"),
        (shape(b"(1, 2, 4, 4, 2)"), "not as long as"),
        (lambda path: change_member(path, lambda data: data.replace(b"'<f4'", b"'|O4'")), "else than numbers or text"),
        (lambda path: change_member(path, lambda data: data.replace(b"'<f4'", b"'|V4'")), "else than numbers or text"),
        (lambda path: change_member(path, lambda data: data[:60]), "header of an array is damaged"),
        (lambda path: change_member(path, lambda data: data[:-1]), "not as long as"),
        (lambda path: change_member(path, lambda data: b""), "something else than an array"),
        (lambda path: npz(path, latents=np.array([{"a": 1}, None])), "else than numbers or text"),
        (lambda path: npz(path, latents=np.array("text")), r"latents are \[\]"),
        (lambda path: npz(path, latents=LATENTS.astype(str)), "expected floating-point numbers"),
        (lambda path: npz(path, latents=np.full_like(LATENTS, np.nan)), "NaN or infinity"),
        (lambda path: npz(path, metadata=np.float32(1)), "states no prompt"),
        (lambda path: npz(path, metadata="[" * 10_000), "its metadata is no JSON"),
        (a_bomb, "at most .* GiB are read"),
        (a_lie_about_its_size, "Bad CRC"),
        (lambda path: path.write_bytes(b""), "not a zip file"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    ],
)
def test_an_npz_that_is_none(tmp_path, monkeypatch, spoil, message):
    path = npz(tmp_path / "x.npz")
    monkeypatch.setattr("cogvideox_flax.io.npz.MAX_ARRAY_BYTES", 2**26)
    spoil(path)
    with pytest.raises(InputError, match=message) as error:
        read(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_npz_is_refused_or_read(tmp_path):
    """Bytes are changed, removed or cut off at random."""
    whole, path, rng = (
        npz(tmp_path / "x.npz", save=np.savez_compressed).read_bytes(),
        tmp_path / "y.npz",
        random.Random(5),
    )
    buffer = io.BytesIO()
    npz(buffer)
    refused = 0
    for _ in range(600):
        data = bytearray(rng.choice((whole, buffer.getvalue())))
        for _ in range(rng.choice((1, 1, 3, 10))):
            match rng.choice(("flip", "flip", "set", "cut", "remove")):
                case "flip":
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                case "set":
                    data[rng.randrange(len(data))] = rng.choice((0, 0x7F, 0xFF))
                case "cut":
                    del data[rng.randrange(len(data) * 9 // 10, len(data)) :]
                case "remove":
                    del data[rng.randrange(len(data))]
        path.write_bytes(data)
        try:
            read(path)
        except InputError:
            refused += 1
    assert refused > 400


WRONG = {
    "prompt": (None, 5, {}, [1], [["a"]]),
    "negative_prompt": (None, 5, {}, [1]),
    "seed": ("7", True, {}, 1.5, ["a"]),
    "row": ("7", {}, [None]),
    "release": ([], {}, None, 5, ["embedded"]),
    "version": (["cogvideox-flax 1.0"], {"cogvideox-flax": 1}),
    "settings": (None, [], "a", 5, [["height", 32]]),
}
WRONG_SETTINGS = {
    "height": ("32", [], True),
    "dtype": (5, []),
    "image": ("a.png", ["a.png"], [None], [{}], [{"file": 5, "sha256": ""}], [{"file": "a.png"}], {}),
    "lora": ("a", ["a"], [{}], [{"file": 5, "scale": 1}], [{"file": "a", "scale": "1"}], {"file": "a", "scale": 1}),
}


@pytest.mark.parametrize("name", ["x.mp4", "x.gif", "x.webp", "frames", "x.npz"])
def test_values_of_another_type(run, tmp_path, name):
    """A recipe is checked where it is read, whatever it was read from and for."""
    path = tmp_path / name
    wrong = [RECIPE | {key: value} for key, values in WRONG.items() for value in values]
    wrong_settings = [
        RECIPE | {"settings": RECIPE["settings"] | {key: value}}
        for key, values in WRONG_SETTINGS.items()
        for value in values
    ]
    for recipe in (*wrong, *wrong_settings):
        if name.endswith("npz"):
            npz(path, recipe)
        else:
            save_video(path, np.zeros((1, 16, 16, 3), np.uint8), 8, recipe)
        with pytest.raises(InputError, match=r"expected|states no prompt"):
            fields_of(read_recipe(path), path)
        if recipe in wrong and recipe["version"] == RECIPE["version"]:
            with pytest.raises(InputError, match="Its recipe cannot be used"):
                read_recipe(path)
    for recipe in (RECIPE | {"release": ["embedded"]}, RECIPE | {"settings": {"lora": [3]}}):
        if name.endswith("npz"):
            npz(path, recipe)
        else:
            save_video(path, np.zeros((1, 16, 16, 3), np.uint8), 8, recipe)
        commands = [["generate", "--like", path, "--out", tmp_path / "out.mp4"]]
        commands += [["decode", path]] if name.endswith("npz") else []
        commands += [["info", path]] if recipe["release"] != "embedded" else []
        for command in commands:
            code, out, err = run(*command)
            assert (code, out) == (2, "") and "Its recipe cannot be used" in err and err.count("\n") == 1


OBEYED = "\x1b]0;evil\x07\x1b[2J\r\x7f\x9b31m\u202edecreever\u2066\u2028\x00\x08"
ORDINARY = "größer 円 שלום 🎬 👩‍🚀 ↑"


def check_shown(text, *, lines=None):
    """Nothing in it is obeyed by a terminal or a browser, and all that is ordinary is there as it was."""
    assert not [c for c in text if c in "\x00\x07\x08\r\x1b\x7f\x9b\u2028\u202e\u2066"], text
    assert "evil" in text and ORDINARY in text
    assert lines is None or text.count("\n") == lines


def test_what_a_file_holds_is_shown_and_not_obeyed(run, tmp_path):
    hostile = OBEYED + ORDINARY
    recipe = RECIPE | {
        "prompt": f"{hostile}\nseed 5",
        "release": hostile,
        "settings": {hostile: hostile, "x": [hostile]},
    }
    path = npz(tmp_path / "x.npz", recipe)
    code, out, err = run("info", path)
    assert (code, err) == (0, "")
    check_shown(out, lines=6)
    assert ORDINARY + "\\nseed 5" in out
    code, out, _ = run("info", path, "--json")
    check_shown(out)
    assert json.loads(out) == recipe
    for argv in (["decode", path], ["generate", "--like", path, "--out", tmp_path / "v.mp4"]):
        code, out, err = run(*argv)
        assert code == 2
        check_shown(err)
    path = npz(tmp_path / "y.npz", RECIPE | {"seed": [hostile]})
    code, out, err = run("info", path)
    assert code == 2 and "\x1b" not in err and "evil" in err


def test_a_log_and_a_page_are_shown_and_not_obeyed(tmp_path):
    hostile = OBEYED + ORDINARY
    code = "import logging, sys; from cogvideox_flax import cli; from cogvideox_flax.runtime.terminal import say\n"
    code += "sys.argv[1:], text = ['doctor'], eval(sys.argv[1]); cli.main(); "
    code += "logging.getLogger('cogvideox_flax').info('%s', text); say(text, True)"
    done = python("-c", code, ascii(hostile))
    assert done.returncode == 0 and done.stderr.count("evil") == 2
    check_shown(done.stderr, lines=2)
    write_page(tmp_path, hostile, [PageRow(1, hostile, fault=hostile), PageRow(2, "a", tmp_path / "v.mp4", RECIPE)])
    check_shown((tmp_path / "index.html").read_text(encoding="utf-8"))

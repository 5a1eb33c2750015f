"""Files: whole or not at all, one writer at a time, known by their contents."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io import contents
from cogvideox_flax.io.atomic import atomic_directory, atomic_write, file_lock, remove_orphans, write_text
from cogvideox_flax.io.contents import content_hash, content_hashes, fingerprint, is_as_written, with_checksum
from cogvideox_flax.io.paths import NotPrivateError, check_free_space, expand_user, private_cache_dir
from cogvideox_flax.io.tensor_file import TensorFile, write_tensors
from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]


# --- atomic ---


def test_two_writers_of_one_file_do_not_publish_each_others_half(tmp_path):
    path = tmp_path / "file.txt"
    barrier = threading.Barrier(2, timeout=20)
    seen = []

    def write(letter: str) -> None:
        with atomic_write(path) as partial, partial.open("w") as file:
            file.write(500 * letter)
            file.flush()
            barrier.wait(20)  # both have written half
            file.write(500 * letter)
        seen.append(path.read_text())

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(seen) <= {1000 * "a", 1000 * "b"} and len(seen) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_what_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), atomic_write(path) as partial:
        partial.write_text("new")
        raise RuntimeError
    message = r"writing .*file.txt failed: No space left on device; free some space"
    with pytest.raises(InputError, match=message), atomic_write(path) as partial:
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_a_directory_is_exchanged_whole(tmp_path):
    path = tmp_path / "folder"
    for text in ("one", "two"):
        with atomic_directory(path) as work:
            (work / "file").write_text(text)
            assert not path.exists() or (path / "file").read_text() == "one"
        assert (path / "file").read_text() == text
    with pytest.raises(KeyboardInterrupt), atomic_directory(path) as work:
        (work / "file").write_text("three")
        raise KeyboardInterrupt
    assert (path / "file").read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["folder"]


KILLED = """
import os, signal, sys
from pathlib import Path
from cogvideox_flax.io.atomic import atomic_directory, atomic_write
with atomic_write(Path(sys.argv[1]) / "a.txt"), atomic_directory(Path(sys.argv[1]) / "b") as work:
    (work / "large").write_text("x")
    print("writing", flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def test_what_killed_writers_left_is_removed_and_what_others_write_is_not(tmp_path):
    processes.run([sys.executable, "-c", KILLED, tmp_path, "killed"], cwd=ROOT)
    left = set(tmp_path.iterdir())
    assert sorted(p.suffix for p in left) == [".lock", ".lock", ".partial", ".txt"]
    command = [sys.executable, "-c", KILLED, tmp_path, "waits"]
    with processes.running(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as alive:
        assert alive.stdout.readline() == b"writing\n"
        there = set(tmp_path.iterdir())
        assert len(there) == 4 and not there & left  # it removed what the first left
        remove_orphans(tmp_path)
        assert set(tmp_path.iterdir()) == there
        alive.stdin.close()
        alive.wait(60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "b"]


def test_nothing_is_swept_away_under_its_writer(tmp_path):
    done = threading.Event()

    def sweep() -> None:
        while not done.is_set():
            remove_orphans(tmp_path)

    sweeping = threading.Thread(target=sweep)
    sweeping.start()
    try:
        for i in range(150):
            with atomic_directory(tmp_path / "b") as work:
                (work / "file").write_text(str(i))
            assert (tmp_path / "b" / "file").read_text() == str(i)
    finally:
        done.set()
        sweeping.join(60)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_link_to_a_directory_stays_one(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with atomic_directory(tmp_path / "link") as work:
        (work / "file").write_text("text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "file").read_text() == "text"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


# --- locks ---


def test_a_lock_leaves_with_its_holder(tmp_path):
    path = tmp_path / ".lock"
    with file_lock(path, busy="taken"):
        with pytest.raises(InputError, match=r"^taken$"), file_lock(path, busy="taken"):
            pass
        assert path.exists()
    assert not path.exists()
    with file_lock(path, busy="taken"):
        pass


def test_one_at_a_time_though_the_file_comes_and_goes(tmp_path):
    inside, most = [], []

    def work() -> None:
        for _ in range(60):
            with file_lock(tmp_path / ".lock", busy=None):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 240 and set(most) == {1}


def test_a_planted_link_is_a_message_and_its_target_is_untouched(tmp_path):
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / ".lock").symlink_to(target)
    with (
        pytest.raises(InputError, match=r"cannot lock .*\.lock: .*; remove that file"),
        file_lock(tmp_path / ".lock", busy=""),
    ):
        pass
    assert target.read_text() == "mine"


# --- contents ---


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("COGVIDEOX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(contents, "_known", None)
    monkeypatch.setattr(contents, "_CLOCK_TICK_NS", 0)
    return tmp_path / "home"


@pytest.fixture
def hashed(monkeypatch):
    """The files whose contents are really read."""
    names = []
    real = contents._hash
    monkeypatch.setattr(contents, "_hash", lambda path: names.append(path.name) or real(path))
    return names


def age(path: Path) -> None:
    """Give a file times that are past."""
    os.utime(path, ns=(10**18, 10**18))
    time.sleep(0.02)  # and a change of its inode that the next is told from


def test_a_file_is_read_again_only_if_it_may_have_changed(tmp_path, home, hashed):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    age(path)
    first = content_hash(path)
    assert content_hash(path) == first and hashed == ["file"]
    contents._known = None  # another process
    assert content_hash(path) == first and hashed == ["file"]
    path.rename(tmp_path / "moved")
    time.sleep(0.02)
    moved = content_hash(tmp_path / "moved")
    assert moved == first and hashed in (["file"], ["file", "moved"])  # some systems count a new name as a change


@pytest.mark.parametrize("how", ["in place", "replaced", "copied with its times"])
def test_equal_sizes_and_times_do_not_deceive(tmp_path, home, how):
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"one")
    other.write_bytes(b"two")
    age(path)
    age(other)
    first = content_hash(path)
    if how == "in place":
        path.write_bytes(b"two")
        age(path)
    elif how == "replaced":
        other.rename(path)
    else:
        path.unlink()
        shutil.copy2(other, path)
    assert path.stat().st_size == 3 and path.stat().st_mtime_ns == 10**18
    assert content_hash(path) != first


def test_a_cut_memory_is_no_memory(tmp_path, home, hashed):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    age(path)
    digest = content_hash(path)
    memory = private_cache_dir("contents") / "sha256.txt"
    text = memory.read_text()
    assert digest in text
    key, *record = json.loads(text)
    for count, cut in enumerate((text[:-9], "", json.dumps({key: record})), 2):  # the last as older versions wrote it
        memory.write_text(cut)
        contents._known = None
        assert content_hash(path) == digest and len(hashed) == count
    contents._known = None
    assert content_hash(path) == digest and len(hashed) == 4, "what was cut spoils no line after it"


def test_missing_files_are_messages(tmp_path, home):
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere: No such file"):
        content_hashes([tmp_path / "nowhere"])


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"one")
    monkeypatch.setenv("COGVIDEOX_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(contents, "_known", None)
    assert content_hash(tmp_path / "file") == content_hash(tmp_path / "file")


def test_a_shared_home_is_not_where_private_things_go(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("COGVIDEOX_HOME", str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert private_cache_dir("programs") == tmp_path / "own" / "cogvideox-flax" / "programs"
    shared.chmod(0o755)
    assert private_cache_dir("programs") == shared / "programs"


def test_fingerprints_tell_all_parts_apart():
    assert fingerprint({"a": 1, "b": [2.5, None]}) == fingerprint({"b": [2.5, None], "a": 1})
    assert (
        len({fingerprint("a", "b"), fingerprint("ab"), fingerprint(["a", "b"]), fingerprint("a"), fingerprint()}) == 5
    )


def test_an_edited_object_is_not_as_written():
    value = with_checksum({"a": 1.5, "b": ["ü"]})
    assert is_as_written(value) and is_as_written({"a": 1})
    assert not is_as_written(value | {"a": 1.25}) and not is_as_written(value | {"c": 0})


def test_small_tensor_files_carry_a_checksum(tmp_path):
    import numpy as np

    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": np.arange(12, dtype=np.float32).reshape(3, 4)}, {"made": "here"})
    whole = path.read_bytes()
    with TensorFile(path) as file:
        file.check(required=True)
    faults = 0
    for at in range(0, 8 * len(whole), 7):
        data = bytearray(whole)
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)
        try:
            with TensorFile(path) as file:
                file.check(required=True)
        except CheckpointError:
            faults += 1
        else:
            raise AssertionError(f"bit {at} was not missed")
    assert faults > 100


# --- places ---


def test_no_such_user_is_a_message():
    with pytest.raises(InputError, match="~nosuchuser/x: there is no home directory"):
        expand_user("~nosuchuser/x")
    assert expand_user("~") == Path.home()


@pytest.mark.parametrize("name", ["a\0b", "a\udcff"])
def test_a_name_that_is_not_text_is_a_message(name):
    with pytest.raises(InputError, match="is not UTF-8 text; rename it"):
        expand_user(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write to other users' homes")
def test_root_makes_nothing_private_in_anothers_home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 1234, 1234)
    monkeypatch.delenv("COGVIDEOX_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(NotPrivateError, match="belongs to user 1234"):
        private_cache_dir("programs")
    assert not list(home.iterdir())


def test_space_is_looked_at_above_what_is_there(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**31))
    check_free_space(tmp_path / "not" / "yet", 2**30)
    with pytest.raises(InputError, match=r"not/yet needs about 3\.06 GiB, and its disk has 2\.00 GiB free"):
        check_free_space(tmp_path / "not" / "yet", 3 * 2**30)


def test_ctrl_c_while_waiting_for_a_lock(tmp_path):
    code = (
        "import sys; from pathlib import Path; from cogvideox_flax.io.atomic import file_lock\n"
        "print('waiting', flush=True)\n"
        "with file_lock(Path(sys.argv[1]), busy=None): pass\n"
    )
    with file_lock(tmp_path / ".lock", busy=""):
        command = [sys.executable, "-c", code, tmp_path / ".lock"]
        with processes.running(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as waiting:
            assert waiting.stdout.readline() == b"waiting\n"
            time.sleep(0.5)
            waiting.send_signal(signal.SIGINT)
            assert waiting.wait(timeout=20) != 0

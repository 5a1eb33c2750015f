"""Paths: checks of those that a user gives, the cache directories, who may change a folder, free space."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from cogvideox_flax.errors import InputError

_SPECIAL = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OPEN_PIPES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Of the shell, such as <(...): their writers are there, so that reading ends."""
_ADDRESS = re.compile(r"(https?|ftp|file|s3|gs|hf):/", re.IGNORECASE)
MARGIN = 64 * 2**20
"""Bytes to leave free."""


def check_kind(path: Path) -> None:
    """Refuse a pipe, a socket or a device: reading it may never end, and writing would replace it."""
    if str(path).startswith(_OPEN_PIPES):
        return
    with suppress(OSError):  # reported where the path is used
        if (kind := _SPECIAL.get(stat.S_IFMT(os.stat(path).st_mode))) is not None:
            raise InputError(f"{path} is {kind}; expected a file or a directory")


def open_descriptor(path: Path) -> int:
    """Open a file for reading. Unlike `os.open`, does not wait for the writer of a named pipe.

    Raises:
        OSError: it cannot be opened, or is a pipe, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if (kind := _SPECIAL.get(stat.S_IFMT(os.fstat(descriptor).st_mode))) is not None:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
    return descriptor


def open_file(path: Path) -> BufferedReader:
    """A file object of `open_descriptor`."""
    return open(path, "rb", opener=lambda *_: open_descriptor(path))


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a file in UTF-8, a byte order mark aside. Errors as for `open_descriptor` and `bytes.decode`."""
    with open_file(path) as file:
        return file.read().decode("utf-8-sig", errors)


def read_head(path: Path, nbytes: int) -> bytes:
    """The first bytes of a file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with open_file(path) as file:
            return file.read(nbytes)
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}") from e


def check_name(path: Path) -> None:
    """Refuse an output path that ends in no name, such as "." or "/"."""
    if path.name in ("", ".."):
        raise InputError(f"{path} has no name of its own; give the name of a file or of a directory to write")


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, whether it exists or not.

    Raises:
        InputError: the name is not possible, or that of a pipe, a socket or a device; or the nearest existing parent
            directory is not writable.
    """
    check_kind(path)
    parent = existing_parent(path)
    try:
        with suppress(FileNotFoundError):
            path.lstat()
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as e:
        raise InputError(f"cannot write {path}: {parent}: {e.strerror}; choose another place") from e


def existing_parent(path: Path) -> Path:
    """The nearest directory above `path` that exists."""
    return next(parent for parent in path.absolute().parents if os.path.lexists(parent))


def item_paths(path: str | Path, count: int) -> list[Path]:
    """The paths of `count` videos: `path` itself for one, else numbered: video-0.mp4, video-1.mp4, ...

    Raises:
        InputError: the path ends in no name.
    """
    path = Path(path)
    check_name(path)
    return [path] if count == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(count)]


def expand_user(text: str | Path) -> Path:
    """A path whose leading ~ or ~user stands for a home directory.

    Raises:
        InputError: there is no such user; or the path is empty, not UTF-8 text, a URL, or that of a pipe, a socket or
            a device.
    """
    if not str(text):
        raise InputError("a path is empty; give the name of a file or directory")
    try:
        str(text).encode()  # a file name that is not UTF-8 has surrogate escapes
        path = Path(text).expanduser()
        if "\0" in str(text):
            raise ValueError
    except ValueError as e:
        raise InputError(f"the path {str(text)!r} is not UTF-8 text; rename it") from e
    except RuntimeError as e:
        raise InputError(f"{text}: there is no home directory of that user; write the path out") from e
    if _ADDRESS.match(str(text)) and not os.path.exists(path.parts[0]):
        raise InputError(f"{text} is an address; download it first, and give the file")
    check_kind(path)
    return path


def cache_dir() -> Path:
    """The directory of converted checkpoints: $COGVIDEOX_HOME, or cogvideox-flax in $XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("COGVIDEOX_HOME")
    return expand_user(home) if home else _own_cache_dir()


def private_cache_dir(name: str) -> Path:
    """`name` in `cache_dir()` if only the user can write there, else in ~/.cache/cogvideox-flax. Created if missing.

    Raises:
        NotPrivateError: other users can change both directories.
        OSError, InputError: neither can be created.
    """
    folder = cache_dir() / name
    try:
        make_private(folder)
    except (NotPrivateError, OSError):
        folder = _own_cache_dir() / name
        make_private(folder)
    return folder


def _own_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or expand_user("~/.cache")) / "cogvideox-flax"


class NotPrivateError(Exception):
    """Another user could have written this; the message says who and how."""


def make_private(folder: Path) -> None:
    """Create a folder that only the user can change, or check an existing one, and all folders above it.

    Raises:
        NotPrivateError: another user owns it, or could change or replace it.
        OSError: it cannot be created.
    """
    folder = folder.absolute()
    _check_parents(folder)  # before anything is created in another user's home
    if not os.path.lexists(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_parents(folder)
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode):
        raise NotPrivateError(f"{folder} is a symbolic link or a file")
    _check_own(facts, folder)


def _check_parents(folder: Path) -> None:
    """Check all existing folders above: those of the given path, and those of the path with symbolic links resolved."""
    for above in dict.fromkeys((*folder.parents, *folder.resolve().parents)):
        try:
            facts = os.stat(above)
        except FileNotFoundError:
            continue
        if facts.st_uid not in (0, os.geteuid()):
            raise NotPrivateError(f"{above} belongs to user {facts.st_uid}, who could replace {folder.name}")
        if _others_write(facts) and not facts.st_mode & stat.S_ISVTX:
            raise NotPrivateError(f"other users can write to {above} and could replace {folder.name}")


def _check_own(facts: os.stat_result, path: Path) -> None:
    if facts.st_uid != os.geteuid():
        raise NotPrivateError(f"{path} belongs to user {facts.st_uid}, not to user {os.geteuid()}")
    if _others_write(facts):
        raise NotPrivateError(f"other users can write to {path} (mode {stat.S_IMODE(facts.st_mode):o})")


def _others_write(facts: os.stat_result) -> bool:
    """Whether other users may write. A group whose only member is the user counts as the user."""
    if facts.st_mode & stat.S_IWOTH:
        return True
    return bool(facts.st_mode & stat.S_IWGRP) and not _is_private_group(facts.st_gid)


def _is_private_group(gid: int) -> bool:
    """Whether a group is the user's private group, as in Debian and Fedora: the user's name, no other members."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def check_free_space(path: Path, nbytes: int) -> None:
    """Refuse work for which the disk, with a margin, has too little space.

    Args:
        path: a file or directory to be written; it need not exist.
        nbytes: how many bytes will be written there.
    """
    free = free_bytes(path)
    if free < nbytes + MARGIN:
        raise InputError(
            f"{path} needs about {size_text(nbytes + MARGIN)}, and its disk has {size_text(free)} free; free some "
            "space or choose another place"
        )


def free_bytes(path: Path) -> int:
    """The free bytes on the disk of a file or directory, which need not exist."""
    folder = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.isdir(place))
    return shutil.disk_usage(folder).free


def size_text(nbytes: int) -> str:
    """Format a number of bytes for people."""
    mib = nbytes / 2**20
    return f"{round(mib, 1 if mib < 10 else None):g} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"

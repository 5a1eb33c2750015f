"""Folders and files that only the user can change: code is loaded only from these."""

from __future__ import annotations

import os
import stat
from pathlib import Path


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


def read_private(path: Path) -> bytes:
    """The contents of a file that only the user can change.

    Raises:
        NotPrivateError: it is a symbolic link, another user's, or writable by others.
        FileNotFoundError: it does not exist.
        OSError: it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as e:
        if path.is_symlink():
            raise NotPrivateError(f"{path} is a symbolic link") from e
        raise
    with open(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise NotPrivateError(f"{path} is not a file")
        _check_own(facts, path)
        return file.read()


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

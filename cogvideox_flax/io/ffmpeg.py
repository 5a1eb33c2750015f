"""ffmpeg as a child process: limited to the given file, with a time limit, and with streamed output."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Self, cast

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits

_LOG_BYTES = 8192  # of ffmpeg's messages; the first ones give the cause
_CONTEXT = re.compile(r"^(\[[^]]*@ 0x[0-9a-f]+\] )+")  # "[mov,mp4 @ 0x55d0] ", before a message
_KILLED = (-9, -15)


class FfmpegError(OSError):
    """ffmpeg failed; the text is its own first message."""


class FfmpegTimeout(FfmpegError):
    """ffmpeg took too long."""


def find_ffmpeg() -> str:
    """The path of the ffmpeg program.

    Raises:
        InputError: ffmpeg is not installed.
    """
    try:
        import imageio_ffmpeg  # not at the top: models and programs work without it

        path = imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as e:
        raise InputError(
            "there is no ffmpeg for .mp4 (imageio-ffmpeg is missing or brings none for this machine); "
            "install one and set IMAGEIO_FFMPEG_EXE, or save as .gif or as a directory of PNGs"
        ) from e
    if shutil.which(path) is None:  # imageio-ffmpeg does not check a path from the environment
        raise InputError(f"IMAGEIO_FFMPEG_EXE is {path}, which is not a program; set it to the path of ffmpeg")
    return path


class Ffmpeg:
    """One run of ffmpeg. Leaving the `with` block ends the process.

    Args:
        arguments: of the command line, after the general ones.
        feed: whether the caller writes its input (`pipe:0`).

    Raises:
        InputError: ffmpeg is not installed.
        FfmpegError: it cannot be started.

    A reader waits for ffmpeg for at most `MAX_DECODE_SECONDS` in total, a writer for at most that long per write; the
    caller's own time does not count.
    """

    def __init__(self, arguments: Sequence[str], *, feed: bool = False):
        command = [find_ffmpeg(), "-hide_banner", "-nostdin", "-loglevel", "error", "-y", *arguments]
        self._feed = feed
        self._seconds = limits.MAX_DECODE_SECONDS
        self._expired = False
        self._timer: threading.Timer | None = None
        self._log = b""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if feed else subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if feed else subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as e:
            raise FfmpegError(f"ffmpeg: {command[0]} cannot be started ({e.strerror})") from e
        self._log_reader = threading.Thread(target=self._read_log, daemon=True)
        self._log_reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()
        if self._process.poll() is None:
            self._process.kill()
        self._close()

    def read_into(self, buffer: memoryview) -> int:
        """Fill a buffer from ffmpeg's output; returns the number of bytes read, fewer at the end of the output."""
        with self._limited():
            return cast(io.BufferedReader, self._process.stdout).readinto(buffer)

    def read(self, max_bytes: int) -> bytes:
        """The whole output, or its first `max_bytes`."""
        with self._limited():
            return cast(io.BufferedReader, self._process.stdout).read(max_bytes)

    def lines(self) -> Iterator[bytes]:
        """The output line by line. The consumer's time counts as ffmpeg's, so it should be short."""
        with self._limited():
            yield from cast(io.BufferedReader, self._process.stdout)

    def write(self, data: memoryview) -> None:
        """Write to ffmpeg's input.

        Raises:
            FfmpegError: it ended early.
        """
        pipe = cast(io.BufferedWriter, self._process.stdin)
        try:
            with self._limited():
                pipe.write(data)
                pipe.flush()
        except BrokenPipeError:
            self.finish()
            raise FfmpegError("ffmpeg: it ended before all frames were written") from None

    def finish(self) -> str:
        """Wait for the end. Returns the first of ffmpeg's messages, "" if it had none.

        Raises:
            FfmpegError: it failed.
            FfmpegTimeout: it took too long.
        """
        for pipe in (self._process.stdin, self._process.stdout):  # ends a run that still has output
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()
        with self._limited():
            code = self._process.wait()
        self._close()
        message = self._message()
        if self._expired and code in _KILLED:
            raise FfmpegTimeout(f"ffmpeg: no end after {limits.MAX_DECODE_SECONDS:g} seconds; it was stopped")
        if code:
            raise FfmpegError(f"ffmpeg: {message or f'exit code {code}'}")
        return message

    def _message(self) -> str:
        lines = self._log.decode(errors="replace").splitlines()
        return next((text for line in lines if (text := _CONTEXT.sub("", line).strip())), "")

    def _read_log(self) -> None:
        pipe = cast(io.BufferedReader, self._process.stderr)
        while chunk := pipe.read1(_LOG_BYTES):
            if len(self._log) < _LOG_BYTES:
                self._log += chunk

    def _close(self) -> None:
        self._process.wait()
        self._log_reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _expire(self) -> None:
        self._expired = True
        self._process.kill()

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Kills ffmpeg when the time limit expires inside the context."""
        began = time.monotonic()
        self._timer = threading.Timer(max(self._seconds, 0), self._expire)
        self._timer.daemon = True
        self._timer.start()
        try:
            yield
        finally:
            self._timer.cancel()
            if not self._feed:
                self._seconds -= time.monotonic() - began

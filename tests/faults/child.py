"""Commands in separate processes, forked from one that has imported everything, so that each starts at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DEAD_S = 60
"""Seconds that a process may take to end once it is killed."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (negative: the signal), its stderr, and whether it was stuck."""

    code: int
    err: str
    stuck: bool = False

    @property
    def crashed(self) -> str | None:
        """Why its end counts as a crash; None if it succeeded or refused with a message."""
        if self.stuck:
            return "hang"
        if self.code not in (0, 2):
            return f"crash: exit code {self.code}"
        if "Traceback" in self.err:
            return "crash: traceback"
        if self.code == 2 and "error: " not in self.err:
            return "crash: no message"
        return None


class Runner:
    """Runs commands of this library: "cogvideox", "conversion" and their arguments.

    Args:
        timeout: seconds after which a command is taken to be stuck.
    """

    def __init__(self, timeout: float = 180.0):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.faults.preload"])
        self.timeout = timeout

    def __call__(
        self, argv: Sequence[object], folder: Path, *, kill_after: float | None = None, stop_at: int | None = None
    ) -> Ended:
        """Run a command.

        Args:
            argv: its name and arguments.
            folder: of the trial: the home of the library is below it, and its output.
            kill_after: seconds until it is killed.
            stop_at: a step of denoising or training; killed once its state is on disk.
        """
        err = folder / "stderr"
        process = self._context.Process(target=work, args=([str(arg) for arg in argv], str(folder), stop_at))
        process.start()
        process.join(self.timeout if kill_after is None else kill_after)
        stuck = kill_after is None and process.is_alive()
        if process.is_alive() and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        process.join(DEAD_S)
        text = err.read_text(errors="replace") if err.exists() else ""
        return Ended(process.exitcode if process.exitcode is not None else -9, text, stuck)

    def on_filling_disk(
        self, argv: Sequence[object], folder: Path, fill_after: float, left: int
    ) -> tuple[Ended, Ended]:
        """Run a command with `folder` on a disk of its own that fills meanwhile, then once more with room again.

        The disk is a tmpfs in a mount namespace; what was in the folder is copied onto it, and back at the end.

        Args:
            fill_after: seconds until it is filled.
            left: bytes that are left free.
        """
        script = (
            'set -e; cp -a "$DISK" "$DISK.copy"; mount -t tmpfs -o size=400m none "$DISK"; '
            'cp -a "$DISK.copy/." "$DISK/"; cd "$DISK"; "$@"; cp -a "$DISK/." "$DISK.result/"'
        )
        result = folder.with_name(folder.name + ".result")
        result.mkdir()
        command = ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "-m", "tests.faults.child"]
        command += [str(folder), str(fill_after), str(left), str(self.timeout), *map(str, argv)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "DISK": str(folder)}
        limit = fill_after + 2 * (self.timeout + DEAD_S) + 60  # both runs, and copying
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
        ends = [line.split(" ") for line in done.stdout.splitlines() if line.startswith("ended ")]
        if done.returncode or len(ends) != 2:
            raise RuntimeError(f"the disk of its own failed: {done.stdout}{done.stderr}")
        shutil.rmtree(folder.with_name(folder.name + ".copy"))
        shutil.rmtree(folder)
        result.rename(folder)
        first, second = (
            Ended(int(code), bytes.fromhex(text).decode(errors="replace"), stuck == "True")
            for _, code, stuck, text in ends
        )
        return first, second


def can_mount() -> bool:
    """Whether a process here may have disks of its own."""
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs none /tmp"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    return False


def work(argv: list[str], folder: str, stop_at: int | None) -> None:
    """In the child: one command, with its streams in files."""
    os.environ["COGVIDEOX_HOME"] = str(Path(folder) / "home")
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
    from tests.faults import preload

    code = 1
    try:
        code = preload.main(argv, stop_at)
    except SystemExit as e:  # argparse
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _on_disk() -> None:
    """`python -m tests.faults.child FOLDER FILL_AFTER LEFT TIMEOUT COMMAND ...`, in the mount namespace."""
    folder, fill_after, left, timeout, *argv = sys.argv[1:]
    filler = Path(folder) / "filler"
    for fill in (True, False):
        process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.faults.preload import main; raise SystemExit(main({argv!r}))"],
            env={**os.environ, "COGVIDEOX_HOME": str(Path(folder) / "home")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        if fill:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(float(fill_after))
            _fill(filler, int(left))
        stuck = False
        try:
            _, err = process.communicate(timeout=float(timeout))
        except subprocess.TimeoutExpired:
            process.kill()
            stuck, (_, err) = True, process.communicate(timeout=DEAD_S)
        filler.unlink(missing_ok=True)
        print("ended", process.returncode, stuck, err.hex() or "00", flush=True)


def _fill(filler: Path, left: int) -> None:
    """Fill the disk but for so many bytes."""
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**20))
    os.truncate(filler, max(filler.stat().st_size - left, 0))


if __name__ == "__main__":
    _on_disk()

"""The one exception that means "the user's input cannot be served".

The command line turns it into its message and exit code 2; Python callers can catch it. Every message says what is
wrong, where, what was expected and what to do next.
"""

from __future__ import annotations

from errno import EACCES, EDQUOT, EFBIG, EIO, ELOOP, ENAMETOOLONG, ENOSPC, EPERM, EROFS

_ADVICE = {
    **dict.fromkeys((EDQUOT, EFBIG, ENOSPC), "free some space"),
    **dict.fromkeys((EACCES, EPERM, EROFS), "allow access to it"),
    EIO: "check the disk",
    ELOOP: "mend the symbolic link",
    ENAMETOOLONG: "shorten the name",
}
"""Error numbers of a disk, or of a place on it -> what to do."""


class InputError(ValueError):
    """The input (an argument, a file, a directory) cannot be served; the message is for people."""


class BusyError(InputError):
    """Another process is at work there."""


class CheckpointError(InputError):
    """A checkpoint is missing, truncated, corrupt or not the one that its config describes."""


class ConversionError(CheckpointError):
    """A source checkpoint does not map onto the model; the message lists every fault found."""


class NonFiniteError(InputError):
    """NaN or infinity appeared in the latents."""

    def __init__(self, step: int, timestep: float, num_steps: int, hint: str = ""):
        self.step, self.timestep = step, timestep
        super().__init__(
            f"the latents hold NaN or infinity after step {step + 1} of {num_steps} (timestep {timestep:g}). "
            + (hint or "Try --dtype float32; if that is clean, the checkpoint does not survive this dtype.")
        )


class DivergedError(InputError):
    """Training gave NaN or infinity; the settings do not suit the data."""


def install_extra(name: str) -> str:
    """The command that installs one of the package's optional dependencies; no index of packages has them."""
    return f'pip install ".[{name}]" in a checkout of cogvideox-flax'


def describe_file_error(error: OSError) -> str | None:
    """A message for an error of a disk, or of a place on it; None for any other, which is a fault of this program."""
    if error.errno not in _ADVICE:
        return None
    where = f"{str(error.filename)[:200]}: " if error.filename else ""
    return f"{where}{error.strerror}; {_ADVICE[error.errno]} or choose another place"

"""Downloads a released checkpoint from the Hugging Face hub: only the files that conversion reads."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from cogvideox_flax.errors import InputError
from cogvideox_flax.models.model import VideoModel
from cogvideox_flax.models.registry import RELEASES

CONFIGS = (
    "model_index.json",
    "config.json",
    "*/config.json",
    "scheduler/scheduler_config.json",
    "guider/guider_config.json",
    "feature_extractor/preprocessor_config.json",
    "tokenizer*/tokenizer_config.json",
)


RENAMED_OWNERS = {"THUDM": "zai-org"}
"""Earlier -> present owner of the same repositories; the hub answers to both names."""


class Download(NamedTuple):
    """A checkpoint's files on this machine. origin: hub_id and revision, a commit; empty for a local directory."""

    folder: Path
    origin: dict[str, str]


def names_of(hub_id: str) -> list[str]:
    """The names of one repository: by its present owner, and by earlier ones."""
    owner, _, name = hub_id.partition("/")
    present = RENAMED_OWNERS.get(owner, owner)
    return [f"{each}/{name}" for each in (present, *(old for old, new in RENAMED_OWNERS.items() if new == present))]


def _name_in_cache(hub_id: str) -> str:
    """The name under which the hub's cache has a repository: this one, else another of it; else the present one."""
    names = names_of(hub_id)
    cache = Path(constants.HF_HUB_CACHE)
    folders = {name: cache / f"models--{name.replace('/', '--')}" for name in (hub_id, *names)}
    return next((name for name, folder in folders.items() if folder.is_dir()), names[0])


def files_read(family: type[VideoModel], components: Iterable[str] | None = None) -> tuple[str, ...]:
    """Patterns of the files that conversion reads for some components of a family, by default all."""
    names = family.components if components is None else components
    weights = [f"{c}/{name}" for c in names for name in ("*.safetensors", "*.safetensors.index*.json")]
    return (*CONFIGS, *weights, *family.tokenizer_files)


def download_model(
    hub_id: str,
    configs: Download,
    family: type[VideoModel],
    components: Iterable[str] | None = None,
    *,
    progress: bool = True,
) -> Download:
    """Download the weights and tokenizers of a checkpoint whose configs are here; says which license they have.

    Args:
        configs: from `download`; the same commit is downloaded.
        components: default: all of the family.

    Raises:
        InputError: as for `download`.
    """
    if family.license is not None:
        print(family.license, file=sys.stderr)
    return download(hub_id, configs.origin["revision"], files_read(family, components), progress=progress)


def download(
    hub_id: str,
    revision: str | None = None,
    patterns: tuple[str, ...] = CONFIGS,
    *,
    progress: bool = True,
) -> Download:
    """Download some of a checkpoint's files, or find them in the hub's cache.

    huggingface_hub reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE, and keeps the complete files of an
    interrupted download.

    Args:
        hub_id: "owner/name".
        revision: branch, tag or commit; None for the default branch.
        patterns: of the files; default: the configs only. See `files_read`.
        progress: progress bars on stderr.

    Raises:
        InputError: no such model or revision, no access, no network and nothing cached.
    """
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", hub_id):
        raise InputError(
            f"{hub_id} does not exist; expected a directory, or a hub id (owner/name) such as zai-org/CogVideoX-2b"
        )
    hub_id = _name_in_cache(hub_id)
    from huggingface_hub.utils import tqdm  # here, since it warns in a notebook without ipywidgets

    class NoBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs | {"disable": True})

    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=list(patterns),
            tqdm_class=None if progress else NoBar,
        )
    except Exception as e:  # the hub's client also raises errors of its HTTP library and of its caches
        raise InputError(_explain(e, hub_id, revision)) from e
    # snapshots are named by their commit
    return Download(Path(folder), {"hub_id": names_of(hub_id)[0], "revision": Path(folder).name})


def download_file(hub_id: str, name: str, usual: str, suffix: str, beside: str) -> Path:
    """One file of a repository, or find it in the hub's cache.

    Args:
        hub_id: "owner/name".
        name: in the repository, with folders; "": the usual one, or the only one with this suffix.
        beside: name of a file that is downloaded too, if there is one in the same folder.

    Raises:
        InputError: as for `download`; the repository has no such file, or several.
    """
    file = name or usual
    source = download(hub_id, patterns=(file, _sibling(file, beside)))
    if not (source.folder / file).is_file():
        try:
            files = huggingface_hub.HfApi().list_repo_files(hub_id, revision=source.origin["revision"])
        except Exception as e:
            raise InputError(_explain(e, hub_id, None)) from e
        known = sorted(each for each in files if each.endswith(suffix))
        if name or len(known) != 1:
            wanted = f"no {name}" if name else f"{len(known)} {suffix} files"
            shown = f"; it has {', '.join(known[:20])}, to be named as {hub_id}/{known[0]}" if known else ""
            raise InputError(f"{hub_id} has {wanted}{shown}")
        file = known[0]
        source = download(hub_id, source.origin["revision"], (file, _sibling(file, beside)))
    return source.folder / file


def _sibling(file: str, name: str) -> str:
    return str(PurePosixPath(file).with_name(name))


def _explain(error: Exception, hub_id: str, revision: str | None) -> str:
    """The cause of an error, and what to do next. Subclasses are tested before their base classes."""
    is_local = "if you meant a directory, it does not exist here"
    match error:
        case hub_errors.GatedRepoError():
            return (
                f"{hub_id} asks for its terms to be accepted: do so on its page, "
                "then set HF_TOKEN or run `hf auth login`"
            )
        case hub_errors.RevisionNotFoundError():
            return f"{hub_id} has no revision {revision!r}; expected a branch, a tag or a commit"
        case hub_errors.RepositoryNotFoundError():
            released = ", ".join(r.hub_id for r in RELEASES.values())
            return (
                f"the hub has no model {hub_id!r}, or none that this token may read (set HF_TOKEN or run "
                f"`hf auth login`); {is_local}. Released models are {released}"
            )
        case hub_errors.HFValidationError():
            return f"{hub_id!r} is not a hub id (owner/name): {error}; {is_local}"
        case hub_errors.LocalEntryNotFoundError(__cause__=hub_errors.HfHubHTTPError() as refusal):
            return _explain(refusal, hub_id, revision)
        case hub_errors.LocalEntryNotFoundError() | hub_errors.OfflineModeIsEnabled():
            return (
                f"{hub_id} is not complete in the hub's cache, and the hub cannot be reached (offline mode, or no "
                "network). Unset HF_HUB_OFFLINE, or download it on a machine with access and pass the directory; "
                f"{is_local}"
            )
        case hub_errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            return (
                f"the hub refuses {hub_id} with this token ({error.response.status_code}): accept the model's terms on "
                "its page, and check HF_TOKEN or run `hf auth login`"
            )
    reason = str(error).strip().splitlines() or [""]
    return (
        f"downloading {hub_id} failed ({type(error).__name__}: {reason[0]}). "
        "Run the same command again; files that were complete are kept"
    )

"""Fetch a released checkpoint from the Hugging Face hub: only the files that conversion reads."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import huggingface_hub
from huggingface_hub import errors as hub_errors

from cogvideox_flax.config import RELEASES
from cogvideox_flax.errors import InputError
from conversion.source import COMPONENTS

SMALL_FILES = ("model_index.json", "*/config.json", "*/*.index.json", "scheduler/*.json", "tokenizer/*")


class Download(NamedTuple):
    folder: Path
    origin: dict[str, str]


def download(hub_id: str, revision: str | None = None, components: tuple[str, ...] = COMPONENTS) -> Download:
    """Download a checkpoint's configs, tokenizer and safetensors of some components, or find them in the hub's cache.

    HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured by huggingface_hub; interrupted downloads resume.

    Args:
        hub_id: "owner/name".
        revision: branch, tag or commit; None for the default branch.

    Raises:
        InputError: no such model or revision, no access, no network and nothing cached.
    """
    patterns = [*SMALL_FILES, *(f"{c}/*.safetensors" for c in components)]
    try:
        folder = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except hub_errors.HFValidationError as e:
        raise InputError(f"{hub_id!r} is neither a directory nor a hub id (owner/name): {e}") from e
    except hub_errors.GatedRepoError as e:
        raise InputError(
            f"{hub_id} asks for its terms to be accepted: do so on its page, then set HF_TOKEN or run `hf auth login`"
        ) from e
    except hub_errors.RevisionNotFoundError as e:
        raise InputError(f"{hub_id} has no revision {revision!r}") from e
    except hub_errors.RepositoryNotFoundError as e:
        raise InputError(
            f"the hub has no model {hub_id!r} that this token may read. Released models are "
            + ", ".join(r.hub_id for r in RELEASES.values())
        ) from e
    except (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled) as e:
        raise InputError(
            f"{hub_id} is not in the local cache and the hub cannot be reached (offline mode, or no network). "
            "Download it on a machine with access and pass the directory, or unset HF_HUB_OFFLINE."
        ) from e
    except (hub_errors.HfHubHTTPError, OSError) as e:
        raise InputError(f"downloading {hub_id} failed: {e}. Run the same command again; it resumes.") from e
    # snapshots are named by their commit
    return Download(folder, {"hub_id": hub_id, "revision": folder.name})

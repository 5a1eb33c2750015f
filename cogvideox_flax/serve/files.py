"""Files that clients upload: streamed to the gallery, looked at once, and known by an id from then on."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.jobs import new_id
from cogvideox_flax.io.atomic import write_json
from cogvideox_flax.io.values import load_json, printable
from cogvideox_flax.serve.fields import MEDIA_FIELDS

CHUNK = 2**20

DATA, FACTS = "data", "file.json"

MEDIA_TYPES = {"mov": "video/mp4", "matroska": "video/x-matroska", "avi": "video/x-msvideo", "gif": "image/gif"}
MEDIA_TYPES |= {"png": "image/png", "webp": "image/webp"}


@dataclass(frozen=True)
class UploadedFile:
    """What is known of a file. filename: as the client called it; it names nothing here."""

    id: str
    bytes: int
    filename: str
    media_type: str
    width: int
    height: int
    frames: int


class Uploads:
    """The files of a gallery. What a server that was killed did not receive whole is removed."""

    def __init__(self, folder: Path):
        self.folder = folder
        for own in folder.glob("file_*"):
            if not (own / FACTS).exists():
                shutil.rmtree(own, ignore_errors=True)

    def add(self, filename: str, source: BinaryIO | bytes) -> UploadedFile:
        """Keep a file, and look at it.

        Raises:
            InputError: it is no image and no clip that is read here.
        """
        own = self.folder / new_id("file")
        own.mkdir(parents=True)
        try:
            path = own / DATA
            with path.open("xb") as file:
                if isinstance(source, bytes):
                    file.write(source)
                else:
                    shutil.copyfileobj(source, file, CHUNK)
            facts = _look(path, printable(filename)[:200] or "a file", own.name)
            write_json(own / FACTS, asdict(facts))
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)
            raise
        return facts

    def get(self, file_id: str) -> UploadedFile | None:
        """What is known of a file; None: there is none of this id."""
        own = self._folder(file_id)
        try:
            return None if own is None else UploadedFile(**load_json(own / FACTS))
        except (OSError, ValueError, TypeError):
            return None

    def path(self, file: UploadedFile) -> Path:
        return self.folder / file.id / DATA

    def name(self, file: UploadedFile) -> str:
        """Its path in the gallery, as jobs hold it."""
        return str(self.path(file).relative_to(self.folder.parent))

    def remove(self, file_id: str) -> bool:
        """Remove a file; whether there was one."""
        if (own := self._folder(file_id)) is None:
            return False
        shutil.rmtree(own, ignore_errors=True)
        return True

    def _folder(self, file_id: str) -> Path | None:
        """The folder of an id, which no path is made of before it was found among the folders that are there."""
        names = {path.name for path in self.folder.glob("file_*")}
        return self.folder / file_id if file_id in names else None


def locate(options: Mapping[str, Any], gallery: Path) -> dict[str, Any]:
    """The options of a job with the paths of its files in a gallery, wherever that lay when the job was queued."""
    located = dict(options)
    for name in MEDIA_FIELDS.values() & options.keys():
        if isinstance(options[name], str):
            located[name] = str(gallery.joinpath(*Path(options[name]).parts[-3:]))  # earlier versions: absolute
    if "lora" in options:
        files = [gallery.joinpath(*Path(each["file"]).parts[-2:]) for each in options["lora"]]
        located["lora"] = [{**each, "file": str(file)} for each, file in zip(options["lora"], files, strict=True)]
    return located


def _look(path: Path, filename: str, file_id: str) -> UploadedFile:
    """The facts of an image or a clip. A frame is decoded, so that what is damaged is refused at once."""
    from cogvideox_flax.io.images import is_one_image, read_image
    from cogvideox_flax.io.source import format_of
    from cogvideox_flax.io.video import open_video

    try:
        kind = format_of(path)
        media_type = MEDIA_TYPES.get(kind or "", "image/jpeg")
        if kind in ("png", None) or is_one_image(path):
            height, width, count = *read_image(path).shape[:2], 1
        else:
            source = open_video(path)
            next(iter(source.frames([0])))
            height, width, count = source.info.height, source.info.width, source.info.num_frames
    except InputError as e:
        raise InputError(str(e).replace(str(path), filename)) from e
    return UploadedFile(file_id, path.stat().st_size, filename, media_type, width, height, count)

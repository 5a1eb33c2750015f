"""What each model takes, of which the page makes its form, and what a filled form means: the runs of its videos."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.datastructures import UploadFile

from cogvideox_flax.errors import InputError
from cogvideox_flax.serve.errors import ApiError
from cogvideox_flax.serve.fields import (
    MEDIA_FIELDS,
    CreateRequest,
    FieldError,
    api_names,
    data_url,
    describe_field,
    field_names,
    read_fields,
)
from cogvideox_flax.serve.files import Uploads
from cogvideox_flax.serve.guard import MAX_JSON_BYTES
from cogvideox_flax.serve.worker import Worker

if TYPE_CHECKING:
    from cogvideox_flax.generate.run import Run

PROBES = {"strength": 0.5, "image_scale": 1.0}
"""Numbers that some models do not take, each with a value that the others do."""


class Forms:
    """The forms of a server's models, whose configs are read.

    Args:
        uploads: the files of clients.
        adapters: the folder whose LoRA files clients may name.
    """

    def __init__(self, worker: Worker, uploads: Uploads, adapters: Path):
        self.worker, self.uploads, self.adapters = worker, uploads, adapters

    def models(self) -> list[dict[str, Any]]:
        """What each model can do: the page's form is made of it."""
        return [self._model(name) for name in self.worker.models]

    def _model(self, name: str) -> dict[str, Any]:
        manifest = self.worker.manifests[name]
        kind, inputs = manifest.model.inputs
        run_options = self._recommended(name)
        fields = {}
        for field in field_names():
            if field in MEDIA_FIELDS.values() and field not in inputs:
                continue
            if (described := self._describe(name, field)) is None:
                continue
            if (value := run_options.get(field)) is not None:
                described["x-recommended"] = value
            fields[field] = described
        required = [visual.input for visual in manifest.model.visual if visual.required]
        return {
            "id": name,
            "object": "model",
            "owned_by": "cogvideox-flax",
            "family": manifest.family,
            "release": manifest.release.name if manifest.release else None,
            "description": kind,
            "inputs": list(inputs),
            "required_inputs": required,
            "adapters": self._adapter_names(),
            "preview": manifest.preview_matrix is not None,
            "fields": fields,
        }

    def _describe(self, name: str, field: str) -> dict[str, Any] | None:
        """A field with those of its choices that a model serves; None: it serves none."""
        from cogvideox_flax.generate.media import UNSEEN

        model, described = self.worker.manifests[name].model, describe_field(field)
        if field == "scheduler":
            described["enum"] = described["x-values"] = list(model.schedulers)
        inputs = {"prompt": "", **{each: [UNSEEN] for each in model.inputs[1]}}

        def is_served(value: Any) -> bool:
            try:
                self.worker.resolve(name, {**inputs, field: value})
            except InputError:
                return False
            return True

        if field in PROBES:
            return described if is_served(PROBES[field]) else None
        if "enum" in described:
            pairs = zip(described["enum"], described["x-values"], strict=True)
            served = [pair for pair in pairs if is_served(pair[1])]
            if not served:
                return None
            described["enum"], described["x-values"] = map(list, zip(*served, strict=True))
        return described

    def _recommended(self, name: str) -> dict[str, Any]:
        """What is filled in where a request says nothing."""
        from cogvideox_flax.generate.media import UNSEEN

        manifest = self.worker.manifests[name]
        required = {visual.input: [UNSEEN] for visual in manifest.model.visual if visual.required}
        try:
            run = self.worker.resolve(name, {"prompt": "", **required})
        except InputError:
            return {}
        names = ("num_frames", "height", "width", "num_inference_steps", "guidance_scale", "fps", "strength")
        values = {each: getattr(run.request, each) for each in names}
        return {**values, "scheduler": run.scheduler.kind}

    def _adapter_names(self) -> list[str]:
        return sorted(path.stem for path in self.adapters.glob("[!.]*.safetensors"))

    def resolve(
        self,
        values: Mapping[str, Any],
        files: Mapping[str, UploadFile],
        base: Mapping[str, Any],
        own: list[str],
    ) -> tuple[CreateRequest, str, list[tuple[dict[str, Any], Run]]]:
        """Read a request, and return it, its model, and the options and the run of each of its videos.

        Args:
            base: options that stand where the request says nothing.
            own: gets the ids of the files that the request brings, also where it fails.

        Raises:
            ApiError: with every field that cannot be served.
        """
        left_out = {api_names().get(name, name) for name, value in values.items() if value is None}
        values = {name: value for name, value in values.items() if value is not None}
        base = {name: value for name, value in base.items() if name not in left_out}
        try:
            wanted = read_fields({**values, **files}, partial(self._media, own), self._adapter, base)
        except FieldError as e:
            raise ApiError(422, "invalid_value", str(e), e.faults) from e
        model = wanted.model or base.get("model") or self._made_by(wanted) or next(iter(self.worker.models))
        if model not in self.worker.models:
            known = ", ".join(self.worker.models)
            message = f"there is no model {model[:100]!r} here; there are: {known}"
            raise ApiError(404, "model_not_found", message, [("model", message)])
        if wanted.made_by:
            self._check_made_by(wanted, model)
        options = {"seed": secrets.randbelow(2**31), **wanted.options}
        if wanted.seconds is not None:
            options["num_frames"] = self._frames(model, wanted.seconds, options.get("fps"))
        try:
            run = self.worker.resolve(model, options)
            runs = [(options | {"seed": one.request.seed}, one) for one in run.varied(num_videos=wanted.n).seeds()]
        except InputError as e:
            message = self.worker.without_paths(str(e))
            faults = _faults_of(message)
            is_input = any(field in MEDIA_FIELDS.values() for field, _ in faults)
            raise ApiError(422, "unsupported_input" if is_input else "invalid_value", message, faults) from e
        return wanted, model, runs

    def _release(self, model: str) -> str:
        """What the recipes of a model's videos call it."""
        release = self.worker.manifests[model].release
        return release.name if release else model.replace("-", "_")

    def _made_by(self, wanted: CreateRequest) -> str | None:
        """The model of this server that made the video of a recipe."""
        made_by = wanted.made_by.get("release")
        return next((model for model in self.worker.models if self._release(model) == made_by), None)

    def _check_made_by(self, wanted: CreateRequest, model: str) -> None:
        """Refuse a recipe of another model or dtype, whose video would be another one."""
        dtype = self.worker.models[model].dtype or self.worker.manifests[model].default_dtype
        here = {"release": self._release(model), "dtype": dtype}
        if other := [f"{name} {value}" for name, value in wanted.made_by.items() if value != here[name]]:
            message = f"the recipe is of {' and '.join(other)}; {model} here is {here['release']} in {here['dtype']}"
            raise ApiError(422, "invalid_value", message, [("recipe", message)])

    def _frames(self, model: str, seconds: float, fps: int | None) -> int:
        """The count of frames that is nearest to a length."""
        model_ = self.worker.manifests[model].model
        wanted = round(seconds * (fps or model_.defaults.fps))
        rule = model_.size_rule
        below = rule.fit_frames(wanted)
        above = below + rule.period
        return below if wanted - below <= above - wanted else above

    def _media(self, own: list[str], field: str, value: Any) -> str:
        """The path in the gallery of an image or clip: a file of the request, an id of an upload, or a data: URL.

        own: gets the ids of the files that the request brings.
        """
        if isinstance(value, UploadFile):
            file = self.uploads.add(value.filename or "", value.file)
            own.append(file.id)
            return self.uploads.name(file)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as e:
                raise InputError(f"{field} is not valid JSON") from e
        match value:
            case {"file_id": str(file_id)} if len(value) == 1:
                uploaded = self.uploads.get(file_id)
                if uploaded is None:
                    raise InputError(f"{field}: there is no file {file_id[:80]!r}; upload it to /v1/files")
                file = uploaded
            case {"image_url": str(url)} if len(value) == 1:
                file = self.uploads.add(field, data_url(url, MAX_JSON_BYTES))
                own.append(file.id)
            case _:
                raise InputError(f'{field}: expected {{"file_id": ID}} of /v1/files, or {{"image_url": "data:..."}}')
        return self.uploads.name(file)

    def _adapter(self, name: str) -> str:
        if name not in self._adapter_names():
            known = ", ".join(self._adapter_names()) or "none"
            raise InputError(f"lora: there is no adapter {name[:80]!r} here; there are: {known}")
        return f"{self.adapters.name}/{name}.safetensors"


def _faults_of(message: str) -> list[tuple[str, str]]:
    """The faults of a message, each with the field that it is about, or ""."""
    known = api_names()
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return [(known.get(re.split(r"[\s:]", line, maxsplit=1)[0], ""), line) for line in lines]

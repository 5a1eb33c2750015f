"""`/openapi.json`: the API described, its fields out of the table of options."""

from __future__ import annotations

from typing import Any

from cogvideox_flax.serve.fields import MEDIA_FIELDS, OWN_FIELDS, describe_field, field_names
from cogvideox_flax.version import __version__

_VIDEO = {
    "id": "string",
    "object": "string",
    "model": "string",
    "prompt": "string",
    "status": "string",
    "progress": "integer",
    "created_at": "integer",
    "completed_at": "integer",
    "expires_at": "integer",
    "size": "string",
    "seconds": "string",
    "error": "object",
    "remixed_from_video_id": "string",
    "num_frames": "integer",
    "fps": "integer",
    "seed": "integer",
    "queue_position": "integer",
    "stage": "string",
    "compiling": "string",
    "step": "integer",
    "steps": "integer",
    "eta_seconds": "number",
    "inference_time_s": "number",
    "stage_durations": "object",
    "peak_memory_mb": "number",
    "media_type": "string",
    "content_url": "string",
    "preview_url": "string",
    "recipe_url": "string",
    "options": "object",
    "metadata": "object",
    "event_id": "integer",
}

ROUTES = {
    "/health": {"get": ("health", "Whether the server is starting, ready, busy or failed")},
    "/v1/models": {"get": ("models", "Models, and the fields that each takes")},
    "/v1/videos": {"post": ("create", "Ask for videos"), "get": ("list", "List videos")},
    "/v1/videos/estimate": {"post": ("estimate", "Time and memory of a request, which is not queued")},
    "/v1/videos/extensions": {"post": ("extend", "Ask for a video that goes on from the last frame of another")},
    "/v1/videos/{id}": {
        "get": ("get", "One video"),
        "delete": ("delete", "Remove a video, and cancel it where it is under way"),
    },
    "/v1/videos/{id}/cancel": {"post": ("cancel", "Cancel a video: at once, or after the current step")},
    "/v1/videos/{id}/remix": {"post": ("remix", "Ask for a video with the options of another, and some changed")},
    "/v1/videos/{id}/content": {"get": ("content", "The MP4; variant=thumbnail or preview: a WebP")},
    "/v1/videos/{id}/recipe": {"get": ("recipe", "Everything that decides the video")},
    "/v1/videos/{id}/events": {"get": ("follow", "Server-sent events of a video")},
    "/v1/events": {"get": ("follow", "Server-sent events of all videos")},
    "/v1/files": {"post": ("upload", "Upload an image or clip")},
    "/v1/files/{id}": {"get": ("file", "What a file is"), "delete": ("remove_file", "Remove a file")},
    "/v1/files/{id}/content": {"get": ("file_content", "The bytes of a file")},
    "/v1/read-recipe": {"post": ("read_recipe", "The recipe inside a video of this library")},
}
"""Path -> method -> the method of `Api` that answers it, and what it does. The first path that fits is taken."""

_CREATING = ("/v1/videos", "/v1/videos/estimate", "/v1/videos/extensions", "/v1/videos/{id}/remix")


def openapi() -> dict[str, Any]:
    """The description of the API, OpenAPI 3.1."""
    text = {"type": ["string", "null"]}
    error = {"type": "object", "properties": dict.fromkeys(("message", "type", "param", "code"), text)}
    schemas = {
        "CreateVideo": _create_schema(),
        "Video": {"type": "object", "properties": {name: {"type": [kind, "null"]} for name, kind in _VIDEO.items()}},
        "FileReference": {"type": "object", "properties": dict.fromkeys(("file_id", "image_url"), text)},
        "Error": {"type": "object", "properties": {"error": error}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "cogvideox-flax", "version": __version__},
        "paths": {
            path: {method: _operation(path, method, said) for method, (_, said) in ways.items()}
            for path, ways in ROUTES.items()
        },
        "components": {"schemas": schemas, "securitySchemes": {"password": {"type": "http", "scheme": "bearer"}}},
    }


def _create_schema() -> dict[str, Any]:
    own = {name: {"type": kind, "description": said} for name, (kind, said) in OWN_FIELDS.items()}
    options = {name: describe_field(name) for name in field_names()}
    media = {name: options[option] for name, option in MEDIA_FIELDS.items()}
    return {
        "type": "object",
        "required": ["prompt"],
        "additionalProperties": False,
        "properties": {"prompt": {"type": "string"}, **own, **options, **media},
    }


def _operation(path: str, method: str, said: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": said}
    if path in _CREATING:
        answer["content"] = _json("Video")
    operation: dict[str, Any] = {
        "summary": said,
        "responses": {"2XX": answer, "4XX": {"description": "an error", "content": _json("Error")}},
    }
    if "{id}" in path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if method == "post" and path in _CREATING:
        body = _json("CreateVideo")
        operation["requestBody"] = {"content": body | {"multipart/form-data": body["application/json"]}}
    return operation


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}

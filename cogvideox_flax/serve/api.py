"""The HTTP API: videos are asked for, watched, fetched, cancelled. See docs/serving.md.

The paths and the names of fields are those of OpenAI's Videos API, which other servers and clients speak.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.jobs import JobFolder, JobRecord
from cogvideox_flax.serve.bodies import OpenedFile, digest_of, read_body
from cogvideox_flax.serve.errors import HANDLERS, ApiError
from cogvideox_flax.serve.events import ENDS, EventLog, ServerEvent
from cogvideox_flax.serve.fields import MEDIA_FIELDS
from cogvideox_flax.serve.files import Uploads
from cogvideox_flax.serve.forms import Forms
from cogvideox_flax.serve.guard import PAGES
from cogvideox_flax.serve.maker import PREVIEW, VIDEO, Progress
from cogvideox_flax.serve.matching import programs_of
from cogvideox_flax.serve.openapi import ROUTES, openapi
from cogvideox_flax.serve.worker import Worker
from cogvideox_flax.version import __version__

if TYPE_CHECKING:
    from PIL.Image import Image

    from cogvideox_flax.generate.run import Run

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"

PING_S = 15.0

KEEP_KEYS_S = 24 * 3600
"""Seconds that an Idempotency-Key is remembered."""

POLL_MS = {"queued": 2000, "in_progress": 500}

READY_S = 60.0
"""Seconds that a request waits for the models' configs to be read."""

MAX_FOLLOWERS = 512
"""Streams of events that may be open."""

STOP_S = 60.0
"""Seconds to wait for the current step when the server stops."""


class Api:
    """The routes over a queue.

    Args:
        jobs: the queue, in use by this process.
        uploads: the files of clients.
        adapters: the folder whose LoRA files clients may name.
        max_queue: jobs that may wait.
    """

    def __init__(
        self, jobs: JobFolder, worker: Worker, events: EventLog, uploads: Uploads, *, adapters: Path, max_queue: int
    ):
        self.jobs, self.worker, self.events, self.uploads = jobs, worker, events, uploads
        self.forms, self.max_queue = Forms(worker, uploads, adapters), max_queue
        self._creating = asyncio.Lock()

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/openapi.json", self.openapi),
            *(
                Route(path, getattr(self, name), methods=[method])
                for path, ways in ROUTES.items()
                for method, (name, _) in ways.items()
            ),
            *(Route(path, _page(STATIC / name)) for path, name in PAGES.items()),
        ]
        return Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.worker.start()
        yield
        self.worker.stop()
        await run_in_threadpool(self.worker.join, STOP_S)
        for job_id in list(self.worker.running):
            self.jobs.interrupt(job_id)

    # --- what the server is

    async def health(self, request: Request) -> Response:
        waiting = sum(not record.is_over for record in self.jobs.all())
        worker = self.worker
        facts = {"status": worker.status, "queue": waiting, "device": worker.device, "version": __version__}
        return JSONResponse(facts)

    async def models(self, request: Request) -> Response:
        await self._ready()
        return JSONResponse({"object": "list", "data": await run_in_threadpool(self.forms.models)})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi())

    # --- videos

    async def create(self, request: Request) -> Response:
        return await self._queue(request, {})

    async def remix(self, request: Request) -> Response:
        """Another video with the options of one, and what the body says in their place; a seed of null is a new one."""
        record = self._record(request)
        return await self._queue(request, {**record.options, "model": record.model}, remixed_from=record.id)

    async def extend(self, request: Request) -> Response:
        """A video that goes on from the last frame of one."""
        values, files = await read_body(request)
        match values.get("video"):
            case {"id": str(video_id)} if (record := self.jobs.get(video_id)) is not None:
                pass
            case _:
                raise ApiError(
                    422, "invalid_value", 'expected "video": {"id": ID} of a video that is there', [("video", "")]
                )
        self._check_made(record)
        return await self._queue(request, {}, (values, files), extends=record.id)

    def _last_frame(self, record: JobRecord) -> str:
        """The last frame of a video as an upload; returns its id."""
        import io

        self._frame(record, lambda count: count - 1).save(data := io.BytesIO(), "PNG")
        return self.uploads.add(f"last frame of {record.id}", data.getvalue()).id

    def _frame(self, record: JobRecord, index: Callable[[int], int]) -> Image:
        """A frame of a video, by the count of its frames."""
        self._check_ready()
        from PIL import Image

        from cogvideox_flax.io.video import open_video

        try:
            source = open_video(self.jobs.path(record.id, VIDEO))
            ((_, frame),) = source.frames([index(source.info.num_frames)])
        except (InputError, OSError):
            self._check_made(record)  # it may have been removed since
            raise
        return Image.fromarray(frame)

    async def _queue(
        self,
        request: Request,
        base: Mapping[str, Any],
        body: tuple[dict[str, Any], dict[str, UploadFile]] | None = None,
        **client: Any,
    ) -> Response:
        """Answer a request for videos.

        Args:
            base: options of an earlier job, which stand where the request says nothing.
            body: values and files of the request, where they were read.
        """
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= 255:
            raise ApiError(422, "invalid_value", "Idempotency-Key has 1 to 255 characters")
        values, files = await read_body(request) if body is None else body
        async with self._creating:
            return await run_in_threadpool(self._create, values, files, base, key, client)

    def _create(
        self,
        values: dict[str, Any],
        files: Mapping[str, UploadFile],
        base: Mapping[str, Any],
        key: str | None,
        client: Mapping[str, Any],
    ) -> Response:
        self._check_ready()
        body = digest_of({**base, **values}, files)
        if key is not None and (earlier := self._of_key(key)):
            if earlier[0].client["body"] != body:
                raise ApiError(422, "idempotency_conflict", "this Idempotency-Key came with another body before")
            return self._created(earlier, 200, {"idempotency-replayed": "true"})
        with self._receiving() as own:
            if (extended := client.get("extends")) is not None:
                if (record := self.jobs.get(extended)) is None:
                    raise ApiError(404, "not_found", "there is no such video", [("video", "")])
                own.append(self._last_frame(record))
                frame = {"model": record.model, "input_reference": {"file_id": own[0]}}
                values = frame | {name: value for name, value in values.items() if name != "video"}
            wanted, model, runs = self.forms.resolve(values, files, base, own)
            waiting = sum(not record.is_over for record in self.jobs.all())
            if waiting + len(runs) > self.max_queue:
                raise ApiError(429, "queue_full", f"{waiting} jobs wait; try again later", retry_after=30)
            client = {"key": key, "body": body, "metadata": wanted.metadata, **client}
            records = self._add(model, runs, client)
            own.clear()  # they are the jobs'
        return self._created(records, 202, {})

    @contextmanager
    def _receiving(self) -> Iterator[list[str]]:
        """A list for the ids of uploads that a request brings; those that are in it at the end are removed."""
        own: list[str] = []
        try:
            yield own
        finally:
            for file_id in own:
                self.uploads.remove(file_id)

    def _add(
        self, model: str, runs: Sequence[tuple[dict[str, Any], Run]], client: Mapping[str, Any]
    ) -> list[JobRecord]:
        """Queue all videos of a request, or none."""
        records: list[JobRecord] = []
        try:
            for options, run in runs:
                facts = _facts(run) | {"programs": programs_of(run)}
                records.append(record := self.jobs.add(model, options, facts, **client))
                self.events.publish("queued", record.id)
        except BaseException:
            for record in records:
                self._remove(record)
            raise
        return records

    def _remove(self, record: JobRecord) -> None:
        self.jobs.remove(record.id)
        self.events.publish("deleted", record.id)

    def _of_key(self, key: str) -> list[JobRecord]:
        since = time.time() - KEEP_KEYS_S
        return [record for record in self.jobs.all() if record.client.get("key") == key and record.created > since]

    def _created(self, records: list[JobRecord], status: int, headers: dict[str, str]) -> Response:
        answers = [self.video(record) for record in records]
        if len(answers) == 1:
            return JSONResponse(answers[0], status, {"location": f"/v1/videos/{records[0].id}", **headers})
        return JSONResponse({"object": "list", "data": answers}, status, headers)

    async def list(self, request: Request) -> Response:
        order, limit, after = (request.query_params.get(name) for name in ("order", "limit", "after"))
        if order not in (None, "asc", "desc"):
            raise ApiError(422, "invalid_value", "order is asc or desc")
        if limit is not None and not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= 100):
            raise ApiError(422, "invalid_value", "limit is a whole number from 1 to 100")
        records = self.jobs.all() if order == "asc" else self.jobs.all()[::-1]
        if after is not None:
            ids = [record.id for record in records]
            if after not in ids:
                raise ApiError(404, "not_found", "after names no video")
            records = records[ids.index(after) + 1 :]
        some = records[: int(limit or 20)]
        data = [self.video(record) for record in some]
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return JSONResponse({"object": "list", "data": data, **ends, "has_more": len(records) > len(some)})

    async def get(self, request: Request) -> Response:
        record = self._record(request)
        headers = {"etag": f'"{self.events.last}"'}
        if record.status in POLL_MS:
            headers["openai-poll-after-ms"] = str(POLL_MS[record.status])
        return JSONResponse(self.video(record), headers=headers)

    def video(self, record: JobRecord) -> dict[str, Any]:
        """A job, as clients see it."""
        last_event = self.events.last  # before its state is read: what comes after this is news
        record = self.jobs.get(record.id) or record
        facts, steps = record.facts, record.facts["num_inference_steps"]
        url = f"/v1/videos/{record.id}"
        done = record.status == "completed"
        running = self.worker.running.get(record.id)
        progress = asdict(running or Progress()) | {"steps": (running and running.steps) or steps}
        if running is None:
            progress["stage"] = None
        percent = int(99 * progress["step"] / progress["steps"])
        has_preview = self.jobs.path(record.id, PREVIEW).exists()
        return {
            "id": record.id,
            "object": "video",
            "model": record.model,
            "prompt": record.options["prompt"],
            "status": record.status,
            "progress": 100 if done else percent if record.status == "in_progress" else 0,
            "created_at": int(record.created),
            "completed_at": int(record.ended) if done and record.ended is not None else None,
            "expires_at": None,
            "size": f"{facts['width']}x{facts['height']}",
            "seconds": f"{facts['num_frames'] / facts['fps']:g}",
            "error": record.error,
            "remixed_from_video_id": record.client.get("remixed_from"),
            **{name: facts[name] for name in ("num_frames", "fps", "seed")},
            "queue_position": self.jobs.position(record.id),
            **progress,
            **{name: facts.get(name) for name in ("inference_time_s", "stage_durations", "peak_memory_mb")},
            "media_type": "video/mp4",
            "content_url": f"{url}/content" if done else None,
            "preview_url": f"{url}/content?variant=preview" if has_preview else None,
            "recipe_url": f"{url}/recipe" if done else None,
            "options": _as_asked(record.options),
            "metadata": record.client.get("metadata") or {},
            "event_id": last_event,
        }

    async def estimate(self, request: Request) -> Response:
        await self._ready()
        values, files = await read_body(request)
        return JSONResponse(await run_in_threadpool(self._estimate, values, files))

    def _estimate(self, values: dict[str, Any], files: Mapping[str, UploadFile]) -> dict[str, Any]:
        """Seconds and memory by the last video of the same shape; before the first, the bytes of the weights."""
        from cogvideox_flax.generate.open_model import abstract_weights
        from cogvideox_flax.runtime.devices import bytes_per_device

        self._check_ready()
        with self._receiving() as own:
            _, model, runs = self.forms.resolve(values, files, {}, own)
        (_, run), *_ = runs
        step = self.worker.step_seconds(model, run)
        memory = self.worker.memory_bytes(model, run)
        weights = [
            bytes_per_device(abstract_weights(run.manifest, name, run.dtype, None)) for name in run.model.components
        ]
        return {
            "object": "estimate",
            "model": model,
            **_facts(run),
            "seconds": None if step is None else round(step * run.num_steps * len(runs), 1),
            "memory_bytes": sum(weights) if memory is None else memory,
            "memory_of": "weights" if memory is None else "programs",
            "compile": not self.worker.is_compiled(model, run),
        }

    async def cancel(self, request: Request) -> Response:
        record = self._record(request)
        if record.is_over:
            return JSONResponse(self.video(record))
        self.jobs.cancel(record.id)
        if (now := self.jobs.get(record.id)) is not None and now.status == "failed":
            self.events.publish("failed", record.id)
        return JSONResponse(self.video(now or record), 202)

    async def delete(self, request: Request) -> Response:
        record = self._record(request)
        await run_in_threadpool(self._remove, record)
        return JSONResponse({"id": record.id, "object": "video.deleted", "deleted": True})

    async def content(self, request: Request) -> Response:
        """The video, a still of it, or the preview of one under way."""
        record, variant = self._record(request), request.query_params.get("variant", "video")
        if variant == "preview":
            try:  # at once: a later preview takes the file's place
                preview = await run_in_threadpool(self.jobs.path(record.id, PREVIEW).read_bytes)
            except FileNotFoundError as e:
                raise ApiError(409, "not_ready", "there is no preview yet", retry_after=2) from e
            return Response(preview, media_type="image/webp", headers={"cache-control": "no-cache"})
        if variant not in ("video", "thumbnail"):
            raise ApiError(422, "invalid_value", "variant is video, thumbnail or preview", [("variant", "")])
        self._check_made(record)
        disposition = "attachment" if "download" in request.query_params else "inline"
        how = {"filename": f"{record.id}.mp4", "content_disposition_type": disposition}
        try:
            if variant == "thumbnail":
                return OpenedFile(await run_in_threadpool(self._thumbnail, record), "image/webp")
            return OpenedFile(self.jobs.path(record.id, VIDEO), "video/mp4", **how)
        except FileNotFoundError as e:
            raise _gone() from e

    def _thumbnail(self, record: JobRecord) -> Path:
        from cogvideox_flax.io.atomic import atomic_write

        path = self.jobs.path(record.id, "thumbnail.webp")
        if not path.exists():
            image = self._frame(record, lambda count: count // 2)
            image.thumbnail((320, 320))
            with atomic_write(path) as partial:
                image.save(partial, "WEBP")
            self.jobs.clear_removed(record.id)
        return path

    async def recipe(self, request: Request) -> Response:
        record = self._record(request)
        self._check_made(record)
        return JSONResponse(record.facts["recipe"])

    async def read_recipe(self, request: Request) -> Response:
        """The recipe of a video that this library wrote, which a client sends."""
        await self._ready()
        from cogvideox_flax.generate.recipe import read_recipe

        _, files = await read_body(request)
        if (file := files.get("file")) is None:
            raise ApiError(422, "invalid_value", "expected a multipart field `file`", [("file", "")])

        def read() -> dict[str, Any]:
            video = self.uploads.add(file.filename or "", file.file)
            try:
                return read_recipe(self.uploads.path(video))
            finally:
                self.uploads.remove(video.id)

        try:
            recipe = await run_in_threadpool(read)
        except InputError as e:
            message = self.worker.without_paths(str(e))
            raise ApiError(422, "invalid_value", message, [("file", message)]) from e
        if not recipe:
            message = "the video does not say how it was made; this program did not write it"
            raise ApiError(422, "no_recipe", message, [("file", message)])
        return JSONResponse(recipe)

    # --- events

    async def follow(self, request: Request) -> Response:
        """A stream of events, of one video or of all."""
        job = request.path_params.get("id")
        record = None if job is None else self._record(request)
        last = request.headers.get("last-event-id") or request.query_params.get("after")
        if last is not None and not (last.isascii() and last.isdigit() and len(last) < 19):
            raise ApiError(422, "invalid_value", "Last-Event-ID and after are whole numbers")
        if record is not None and record.is_over:
            if last is not None and int(last) >= self.events.end_of(record.id):
                return Response(status_code=204)  # which tells a browser not to come back
            return Response(f"retry: 2000\n{self._sse(self._end(record))}", media_type="text/event-stream")
        if self.events.followers >= MAX_FOLLOWERS:
            raise ApiError(503, "too_many_streams", f"{MAX_FOLLOWERS} streams are open", retry_after=30)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        stream = self._stream(job, None if last is None else int(last))
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    def _end(self, record: JobRecord) -> ServerEvent:
        """The event that ended a job."""
        return ServerEvent(self.events.end_of(record.id), record.status, record.id, {})

    async def _stream(self, job: str | None, after: int | None) -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        async for event in self.events.follow(job, after, PING_S):
            record = None if job is None else self.jobs.get(job)
            if event is None and record is not None and record.is_over:  # it ended before this stream began
                event = self._end(record)
            yield ": ping\n\n" if event is None else self._sse(event)
            if event is not None and job is not None and event.kind in ENDS:
                return

    def _sse(self, event: ServerEvent) -> str:
        """An event as text; those that change what a client shows hold the whole video."""
        data = {"video_id": event.job, **event.data}
        if event.kind == "preview":
            data["url"] = f"/v1/videos/{event.job}/content?variant=preview&event={event.id}"
        record = self.jobs.get(event.job)
        if event.kind not in ("progress", "preview", "compile") and record is not None:
            data["video"] = self.video(record)
        return f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n"

    # --- files

    async def upload(self, request: Request) -> Response:
        await self._ready()
        _, files = await read_body(request)
        if (file := files.get("file")) is None or len(files) != 1:
            raise ApiError(422, "invalid_value", "expected one multipart field `file`", [("file", "")])
        try:
            uploaded = await run_in_threadpool(self.uploads.add, file.filename or "", file.file)
        except InputError as e:
            raise ApiError(415, "unsupported_input", str(e), [("file", str(e))]) from e
        return JSONResponse({"object": "file", **asdict(uploaded)}, 201)

    async def file(self, request: Request) -> Response:
        if (file := self.uploads.get(request.path_params["id"])) is None:
            raise ApiError(404, "not_found", "there is no such file")
        return JSONResponse({"object": "file", **asdict(file)})

    async def file_content(self, request: Request) -> Response:
        if (file := self.uploads.get(request.path_params["id"])) is None:
            raise ApiError(404, "not_found", "there is no such file")
        try:
            return OpenedFile(self.uploads.path(file), file.media_type)
        except FileNotFoundError as e:  # removed since
            raise ApiError(404, "not_found", "there is no such file") from e

    async def remove_file(self, request: Request) -> Response:
        file_id = request.path_params["id"]
        for record in self.jobs.all():
            used = [
                Path(str(record.options[name])).parent.name for name in MEDIA_FIELDS.values() & record.options.keys()
            ]
            if not record.is_over and file_id in used:
                raise ApiError(409, "in_use", f"{record.id} is made of this file; remove that one first")
        if not await run_in_threadpool(self.uploads.remove, file_id):
            raise ApiError(404, "not_found", "there is no such file")
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    # --- shared

    def _record(self, request: Request) -> JobRecord:
        if (record := self.jobs.get(request.path_params["id"])) is None:
            raise ApiError(404, "not_found", "there is no such video")
        return record

    def _check_made(self, record: JobRecord) -> None:
        """Refuse a job whose video is not there."""
        if record.status != "completed":
            said = record.error["message"] if record.error else f"it is {record.status}"
            retry_after = None if record.is_over else 5
            raise ApiError(409, "not_ready", f"there is no video: {said}", retry_after=retry_after)
        if not self.jobs.path(record.id, VIDEO).is_file():
            raise _gone()

    async def _ready(self) -> None:
        await run_in_threadpool(self._check_ready)

    def _check_ready(self) -> None:
        """Wait until the models' configs are read.

        What needs JAX waits, too: two threads that import it at once each see a part of it.
        """
        if not self.worker.ready.wait(READY_S) or self.worker.failure is not None:
            message = "the models could not be opened" if self.worker.failure else "the models are being opened"
            raise ApiError(503, self.worker.status, message, retry_after=5)


def _gone() -> ApiError:
    return ApiError(410, "gone", "the file of this video is not there any more")


def _facts(run: Run) -> dict[str, Any]:
    """What a run makes, as a job's record and its answers hold it."""
    request = run.request
    names = ("width", "height", "num_frames", "fps", "guidance_scale", "seed")
    return {**{name: getattr(request, name) for name in names}, "num_inference_steps": run.num_steps}


def _as_asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a job as a request gives them: files by their ids, adapters by their names."""
    asked = dict(options)
    for name in MEDIA_FIELDS.values() & options.keys():
        asked[name] = {"file_id": Path(options[name]).parent.name}
    if "lora" in options:
        asked["lora"] = [{"name": Path(each["file"]).stem, "scale": each["scale"]} for each in options["lora"]]
    return asked


def _page(path: Path) -> Any:
    async def page(request: Request) -> Response:
        return FileResponse(path, headers={"cache-control": "no-cache"})

    return page

"""The API and its worker in this process: what others do between two steps of a request or of a job."""

import asyncio
import errno
import io
import json
import shutil
import threading
import time

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.jobs import JobFolder
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.io.video import save_video
from cogvideox_flax.lora import EMBEDDED_ADAPTERS, FILE_NAME
from cogvideox_flax.serve import api as serve_api
from cogvideox_flax.serve import worker
from cogvideox_flax.serve.api import Api
from cogvideox_flax.serve.events import EventLog
from cogvideox_flax.serve.files import Uploads
from cogvideox_flax.serve.maker import VIDEO
from cogvideox_flax.serve.worker import Lost, ThisProcess, Worker

FACTS = {"width": 64, "height": 64, "num_frames": 9, "fps": 8, "seed": 0, "num_inference_steps": 2}


@pytest.fixture
def api(tmp_path):
    """The API over a folder with a video that is made; nobody makes others."""
    with JobFolder(tmp_path / "jobs") as jobs:
        events = EventLog(tmp_path / "next-event")
        names = ("embedded", "embedded-image-to-video")
        models = {name: ModelChoice(name, name) for name in names}
        worker = Worker(jobs, models, events, progress=False)
        worker.ready.set()
        yield Api(jobs, worker, events, Uploads(tmp_path / "files"), adapters=tmp_path / "adapters", max_queue=9)


@pytest.fixture
def video(api):
    record = api.jobs.add("embedded", {"prompt": "x"}, FACTS)
    save_video(api.jobs.path(record.id, VIDEO), np.zeros((9, 64, 64, 3), np.uint8), fps=8)
    return api.jobs.complete(record.id, recipe={})


def client(api):
    """Without the API's lifespan, so that the worker does not start; a fault of the server is its answer."""
    return TestClient(api.app(), base_url="http://localhost", raise_server_exceptions=False)


def test_what_reads_files_waits_until_jax_is_imported(api, video, monkeypatch):
    """Two threads that import it at once find it half imported."""
    monkeypatch.setattr(serve_api, "READY_S", 0.01)
    api.worker.ready.clear()
    image, asked = {"file": ("a.png", b"")}, client(api)
    answers = [asked.post(f"/v1/{path}", files=image) for path in ("files", "read-recipe")]
    answers.append(asked.get(f"/v1/videos/{video.id}/content?variant=thumbnail"))
    answers.append(asked.post("/v1/videos", json={"prompt": "a"}))
    assert [answer.status_code for answer in answers] == [503] * 4
    assert {answer.json()["error"]["message"] for answer in answers} == {"the models are being opened"}


@pytest.mark.parametrize("variant", ["video", "thumbnail"])
def test_a_video_is_removed_when_its_file_is_to_be_sent(api, video, variant, monkeypatch):
    check = api._check_made

    def check_then_remove(record):
        check(record)
        api.jobs.remove(record.id)

    monkeypatch.setattr(api, "_check_made", check_then_remove)
    answer = client(api).get(f"/v1/videos/{video.id}/content", params={"variant": variant})
    assert answer.status_code == 410 and answer.json()["error"]["code"] == "gone"
    assert not api.jobs.path(video.id).exists()


def test_a_thumbnail_of_what_is_removed_while_it_is_made_stays_not(api, video, monkeypatch):
    frame = api._frame

    def frame_then_remove(*args):
        image = frame(*args)
        api.jobs.remove(video.id)
        return image

    monkeypatch.setattr(api, "_frame", frame_then_remove)
    answer = client(api).get(f"/v1/videos/{video.id}/content?variant=thumbnail")
    assert answer.status_code == 410
    assert not api.jobs.path(video.id).exists()


@pytest.mark.parametrize("what", ["video", "part", "upload"])
def test_a_file_that_is_removed_while_it_is_sent_is_sent_whole(api, video, what):
    path, folder = f"/v1/videos/{video.id}/content", api.jobs.path(video.id)
    expected = api.jobs.path(video.id, VIDEO).read_bytes()
    headers = [(b"range", b"bytes=10-29")] if what == "part" else []
    if what == "upload":
        file = api.uploads.add("a.mp4", expected)
        path, folder = f"/v1/files/{file.id}/content", api.uploads.path(file).parent
    sent = []

    async def send(message):
        sent.append(message)
        if message["type"] == "http.response.start":
            shutil.rmtree(folder)

    async def receive():
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
    asyncio.run(api.app()({**scope, "asgi": {"version": "3.0", "spec_version": "2.4"}}, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    assert body == (expected[10:30] if what == "part" else expected)
    assert sent[0]["status"] == (206 if what == "part" else 200)


def test_an_upload_that_was_cut_is_removed_at_the_next_start(tmp_path):
    whole = Uploads(tmp_path).add("a.png", image())
    (tmp_path / "file_cut").mkdir()
    (tmp_path / "file_cut" / "data").write_bytes(b"the first bytes")
    assert Uploads(tmp_path).get(whole.id) == whole and [path.name for path in tmp_path.iterdir()] == [whole.id]


def test_an_upload_is_removed_when_it_is_to_be_sent(api, video, monkeypatch):
    file = api.uploads.add("a.mp4", api.jobs.path(video.id, VIDEO).read_bytes())
    get = api.uploads.get
    monkeypatch.setattr(api.uploads, "get", lambda file_id: (get(file_id), api.uploads.remove(file_id))[0])
    assert client(api).get(f"/v1/files/{file.id}/content").status_code == 404


def test_the_disk_is_full(api, video, monkeypatch):
    """Also where the error of the disk was put into words before."""

    def add(*args, **how):
        raise InputError("writing failed") from OSError(errno.ENOSPC, "No space left on device")

    api.worker._look()
    monkeypatch.setattr(api.jobs, "add", add)
    answer = client(api).post("/v1/videos", json={"prompt": "x"})
    assert answer.status_code == 507 and "No space left" in answer.text


def test_a_full_queue(api):
    api.max_queue = 1
    api.worker._look()
    answers = [client(api).post("/v1/videos", json={"prompt": "x"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 429] and answers[1].headers["retry-after"]


def image():
    Image.new("RGB", (64, 64)).save(data := io.BytesIO(), "PNG")
    return data.getvalue()


@pytest.mark.parametrize("why", ["other recipe", "full queue", "full disk", "full disk later"])
def test_a_request_that_fails_leaves_no_files_and_no_jobs(api, why, monkeypatch):
    """Its images are removed, and of several videos none is made."""
    api.worker._look()
    fields, before = {"prompt": "x", "n": "2", "model": "embedded-image-to-video"}, len(api.jobs.all())
    if why == "other recipe":
        fields["recipe"] = json.dumps({"release": "another", "prompt": "x", "seed": 1})
    if why == "full queue":
        api.max_queue = before
    if why == "full disk":  # while the second of two images is written
        add, copies = api.uploads.add, []

        def add_one(name, source):
            if copies:
                raise OSError(errno.ENOSPC, "No space left on device")
            copies.append(name)
            return add(name, source)

        monkeypatch.setattr(api.uploads, "add", add_one)
    if why == "full disk later":
        add_job, added = api.jobs.add, []

        def add(*args, **how):
            if added:
                raise OSError(errno.ENOSPC, "No space left on device")
            added.append(add_job(*args, **how))
            return added[0]

        monkeypatch.setattr(api.jobs, "add", add)
    files = {"image": ("a.png", image())} | ({"last_image": ("b.png", image())} if why == "full disk" else {})
    answer = client(api).post("/v1/videos", data=fields, files=files)
    assert answer.status_code == {"other recipe": 422, "full queue": 429}.get(why, 507), answer.text
    assert not list(api.uploads.folder.glob("*")) and len(api.jobs.all()) == before


def test_a_clip_that_cannot_be_continued_leaves_no_frame(api, video):
    api.worker._look()
    body = {"video": {"id": video.id}, "prompt": "x"}
    answer = client(api).post("/v1/videos/extensions", json=body)
    assert answer.status_code == 422 and "takes no image" in answer.text
    assert not list(api.uploads.folder.glob("*"))


def test_a_queue_survives_what_cannot_be_written(api, tmp_path, monkeypatch):
    """A job whose state cannot be written does not end the thread that makes the others."""
    monkeypatch.setattr(worker, "RETRY_S", 0.02)
    broken, good = (api.jobs.add("embedded", {"prompt": "x"}, FACTS) for _ in range(2))
    folder = api.jobs.path(broken.id)
    folder.rename(tmp_path / "away")
    folder.write_text("as if the disk were full")

    class Home(ThisProcess):
        tries = 0

        def run(self, worker):
            while not worker.stopping.is_set():
                worker.make_next(self.make)
                self.tries += 1

        def make(self, job, is_stopped):
            yield "made", {"speed": ["", None]}

    api.worker.home = Home()
    api.worker.start()
    try:
        wait_until(lambda: api.worker.home.tries > 2)
        folder.unlink()
        (tmp_path / "away").rename(folder)
        for job in (broken, good):
            wait_until(lambda: api.jobs.get(job.id).status == "completed")  # noqa: B023
    finally:
        api.worker.stop()
        api.worker.join(10)


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("ends", ["made", "failed"])
def test_a_job_that_is_removed_in_mid_run_is_no_fault(api, ends, caplog):
    """Nothing of it stays, whatever its removal did to the run."""
    record = api.jobs.add("embedded", {"prompt": "x"}, FACTS)

    def make(job, is_stopped):
        api.jobs.remove(job.id)
        api.jobs.path(job.id).mkdir()
        api.jobs.path(job.id, VIDEO).write_bytes(b"video")
        if ends == "failed":
            (api.jobs.path(job.id) / "stages").rmdir()
        yield "made", {"speed": ["", None]}

    api.worker.make_next(make)
    assert not api.jobs.path(record.id).exists()
    assert not caplog.records


def test_a_job_whose_process_is_lost_is_another_threads_at_once(api, monkeypatch):
    """What the first thread still has to do leaves the second one's job alone."""
    record, order = api.jobs.add("embedded", {"prompt": "x"}, FACTS), []

    def second(job, is_stopped):
        order.append("second begins")
        yield "progress", {"stage": "denoise", "step": 1, "steps": 2}
        published.wait(10)
        order.append("second ends")
        yield "made", {"speed": ["", None]}

    def first(job, is_stopped):
        raise Lost
        yield

    published, publish = threading.Event(), api.events.publish

    def publish_late(kind, job, **data):  # of the first thread, after the second has begun
        if kind == "queued":
            other.start()
            while not (running := api.worker.running.get(job)) or running.step != 1:
                time.sleep(0.01)
        publish(kind, job, **data)

    monkeypatch.setattr(api.events, "publish", publish_late)
    other = threading.Thread(target=api.worker.make_next, args=[second], daemon=True)
    api.worker.make_next(first)
    assert api.jobs.get(record.id).status == "in_progress" and api.worker.running[record.id].step == 1
    published.set()
    other.join(10)
    assert api.jobs.get(record.id).status == "completed" and order == ["second begins", "second ends"]


@pytest.mark.parametrize("stored", ["now", "by earlier versions"])
def test_a_gallery_that_was_moved(stored, tmp_path):
    """Images, clips and adapters of its jobs are found where it lies now."""
    old, new = tmp_path / "old", tmp_path / "new"
    with JobFolder(old / "jobs") as jobs:
        Image.new("RGB", (64, 64)).save(image := io.BytesIO(), "PNG")
        file = Uploads(old / "files").add("a.png", image.getvalue())
        (old / "adapters").mkdir()
        shutil.copy(EMBEDDED_ADAPTERS["embedded-four-steps"] / FILE_NAME, old / "adapters" / "fast.safetensors")
        options = {"prompt": "x", "image": f"files/{file.id}/data"}
        options["lora"] = [{"file": "adapters/fast.safetensors", "scale": 1.0}]
        if stored == "by earlier versions":
            options["image"] = str(old / options["image"])
            options["lora"][0]["file"] = str(old / options["lora"][0]["file"])
        record = jobs.add("embedded-image-to-video", options, FACTS)
        jobs.complete(record.id, recipe={})
    old.rename(new)
    with JobFolder(new / "jobs") as jobs:
        name = "embedded-image-to-video"
        worker = Worker(jobs, {name: ModelChoice(name, name)}, EventLog(new / "n"))
        worker._look()
        worker.ready.set()
        api = Api(jobs, worker, worker.events, Uploads(new / "files"), adapters=new / "adapters", max_queue=9)
        answer = client(api).post(f"/v1/videos/{record.id}/remix", json={"seed": 1})
        assert answer.status_code == 202, answer.text
        assert answer.json()["options"]["image"] == {"file_id": file.id}
        queued = jobs.get(answer.json()["id"])
        assert str(old) not in repr(queued) or stored == "by earlier versions"
        begun = []

        def make(job, is_stopped):
            begun.append(job)
            yield "made", {"speed": ["", None]}

        worker.make_next(make)
        assert begun[0].options["image"] == str(new / "files" / file.id / "data")
        assert begun[0].options["lora"][0]["file"] == str(new / "adapters" / "fast.safetensors")

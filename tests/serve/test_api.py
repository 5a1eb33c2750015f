"""The HTTP API of `cogvideox serve`, asked over its socket."""

import io
import json
import signal
import socket
import threading
import time

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from cogvideox_flax import Pipeline
from cogvideox_flax.io.video import read_metadata, read_video
from tests.support import processes
from tests.support.servers import ROOT, Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("serve") / "gallery", "--model", "embedded", "--max-queue", "50") as server:
        yield server


@pytest.fixture(scope="module")
def made(server):
    """A video that the server made."""
    video = server.create(prompt="a large red circle moves to the left", seed=7)
    return server.wait(video["id"], "completed")


def image_bytes(size=(64, 64), format="PNG"):
    Image.new("RGB", size, (200, 30, 30)).save(data := io.BytesIO(), format)
    return data.getvalue()


def test_a_video_is_the_one_of_the_library(server, made, tmp_path):
    """Frames and recipe are those of Python and of the shell."""
    answer = server.client.get(made["content_url"])
    assert answer.headers["content-type"] == "video/mp4"
    (path := tmp_path / "video.mp4").write_bytes(answer.content)
    expected = Pipeline.from_pretrained()(
        "a large red circle moves to the left", num_inference_steps=2, seed=7, progress=False
    )
    expected.save(own := tmp_path / "own.mp4")
    np.testing.assert_array_equal(read_video(path)[0], read_video(own)[0])
    recipe = server.client.get(made["recipe_url"]).json()
    assert recipe == read_metadata(path)
    assert {**recipe, "seconds": None} == {**read_metadata(own), "seconds": None}
    assert made["progress"] == 100 and made["size"] == "64x64" and made["seconds"] == "2.125"
    assert made["queue_position"] is None and made["inference_time_s"] > 0
    assert {"encode", "denoise", "decode"} <= set(made["stage_durations"])
    assert sum(made["stage_durations"].values()) == pytest.approx(made["inference_time_s"], rel=0.1, abs=0.1)
    assert made["peak_memory_mb"] is None  # which CPUs do not report


def test_parts_of_a_video_are_sent(server, made):
    """Phones ask for ranges."""
    whole = server.client.get(made["content_url"]).content
    part = server.client.get(made["content_url"], headers={"range": "bytes=10-19"})
    assert part.status_code == 206 and part.content == whole[10:20]
    still = server.client.get(made["content_url"], params={"variant": "thumbnail"})
    assert Image.open(io.BytesIO(still.content)).size == (64, 64)
    preview = server.client.get(made["preview_url"])
    assert Image.open(io.BytesIO(preview.content)).format == "WEBP"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the service that the client was made for has ended
def test_openais_client(server):
    """The client of the package index, unchanged: create, poll, download, list, delete."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
    how = {"model": "embedded", "seconds": "2", "extra_body": {"num_inference_steps": 2}}
    video = client.videos.create_and_poll(prompt="a blue square", **how)
    assert video.status == "completed" and video.progress == 100 and video.seconds == "2.125"
    assert client.videos.download_content(video.id).read()[4:8] == b"ftyp"
    assert video.id in [each.id for each in client.videos.list()]
    again = client.videos.remix(video.id, prompt="a green square")
    assert again.remixed_from_video_id == video.id
    assert client.videos.delete(video.id).deleted
    assert server.client.get(f"/v1/videos/{video.id}").status_code == 404


def test_the_examples_of_the_docs(server, tmp_path):
    """The curl commands of docs/serving.md, one after the other."""
    block = (ROOT / "docs" / "serving.md").read_text().partition("<!-- curl -->\n```bash\n")[2].partition("```")[0]
    script = block.replace("localhost:8000", server.url.removeprefix("http://")).replace("curl -s", "curl -fsS")
    create, rest = script.split("$ID", 1)[0].rsplit("\n", 1)[0], script.split("\n", 2)[2]
    video = json.loads(processes.run(["bash", "-euc", create], cwd=tmp_path).stdout)
    followed = processes.run(["bash", "-euc", f"ID={video['id']}\n{rest}"], cwd=tmp_path)
    assert followed.returncode == 0, followed.stderr
    assert "event: completed" in followed.stdout and '"deleted":true' in followed.stdout
    assert read_metadata(tmp_path / "video.mp4")["seed"] == 7


# --- what cannot be served


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "x", "num_frame": 9}, "num_frame", "did you mean num_frames?"),
        ({"prompt": "x", "height": 17}, "height", "must be a multiple of 16"),
        ({"prompt": "x", "strength": 2}, "strength", "a number above 0 to 1"),
        ({"prompt": "x", "step_cache": "pap"}, "step_cache", "deepcache or residual"),
        ({"prompt": "x", "size": "64"}, "size", "expected WIDTHxHEIGHT"),
        ({"prompt": "x", "size": "64x64", "width": 64}, "size", "give one of them"),
        ({"prompt": "x", "seconds": 2, "num_frames": 17}, "seconds", "give one of them"),
        ({"prompt": "x", "seconds": "inf"}, "seconds", "expected a number"),
        ({"prompt": "x", "n": 9}, "n", "from 1 to 8"),
        ({"prompt": 7}, "prompt", "expected a text"),
        ({"prompt": "x" * 30_000}, "prompt", "at most 20000"),
        ({}, "prompt", "prompt is missing"),
        ({"prompt": "x", "seed": -1}, "seed", "from 0 to 4294967295"),
        ({"prompt": "x", "num_inference_steps": 10**9}, "num_inference_steps", "1000"),
        ({"prompt": "x", "image": "/etc/passwd"}, "image", "file_id"),
        ({"prompt": "x", "video_reference": {"file_id": "../../etc"}}, "video_reference", "there is no file"),
        ({"prompt": "x", "video_reference": {"image_url": "http://169.254.169.254/"}}, "video_reference", "data: URLs"),
        ({"prompt": "x", "lora": [{"name": "../x"}]}, "lora", "there is no adapter"),
        ({"prompt": "x", "num_videos": 2}, "num_videos", "there is no field"),
        ({"prompt": "x", "force": True}, "force", "there is no field"),
        ({"prompt": "x", "n": 10**400}, "n", "from 1 to 8"),
        ({"prompt": "x", "n": 2, "seed": 2**32 - 1}, "n", "seeds up to"),
        ({"prompt": "x", "metadata": None, "lora": 3}, "lora", "expected a JSON array"),
        ({"prompt": "x", **{f"f{i}": 1 for i in range(200)}}, None, "expected at most 100"),
        ({"recipe": {"prompt": "x", "settings": {"steps_done": 3}}}, "recipe", "no field of a request gives"),
        ({"recipe": {"prompt": "x", "release": "cogvideox-5b"}}, "recipe", "the recipe is of release cogvideox-5b"),
        ({"recipe": {"prompt": "x", "settings": {"dtype": "bfloat16"}}}, "recipe", "of dtype bfloat16"),
        ({"recipe": {"prompt": "x", "settings": {"video": [{"file": "a"}]}}}, "recipe", "give the file again"),
        ({"prompt": "x", "metadata": {"a": 1}}, "metadata", "expected up to 16 texts"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_field_that_cannot_be_served(server, body, param, words):
    answer = server.client.post("/v1/videos", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 422 and error["type"] == "invalid_request_error"
    assert error["param"] == param and words in error["message"], error


def test_all_faults_are_named(server):
    answer = server.client.post("/v1/videos", json={"prompt": "x", "height": 17, "width": 33, "fps": 0})
    assert [each["param"] for each in answer.json()["error"]["fields"]] == ["fps"]  # a value of its own first
    answer = server.client.post("/v1/videos", json={"prompt": "x", "height": 17, "num_inference_steps": 0})
    assert {each["param"] for each in answer.json()["error"]["fields"]} == {"height", "num_inference_steps"}


def test_other_bodies(server):
    post = server.client.post
    assert post("/v1/videos", content=b"{", headers={"content-type": "application/json"}).status_code == 422
    assert post("/v1/videos", content=b"[]", headers={"content-type": "application/json"}).status_code == 422
    for text in ('{"prompt": "a", "prompt": "b"}', '{"prompt": "\\ud800"}', '{"prompt": "a", "strength": NaN}'):
        assert post("/v1/videos", content=text, headers={"content-type": "application/json"}).status_code == 422, text
    twice = post("/v1/videos", data={"prompt": "x", "video": "{}"}, files={"video": ("a.mp4", b"x")})
    assert twice.status_code == 422 and "video is given more than once" in twice.text
    nested = b"[" * 100_000
    assert post("/v1/videos", content=nested, headers={"content-type": "application/json"}).status_code == 422
    assert post("/v1/videos", content=b"a", headers={"content-type": "text/plain"}).status_code == 415
    assert post("/v1/videos", json={"prompt": "x", "model": "none"}).json()["error"]["code"] == "model_not_found"
    assert server.client.get("/v1/videos/video_no").status_code == 404
    assert server.client.get("/v1/videos/../../etc/passwd").status_code == 404
    assert server.client.get("/nothing").status_code == 404
    assert server.client.put("/v1/videos").json()["error"]["code"] == "method_not_allowed"


def test_too_large_and_endless_bodies(server):
    """Bytes are counted while they come, whatever the header says."""
    assert server.client.post("/v1/videos", content=b" " * (2**20 + 1)).status_code == 413

    def endless():
        while True:
            yield b" " * 2**16

    try:
        answer = httpx.post(f"{server.url}/v1/videos", content=endless(), headers={"content-type": "application/json"})
        assert answer.status_code == 413
    except httpx.WriteError:  # the server has answered and closed before the client looked
        pass
    assert server.client.get("/health").status_code == 200


# --- cancelling, order, keys


def test_cancel_frees_the_device_within_a_step(server):
    video = server.create(num_inference_steps=60, seed=1)
    waiting = server.create(seed=2)
    assert waiting["queue_position"] == video["queue_position"] + 1
    server.wait_for_step(video["id"], 2)
    assert server.client.post(f"/v1/videos/{video['id']}/cancel").status_code == 202
    stopped = server.wait(video["id"], "failed", seconds=5)
    assert stopped["error"]["code"] == "cancelled" and "stage denoise" in stopped["error"]["message"]
    assert server.client.post(f"/v1/videos/{video['id']}/cancel").status_code == 200  # again is no fault
    server.wait(waiting["id"], "completed")
    assert not (server.folder / "jobs" / video["id"] / "stages").exists()


def test_what_waits_is_cancelled_at_once(server):
    running = server.create(num_inference_steps=60)
    waiting = server.create()
    answer = server.client.post(f"/v1/videos/{waiting['id']}/cancel").json()
    assert answer["status"] == "failed" and answer["error"]["code"] == "cancelled"
    assert server.client.delete(f"/v1/videos/{running['id']}").json()["deleted"]
    server.wait(server.create()["id"], "completed")
    end = time.monotonic() + 10
    while (server.folder / "jobs" / running["id"]).exists():
        assert time.monotonic() < end, "files of a video that was removed in mid-run stay"
        time.sleep(0.05)


def test_content_of_what_is_not_made(server):
    running = server.create(num_inference_steps=60)
    answer = server.client.get(f"/v1/videos/{running['id']}/content")
    assert answer.status_code == 409 and answer.headers["retry-after"]
    assert server.client.get(f"/v1/videos/{running['id']}/recipe").status_code == 409
    assert server.client.get(f"/v1/videos/{running['id']}").headers["openai-poll-after-ms"]
    server.client.delete(f"/v1/videos/{running['id']}")


def test_an_idempotency_key_makes_one_video(server):
    body, headers = {"prompt": "a key", "num_inference_steps": 2}, {"idempotency-key": "k1"}
    answers = [server.client.post("/v1/videos", json=body, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 200]
    assert answers[0].json()["id"] == answers[1].json()["id"] and answers[1].headers["idempotency-replayed"]
    other = server.client.post("/v1/videos", json=body | {"seed": 3}, headers=headers)
    assert other.status_code == 422 and other.json()["error"]["code"] == "idempotency_conflict"
    server.wait(answers[0].json()["id"], "completed")


def test_several_seeds_and_pages_of_the_list(server):
    answer = server.client.post("/v1/videos", json={"prompt": "n", "num_inference_steps": 2, "n": 3, "seed": 10}).json()
    assert [video["seed"] for video in answer["data"]] == [10, 11, 12]
    newest = server.client.get("/v1/videos", params={"limit": 2}).json()
    assert [video["seed"] for video in newest["data"]] == [12, 11] and newest["has_more"]
    rest = server.client.get("/v1/videos", params={"limit": 1, "after": newest["last_id"]}).json()
    assert rest["data"][0]["seed"] == 10
    assert server.client.get("/v1/videos", params={"limit": "x"}).status_code == 422
    for video in answer["data"]:
        server.wait(video["id"], "completed")


# --- what was made before


def test_remix_and_recipe(server, made):
    again = server.client.post(f"/v1/videos/{made['id']}/remix", json={}).json()
    other = server.client.post(f"/v1/videos/{made['id']}/remix", json={"prompt": "a blue square", "seed": None}).json()
    recipe = server.client.get(made["recipe_url"]).json()
    same = server.client.post("/v1/videos", json={"recipe": recipe}).json()
    contents = [
        server.client.get(server.wait(video["id"], "completed")["content_url"]).content
        for video in (again, other, same)
    ]
    first = server.client.get(made["content_url"]).content
    frames = [_frames(content) for content in (first, *contents)]
    assert np.array_equal(frames[1], frames[0]) and np.array_equal(frames[3], frames[0])
    assert not np.array_equal(frames[2], frames[0])
    assert other["seed"] != made["seed"] and again["remixed_from_video_id"] == made["id"]


def _frames(data):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "video.mp4").write_bytes(data)
        return read_video(path)[0]


def test_a_recipe_out_of_a_video(server, made):
    video = server.client.get(made["content_url"]).content
    answer = server.client.post("/v1/read-recipe", files={"file": ("x.mp4", video)})
    assert answer.json()["seed"] == 7
    answer = server.client.post("/v1/read-recipe", files={"file": ("x.png", image_bytes())})
    assert answer.status_code == 422


def test_an_estimate_knows_earlier_videos(server, made):
    answer = server.client.post("/v1/videos/estimate", json={"prompt": "x", "num_inference_steps": 50}).json()
    assert answer["seconds"] > 0 and not answer["compile"]
    other = server.client.post("/v1/videos/estimate", json={"prompt": "x", "guidance_scale": 1}).json()
    assert (answer["memory_of"], other["memory_of"]) == ("programs", "weights") and other["compile"]
    assert answer["memory_bytes"] > other["memory_bytes"] > 10**6
    assert server.client.post("/v1/videos/estimate", json={"prompt": "x", "height": 17}).status_code == 422


def test_models_and_openapi(server, made):
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "embedded" and model["inputs"] == ["video"]
    assert model["fields"]["num_frames"]["x-recommended"] == 17
    assert model["fields"]["strength"]["maximum"] == 1 and model["fields"]["strength"]["exclusiveMinimum"] == 0
    assert "image" not in model["fields"] and "ddim" in model["fields"]["scheduler"]["enum"]
    described = server.client.get("/openapi.json").json()
    fields = described["components"]["schemas"]["CreateVideo"]["properties"]
    assert {"prompt", "size", "n", "guidance_scale", "input_reference"} <= set(fields)
    assert set(described["components"]["schemas"]["Video"]["properties"]) == set(made)
    health = server.client.get("/health").json()
    assert health["status"] in ("ready", "busy") and "cpu" in health["device"]


# --- events


def read_events(response, kinds=("completed", "failed")):
    """The events of a stream up to one of these kinds."""
    event = {}
    for line in response.iter_lines():
        if line.startswith(("id: ", "event: ", "data: ")):
            name, _, value = line.partition(": ")
            event[name] = value
        elif not line and "event" in event:
            yield event["event"], int(event["id"]), json.loads(event["data"])
            if event["event"] in kinds:
                return
            event = {}


def test_events_of_a_video(server):
    video = server.create(num_inference_steps=20)
    with server.client.stream("GET", f"/v1/videos/{video['id']}/events", params={"after": 0}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = list(read_events(response))
    kinds = [kind for kind, _, _ in events]
    ids = [number for _, number, _ in events]
    assert kinds[:2] == ["queued", "started"] and kinds[-1] == "completed" and "preview" in kinds
    assert ids == sorted(set(ids))
    steps = [data["step"] for kind, _, data in events if kind == "progress" and data["stage"] == "denoise"]
    assert steps == sorted(steps) and steps[-1] == 20
    assert events[-1][2]["video"]["status"] == "completed"
    assert video["event_id"] >= ids[0]  # what the answer holds is not told again to who follows from there
    # a client that comes back has what it missed, and no more
    after = ids[kinds.index("preview")]
    with server.client.stream("GET", "/v1/events", headers={"last-event-id": str(after)}) as response:
        again = [number for _, number, _ in read_events(response)]
    assert again == [number for number in ids if number > after]
    url = f"/v1/videos/{video['id']}/events"
    assert server.client.get(url, headers={"last-event-id": str(ids[-1])}).status_code == 204
    assert "event: completed" in server.client.get(url, headers={"last-event-id": str(ids[0])}).text  # it was missed


# --- files


@pytest.fixture(scope="module")
def image_server(tmp_path_factory):
    models = ["--model", "embedded", "--model", "embedded-image-to-video"]
    with serving(tmp_path_factory.mktemp("serve") / "gallery", *models, "--max-upload", "8") as server:
        yield server


def test_an_image_makes_a_video_and_its_last_frame_another(image_server):
    client = image_server.client
    file = client.post("/v1/files", files={"file": ("../../beach.png", image_bytes())}).json()
    assert (file["width"], file["height"], file["frames"]) == (64, 64, 1) and file["media_type"] == "image/png"
    how = {"model": "embedded-image-to-video", "prompt": "a red circle", "num_inference_steps": 2}
    video = client.post("/v1/videos", json={**how, "input_reference": {"file_id": file["id"]}}).json()
    form = client.post("/v1/videos", data=how, files={"input_reference": ("a.png", image_bytes())}).json()
    first = image_server.wait(video["id"], "completed")
    image_server.wait(form["id"], "completed")
    extended = client.post("/v1/videos/extensions", json={"video": {"id": first["id"]}, **how})
    assert extended.status_code == 202, extended.text
    image_server.wait(extended.json()["id"], "completed")
    names = [path.name for path in image_server.folder.rglob("*") if path.is_file()]
    assert "beach.png" not in names
    missing = client.post("/v1/videos", json=how)
    assert missing.status_code == 422 and "image" in missing.json()["error"]["message"]
    assert client.delete(f"/v1/files/{file['id']}").json()["deleted"]
    assert client.get(f"/v1/files/{file['id']}").status_code == 404


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.png", b"no image"), ("a.mp4", b"\0" * 100), ("a.png", image_bytes()[:60]), ("a.zip", b"PK\3\4" + b"\0" * 99)],
    ids=["text", "zeros", "cut", "archive"],
)
def test_a_file_of_another_kind(image_server, name, data):
    answer = image_server.client.post("/v1/files", files={"file": (name, data)})
    assert answer.status_code == 415, answer.text
    assert str(image_server.folder) not in answer.text
    assert not list((image_server.folder / "files").glob("*/data*.part"))


def test_a_file_that_is_too_large(image_server):
    answer = image_server.client.post("/v1/files", files={"file": ("a.png", b"\0" * (8 * 2**20 + 1))})
    assert answer.status_code == 413


def test_an_image_with_too_many_pixels(image_server):
    Image.new("1", (9000, 9000)).save(data := io.BytesIO(), "PNG")
    answer = image_server.client.post("/v1/files", files={"file": ("a.png", data.getvalue())})
    assert answer.status_code == 415 and "pixels" in answer.text


# --- restarts


def test_a_killed_server_goes_on(tmp_path):
    """Jobs, their order and their results survive; what was under way goes on from its last steps."""
    server = Server(folder := tmp_path / "gallery")
    done = server.wait(server.create(seed=1)["id"], "completed")
    long = server.create(num_inference_steps=40, seed=2)
    later = server.create(seed=3)
    state = folder / "jobs" / long["id"] / "stages" / "stage2_state.safetensors"
    end = time.monotonic() + 120
    while not state.exists():  # at most once a second
        assert time.monotonic() < end
        time.sleep(0.02)
    last = server.client.get(f"/v1/videos/{long['id']}").headers["etag"]
    server.stop(signal.SIGKILL)
    server = Server(folder)
    try:
        assert server.client.get(done["content_url"]).status_code == 200
        estimate = server.client.post("/v1/videos/estimate", json={"prompt": "x"}).json()
        assert estimate["seconds"] > 0  # by the videos of the gallery
        finished = [server.wait(each["id"], "completed") for each in (long, later)]
        assert "going on after step" in server.log.read_text()
        assert int(server.client.get(f"/v1/videos/{later['id']}").headers["etag"].strip('"')) > int(last.strip('"'))
        with server.client.stream("GET", "/v1/events", headers={"last-event-id": "1"}) as response:
            assert next(read_events(response))[0] == "reset"  # what a client missed is not known any more
        stopped = server.create(num_inference_steps=100)
        server.wait_for_step(stopped["id"], 3)
    finally:
        assert server.stop() == 0
    record = json.loads((folder / "jobs" / stopped["id"] / "job.json").read_text())
    assert record["status"] == "queued" and record["starts"] == 0  # a server that stops counts no start
    alone = Pipeline.from_pretrained()("a red circle", num_inference_steps=40, seed=2, progress=False)
    alone.save(tmp_path / "alone.mp4")
    path = folder / "jobs" / finished[0]["id"] / "video.mp4"
    np.testing.assert_array_equal(read_video(path)[0], read_video(tmp_path / "alone.mp4")[0])


def test_two_servers_and_a_wrong_model(tmp_path):
    with serving(tmp_path / "gallery") as server:
        upload = server.client.post("/v1/files", files={"file": ("a.png", image_bytes())})
        assert upload.status_code == 201  # while the server's other thread imports JAX
        with pytest.raises(AssertionError, match="another server has"):
            Server(tmp_path / "gallery")
        server.client.get("/health")
    second = Server(tmp_path / "other", "--model", str(tmp_path))
    assert second.process.wait(60) == 2 and "Hugging Face layout" in second.log.read_text()


def test_nothing_says_where_the_server_keeps_its_files(image_server):
    """Neither recipes, nor the video itself, nor messages."""
    client, where = image_server.client, str(image_server.folder)
    how = {"model": "embedded-image-to-video", "prompt": "a red circle", "num_inference_steps": 2}
    video = client.post("/v1/videos", data=how, files={"image": ("a.png", image_bytes())}).json()
    made = image_server.wait(video["id"], "completed")
    recipe = client.get(made["recipe_url"]).json()
    assert recipe["settings"]["image"][0]["file"].startswith("file_")
    texts = [json.dumps(recipe), client.get(made["content_url"]).content.decode("latin-1"), json.dumps(made)]
    damaged = client.get(made["content_url"]).content.replace(b'"seed": ', b'"seed":{', 1)
    texts.append(client.post("/v1/read-recipe", files={"file": ("a.mp4", damaged)}).text)
    (image_server.folder / "adapters").mkdir(exist_ok=True)
    (image_server.folder / "adapters" / "bad.safetensors").write_bytes(b"no adapter")
    texts.append(client.post("/v1/videos/estimate", json={"prompt": "x", "lora": [{"name": "bad"}]}).text)
    assert not [text[:300] for text in texts if where in text]


def test_an_extension_with_a_key_and_files_of_what_is_no_video(image_server):
    client = image_server.client
    how = {"model": "embedded-image-to-video", "prompt": "a red circle", "num_inference_steps": 2}
    first = client.post("/v1/videos", data=how, files={"image": ("a.png", image_bytes())}).json()
    image_server.wait(first["id"], "completed")
    body, headers = {"video": {"id": first["id"]}, **how}, {"idempotency-key": "extended"}
    answers = [client.post("/v1/videos/extensions", json=body, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 200], answers[-1].text
    assert answers[0].json()["id"] == answers[1].json()["id"]
    used = client.get(f"/v1/videos/{answers[0].json()['id']}").json()
    image_server.wait(used["id"], "completed")
    files = len(list((image_server.folder / "files").iterdir()))
    estimate = {**how, "prompt": "x"}
    assert (
        client.post("/v1/videos/estimate", data=estimate, files={"image": ("a.png", image_bytes())}).status_code == 200
    )
    refused = client.post("/v1/videos", data={**how, "height": "17"}, files={"image": ("a.png", image_bytes())})
    assert refused.status_code == 422
    assert len(list((image_server.folder / "files").iterdir())) == files  # what makes no video is not kept


# --- strangers


def test_pages_of_others_change_nothing(server):
    post = server.client.post
    assert post("/v1/videos", json={"prompt": "x"}, headers={"origin": "http://evil.example"}).status_code == 403
    assert post("/v1/videos", json={"prompt": "x"}, headers={"origin": "null"}).status_code == 403
    assert server.client.get("/v1/videos", headers={"host": "rebound.example"}).status_code == 403
    assert server.client.get("/v1/videos", headers={"host": "["}).status_code == 403
    answer = server.client.get("/health")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff" and "access-control-allow-origin" not in answer.headers


def test_a_password(tmp_path):
    (tmp_path / "password").write_text("correct horse\n")
    with serving(tmp_path / "gallery", "--password-file", str(tmp_path / "password")) as server:
        get = server.client.get
        assert get("/health").status_code == 200 and get("/").status_code == 200
        assert get("/v1/videos").status_code == 401
        assert get("/v1/videos", headers={"authorization": "Bearer correct horse"}).status_code == 200
        statuses = [get("/v1/videos", headers={"authorization": f"Bearer {i}"}).status_code for i in range(1000)]
        assert set(statuses[:5]) == {401} and set(statuses[6:]) <= {401, 429} and statuses.count(429) > 900
        time.sleep(1.1)
        login = server.client.post("/login", json={"password": "correct horse"})
        assert "HttpOnly" in login.headers["set-cookie"] and "SameSite=Strict" in login.headers["set-cookie"]
        assert get("/v1/videos").status_code == 200  # with the cookie
        assert httpx.get(f"{server.url}/v1/videos", cookies={"cogvideox_session": "x"}).status_code == 401


def test_streams_that_never_read_and_requests_in_between(server):
    """300 clients that open a stream and never read it leave the server and its device free."""
    address = server.client.base_url.host, server.client.base_url.port
    streams = []
    for _ in range(300):
        streams.append(stream := socket.create_connection(address))
        stream.sendall(f"GET /v1/events HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n\r\n".encode())
    try:
        video = server.create(num_inference_steps=10)
        faults = []

        def ask():
            with httpx.Client(base_url=server.url) as client:
                for _ in range(200):
                    if client.get("/health").status_code != 200:
                        faults.append(1)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not faults
        server.wait(video["id"], "completed")
    finally:
        for stream in streams:
            stream.close()
    assert server.client.get("/health").status_code == 200


KINDS_OF_REQUESTS = {
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n": 200,
    b"GET /v1/videos?limit=1 HTTP/1.1\r\nHost: localhost\r\n\r\n": 200,
    b"GET /v1/videos/video_no HTTP/1.1\r\nHost: localhost\r\n\r\n": 404,
    b"GET /health HTTP/1.1\r\nHost: rebound.example\r\n\r\n": 403,
    b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n{": 422,
}


@pytest.mark.parametrize("seconds", [1, pytest.param(10, marks=pytest.mark.further)])
def test_a_thousand_requests_a_second(server, seconds):
    """Each has its answer, and the device goes on meanwhile."""
    video = server.create(num_inference_steps=100)
    address, connections, faults = (server.client.base_url.host, server.client.base_url.port), 20, []
    kinds = list(KINDS_OF_REQUESTS.items())

    def ask(first):
        with socket.create_connection(address, timeout=60) as connection, connection.makefile("rb") as answers:
            start = time.monotonic()
            for i in range(1000 * seconds // connections):
                time.sleep(max(0.0, start + i * connections / 1000 - time.monotonic()))
                request, expected = kinds[(first + i) % len(kinds)]
                connection.sendall(request)
                status, length = int(answers.readline().split()[1]), 0
                while (line := answers.readline()) != b"\r\n":
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = answers.read(length)
                if status != expected:
                    faults.append((request, status, body))

    threads = [threading.Thread(target=ask, args=[i]) for i in range(connections)]
    for thread in threads:
        thread.start()
    steps = set()
    while any(thread.is_alive() for thread in threads):
        steps.add(server.client.get(f"/v1/videos/{video['id']}").json()["progress"])
        time.sleep(0.1)
    assert not faults
    assert len(steps) > 2, steps
    assert server.client.delete(f"/v1/videos/{video['id']}").json()["deleted"]


@pytest.mark.further  # a minute
def test_two_hundred_videos_do_not_grow_the_server(tmp_path):
    resident = lambda: psutil.Process(server.process.pid).memory_info().rss / 2**20  # noqa: E731
    sizes = {}
    with serving(tmp_path / "gallery", "--max-queue", "8") as server:
        for i in range(1, 201):
            server.wait(server.create(num_inference_steps=1, seed=i)["id"], "completed")
            if i in (50, 200):
                sizes[i] = resident()
    assert sizes[200] < sizes[50] + 8, sizes  # MiB; the records of 150 jobs are some of it

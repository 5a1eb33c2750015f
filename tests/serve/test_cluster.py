"""`generate --prompt-file --ray` and `serve --ray` over a real cluster of this machine."""

import functools
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import psutil
import pytest
from PIL import Image

from cogvideox_flax import sharding
from cogvideox_flax.cli import main
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.jobs import JobFolder, JobRecord
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.generate.store import run_dir_lock
from cogvideox_flax.io.video import read_metadata, read_video
from cogvideox_flax.serve import actors, group
from cogvideox_flax.serve import cluster as serve
from cogvideox_flax.serve.actors import Actor
from cogvideox_flax.serve.group import WorkerSize
from cogvideox_flax.serve.maker import Stopped
from cogvideox_flax.serve.matching import Ready, Shape, match
from cogvideox_flax.serve.worker import Lost
from tests.support.servers import ROOT, Server, serving

ray = pytest.importorskip("ray")

LINES = 12

QUICK = "--steps", "4", "--num-frames", "9", "--force"

DIED = ray.exceptions.ActorDiedError()

TASK_FAULT = ray.exceptions.RayTaskError("make", "", KeyError("x"), proctitle="p", pid=1, ip="0")


@pytest.fixture(scope="module")
def cluster():
    """A cluster of one machine with two cores; `add_node` adds more."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        own = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 100 * 2**20})
        yield own
        ray.shutdown()
        own.shutdown()


@pytest.fixture
def tpu_slice(cluster):
    """Two hosts of one slice, as Ray describes them; their chip is one CPU device of JAX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", re.sub(r"(device_count)=\d+", r"\1=1", os.environ["XLA_FLAGS"]))
        labels = [{group.SLICE: "slice", group.HOST: str(i), group.TOPOLOGY: "1x2"} for i in range(2)]
        more = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "resources": {"TPU": 1}}
        nodes = [cluster.add_node(labels=each, **more) for each in labels]
    yield nodes
    for node in nodes:
        cluster.remove_node(node)


def workers(kind, method="make"):
    """The processes of workers, "Worker" of a queue or "Actor" of a server, that make a video."""
    named = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    return [process for process in named if process.info["cmdline"][0].startswith(f"ray::{kind}.{method}")]


def start(cluster, prompts, out, *how):
    command = [sys.executable, "-m", "cogvideox_flax", "generate", "--prompt-file", str(prompts), "--out", str(out)]
    command += ["--ray", cluster.address, *how]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process):
    end = time.monotonic() + 240
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=60)
        time.sleep(0.1)


def test_a_queue_over_a_cluster(cluster, tmp_path):
    """Twelve lines, a worker killed in mid-run, one that joins late, the driver killed and started again: every video
    is there once, as one machine makes it."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "clips"
    shapes = "circle", "square", "triangle"
    lines = [f"a large {colour} {shape}" for colour in ("red", "green", "blue", "yellow") for shape in shapes]
    prompts.write_text("\n".join(lines))
    made = lambda: sorted(out.glob("*.mp4"))  # noqa: E731
    driver = start(cluster, prompts, out, *QUICK, "--ray-worker", "CPU=1")
    wait_for(lambda: len(made()) >= 2, driver)
    victim = workers("Worker")[0]
    victim.send_signal(signal.SIGKILL)
    cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    wait_for(lambda: len(made()) >= 5, driver)
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=60)
    before = {path: path.stat().st_mtime_ns for path in made()}
    driver = start(cluster, prompts, out, *QUICK, "--ray-worker", "CPU=1")
    printed, messages = driver.communicate(timeout=300)
    assert driver.returncode == 0, messages
    assert len(made()) == LINES and f"{len(before)} of {LINES} videos are there already" in messages
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())  # none was made again
    assert {Path(line) for line in printed.split()} == set(made()) - set(before)
    assert [read_metadata(path)["prompt"] for path in made()] == lines
    alone = tmp_path / "alone"
    prompts.write_text("\n".join(lines[:3]))
    assert main(["generate", "--prompt-file", str(prompts), "--out", str(alone), *QUICK, "--quiet"]) == 0
    for path in sorted(alone.glob("*.mp4")):
        np.testing.assert_array_equal(read_video(out / path.name)[0], read_video(path)[0])
    assert not (tmp_path / "clips.stages").exists() or not list((tmp_path / "clips.stages").rglob("*.safetensors"))


def test_a_video_over_the_hosts_of_a_slice(cluster, tpu_slice, tmp_path, monkeypatch):
    """Its processes are found by the labels of the slice; the video is that of one process on the same mesh."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (tmp_path / "prompts.txt").write_text("a red circle")
    how = ["--prompt-file", str(tmp_path / "prompts.txt"), *QUICK, "--mesh", "1,2,1"]
    for name, more in {"together": ["--ray", cluster.address], "alone": []}.items():
        assert main(["generate", *how, "--out", str(tmp_path / name), "--quiet", *more]) == 0
    together, alone = (read_video(next((tmp_path / name).glob("*.mp4")))[0] for name in ("together", "alone"))
    np.testing.assert_array_equal(together, alone)


@pytest.mark.further
def test_a_slice_loses_a_process(cluster, tpu_slice, tmp_path):
    """In mid-run; all processes of the worker end, others begin, and the video is that of an undisturbed run."""
    prompts, out, steps = tmp_path / "prompts.txt", tmp_path / "clips", 40
    prompts.write_text("a red circle\na blue square")
    driver = start(cluster, prompts, out, "--steps", str(steps), "--mesh", "1,2,1", "--hosts-per-worker", "2")
    wait_for(lambda: list(out.glob("*0001*.mp4")) and workers("Worker", "follow"), driver)
    (first,), (victim,) = workers("Worker"), workers("Worker", "follow")
    victim.send_signal(signal.SIGKILL)
    first.wait(30)
    _, messages = driver.communicate(timeout=300)
    assert driver.returncode == 0 and messages.count("a worker was lost while it made") == 1, messages
    mesh = sharding.make_mesh(1, 2, 1)
    alone = Pipeline.from_pretrained(mesh=mesh)("a blue square", num_inference_steps=steps, progress=False)
    alone.save(own := tmp_path / "own.mp4")
    np.testing.assert_array_equal(read_video(next(out.glob("*0002*.mp4")))[0], read_video(own)[0])


@pytest.mark.further
def test_a_server_over_the_hosts_of_a_slice(cluster, tpu_slice, tmp_path):
    """A cancelled job leaves the processes in step; a lost process 0 costs the server no other job."""
    with serving(tmp_path / "gallery", "--model", "embedded", "--ray", cluster.address, "--mesh", "1,2,1") as server:
        assert "1 TPU for each worker" in server.wait_until_ready()["device"]
        first, second = server.create(num_inference_steps=1000), server.create(seed=2)
        server.wait_for_step(first["id"], 3)
        assert server.client.post(f"/v1/videos/{first['id']}/cancel").status_code == 202
        assert server.wait(first["id"], "failed")["error"]["code"] == "cancelled"
        server.wait(second["id"], "completed")
        assert "worker" not in server.log.read_text()
        third = server.create(num_inference_steps=60)
        server.wait_for_step(third["id"], 3)
        workers("Actor")[0].send_signal(signal.SIGKILL)
        server.wait(third["id"], "completed", seconds=240)
        assert server.log.read_text().count("a worker was lost while it made") == 1
    alone = Pipeline.from_pretrained(mesh=sharding.make_mesh(1, 2, 1))
    alone("a red circle", num_inference_steps=2, seed=2, progress=False).save(own := tmp_path / "own.mp4")
    made = tmp_path / "gallery" / "jobs" / second["id"] / "video.mp4"
    np.testing.assert_array_equal(read_video(made)[0], read_video(own)[0])


@pytest.mark.further
def test_a_server_over_a_cluster(cluster, tmp_path):
    """Two videos at once, with events and previews; one is cancelled, a worker is killed, a prompt is at fault."""
    models = ["--model", "embedded", "--model", "embedded-image-to-video"]
    how = ["--ray", cluster.address, "--ray-worker", "CPU=1"]
    with serving(tmp_path / "gallery", *models, *how) as server:
        first = server.create(num_inference_steps=1000)
        server.wait_for_step(first["id"], 1)
        second = server.create(num_inference_steps=120, seed=2)
        server.wait_for_step(second["id"], 3)
        assert len(workers("Actor")) == 2 and "Ray cluster" in server.client.get("/health").json()["device"]
        assert server.client.post(f"/v1/videos/{first['id']}/cancel").status_code == 202
        stopped = server.wait(first["id"], "failed", seconds=10)
        assert stopped["error"]["code"] == "cancelled" and "stage denoise" in stopped["error"]["message"]
        wait_for(lambda: len(workers("Actor")) == 1, server.process)
        workers("Actor")[0].send_signal(signal.SIGKILL)
        Image.new("RGB", (64, 64), (200, 30, 30)).save(image := io.BytesIO(), "PNG")
        fields = {"model": "embedded-image-to-video", "prompt": "it moves", "num_inference_steps": 2}
        files = {"image": ("a.png", image.getvalue())}
        at_fault = server.client.post("/v1/videos", data=fields, files=files).json()
        upload = tmp_path / "gallery" / "files" / at_fault["options"]["image"]["file_id"] / "data"
        upload.write_bytes(b"no image any more")
        with server.client.stream("GET", f"/v1/videos/{second['id']}/events", params={"after": 0}) as response:
            kinds = [line.removeprefix("event: ") for line in response.iter_lines() if line.startswith("event: ")]
        assert kinds.count("started") == 2 and kinds.count("queued") == 2 and kinds[-1] == "completed"
        assert "preview" in kinds and "progress" in kinds
        assert server.wait(at_fault["id"], "failed")["error"]["code"] == "invalid_input"
        assert server.client.get(f"/v1/videos/{second['id']}/content?variant=preview").status_code == 200
    assert "a worker was lost while it made" in server.log.read_text()
    assert not list((tmp_path / "gallery").rglob("stages"))
    jobs = tmp_path / "gallery" / "jobs"
    alone = Pipeline.from_pretrained()("a red circle", num_inference_steps=120, seed=2, progress=False)
    alone.save(own := tmp_path / "own.mp4")
    np.testing.assert_array_equal(read_video(jobs / second["id"] / "video.mp4")[0], read_video(own)[0])


def test_the_files_of_a_job_on_their_way(tmp_path):
    """Uploads lie under their ids at the worker; the video comes back with the facts; errors are told."""

    class StandIn:
        def make(self, model, options, folder, stages, is_stopped):
            path = Path(options["image"])
            assert path.parent.name == "file_id" and path.read_bytes() == b"an image" and not is_stopped()
            (folder / "video.mp4").write_bytes(b"a video")
            yield "made", {"recipe": {}}
            actor.stop("another call")
            assert not is_stopped()
            actor.stop("call")
            if is_stopped():
                raise Stopped

    actor = object.__new__(Actor)
    actor.maker, actor._stopping = StandIn(), ""
    job = "call", "embedded", {"image": "/gallery/files/file_id/data"}, {"image": b"an image"}, tmp_path / "stages"
    assert list(actor.make(*job)) == [("made", {"recipe": {}, "content": b"a video"}), ("stopped", {})]
    with run_dir_lock(tmp_path / "stages"):
        ((kind, data),) = actor.make(*job)
    assert kind == "busy" and "another run is at work" in data["reason"]


@pytest.mark.parametrize(
    ("answers", "raised", "is_alive"),
    [
        ([DIED], Stopped, False),  # while it had nothing to do: the job is another's, and no start of it counts
        ([None, ("progress", {}), DIED], Lost, False),
        ([None, TASK_FAULT], KeyError, True),
        ([None, ("refused", {"reason": "no"})], InputError, True),
        ([None, ("stopped", {})], Stopped, True),
        ([None, ("busy", {})], Stopped, True),
    ],
    ids=["died idle", "died at work", "program", "refused", "stopped", "busy"],
)
def test_how_a_job_of_a_server_ends(answers, raised, is_alive, tmp_path, monkeypatch):
    monkeypatch.setattr(actors, "LOOK_EVERY_S", 0.0)
    script = list(answers)

    def get(_):
        if isinstance(answer := script.pop(0), Exception):
            raise answer
        return answer

    method = SimpleNamespace(remote=lambda *args, **options: itertools.repeat("an answer"))
    first = SimpleNamespace(ready=method, stop=method)
    processes = SimpleNamespace(first=first, others=(), make=method.remote, reason=str)
    stand_in = SimpleNamespace(get=get, wait=lambda tasks, timeout: (tasks, []), exceptions=ray.exceptions)
    worker = SimpleNamespace(jobs=JobFolder(tmp_path / "jobs"), stopping=threading.Event())
    slot = actors._Slot(stand_in, processes, worker)
    with pytest.raises(raised):
        list(slot.make(JobRecord("video_x", 1, "embedded", {"prompt": "x"}, {}, 0.0), lambda: False))
    assert slot.is_alive == is_alive and not script


A, B = Shape("a"), Shape("b")

A_ADAPTED = Shape("a", '["x"]')


@pytest.mark.parametrize(
    ("made", "jobs", "pairs"),
    [
        ([[], [A]], [A], [(1, 0)]),  # not the first idle worker, but the one that has it compiled
        ([[A]], [B, A], [(0, 1)]),
        ([[A], []], [B, A], [(0, 1), (1, 0)]),
        ([[A], [B]], [B, A], [(1, 0), (0, 1)]),
        ([[A]], [B], [(0, 0)]),  # none waits for a busy worker while another is idle
        ([[], []], [A, A, A], [(0, 0), (1, 1)]),
        ([[A], [A_ADAPTED]], [A_ADAPTED, A], [(1, 0), (0, 1)]),
        ([[], [A_ADAPTED]], [A], [(1, 0)]),  # adding adapters takes less time than compiling
        ([[A_ADAPTED, A], [A, A_ADAPTED]], [A_ADAPTED], [(1, 0)]),  # the last adapters are those in the model
        ([], [A], []),
    ],
)
def test_who_makes_what(made, jobs, pairs):
    idle = [Ready() for _ in made]
    for ready, shapes in zip(idle, made, strict=True):
        for shape in shapes:
            ready.add(shape)
    assert match(idle, jobs) == pairs


def test_jobs_of_a_server_go_where_their_programs_are_compiled(tmp_path):
    """Three idle workers, of which the last has made the first job's shape; none is left idle."""
    with JobFolder(tmp_path / "jobs") as jobs:
        cluster, stop, begun = actors.Cluster("local", WorkerSize()), threading.Event(), []
        slots = [actors._Slot(None, None, None) for _ in range(3)]
        facts = {"programs": "a"}, {"programs": "b"}
        slots[2].ready.add(actors._shape(JobRecord("x", 1, "m", {}, facts[0], 0.0)))

        def wait(slot):
            begun.append((slot, jobs.begin(stop, None, functools.partial(cluster._choose, slot))))

        threads = [threading.Thread(target=wait, args=[slot]) for slot in slots]
        for thread in threads:
            thread.start()
        while len(cluster._idle) < 3:
            time.sleep(0.01)
        added = [jobs.add("m", {}, facts[0]), jobs.add("m", {}, facts[1]), jobs.add("m", {}, facts[1])]
        for thread in threads:
            thread.join(10)
        assert {job.id for _, job in begun} == {job.id for job in added}
        assert next(job.id for slot, job in begun if slot is slots[2]) == added[0].id


def test_a_server_without_a_cluster(tmp_path):
    server = Server(tmp_path / "gallery", "--ray", "127.0.0.1:1")
    assert server.process.wait(60) == 2 and "there is no Ray cluster at 127.0.0.1:1" in server.log.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["a red circle", "--ray", "local"], "--ray is of a --prompt-file"),
        (["--prompt-file", "p.txt", "--ray", "local", "--batch", "2"], "--batch cannot be given with --ray"),
        (["--prompt-file", "p.txt", "--ray", "local", "--out", "x/%04d.png"], "as one file"),
        (["--prompt-file", "p.txt", "--ray", "local", "--ray-worker", "CPU"], "such as CPU=8,GPU=1"),
        (["--prompt-file", "p.txt", "--ray", "local", "--hosts-per-worker", "0"], "is 0; expected 1 or more"),
        (["a red circle", "--hosts-per-worker", "2"], "--ray-worker and --hosts-per-worker are of --ray"),
        (["--prompt-file", "p.txt", "--ray", "127.0.0.1:1"], "there is no Ray cluster"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (tmp_path / "p.txt").write_text("a red circle")
    assert main(["generate", *options]) == 2
    assert words in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["p.txt"]


@dataclass(eq=False)
class Task:
    actor: object
    answer: object
    number: int = field(default_factory=itertools.count().__next__)


class SimulatedRay:
    """What the driver uses of Ray. Tasks end in the order in which they began.

    machines: the resources of each.
    opens, makes: what the tasks answer in turn: an error that is raised, or a value. A video where they end.
    """

    exceptions = ray.exceptions

    def __init__(self, machines, opens=(), makes=()):
        self.machines, self.opens, self.makes = machines, list(opens), list(makes)
        self.actors, self.killed, self.freeing, self.looks = [], [], [], 0
        self.taken = 0  # by others, of the first machine

    def nodes(self):
        return [{"Alive": True, "Resources": machine} for machine in self.machines]

    def free(self, index):
        mine = [actor.needs for actor in self.actors + self.freeing if actor.machine == index]
        free = {name: have - sum(needs.get(name, 0) for needs in mine) for name, have in self.machines[index].items()}
        return free | ({"CPU": free.get("CPU", 0) - self.taken} if index == 0 else {})

    def available_resources(self):
        self.looks += 1
        assert self.looks < 200, "the driver waits for ever"
        if self.looks % 3 == 0:  # what a killed worker held is free some time later
            self.freeing, self.taken = [], 0
        every = [self.free(index) for index in range(len(self.machines))]
        return {name: sum(free.get(name, 0) for free in every) for free in every for name in free}

    def remote(self, worker):
        assert worker is serve.Worker
        return self

    def options(self, max_restarts, resources, num_cpus=0, num_gpus=0):
        self.next_needs = {"CPU": num_cpus, "GPU": num_gpus, **resources}
        simulated = self

        class Method:
            def __init__(self, actor, script, otherwise):
                self.actor, self.script, self.otherwise = actor, script, otherwise

            def remote(self, *args):
                return Task(self.actor, self.script.pop(0) if self.script else self.otherwise)

        class Actor:
            def __init__(self):
                self.needs, self.machine = simulated.next_needs, None
                self.ready = Method(self, simulated.opens, None)
                self.make = Method(self, simulated.makes, (b"video", {}))
                self.make.options = lambda: self.make

        class Class:
            def remote(self, *args):
                simulated.actors.append(Actor())
                return simulated.actors[-1]

        return Class()

    def wait(self, tasks, num_returns, timeout):
        self.looks += 1
        assert tasks and self.looks < 200, "the driver waits for ever"
        for actor in self.actors:
            if actor.machine is None:
                fits = lambda index: all(self.free(index).get(name, 0) >= n for name, n in actor.needs.items())  # noqa: E731,B023
                actor.machine = next((index for index in range(len(self.machines)) if fits(index)), None)
        running = [task for task in tasks if task.actor.machine is not None]
        done = sorted(running, key=lambda task: task.number)[:num_returns]
        return done, [task for task in tasks if task not in done]

    def get(self, task):
        if isinstance(task.answer, Exception):
            raise task.answer
        return task.answer

    def kill(self, actor, no_restart):
        assert no_restart
        self.actors.remove(actor)
        self.killed.append(actor)
        self.freeing.append(actor)
        raise ray.exceptions.ActorHandleNotFoundError("gone")


def drive(simulated, lines, needs, monkeypatch, tmp_path, hosts=None, shapes="a"):
    """Run the driver: the names of what it made, and of what it refused with the reasons."""
    monkeypatch.setattr(serve, "LOOK_EVERY_S", 0.0)
    made, refused = [], {}
    shapes_of = zip(range(lines), itertools.cycle(shapes), strict=False)
    jobs = [serve.ClusterJob(f"line-{i}", Shape(shape), {}, tmp_path / f"{i}.mp4") for i, shape in shapes_of]
    take = lambda job, video, recipe: made.append(job.name)  # noqa: E731
    refuse = lambda job, reason: refused.update({job.name: reason})  # noqa: E731
    serve.Driver(simulated, jobs, ModelChoice(None, "demo"), {}, WorkerSize(needs, hosts), tmp_path, take, refuse).run()
    return sorted(made), refused


def cannot_open():
    words = "Traceback\n  ...\nInputError: no such model"
    fault = ray.exceptions.RayTaskError("Worker", words, InputError("no such model"), proctitle="p", pid=1, ip="0")
    return ray.exceptions.ActorDiedError(fault)


@pytest.mark.parametrize(
    "lost",
    [
        DIED,
        ray.exceptions.NodeDiedError("gone"),
        ray.exceptions.OutOfMemoryError("gone"),
        ray.exceptions.ObjectLostError("00", None, ""),
        ray.exceptions.OwnerDiedError("00", None, ""),
        ray.exceptions.RaySystemError("gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_only_worker_is_lost(lost, monkeypatch, tmp_path):
    """Its room is free only some time later; then another worker makes its video."""
    simulated = SimulatedRay([{"CPU": 1.0}], makes=[lost])
    assert drive(simulated, 2, {"CPU": 1.0}, monkeypatch, tmp_path) == (["line-0", "line-1"], {})
    assert len(simulated.killed) == 1


def test_a_job_that_loses_workers_and_a_fault_of_the_program(monkeypatch, tmp_path):
    simulated = SimulatedRay([{"CPU": 1.0}], makes=[DIED] * 4 + [TASK_FAULT])
    made, refused = drive(simulated, 3, {"CPU": 1.0}, monkeypatch, tmp_path)
    assert made == ["line-2"] and "lost 4 workers" in refused["line-0"] and refused["line-1"] == "KeyError: 'x'"
    assert len(simulated.killed) == 4  # a fault of the program leaves its worker alive


class StandInGroup:
    """A worker of two processes. answers: what process 0 answers in turn, an error or a value."""

    answers: ClassVar[list] = []
    killed: ClassVar[list] = []
    workers: ClassVar[list] = []
    others = (None,)

    def __init__(self, simulated, place, needs, process, *args):
        self.place, self.first = place, SimpleNamespace(ready=SimpleNamespace(remote=lambda: Task(self, None)))
        self.machine, self.made = 0, []
        self.workers.append(self)

    def make(self, options, folder, suffix):
        self.made.append(folder.name)
        return Task(self, self.answers.pop(0))

    def kill(self):
        self.killed.append(self)


def test_a_group_whose_processes_may_be_out_of_step(monkeypatch, tmp_path):
    """After a job that was not made, it makes way for another one."""
    monkeypatch.setattr(serve, "Group", StandInGroup)
    monkeypatch.setattr(StandInGroup, "answers", [(b"video", {}), TASK_FAULT, "no", (b"video", {}), (b"video", {})])
    monkeypatch.setattr(StandInGroup, "killed", [])
    made, refused = drive(SimulatedRay([{"CPU": 1.0}] * 2), 5, {"CPU": 1.0}, monkeypatch, tmp_path, hosts=2)
    assert made == ["line-0", "line-3", "line-4"] and refused == {"line-1": "KeyError: 'x'", "line-2": "no"}
    assert len(StandInGroup.killed) == 2


def test_a_queue_goes_where_its_programs_are_compiled(monkeypatch, tmp_path):
    """Two workers, and lines of two shapes in turn: each worker makes those of one."""
    monkeypatch.setattr(serve, "Group", StandInGroup)
    monkeypatch.setattr(StandInGroup, "answers", [(b"video", {})] * 6)
    monkeypatch.setattr(StandInGroup, "workers", [])
    made, _ = drive(SimulatedRay([{"CPU": 1.0}] * 2), 6, {"CPU": 1.0}, monkeypatch, tmp_path, shapes="ab")
    assert made == [f"line-{i}" for i in range(6)]
    assert [each.made for each in StandInGroup.workers] == [[f"line-{i + j}" for i in (0, 2, 4)] for j in (0, 1)]


def host(slice_name, number, topology="4x4", chips=4):
    labels = {group.SLICE: slice_name, group.HOST: str(number), group.TOPOLOGY: topology}
    return {"Resources": {"TPU": chips}, "Labels": labels}


def machine(**resources):
    return {"Resources": resources, "Labels": {}}


@pytest.mark.parametrize(
    ("nodes", "size", "hosts_of_each"),
    [
        ([machine(CPU=4), machine(CPU=1)], WorkerSize({"CPU": 2}), [1, 1]),
        ([machine(GPU=2), machine(GPU=2), machine(GPU=1)], WorkerSize({"GPU": 1}, 2), [2, 2]),
        ([machine(GPU=8), machine(GPU=1)], WorkerSize({"GPU": 1}, 2), [2]),  # never two processes on one host
        ([host("a", i) for i in range(4)], WorkerSize({"TPU": 4}), [4]),
        ([host("a", i) for i in range(4)], WorkerSize({"TPU": 4}, 4), [4]),
        ([host("a", i) for i in range(4)], WorkerSize({"TPU": 4}, 2), [2, 2]),
        ([host("a", i) for i in range(4)], WorkerSize({"TPU": 4}, 1), [1] * 4),
        ([host("a", i) for i in range(3)], WorkerSize({"TPU": 4}), []),  # one is not there, and JAX would wait for it
        ([host("a", i) for i in range(4)] + [host("b", i) for i in range(4)], WorkerSize({"TPU": 4}), [4, 4]),
        ([host("a", 0, "2x4", 8), host("b", 0, "2x4", 8)], WorkerSize({"TPU": 8}), [1, 1]),
        ([host("a", i) for i in range(4)], WorkerSize({"TPU": 2}), [1] * 8),  # a part of a host is no part of a slice
        ([host("a", i) for i in range(4)], WorkerSize({"CPU": 1}), []),
    ],
)
def test_places(nodes, size, hosts_of_each):
    assert list(map(len, group.places(nodes, size))) == hosts_of_each


def test_the_hosts_of_a_slice_keep_their_numbers():
    nodes = [host("a", 2), host("a", 0), host("a", 3), host("a", 1)]
    (place,) = group.places(nodes, WorkerSize({"TPU": 4}))
    assert place == tuple({group.SLICE: "a", group.HOST: str(i)} for i in range(4))


def test_a_worker_lies_on_one_machine(monkeypatch, tmp_path):
    with pytest.raises(InputError, match=r"no machine .* which takes 2 CPU; they have 1 CPU and 1 CPU"):
        drive(SimulatedRay([{"CPU": 1.0}, {"CPU": 1.0}]), 2, {"CPU": 2.0}, monkeypatch, tmp_path)
    with pytest.raises(InputError, match="takes 1 chip; they have 1 CPU"):
        drive(SimulatedRay([{"CPU": 1.0, "node:1": 1.0}]), 2, {"chip": 1.0}, monkeypatch, tmp_path)
    simulated = SimulatedRay([{"CPU": 3.0}, {"CPU": 3.0}])
    assert len(drive(simulated, 9, {"CPU": 2.0}, monkeypatch, tmp_path)[0]) == 9
    assert len(simulated.actors) == 2  # six cores are room for three only where they lie together


def test_room_that_others_have_taken_is_waited_for(monkeypatch, tmp_path, caplog):
    simulated = SimulatedRay([{"CPU": 1.0}])
    simulated.taken = 1
    assert drive(simulated, 1, {"CPU": 1.0}, monkeypatch, tmp_path)[0] == ["line-0"]
    assert caplog.text.count("no free room for a worker, which takes 1 CPU") == 1


def test_a_worker_that_cannot_open_the_model_is_left_out(monkeypatch, tmp_path, caplog):
    simulated = SimulatedRay([{"CPU": 3.0}], opens=[cannot_open(), cannot_open(), None])
    assert len(drive(simulated, 3, {"CPU": 1.0}, monkeypatch, tmp_path)[0]) == 3
    assert caplog.text.count("cannot open the model and is left out: InputError: no such model") == 2
    assert len(simulated.killed) == 2


def test_no_worker_can_open_the_model(monkeypatch, tmp_path):
    simulated = SimulatedRay([{"CPU": 1.0}], opens=[cannot_open()] * 9)
    with pytest.raises(InputError, match="workers of the cluster cannot open the model: InputError: no such model"):
        drive(simulated, 3, {"CPU": 1.0}, monkeypatch, tmp_path)
    assert len(simulated.killed) == serve.MAX_UNOPENED
    simulated = SimulatedRay([{"CPU": 4.0}], opens=[cannot_open()] * 3 + [None])  # the slowest of four opens it
    assert len(drive(simulated, 4, {"CPU": 1.0}, monkeypatch, tmp_path)[0]) == 4


def test_a_busy_run_directory(monkeypatch, tmp_path):
    """A job whose lost worker is still at work there waits for it; another run's is refused, as on one machine."""
    simulated = SimulatedRay([{"CPU": 1.0}], makes=[DIED, serve.Busy("busy"), serve.Busy("busy")])
    assert drive(simulated, 1, {"CPU": 1.0}, monkeypatch, tmp_path) == (["line-0"], {})
    simulated = SimulatedRay([{"CPU": 1.0}], makes=[serve.Busy("busy")])
    assert drive(simulated, 1, {"CPU": 1.0}, monkeypatch, tmp_path) == ([], {"line-0": "busy"})
    worker = object.__new__(serve.Worker)
    worker.model = ModelChoice(None, "demo")
    worker.pipe = Pipeline.from_pretrained(None)
    with run_dir_lock(tmp_path / "run"):
        said = worker.make({"prompt": "a red circle"}, tmp_path / "run", ".mp4")
    assert isinstance(said, serve.Busy) and "another run is at work" in said

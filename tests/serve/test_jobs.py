"""The durable queue in a folder, without a server."""

import asyncio
import threading

import pytest

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.jobs import MAX_STARTS, JobFolder
from cogvideox_flax.serve.events import PENDING, EventLog

STOP = threading.Event()


def test_jobs_are_begun_in_order_and_survive(tmp_path):
    with JobFolder(tmp_path) as jobs:
        first, second = (jobs.add("m", {"prompt": name}, {}, note=name) for name in "ab")
        assert [jobs.position(job.id) for job in (first, second)] == [0, 1]
        assert jobs.begin(STOP).id == first.id
        jobs.complete(first.id, width=64)
    with JobFolder(tmp_path) as jobs:
        assert [job.status for job in jobs.all()] == ["completed", "queued"]
        assert jobs.get(first.id).facts == {"width": 64} and jobs.get(second.id).client == {"note": "b"}
        assert jobs.position(first.id) is None and jobs.position(second.id) == 0
        assert jobs.add("m", {}, {}).order == 3


def test_a_job_that_ends_its_process_too_often_fails_and_the_rest_goes_on(tmp_path):
    with JobFolder(tmp_path) as jobs:
        bad, good = jobs.add("m", {}, {}), jobs.add("m", {}, {})
    for _ in range(MAX_STARTS):  # a process that is killed leaves its folder so
        with JobFolder(tmp_path) as jobs:
            assert jobs.begin(STOP).id == bad.id
    with JobFolder(tmp_path) as jobs:
        assert jobs.get(bad.id).error["code"] == "process_ended"
        assert jobs.begin(STOP).id == good.id


def test_a_job_that_is_left_in_order_is_no_start(tmp_path):
    with JobFolder(tmp_path) as jobs:
        job = jobs.add("m", {}, {})
    for _ in range(MAX_STARTS + 1):
        with JobFolder(tmp_path) as jobs:
            assert jobs.begin(STOP).id == job.id
            jobs.interrupt(job.id)


def test_a_cancelled_job_stays_cancelled_and_other_models_wait(tmp_path):
    with JobFolder(tmp_path) as jobs:
        cancelled, other, own = jobs.add("m", {}, {}), jobs.add("absent", {}, {}), jobs.add("m", {}, {})
        assert jobs.begin(STOP, {"m"}).id == cancelled.id
        jobs.cancel(cancelled.id)
    with JobFolder(tmp_path) as jobs:
        assert jobs.get(cancelled.id).error["code"] == "cancelled"
        assert jobs.begin(STOP, {"m"}).id == own.id
        assert jobs.get(other.id).status == "queued"


def test_a_full_disk_keeps_no_job_under_way(tmp_path):
    """It is cancelled, or made again, though neither can be written."""
    with JobFolder(tmp_path) as jobs:
        cancelled, left = (jobs.add("m", {}, {}) for _ in range(2))
        for job in (cancelled, left):
            assert jobs.begin(STOP).id == job.id
            jobs.path(job.id).rename(tmp_path / f"{job.id} away")
            jobs.path(job.id).write_text("as if the disk were full")
        jobs.cancel(cancelled.id)
        assert jobs.is_cancelled(cancelled.id)
        jobs.interrupt(left.id)
        assert jobs.get(left.id).status == "queued" and jobs.get(left.id).starts == 0


def test_a_slow_client_reads_anew_rather_than_miss_an_end(tmp_path):
    async def follow():
        events = EventLog(tmp_path / "next")
        stream = events.follow(None, None, 1)
        assert await anext(stream) is None
        for i in range(3 * PENDING):
            events.publish("completed", f"video_{i}")
        await asyncio.sleep(0.1)
        return [(await anext(stream)).kind for _ in range(3)]

    assert "reset" in asyncio.run(follow())


def test_half_written_and_foreign_folders_are_left_out(tmp_path):
    with JobFolder(tmp_path) as jobs:
        job = jobs.add("m", {}, {})
    for name, text in (("cut", '{"id": '), ("list", "[]"), ("other", '{"a": 1}'), ("empty", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(text)
    (tmp_path / "no-record").mkdir()
    with JobFolder(tmp_path) as jobs:
        assert [each.id for each in jobs.all()] == [job.id]


def test_a_wait_ends(tmp_path):
    with JobFolder(tmp_path) as jobs:
        stop, found = threading.Event(), []
        thread = threading.Thread(target=lambda: found.append(jobs.begin(stop)))
        thread.start()
        stop.set()
        jobs.wake()
        thread.join(5)
        assert found == [None]


def test_one_process_has_a_folder(tmp_path):
    with JobFolder(tmp_path), pytest.raises(InputError, match="another server has"), JobFolder(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another folder"), JobFolder(tmp_path / "file" / "x"):
        pass

"""`cogvideox serve` as a process of its own, and a client of it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]

START_S = 60.0


class Server:
    """A server process over a folder."""

    def __init__(self, folder: Path, *options: str):
        self.folder, self.log = folder, folder.with_suffix(".log")
        command = [sys.executable, "-m", "cogvideox_flax", "serve", "--dir", str(folder), "--port", "0", *options]
        with self.log.open("ab") as log:
            start = log.tell()
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=log)
        self.url = self._url(start)
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def _url(self, start: int) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if found := re.search(r"open (http://\S+)", self.log.read_text()[start:]):
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no server: {self.log.read_text()[start:]}")

    def create(self, **fields: Any) -> dict[str, Any]:
        """Ask for a video; returns the answer of a request that must be taken."""
        answer = self.client.post("/v1/videos", json={"prompt": "a red circle", "num_inference_steps": 2, **fields})
        assert answer.status_code == 202, answer.text
        return answer.json()

    def wait_until_ready(self, seconds: float = 120) -> dict[str, Any]:
        """The answer of /health when the models are looked at."""
        end = time.monotonic() + seconds
        while (health := self.client.get("/health").json())["status"] == "starting":
            assert time.monotonic() < end
            time.sleep(0.05)
        return health

    def wait(self, video_id: str, *statuses: str, seconds: float = 120) -> dict[str, Any]:
        """The video when it has one of these statuses."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            video = self.client.get(f"/v1/videos/{video_id}").json()
            if video["status"] in statuses:
                return video
            time.sleep(0.05)
        raise AssertionError(f"still {video}")

    def wait_for_step(self, video_id: str, step: int) -> None:
        end = time.monotonic() + 120
        while self.client.get(f"/v1/videos/{video_id}").json()["step"] < step:
            assert time.monotonic() < end
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGINT) -> int:
        """End the process; returns its exit code."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    """A server for the time of the context."""
    server = Server(folder, *options)
    try:
        yield server
    finally:
        server.stop()

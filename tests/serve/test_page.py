"""The page of `cogvideox serve`, driven in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cogvideox_flax.io.video import open_video
from tests.support import processes

CHROMIUM = os.environ.get("COGVIDEOX_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

try:
    from playwright.sync_api import Page, expect, sync_playwright
except ImportError:
    pytest.skip("the package playwright is not installed", allow_module_level=True)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; COGVIDEOX_CHROMIUM names one"),
]

MODELS = ("embedded", "embedded-image-to-video")

ROOT = Path(__file__).resolve().parents[2]

STEPS = "4"

STEP = re.compile(r"step [1-9]\d* of")

WAIT_S = 120.0
"""Seconds that the first video may take: its programs are compiled."""


class Server:
    """`cogvideox serve` in a process of its own, which can be started again in the same folder."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder, self._stack = folder, stack
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, *more: str) -> None:
        models = [word for model in MODELS for word in ("--model", model)]
        command = [
            sys.executable,
            "-m",
            "cogvideox_flax",
            "serve",
            "--port",
            self.port,
            "--dir",
            self.folder,
            *models,
            "--max-upload",
            2,
        ]
        log = self._stack.enter_context((self.folder / "log").open("a"))
        self.process = self._stack.enter_context(processes.running([*command, *more], cwd=ROOT, stderr=log))
        self._wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(30) == 0
        assert "Exception" not in (self.folder / "log").read_text()

    def _wait(self):
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            try:
                if self.get("/health")["status"] in ("ready", "busy"):
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError("the server did not start")

    def get(self, path: str):
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)


class Watched:
    """What a browser's pages said and asked for."""

    def __init__(self, context):
        self.errors, self.hosts = [], set()
        context.on("console", self._said)
        context.on("weberror", lambda error: self.errors.append(str(error.error)))
        context.on("request", lambda request: self.hosts.add(re.match(r"\w+:(//[^/]*)?", request.url)[0]))

    def _said(self, message):
        is_answer = re.search("status of 4(13|15|22)", message.text)  # what a user gave is refused, which browsers log
        if message.type == "error" and not is_answer:
            self.errors.append(message.text)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The server of all tests."""
    with ExitStack() as stack:
        server = Server(tmp_path_factory.mktemp("gallery"), stack)
        server.start()
        yield server
        server.stop()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def context(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(20_000)
    yield context
    context.close()


@pytest.fixture
def page(context, server):
    """The page; nothing that it does may be an error, or ask another host."""
    watched = Watched(context)
    yield opened(context, server)
    assert watched.errors == []
    assert watched.hosts <= {f"http://127.0.0.1:{server.port}", "blob:", "data:"}


def opened(context, server) -> Page:
    page = context.new_page()
    page.goto(server.url)
    expect(page.locator("#generate")).to_be_enabled(timeout=WAIT_S * 1000)
    return page


def until(page: Page, condition: str) -> None:
    """Wait for a condition; Playwright's own wait is an `eval`, which the page's policy forbids."""
    end = time.monotonic() + 20
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


def generate(page: Page, prompt: str, steps: str = STEPS, **fields: str) -> None:
    page.locator("#prompt").fill(prompt)
    page.locator("#field-num_inference_steps").fill(steps)
    for name, value in fields.items():
        page.locator(f"#{name}").fill(value)
    page.get_by_role("button", name="Generate").click()


def cards(page: Page, prompt: str):
    return page.locator("#gallery > li").filter(has=page.locator(".prompt", has_text=re.compile(f"^{prompt}$")))


def under_way(page: Page, prompt: str):
    return page.locator("#under-way > li").filter(has_text=prompt)


def made(page: Page, prompt: str, count: int = 1):
    """The cards of a prompt when its videos are made."""
    expect(cards(page, prompt)).to_have_count(count, timeout=WAIT_S * 1000)
    for card in cards(page, prompt).all():
        expect(card.locator("video")).to_have_count(1)
    return cards(page, prompt).first


def test_a_video_is_made_and_its_preview_changes(page, server):
    """Also what is compiled, the step, and the forecast before and after."""
    page.evaluate(
        """() => {
            window.previews = new Set();
            window.lines = [];
            new MutationObserver(() => {
                for (const image of document.querySelectorAll(".preview > *")) previews.add(image.dataset.url);
                for (const line of document.querySelectorAll(".line")) lines.push(line.textContent);
            }).observe(document.getElementById("under-way"), { childList: true, subtree: true, characterData: true });
        }"""
    )
    generate(page, "a red circle", steps="40")
    made(page, "a red circle")
    lines = page.evaluate("lines")
    assert len(page.evaluate("[...previews]")) >= 2
    assert any(re.search(r"denoising · step \d+ of 40 · about", line) for line in lines), lines
    assert any(line.startswith("compiling ") for line in lines), lines
    expect(page.locator("#forecast")).to_contain_text(re.compile("about .* of memory"))
    card = cards(page, "a red circle")
    expect(card).to_contain_text("64×64 · 17 frames · 8 fps · 40 steps · seed")
    until(page, "document.querySelector('#gallery video').currentTime > 0")  # it plays by itself
    with page.expect_download() as download:
        card.get_by_role("link", name="Download video").click()
    assert open_video(Path(download.value.path())).info.num_frames == 17
    with page.expect_download() as download:
        card.get_by_role("link", name="Download recipe").click()
    assert json.loads(Path(download.value.path()).read_text())["prompt"] == "a red circle"
    card.get_by_text("Recipe", exact=True).click()
    expect(card.locator("pre")).to_contain_text('"num_inference_steps": 40')


def test_what_is_wrong_stands_beside_its_field_in_the_words_of_the_command_line(page):
    frames, error = page.locator("#field-num_frames"), page.locator("#field-num_frames-error")
    expect(page.get_by_label("Frames", exact=True)).to_have_attribute("placeholder", "17")
    frames.fill("10")
    expect(error).to_have_text("num_frames is 10; it must be 8 n + 1. Nearest: 9 and 17")
    expect(frames).to_have_attribute("aria-invalid", "")
    frames.fill("nine")
    expect(error).to_have_text("num_frames is 'nine'; expected a whole number")
    generate(page, "a fault")
    expect(frames).to_be_focused()
    expect(page.locator("#under-way > li")).to_have_count(0)
    frames.fill("17")
    expect(error).to_have_text("")
    expect(page.locator("#forecast")).to_contain_text("64×64, 17 frames (2.1 s at 8 fps), 4 steps")


def test_cancel_frees_the_device_for_the_next(page):
    generate(page, "a long one", steps="900")
    expect(under_way(page, "a long one")).to_contain_text(STEP)
    generate(page, "the next one")
    expect(under_way(page, "the next one")).to_contain_text("1 video before it in the queue")
    page.get_by_role("button", name="Cancel: a long one").click()
    expect(cards(page, "a long one")).to_contain_text("cancelled in stage denoise")
    made(page, "the next one")


def test_three_are_queued_at_once_and_made(page):
    generate(page, "three of them", n="3")
    expect(under_way(page, "three of them")).to_have_count(3)
    expect(under_way(page, "three of them").last).to_contain_text("2 videos before it in the queue")
    made(page, "three of them", 3)
    seeds = [re.search(r"seed (\d+)", text)[1] for text in cards(page, "three of them").all_inner_texts()]
    assert sorted(map(int, seeds)) == list(range(min(map(int, seeds)), min(map(int, seeds)) + 3))


def test_an_image_is_uploaded_and_becomes_a_video_that_goes_on(page, tmp_path):
    """What is no image, or too large, is refused beside the field; the model that needs an image says so."""
    (tmp_path / "damaged.png").write_bytes(b"\x89PNG no image")
    pixels = np.full((64, 64, 3), 60, np.uint8)
    pixels[20:40, 20:40] = 250, 120, 20
    Image.fromarray(pixels).save(tmp_path / "square.png")
    page.get_by_label("Model").select_option("embedded-image-to-video")
    expect(page.locator("#forecast")).to_contain_text("image")
    page.locator("#field-image").set_input_files(tmp_path / "damaged.png")
    expect(page.locator("#field-image-error")).to_contain_text("damaged.png")
    (tmp_path / "large.png").write_bytes(b"\x89PNG" + bytes(3 * 2**20))
    page.locator("#field-image").set_input_files(tmp_path / "large.png")
    expect(page.locator("#field-image-error")).to_have_text(f"the body is larger than {2 * 2**20} bytes")
    page.wait_for_timeout(800)  # a forecast comes, and leaves it there
    expect(page.locator("#field-image-error")).to_have_text(f"the body is larger than {2 * 2**20} bytes")
    page.locator("#field-image").set_input_files(tmp_path / "square.png")
    expect(page.get_by_text("square.png: 64×64")).to_be_visible()
    expect(page.locator("#field-image-error")).to_have_text("")
    generate(page, "the square moves")
    card = made(page, "the square moves")
    card.get_by_role("button", name="Use settings").click()
    expect(page.get_by_text("square.png: 64×64")).to_be_visible()
    card.get_by_role("button", name="Continue").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Prompt")).to_have_value("the square moves")
    dialog.get_by_label("Prompt").fill("it goes on")
    dialog.get_by_role("button", name="Generate").click()
    made(page, "it goes on")


def test_an_adapter_has_a_weight_and_a_clip_a_strength(server, context):
    adapters = server.folder / "adapters"
    adapters.mkdir()
    shutil.copy(
        ROOT / "weights" / "embedded_four_steps" / "pytorch_lora_weights.safetensors", adapters / "fast.safetensors"
    )
    page = opened(context, server)
    generate(page, "to start from")
    card = made(page, "to start from")
    with page.expect_download() as download:
        card.get_by_role("link", name="Download video").click()
    page.locator("#field-video").set_input_files(download.value.path())
    clip = page.locator(".field", has=page.locator("#field-video"))
    expect(clip).to_contain_text("64×64, 17 frames")
    page.get_by_role("button", name="Add an adapter").click()
    page.get_by_label("Weight of the adapter").fill("0,5")
    expect(page.locator("#field-lora-error")).to_contain_text("'0,5'; expected a number")
    page.get_by_label("Weight of the adapter").fill("0.5")
    generate(page, "with both", **{"field-strength": "0.75"})
    made(page, "with both").get_by_role("button", name="Use settings").click()
    expect(page.get_by_label("Adapter", exact=True)).to_have_value("fast")
    expect(page.get_by_label("Weight of the adapter")).to_have_value("0.5")
    expect(page.locator("#field-strength")).to_have_value("0.75")
    expect(clip).to_contain_text("64×64, 17 frames")


def test_a_recipe_and_a_video_fill_the_form_when_dropped(page, tmp_path):
    generate(page, "a recipe", steps="5")
    card = made(page, "a recipe")
    with page.expect_download() as download:
        card.get_by_role("link", name="Download video").click()
    video = Path(download.value.path()).read_bytes()
    settings = {"num_frames": 9, "use_dynamic_cfg": True, "scheduler": "euler", "dtype": "float32", "video": {}}
    recipe = {"prompt": "dropped", "seed": 7, "settings": settings}

    drop(page, "mine.json", json.dumps(recipe).encode())
    expect(page.locator("#prompt")).to_have_value("dropped")
    expect(page.locator("#notice")).to_contain_text("mine.json; give again: video")
    values = {"num_frames": "9", "use_dynamic_cfg": "timestep", "scheduler": "euler", "seed": "7", "height": ""}
    for name, value in values.items():
        expect(page.locator(f"#field-{name}")).to_have_value(value)

    drop(page, "made.mp4", video)
    expect(page.locator("#prompt")).to_have_value("a recipe")
    expect(page.locator("#field-num_inference_steps")).to_have_value("5")

    drop(page, "other.json", b"[1, 2]")
    expect(page.locator("#notice")).to_contain_text("other.json is no recipe")


def drop(page: Page, name: str, content: bytes) -> None:
    page.evaluate(
        """([name, bytes]) => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([new Uint8Array(bytes)], name));
            for (const kind of ["dragenter", "dragover", "drop"]) {
                document.querySelector("main").dispatchEvent(
                    new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true }));
            }
        }""",
        [name, list(content)],
    )


def test_a_reload_in_mid_run_shows_it_again(page):
    page.locator("#field-negative_prompt").fill("blue")
    generate(page, "reloaded", steps="300")
    expect(under_way(page, "reloaded")).to_contain_text(STEP)
    page.reload()
    expect(under_way(page, "reloaded")).to_contain_text(STEP)
    expect(page.locator("#field-negative_prompt")).to_have_value("blue")
    page.get_by_role("button", name="Cancel: reloaded").click()
    expect(cards(page, "reloaded")).to_contain_text("cancelled")


def test_two_windows_show_the_same(page, context, server):
    """Also one that was hidden meanwhile, which follows no events."""
    other = opened(context, server)
    generate(page, "in both windows")
    card = made(page, "in both windows")
    made(other, "in both windows")
    set_hidden(other, True)
    card.get_by_role("button", name="Another seed").click()
    made(page, "in both windows", 2)
    expect(cards(other, "in both windows")).to_have_count(1)
    set_hidden(other, False)
    made(other, "in both windows", 2)
    other.on("dialog", lambda dialog: dialog.accept())
    cards(other, "in both windows").first.get_by_role("button", name="Delete").click()
    expect(cards(page, "in both windows")).to_have_count(1)
    expect(cards(other, "in both windows")).to_have_count(1)


def set_hidden(page: Page, is_hidden: bool) -> None:
    page.evaluate(
        """(value) => {
            Object.defineProperty(document, "hidden", { value, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


def test_html_in_a_prompt_is_text(page):
    prompt = "<img src=x onerror=alert(1)><b>bold</b> </p><script>document.title='taken'</script>"
    generate(page, prompt)
    card = page.locator("#gallery > li").filter(has_text="<b>bold</b>")
    expect(card.locator("video")).to_have_count(1)
    expect(card.locator(".prompt")).to_have_text(prompt)
    assert card.locator("b, script, .prompt img").count() == 0
    assert page.title() == "cogvideox"


def test_two_videos_are_compared_under_one_slider(page, server):
    """PSNR is that of the frames as PyAV decodes them, but for the browser's own conversion of colours."""
    for seed in ("1", "2"):
        generate(page, f"compared {seed}", **{"field-seed": seed})
        made(page, f"compared {seed}").get_by_role("checkbox").check()
    page.get_by_role("button", name="Compare two").click()
    metrics = page.locator("#metrics")
    expect(metrics).to_contain_text("Over 17 shared frames: PSNR")
    psnr, ssim = map(float, re.findall(r"\d+\.\d+", metrics.inner_text()))
    listed = {video["prompt"]: video for video in server.get("/v1/videos")["data"]}
    a, b = (frames(server.folder / "jobs" / listed[f"compared {seed}"]["id"] / "video.mp4") for seed in "12")
    assert psnr == pytest.approx(10 * np.log10(255**2 / ((a - b) ** 2).mean()), abs=0.3)
    assert 0 < ssim < 1
    page.get_by_label("Left and right video").fill("20")
    assert page.locator("#stage").evaluate("(stage) => stage.style.getPropertyValue('--split')") == "20%"
    page.locator("#frame").fill("16")
    until(page, "document.querySelector('#stage video').currentTime > 2")
    page.get_by_role("button", name="Play").click()
    until(page, "document.querySelector('#stage video').currentTime < 2")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def frames(path: Path) -> np.ndarray:
    source = open_video(path)
    indices = list(range(source.info.num_frames))
    return np.stack([frame for _, frame in source.frames(indices)]).astype(np.float64)


def test_a_keyboard_alone_on_a_phone_that_wants_less_motion(browser, server):
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme="dark", reduced_motion="reduce")
    page = opened(context, server)
    while page.evaluate("document.activeElement.id") != "prompt":
        page.keyboard.press("Tab")
    page.keyboard.type("by keyboard")
    while page.evaluate("document.activeElement.id") != "field-num_inference_steps":
        page.keyboard.press("Tab")
    page.keyboard.type("30")
    page.keyboard.press("Control+Enter")
    expect(under_way(page, "by keyboard").locator(".preview canvas")).to_have_count(1)  # a still
    card = made(page, "by keyboard")
    assert page.evaluate("scrollY") > 0  # to the videos
    assert card.locator("video").evaluate("(video) => video.paused")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    unnamed = page.locator("button, input, select, textarea, video, progress").evaluate_all(
        "(all) => all.filter((one) => !one.labels?.length && !one.ariaLabel && !one.textContent.trim() && !one.hidden)"
        ".map((one) => one.outerHTML)"
    )
    assert unnamed == []
    context.close()


def test_a_restart_in_mid_queue_and_a_password(context, server, tmp_path):
    """The page waits for the server, asks for the password that it has now, and shows the queue as it goes on."""
    page = opened(context, server)
    generate(page, "restarted", steps="40", n="2")
    expect(under_way(page, "restarted").first).to_contain_text(STEP)
    (tmp_path / "password").write_text("open sesame\n")
    server.stop()
    expect(page.locator("#connection")).to_contain_text("The connection is lost")
    server.start("--password-file", str(tmp_path / "password"))
    password = page.locator("#password")
    password.fill("open seeds")
    page.get_by_role("button", name="Open", exact=True).click()
    expect(page.locator("#login-error")).to_have_text("the password is wrong")
    password.fill("open sesame")
    page.get_by_role("button", name="Open", exact=True).click()
    made(page, "restarted", 2)
    expect(page.locator("#connection")).to_have_text("")

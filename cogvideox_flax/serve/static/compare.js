// Two videos under one slider, and how much they differ.

import { byId, h, openDialog, plural, setText } from "./dom.js";

/** Open the comparison of two videos. */
export async function compare(left, right) {
  const dialog = byId("comparison");
  const films = [left, right].map((video) => film(video));
  const ends = new AbortController();
  const { signal } = ends;
  const count = Math.min(left.num_frames, right.num_frames);
  const [split, frame, play] = [byId("split"), byId("frame"), byId("play")];

  byId("stage").replaceChildren(...films);
  const [width, height] = left.size.split("x");
  byId("stage").style.aspectRatio = `${width} / ${height}`;
  byId("stage").style.maxWidth = `calc(55vh * ${width / height})`;
  byId("names").replaceChildren(...name("Left", left), ...name("Right", right));
  frame.max = String(count - 1);

  const cut = () => {
    byId("stage").style.setProperty("--split", `${split.value}%`);
    split.setAttribute("aria-valuetext", `${split.value} % left, ${100 - split.value} % right`);
  };
  const showFrame = (index) => {
    frame.value = String(index);
    setText(byId("frame-number"), `${index + 1} of ${count}`);
  };
  const seek = (index) => {
    films[0].currentTime = middle(index, left.fps);
    films[1].currentTime = middle(index, right.fps);
    showFrame(index);
  };
  let isPlaying = false;
  const setPlaying = (value) => {
    isPlaying = value;
    setText(play, isPlaying ? "Pause" : "Play");
    if (isPlaying) tick();
  };
  // the shared frames one after the other, in the time of the first video
  const tick = () => {
    const began = performance.now() - (Number(frame.value) / left.fps) * 1000;
    const next = (now) => {
      if (signal.aborted || !isPlaying) return;
      const index = Math.floor(((now - began) / 1000) * left.fps) % count;
      if (index !== Number(frame.value) && !films.some((each) => each.seeking)) seek(index);
      requestAnimationFrame(next);
    };
    requestAnimationFrame(next);
  };
  split.addEventListener("input", cut, { signal });
  frame.addEventListener("input", () => (setPlaying(false), seek(Number(frame.value))), { signal });
  play.addEventListener("click", () => setPlaying(!isPlaying), { signal });
  dialog.addEventListener("close", () => ends.abort(), { once: true });
  split.value = "50";
  cut();
  setPlaying(false);
  seek(0);
  openDialog(dialog);

  const metrics = byId("metrics");
  if (left.size !== right.size) {
    setText(metrics, `PSNR and SSIM need videos of one size; these have ${left.size} and ${right.size}`);
    return;
  }
  setText(metrics, "Measuring …");
  try {
    const { psnr, ssim } = await measure(left, right, count, signal);
    const ratio = psnr === Infinity ? "∞ (all pixels are equal)" : `${psnr.toFixed(2)} dB`;
    setText(metrics, `Over ${plural(count, "shared frame")}: PSNR ${ratio}, SSIM ${ssim.toFixed(4)}`);
  } catch (error) {
    if (!signal.aborted) setText(metrics, `Not measured: ${error.message}`);
  }
}

function name(side, video) {
  return [h("dt", {}, side), h("dd", {}, `${video.prompt} · seed ${video.seed} · ${plural(video.steps, "step")}`)];
}

function film(video) {
  const element = h("video", { src: video.content_url, preload: "auto", playsinline: true, "aria-label": video.prompt });
  element.muted = true;
  return element;
}

/** The time in the middle of a frame: at its beginning, rounding would decide which frame it is. */
const middle = (index, fps) => (index + 0.5) / fps;

/** PSNR of the pixels of all shared frames together, and the mean of their SSIM. */
async function measure(left, right, count, signal) {
  const [width, height] = left.size.split("x").map(Number);
  const sides = [left, right].map((video) => {
    const context = h("canvas", { width, height }).getContext("2d", { willReadFrequently: true });
    return { element: film(video), fps: video.fps, context };
  });
  await Promise.all(sides.map(({ element }) => happened(element, "loadeddata")));
  let squares = 0;
  let similarity = 0;
  for (let index = 0; index < count; index++) {
    if (signal.aborted) throw new Error("closed");
    const [a, b] = await Promise.all(sides.map((side) => pixels(side, index, width, height)));
    squares += squaredError(a, b);
    similarity += ssim(luma(a), luma(b), width, height);
  }
  for (const { element } of sides) element.removeAttribute("src");
  const error = squares / (count * width * height * 3);
  return { psnr: 10 * Math.log10(255 ** 2 / error), ssim: similarity / count };
}

function happened(element, kind) {
  return new Promise((resolve, reject) => {
    element.addEventListener(kind, resolve, { once: true });
    element.addEventListener("error", () => reject(new Error("this browser cannot play the video")), { once: true });
  });
}

async function pixels({ element, fps, context }, index, width, height) {
  const done = happened(element, "seeked");
  element.currentTime = middle(index, fps);
  await done;
  context.drawImage(element, 0, 0, width, height);
  return context.getImageData(0, 0, width, height).data;
}

function squaredError(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) if (i % 4 < 3) sum += (a[i] - b[i]) ** 2;
  return sum;
}

function luma(rgba) {
  const values = new Float64Array(rgba.length / 4);
  for (let i = 0; i < values.length; i++) {
    values[i] = 0.299 * rgba[4 * i] + 0.587 * rgba[4 * i + 1] + 0.114 * rgba[4 * i + 2];
  }
  return values;
}

const BLOCK = 8;
const STRIDE = 4;

/** The mean SSIM of the blocks of two images, which overlap by half, as FFmpeg's filter has them. */
function ssim(a, b, width, height) {
  const [c1, c2] = [(0.01 * 255) ** 2, (0.03 * 255) ** 2];
  const n = BLOCK * BLOCK;
  let [sum, blocks] = [0, 0];
  for (let top = 0; top + BLOCK <= height; top += STRIDE) {
    for (let left = 0; left + BLOCK <= width; left += STRIDE) {
      let [sa, sb, saa, sbb, sab] = [0, 0, 0, 0, 0];
      for (let y = top; y < top + BLOCK; y++) {
        for (let i = y * width + left; i < y * width + left + BLOCK; i++) {
          sa += a[i];
          sb += b[i];
          saa += a[i] * a[i];
          sbb += b[i] * b[i];
          sab += a[i] * b[i];
        }
      }
      const [ma, mb] = [sa / n, sb / n];
      const [va, vb, cov] = [saa / n - ma * ma, sbb / n - mb * mb, sab / n - ma * mb];
      sum += ((2 * ma * mb + c1) * (2 * cov + c2)) / ((ma * ma + mb * mb + c1) * (va + vb + c2));
      blocks++;
    }
  }
  return sum / blocks;
}

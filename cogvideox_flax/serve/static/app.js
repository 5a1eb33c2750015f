// The page: a form that asks for videos, those under way, and the gallery.

import { ApiError, call, follow } from "./api.js";
import { compare } from "./compare.js";
import { byId, bytes, duration, openDialog, plural, setText, wantsLessMotion } from "./dom.js";
import { Form } from "./form.js";
import { Videos } from "./videos.js";

const DRAFT = "cogvideox-draft";

const MARKED = "Change what is marked above";

const form = new Form(changed);
const videos = new Videos({
  again: (video) => act(() => call(`/v1/videos/${video.id}/remix`, { json: { seed: null } })),
  cancel: (video) => act(() => call(`/v1/videos/${video.id}/cancel`, { method: "POST" })),
  remove: (video) => act(() => call(`/v1/videos/${video.id}`, { method: "DELETE" })),
  use: (video) => fill({ ...video.options, model: video.model }, "that video"),
  goOn: continueFrom,
  modelThatContinues: () => imageModel() !== undefined,
});

/** The model that takes an image: the one of the form, where it does. */
const imageModel = () => [form.model, ...form.models].find((model) => model?.inputs.includes("image"));

/** Do what a button says; what is made or changed comes as an event, to this window as to others. */
async function act(ask) {
  try {
    setText(byId("notice"), "");
    return await ask();
  } catch (error) {
    setText(byId("notice"), error.message);
    return null;
  }
}

// --- the form

let timer = 0;
let asking = null; // the estimate under way
let key = null; // names this request, so that sending it twice makes one video

function changed() {
  key = null;
  setText(byId("notice"), "");
  setText(byId("form-error"), "");
  scheduleEstimate();
  sessionStorage.setItem(DRAFT, JSON.stringify(form.request));
}

function scheduleEstimate() {
  clearTimeout(timer);
  timer = setTimeout(estimate, 400);
}

async function estimate() {
  if (form.model === undefined) return;
  asking?.abort();
  asking = new AbortController();
  const { signal } = asking;
  try {
    const said = await call("/v1/videos/estimate", { json: form.request, signal });
    form.showFaults([], false);
    setText(byId("forecast"), forecast(said));
  } catch (error) {
    if (error.name === "AbortError") return;
    const left = form.showFaults(error.fields ?? [], false);
    setText(byId("forecast"), error.fields?.length ? left.join("\n") || MARKED : error.message);
  }
}

function forecast({ seconds, memory_bytes, memory_of, compile, width, height, num_frames, fps, num_inference_steps }) {
  const length = (num_frames / fps).toFixed(1);
  const time = seconds === null ? "time not known before a first video of this shape" : `about ${duration(seconds)}`;
  const what = `${width}×${height}, ${plural(num_frames, "frame")} (${length} s at ${fps} fps), ${plural(num_inference_steps, "step")}`;
  return `${what}: ${time}, ${bytes(memory_bytes)} of ${memory_of === "weights" ? "weights alone" : "memory"}${compile ? "; compiles first" : ""}`;
}

byId("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = byId("generate");
  if (button.disabled) return;
  button.disabled = true;
  clearTimeout(timer);
  asking?.abort();
  key ??= Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  try {
    await call("/v1/videos", { json: form.request, headers: { "idempotency-key": key } });
    key = null;
    form.showFaults([], true);
    setText(byId("form-error"), "");
    estimate();
    showVideos();
  } catch (error) {
    const left = form.showFaults(error.fields ?? [], true);
    setText(byId("form-error"), error.fields?.length ? left.join("\n") : error.message);
  } finally {
    button.disabled = false;
  }
});

/** Go to the videos where they are out of sight, below the form on a phone. */
function showVideos() {
  const made = document.querySelector(".made");
  if (made.getBoundingClientRect().top > innerHeight) made.scrollIntoView({ behavior: wantsLessMotion() ? "auto" : "smooth" });
}

byId("form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit();
});

byId("clear").addEventListener("click", () => {
  form.fill({ model: form.model.id });
  byId("prompt").focus();
});

// --- settings of a recipe, a video, an earlier job

function fill(values, source) {
  const left = form.fill(values);
  const more = left.length ? `; not taken over: ${left.join(", ")}` : "";
  setText(byId("notice"), `The form has the settings of ${source}${more}`);
  byId("prompt").focus();
}

/** Take the settings of a recipe (JSON), or of a video that holds one. */
async function open(file) {
  const recipe = await act(async () => {
    if (!/\.json$/i.test(file.name) && file.type !== "application/json") return call("/v1/read-recipe", { file });
    try {
      return JSON.parse(await file.text());
    } catch {
      throw new ApiError(0, { message: `${file.name} is not valid JSON` });
    }
  });
  if (recipe === null) return;
  if (typeof recipe !== "object" || typeof recipe.prompt !== "string") {
    setText(byId("notice"), `${file.name} is no recipe of one video: it has no prompt`);
    return;
  }
  const { prompt, negative_prompt, seed, settings: { dtype, ...settings } = {} } = recipe;
  const files = Object.keys(settings).filter((name) => name === "lora" || "$ref" in (form.model.fields[name] ?? {}));
  for (const name of files) delete settings[name]; // files of the machine that made it
  fill({ prompt, negative_prompt, seed, ...settings }, file.name);
  if (files.length) setText(byId("notice"), `${byId("notice").textContent}; give again: ${files.join(", ")}`);
}

byId("open-recipe").addEventListener("click", () => byId("recipe-file").click());
byId("recipe-file").addEventListener("change", ({ target }) => {
  if (target.files[0]) open(target.files[0]);
  target.value = "";
});

const isForPage = (event) => event.dataTransfer?.types.includes("Files") && !event.target.closest?.("input[type=file]");
let entered = 0; // elements that the file is over

addEventListener("dragenter", (event) => {
  if (event.dataTransfer?.types.includes("Files")) document.body.classList.toggle("dropping", ++entered > 0);
});
addEventListener("dragleave", (event) => {
  if (event.dataTransfer?.types.includes("Files")) document.body.classList.toggle("dropping", --entered > 0);
});
addEventListener("dragover", (event) => isForPage(event) && event.preventDefault());
addEventListener("drop", (event) => {
  entered = 0;
  document.body.classList.remove("dropping");
  if (!isForPage(event)) return;
  event.preventDefault();
  if (event.dataTransfer.files[0]) open(event.dataTransfer.files[0]);
});

// --- continue from the last frame

function continueFrom(video) {
  const model = imageModel();
  const { image, last_image, video: clip, mask_video, control_video, seed, model: _, ...options } = video.options;
  const kept = video.model === model.id ? options : {}; // another model has its own settings
  byId("continue-prompt").value = options.prompt;
  setText(byId("continue-error"), "");
  byId("continue-form").onsubmit = async (event) => {
    event.preventDefault();
    const json = { ...kept, model: model.id, prompt: byId("continue-prompt").value, video: { id: video.id } };
    try {
      await call("/v1/videos/extensions", { json });
      byId("continue").close();
    } catch (error) {
      setText(byId("continue-error"), error.message);
    }
  };
  openDialog(byId("continue"));
}

// --- comparison

byId("compare").addEventListener("click", () => compare(...videos.chosen));

// --- start

byId("older").addEventListener("click", () => act(() => videos.readOlder()));

async function start() {
  let models;
  while (models === undefined) {
    try {
      models = (await call("/v1/models")).data;
    } catch (error) {
      setText(byId("opening"), error.message);
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
  form.setModels(models);
  byId("generate").disabled = false;
  let draft = {};
  try {
    draft = JSON.parse(sessionStorage.getItem(DRAFT)) ?? {};
  } catch {
    // another program's
  }
  form.fill(draft);
  videos.draw(); // which buttons they have depends on the models
}

const connection = byId("connection");
const events = [];
let isHandling = false;

/** Handle events one after the other, also where one takes a while. */
async function handle(event) {
  events.push(event);
  if (isHandling) return;
  isHandling = true;
  while (events.length) {
    try {
      await events.shift()();
    } catch (error) {
      setText(connection, error.message);
    }
  }
  isHandling = false;
}

follow({
  onOpen: () =>
    handle(async () => {
      await videos.read();
      setText(connection, "");
    }),
  onEvent: (kind, data) =>
    handle(() => {
      videos.event(kind, data);
      if (kind === "completed") scheduleEstimate(); // the time of its steps is known now
    }),
  onDown: () => setText(connection, "The connection is lost; trying again …"),
});
start();

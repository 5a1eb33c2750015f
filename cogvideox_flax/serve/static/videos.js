// The videos under way and the gallery: a card each, changed in place.

import { call } from "./api.js";
import { announce, byId, duration, h, plural, setText, wantsLessMotion } from "./dom.js";

const STAGES = { load: "opening the model", encode: "reading the prompt", denoise: "denoising", decode: "decoding" };

const isOver = (video) => video.status === "completed" || video.status === "failed";

const PAGE = 100; // the most that one answer lists

/** Plays videos that are seen, and no others. */
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting && !wantsLessMotion()) target.play().catch(() => {});
    else target.pause();
  }
});

const short = (video) => (video.prompt.length > 60 ? `${video.prompt.slice(0, 60)} …` : video.prompt);

function button(text, video, onclick, properties = {}) {
  return h("button", { type: "button", onclick, "aria-label": `${text}: ${short(video)}`, ...properties }, text);
}

/** A video that waits or is made. */
class ActiveCard {
  constructor(video, actions) {
    this.preview = h("div", { class: "preview" });
    this.line = h("p", { class: "line" });
    this.bar = h("progress", { max: 100, value: 0, "aria-label": `Progress: ${short(video)}` });
    this.cancel = button("Cancel", video, () => {
      this.cancel.disabled = true;
      actions.cancel(video).then((answer) => (this.cancel.disabled = answer !== null));
    });
    this.element = h(
      "li",
      { class: "card active", "data-id": video.id },
      this.preview,
      h("div", { class: "text" }, h("p", { class: "prompt" }, video.prompt), this.line, this.bar, this.cancel),
    );
  }

  update(video, before) {
    const { stage, step, steps, compiling, eta_seconds: eta } = video;
    const isRunning = video.status === "in_progress";
    let said = before === 0 ? "next in the queue" : `${plural(before, "video")} before it in the queue`;
    if (isRunning) {
      said = compiling ? `compiling ${compiling} …` : (STAGES[stage] ?? stage ?? "starting");
      if (stage === "denoise") {
        said += ` · step ${step} of ${steps}`;
        const left = eta === null ? null : eta - (Date.now() - (video.told ?? Date.now())) / 1000;
        if (left !== null && step < steps) said += ` · about ${duration(Math.max(0, left))} to the last step`;
      }
    }
    setText(this.line, said);
    this.element.classList.toggle("running", isRunning);
    this.bar.hidden = !isRunning;
    if (stage === "denoise" || stage === "decode") this.bar.value = steps ? (100 * step) / steps : 0;
    else this.bar.removeAttribute("value");
    this.show(video.preview_url);
  }

  /** Show a preview, as a still where less motion is wanted, when it has loaded. */
  show(url) {
    if (!url || url === this.url) return;
    this.url = url;
    const image = h("img", { alt: "preview", src: url });
    image.onload = () => {
      if (this.url !== url) return;
      let shown = image;
      if (wantsLessMotion()) {
        shown = h("canvas", { width: image.naturalWidth, height: image.naturalHeight, role: "img", "aria-label": "preview" });
        shown.getContext("2d").drawImage(image, 0, 0);
      }
      shown.dataset.url = url;
      this.preview.replaceChildren(shown);
    };
  }
}

/** A video that is made, or that failed. */
class OverCard {
  constructor(video, actions, onChoose) {
    this.element = h("li", { class: "card", "data-id": video.id });
    Object.assign(this, { actions, onChoose });
  }

  update(video) {
    const { actions } = this;
    const isMade = video.status === "completed";
    const goesOn = isMade && actions.modelThatContinues();
    if (this.goesOn === goesOn) return; // nothing else changes
    this.goesOn = goesOn;
    const facts = [video.size.replace("x", "×"), plural(video.num_frames, "frame"), `${video.fps} fps`, plural(video.steps, "step"), `seed ${video.seed}`];
    if (video.inference_time_s) facts.push(`made in ${duration(video.inference_time_s)}`);
    const media = isMade ? this.media(video) : h("p", { class: video.error?.code === "cancelled" ? "quiet" : "error" }, video.error?.message ?? "failed");
    this.element.replaceChildren(
      media,
      h("p", { class: "prompt" }, video.prompt || h("em", {}, "no prompt")),
      h("p", { class: "quiet" }, facts.join(" · ")),
      h(
        "div",
        { class: "row buttons" },
        button("Another seed", video, () => actions.again(video)),
        button("Use settings", video, () => actions.use(video)),
        goesOn ? button("Continue", video, () => actions.goOn(video), { title: "continue from the last frame" }) : null,
        isMade ? h("a", { class: "button", href: `${video.content_url}?download`, download: "", "aria-label": `Download video: ${short(video)}` }, "Video ↓") : null,
        isMade ? h("a", { class: "button", href: video.recipe_url, download: `${video.id}.json`, "aria-label": `Download recipe: ${short(video)}` }, "Recipe ↓") : null,
        button("Delete", video, () => confirm("Delete this video for good?") && actions.remove(video), { class: "danger" }),
      ),
      isMade ? this.recipe(video) : "",
    );
  }

  media(video) {
    const [width, height] = video.size.split("x");
    const film = h("video", {
      src: video.content_url,
      poster: `${video.content_url}?variant=thumbnail`,
      width,
      height,
      controls: true,
      loop: true,
      playsinline: true,
      preload: "none",
      "aria-label": video.prompt,
    });
    film.muted = true;
    seen.observe(film);
    this.choice = h("input", { type: "checkbox", onchange: () => this.onChoose(this), "aria-label": `Compare: ${short(video)}` });
    return h("div", { class: "film" }, film, h("label", { class: "choice" }, this.choice, "compare"));
  }

  recipe(video) {
    const text = h("pre", { tabindex: 0 });
    const read = async () => {
      if (!details.open || text.textContent) return;
      try {
        text.textContent = JSON.stringify(await call(video.recipe_url), null, 2);
      } catch (error) {
        text.textContent = error.message;
      }
    };
    const details = h("details", { ontoggle: read }, h("summary", {}, "Recipe"), text);
    return details;
  }
}

export class Videos {
  constructor(actions) {
    this.actions = actions;
    this.videos = new Map(); // id -> video, those that came first before the others
    this.cards = new Map();
    this.marked = []; // cards that are to be compared
    setInterval(() => this.draw(), 1000); // the time that is left
  }

  /** The two videos that are to be compared. */
  get chosen() {
    return this.marked.map((card) => this.videos.get(card.element.dataset.id));
  }

  /** Read the list: as much of it as is shown, and at least its first page. */
  async read() {
    const wanted = this.videos.size;
    let list = [];
    let answer;
    do {
      answer = await this.page(list.at(-1)?.id);
      list = [...list, ...answer.data];
    } while (answer.has_more && list.length < wanted);
    const told = Date.now();
    this.videos = new Map(list.reverse().map((video) => [video.id, { ...video, told }]));
    byId("older").hidden = !answer.has_more;
    this.draw();
  }

  async readOlder() {
    const answer = await this.page(this.videos.keys().next().value);
    this.videos = new Map([...answer.data.reverse().map((video) => [video.id, video]), ...this.videos]);
    byId("older").hidden = !answer.has_more;
    this.draw();
  }

  page(after) {
    return call(`/v1/videos?limit=${PAGE}${after === undefined ? "" : `&after=${after}`}`);
  }

  event(kind, { video_id: id, video, url, what, seconds, ...progress }) {
    const known = this.videos.get(id);
    if (kind === "deleted") this.videos.delete(id);
    else if (video) this.videos.set(id, { ...video, told: Date.now() });
    else if (known === undefined) return; // older than what is shown, or removed
    else if (kind === "progress") Object.assign(known, progress, { told: Date.now() });
    else if (kind === "preview") known.preview_url = url;
    else if (kind === "compile") known.compiling = seconds === null ? what : null;
    this.say(kind, this.videos.get(id));
    this.draw();
  }

  /** What screen readers say: not each step. */
  say(kind, video) {
    if (video === undefined) return;
    if (kind === "started") announce(`Started: ${short(video)}`);
    else if (kind === "compile" && video.compiling) announce(`Compiling ${video.compiling}`);
    else if (kind === "completed") announce(`Made: ${short(video)}`);
    else if (kind === "failed") announce(`${video.error?.message ?? "failed"}: ${short(video)}`);
    else if (kind === "progress" && video.stage === "denoise" && video.steps) {
      const quarter = Math.floor((4 * video.step) / video.steps);
      if (quarter > 0 && quarter !== video.quarter) announce(`${25 * quarter} percent: ${short(video)}`);
      video.quarter = quarter;
    }
  }

  draw() {
    const all = [...this.videos.values()];
    const active = all.filter((video) => !isOver(video));
    const over = all.filter(isOver).reverse();
    this.place(byId("under-way"), active, ActiveCard);
    this.place(byId("gallery"), over, OverCard);
    byId("under-way-title").hidden = active.length === 0;
    byId("empty").hidden = all.length > 0;
    const first = active.find((video) => video.status === "in_progress");
    document.title = first ? `${Math.round((100 * first.step) / (first.steps || 1))} % · cogvideox` : "cogvideox";
    for (const [id, card] of this.cards) {
      if (this.videos.has(id)) continue;
      this.drop(card);
      this.cards.delete(id);
    }
  }

  /** Put the cards of some videos into a list, moving none that stands right: a video that moves stops playing. */
  place(list, videos, kind) {
    let next = list.firstElementChild;
    videos.forEach((video, index) => {
      let card = this.cards.get(video.id);
      if (!(card instanceof kind)) {
        if (card) this.drop(card);
        card = new kind(video, this.actions, (chosen) => this.choose(chosen));
        this.cards.set(video.id, card);
      }
      card.update(video, index);
      if (card.element === next) next = next.nextElementSibling;
      else list.insertBefore(card.element, next);
    });
  }

  drop(card) {
    const film = card.element.querySelector("video");
    if (film) seen.unobserve(film);
    card.element.remove();
    this.marked = this.marked.filter((each) => each !== card);
    this.drawChoice();
  }

  /** Mark a card, at most two at a time: the one that was marked first goes. */
  choose(card) {
    this.marked = this.marked.filter((each) => each !== card);
    if (card.choice.checked) this.marked.push(card);
    while (this.marked.length > 2) this.marked.shift().choice.checked = false;
    this.drawChoice();
  }

  drawChoice() {
    const compare = byId("compare");
    compare.disabled = this.marked.length !== 2;
    setText(compare, this.marked.length === 1 ? "Compare two: 1 marked" : "Compare two");
    compare.title = compare.disabled ? "mark two videos" : "";
  }
}

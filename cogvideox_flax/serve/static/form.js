// The form of a model, made of what /v1/models says about its fields.

import { call } from "./api.js";
import { bytes, byId, h, setText } from "./dom.js";

const LABELS = {
  num_frames: "Frames",
  num_inference_steps: "Steps",
  fps: "Frame rate",
  lora: "Adapters",
  mask_video: "Mask",
  use_dynamic_cfg: "Dynamic guidance",
};

const label = (name) => LABELS[name] ?? name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

const isMedia = (schema) => "$ref" in schema;

/** The range and the unit of a number, in short. */
function limits(schema) {
  const one = schema.items ?? schema;
  const low = one.minimum ?? one.exclusiveMinimum;
  const isShown = low !== undefined && one.maximum !== undefined && one.maximum < 1e6;
  const range = isShown ? `${low} to ${one.maximum}` : "";
  return [range, schema["x-unit"]].filter(Boolean).join(" ");
}

/** A value that the user gives, or leaves to the model. */
class Field {
  constructor(name, schema, onChange) {
    Object.assign(this, { name, schema, onChange, id: `field-${name}`, touched: false });
    const caption = [label(name)];
    const short = limits(schema);
    if (short && short !== label(name).toLowerCase()) caption.push(h("small", {}, ` ${short}`));
    this.error = h("p", { class: "error", id: `${this.id}-error` });
    // most people know the common options: what those do is said to screen readers, and where the pointer rests
    this.hint = h("p", { class: schema["x-common"] ? "hidden" : "hint", id: `${this.id}-hint` }, schema.description ?? "");
    this.control = this.make();
    this.control.id = this.id;
    this.control.setAttribute("aria-describedby", `${this.hint.id} ${this.error.id}`);
    this.control.addEventListener("input", () => this.change());
    this.row = this.layout(h("label", { for: this.id, title: schema.description }, ...caption));
  }

  layout(caption) {
    return h("div", { class: "field" }, caption, this.control, this.hint, this.error);
  }

  change() {
    this.touched = true;
    this.onChange();
  }

  /** What is taken where nothing is given. */
  get unset() {
    const value = this.schema["x-recommended"] ?? this.schema["x-default"];
    return value === undefined ? "" : String(value);
  }

  /** Show what is wrong with the value; "": nothing is. */
  fault(message) {
    setText(this.error, message);
    this.control.toggleAttribute("aria-invalid", message !== "");
    if (message) this.row.closest("details")?.setAttribute("open", "");
  }

  make() {
    const kind = (this.schema.items ?? this.schema).type;
    if (this.name === "negative_prompt") return h("textarea", { rows: 2 });
    const mode = kind === "integer" && !this.schema.items ? "numeric" : kind === "string" ? "text" : "decimal";
    return h("input", { type: "text", inputmode: mode, placeholder: this.unset });
  }

  /** The value as the API takes it; undefined: not given. The API reads texts, and says what is wrong with them. */
  get value() {
    return this.control.value.trim() || undefined;
  }

  set value(value) {
    this.control.value = value === undefined || value === null ? "" : String(value);
  }
}

class Choice extends Field {
  make() {
    const unset = this.schema.enum.includes(this.unset) ? `${this.unset} (default)` : this.unset || "default";
    return h("select", {}, h("option", { value: "" }, unset), ...this.schema.enum.map((each) => h("option", {}, each)));
  }

  set value(value) {
    const index = this.schema["x-values"]?.indexOf(value) ?? -1; // a recipe may hold true where the API says "timestep"
    this.control.value = index >= 0 ? this.schema.enum[index] : (value ?? "");
  }

  get value() {
    return super.value;
  }
}

class Switch extends Field {
  make() {
    return h("input", { type: "checkbox" });
  }

  layout(caption) {
    return h("div", { class: "field switch" }, this.control, caption, this.hint, this.error);
  }

  get value() {
    return this.control.checked || undefined;
  }

  set value(value) {
    this.control.checked = value === true;
  }
}

/** An image or a clip, which is uploaded as soon as it is chosen. */
class Media extends Field {
  make() {
    this.file = null; // what /v1/files says of it
    this.refusal = ""; // why the file that was chosen is not there
    this.picture = h("div", { class: "picture" });
    this.facts = h("p", { class: "quiet", role: "status" });
    this.remove = h("button", { type: "button", hidden: true, onclick: () => this.clear() }, "Remove");
    this.remove.setAttribute("aria-label", `Remove ${label(this.name).toLowerCase()}`);
    const accept = this.name.includes("image") ? "image/*" : "image/*,video/*";
    return h("input", { type: "file", accept, onchange: () => this.upload(this.control.files[0]) });
  }

  layout(caption) {
    const shown = h("div", { class: "row" }, this.picture, this.facts, this.remove);
    return h("div", { class: "field" }, caption, this.control, shown, this.hint, this.error);
  }

  change() {} // when it is uploaded

  fault(message) {
    super.fault(message || this.refusal);
  }

  async upload(file) {
    this.clear(false);
    if (!file) return;
    this.pending = file;
    setText(this.facts, `uploading ${file.name} …`);
    try {
      const kept = await call("/v1/files", { file });
      if (this.pending === file) this.show(kept);
    } catch (error) {
      if (this.pending !== file) return;
      setText(this.facts, "");
      this.control.value = "";
      this.refusal = error.message;
      this.fault(this.refusal);
    }
  }

  show(file) {
    this.file = file;
    const url = `/v1/files/${file.id}/content`;
    const isVideo = file.media_type.startsWith("video/");
    this.picture.replaceChildren(
      isVideo ? h("video", { src: url, muted: true, playsinline: true, preload: "metadata" }) : h("img", { src: url, alt: "" }),
    );
    const frames = file.frames > 1 ? `, ${file.frames} frames` : "";
    setText(this.facts, `${file.filename}: ${file.width}×${file.height}${frames}, ${bytes(file.bytes)}`);
    this.remove.hidden = false;
    this.touched = true;
    this.onChange();
  }

  clear(isWhole = true) {
    if (isWhole) this.control.value = "";
    this.file = null;
    this.pending = null;
    this.refusal = "";
    this.picture.replaceChildren();
    setText(this.facts, "");
    this.fault("");
    this.remove.hidden = true;
    this.onChange();
  }

  get value() {
    return this.file ? { file_id: this.file.id } : undefined;
  }

  set value(value) {
    if (value?.file_id === this.file?.id) return;
    this.clear();
    if (value?.file_id) {
      call(`/v1/files/${value.file_id}`).then(
        (file) => this.show(file),
        (error) => {
          this.refusal = error.message;
          this.fault(this.refusal);
        },
      );
    }
  }
}

/** Adapters of the server, each with its weight. */
class Adapters extends Field {
  constructor(name, schema, onChange, known) {
    super(name, schema, onChange);
    this.known = known;
    this.rows = h("div");
    this.control.before(this.rows);
  }

  make() {
    return h("button", { type: "button", onclick: () => (this.add({ name: this.known[0], scale: 1 }), this.change()) }, "Add an adapter");
  }

  layout(caption) {
    caption.removeAttribute("for"); // the button has a name of its own
    const row = super.layout(caption);
    row.setAttribute("role", "group");
    row.setAttribute("aria-label", label(this.name));
    return row;
  }

  add({ name, scale = 1 }) {
    const select = h("select", { "aria-label": "Adapter" }, ...this.known.map((each) => h("option", {}, each)));
    const weight = h("input", { type: "text", inputmode: "decimal", "aria-label": `Weight of the adapter`, size: 4 });
    select.value = name;
    weight.value = String(scale);
    const remove = h("button", { type: "button", "aria-label": "Remove the adapter", onclick: () => (row.remove(), this.change()) }, "Remove");
    const row = h("div", { class: "row adapter", oninput: () => this.change() }, select, weight, remove);
    this.rows.append(row);
  }

  get value() {
    const values = [...this.rows.children].map((row) => {
      const [select, weight] = row.children;
      const scale = weight.value.trim() === "" ? 1 : Number(weight.value);
      return { name: select.value, scale: Number.isNaN(scale) ? weight.value : scale };
    });
    return values.length ? values : undefined;
  }

  set value(values) {
    this.rows.replaceChildren();
    for (const each of values ?? []) this.add(each);
  }
}

/** The whole form. */
export class Form {
  constructor(onChange) {
    this.onChange = onChange;
    this.fields = new Map();
    this.models = [];
    this.prompt = byId("prompt");
    this.prompt.addEventListener("input", onChange);
    byId("n").addEventListener("input", onChange);
    byId("model").addEventListener("input", () => {
      this.build();
      onChange();
    });
  }

  setModels(models) {
    this.models = models;
    byId("model").replaceChildren(...models.map((model) => h("option", {}, model.id)));
    byId("model-field").hidden = models.length < 2;
    this.build();
  }

  get model() {
    return this.models.find((model) => model.id === byId("model").value);
  }

  /** Make the fields of the chosen model; what was given stays. */
  build() {
    const values = this.given;
    this.fields.clear();
    const common = new Map();
    const others = new Map();
    for (const [name, schema] of Object.entries(this.model.fields)) {
      const field = this.make(name, schema);
      if (field === null) continue;
      this.fields.set(name, field);
      const groups = schema["x-common"] ? common : others;
      const group = schema["x-group"];
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(field.row);
    }
    const sets = (groups) =>
      [...groups].map(([name, rows]) => h("fieldset", {}, h("legend", {}, name[0].toUpperCase() + name.slice(1)), h("div", { class: "options" }, ...rows)));
    const more = others.size ? [h("details", {}, h("summary", {}, "More options"), ...sets(others))] : [];
    byId("fields").replaceChildren(...sets(common), ...more);
    this.set(values);
  }

  make(name, schema) {
    if (name === "lora") {
      const { adapters } = this.model;
      return adapters.length ? new Adapters(name, schema, this.onChange, adapters) : null;
    }
    const kind = isMedia(schema) ? Media : schema.enum ? Choice : schema.type === "boolean" ? Switch : Field;
    return new kind(name, schema, this.onChange);
  }

  /** The values that were given, by field. */
  get given() {
    const values = [...this.fields].map(([name, field]) => [name, field.value]);
    return Object.fromEntries(values.filter(([, value]) => value !== undefined));
  }

  /** The body of a request. */
  get request() {
    return { model: this.model.id, prompt: this.prompt.value, n: byId("n").value, ...this.given };
  }

  set(values) {
    for (const [name, field] of this.fields) field.value = values[name];
  }

  /** Fill the form; returns the names of what it has no field for. */
  fill({ model, prompt, n, ...values }) {
    if (model !== undefined && model !== this.model.id && this.models.some((each) => each.id === model)) {
      byId("model").value = model;
      this.build();
    }
    this.prompt.value = prompt ?? "";
    byId("n").value = n ?? 1;
    this.set(values);
    for (const field of this.fields.values()) field.touched = false;
    this.onChange();
    return Object.keys(values).filter((name) => !this.fields.has(name));
  }

  /** Show faults beside their fields.
   *
   * isAsked: whether the user sent the form; before, fields that were not touched are not called wrong.
   * Returns the messages that stand beside no field.
   */
  showFaults(faults, isAsked) {
    const left = [];
    const byField = new Map();
    for (const { param, message } of faults) {
      const field = this.fields.get(param);
      if (field !== undefined && (isAsked || field.touched || field.value !== undefined)) {
        byField.set(field, [...(byField.get(field) ?? []), message]);
      } else if (param === "prompt" && isAsked) {
        setText(byId("prompt-error"), message);
      } else {
        left.push(message);
      }
    }
    if (!faults.some(({ param }) => param === "prompt")) setText(byId("prompt-error"), "");
    for (const field of this.fields.values()) field.fault((byField.get(field) ?? []).join("\n"));
    if (isAsked) byField.keys().next().value?.control.focus();
    return left;
  }
}

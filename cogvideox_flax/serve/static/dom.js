// Elements and texts. Whatever a job holds goes into the page as text, never as HTML.

export const byId = (id) => document.getElementById(id);

/** An element: properties that start with "on" are listeners, others attributes; false and null leave one out. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set a text, only where it changes, so that screen readers do not say it again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Say something to screen readers. */
export const announce = (text) => setText(byId("live"), text);

export const wantsLessMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Seconds as people say them. */
export function duration(seconds) {
  const whole = Math.round(seconds);
  if (seconds < 1) return "less than a second";
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function bytes(count) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) [count, unit] = [count / 1000, unit + 1];
  return `${count < 10 && unit ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** Show a dialog whose buttons with `data-close` close it. */
export function openDialog(dialog) {
  for (const button of dialog.querySelectorAll("[data-close]")) button.onclick = () => dialog.close();
  if (!dialog.open) dialog.showModal();
}

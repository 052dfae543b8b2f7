"use strict";
// What every part of the page shares: the data, units, colours, the tip, and which layer is picked.

const DATA = JSON.parse(document.getElementById("data").textContent);
const PHASES = ["forward", "backward", "recompute", "other"];

const make = (name, attributes = {}, text) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
};

// nanoseconds as a person reads them, with the digits that a whole of this size calls for
function time(ns, whole = ns) {
  const size = Math.abs(whole);
  if (size >= 1e9) return `${(ns / 1e9).toFixed(3)} s`;
  if (size >= 1e6) return `${(ns / 1e6).toFixed(size >= 1e8 ? 1 : size >= 1e7 ? 2 : 3)} ms`;
  if (size >= 1e3) return `${(ns / 1e3).toFixed(size >= 1e5 ? 1 : 2)} µs`;
  return `${Math.round(ns)} ns`;
}

// bytes in MiB of 1,048,576, with the digits that call for it
const mib = (bytes) => `${(bytes / 2 ** 20).toLocaleString("en", { maximumFractionDigits: Math.abs(bytes) < 2 ** 24 ? 3 : 1 })} MiB`;

const percent = (part, whole) => `${(whole ? (100 * part) / whole : 0).toFixed(1)} %`;

// steps of 1, 2 or 5 that divide a length into about `count` parts
function tickStep(length, count) {
  const rough = length / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * (rough / power > 5 ? 10 : rough / power > 2 ? 5 : rough / power > 1 ? 2 : 1);
}

// a layer by the end of its path: `self_attn`, `layers.3`
function lastWords(path) {
  const parts = path.split(".");
  return /^\d+$/.test(parts.at(-1)) ? parts.slice(-2).join(".") : parts.at(-1);
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const tip = {
  element: document.getElementById("tip"),
  show(text, x, y) {
    this.element.textContent = text;
    this.element.hidden = false;
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.min(x + 12, window.innerWidth - width - 6);
    const top = y + 18 + height > window.innerHeight ? y - height - 10 : y + 18;
    Object.assign(this.element.style, { left: `${Math.max(left, 4)}px`, top: `${Math.max(top, 4)}px` });
  },
  hide() { this.element.hidden = true; },
};

// One capture on the page. Its parts say `onPick` to hear which row of the tree is picked, -1 for none.
class Sheet {
  constructor(element, index) {
    this.element = element;
    this.id = `c${index}`;
    this.data = DATA[index];
    this.picked = -1;
    this.listeners = [];
    this.rowOf = new Map(this.data.tree.name.map((name, row) => [name, row]));
  }
  part(name) { return document.getElementById(`${this.id}-${name}`); }
  onPick(listener) { this.listeners.push(listener); }
  pick(row) {
    this.picked = row;
    for (const listener of this.listeners) listener(row);
  }
  // whether a layer is the picked one or in it
  isInside(row) {
    for (let one = row; one >= 0; one = this.data.tree.parent[one]) if (one === this.picked) return true;
    return false;
  }
}

const theme = {
  set(name) {
    document.documentElement.dataset.theme = name;
    document.dispatchEvent(new Event("theme"));
  },
  flip() { this.set(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); },
};
theme.set(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => theme.set(event.matches ? "dark" : "light"));

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

const SVG = "http://www.w3.org/2000/svg";
const shape = (name, attributes, text) => {
  const element = document.createElementNS(SVG, name);
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

// ---- columns of numbers, packed as packing.py says

const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f8: Float64Array };

async function unpack(text) {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser cannot unpack the drawings' data; one of 2023 or later can");
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

function column(buffer, [type, offset, count, rising]) {
  const values = new TYPES[type](buffer, offset, count);
  if (!rising) return values;
  const sums = new Float64Array(count);
  let sum = 0;
  for (let one = 0; one < count; one++) sums[one] = sum += values[one];
  return sums;
}

const isColumn = (value) => Array.isArray(value) && value.length === 4 && value[0] in TYPES;

// the columns of an object, whatever else is in it as it is
const columns = (buffer, object) => Object.fromEntries(Object.entries(object).map(([name, value]) => [name, isColumn(value) ? column(buffer, value) : value]));

// One capture on the page. Its parts say `onPick` to hear which row of the tree is picked, -1 for none.
class Sheet {
  constructor(element, index) {
    this.element = element;
    this.index = index;
    this.id = `c${index}`;
    this.data = DATA[index];
    this.picked = -1;
    this.listeners = [];
    this.members = new Set();
    this.folds = this.data.folds ?? [];
    // equal blocks that are one row have a number behind the tree's
    this.names = [...this.data.tree.name, ...this.folds.map((fold) => fold.name)];
    this.rowOf = new Map(this.names.map((name, row) => [name, row]).reverse());
  }
  // unpack what is drawn; where the browser cannot, the page says so
  async load() {
    try {
      this.buffer = await unpack(this.data.block);
    } catch (error) {
      this.element.prepend(make("p", { class: "warnings" }, String(error.message)));
      return false;
    }
    if (this.data.timeline) this.timeline = new Timeline(this);
    return true;
  }
  part(name) { return document.getElementById(`${this.id}-${name}`); }
  onPick(listener) { this.listeners.push(listener); }
  pick(row) {
    this.picked = row;
    this.members = new Set(this.rowsOf(row));
    for (const listener of this.listeners) listener(row);
  }
  // the rows of the tree that a row stands for
  rowsOf(row) { return row < 0 ? [] : this.folds[row - this.data.tree.name.length]?.rows ?? [row]; }
  // by hand: what is picked is in the address too, and the back button takes it back
  choose(row) {
    this.pick(row);
    address.set({ layer: row < 0 ? null : this.names[row], show: null }, true);
  }
  // whether a layer is the picked one or in it
  isInside(row) {
    for (let one = row; one >= 0; one = this.data.tree.parent[one]) if (this.members.has(one)) return true;
    return false;
  }
  // the row of a layer and phase; of a layer that is not on the page that of the nearest around it
  rowFor(layer, phase) {
    if (layer === "(none)") return this.rowOf.get(`(none) ${phase}`) ?? -1;
    for (let path = layer; path; path = path.slice(0, Math.max(path.lastIndexOf("."), 0))) {
      const row = this.rowOf.get(path);
      if (row !== undefined) return row;
    }
    return this.rowOf.get(`(none) ${layer}`) ?? -1;
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

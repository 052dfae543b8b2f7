// A step in time on a canvas: layers over the GPU's streams, idle gaps, and the ranges of the CPU's threads. The rows hold
// every step; a step is a window onto them.

const LINE = 19, HEAD = 22, RULER = 24, KINDS = { layer: "layer", op: "operation", range: "range", idle: "idle", work: "work", stall: "idle", collective: "collective" };
const WAITS = ["waiting", "transfer"];

class Timeline {
  constructor(sheet) {
    this.sheet = sheet;
    this.data = sheet.data.timeline;
    this.texts = sheet.data.texts;
    this.box = sheet.part("timeline");
    this.canvas = this.box.firstElementChild;
    this.output = sheet.part("window");
    this.detail = sheet.part("detail");
    this.select = document.querySelector(`[data-timeline="${sheet.id}"]`);
    this.select?.addEventListener("change", () => { this.show(Number(this.select.value)); this.note(); });
    this.groups = this.data.groups.map((group) => ({ ...group, rows: group.rows.map((row) => this.owned(columns(sheet.buffer, row))) }));
    sheet.part("note").textContent = this.data.note;
    this.noteWindow = settled(() => this.noteNow());
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.box);
    document.addEventListener("theme", () => this.draw());
    sheet.onPick(() => { this.draw(); this.tellPicked(); });
    this.show(0);
  }

  // a row with the row of the tree that each of its boxes belongs to
  owned(row) {
    if (row.kind === "idle") return row;
    const known = new Map();
    const layer = row.layer ?? row.text;
    row.tree = Int32Array.from(layer, (text, one) => {
      const key = text * 4096 + row.phase[one];
      let found = known.get(key);
      if (found === undefined) known.set(key, (found = this.sheet.rowFor(this.texts[text], this.texts[row.phase[one]])));
      return found;
    });
    return row;
  }

  show(index) {
    this.index = index;
    const step = (this.step = this.data.steps[index]);
    if (this.select) this.select.value = String(index);
    this.lines = [];
    let y = RULER;
    for (const group of this.groups) {
      if (group.hidden || !group.rows.some((row) => this.any(row))) continue;
      this.lines.push({ label: group.idle === undefined ? group.label : step.idle[group.idle] ?? group.label, y });
      y += HEAD;
      for (const row of group.rows) if (row.kind === "idle" || row.kind === "op" || this.any(row)) { this.lines.push({ row, y }); y += LINE; }
    }
    this.height = y + 4;
    this.canvas.style.height = `${this.height}px`;
    this.zoomTo(0, step.length);
    this.tellPicked();
  }

  // whether a row has anything in the step
  any(row) {
    const one = this.first(row, this.step.start);
    return one < row.start.length && row.start[one] < this.step.start + this.step.length;
  }

  // by hand, so that the address and the back button know
  choose(place) {
    const number = this.data.steps.findIndex((step) => step.instance === place);
    if (number < 0) return;
    this.show(number);
    this.note();
    this.sheet.part("timeline-section").scrollIntoView({ block: "nearest" });
  }
  name(step) {
    const alike = this.data.steps.filter((one) => one.step === step.step).length;
    return step.step === null ? null : alike > 1 ? `${step.step}~${step.instance}` : String(step.step);
  }
  note() { address.set({ step: this.index ? this.name(this.step) : null, time: null }, true); }
  noteNow() {
    const whole = this.to - this.from >= this.step.length;
    const zero = this.data.start + this.step.start;
    address.set({ time: whole ? null : `${Math.round(zero + this.from)}-${Math.round(zero + this.to)}` });
  }

  // what the address asks for
  follow(name, time, show) {
    const index = Math.max(this.data.steps.findIndex((step) => this.name(step) === name), 0);
    const [start, end] = (time ?? "").split("-").map(Number);
    if (time && show === "time") return this.goToTime(start, end);
    if (index !== this.index && !(time && !name)) this.show(index);
    if (!time) { if (this.zoomed) this.zoomTo(0, this.step.length); return; }
    const at = this.data.steps[this.index].start + this.data.start;
    if (start - at < 0 || start - at >= this.step.length) this.goToTime(start, end);
    else this.zoomTo(start - at, end - at);
  }

  zoomTo(from, to) {
    const whole = this.step.length;
    const length = Math.min(Math.max(to - from, Math.min(50, whole)), whole);
    this.from = Math.min(Math.max(from, 0), whole - length);
    this.to = this.from + length;
    const end = `${time(this.from, whole)} to ${time(this.to, whole)}`;
    this.output.textContent = length === whole ? `all ${time(whole)}` : `${end} of ${time(whole)}`;
    this.zoomed = length < whole;
    this.draw();
  }

  zoom(factor, at = (this.from + this.to) / 2) { this.zoomTo(at - (at - this.from) * factor, at + (this.to - at) * factor); }
  move(part) { const by = part * (this.to - this.from); this.zoomTo(this.from + by, this.to + by); }
  act(name) {
    ({ in: () => this.zoom(0.5), out: () => this.zoom(2), left: () => this.move(-0.3), right: () => this.move(0.3), fit: () => this.zoomTo(0, this.step.length) })[name]();
    this.noteWindow();
  }

  // ---- drawing

  draw() {
    const width = this.box.clientWidth;
    if (!this.step || !width) return;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = this.height * scale;
    const ink = (this.ink = this.canvas.getContext("2d"));
    ink.scale(scale, scale);
    this.perNs = width / (this.to - this.from);
    this.colours = Object.fromEntries([...PHASES, ...WAITS, "text", "quiet", "line", "panel", "ground", "idle", "idle-ground"].map((name) => [name, colour(name)]));
    ink.fillStyle = this.colours.ground;
    ink.fillRect(0, 0, width, this.height);
    this.drawRuler(width);
    for (const line of this.lines) line.row ? this.drawRow(line, width) : this.drawHead(line, width);
  }

  drawRuler(width) {
    const { ink } = this;
    const length = this.to - this.from;
    const step = tickStep(length, width / 110);
    ink.font = "11px system-ui, sans-serif";
    ink.textBaseline = "middle";
    for (let tick = Math.ceil(this.from / step) * step; tick <= this.to; tick += step) {
      const x = (tick - this.from) * this.perNs;
      ink.fillStyle = this.colours.line;
      ink.fillRect(x, RULER - 6, 1, this.height);
      ink.fillStyle = this.colours.quiet;
      const text = this.to >= 1e6 ? `${+(tick / 1e6).toFixed(6)} ms` : `${+(tick / 1e3).toFixed(3)} µs`;
      if (x + ink.measureText(text).width + 4 < width) ink.fillText(text, x + 3, RULER / 2 - 2);
    }
  }

  drawHead({ label, y }, width) {
    const { ink } = this;
    ink.font = "600 12px system-ui, sans-serif";
    ink.fillStyle = this.colours.ground;
    ink.fillRect(0, y + 2, Math.min(ink.measureText(label).width + 10, width), HEAD - 3);
    ink.fillStyle = this.colours.quiet;
    ink.fillText(label, 2, y + HEAD / 2 + 1, width - 4);
  }

  // what is picked comes last, so that it shows however short it is
  drawRow({ row, y }, width) {
    const { ink, sheet } = this;
    if (row.kind === "idle") { ink.fillStyle = this.colours.panel; ink.fillRect(0, y, width, LINE - 3); }
    ink.font = "11px system-ui, sans-serif";
    const picked = sheet.picked >= 0 && row.tree;
    this.drawBoxes(row, y, width, picked ? (one) => !sheet.isInside(row.tree[one]) : null, 0.22, 0.6);
    if (picked) this.drawBoxes(row, y, width, (one) => sheet.isInside(row.tree[one]), 1, 2);
    ink.globalAlpha = 1;
  }

  drawBoxes(row, y, width, wanted, alpha, least) {
    const { perNs } = this;
    const from = this.from + this.step.start, to = this.to + this.step.start;
    let drawn = -1;
    for (let one = this.first(row, from); one < row.start.length && row.start[one] < to; one++) {
      if (wanted && !wanted(one)) continue;
      const x = (row.start[one] - from) * perNs;
      const right = x + row.length[one] * perNs;
      if (right < drawn + 0.4) continue; // less than a pixel, and on one already drawn
      const left = Math.max(x, 0, drawn);
      const wide = Math.max(Math.min(right, width) - left, least);
      drawn = left + wide;
      if (row.kind === "idle") this.drawGap(left, y, wide);
      else this.drawBox(row, one, left, y, wide, wanted ? alpha : 1);
    }
  }

  drawGap(x, y, wide) {
    const { ink } = this;
    ink.fillStyle = wide > 4 ? this.colours["idle-ground"] : this.colours.idle;
    ink.fillRect(x, y, wide, LINE - 3);
    if (wide <= 4) return;
    ink.save();
    ink.beginPath();
    ink.rect(x, y, wide, LINE - 3);
    ink.clip();
    ink.strokeStyle = this.colours.idle;
    ink.lineWidth = 1;
    ink.beginPath();
    for (let at = x - LINE - (x % 6); at < x + wide; at += 6) { ink.moveTo(at, y + LINE); ink.lineTo(at + LINE, y); }
    ink.stroke();
    ink.restore();
  }

  phase(row, one) { const text = this.texts[row.phase[one]]; return PHASES.includes(text) ? text : "other"; }
  foreign(row, one) { return row.instance !== undefined && this.step.instance !== null && row.instance[one] !== this.step.instance + 1; }

  drawBox(row, one, x, y, wide, alpha) {
    const { ink } = this;
    const phase = this.phase(row, one);
    ink.globalAlpha = Math.min(alpha, this.foreign(row, one) ? 0.4 : 1);
    ink.fillStyle = this.colours[row.kind === "stall" ? "idle-ground" : row.kind === "collective" ? this.texts[row.phase[one]] : phase];
    ink.fillRect(x, y, wide > 3 ? wide - 0.8 : wide, LINE - 3);
    if (wide < 26) return;
    ink.save();
    ink.beginPath();
    ink.rect(x, y, wide - 3, LINE);
    ink.clip();
    ink.fillStyle = ["backward", "recompute"].includes(phase) || ["stall", "collective"].includes(row.kind) || document.documentElement.dataset.theme === "dark" ? "#101214" : "#ffffff";
    ink.fillText(this.label(row, one, wide - 6), x + 3, y + (LINE - 3) / 2 + 0.5);
    ink.restore();
  }

  // a layer by its last words: its parent is drawn above it; by its number where there is no room for more
  label(row, one, room) {
    const text = this.texts[row.text[one]].slice(0, 120);
    if (row.count?.[one] > 1) return `${row.count[one]} operations`;
    if (["stall", "collective"].includes(row.kind)) return text;
    if (row.kind === "op") return text.replace(/^void /, "");
    const words = lastWords(text);
    return this.ink.measureText(words).width <= room ? words : words.split(".").at(-1);
  }

  // ---- finding

  // the first box of a row that ends behind a moment; boxes of a row come in order
  first(row, moment) {
    let low = 0, high = row.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.start[middle] + row.length[middle] <= moment) low = middle + 1; else high = middle;
    }
    return low;
  }

  hit(event) {
    const area = this.canvas.getBoundingClientRect();
    const y = event.clientY - area.top;
    const at = this.step.start + this.from + (event.clientX - area.left) / this.perNs;
    const slack = 2 / this.perNs;
    const line = this.lines.find((one) => one.row && y >= one.y && y < one.y + LINE);
    if (!line) return null;
    for (let one = this.first(line.row, this.step.start + this.from); one < line.row.start.length && line.row.start[one] <= at + slack; one++)
      if (line.row.start[one] + line.row.length[one] >= at - slack) return { row: line.row, one };
    return null;
  }

  describe({ row, one }) {
    const text = this.texts[row.text[one]];
    const when = `${time(row.length[one])}, from ${time(row.start[one] - this.step.start, this.step.length)}`;
    if (row.kind === "idle") return `idle\n${when}\nafter ${this.texts[row.layer[one]]}, before ${text}`;
    const phase = row.kind === "range" || row.kind === "stall" ? (row.kind === "range" ? "on the CPU" : "the device ran nothing") : this.texts[row.phase[one]];
    const layer = row.layer ? `\nlayer ${this.texts[row.layer[one]]}` : "";
    const foreign = this.foreign(row, one) ? ", of another step" : "";
    if (row.count?.[one] > 1) return `${row.count[one]} operations, the longest ${text}\n${phase}, ${time(row.busy[one])} of ${when}${foreign}${layer}`;
    return `${text}\n${KINDS[row.kind]}, ${phase}, ${when}${foreign}${layer}`;
  }

  // what the picked layer does in this step
  inStep() {
    const end = this.step.start + this.step.length;
    let count = 0, ns = 0, from = Infinity, to = -Infinity;
    for (const { row } of this.lines) {
      if (row?.kind !== "op" && row?.kind !== "work") continue;
      for (let one = this.first(row, this.step.start); one < row.start.length && row.start[one] < end; one++) {
        if (this.foreign(row, one) || !this.sheet.isInside(row.tree[one])) continue;
        count += row.count?.[one] ?? 1;
        ns += row.busy?.[one] ?? row.length[one];
        from = Math.min(from, row.start[one] - this.step.start);
        to = Math.max(to, row.start[one] + row.length[one] - this.step.start);
      }
    }
    return { count, ns, from, to };
  }
  tellPicked() {
    if (this.sheet.picked < 0) { this.detail.textContent = ""; return; }
    const { count, ns } = this.inStep();
    const name = this.sheet.names[this.sheet.picked];
    this.detail.textContent = count ? `${name} ${this.step.step === null ? "here" : "in this step"}: ${count.toLocaleString("en")} ${this.groups.some((group) => group.rank !== undefined) ? "piece" : "operation"}${count === 1 ? "" : "s"}, ${time(ns)}` : `${name} runs nothing in this step${this.step.step === null ? "" : `, ${this.step.title}`}`;
  }

  // the picked layer's first box, with room on both sides; outside the layers all its operations
  goToPicked() {
    for (const { row } of this.lines) {
      if (row?.kind !== "layer") continue;
      const end = this.step.start + this.step.length;
      for (let one = this.first(row, this.step.start); one < row.start.length && row.start[one] < end; one++) {
        if (!this.sheet.members.has(row.tree[one])) continue;
        const from = row.start[one] - this.step.start;
        return this.zoomTo(from - row.length[one] * 0.1, from + row.length[one] * 1.1);
      }
    }
    const { count, from, to } = this.inStep();
    if (count) this.zoomTo(from - (to - from) * 0.1, to + (to - from) * 0.1);
  }

  // a stretch of the capture's time, in whichever of the steps holds it
  goToTime(start, end) {
    const [from, to] = [start - this.data.start, end - this.data.start];
    const index = this.data.steps.findIndex((one) => from < one.start + one.length && to > one.start);
    if (index < 0) return false;
    this.show(index);
    const room = Math.max((to - from) * 0.2, 500);
    this.zoomTo(from - this.step.start - room, to - this.step.start + room);
    return true;
  }

  // ---- hands

  listen() {
    const { canvas } = this;
    const at = (event) => this.from + (event.clientX - canvas.getBoundingClientRect().left) / this.perNs;
    for (const button of this.sheet.element.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => this.act(button.dataset.zoom));
    const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "fit", Home: "fit" };
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || !(event.key in keys)) return;
      event.preventDefault();
      this.act(keys[event.key]);
    });
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) this.zoom(1.0015 ** event.deltaY, at(event));
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move((event.deltaX || event.deltaY) / 1000);
      else return;
      event.preventDefault();
      this.noteWindow();
    }, { passive: false });
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, from: this.from, to: this.to }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { drag = null; this.noteWindow(); });
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        const by = (drag.x - event.clientX) / this.perNs;
        this.zoomTo(drag.from + by, drag.to + by);
        return tip.hide();
      }
      const found = this.hit(event);
      if (found) tip.show(this.describe(found), event.clientX, event.clientY); else tip.hide();
    });
    canvas.addEventListener("pointerleave", () => tip.hide());
    canvas.addEventListener("click", (event) => {
      const found = this.hit(event);
      if (found) this.detail.textContent = this.describe(found).replaceAll("\n", " · "); else this.tellPicked();
    });
    canvas.addEventListener("dblclick", (event) => {
      const found = this.hit(event);
      if (!found) return;
      const { row, one } = found;
      const from = row.start[one] - this.step.start;
      this.zoomTo(from - row.length[one] * 0.1, from + row.length[one] * 1.1);
      this.noteWindow();
    });
  }
}

// One step in time on a canvas: layers over the GPU's streams, idle gaps, and the ranges of the CPU's threads.

const LINE = 19, HEAD = 22, RULER = 24, KINDS = { layer: "layer", op: "operation", range: "range", idle: "idle" };

class Timeline {
  constructor(sheet) {
    this.sheet = sheet;
    this.box = sheet.part("timeline");
    this.canvas = this.box.firstElementChild;
    this.output = sheet.part("window");
    this.detail = sheet.part("detail");
    this.select = document.querySelector(`[data-timeline="${sheet.id}"]`);
    this.select?.addEventListener("change", () => this.show(Number(this.select.value)));
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.box);
    document.addEventListener("theme", () => this.draw());
    sheet.onPick(() => this.draw());
    this.show(0);
  }

  show(index) {
    this.data = this.sheet.data.timelines[index];
    if (this.select) this.select.value = String(index);
    this.lines = [];
    let y = RULER;
    for (const group of this.data.groups) {
      this.lines.push({ label: group.label, y });
      y += HEAD;
      for (const row of group.rows) { this.lines.push({ row, y }); y += LINE; }
    }
    this.height = y + 4;
    this.canvas.style.height = `${this.height}px`;
    this.rowOfText = this.data.texts.map((text) => this.sheet.rowOf.get(text) ?? -1);
    this.detail.textContent = this.data.note;
    this.zoomTo(0, this.data.length);
  }

  zoomTo(from, to) {
    const whole = this.data.length;
    const length = Math.min(Math.max(to - from, Math.min(50, whole)), whole);
    this.from = Math.min(Math.max(from, 0), whole - length);
    this.to = this.from + length;
    const end = `${time(this.from, whole)} to ${time(this.to, whole)}`;
    this.output.textContent = length === whole ? `all ${time(whole)}` : `${end} of ${time(whole)}`;
    this.draw();
  }

  zoom(factor, at = (this.from + this.to) / 2) { this.zoomTo(at - (at - this.from) * factor, at + (this.to - at) * factor); }
  move(part) { const by = part * (this.to - this.from); this.zoomTo(this.from + by, this.to + by); }
  act(name) {
    ({ in: () => this.zoom(0.5), out: () => this.zoom(2), left: () => this.move(-0.3), right: () => this.move(0.3), fit: () => this.zoomTo(0, this.data.length) })[name]();
  }

  // ---- drawing

  draw() {
    const width = this.box.clientWidth;
    if (!this.data || !width) return;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = this.height * scale;
    const ink = (this.ink = this.canvas.getContext("2d"));
    ink.scale(scale, scale);
    this.perNs = width / (this.to - this.from);
    this.colours = Object.fromEntries([...PHASES, "text", "quiet", "line", "panel", "ground", "idle", "idle-ground"].map((name) => [name, colour(name)]));
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

  drawRow({ row, y }, width) {
    const { ink, perNs, from } = this;
    if (row.kind === "idle") { ink.fillStyle = this.colours.panel; ink.fillRect(0, y, width, LINE - 3); }
    ink.font = "11px system-ui, sans-serif";
    let drawn = -1;
    for (let one = this.first(row); one < row.start.length && row.start[one] < this.to; one++) {
      const x = (row.start[one] - from) * perNs;
      const right = x + row.length[one] * perNs;
      if (right < drawn + 0.4) continue; // less than a pixel, and on one already drawn
      const left = Math.max(x, 0, drawn);
      const wide = Math.max(Math.min(right, width) - left, 0.6);
      drawn = left + wide;
      if (row.kind === "idle") this.drawGap(left, y, wide);
      else this.drawBox(row, one, left, y, wide);
    }
    ink.globalAlpha = 1;
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

  drawBox(row, one, x, y, wide) {
    const { ink, sheet } = this;
    const layer = this.rowOfText[(row.layer ?? row.text)[one]];
    const faded = sheet.picked >= 0 && !sheet.isInside(layer);
    ink.globalAlpha = faded ? 0.22 : row.own?.[one] === 0 ? 0.4 : 1;
    ink.fillStyle = this.colours[PHASES[row.phase[one]]];
    ink.fillRect(x, y, wide > 3 ? wide - 0.8 : wide, LINE - 3);
    if (wide < 26) return;
    ink.save();
    ink.beginPath();
    ink.rect(x, y, wide - 3, LINE);
    ink.clip();
    ink.fillStyle = ["backward", "recompute"].includes(PHASES[row.phase[one]]) || document.documentElement.dataset.theme === "dark" ? "#101214" : "#ffffff";
    ink.fillText(this.label(row, one, wide - 6), x + 3, y + (LINE - 3) / 2 + 0.5);
    ink.restore();
  }

  // a layer by its last words: its parent is drawn above it; by its number where there is no room for more
  label(row, one, room) {
    const text = this.data.texts[row.text[one]].slice(0, 120);
    if (row.kind === "op") return text.replace(/^void /, "");
    const words = lastWords(text);
    return this.ink.measureText(words).width <= room ? words : words.split(".").at(-1);
  }

  // ---- finding

  // the first box of a row that ends behind the window's begin; boxes of a row come in order
  first(row) {
    let low = 0, high = row.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.start[middle] + row.length[middle] <= this.from) low = middle + 1; else high = middle;
    }
    return low;
  }

  hit(event) {
    const area = this.canvas.getBoundingClientRect();
    const y = event.clientY - area.top;
    const at = this.from + (event.clientX - area.left) / this.perNs;
    const slack = 2 / this.perNs;
    const line = this.lines.find((one) => one.row && y >= one.y && y < one.y + LINE);
    if (!line) return null;
    for (let one = this.first(line.row); one < line.row.start.length && line.row.start[one] <= at + slack; one++)
      if (line.row.start[one] + line.row.length[one] >= at - slack) return { row: line.row, one };
    return null;
  }

  describe({ row, one }) {
    const text = this.data.texts[row.text[one]];
    const when = `${time(row.length[one])}, from ${time(row.start[one], this.data.length)}`;
    if (row.kind === "idle") return `idle\n${when}\nafter ${this.data.texts[row.layer[one]]}, before ${text}`;
    const phase = row.kind === "range" ? "on the CPU" : PHASES[row.phase[one]];
    const layer = row.layer ? `\nlayer ${this.data.texts[row.layer[one]]}` : "";
    return `${text}\n${KINDS[row.kind]}, ${phase}, ${when}${row.own?.[one] === 0 ? ", of another step" : ""}${layer}`;
  }

  // the picked layer's first box, with room on both sides
  goToLayer(name) {
    const text = this.data.texts.indexOf(name);
    for (const { row } of this.lines) {
      if (row?.kind !== "layer") continue;
      const one = row.text.indexOf(text);
      if (one >= 0) return this.zoomTo(row.start[one] - row.length[one] * 0.1, row.start[one] + row.length[one] * 1.1);
    }
  }

  // a stretch of the capture's time, in whichever of the timelines holds it
  goToTime(start, end) {
    const index = this.sheet.data.timelines.findIndex((one) => start < one.start + one.length && end > one.start);
    if (index < 0) return false;
    this.show(index);
    const room = Math.max((end - start) * 0.2, 500);
    this.zoomTo(start - this.data.start - room, end - this.data.start + room);
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
    }, { passive: false });
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, from: this.from, to: this.to }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { drag = null; });
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
      this.detail.textContent = found ? this.describe(found).replaceAll("\n", " · ") : this.data.note;
    });
    canvas.addEventListener("dblclick", (event) => {
      const found = this.hit(event);
      if (!found) return;
      const { row, one } = found;
      this.zoomTo(row.start[one] - row.length[one] * 0.1, row.start[one] + row.length[one] * 1.1);
    });
  }
}

// A heat map on a canvas: rows by ranks, however many. Where cells are smaller than a pixel, the pixel shows the one
// that stands out most.

const HEAT_HIGH = 560, HEAT_ROW = 15, NONE = 65535;

class Heat {
  constructor(sheet, name, data, { pick, words, scale = "middle" }) {
    Object.assign(this, { sheet, data, pick, words });
    this.box = sheet.part(name);
    this.canvas = this.box.firstElementChild;
    this.detail = sheet.part(`${name}-detail`);
    this.legend = sheet.part(`${name}-legend`);
    this.measures = data.measures.map((measure) => columns(sheet.buffer, measure));
    this.what = sheet.element.querySelector(`[data-measure-of="${name}"]`);
    this.how = sheet.element.querySelector(`[data-scale-of="${name}"]`);
    this.search = sheet.element.querySelector(`[data-rows-of="${name}"]`);
    this.measures.forEach((measure, place) => this.what?.append(make("option", { value: place }, measure.name)));
    if (this.how) this.how.value = scale;
    for (const input of [this.what, this.how]) input?.addEventListener("change", () => this.draw());
    this.search?.addEventListener("input", () => { this.filter(); this.draw(); });
    this.cursor = null;
    this.filter();
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.box);
    document.addEventListener("theme", () => this.draw());
  }

  filter() {
    const needle = this.search?.value.trim().toLowerCase() ?? "";
    this.rows = this.data.rows.map((_, row) => row).filter((row) => this.data.rows[row].toLowerCase().includes(needle));
    this.cursor = null;
  }

  get measure() { return this.measures[Number(this.what?.value ?? 0)]; }
  value(row, column) {
    const cell = this.measure.cells[row * this.data.columns.length + column];
    return cell === NONE ? null : cell * this.measure.scale[row];
  }
  // what the colour tells: the value, or how much it is above the median of its row
  told(row, column, value = this.value(row, column)) { return value === null ? null : this.how?.value === "middle" ? value - this.measure.middle[row] : value; }

  draw() {
    const width = this.box.clientWidth;
    if (!width || !this.measures.length) return;
    const scale = window.devicePixelRatio || 1;
    const many = this.data.columns.length, rows = this.rows.length;
    this.left = Math.min(Math.max(...this.rows.map((row) => this.data.rows[row].length), 4) * 6.4 + 10, Math.max(width * 0.34, width - many * 48 - 6));
    this.high = Math.min(Math.max(rows * HEAT_ROW, 20), HEAT_HIGH);
    this.wide = Math.min(width - this.left - 6, many * 48);
    Object.assign(this.canvas, { width: width * scale, height: (this.high + 24) * scale });
    this.canvas.style.height = `${this.high + 24}px`;
    const ink = this.canvas.getContext("2d");
    ink.scale(scale, scale);
    ink.fillStyle = colour("ground");
    ink.fillRect(0, 0, width, this.high + 24);
    if (rows) this.drawCells(ink, Math.min(many, Math.max(Math.floor(this.wide * scale), 1)), Math.min(rows, Math.max(Math.floor(this.high * scale), 1)));
    this.drawNames(ink);
    this.drawMarks(ink);
    if (this.cursor) {
      ink.strokeStyle = colour("text");
      ink.lineWidth = 2;
      const [w, h] = [this.wide / many, this.high / rows];
      ink.strokeRect(this.left + this.cursor.column * w - 1, this.cursor.row * h - 1, Math.max(w, 2) + 2, Math.max(h, 2) + 2);
    }
  }

  drawCells(ink, across, down) {
    const many = this.data.columns.length, rows = this.rows.length;
    const most = new Float64Array(across * down).fill(NaN);
    let high = 0, low = 0;
    for (let place = 0; place < rows; place++) {
      const row = this.rows[place];
      const y = Math.floor((place * down) / rows) * across;
      for (let column = 0; column < many; column++) {
        const told = this.told(row, column);
        if (told === null) continue;
        if (told > high) high = told; else if (told < low) low = told;
        const at = y + Math.floor((column * across) / many);
        if (!(Math.abs(told) <= Math.abs(most[at]))) most[at] = told;
      }
    }
    const whole = Math.max(high, -low) || 1;
    this.marks = this.standingOut(high);
    const [ground, none, above, below] = ["ground", "panel", this.how?.value === "middle" ? "worse" : "accent", "forward"].map((name) => rgb(colour(name)));
    const image = new ImageData(across, down);
    for (let at = 0; at < most.length; at++) {
      const part = Math.sqrt(Math.abs(most[at]) / whole);
      const to = most[at] >= 0 ? above : below;
      for (let one = 0; one < 3; one++) image.data[4 * at + one] = Number.isNaN(most[at]) ? none[one] : ground[one] + part * (to[one] - ground[one]);
      image.data[4 * at + 3] = 255;
    }
    const small = new OffscreenCanvas(across, down);
    small.getContext("2d").putImageData(image, 0, 0);
    ink.imageSmoothingEnabled = false;
    ink.drawImage(small, this.left, 0, this.wide, this.high);
    ink.strokeStyle = colour("line");
    ink.strokeRect(this.left + 0.5, 0.5, this.wide - 1, this.high - 1);
    this.legend.textContent = this.how?.value === "middle"
      ? `${rows} rows, ${many} columns; no colour is the median of its row, full colour ${time(whole)} above or below; at most ${time(high)} above`
      : `${rows} rows, ${many} columns; no colour is nothing, full colour ${time(whole)}`;
  }

  // the few cells far above all others: they get a ring where a cell is too small to be seen
  standingOut(high) {
    if (this.how?.value !== "middle" || (this.wide / this.data.columns.length > 5 && this.high / this.rows.length > 5)) return [];
    const found = [];
    for (let row = 0; row < this.rows.length && found.length < 9; row++)
      for (let column = 0; column < this.data.columns.length && found.length < 9; column++)
        if (this.told(this.rows[row], column) > high / 2) found.push({ row, column });
    return found.length < 9 ? found : [];
  }

  drawMarks(ink) {
    ink.strokeStyle = colour("worse");
    ink.lineWidth = 2;
    for (const { row, column } of this.marks ?? []) {
      const [x, y] = [this.left + ((column + 0.5) * this.wide) / this.data.columns.length, ((row + 0.5) * this.high) / this.rows.length];
      ink.beginPath();
      ink.arc(x, Math.max(y, 8), 7, 0, 7);
      ink.stroke();
    }
    if (!this.marks?.length) return;
    const { row, column } = this.marks[0];
    ink.font = "600 12px system-ui, sans-serif";
    ink.fillStyle = colour("worse");
    const text = `rank ${this.data.columns[column]}`;
    const x = this.left + (column * this.wide) / this.data.columns.length + 12;
    const y = Math.max(((row + 0.5) * this.high) / this.rows.length, 8);
    if (x + ink.measureText(text).width < this.left + this.wide) ink.fillText(text, x, y); else ink.fillText(text, x - 24 - ink.measureText(text).width, y);
  }

  drawNames(ink) {
    ink.font = "11px system-ui, sans-serif";
    ink.fillStyle = colour("quiet");
    ink.textBaseline = "middle";
    const step = Math.max(Math.ceil((HEAT_ROW * this.rows.length) / this.high / 1.15), 1);
    for (let place = 0, last = -99; place < this.rows.length; place += step) {
      const y = Math.max(((place + 0.5) * this.high) / this.rows.length, 6);
      if (y - last < 11) continue;
      ink.fillText(shortened(ink, this.data.rows[this.rows[place]], this.left - 8), 2, y);
      last = y;
    }
    const many = this.data.columns.length;
    const each = this.wide / many > 30 ? 1 : Math.max(Math.ceil(tickStep(many, this.wide / 56)), 1);
    ink.textAlign = "center";
    for (let column = 0; column < many; column += each)
      ink.fillText(this.data.columns[column].split(" ")[0], this.left + ((column + 0.5) * this.wide) / many, this.high + 12);
    ink.textAlign = "left";
  }

  hit(event) {
    const area = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - area.left - this.left) / this.wide) * this.data.columns.length);
    const row = Math.floor(((event.clientY - area.top) / this.high) * this.rows.length);
    return column >= 0 && column < this.data.columns.length && row >= 0 && row < this.rows.length ? { row, column } : null;
  }

  describe({ row, column }) {
    const of = this.rows[row], value = this.value(of, column);
    const words = this.words(this.data.rows[of], this.data.columns[column]);
    if (value === null) return `${words}: not there`;
    const over = value - this.measure.middle[of];
    const middle = this.how ? `, ${over < 0 ? "−" : "+"}${time(Math.abs(over))} against the median of its row` : "";
    return `${words}: ${this.measure.name} ${time(value)}${middle}`;
  }

  choose(at) {
    this.cursor = at;
    this.detail.textContent = this.describe(at);
    this.draw();
  }
  take() { if (this.cursor) this.pick?.(this.rows[this.cursor.row], this.data.rank[this.cursor.column], this.cursor.column); }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => { const at = this.hit(event); if (at) tip.show(this.describe(at), event.clientX, event.clientY); else tip.hide(); });
    canvas.addEventListener("pointerleave", () => tip.hide());
    canvas.addEventListener("click", (event) => { const at = this.hit(event); if (at) { this.choose(at); this.take(); } });
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey) return;
      if (event.key === "Enter") return this.take();
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      const { row, column } = this.cursor ?? { row: 0, column: -move[1] };
      const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
      this.choose({ row: within(row + (this.cursor ? move[0] : 0), this.rows.length), column: within(column + move[1], this.data.columns.length) });
    });
  }
}

// the end of a name tells more than its beginning
function shortened(ink, text, width) {
  if (ink.measureText(text).width <= width) return text;
  let cut = Math.max(text.length - Math.floor((text.length * width) / ink.measureText(text).width), 1);
  while (cut < text.length && ink.measureText(`…${text.slice(cut)}`).width > width) cut++;
  return `…${text.slice(cut)}`;
}

// a colour of the page as three numbers
function rgb(text) {
  const ink = new OffscreenCanvas(1, 1).getContext("2d");
  ink.fillStyle = text;
  ink.fillRect(0, 0, 1, 1);
  return [...ink.getImageData(0, 0, 1, 1).data].slice(0, 3);
}

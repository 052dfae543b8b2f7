// The kernel table: every kernel by layer and phase, gathered as the reader asks, searched, sorted, a part at a time.

function kernels(sheet) {
  const table = sheet.part("kernels");
  if (!table || !sheet.data.kernels) return;
  const { texts } = sheet.data;
  const data = columns(sheet.buffer, sheet.data.kernels);
  const steps = sheet.data.steps;
  const PART = 200;
  const search = sheet.element.querySelector("[data-kernels]");
  const by = sheet.element.querySelector("[data-kernels-by]");
  const more = sheet.part("kernels-more");
  const count = sheet.part("kernels-count");
  const rowOf = Array.from(data.layer, (layer, one) => sheet.rowFor(texts[layer], texts[data.phase[one]]));
  const KEYS = { kernel: ["name", "kernel_class"], place: ["name", "kernel_class", "layer", "phase"], layer: ["layer", "phase"], class: ["kernel_class"] };
  const HEADS = { name: "kernel", kernel_class: "class", layer: "layer", phase: "phase" };
  const NUMBERS = { calls: "calls", total: steps > 1 ? "ms per step" : "ms", share: "share", average: "avg µs", min: "min µs", max: "max µs" };
  let sorted = "total", falling = true, shown = PART, rows = [];

  function gather() {
    const keys = KEYS[by.value];
    const groups = new Map();
    for (let one = 0; one < data.calls.length; one++) {
      if (sheet.picked >= 0 && !sheet.isInside(rowOf[one])) continue;
      const key = keys.map((name) => data[name][one]).join(" ");
      let group = groups.get(key);
      if (!group) {
        group = { calls: 0, total: 0, min: Infinity, max: 0 };
        for (const name of keys) group[name] = texts[data[name][one]];
        group.found = keys.map((name) => group[name]).join("\n").toLowerCase();
        groups.set(key, group);
      }
      group.calls += data.calls[one];
      group.total += data.total[one];
      group.min = Math.min(group.min, data.min[one]);
      group.max = Math.max(group.max, data.max[one]);
    }
    rows = [...groups.values()];
    for (const row of rows) { row.share = row.total / (data.whole || 1); row.average = row.total / row.calls; }
    head(keys);
    show();
  }

  function head(keys) {
    const line = make("tr");
    for (const [name, title] of [...keys.map((key) => [key, HEADS[key]]), ...Object.entries(NUMBERS)]) {
      const cell = make("th", { "aria-sort": name === sorted ? (falling ? "descending" : "ascending") : "none", ...(name in NUMBERS ? { class: "number" } : {}) });
      const button = make("button", { type: "button" }, title);
      button.addEventListener("click", () => {
        falling = name === sorted ? !falling : name in NUMBERS;
        sorted = name;
        head(keys);
        show();
        table.tHead.querySelector("[aria-sort]:not([aria-sort=none]) button").focus();
      });
      cell.append(button);
      line.append(cell);
    }
    table.tHead.replaceChildren(line);
  }

  const micro = (ns) => (ns / 1e3).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: ns < 1e4 ? 2 : 1 });
  const calls = (number) => (number / steps).toLocaleString("en", { maximumFractionDigits: 1 });
  const milli = (ns) => { const ms = ns / steps / 1e6; return ms.toLocaleString("en", { minimumFractionDigits: 3, maximumFractionDigits: ms < 0.01 ? 5 : 3 }); };

  function line(row, keys) {
    const made = make("tr");
    for (const name of keys) made.append(make("td", { class: "text", title: row[name] }, row[name]));
    const cells = [calls(row.calls), milli(row.total), percent(row.total, data.whole), micro(row.average), micro(row.min), micro(row.max)];
    for (const text of cells) made.append(make("td", { class: "number" }, text));
    return made;
  }

  function show() {
    const needle = search.value.trim().toLowerCase();
    const found = rows.filter((row) => row.found.includes(needle));
    const sign = falling ? -1 : 1;
    found.sort((a, b) => (a[sorted] === b[sorted] ? b.total - a.total : sign * (a[sorted] < b[sorted] ? -1 : 1)));
    const keys = KEYS[by.value];
    table.tBodies[0].replaceChildren(...found.slice(0, shown).map((row) => line(row, keys)));
    more.hidden = found.length <= shown;
    more.textContent = `Show ${Math.min(PART, found.length - shown)} more`;
    const time = found.reduce((sum, row) => sum + row.total, 0);
    const of = sheet.picked >= 0 ? ` in ${sheet.names[sheet.picked]}` : "";
    count.textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows${of}, ${percent(time, data.whole)} of the time${sheet.data.kernels.note ? `; ${sheet.data.kernels.note}` : ""}`;
  }

  search.addEventListener("input", () => { shown = PART; show(); address.set({ kernels: search.value }); });
  by.addEventListener("change", () => { shown = PART; sorted = sorted in NUMBERS ? sorted : "total"; gather(); address.set({ by: by.value === "kernel" ? null : by.value }); });
  more.addEventListener("click", () => { shown += PART; show(); });
  sheet.onPick(gather);
  sheet.showKernels = (text, way) => {
    const changed = by.value !== way;
    if (search.value === text && !changed) return;
    search.value = text;
    by.value = way;
    if (changed) gather(); else show();
  };
  gather();
}

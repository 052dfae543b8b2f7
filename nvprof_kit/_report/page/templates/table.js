// Tables: sorted by a click on a head, searched, those of layers cut at a level and walked with the arrow keys.

class LayerTable {
  constructor(table) {
    this.table = table;
    this.body = table.tBodies[0];
    this.rows = [...this.body.rows];
    this.heads = [...table.tHead.rows[0].cells];
    this.needle = "";
    this.levels = Infinity;
    const tool = (name) => document.querySelector(`[data-${name}="${table.id}"]`);
    this.search = tool("search");
    this.count = tool("count");
    this.back = tool("order");
    this.heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => this.sort(column)));
    this.search?.addEventListener("input", () => this.find(this.search.value));
    tool("levels")?.addEventListener("change", (event) => { this.levels = Number(event.target.value) || Infinity; this.show(); });
    this.fold = tool("folded");
    this.fold?.addEventListener("change", () => this.show());
    this.back?.addEventListener("click", () => this.sort(0, "ascending"));
    this.show();
  }

  find(text) {
    if (this.search.value !== text) this.search.value = text;
    this.needle = text.trim().toLowerCase();
    this.show();
  }

  // by numbers the largest first; the first column of layers is the model's order, other texts go by the alphabet
  sort(column, direction) {
    const head = this.heads[column];
    const other = { ascending: "descending", descending: "ascending" };
    const texts = this.rows.every((row) => (row.cells[column].dataset.value ?? "") === "");
    const next = direction ?? other[head.ariaSort] ?? (column && !texts ? "descending" : "ascending");
    for (const one of this.heads) one.ariaSort = one === head ? next : "none";
    const value = texts ? (row) => row.cells[column].textContent : (row) => { const text = row.cells[column].dataset.value; return text === "" ? -Infinity : Number(text); };
    const sign = next === "ascending" ? 1 : -1;
    const keyed = this.rows.map((row, place) => [value(row), place, row]);
    keyed.sort((a, b) => (a[0] === b[0] ? a[1] - b[1] : sign * (a[0] < b[0] ? -1 : 1)));
    this.body.append(...keyed.map((one) => one[2]));
    this.inOrder = column === 0 && next === "ascending";
    this.show();
  }

  // full paths where the indentation would not tell the parent
  show() {
    const flat = this.needle !== "" || this.inOrder === false;
    if (!this.table.classList.contains("plain")) this.table.classList.toggle("tree", !flat);
    if (this.back) this.back.hidden = this.inOrder !== false;
    let shown = 0, all = 0;
    for (const row of this.rows) {
      row.hidden = (this.fold?.checked ? "inside" : "fold") in row.dataset || Number(row.dataset.depth ?? 0) >= this.levels || !(row.dataset.path ?? row.textContent).toLowerCase().includes(this.needle);
      shown += !row.hidden;
      all += !((this.fold?.checked ? "inside" : "fold") in row.dataset);
    }
    if (this.count) this.count.textContent = shown === all ? `${shown} rows` : `${shown} of ${all} rows`;
  }
}

// The table of a capture: its rows pick the layer that every other part shows.
function pickingTable(sheet) {
  const table = sheet.part("layers");
  const made = new LayerTable(table);
  const rows = made.rows;
  rows.find((row) => !row.hidden)?.setAttribute("tabindex", "0");
  const pick = (row) => sheet.choose(row.ariaSelected === "true" ? -1 : Number(row.dataset.row));
  made.body.addEventListener("click", (event) => { const row = event.target.closest("tr"); if (row) pick(row); });
  made.body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (step) {
      let next = row[step];
      while (next?.hidden) next = next[step];
      if (next) { row.tabIndex = -1; next.tabIndex = 0; next.focus(); }
    } else if (event.key === "Enter" || event.key === " ") pick(row);
    else return;
    event.preventDefault();
  });
  made.search.addEventListener("input", () => address.set({ search: made.search.value }));
  sheet.onPick((picked) => {
    for (const row of rows) row.ariaSelected = String(Number(row.dataset.row) === picked);
    const box = table.parentElement;
    const row = rows.find((one) => Number(one.dataset.row) === picked);
    // one of equal blocks that are folded shows when it is picked, and the blocks as one row when that is
    if (row && made.fold && row.hidden && (made.fold.checked ? "inside" : "fold") in row.dataset) { made.fold.checked = !made.fold.checked; made.show(); }
    if (row && (row.offsetTop < box.scrollTop + 40 || row.offsetTop > box.scrollTop + box.clientHeight - 60))
      box.scrollTop = row.offsetTop - box.clientHeight / 2;
  });
  return made;
}

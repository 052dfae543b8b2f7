// The model's tree by time or by memory: a box for each layer below its parent's, as wide as what it took.

function icicle(sheet) {
  const { name, parent, depth } = sheet.data.tree;
  const { memory } = sheet.data;
  const box = sheet.part("icicle");
  const choice = sheet.element.querySelector("[data-measure]");
  let measure = "time";
  let total = sheet.data.tree.total;
  const children = name.map(() => []);
  const tops = [];
  parent.forEach((one, row) => (one < 0 ? tops : children[one]).push(row));
  const ROW = 27;
  let root = -1;

  // a stripe of the phases' colours, each as wide as its part
  function stripe(row) {
    if (measure !== "time") return "linear-gradient(var(--accent), var(--accent))";
    let reached = 0;
    const stops = PHASES.map((phase) => {
      const from = reached;
      reached += (100 * sheet.data.tree[phase][row]) / total[row];
      return `var(--${phase}) ${from}% ${reached}%`;
    });
    return `linear-gradient(to right, ${stops.join(", ")})`;
  }
  const label = (row) => (parent[row] < 0 ? lastWords(name[row]) : name[row].startsWith(`${name[parent[row]]}.`) ? name[row].slice(name[parent[row]].length + 1) : name[row]);
  const whole = () => (root < 0 ? tops : [root]).reduce((sum, row) => sum + total[row], 0);

  function describeMemory(row) {
    const words = { kept: "kept by a call of its forward", cuda: "taken from CUDA in the whole capture" };
    const peak = memory.peak[row] ? `\nat most ${mib(memory.peak[row])} allocated while it ran` : "";
    return `${name[row]}\n${mib(memory[measure][row])} ${words[measure]}, ${percent(total[row], whole())} of what is shown${peak}`;
  }
  function describe(row) {
    if (measure !== "time") return describeMemory(row);
    const steps = sheet.data.steps;
    const parts = PHASES.filter((phase) => sheet.data.tree[phase][row]).map((phase) => `${phase} ${time(sheet.data.tree[phase][row] / steps)}`);
    return `${name[row]}\n${time(total[row] / steps)} of ${sheet.data.timeName}${steps > 1 ? " per step" : ""}, ${percent(total[row], whole())} of what is shown\n${parts.join(", ")}`;
  }

  function draw() {
    const all = whole();
    const made = [];
    let levels = 1;
    const place = (row, from, level) => {
      const share = all ? total[row] / all : 0;
      if (share * box.clientWidth < 1.5) return;
      levels = Math.max(levels, level + 1);
      const button = make("button", { type: "button", "data-row": row, "aria-pressed": sheet.members.has(row) }, label(row));
      button.style.setProperty("--stripe", stripe(row));
      Object.assign(button.style, { left: `${100 * from}%`, width: `${100 * share}%`, top: `${ROW * level}px` });
      if (share * box.clientWidth < 22) { button.textContent = ""; button.ariaLabel = name[row]; button.style.padding = "0"; }
      made.push(button);
      let next = from;
      for (const child of children[row]) { place(child, next, level + 1); next += total[child] / all; }
    };
    // the layers around the one gone into stay on top, as the way back
    const above = [];
    for (let row = root < 0 ? -1 : parent[root]; row >= 0; row = parent[row]) above.unshift(row);
    above.forEach((row, level) => {
      const button = make("button", { type: "button", "data-row": row, "aria-pressed": sheet.members.has(row) }, label(row));
      button.style.setProperty("--stripe", stripe(row));
      Object.assign(button.style, { left: "0", width: "100%", top: `${ROW * level}px`, opacity: ".55" });
      made.push(button);
    });
    let from = 0;
    for (const row of root < 0 ? tops : [root]) { place(row, from, above.length); from += total[row] / all; }
    box.replaceChildren(...made);
    box.style.height = `${ROW * Math.max(levels, above.length + 1)}px`;
  }

  function goInto(row) {
    root = row;
    sheet.choose(row);
    box.querySelector(`[data-row="${row}"]`)?.focus({ preventScroll: true });
  }
  box.addEventListener("click", (event) => {
    const row = event.target.dataset.row;
    if (row === undefined) return;
    goInto(Number(row) === root ? parent[root] : Number(row));
  });
  box.addEventListener("keydown", (event) => { if (event.key === "Escape" && root >= 0) goInto(parent[root]); });
  const hover = (event) => {
    const row = event.target.dataset.row;
    if (row === undefined) return tip.hide();
    const at = event.clientX ? event : event.target.getBoundingClientRect();
    tip.show(describe(Number(row)), event.clientX ?? at.left, event.clientY ?? at.bottom - 14);
  };
  box.addEventListener("pointermove", hover);
  box.addEventListener("focusin", hover);
  box.addEventListener("pointerleave", () => tip.hide());
  box.addEventListener("focusout", () => tip.hide());
  choice?.addEventListener("change", () => {
    measure = choice.value;
    total = measure === "time" ? sheet.data.tree.total : memory[`${measure}_width`];
    if (root >= 0 && !total[root]) root = -1;
    draw();
  });
  new ResizeObserver(draw).observe(box);
  sheet.onPick((row) => { if (row < 0) root = -1; draw(); });
  box.dataset.deepest = Math.max(...depth);
}

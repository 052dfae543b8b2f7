// The parts put together, the keys of the whole page, and what the address asks for.

const sheets = [...document.querySelectorAll(".sheet")].map((element, index) => new Sheet(element, index));
const tabs = [...document.querySelectorAll(".tab")];
const comparison = document.getElementById("changes");
if (comparison) new LayerTable(comparison);

// the parts of a capture, when it is first looked at
function build(sheet) {
  sheet.ready ??= (async () => {
    sheet.table = pickingTable(sheet);
    icicle(sheet);
    roofline(sheet);
    for (const table of sheet.element.querySelectorAll("table.plain")) new LayerTable(table);
    if (!await sheet.load()) return;
    steps(sheet);
    kernels(sheet);
  })();
  return sheet.ready;
}

async function open(index) {
  sheets.forEach((sheet, place) => { sheet.element.hidden = place !== index; });
  tabs.forEach((tab, place) => { tab.ariaPressed = String(place === index); });
  await build(sheets[index]);
}
tabs.forEach((tab, index) => tab.addEventListener("click", () => {
  const nothing = Object.fromEntries([...address.read().keys()].map((name) => [name, null]));
  address.set({ ...nothing, capture: index || null }, true);
  follow();
}));

// #capture=1&layer=model.layers.3&step=12&time=1200-1500&search=mlp; times are ns since the start of the capture
async function follow() {
  const asked = address.read();
  const index = Math.min(Math.max(Number(asked.get("capture")) || 0, 0), sheets.length - 1);
  const sheet = sheets[index];
  await open(index);
  const row = sheet.rowOf.get(asked.get("layer")) ?? -1;
  if (row !== sheet.picked) sheet.pick(row);
  if (sheet.table.search.value !== (asked.get("search") ?? "")) sheet.table.find(asked.get("search") ?? "");
  sheet.showKernels?.(asked.get("kernels") ?? "", asked.get("by") ?? "kernel");
  sheet.timeline?.follow(asked.get("step"), asked.get("time"), asked.get("show"));
  if (asked.get("show") === "layer" && row >= 0) {
    sheet.timeline?.goToPicked();
    sheet.part("layers").scrollIntoView({ block: "nearest" });
  } else if (asked.get("show") === "time") sheet.part("timeline-section").scrollIntoView();
  if (asked.has("show")) address.set({ show: null });
  delete document.documentElement.dataset.loading;
}
addEventListener("hashchange", follow);
follow();

document.getElementById("theme").addEventListener("click", () => theme.flip());
addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "d") theme.flip();
  else if (event.key === "/") { event.preventDefault(); sheets.find((sheet) => !sheet.element.hidden).table.search.focus(); }
});
// on paper every capture is there
let unprinted = [];
addEventListener("beforeprint", () => {
  unprinted = sheets.filter((sheet) => sheet.element.hidden);
  for (const sheet of sheets) { sheet.element.hidden = false; if (sheet.ready) sheet.pick(sheet.picked); }
});
addEventListener("afterprint", () => { for (const sheet of unprinted) sheet.element.hidden = true; });

// The parts put together, the keys of the whole page, and links to a layer or a time.

const sheets = [...document.querySelectorAll(".sheet")].map((element, index) => new Sheet(element, index));
for (const sheet of sheets) {
  sheet.table = pickingTable(sheet);
  icicle(sheet);
  sheet.timeline = new Timeline(sheet);
  steps(sheet);
}
const comparison = document.getElementById("changes");
if (comparison) new LayerTable(comparison);

const tabs = [...document.querySelectorAll(".tab")];
function open(index) {
  sheets.forEach((sheet, place) => { sheet.element.hidden = place !== index; });
  tabs.forEach((tab, place) => { tab.ariaPressed = String(place === index); });
}
tabs.forEach((tab, index) => tab.addEventListener("click", () => open(index)));

// #c0/layer/model.layers.3 and #c0/time/1200-1500 (ns since the capture's zero)
function follow() {
  const [id, kind, ...rest] = location.hash.slice(1).split("/");
  const index = sheets.findIndex((sheet) => sheet.id === id);
  if (index < 0) return;
  open(index);
  const sheet = sheets[index];
  if (kind === "layer") {
    const name = decodeURIComponent(rest.join("/"));
    const row = sheet.rowOf.get(name);
    if (row === undefined) return;
    sheet.pick(row);
    sheet.timeline.goToLayer(name);
    sheet.part("layers").scrollIntoView({ block: "nearest" });
  } else if (kind === "time" && sheet.timeline.goToTime(...rest[0].split("-").map(Number)))
    sheet.part("timeline-section").scrollIntoView();
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
  for (const sheet of sheets) { sheet.element.hidden = false; sheet.pick(sheet.picked); }
});
addEventListener("afterprint", () => { for (const sheet of unprinted) sheet.element.hidden = true; });

// The page of a job put together: what is picked in a heat map shows in the timeline, and the address knows it.

const sheet = new Sheet(document.querySelector(".sheet"), 0);
const ranks = [...document.querySelectorAll("[data-rank]")];

function showRanks(shown) {
  for (const box of ranks) box.checked = shown.includes(Number(box.dataset.rank));
  for (const group of sheet.timeline?.groups ?? []) group.hidden = !shown.includes(group.rank);
  if (!sheet.timeline) return;
  const { from, to } = sheet.timeline;
  sheet.timeline.show(sheet.timeline.index);
  sheet.timeline.zoomTo(from, to);
}
const shownRanks = () => ranks.filter((box) => box.checked).map((box) => Number(box.dataset.rank));

// a rank that is picked is among those shown in time, where the page holds it
function pickRank(rank) {
  address.set({ rank }, true);
  const told = sheet.part("rank");
  if (!told) return;
  const held = sheet.data.ranks.includes(rank);
  told.textContent = held ? `rank ${rank} is shown below` : `rank ${rank} is not among the ranks that this page holds in time: ${told.dataset.command} --timeline ${rank} -o FILE.html`;
  if (held && !shownRanks().includes(rank)) showRanks([...shownRanks(), rank]);
}

function heats() {
  const { layers, bySteps, matrix } = sheet.data;
  if (layers) {
    new Heat(sheet, "layers", layers, {
      words: (row, column) => `${row}, rank ${column}`,
      pick: (row, rank) => {
        sheet.choose(sheet.rowOf.get(layers.tree[row]) ?? -1);
        pickRank(rank);
      },
    });
  }
  if (bySteps) {
    new Heat(sheet, "by-step", bySteps, {
      scale: "value",
      words: (row, column) => `${row}, rank ${column}`,
      pick: (row, rank) => {
        pickRank(rank);
        const index = sheet.timeline?.data.steps.findIndex((step) => step.title === bySteps.rows[row]) ?? -1;
        if (index >= 0) { sheet.timeline.show(index); sheet.timeline.note(); }
      },
    });
  }
  if (matrix) new Heat(sheet, "matrix", matrix, { words: (row, column) => `rank ${row} waited for rank ${column}`, pick: (row, _, column) => pickRank(matrix.rank[column]) });
}

async function start() {
  for (const table of document.querySelectorAll("table.plain")) new LayerTable(table);
  if (!await sheet.load()) return;
  heats();
  for (const box of ranks) box.addEventListener("change", () => { showRanks(shownRanks()); address.set({ ranks: shownRanks().join(",") }); });
  document.getElementById("unpick")?.addEventListener("click", () => sheet.choose(-1));
  sheet.onPick((row) => { const button = document.getElementById("unpick"); if (button) button.hidden = row < 0; });
}

function follow() {
  const asked = address.read();
  const row = sheet.rowOf.get(asked.get("layer")) ?? -1;
  if (row !== sheet.picked) sheet.pick(row);
  const shown = asked.has("ranks") ? asked.get("ranks").split(",").map(Number) : sheet.data.ranks;
  if (String(shown) !== String(shownRanks())) showRanks(shown);
  sheet.timeline?.follow(asked.get("step"), asked.get("time"), null);
  delete document.documentElement.dataset.loading;
}
addEventListener("hashchange", follow);
start().then(follow);

document.getElementById("theme").addEventListener("click", () => theme.flip());
addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "d") theme.flip();
});

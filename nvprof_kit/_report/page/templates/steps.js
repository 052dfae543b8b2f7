// Time per step: a bar for each step, its phases stacked, and a mark at the step's length.

function steps(sheet) {
  const given = sheet.data.bySteps;
  const box = sheet.part("steps");
  if (!given || !box) return;
  const number = [...column(sheet.buffer, given.number)];
  const cells = column(sheet.buffer, given.cells);
  const all = {
    number,
    length: column(sheet.buffer, given.length),
    phases: columns(sheet.buffer, given.phases),
    layers: new Map(given.layers.map((row, place) => [row, cells.subarray(place * number.length, (place + 1) * number.length)])),
  };
  // of more steps than there is room for a bar is the mean of several
  const most = () => Math.max(Math.floor((box.clientWidth - 62) / 3), 50);
  const binned = (values, each) => (each === 1 ? values : Array.from({ length: Math.ceil(values.length / each) }, (_, bin) => {
    const part = values.slice(bin * each, (bin + 1) * each);
    return part.reduce((sum, value) => sum + value, 0) / part.length;
  }));
  const what = sheet.part("steps-what");

  function draw(picked) {
    const width = Math.max(box.clientWidth, 200), height = 230, left = 62, bottom = 24, top = 10;
    const each = Math.ceil(all.number.length / most());
    const data = { number: all.number.filter((_, step) => step % each === 0), length: binned(all.length, each), phases: Object.fromEntries(Object.entries(all.phases).map(([name, values]) => [name, binned(values, each)])) };
    const held = sheet.rowsOf(picked).filter((row) => all.layers.has(row)).map((row) => all.layers.get(row));
    const own = held.length ? binned(all.number.map((_, step) => held.reduce((sum, values) => sum + values[step], 0)), each) : undefined;
    const series = own ? { picked: own } : data.phases;
    const sums = data.number.map((_, step) => Object.values(series).reduce((sum, values) => sum + values[step], 0));
    const highest = Math.max(...sums, ...(own ? [0] : data.length)) || 1;
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Time per step" });
    const y = (value) => top + (height - top - bottom) * (1 - value / (1.05 * highest));
    const unit = tickStep(highest, 4);
    for (let tick = 0; tick <= highest; tick += unit) {
      svg.append(shape("line", { x1: left, x2: width, y1: y(tick), y2: y(tick) }));
      svg.append(shape("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, tick ? time(tick, highest).replace(/\.0+ /, " ") : "0"));
    }
    const pitch = (width - left) / data.number.length;
    const every = Math.ceil(36 / pitch);
    data.number.forEach((number, step) => {
      const group = shape("g", {});
      const wide = Math.min(pitch * 0.76, 90), x = left + pitch * step + (pitch - wide) / 2;
      let reached = 0;
      for (const [name, values] of Object.entries(series)) {
        if (!values[step]) continue;
        group.append(shape("rect", { class: name, x, width: wide, y: y(reached + values[step]), height: Math.max(y(reached) - y(reached + values[step]), 0) }));
        reached += values[step];
      }
      if (!own) group.append(shape("line", { class: "length", x1: x - wide * 0.1, x2: x + wide * 1.1, y1: y(data.length[step]), y2: y(data.length[step]) }));
      const parts = own ? [] : Object.entries(series).map(([name, values]) => `${name} ${time(values[step])}`);
      group.append(shape("title", {}, [`${each > 1 ? `${each} steps from ${number}, the mean` : `step ${number}`}: ${time(sums[step])} of ${sheet.data.timeName}`, ...parts, own ? "" : `the step took ${time(data.length[step])}`].filter(Boolean).join("\n")));
      group.dataset.place = step * each;
      svg.append(group);
      if (step % every === 0) svg.append(shape("text", { x: x + wide / 2, y: height - 6, "text-anchor": "middle" }, number));
    });
    box.replaceChildren(svg);
    const name = sheet.names[picked];
    what.textContent = own ? `${name} in each step; pick it again in the table to see all.`
      : `Bars are ${sheet.data.timeName} by phase${each > 1 ? `, the mean of ${each} steps each` : ""}, the line across is how long the step took; a click shows the step in time${picked >= 0 ? `; the page does not hold the steps of ${name}` : ""}.`;
  }
  box.addEventListener("click", (event) => {
    const group = event.target.closest("g");
    if (group) sheet.timeline?.choose(Number(group.dataset.place));
  });
  new ResizeObserver(() => draw(sheet.picked)).observe(box);
  sheet.onPick(draw);
}

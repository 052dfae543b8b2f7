// Time per step: a bar for each step, its phases stacked, and a mark at the step's length.

function steps(sheet) {
  const data = sheet.data.bySteps;
  const box = sheet.part("steps");
  if (!data || !box) return;
  const what = sheet.part("steps-what");
  const SVG = "http://www.w3.org/2000/svg";
  const shape = (name, attributes, text) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  function draw(picked) {
    const width = Math.max(box.clientWidth, 200), height = 230, left = 62, bottom = 24, top = 10;
    const own = picked >= 0 ? data.layers[picked] : undefined;
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
      group.append(shape("title", {}, [`step ${number}: ${time(sums[step])} of ${sheet.data.timeName}`, ...parts, own ? "" : `the step took ${time(data.length[step])}`].filter(Boolean).join("\n")));
      svg.append(group);
      if (step % every === 0) svg.append(shape("text", { x: x + wide / 2, y: height - 6, "text-anchor": "middle" }, number));
    });
    box.replaceChildren(svg);
    const name = sheet.data.tree.name[picked];
    what.textContent = own ? `${name} in each step; pick it again in the table to see all.`
      : `Bars are ${sheet.data.timeName} by phase, the line across is how long the step took${picked >= 0 ? `; the page does not hold the steps of ${name}` : ""}.`;
  }
  new ResizeObserver(() => draw(sheet.picked)).observe(box);
  sheet.onPick(draw);
}

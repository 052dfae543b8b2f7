// The roofline of the layers: operations a byte against operations a second, below what the GPU could do.

function roofline(sheet) {
  const given = sheet.data.roofline;
  const box = sheet.part("roofline");
  if (!given || !box) return;
  const peaks = Object.entries(given.peaks).sort((a, b) => a[1] - b[1]);
  const highest = peaks.at(-1)[1];
  const roof = (intensity, peak = highest) => Math.min(peak, intensity * given.bandwidth);
  const intensities = given.points.map((point) => point.intensity), rates = given.points.map((point) => point.rate);
  const knee = highest / given.bandwidth;
  const ends = [Math.min(...intensities, knee) / 3, Math.max(...intensities, knee) * 3];
  const heights = [Math.min(...rates, roof(ends[0])) / 2, highest * 2];
  const longest = Math.max(...given.points.map((point) => point.time));
  const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });

  function draw() {
    const width = Math.max(box.clientWidth, 300), height = 340, left = 62, bottom = 40, top = 12, right = 8;
    const along = (value, [low, high]) => Math.log(value / low) / Math.log(high / low);
    const x = (intensity) => left + (width - left - right) * along(intensity, ends);
    const y = (rate) => height - bottom - (height - top - bottom) * along(rate, heights);
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Roofline of the layers" });
    for (let tick = 10 ** Math.ceil(Math.log10(ends[0])); tick < ends[1]; tick *= 10) {
      svg.append(shape("line", { class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: height - bottom }));
      svg.append(shape("text", { x: x(tick), y: height - bottom + 16, "text-anchor": "middle" }, number(tick)));
    }
    for (let tick = 10 ** Math.ceil(Math.log10(heights[0])); tick < heights[1]; tick *= 10) {
      svg.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
      svg.append(shape("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, number(tick / 1e12)));
    }
    svg.append(shape("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, "operations a byte of memory traffic, each operator's own"));
    svg.append(shape("text", { x: 12, y: (height - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(height - bottom) / 2})` }, "TFLOP/s"));
    svg.append(shape("line", { class: "roof", x1: x(ends[0]), y1: y(roof(ends[0])), x2: x(knee), y2: y(highest) }));
    for (const [dtype, peak] of peaks) {
      svg.append(shape("line", { class: "roof", x1: x(peak / given.bandwidth), x2: width - right, y1: y(peak), y2: y(peak) }));
      svg.append(shape("text", { x: width - right, y: y(peak) - 5, "text-anchor": "end" }, `${dtype} ${number(peak / 1e12)} TFLOP/s${given.measured ? ", measured on this machine" : `, ${given.gpu}`}`));
    }
    svg.append(shape("text", { x: x(Math.sqrt(ends[0] * knee)) - 8, y: y(roof(Math.sqrt(ends[0] * knee))) - 8, "text-anchor": "end" }, `memory ${number(given.bandwidth / 1e12)} TB/s`));
    const labels = [];
    given.points.forEach((point, place) => {
      const dot = shape("circle", { class: point.phase, cx: x(point.intensity), cy: y(point.rate), r: 4 + 14 * Math.sqrt(point.time / longest), "data-place": place });
      if (sheet.members.has(sheet.rowOf.get(point.layer))) dot.classList.add("chosen");
      dot.append(shape("title", {}, `${point.name}\n${time(point.time / given.steps)}${given.steps > 1 ? " per step" : ""}, ${percent(point.limit, point.time)} of its limit\n${number(point.rate / 1e12)} TFLOP/s, ${number(point.intensity)} operations a byte`));
      svg.append(dot);
      const at = [x(point.intensity), y(point.rate)];
      if (labels.every(([other, beside]) => Math.abs(at[0] - other) > 150 || Math.abs(at[1] - beside) > 18)) {
        svg.append(shape("text", { x: at[0], y: at[1] + 34, "text-anchor": at[0] > width - 120 ? "end" : "middle" }, `${lastWords(point.layer)} ${point.phase}`));
        labels.push(at);
      }
    });
    box.replaceChildren(svg);
  }
  box.addEventListener("click", (event) => {
    const point = given.points[event.target.closest("circle")?.dataset.place];
    if (point) sheet.choose(sheet.rowOf.get(point.layer) ?? -1);
  });
  new ResizeObserver(draw).observe(box);
  sheet.onPick(draw);
}

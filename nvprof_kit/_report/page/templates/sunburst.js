"use strict";
const root = JSON.parse(document.getElementById("data").textContent);
const colours = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B5A900", "#8C8C8C"];
const svg = document.querySelector("svg"), rows = document.querySelector("tbody"), where = document.getElementById("where");
const RINGS = 5, WIDTH = 52;
const size = bytes => (bytes / 1048576).toFixed(2) + " MB";
const share = (part, whole) => (100 * part / (whole || 1)).toFixed(1) + " %";
function link(node, parent) { node.parent = parent; (node.parts || []).forEach(part => link(part, node)); }
function path(node) { return node.parent ? [...path(node.parent), node.name] : [node.name]; }
function arc(r0, r1, a0, a1) {
  const full = a1 - a0 > 2 * Math.PI - 1e-4, end = full ? a0 + 2 * Math.PI - 1e-4 : a1, large = end - a0 > Math.PI ? 1 : 0;
  const at = (r, a) => (r * Math.sin(a)).toFixed(2) + " " + (-r * Math.cos(a)).toFixed(2);
  return `M${at(r1, a0)}A${r1} ${r1} 0 ${large} 1 ${at(r1, end)}L${at(r0, end)}A${r0} ${r0} 0 ${large} 0 ${at(r0, a0)}Z`;
}
function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
}
function draw(node, ring, a0, a1, colour, whole) {
  if (ring > RINGS || a1 - a0 < 0.003) return;
  let at = a0;
  (node.parts || []).forEach((part, number) => {
    const end = at + (a1 - a0) * part.bytes / (node.bytes || 1);
    const own = ring === 1 ? colours[number % colours.length] : colour;
    const shape = element("path", { d: arc(WIDTH * ring, WIDTH * (ring + 1) - 1, at, end), fill: own, tabindex: 0,
      "fill-opacity": Math.max(1 - 0.16 * (ring - 1), 0.3) });
    shape.append(element("title", {}, `${path(part).join(".")}: ${size(part.bytes)}, ${share(part.bytes, whole)}`));
    const go = () => show(part.parts ? part : node);
    shape.addEventListener("click", go);
    shape.addEventListener("keydown", event => { if (event.key === "Enter") go(); });
    svg.append(shape);
    const middle = (at + end) / 2, radius = WIDTH * (ring + 0.5), text = part.name.slice(0, 9);
    if ((end - at) * radius > 18) {
      const turn = middle * 180 / Math.PI - 90, flip = turn > 90 ? 180 : 0;
      svg.append(element("text", { transform: `rotate(${turn}) translate(${radius}) rotate(${flip})`, "text-anchor": "middle",
        dy: "0.35em", fill: ring < 3 ? "#fff" : "#222" }, part.name.length > 7 ? text.slice(0, 6) + "…" : text));
    }
    draw(part, ring + 1, at, end, own, whole);
    at = end;
  });
}
function show(node) {
  svg.replaceChildren();
  rows.replaceChildren();
  const middle = element("circle", { r: WIDTH - 2, fill: "#eee", tabindex: 0 });
  middle.append(element("title", {}, "back"));
  const back = () => node.parent && show(node.parent);
  middle.addEventListener("click", back);
  middle.addEventListener("keydown", event => { if (event.key === "Enter") back(); });
  svg.append(middle, element("text", { "text-anchor": "middle", dy: "0.35em" }, size(node.bytes)));
  where.textContent = `${path(node).join(" / ")}: ${size(node.bytes)}, ${share(node.bytes, root.bytes)} of all`;
  draw(node, 1, 0, 2 * Math.PI, "", root.bytes);
  (node.parts || []).forEach(part => {
    const row = rows.insertRow();
    [part.name, (part.bytes / 1048576).toFixed(2), share(part.bytes, node.bytes)].forEach(text => { row.insertCell().textContent = text; });
  });
}
link(root, null);
show(root);

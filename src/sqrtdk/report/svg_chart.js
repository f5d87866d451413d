// Small charts as SVG in the colours of the page, for the sliders of the report and of the local pages.
const SVG = "http://www.w3.org/2000/svg";
function add(parent, tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
}

/** Lines through points, with ticks at both axes. */
export function chart(svg, lines, x, y) {
  const width = 340, height = 200, left = 44, right = 16, top = 8, bottom = 34;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const at = (axis, value) => (axis.map(value) - axis.map(axis.low)) / (axis.map(axis.high) - axis.map(axis.low));
  const toX = (value) => left + (width - left - right) * at(x, value);
  const toY = (value) => height - bottom - (height - top - bottom) * Math.min(1, Math.max(0, at(y, value)));
  for (const tick of y.ticks) {
    add(svg, "line", { x1: left, x2: width - right, y1: toY(tick), y2: toY(tick), class: "grid" });
    add(svg, "text", { x: left - 5, y: toY(tick) + 4, "text-anchor": "end" }, y.name(tick));
  }
  for (const tick of x.ticks) {
    add(svg, "text", { x: toX(tick), y: height - bottom + 14, "text-anchor": "middle" }, x.name(tick));
  }
  add(svg, "text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, x.title);
  for (const line of lines) {
    const path = line.points.map(([a, b], i) => `${i ? "L" : "M"}${toX(a).toFixed(1)} ${toY(b).toFixed(1)}`).join("");
    add(svg, "path", { d: path, class: line.thin ? "curve thin" : "curve", stroke: line.colour, "stroke-dasharray": line.dash });
  }
}

/** Bars from 0 to 1, one per key. */
export function bars(svg, values, colour) {
  const width = 340, height = 110, left = 44, right = 16, top = 16, bottom = 16;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const toY = (value) => height - bottom - (height - top - bottom) * value;
  for (const tick of [0, 0.5, 1]) {
    add(svg, "line", { x1: left, x2: width - right, y1: toY(tick), y2: toY(tick), class: "grid" });
    add(svg, "text", { x: left - 5, y: toY(tick) + 4, "text-anchor": "end" }, String(tick));
  }
  const step = (width - left - right) / values.length;
  values.forEach((value, i) => {
    add(svg, "rect", { x: left + step * (i + 0.15), width: 0.7 * step, y: toY(value), height: height - bottom - toY(value), fill: colour });
  });
  add(svg, "text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, "key");
}

/** Map of weights in bytes, a row per query and a column per key; cells in a colour, outlined at the keys to `mark`. */
export function heat(svg, rows, { queries, keys, seen, mark, colour }) {
  const left = 40, top = 18, width = 300, cell = width / keys.length, tall = 12.5;
  svg.setAttribute("viewBox", `0 0 340 ${top + rows.length * tall + 4}`);
  svg.replaceChildren();
  const at = (key, row, span) => ({ x: (left + key * cell).toFixed(1), y: (top + row * tall).toFixed(1), width: (span * cell).toFixed(1), height: tall });
  // Names only where they have room.
  if (cell >= 11) keys.forEach((name, key) => add(svg, "text", { x: (left + (key + 0.5) * cell).toFixed(1), y: 13, "text-anchor": "middle" }, name));
  rows.forEach((bytes, row) => {
    add(svg, "text", { x: left - 5, y: (top + row * tall + 10).toFixed(1), "text-anchor": "end" }, queries[row]);
    add(svg, "rect", { ...at(0, row, seen[row]), class: "seen" });
    bytes.forEach((byte, key) => {
      if (byte) add(svg, "rect", { ...at(key, row, 1), fill: colour, "fill-opacity": (byte / 255).toFixed(3) });
    });
  });
  mark.forEach((key, row) => add(svg, "rect", { ...at(key, row, 1), class: "mark" }));
}

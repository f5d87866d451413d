// Audit page: a map of heads, one head in detail, the heads on the concentration diagram, findings and scales.

import { axis, draw, plain, whenReady } from "./charts.js";
import { $, ask, make, tell } from "./dom.js";
import { writeNumber, writePercent } from "./numbers.js";

const RAMP = [[242, 246, 251], [127, 178, 221], [31, 111, 178], [11, 47, 82]];

// Dark cells are sharp heads, whatever the number.
const SHARP_WHEN_LOW = ["entropy_ratio", "effective_keys"];

let audit = null;
let heads = new Map(); // "layer/head" → head
let chosen = null;
let pattern = null;

const key = (layer, head) => `${layer}/${head}`;

function colourAt(share) {
  const place = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
  const i = Math.min(Math.floor(place), RAMP.length - 2);
  return RAMP[i].map((low, c) => Math.round(low + (place - i) * (RAMP[i + 1][c] - low)));
}

function renderMap() {
  const statistic = $("statistic").value;
  const quantity = audit.quantities.find((one) => one.key === statistic);
  $("statistic-hint").textContent = `${quantity.formula}. ${quantity.meaning}`;
  const values = audit.heads.map((head) => head[statistic]).filter((value) => value !== null);
  const low = Math.min(...values), high = Math.max(...values);
  const [softest, sharpest] = SHARP_WHEN_LOW.includes(statistic) ? [high, low] : [low, high];
  $("range").textContent = values.length ? `from ${writeNumber(softest, 3)} to ${writeNumber(sharpest, 3)}; dark: sharp` : "no head has this number";
  const columns = (audit.map[0]?.cells ?? []).map((_, head) => make("th", { scope: "col" }, head));
  const rows = audit.map.map(({ name, cells }, at) =>
    make("tr", {}, make("th", { scope: "row", title: name }, name), ...cells.map((cell, place) => make("td", {}, ...makeCell(cell, name, at, place, quantity, low, high)))),
  );
  $("map").replaceChildren(make("caption", { class: "hint" }, `${quantity.name} by layer (rows) and head (columns)`), make("thead", {}, make("tr", {}, make("td"), ...columns)), make("tbody", {}, ...rows));
}

function makeCell(cell, layer, at, place, quantity, low, high) {
  if (cell === null) return [];
  const head = audit.heads[cell.head];
  const value = head[quantity.key];
  const is = chosen === head;
  const button = make(
    "button",
    {
      type: "button", "aria-pressed": String(Boolean(is)), "data-row": at, "data-column": place, "data-value": value,
      "aria-label": `${layer}, head ${head.head}: ${quantity.name} ${writeNumber(value)}, pattern ${cell.pattern}`,
      class: pattern && head.pattern !== pattern ? "dim" : null,
      tabindex: is || (!chosen && at === 0 && place === 0) ? 0 : -1,
    },
    writeNumber(value, 2),
  );
  if (value !== null) {
    const share = high > low ? (value - low) / (high - low) : 0.5;
    const [r, g, b] = colourAt(SHARP_WHEN_LOW.includes(quantity.key) ? 1 - share : share);
    button.style.backgroundColor = `rgb(${r},${g},${b})`;
    button.style.color = 0.3 * r + 0.59 * g + 0.11 * b > 140 ? "#10151c" : "#ffffff";
  }
  button.addEventListener("click", () => select(head));
  button.addEventListener("keydown", move);
  return [button];
}

function move(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!step) return;
  const row = Number(event.target.dataset.row) + step[0], column = Number(event.target.dataset.column) + step[1];
  const next = $("map").querySelector(`button[data-row="${row}"][data-column="${column}"]`);
  if (next) {
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

function select(head) {
  const focused = document.activeElement?.closest?.("#map") !== null;
  chosen = head;
  renderMap();
  renderHead();
  renderDiagram();
  if (focused) $("map").querySelector('[aria-pressed="true"]')?.focus();
}

function renderHead() {
  $("head-title").textContent = `${chosen.layer || "The model"}, head ${chosen.head}`;
  const offset = chosen.offset === null ? "" : ` Its most common offset is ${chosen.offset} (${writePercent(chosen.offset_share)} of rows).`;
  $("head-says").textContent = `Pattern: ${chosen.pattern}.${offset} ${chosen.rows} rows seen, ${chosen.rows_judged} of them judged.`;
  $("head-numbers").replaceChildren(
    ...audit.quantities.map((quantity) =>
      make("tr", {}, make("th", { scope: "row", title: `${quantity.formula}. ${quantity.meaning}` }, quantity.name), make("td", { class: "number", "data-quantity": quantity.key, "data-value": chosen[quantity.key] }, writeNumber(chosen[quantity.key]))),
    ),
  );
  renderRows();
  renderCounterfactual();
}

const rowsOf = (head) => audit.rows?.find((one) => one.layer === head.layer && one.head === head.head);

function renderRows() {
  const histograms = rowsOf(chosen)?.histograms ?? {};
  const statistic = $("statistic").value in histograms ? $("statistic").value : "entropy_ratio";
  const histogram = histograms[statistic];
  $("rows-figure").hidden = !histogram;
  if (!histogram) return;
  const { edges, counts } = histogram;
  const quantity = audit.quantities.find((one) => one.key === statistic);
  const total = counts.reduce((sum, count) => sum + count, 0);
  $("rows-title").textContent = `The ${quantity.name} of its ${total} rows lies between ${writeNumber(edges[0], 3)} and ${writeNumber(edges.at(-1), 3)}`;
  $("rows").dataset.counts = counts.join(",");
  // Bins are drawn equally wide with their borders as ticks, as they grow with the numbers in them.
  const shown = edges.map((_, i) => i).filter((i) => i % Math.ceil(edges.length / 5) === 0);
  draw(
    "rows",
    `${$("rows-title").textContent}.`,
    (page) => [
      {
        type: "bar", x: counts.map((_, i) => i + 0.5), y: counts, width: 1, marker: { color: page.accent, line: { color: page.paper, width: 1 } },
        text: counts.map((count, i) => `${count} rows from ${writeNumber(edges[i], 3)} to ${writeNumber(edges[i + 1], 3)}`), textposition: "none", hovertemplate: "%{text}<extra></extra>",
      },
    ],
    () => ({ bargap: 0, xaxis: axis(quantity.name, { tickvals: shown, ticktext: shown.map((i) => writeNumber(edges[i], 2)), showgrid: false }), yaxis: axis("rows", { rangemode: "tozero" }) }),
  );
}

function renderCounterfactual() {
  const own = rowsOf(chosen);
  const times = own?.temperatures ?? [];
  $("counterfactual-figure").hidden = times.length < 2;
  if (times.length < 2) return;
  const { entropy_ratio, jacobian_trace } = own;
  $("counterfactual-title").textContent = `Its entropy ratio goes from ${writeNumber(entropy_ratio[0], 3)} at ${writeNumber(times[0])} times its temperature to ${writeNumber(entropy_ratio.at(-1), 3)} at ${writeNumber(times.at(-1))} times`;
  draw(
    "counterfactual",
    `${$("counterfactual-title").textContent}.`,
    (page) => [
      { type: "scatter", mode: "lines+markers", x: times, y: entropy_ratio, name: "entropy ratio H/ln n", line: { color: page.accent, width: 2.5 } },
      { type: "scatter", mode: "lines+markers", x: times, y: jacobian_trace, name: "1 − Σp²", line: { color: "#d55e00", width: 2, dash: "dash" }, marker: { symbol: "square" } },
    ],
    () => ({ xaxis: axis("times the model's own temperature", { type: "log", tickvals: times, ticktext: times.map((t) => writeNumber(t)) }), yaxis: axis("", { range: [-0.03, 1.05] }), showlegend: true, legend: { orientation: "h", y: 1.16 } }),
  );
}

function renderDiagram() {
  const shown = audit.heads.filter((head) => head.saturation_index !== null && head.entropy_ratio !== null);
  const past = shown.filter((head) => head.saturation_index > 1).length;
  $("diagram-title").textContent = `${past} of ${shown.length} heads lie above ρ = 1, where a few keys dominate`;
  const reach = 1.06 * Math.max(1.5, ...shown.map((head) => head.saturation_index));
  const marked = (head) => head === chosen;
  draw(
    "diagram",
    `${$("diagram-title").textContent}. Selected: ρ ${writeNumber(chosen.saturation_index, 3)}, entropy ratio ${writeNumber(chosen.entropy_ratio, 3)}.`,
    (page) => [
      { type: "scatter", mode: "lines", x: audit.expected.map(([rho]) => rho), y: audit.expected.map(([, ratio]) => ratio), line: { color: page.soft, width: 1.5, dash: "dot", shape: "spline" }, hoverinfo: "skip" },
      {
        type: "scatter", mode: "markers", x: shown.map((head) => head.saturation_index), y: shown.map((head) => head.entropy_ratio),
        customdata: shown.map((head) => key(head.layer, head.head)), text: shown.map((head) => plain(`${head.layer}, head ${head.head}: ${head.pattern}`)),
        marker: {
          color: shown.map((head) => (marked(head) ? "#d55e00" : page.accent)), size: shown.map((head) => (marked(head) ? 15 : 8)),
          opacity: shown.map((head) => (pattern && head.pattern !== pattern ? 0.12 : 0.8)), line: { color: page.paper, width: 1 },
        },
        hovertemplate: "%{text}<br>ρ %{x:.3g}, H/ln n %{y:.3g}<extra></extra>",
      },
    ],
    (page) => ({ hovermode: "closest", xaxis: axis("saturation index ρ", { range: [-0.05, reach] }), yaxis: axis("entropy ratio H/ln n", { range: [-0.04, 1.08] }), shapes: [{ type: "line", x0: 1, x1: 1, y0: 0, y1: 1, line: { color: page.line, width: 2 } }] }),
  );
  const element = $("diagram");
  element.removeAllListeners("plotly_click");
  element.on("plotly_click", (event) => {
    const head = heads.get(event.points[0].customdata);
    if (head) select(head);
  });
}

function renderPatterns() {
  const buttons = Object.entries(audit.pattern_counts).map(([name, times]) => {
    const button = make("button", { type: "button", "aria-pressed": String(pattern === name) }, `${name}: ${times}`);
    button.addEventListener("click", () => {
      pattern = pattern === name ? null : name;
      renderPatterns();
      renderMap();
      renderDiagram();
    });
    return button;
  });
  $("patterns").replaceChildren(make("span", { class: "hint" }, "Patterns"), ...buttons);
}

function renderFindings() {
  const items = audit.findings.map((one) =>
    make(
      "div",
      { class: `finding ${["error", "warning"].includes(one.severity) ? one.severity : ""}` },
      make("h3", {}, `${one.severity}: ${one.rule}${one.layer ? `, ${one.layer}` : ""}${one.head === null ? "" : `, head ${one.head}`}`),
      make("p", {}, one.cause),
      make("p", { class: "hint" }, `What to do: ${one.remedy}`),
      make("p", { class: "hint" }, `Evidence: ${Object.entries(one.evidence).map(([name, value]) => `${name === "d_k" ? "dₖ" : name.replaceAll("_", " ")} ${typeof value === "number" ? writeNumber(value) : JSON.stringify(value)}`).join(", ")}. Threshold: ${writeNumber(one.threshold.value)} (${one.threshold.source}).`),
    ),
  );
  $("findings").replaceChildren(...(items.length ? items : [make("p", {}, "No problem was found. A sharp head alone is not a problem.")]));
}

function renderScale() {
  const rows = audit.scale.map((one, at) =>
    make("tr", {}, make("th", { scope: "row" }, one.layer || "the model"), make("td", {}, audit.scale_names[at]), make("td", { class: "number", "data-value": one.measured }, writeNumber(one.measured)), make("td", {}, one.declared === null ? "not declared" : `${writeNumber(one.declared)} by ${one.declared_by}`), make("td", { class: "number" }, one.d_k), make("td", {}, one.reason ?? one.how)),
  );
  const head = ["layer", "scale", "measured", "declared", "dₖ", "how"].map((name) => make("th", { scope: "col" }, name));
  $("scale").replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
}

async function start() {
  await whenReady();
  audit = await ask("/api/audit");
  heads = new Map(audit.heads.map((head) => [key(head.layer, head.head), head]));
  $("title").textContent = `Audit of ${audit.about.source ?? audit.about.model ?? "a model"}`;
  document.title = `${$("title").textContent} · sqrtdk`;
  const made = [["input", audit.about.input ?? audit.about.batch], ["made by", audit.about.command], ["date", audit.about.date]];
  $("about").textContent = `${audit.source}. ${made.filter(([, value]) => value).map(([name, value]) => `${name}: ${value}`).join("; ")}`;
  $("reading").replaceChildren(...audit.reading.map((sentence) => make("li", {}, sentence)));
  $("statistic").append(...audit.quantities.map((quantity) => make("option", { value: quantity.key }, quantity.name)));
  $("statistic").addEventListener("change", () => {
    renderMap();
    if (chosen) renderRows();
  });
  $("not-recorded").hidden = Boolean(audit.rows?.length);
  $("not-recorded").textContent = "This record has neither the distribution over rows nor other temperatures. Run the audit again to get both.";
  renderPatterns();
  renderFindings();
  renderScale();
  renderMap();
  const sharpest = [...audit.heads].filter((head) => head.entropy_ratio !== null).sort((a, b) => a.entropy_ratio - b.entropy_ratio)[0] ?? audit.heads[0];
  if (sharpest) select(sharpest);
  document.body.dataset.ready = "true";
}

start().catch(tell);

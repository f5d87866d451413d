// Explore page: requests the numbers of the present settings and shows them; an old answer never replaces a newer one.

import "./cause.js";
import { axis, draw, logAxis, plain, whenReady } from "./charts.js";
import { build, complain, read, usual, write } from "./controls.js";
import { $, ask, make, tell } from "./dom.js";
import { writeNumber } from "./numbers.js";
import { followWalks, readWalks, writeWalks } from "./walks_link.js";

const WAIT = 25;
const WAIT_FOR_EXPECTATION = 350;
const SAME_MOVE = 800;
const SYMBOLS = { chosen: "star", none: "circle", sqrt: "diamond", inverse: "square" };

let options = null;
let sequence = 0;
let current = null;
let timer = null;
let answer = null;
let expected = null;
let moved = -SAME_MOVE;
let kept = null;

function changed() {
  mark(null);
  keepMove();
  clearTimeout(timer);
  timer = setTimeout(update, WAIT);
}

function keepMove() {
  keep(performance.now() - moved < SAME_MOVE);
  moved = performance.now();
}

/** The address keeps the state, so that a link restores it and Back goes back; one move of a slider is one step. */
function keep(same_step) {
  const address = `?${new URLSearchParams({ ...read(), ...readWalks() })}`;
  if (address === location.search) return;
  if (same_step) history.replaceState(null, "", address + location.hash);
  else history.pushState(null, "", address + location.hash);
  kept = location.search;
}

/** Set the controls as the address says. */
function restore() {
  const state = Object.fromEntries(new URLSearchParams(location.search));
  kept = location.search;
  write(state);
  writeWalks(state);
  mark(options.presets.find((preset) => same(read(), preset.query)) ?? null);
  moved = -SAME_MOVE;
  return update();
}

async function update() {
  const mine = ++sequence;
  current?.abort();
  current = new AbortController();
  const state = read();
  document.body.setAttribute("aria-busy", "true");
  try {
    const fault = complain();
    if (fault) {
      tell(new Error(fault));
      return;
    }
    const reply = await ask("/api/explore", state, { signal: current.signal });
    if (mine !== sequence) return;
    answer = reply;
    if (expected && (expected.n !== answer.n || expected.d_k !== answer.d_k)) expected = null;
    tell(null);
    render();
    setTimeout(() => expectation(mine, state), WAIT_FOR_EXPECTATION);
  } catch (error) {
    if (mine === sequence && error.name !== "AbortError") tell(error);
  } finally {
    if (mine === sequence) {
      document.body.setAttribute("aria-busy", "false");
      document.body.dataset.answered = String(mine);
    }
  }
}

/** The exact averages take a second for a new size: asked for when the settings rest. */
async function expectation(mine, state) {
  if (mine !== sequence) return;
  try {
    const reply = await ask("/api/expected", state, { signal: current.signal });
    if (mine !== sequence) return;
    expected = reply;
    render();
    document.body.dataset.expected = String(mine);
  } catch (error) {
    if (mine === sequence && error.name !== "AbortError") tell(error);
  }
}

const names = () => Object.keys(answer.columns);
const label = (name) => answer.columns[name].label;

function render() {
  $("verdicts").replaceChildren(...answer.verdicts.map((one) => make("li", { class: one.holds ? "right" : "wrong" }, make("b", {}, `[${one.claimed}] `), one.text)));
  $("strip").replaceChildren("effective keys: ", ...names().flatMap((name) => [own(make("span", { class: "dot" }), name), `${label(name)} ${writeNumber(answer.columns[name].values.effective_keys, 3)}  `]));
  $("reading").replaceChildren(...answer.reading.map((sentence) => make("p", {}, sentence)), ...notes());
  renderCards();
  renderConcentration();
  renderWeights();
  renderGradients();
  renderTable();
  $("python").textContent = answer.python;
  $("timing").textContent =
    `Computed by ${answer.columns[names()[0]].engine} in ${answer.milliseconds} ms on the server; ${answer.queries === 1 ? "1 query" : `${answer.queries} queries`}, ` +
    `n = ${answer.n}, dₖ = ${answer.d_k}.`;
  $("timing").dataset.milliseconds = answer.milliseconds;
}

/** Give an element the colour of a scale. */
function own(element, name) {
  element.style.setProperty("--own", answer.columns[name].colour);
  return element;
}

function notes() {
  const lost = Math.max(...names().map((name) => answer.columns[name].not_finite));
  const sentences = [];
  if (lost) sentences.push(`${lost} of ${answer.queries} queries have logits that are not finite; they are left out of the means.`);
  return sentences.map((sentence) => make("p", {}, sentence));
}

function renderCards() {
  const cards = names().map((name) => {
    const column = answer.columns[name];
    const { logit_std, effective_keys } = column.values;
    const predicted = column.predicted.logit_std;
    const card = make(
      "figure",
      { class: "card", id: `card-${name}` },
      make("figcaption", {}, name === answer.chosen ? `${label(name)} (chosen)` : label(name)),
      make("div", { class: "big" }, writeNumber(effective_keys >= 100 ? Math.round(effective_keys) : effective_keys, effective_keys >= 100 ? 6 : 3)),
      make("div", { class: "of" }, `of ${answer.n} keys (effective keys 1/Σp²)`),
      make("div", { class: "plot", id: `histogram-${name}` }),
      make("p", { class: "caption" }, `logits: σ = ${writeNumber(logit_std, 3)}` + (predicted === undefined ? "" : `, predicted ${writeNumber(predicted, 3)}`)),
    );
    return own(card, name);
  });
  $("cards").replaceChildren(...cards);
  for (const name of names()) renderHistogram(name);
}

/** The range of all logits, so that the three histograms share one axis. */
function logitRange() {
  const ends = names().flatMap((name) => [answer.columns[name].histogram.edges[0], answer.columns[name].histogram.edges.at(-1)]);
  const finite = ends.filter((end) => end !== undefined);
  return finite.length ? [Math.min(...finite), Math.max(...finite)] : [-1, 1];
}

function renderHistogram(name) {
  const { histogram, colour, values } = answer.columns[name];
  const { edges, density, at, predicted } = histogram;
  const middles = density.map((_, i) => (edges[i] + edges[i + 1]) / 2);
  const text =
    `Histogram of the logits with ${label(name)}, from ${writeNumber(edges[0], 3)} to ${writeNumber(edges.at(-1), 3)}, ` +
    `standard deviation ${writeNumber(values.logit_std, 3)}` + (at.length ? "; the line is the predicted normal density." : ".");
  draw(
    `histogram-${name}`,
    text,
    (page) => [
      { type: "bar", x: middles, y: density, width: edges[1] - edges[0], marker: { color: colour, opacity: 0.55, line: { width: 0 } }, hovertemplate: "logit %{x:.3g}<extra></extra>" },
      { type: "scatter", mode: "lines", x: at, y: predicted, line: { color: page.ink, width: 1.6 }, hoverinfo: "skip" },
    ],
    () => ({ margin: { l: 6, r: 6, t: 4, b: 24 }, bargap: 0, xaxis: { nticks: 5, range: logitRange() }, yaxis: { visible: false, rangemode: "tozero" } }),
  );
}

function renderConcentration() {
  const points = names().map((name) => ({ name, ...answer.columns[name].values, colour: answer.columns[name].colour }));
  const reach = Math.max(3, 1.08 * Math.max(...points.map((point) => point.saturation_index ?? 0)));
  const where = (point) => `${label(point.name)} at ρ = ${writeNumber(point.saturation_index, 3)}, H/ln n = ${writeNumber(point.entropy_ratio, 3)}`;
  const concentrated = points.filter((point) => point.saturation_index > 1).map((point) => label(point.name));
  $("concentration-title").textContent = concentrated.length
    ? `Above ρ = 1, where a few keys dominate: ${concentrated.join(", ")}`
    : "All lie below ρ = 1: the weights are spread over many keys";
  draw(
    "concentration",
    `Concentration diagram. ${points.map(where).join("; ")}.`,
    (page) => [
      { type: "scatter", mode: "lines", x: answer.limit.rho, y: answer.limit.entropy_ratio, line: { color: page.ink, width: 1.5, dash: "dot" }, hoverinfo: "skip" },
      { type: "scatter", mode: "lines", x: expected?.rho ?? [], y: expected?.entropy_ratio ?? [], line: { color: page.soft, width: 3 }, opacity: 0.6, hoverinfo: "skip" },
      ...points.map((point) => ({
        type: "scatter", mode: "markers+text", x: [point.saturation_index], y: [point.entropy_ratio], text: [`  ${plain(label(point.name))}  `],
        textposition: point.name === "inverse" ? "top center" : point.saturation_index > 0.6 * reach ? "top left" : "middle right", textfont: { color: page.ink, size: 12 }, cliponaxis: false,
        marker: { color: point.colour, size: point.name === answer.chosen ? 15 : 11, symbol: SYMBOLS[point.name], line: { color: page.paper, width: 1.5 } },
        hovertemplate: `${plain(label(point.name))}<br>ρ %{x:.3g}, H/ln n %{y:.3g}<extra></extra>`,
      })),
    ],
    (page) => ({
      xaxis: axis("saturation index ρ", { range: [-0.04 * reach, reach] }),
      yaxis: axis("entropy ratio H/ln n", { range: [-0.04, 1.12] }),
      shapes: [{ type: "line", x0: 1, x1: 1, y0: 0, y1: 1, line: { color: page.line, width: 2 } }],
    }),
  );
}

function renderWeights() {
  const byKey = answer.experiment.source === "scores";
  const largest = names().map((name) => `${label(name)} ${writeNumber(answer.columns[name].values.max_weight, 3)}`);
  $("ranked-title").textContent = `The largest weight: ${largest.join(", ")}`;
  $("ranked-caption").textContent = byKey
    ? "The weight of each key, by its score."
    : "Median weight by rank, both axes logarithmic; dotted: the uniform weight 1/n.";
  const scores = answer.experiment.scores;
  const floor = 1e-12;
  const text = byKey
    ? names().map((name) => `${label(name)}: ${answer.columns[name].weights.by_key.map((p) => writeNumber(p, 3)).join(", ")}`).join("; ")
    : `Weights in descending order. Largest weight: ${largest.join("; ")}.`;
  draw(
    "ranked",
    text,
    (page) =>
      byKey
        ? names().map((name) => ({
            type: "bar", name: plain(label(name)), x: scores.map((score, i) => `key ${i + 1}: ${score}`), y: answer.columns[name].weights.by_key,
            marker: { color: answer.columns[name].colour }, hovertemplate: `${plain(label(name))}: %{y:.4f}<extra></extra>`,
          }))
        : [
            { type: "scatter", mode: "lines", x: [1, answer.n], y: [1 / answer.n, 1 / answer.n], line: { color: page.soft, width: 1, dash: "dot" }, hoverinfo: "skip", showlegend: false },
            ...names().map((name) => ({
              type: "scatter", mode: "lines", x: answer.columns[name].weights.rank, y: answer.columns[name].weights.weight.map((p) => (p >= floor ? p : null)),
              line: { color: answer.columns[name].colour, width: name === answer.chosen ? 3.5 : 2, dash: name === "none" ? "dash" : name === "inverse" ? "dashdot" : "solid" },
              name: plain(label(name)), hovertemplate: `${plain(label(name))}<br>rank %{x}: %{y:.3g}<extra></extra>`,
            })),
          ],
    () =>
      byKey
        ? { barmode: "group", xaxis: axis("", { type: "category" }), yaxis: axis("weight", { range: [0, 1.02] }), showlegend: true, legend: { orientation: "h", y: 1.14 } }
        : {
            xaxis: logAxis("rank of the key", -0.05, Math.log10(answer.n) + 0.05),
            yaxis: logAxis("weight", -12.2, 0.3),
            showlegend: true, legend: { x: 0.02, y: 0.02, yanchor: "bottom" },
          },
  );
}

function renderGradients() {
  const floor = 1e-16;
  const sizes = names().flatMap((name) => answer.columns[name].gradients).filter((value) => value !== null).map((value) => Math.log10(Math.max(value, floor)));
  const [low, high] = sizes.length ? [Math.min(...sizes) - 0.3, Math.max(...sizes) + 0.3] : [-1, 1];
  const medians = names().map((name) => answer.columns[name].values.grad_q_median);
  $("gradients-caption").textContent =
    "‖∂loss/∂q‖ of every query, for a gradient of standard normal entries at the output; the bar is the median." +
    (answer.invented.length ? " * The keys and values are invented: scores alone do not determine gradients." : "");
  $("gradients-title").textContent = `Median gradient of a query: ${names().map((name, i) => `${label(name)} ${writeNumber(medians[i], 2)}`).join(", ")}`;
  draw(
    "gradients",
    `Gradient norms of single queries; medians: ${names().map((name, i) => `${label(name)} ${writeNumber(medians[i], 3)}`).join("; ")}.`,
    (page) => names().flatMap((name, i) => {
      const all = answer.columns[name].gradients;
      return [
        {
          type: "scatter", mode: "markers", y: all.map((value) => (value === null ? null : Math.max(value, floor))),
          x: all.map((_, j) => i + 0.5 * (((j * 0.618034) % 1) - 0.5)), // spread by the golden ratio: the same picture each time
          marker: { color: answer.columns[name].colour, size: 5, opacity: 0.6 }, hovertemplate: `${plain(label(name))}: %{y:.3g}<extra></extra>`,
        },
        { type: "scatter", mode: "lines", x: [i - 0.33, i + 0.33], y: [medians[i], medians[i]].map((m) => (m === null ? null : Math.max(m, floor))), line: { color: page.ink, width: 3 }, hoverinfo: "skip" },
      ];
    }),
    () => ({
      xaxis: axis("", { tickvals: names().map((_, i) => i), ticktext: names().map((name) => plain(label(name))), range: [-0.6, names().length - 0.4], showgrid: false }),
      yaxis: logAxis("‖∂loss/∂q‖", low, high),
    }),
  );
}

function renderTable() {
  const head = make("tr", { role: "row" }, make("th", { scope: "col", role: "columnheader" }, "Quantity"), ...names().map((name) => {
    return own(make("th", { scope: "col", role: "columnheader" }, make("span", { class: "dot" }), label(name)), name);
  }));
  const rows = options.quantities
    .filter((quantity) => names().some((name) => quantity.key in answer.columns[name].values))
    .map((quantity) =>
      make(
        "tr",
        { role: "row" },
        make("th", { scope: "row", role: "rowheader" }, answer.invented.includes(quantity.key) ? `${quantity.name} *` : quantity.name, make("small", {}, make("code", {}, quantity.formula)), make("small", {}, [quantity.meaning, answer.hints[quantity.key]].filter(Boolean).join(" "))),
        ...names().map((name) => makeCell(name, quantity)),
      ),
    );
  $("numbers").replaceChildren(
    make("table", { class: "numbers", role: "table", "aria-label": "All numbers" }, make("thead", { role: "rowgroup" }, head), make("tbody", { role: "rowgroup" }, ...rows)),
  );
}

function makeCell(name, quantity) {
  const value = answer.columns[name].values[quantity.key];
  const predicted = answer.columns[name].predicted[quantity.key] ?? expected?.columns[name]?.[quantity.key];
  const cell = make(
    "td",
    { role: "cell", "data-scale": name, "data-quantity": quantity.key, "data-value": value, "data-predicted": predicted, "data-label": label(name) },
    writeNumber(value),
  );
  if (predicted !== undefined && predicted !== null) cell.append(make("small", {}, `predicted ${writeNumber(predicted)}`));
  return own(cell, name);
}

function mark(preset) {
  for (const button of $("presets").children) button.setAttribute("aria-pressed", String(button.dataset.title === preset?.title));
  $("says").hidden = !preset;
  if (preset) $("says").textContent = `“${preset.source}” says: ${preset.says}.`;
}

function same(state, query) {
  const wanted = { ...usual(), ...query };
  return Object.keys(state).every((name) => String(state[name]) === String(wanted[name]));
}

async function start() {
  await whenReady();
  options = await ask("/api/options");
  build(options, changed);
  const presets = options.presets.map((preset) => {
    const button = make("button", { type: "button", "data-title": preset.title, "aria-pressed": "false" }, preset.title);
    button.addEventListener("click", () => {
      write(preset.query);
      moved = -SAME_MOVE;
      changed();
      mark(preset);
    });
    return button;
  });
  $("presets").append(...presets);
  $("reset").addEventListener("click", () => {
    write({});
    changed();
  });
  $("copy").addEventListener("click", async () => {
    keep(true);
    try {
      await navigator.clipboard.writeText(location.href);
      $("copy").textContent = "Copied";
    } catch {
      $("copy").textContent = "Copy the address bar";
    }
    setTimeout(() => ($("copy").textContent = "Copy link"), 2000);
  });
  followWalks(keepMove);
  // Another screen of the teach mode changes the address, too, but no setting.
  addEventListener("popstate", () => location.search !== kept && restore());
  await restore();
}

start().catch(tell);

// Runs page: the runs of a store and their curves, or the heads of a monitored run, read again every two seconds.

import { axis, draw, plain, whenReady } from "./charts.js";
import { $, ask, make, tell } from "./dom.js";
import { writeNumber } from "./numbers.js";
import { showReplay } from "./replay.js";
import { actOn } from "./run_actions.js";

const EVERY = 2000;
const FIRST_PLOTTED = 24;
const MOST_AT_ONCE = 64;
const MOST_REPLAYED = 6;
const FIRST_REPLAYED = ["none", "sqrt", "inverse"];
const CURVES = {
  loss: "training loss", accuracy: "training accuracy", entropy_ratio: "entropy ratio H/ln n", saturation_index: "saturation index ρ",
  jacobian_trace: "1 − Σp²", grad_q: "gradient of W_q", grad_k: "gradient of W_k",
  pressure: "temperature pressure",
  temperature: "learned temperature τ/√dₖ, mean of the heads", temperature_least: "learned temperature τ/√dₖ, least head", temperature_largest: "learned temperature τ/√dₖ, largest head",
};
const MEANINGS = { pressure: " Below 0 the loss would fall with sharper attention, above 0 with softer attention." };
/** Whether a run has recorded a curve: those of earlier versions lack some, and only scales that learn have temperatures. */
const has = (run, curve) => ((run.curves ?? curves.get(run.key))[curve] ?? []).some((value) => value !== null);
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];

let version = null;
let runs = [];
let running = [];
const curves = new Map();
const maps = new Map();
let replay = null;
const plotted = new Set();
const known = new Set();
const selected = new Set();
/** Bytes of the checkpoints by key. A run that has nothing else is listed as unfinished. */
let checkpoints = {};

const scaleOf = (run) => String(run.row.scale ?? "");
const groupOf = (run) => (run.row.init && run.row.init !== "unit" ? `${run.label} (${run.row.init})` : run.label);
const styleOf = (run) => `${run.row.init} ${run.row.lr}`;
function nameOf(run) {
  const { scale, d_k, init, lr, seed } = run.row;
  if (run.status === "unfinished") return `unfinished run ${run.key}`;
  return `${scale} · dₖ ${d_k} · ${init} · lr ${lr} · seed ${seed}`;
}

function listed() {
  const words = $("filter").value.toLowerCase().split(",").map((word) => word.trim()).filter(Boolean);
  return runs.filter((run) => words.every((word) => `${nameOf(run)} ${run.status} ${run.row.task ?? ""}`.toLowerCase().includes(word)));
}

async function poll() {
  try {
    const reply = await ask("/api/runs", version ? { version } : {});
    tell(null);
    $("content").hidden = reply.state !== "ready";
    $("monitor").hidden = reply.state !== "monitor";
    if (reply.state === "monitor") {
      if (!reply.unchanged) renderMonitor(reply);
      version = reply.version;
    } else if (reply.state !== "ready") {
      version = null;
      runs = running = [];
      $("state").textContent = reply.message;
    } else if (!reply.unchanged) {
      version = reply.version;
      running = reply.running;
      checkpoints = reply.checkpoints;
      const training = new Set([...reply.runs, ...running].map((run) => run.key));
      const unfinished = Object.keys(checkpoints).filter((key) => !training.has(key));
      runs = [...reply.runs, ...unfinished.map((key) => ({ key, status: "unfinished", row: {}, label: "unfinished" }))];
      for (const key of selected) if (runs.every((run) => run.key !== key)) selected.delete(key);
      for (const run of runs) {
        if (!known.has(run.key) && run.finished && plotted.size < FIRST_PLOTTED) plotted.add(run.key);
        known.add(run.key);
      }
      const finished = reply.runs;
      const counts = [...new Set(finished.map((run) => run.status))].map((status) => `${finished.filter((run) => run.status === status).length} ${status}`);
      const latest = finished.length ? new Date(1000 * finished[0].finished).toLocaleTimeString() : "";
      const stopped = unfinished.length ? ` Unfinished runs that can go on from a checkpoint: ${unfinished.length}.` : "";
      const working = running.length ? ` In training: ${running.map((run) => `${groupOf(run)}, seed ${run.row.seed}, step ${run.step} of ${run.row.steps}`).join("; ")}.` : "";
      $("state").textContent = finished.length
        ? `${reply.total} finished runs (${counts.join(", ")}), the latest at ${latest}. New ones appear by themselves.${working}${stopped}${reply.damaged ? ` Left out: ${reply.damaged} damaged rows.` : ""}`
        : `The store has no finished run yet. New ones appear by themselves.${working}${stopped}`;
      await refresh();
    }
    document.body.dataset.polls = String(Number(document.body.dataset.polls ?? 0) + 1);
  } catch (error) {
    tell(error);
  }
  setTimeout(poll, document.hidden ? 4 * EVERY : EVERY);
}

async function refresh() {
  renderTable();
  const wanted = [...plotted].filter((key) => !curves.has(key) && runs.some((run) => run.key === key && run.finished));
  for (let at = 0; at < wanted.length; at += MOST_AT_ONCE) {
    const reply = await ask("/api/curves", { keys: wanted.slice(at, at + MOST_AT_ONCE).join(",") });
    for (const [key, own] of Object.entries(reply.curves)) curves.set(key, own);
  }
  renderCurves();
  await refreshReplay();
}

const listPlotted = () => listed().filter((run) => plotted.has(run.key) && curves.has(run.key));
const listTraining = () => running.filter((run) => runs.every((one) => one.key !== run.key));

/** Replay the run in training of each policy and start, or its latest plotted run. */
async function refreshReplay() {
  const chosen = new Map();
  const training = listTraining(), finished = listPlotted().filter((run) => !maps.has(run.key) || maps.get(run.key));
  const first = finished.filter((run, at) => finished.findIndex((one) => groupOf(one) === groupOf(run)) === at);
  const wanted = [...training, ...first.filter((run) => !maps.has(run.key))].map((run) => run.key).slice(0, MOST_AT_ONCE);
  const found = wanted.length ? (await ask("/api/maps", { keys: wanted.join(",") })).maps : {};
  for (const key of wanted) maps.set(key, found[key] ?? null);
  for (const run of [...training, ...first]) {
    if (maps.get(run.key) && !chosen.has(groupOf(run))) chosen.set(groupOf(run), run);
  }
  for (const run of training) maps.delete(run.key); // there is more to come
  const rank = (run) => [...FIRST_REPLAYED, scaleOf(run)].indexOf(scaleOf(run));
  const ranked = [...chosen.values()].sort((a, b) => rank(a) - rank(b)).slice(0, MOST_REPLAYED);
  const given = ranked.map((run) => {
    const own = run.curves ?? curves.get(run.key), { lr, seed, steps, start_steps } = run.row;
    const name = `${groupOf(run)}, learning rate ${lr}, seed ${seed}${run.curves ? ", in training" : ""}`;
    return { name, colour: run.colour, total: steps + (start_steps ?? 0), step: own.step ?? [], loss: own.loss ?? [], maps: found[run.key] ?? maps.get(run.key) };
  });
  $("replay").hidden = !given.length;
  replay = replay ? (replay(given), replay) : showReplay(document.querySelector(".replay"), given);
}

function renderCurves() {
  const curve = $("curve").value;
  const chosen = listPlotted();
  const shown = chosen.filter((run) => has(run, curve));
  const lacking = chosen.length - shown.length;
  const every = [...shown, ...listTraining().filter((run) => has(run, curve))];
  const groups = [...new Set(shown.map(groupOf))];
  const final = groups.map((group) => {
    const losses = shown.filter((run) => groupOf(run) === group).map((run) => run.row.final_loss ?? Infinity).sort((a, b) => a - b);
    const median = (losses[Math.floor((losses.length - 1) / 2)] + losses[Math.floor(losses.length / 2)]) / 2;
    return `${group} ${Number.isFinite(median) ? writeNumber(median, 3) : "diverged"}`;
  });
  $("curves-title").textContent = !shown.length && running.length ? "Training" : shown.length ? `Median held-out loss of the plotted runs: ${final.join(", ")}` : lacking ? "None of the chosen runs has recorded this curve" : "No run is plotted: tick a run below";
  $("curves-caption").textContent = `${CURVES[curve]} over training steps, ${shown.length} finished runs${running.length ? ` and ${running.length} in training (thick)` : ""}; colour: scaling policy, dash: start of the weights and learning rate.${MEANINGS[curve] ?? ""}${lacking ? ` Runs that have not recorded this curve, and are left out: ${lacking}.` : ""}`;
  const styles = [...new Set(every.map(styleOf))].sort().reverse();
  const legend = new Set();
  draw(
    "curves",
    `${$("curves-caption").textContent} ${$("curves-title").textContent}.`,
    () => every.map((run) => {
      const first = !legend.has(groupOf(run));
      legend.add(groupOf(run));
      return {
        type: "scatter", mode: "lines", connectgaps: true, x: (run.curves ?? curves.get(run.key)).step ?? [], y: (run.curves ?? curves.get(run.key))[curve] ?? [], name: plain(groupOf(run)), legendgroup: plain(groupOf(run)), showlegend: first,
        line: { color: run.colour, width: run.curves ? 3.5 : 1.8, dash: DASHES[styles.indexOf(styleOf(run)) % DASHES.length] }, opacity: 0.8,
        hovertemplate: `${plain(nameOf(run))}<br>step %{x}: %{y:.4g}<extra></extra>`,
      };
    }),
    () => ({ hovermode: "closest", xaxis: axis("training step"), yaxis: axis(CURVES[curve], { type: $("logarithmic").checked ? "log" : "linear", exponentformat: "e" }), showlegend: true, legend: { orientation: "h", y: 1.1 } }),
  );
}

/** A heat map without what needs inline styles, which the page forbids: the colour bar, and cells without a gap. */
const bare = (trace) => (trace.type === "heatmap" ? { ...trace, showscale: false, xgap: 0.01, ygap: 0.01 } : trace);

/** The colours of a heat map beside the values that they stand for. */
function explainColours({ zmin, zmax, colorscale, colorbar }) {
  const ticks = colorbar.tickvals?.map((value, at) => [value, colorbar.ticktext[at]]) ?? [zmin, (zmin + zmax) / 2, zmax].map((value) => [value, String(value)]);
  return ticks.flatMap(([value, name]) => {
    const dot = make("span", { class: "dot" });
    dot.style.setProperty("--own", colorscale[Math.round(((value - zmin) / (zmax - zmin)) * (colorscale.length - 1))][1]);
    return [" ", dot, name];
  });
}

function renderMonitor(reply) {
  $("state").textContent = reply.message;
  reply.charts.forEach((chart, at) => {
    const id = `heads-${at}`;
    $(`${id}-title`).replaceChildren(chart.title, ...explainColours(chart.data[0]));
    $(id).style.height = `${chart.height}px`;
    const { xaxis, yaxis } = chart.layout;
    draw(id, `${chart.title}, by head and observed step. ${reply.message}`, () => chart.data.map(bare), () => ({ xaxis, yaxis }));
  });
  $("heads-caption").textContent = reply.caption;
  const head = ["step", "alert", "severity", "layer", "heads", "cause"].map((name) => make("th", { scope: "col" }, name));
  const rows = reply.alerts.map((alert) => make("tr", {}, ...[alert.step, `${alert.rule} ${alert.state}`, alert.severity, alert.layer ?? "", alert.heads.join(", ") || "all", alert.cause].map((text) => make("td", {}, String(text)))));
  $("alerts").replaceChildren(...(rows.length ? [make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)] : []));
}

/** A box of a run's row that puts the run into a set or takes it out. */
function makeBox(run, name, chosen, change) {
  const box = make("input", { type: "checkbox", "aria-label": `${name} ${nameOf(run)}`, "data-box": `${name} ${run.key}` });
  box.checked = chosen.has(run.key);
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(run.key);
    else chosen.delete(run.key);
    change();
  });
  return box;
}

const refreshOrTell = () => refresh().catch(tell);

function renderTable() {
  const shown = listed();
  const focused = document.activeElement?.dataset?.box;
  $("listed").textContent = `${shown.length} of ${runs.length} runs listed`;
  const head = ["select", "plot", "scale", "dₖ", "init", "learning rate", "seed", "status", "held-out loss", "accuracy", "solved", "finished"].map((name) => make("th", { scope: "col" }, name));
  const rows = shown.map((run) => {
    const { row } = run;
    const scale = make("td", {}, make("span", { class: "dot" }), scaleOf(run));
    if (run.colour) scale.firstChild.style.setProperty("--own", run.colour);
    const number = (name, value) => make("td", { class: "number", "data-quantity": name, "data-value": value }, typeof value === "number" ? writeNumber(value) : value ?? "–");
    const plot = make("td", {}, ...(run.finished ? [makeBox(run, "plot", plotted, refreshOrTell)] : []));
    const finished = run.finished ? new Date(1000 * run.finished).toLocaleString() : run.key;
    return make("tr", { "data-key": run.key }, make("td", {}, makeBox(run, "select", selected, showSelected)), plot, scale, number("d_k", row.d_k), make("td", {}, row.init ?? ""), number("lr", row.lr), number("seed", row.seed), make("td", {}, row.message ? `${run.status}: ${row.message}` : run.status), number("final_loss", row.final_loss), number("final_accuracy", row.final_accuracy), make("td", {}, run.finished ? (row.solved ? "yes" : "no") : "–"), make("td", {}, finished));
  });
  $("runs").replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  if (focused) [...document.querySelectorAll("#runs [data-box]")].find((box) => box.dataset.box === focused)?.focus();
  showSelected();
}

const actions = actOn({
  selected: () => runs.filter((run) => selected.has(run.key)),
  name: nameOf,
  bytes: (run) => checkpoints[run.key] ?? 0,
  forget(gone) {
    for (const run of gone) [selected, plotted].forEach((chosen) => chosen.delete(run.key));
    runs = runs.filter((run) => !gone.includes(run));
    refreshOrTell();
  },
});

const showSelected = () => actions.update();

async function start() {
  await whenReady();
  $("replay-caption").textContent = "Attention of the last layer on one held-out example, the mean of its heads: a row is a query, a column is a key, a full colour is a weight of 1. In recall the outlined cell is the right value. Each policy and start has its run in training, or its latest plotted run.";
  $("curve").append(...Object.entries(CURVES).map(([name, title]) => make("option", { value: name }, title)));
  $("curve").addEventListener("change", renderCurves);
  $("logarithmic").addEventListener("change", renderCurves);
  $("filter").addEventListener("input", refreshOrTell);
  for (const [button, chosen, all] of [["all", plotted, true], ["none", plotted, false], ["select-all", selected, true], ["select-none", selected, false]]) {
    $(button).addEventListener("click", () => {
      if (all) listed().forEach((run) => chosen.add(run.key));
      else chosen.clear();
      refreshOrTell();
    });
  }
  await poll();
}

start().catch(tell);

// Sliders of the report: computes in the page the numbers of try_it.py and counter.py.
import { writeNumber, writePercent, namePower } from "./numbers.js";
import { measureRow, sampleRow } from "./sampled_row.js";
import { chart } from "./svg_chart.js";

(() => {
  const root = document.getElementById("try-it");
  if (!root) return;
  const EXPONENTS = { none: 0, sqrt: -0.5, inverse: -1 };
  // The joiner keeps lines from breaking behind the slash.
  const LABELS = { none: "no scaling", sqrt: "1/\u2060√dₖ", inverse: "1/\u2060dₖ" };

  const write = (value) => (value !== 0 && Math.abs(value) < 1e-12 ? "< 10⁻¹²" : writeNumber(value));

  const sliders = Object.fromEntries([...root.querySelectorAll("input[type=range]")].map((one) => [one.dataset.name, one]));
  const valuesOf = (slider) => slider.dataset.values.split(",").map(Number);
  const steps = Object.fromEntries(Object.entries(sliders).map(([name, slider]) => [name, valuesOf(slider)]));
  const start = Object.fromEntries(Object.entries(sliders).map(([name, slider]) => [name, slider.value]));
  const startPolicy = root.querySelector("input[type=radio]:checked").value;
  let seed = Number(root.dataset.seed);

  function readState() {
    const state = { seed, policy: root.querySelector("input[type=radio]:checked").value };
    for (const [name, slider] of Object.entries(sliders)) {
      state[name] = steps[name][Number(slider.value)];
      const text = write(state[name]);
      slider.setAttribute("aria-valuetext", text);
      slider.closest(".slider").querySelector("output").textContent = text;
    }
    return state;
  }

  function nameScale(state) {
    if (state.t === 1) return LABELS[state.policy];
    const times = write(1 / state.t);
    return state.policy === "none" ? `×${times}` : `${times}·${LABELS[state.policy]}`;
  }

  function drawLogits(svg, both) {
    let low = Infinity, high = -Infinity;
    for (const { logits } of both) for (const x of logits) (low = Math.min(low, x)), (high = Math.max(high, x));
    const reach = Math.max(Math.abs(low), Math.abs(high), 1e-9) * 1.05;
    const bins = 41;
    const lines = both.map(({ logits, colour, dash }) => {
      const counts = new Array(bins).fill(0);
      for (const x of logits) counts[Math.min(bins - 1, Math.floor(((x + reach) / (2 * reach)) * bins))]++;
      const edge = (i) => -reach + (2 * reach * i) / bins;
      return { colour, dash, points: counts.flatMap((count, i) => [[edge(i), count], [edge(i + 1), count]]) };
    });
    const most = Math.max(...lines.flatMap((line) => line.points.map(([, count]) => count)));
    const same = (value) => value, round = (value) => writeNumber(value, 2);
    chart(
      svg,
      lines,
      { low: -reach, high: reach, map: same, ticks: [-reach, -reach / 2, 0, reach / 2, reach].map((v) => v * 0.92), name: round, title: "logit" },
      { low: 0, high: most, map: same, ticks: [0, most / 2, most], name: (v) => String(Math.round(v)) },
    );
  }

  function drawWeights(svg, both, n) {
    const lines = both.map(({ weights, colour, dash }) => {
      const sorted = Float64Array.from(weights).sort().reverse();
      const points = [];
      for (let rank = 1; rank <= n; rank = Math.max(rank + 1, Math.round(rank * 1.06))) points.push([rank, sorted[rank - 1]]);
      return { colour, dash, points };
    });
    const log = (value) => Math.log10(Math.max(value, 1e-30));
    const ranks = [1, 10, 100, 1000].filter((rank) => rank <= n);
    const power = (value) => (value === 1 ? "1" : namePower(Math.round(log(value))));
    chart(
      svg,
      lines,
      { low: 1, high: Math.max(n, 2), map: log, ticks: ranks, name: String, title: "rank of the key" },
      { low: 1e-6, high: 1, map: log, ticks: [1e-6, 1e-4, 1e-2, 1], name: power },
    );
  }

  function show() {
    const state = readState();
    const sampled = sampleRow(state);
    const scale = state.d_k ** EXPONENTS[state.policy] / state.t;
    const none = measureRow(sampled, state.d_k, 1), chosen = measureRow(sampled, state.d_k, scale);
    for (const [column, { numbers }] of Object.entries({ none, chosen })) {
      for (const output of root.querySelectorAll(`output[data-column=${column}]`)) {
        const value = numbers[output.dataset.quantity];
        output.dataset.value = String(value);
        output.textContent = write(value);
      }
    }
    // No scaling against itself is one column, not two equal ones.
    const alone = scale === 1;
    root.classList.toggle("alone", alone);
    const label = nameScale(state);
    root.querySelector(".try-chosen").textContent = label;
    const keys = (count) => writeNumber(count, 2);
    root.querySelector(".try-says").textContent =
      `dₖ = ${state.d_k}, n = ${state.n}: without scaling the most attended key takes ${writePercent(none.numbers.max_weight)} of ` +
      `the weight (${keys(none.numbers.effective_keys)} effective keys)` +
      (alone ? "." : `, with ${label} it takes ${writePercent(chosen.numbers.max_weight)} (${keys(chosen.numbers.effective_keys)} effective keys).`);
    const both = [
      { ...none, colour: "var(--try-none)", dash: "5 3" },
      { ...chosen, colour: `var(--try-${state.policy})`, dash: "none" },
    ].slice(0, alone ? 1 : 2);
    drawLogits(root.querySelector(".try-logits"), both);
    drawWeights(root.querySelector(".try-weights"), both, state.n);
  }

  root.addEventListener("input", show);
  root.addEventListener("click", (event) => {
    const action = event.target.dataset && event.target.dataset.do;
    if (action === "sample") seed += 1;
    if (action === "reset") {
      seed = Number(root.dataset.seed);
      for (const [name, slider] of Object.entries(sliders)) slider.value = start[name];
      root.querySelector(`input[value=${startPolicy}]`).checked = true;
    }
    if (action) {
      root.dataset.sampled = String(seed);
      show();
    }
  });
  show();
})();

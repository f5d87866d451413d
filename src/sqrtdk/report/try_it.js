// Sliders of the report: computes in the page the numbers of try_it.py and counter.py.
"use strict";
(() => {
  const root = document.getElementById("try-it");
  if (!root) return;
  const MOST_D = 512, MOST_N = 1024, UNIT = 2 ** -32;
  const EXPONENTS = { none: 0, sqrt: -0.5, inverse: -1 };
  // The joiner keeps lines from breaking behind the slash.
  const LABELS = { none: "no scaling", sqrt: "1/\u2060√dₖ", inverse: "1/\u2060dₖ" };

  function mix(x) {
    x ^= x >>> 16;
    x = Math.imul(x, 0x7feb352d);
    x ^= x >>> 15;
    x = Math.imul(x, 0x846ca68b);
    return (x ^ (x >>> 16)) >>> 0;
  }
  const places = Uint32Array.from({ length: MOST_N + 1 }, (_, i) => mix(i + 1));

  // One row of the seed's table of normal numbers; as many columns as were asked for so far.
  class Row {
    constructor(seed, index, most) {
      this.key = mix((Math.imul(index, 0x9e3779b1) + mix(Math.imul(seed, 0x85ebca77) >>> 0)) >>> 0);
      this.values = new Float64Array(most + (most & 1));
      this.sampled = 0;
    }
    upTo(columns) {
      for (; this.sampled < columns; this.sampled += 2) {
        const radius = Math.sqrt(-2 * Math.log(((mix(this.key ^ places[this.sampled]) + 0.5) * UNIT)));
        const angle = 2 * Math.PI * ((mix(this.key ^ places[this.sampled + 1]) + 0.5) * UNIT);
        this.values[this.sampled] = radius * Math.cos(angle);
        this.values[this.sampled + 1] = radius * Math.sin(angle);
      }
      return this.values;
    }
  }

  let table = null;
  function sampleTable(seed) {
    if (table === null || table.seed !== seed) {
      const keys = Array.from({ length: MOST_N }, (_, j) => new Row(seed, j + 2, MOST_D));
      table = { seed, query: new Row(seed, 0, MOST_D), value: new Row(seed, 1, MOST_N), keys };
    }
    return table;
  }

  function sample(state) {
    const { query, value, keys } = sampleTable(state.seed);
    const q = query.upTo(state.d_k), values = value.upTo(state.n);
    const k = [];
    for (let j = 0; j < state.n; j++) k.push(keys[j].upTo(state.d_k));
    const r = state.correlation, rest = Math.sqrt(1 - r * r);
    k[0] = k[0].map((z, i) => r * q[i] + rest * z);
    const dots = new Float64Array(state.n);
    for (let j = 0; j < state.n; j++) {
      let sum = 0;
      const row = k[j];
      for (let i = 0; i < state.d_k; i++) sum += q[i] * row[i];
      dots[j] = sum;
    }
    return { q, k, values, dots };
  }

  // What is left without the largest weight is summed apart: so 1 − Σp² keeps its digits on saturated rows.
  function measure({ k, values, dots }, d_k, scale) {
    const n = dots.length;
    const logits = dots.map((dot) => scale * dot);
    let top = 0, mean = 0;
    for (let j = 0; j < n; j++) {
      mean += logits[j] / n;
      if (logits[j] > logits[top]) top = j;
    }
    let variance = 0, rest = 0;
    const weights = new Float64Array(n);
    for (let j = 0; j < n; j++) {
      variance += (logits[j] - mean) ** 2 / n;
      weights[j] = Math.exp(logits[j] - logits[top]);
      if (j !== top) rest += weights[j];
    }
    const total = 1 + rest;
    let tail = 0, tail2 = 0, entropy = Math.log1p(rest), output = 0;
    for (let j = 0; j < n; j++) {
      weights[j] /= total;
      output += weights[j] * values[j];
      if (j === top) continue;
      const p = weights[j];
      tail += p;
      tail2 += p * p;
      entropy += p * (logits[top] - logits[j]);
    }
    const most = 1 / total, square = most * most + tail2;
    const trace = tail * (2 - tail) - tail2;
    // ‖J‖² = Σ p²(1 − p)² + Σ over pairs p²p², the largest weight apart for the same reason.
    let norm = (most * tail) ** 2 + tail2 * (square + most * most);
    for (let j = 0; j < n; j++) if (j !== top) norm += (weights[j] * (1 - weights[j])) ** 2 - weights[j] ** 4;
    const gradient = new Float64Array(d_k);
    for (let j = 0; j < n; j++) {
      const slope = scale * weights[j] * (values[j] - output), row = k[j];
      for (let i = 0; i < d_k; i++) gradient[i] += slope * row[i];
    }
    return {
      logits,
      weights,
      numbers: {
        expected_variance: d_k * scale * scale,
        logit_variance: variance,
        max_logit: logits[top],
        max_weight: most,
        own_weight: weights[0],
        entropy_ratio: entropy / Math.log(n),
        effective_keys: 1 / square,
        saturation_index: Math.sqrt(variance) / Math.sqrt(2 * Math.log(n)),
        jacobian_trace: trace,
        jacobian_norm: Math.sqrt(norm),
        gradient: Math.sqrt(gradient.reduce((sum, x) => sum + x * x, 0)),
      },
    };
  }

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

  const SVG = "http://www.w3.org/2000/svg";
  function add(parent, tag, attributes, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
  }

  // A chart in the page's own colours: lines through points, ticks at both axes.
  function chart(svg, lines, x, y) {
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
      add(svg, "path", { d: path, class: "curve", style: `stroke:${line.colour}`, "stroke-dasharray": line.dash });
    }
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
    const sampled = sample(state);
    const scale = state.d_k ** EXPONENTS[state.policy] / state.t;
    const none = measure(sampled, state.d_k, 1), chosen = measure(sampled, state.d_k, scale);
    for (const [column, { numbers }] of Object.entries({ none, chosen })) {
      for (const output of root.querySelectorAll(`output[data-column=${column}]`)) {
        const value = numbers[output.dataset.quantity];
        output.dataset.value = String(value);
        output.textContent = write(value);
      }
    }
    const label = nameScale(state);
    root.querySelector(".try-chosen").textContent = label;
    const keys = (count) => writeNumber(count, 2);
    root.querySelector(".try-says").textContent =
      `dₖ = ${state.d_k}, n = ${state.n}: without scaling the most attended key takes ${writePercent(none.numbers.max_weight)} of ` +
      `the weight (${keys(none.numbers.effective_keys)} effective keys), with ${label} it takes ` +
      `${writePercent(chosen.numbers.max_weight)} (${keys(chosen.numbers.effective_keys)} effective keys).`;
    const both = [
      { ...none, colour: "var(--try-none)", dash: "5 3" },
      { ...chosen, colour: `var(--try-${state.policy})`, dash: "none" },
    ];
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

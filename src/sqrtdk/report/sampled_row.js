// One query among n keys, sampled from a counter and measured: the numbers of counter.py and try_it.py.
const MOST_D = 512, MOST_N = 2048, UNIT = 2 ** -32;

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

/** Query, keys, values and dot products of a state: seed, d_k, n, correlation. */
export function sampleRow(state) {
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

/** Logits, weights and numbers of a sampled row under a scale. */
export function measureRow({ k, values, dots }, d_k, scale) {
  // What is left without the largest weight is summed apart: so 1 − Σp² keeps its digits on saturated rows.
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

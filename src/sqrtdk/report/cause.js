// First screen: q·k as walks that grow term by term, and their softmax weights. cause.py computes the same numbers.
import { writeNumber } from "./numbers.js";
import { measureRow, sampleRow } from "./sampled_row.js";
import { bars, chart } from "./svg_chart.js";

(() => {
  // The largest dₖ fills the axis, so that a larger dₖ is seen to spread more.
  const reachOf = (sizes) => 2.6 * Math.sqrt(sizes.at(-1));

  function walk(q, key, d_k, scale) {
    let sum = 0;
    const points = [[0, 0]];
    for (let i = 0; i < d_k; i++) points.push([i + 1, (sum += scale * q[i] * key[i])]);
    return points;
  }

  function start(root) {
    const slider = root.querySelector("input[type=range]"), divide = root.querySelector(".divide");
    const sizes = slider.dataset.values.split(",").map(Number), reach = reachOf(sizes);
    const n = Number(root.dataset.keys);

    function show() {
      const d_k = sizes[Number(slider.value)], divided = divide.checked, seed = Number(root.dataset.seed);
      slider.setAttribute("aria-valuetext", String(d_k));
      root.querySelector("output").textContent = String(d_k);
      const scale = divided ? 1 / Math.sqrt(d_k) : 1, colour = divided ? root.dataset.sqrt : root.dataset.none;
      const row = sampleRow({ seed, d_k, n, correlation: 0 });
      const { weights, numbers } = measureRow(row, d_k, scale);
      const spread = Math.sqrt(numbers.logit_variance);
      const edge = Array.from({ length: 65 }, (_, i) => (d_k * i) / 64);
      const band = [1, -1].map((sign) => ({
        points: edge.map((i) => [i, sign * scale * Math.sqrt(i)]), colour: "var(--ink)", dash: "5 3",
      }));
      const walks = row.k.map((key) => ({ points: walk(row.q, key, d_k, scale), colour, dash: "none", thin: true }));
      const same = (value) => value, whole = (value) => writeNumber(value, 2);
      chart(
        root.querySelector(".walks"),
        [...walks, ...band],
        { low: 0, high: d_k, map: same, ticks: d_k > 1 ? [0, d_k / 2, d_k] : [0, 1], name: whole, title: `terms added; dashed: ±√terms${divided ? "/√dₖ" : ""}` },
        { low: -reach, high: reach, map: same, ticks: [-40, -20, 0, 20, 40], name: whole },
      );
      bars(root.querySelector(".bars"), weights, colour);
      root.querySelector(".bars").setAttribute("aria-label", `Softmax weights of ${n} keys, the largest is ${whole(numbers.max_weight)}`);
      const says = root.querySelector(".cause-says");
      Object.assign(says.dataset, { spread, max_weight: numbers.max_weight, effective_keys: numbers.effective_keys });
      says.textContent =
        `dₖ = ${d_k}, ${divided ? "divided by √dₖ" : "not divided"}: the ${n} dot products spread by ${whole(spread)} ` +
        `(predicted ${whole(divided ? 1 : Math.sqrt(d_k))}). The largest weight is ${whole(numbers.max_weight)}, ` +
        `as if ${whole(numbers.effective_keys)} keys shared the weight equally.`;
    }

    root.addEventListener("input", show);
    root.querySelector("[data-do=sample]").addEventListener("click", () => {
      root.dataset.seed = String(Number(root.dataset.seed) + 1);
      show();
    });
    show();
  }

  for (const root of document.querySelectorAll(".cause")) start(root);
})();

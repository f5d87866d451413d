// Words: the weights of one head between the tokens of a sentence, at any temperature. words.py computes the same.
import { writeNumber, writePercent } from "./numbers.js";
import { bars } from "./svg_chart.js";

const SVG_LINES = "http://www.w3.org/2000/svg", MOST_LINES = 12, LEAST_LINE = 0.02;

/** Weights of a row from hundredths of −ln(weight), at a factor on the model's own scale; null is a hidden key. */
export function weighRow(nats, factor) {
  const least = Math.min(...nats.filter((value) => value !== null));
  const raised = nats.map((value) => (value === null ? 0 : Math.exp((-factor * (value - least)) / 100)));
  const total = raised.reduce((sum, value) => sum + value, 0);
  return raised.map((value) => value / total);
}

/**
 * Build the view in an element. `weights(layer, head)` gives the rows of a head, at once or later. `wanted` may name layer,
 * head, row and tau; what the sentence lacks is left out. `told` is called with them after each change.
 */
export function showWords(root, sentence, weights, wanted = {}, told = () => {}) {
  const find = (name) => root.querySelector(`.words-${name}`);
  const slider = find("temperature");
  // A head that is neither one-hot nor uniform shows most when the temperature changes.
  const fromHalf = (head) => Math.abs((head.entropy_ratio ?? 1) - 0.5);
  let chosen = sentence.heads.reduce((best, one) => (fromHalf(one) < fromHalf(best) ? one : best));
  let row = Math.max(sentence.tokens.indexOf("it"), Math.min(sentence.tokens.length - 1, 2)), rows = null, asked = 0;
  chosen = sentence.heads.find((one) => one.layer === Number(wanted.layer) && one.head === Number(wanted.head)) ?? chosen;
  if (/^\d+$/.test(wanted.row) && Number(wanted.row) < sentence.tokens.length) row = Number(wanted.row);
  const { d_k } = sentence, root_d = Math.sqrt(d_k);
  // From half the temperature of no scaling to twice that of 1/dₖ, in equal steps of its logarithm.
  const low = Math.log(0.5), high = Math.log(2 * d_k);
  const toTau = (place) => Math.exp(low + ((high - low) * place) / 200);
  const toPlace = (tau) => Math.round((200 * (Math.log(tau) - low)) / (high - low));
  const own = 1 / sentence.scale;
  let tau = Number(wanted.tau) > 0 ? Math.min(Math.max(Number(wanted.tau), 0.5), 2 * d_k) : own;

  const marks = [["no scaling", 1], ["1/√dₖ", root_d], ["1/dₖ", d_k]].map(([name, value]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.dataset.tau = String(value);
    button.style.left = `${toPlace(value) / 2}%`;
    button.addEventListener("click", () => setTau(value));
    return button;
  });
  find("marks").replaceChildren(...marks);
  slider.max = "200";

  function setTau(value) {
    tau = value;
    slider.value = String(toPlace(value));
    show();
  }

  function drawMap() {
    const table = document.createElement("table");
    table.className = "words-grid";
    const layers = [...new Set(sentence.heads.map((head) => head.layer))];
    for (const layer of layers) {
      const line = table.insertRow();
      const name = document.createElement("th");
      name.textContent = String(layer);
      line.append(name);
      for (const head of sentence.heads.filter((one) => one.layer === layer)) {
        const button = document.createElement("button");
        button.type = "button";
        button.tabIndex = head === chosen ? 0 : -1;
        button.setAttribute("aria-pressed", String(head === chosen));
        button.setAttribute("aria-label", `layer ${layer}, head ${head.head}, entropy ratio ${writeNumber(head.entropy_ratio, 2)}`);
        button.dataset.at = `${layer}/${head.head}`;
        button.style.opacity = String(1 - 0.85 * (head.entropy_ratio ?? 1));
        button.addEventListener("click", () => choose(head));
        button.addEventListener("keydown", (event) => {
          const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
          const next = step && sentence.heads.find((one) => one.layer === layer + step[0] && one.head === head.head + step[1]);
          if (!next) return;
          event.preventDefault();
          choose(next);
        });
        line.insertCell().append(button);
      }
    }
    const focused = find("map").contains(document.activeElement);
    find("map").replaceChildren(table);
    if (focused) table.querySelector("[aria-pressed=true]").focus();
  }

  async function choose(head) {
    chosen = head;
    drawMap();
    const mine = ++asked;
    const given = await weights(head.layer, head.head);
    if (mine !== asked) return;
    rows = given;
    show();
  }

  const tokens = sentence.tokens.map((token, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = token;
    button.tabIndex = at === row ? 0 : -1;
    button.addEventListener("click", () => point(at));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -at, End: sentence.tokens.length - 1 - at }[event.key];
      if (step === undefined || !tokens[at + step]) return;
      event.preventDefault();
      point(at + step);
      tokens[at + step].focus();
    });
    return button;
  });
  const overlay = document.createElementNS(SVG_LINES, "svg");
  overlay.setAttribute("aria-hidden", "true");
  find("tokens").replaceChildren(overlay, ...tokens);

  function point(at) {
    tokens[row].tabIndex = -1;
    row = at;
    tokens[row].tabIndex = 0;
    show();
  }

  function drawLines(given) {
    const frame = find("tokens").getBoundingClientRect();
    overlay.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    const middle = (button) => {
      const box = button.getBoundingClientRect();
      return [box.left - frame.left + box.width / 2, box.top - frame.top];
    };
    const [x, y] = middle(tokens[row]);
    const strongest = given.map((weight, at) => [weight, at]).filter(([weight, at]) => weight >= LEAST_LINE && at !== row).sort((a, b) => b[0] - a[0]).slice(0, MOST_LINES);
    overlay.replaceChildren(...strongest.map(([weight, at]) => {
      const [toX, toY] = middle(tokens[at]);
      const path = document.createElementNS(SVG_LINES, "path");
      path.setAttribute("d", `M${x} ${y}Q${(x + toX) / 2} ${Math.min(y, toY) - 10 - 0.1 * Math.abs(toX - x)} ${toX} ${toY}`);
      path.setAttribute("stroke-width", String(1 + 7 * weight));
      path.setAttribute("opacity", String(0.25 + 0.75 * weight));
      return path;
    }));
  }

  function show() {
    if (!rows) return;
    const given = weighRow(rows[row], own / tau);
    tokens.forEach((button, at) => {
      button.setAttribute("aria-pressed", String(at === row));
      button.style.setProperty("--weight", String(Math.round(100 * given[at])));
    });
    drawLines(given);
    bars(find("bars"), given, "var(--accent)");
    const top = given.indexOf(Math.max(...given)), keys = 1 / given.reduce((sum, weight) => sum + weight * weight, 0);
    const near = marks.find((mark) => Math.abs(Math.log(Number(mark.dataset.tau) / tau)) < 0.02);
    for (const mark of marks) mark.setAttribute("aria-pressed", String(mark === near));
    slider.setAttribute("aria-valuetext", near ? `τ ${writeNumber(tau, 3)}, ${near.textContent}` : `τ ${writeNumber(tau, 3)}`);
    find("says").textContent =
      `Layer ${chosen.layer}, head ${chosen.head}, τ = ${writeNumber(tau, 3)}${near ? ` (${near.textContent})` : ""}: “${sentence.tokens[row]}” attends most to ` +
      `“${sentence.tokens[top]}” (weight ${writeNumber(given[top], 2)}), as if ${writeNumber(keys, 2)} of ${given.length} tokens shared the weight equally.`;
    Object.assign(find("says").dataset, { max_weight: given[top], effective_keys: keys, tau, row, layer: chosen.layer, head: chosen.head });
    told({ layer: chosen.layer, head: chosen.head, row, tau });
    find("pattern").textContent =
      `Pattern on a longer text: ${chosen.pattern}${chosen.share === null ? "" : `, followed by ${writePercent(chosen.share)} of its rows`}. Its mean entropy ratio on this sentence is ${writeNumber(chosen.entropy_ratio, 2)}.`;
  }

  slider.oninput = () => {
    tau = toTau(Number(slider.value));
    // A mark that the slider's step can hit is hit exactly.
    for (const value of [1, root_d, d_k]) if (toPlace(value) === Number(slider.value)) tau = value;
    show();
  };
  slider.value = String(toPlace(tau));
  new ResizeObserver(() => rows && drawLines(weighRow(rows[row], own / tau))).observe(find("tokens"));
  return choose(chosen);
}

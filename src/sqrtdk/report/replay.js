// Replay of training: loss curves that grow, and the attention map of one example at the same step. replay.py says the same.
import { writeNumber } from "./numbers.js";
import { chart, heat } from "./svg_chart.js";

const FRAME = 160; // milliseconds
const decoded = new Map();

/** The rows of bytes in the base64 text of a map. */
function readMap(text, columns) {
  if (!decoded.has(text)) decoded.set(text, Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)));
  const bytes = decoded.get(text);
  return Array.from({ length: bytes.length / columns }, (_, row) => [...bytes.subarray(row * columns, (row + 1) * columns)]);
}

/** How many queries give the right key more weight than any other key. */
const countRight = (rows, right) => right.filter((key, row) => rows[row].every((byte, other) => other === key || byte < rows[row][key])).length;

/** Fill an element with runs: their `name`, `colour`, `total` updates, curves `step` and `loss`, and `maps`.
 *  Returns a function that takes the same runs at a later time: a replay that stands at its end stays there. */
export function showReplay(root, given) {
  const slider = root.querySelector("input[type=range]"), button = root.querySelector("[data-do=play]");
  let runs = [], steps = [0], at = 0, timer = null, printed = null;

  const stateOf = (run) => {
    const { maps } = run, step = steps[at];
    const place = maps.steps.findLastIndex((one) => one <= step);
    const rows = place < 0 ? [] : readMap(maps.weights[place], maps.tokens.length);
    const points = run.step.map((one, i) => [one, run.loss[i]]).filter(([one, loss]) => one <= step && Number.isFinite(loss));
    return { rows, points, right: rows.length ? countRight(rows, maps.right) : 0 };
  };

  const say = (run, { points, right }) =>
    `loss ${writeNumber(points.at(-1)?.[1], 3)}` + (run.maps.right.length ? `, right value: ${right} of ${run.maps.right.length} queries` : "");

  function showRun(figure, run, lossAxis, stepAxis) {
    const { maps, colour } = run, state = stateOf(run), chance = maps.chance_loss;
    const [loss, map] = figure.querySelectorAll("svg");
    const guess = { points: [[0, chance], [stepAxis.high, chance]], colour: "var(--soft)", dash: "4 3", thin: true };
    chart(loss, [guess, { points: state.points, colour, dash: "none" }], stepAxis, lossAxis);
    const asked = maps.tokens.slice(maps.first);
    heat(map, state.rows, {
      queries: asked.map((token, row) => (maps.right.length ? `${token}→${maps.tokens[maps.right[row]]}` : token)),
      keys: maps.tokens, seen: asked.map((_, row) => maps.first + row + 1), mark: maps.right, colour,
    });
    const said = say(run, state);
    figure.querySelector("p").textContent = said;
    loss.setAttribute("aria-label", `Training loss of ${run.name} up to step ${steps[at]}`);
    map.setAttribute("aria-label", `Attention map of ${run.name}: ${said}`);
    return `${run.name}: ${said}`;
  }

  function show() {
    const losses = runs.flatMap((run) => [...run.loss, run.maps.chance_loss]).filter((loss) => loss > 0);
    const low = Math.floor(Math.log10(Math.min(...losses))), high = Math.max(...losses);
    const powers = Array.from({ length: Math.floor(Math.log10(high)) - low + 1 }, (_, i) => 10 ** (low + i));
    const whole = (value) => writeNumber(value), total = Math.max(1, ...runs.flatMap((run) => [run.total || 0, run.maps.steps.at(-1)]));
    const lossAxis = { low: 10 ** low, high: 1.15 * high, map: Math.log, ticks: powers, name: whole };
    const stepAxis = { low: 0, high: total, map: (value) => value, ticks: [0, Math.round(total / 2), total], name: whole, title: "training step; dashed: loss of a guess" };
    const figures = root.querySelectorAll(".replay-runs figure");
    const said = runs.map((run, i) => showRun(figures[i], run, lossAxis, stepAxis));
    slider.max = String(steps.length - 1);
    slider.value = String(at);
    slider.setAttribute("aria-valuetext", `step ${steps[at]}. ${said.join(". ")}`);
    root.querySelector("output").textContent = String(steps[at]);
  }

  function go(place) {
    at = Math.min(Math.max(place, 0), steps.length - 1);
    show();
  }

  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(() => (at < steps.length - 1 ? go(at + 1) : play(false)), FRAME) : null;
    button.textContent = on ? "Pause" : "Play";
    button.setAttribute("aria-pressed", String(on));
  }

  function update(later) {
    const follows = at === steps.length - 1, before = steps[at];
    runs = later;
    root.hidden = !runs.length;
    if (!runs.length) return;
    steps = [...new Set(runs.flatMap((run) => run.maps.steps))].sort((a, b) => a - b);
    at = follows && timer === null ? steps.length - 1 : Math.max(0, steps.findLastIndex((step) => step <= before));
    const frame = root.querySelector(".replay-runs");
    while (frame.children.length > runs.length) frame.lastElementChild.remove();
    while (frame.children.length < runs.length) frame.append(root.querySelector("template").content.cloneNode(true));
    runs.forEach((run, i) => (frame.children[i].querySelector("figcaption").textContent = run.name));
    show();
  }

  slider.addEventListener("input", () => {
    play(false);
    go(Number(slider.value));
  });
  button.addEventListener("click", () => {
    if (timer === null && at === steps.length - 1) go(0);
    play(timer === null);
  });
  // Paper shows the last step.
  addEventListener("beforeprint", () => {
    printed = at;
    if (runs.length) go(steps.length - 1);
  });
  addEventListener("afterprint", () => runs.length && go(printed));
  update(given);
  return update;
}

// Settings of the Explore page: controls, and their state in the address.

import { $, make } from "./dom.js";

const log2 = (first, steps) => ({
  steps,
  toValue: (at) => String(Math.round(2 ** (first + at / 10))),
  toPlace: (value) => Math.round(10 * (Math.log2(value) - first)),
});
const linear = (least, step, steps) => ({
  steps,
  toValue: (at) => String(Number((least + step * at).toFixed(6))),
  toPlace: (value) => Math.round((value - least) / step),
});

export const SLIDERS = {
  d_k: { label: "dₖ, length of q and k", scale: log2(0, 100), step: 1, at: "sliders" },
  n: { label: "n, keys per query", scale: log2(1, 120), step: 1, at: "sliders" },
  t: {
    label: "t, factor on the temperature",
    scale: {
      steps: 100,
      toValue: (at) => String(Number((10 ** (at / 50 - 1)).toPrecision(3))),
      toPlace: (value) => Math.round(50 * (Math.log10(value) + 1)),
    },
    step: "any",
    at: "more-sliders",
  },
  correlation: { label: "correlation of a query with its own key", scale: linear(-1, 0.05, 40), step: "any", at: "more-sliders" },
  mean_q: { label: "mean of the entries of q", scale: linear(-2, 0.1, 40), step: "any", at: "more-sliders" },
  mean_k: { label: "mean of the entries of k", scale: linear(-2, 0.1, 40), step: "any", at: "more-sliders" },
};
const PLAIN = ["policy", "parameter", "distribution", "dtype", "seed", "scores", "claimed"];
// What a source does not use.
const UNUSED = { random: [], scores: ["n", "correlation", "mean_q", "mean_k"] };
const DISTRIBUTIONS = {
  normal: "normal", uniform: "uniform", laplace: "Laplace", student: "heavy-tailed (Student's t, 5)", signs: "signs ±1",
};

let options = null;
let announce = () => {};

export function usual() {
  const state = { source: "random", policy: "sqrt", parameter: "", distribution: "normal", dtype: "float64", scores: "14,10,12", claimed: "" };
  for (const [name, bounds] of Object.entries(options.bounds)) state[name] = String(bounds.usual);
  return state;
}

/** Build the controls; `changed` is called after every change by hand. */
export function build(given, changed) {
  options = given;
  announce = changed;
  for (const [name, slider] of Object.entries(SLIDERS)) $(slider.at).append(makeSlider(name, slider));
  $("policy").append(...options.policies.map((one) => make("option", { value: one.name }, `${one.name}: ${one.formula}`)));
  $("distribution").append(...options.distributions.map((name) => make("option", { value: name }, DISTRIBUTIONS[name] ?? name)));
  $("dtype").append(...options.dtypes.map((name) => make("option", { value: name }, name)));
  for (const id of PLAIN) {
    $(id).addEventListener("input", () => {
      if (id === "policy") $("parameter").value = "";
      refresh();
      announce();
    });
  }
  for (const radio of document.querySelectorAll("input[name=source]")) {
    radio.addEventListener("change", () => {
      refresh();
      announce();
    });
  }
  $("again").addEventListener("click", () => {
    $("seed").value = String((Number($("seed").value) + 1) % 4294967296);
    announce();
  });
  $("controls").addEventListener("submit", (event) => event.preventDefault());
}

function makeSlider(name, slider) {
  const bounds = options.bounds[name];
  const range = make("input", { type: "range", id: `${name}-slider`, min: 0, max: slider.scale.steps, step: 1 });
  const number = make("input", { type: "number", id: name, name, min: bounds.least, max: bounds.largest, step: slider.step });
  number.setAttribute("aria-label", `${slider.label}, as a number`);
  range.addEventListener("input", () => {
    number.value = slider.scale.toValue(Number(range.value));
    refresh();
    announce();
  });
  number.addEventListener("input", () => {
    refresh();
    announce();
  });
  return make("div", { class: "slider" }, make("label", { for: range.id }, slider.label), range, number);
}

/** Bring what depends on other controls in line with them. */
function refresh() {
  const source = document.querySelector("input[name=source]:checked").value;
  for (const [name, slider] of Object.entries(SLIDERS)) {
    const range = $(`${name}-slider`);
    const value = Number($(name).value);
    if (slider.scale.toValue(Number(range.value)) !== $(name).value) range.value = String(slider.scale.toPlace(value));
    range.setAttribute("aria-valuetext", $(name).value);
    range.disabled = $(name).disabled = UNUSED[source].includes(name);
  }
  $("distribution").disabled = source !== "random";
  $("scores-field").hidden = source !== "scores";
  const policy = options.policies.find((one) => one.name === $("policy").value);
  $("policy-hint").textContent = policy ? `${policy.about} ${policy.source}.` : "";
  const bounds = policy?.parameter;
  $("parameter-field").hidden = !bounds;
  if (bounds) {
    $("parameter").min = bounds.least;
    $("parameter").max = bounds.largest;
    $("parameter").placeholder = String(Number(bounds.usual.toPrecision(6)));
  }
}

/** The state of the controls, names as the server knows them. */
export function read() {
  const state = { source: document.querySelector("input[name=source]:checked").value };
  for (const name of [...Object.keys(SLIDERS), ...PLAIN]) state[name] = $(name).value;
  if (state.source !== "scores") delete state.scores;
  if (state.source !== "scores" || !state.claimed.trim()) delete state.claimed;
  if (!state.parameter) delete state.parameter;
  return state;
}

/** What is wrong with a number by hand, in words; null if nothing is. The server would refuse it too. */
export function complain() {
  for (const [id, name] of [...Object.entries(SLIDERS).map(([id, slider]) => [id, slider.label.split(",")[0]]), ["seed", "seed"], ["parameter", "the parameter"]]) {
    const input = $(id);
    if (input.disabled || (id === "parameter" && ($("parameter-field").hidden || !input.value))) continue;
    if (!input.value || !input.validity.valid) {
      const kind = input.step === "1" ? "a whole number" : "a number";
      return `${name} must be ${kind} from ${input.min} to ${input.max}, got ${input.value || "nothing"}`;
    }
  }
  return null;
}

/** Set the controls; names that are left out are as usual. */
export function write(state) {
  const complete = { ...usual(), ...state };
  for (const radio of document.querySelectorAll("input[name=source]")) radio.checked = radio.value === complete.source;
  if (!document.querySelector("input[name=source]:checked")) document.querySelector("input[name=source]").checked = true;
  for (const name of [...Object.keys(SLIDERS), ...PLAIN]) $(name).value = complete[name];
  refresh();
}

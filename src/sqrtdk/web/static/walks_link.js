// First screen's state in the address of Explore: length of the walks, division and sample, where they differ from the start.

const root = document.querySelector(".cause"), slider = root.querySelector("input[type=range]"), divide = root.querySelector(".divide");
const sizes = slider.dataset.values.split(",");

function readAll() {
  return { walk: sizes[Number(slider.value)], divided: divide.checked ? "1" : "0", sample: root.dataset.seed };
}

const start = readAll();

/** Call a function after every change by hand. */
export function followWalks(changed) {
  root.addEventListener("input", (event) => event.isTrusted && changed());
  root.addEventListener("click", (event) => event.target.dataset.do === "sample" && changed());
}

export function readWalks() {
  return Object.fromEntries(Object.entries(readAll()).filter(([name, value]) => value !== start[name]));
}

/** Set the first screen; what is left out, or cannot be set, is as at the start. */
export function writeWalks(state) {
  const { walk, divided, sample } = { ...start, ...state };
  slider.value = String(sizes.indexOf(sizes.includes(walk) ? walk : start.walk));
  divide.checked = divided === "1";
  root.dataset.seed = /^\d{1,9}$/.test(sample) ? sample : start.sample;
  root.dispatchEvent(new Event("input"));
}

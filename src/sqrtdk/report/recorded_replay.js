// The report's recorded runs.
import { showReplay } from "./replay.js";

(() => {
  const root = document.querySelector(".replay");
  if (root) showReplay(root, JSON.parse(document.getElementById("recorded-replay").textContent));
})();

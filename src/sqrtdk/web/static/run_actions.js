// Selected runs of the Runs page: compared by what differs, or deleted after a confirmation that names them.

import { $, ask, make } from "./dom.js";

const FEWEST_COMPARED = 2;
const MOST_COMPARED = 64;

const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

/** Wire the buttons. `runs` tells the selected runs, their names and the bytes of their checkpoints. */
export function actOn(runs) {
  let doomed = [];
  let told = "Select runs to compare or delete them.";

  function update() {
    const chosen = runs.selected();
    const finished = chosen.filter((run) => run.finished);
    $("selected").textContent = chosen.length ? `${count(chosen.length, "run")} selected` : told;
    $("compare").disabled = finished.length < FEWEST_COMPARED || finished.length > MOST_COMPARED || finished.length < chosen.length;
    $("delete").disabled = !chosen.length;
  }

  async function compare() {
    const chosen = runs.selected();
    const names = Object.fromEntries(chosen.map((run) => [run.key, runs.name(run)]));
    let reply;
    try {
      reply = await ask("/api/compare", { keys: chosen.map((run) => run.key).join(",") });
    } catch (error) {
      reply = { columns: [], rows: [], reading: [error.message] };
    }
    const head = reply.columns.map((name) => make("th", { scope: "col", title: names[name] }, name));
    const rows = reply.rows.map(([name, ...values]) => make("tr", { "data-name": name }, make("th", { scope: "row" }, name), ...values.map((value) => make("td", {}, value))));
    $("comparison-title").textContent = `Differences of ${count(chosen.length, "run")}`;
    $("comparison-says").textContent = [...reply.reading, ...Object.entries(names).map(([key, name]) => `${key}: ${name}.`)].join(" ");
    $("differences").replaceChildren(...(rows.length ? [make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)] : []));
    $("comparison").hidden = false;
    $("comparison").focus();
    $("comparison").scrollIntoView({ block: "nearest" });
  }

  function refuse(error) {
    $("refusal").textContent = error ? error.message : "";
    $("refusal").hidden = !error;
  }

  function confirmFirst() {
    doomed = runs.selected();
    refuse(null);
    const kept = doomed.filter((run) => runs.bytes(run));
    const kilobytes = Math.ceil(kept.reduce((sum, run) => sum + runs.bytes(run), 0) / 1000);
    const also = kept.length ? ` and the checkpoints of ${count(kept.length, "run")} (${kilobytes} kB)` : "";
    $("deletion-title").textContent = `Delete ${count(doomed.length, "run")}${also}?`;
    $("deletion-says").textContent = "Deleted runs cannot be restored, only trained again. Finished records of ablations stay.";
    $("deletion-runs").replaceChildren(...doomed.map((run) => make("li", { "data-key": run.key }, `${runs.name(run)} (${run.key}, ${run.status}${runs.bytes(run) ? ", with checkpoints" : ""})`)));
    $("confirm").textContent = `Delete ${count(doomed.length, "run")}`;
    $("confirm").disabled = false;
    $("deletion").showModal();
    $("keep").focus();
  }

  async function confirm() {
    $("confirm").disabled = true;
    try {
      const reply = await ask("/api/delete", {}, {
        method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ keys: doomed.map((run) => run.key) }),
      });
      $("deletion").close();
      $("comparison").hidden = true;
      $("select-all").focus();
      told = `${count(reply.deleted, "run")} deleted${reply.checkpoints ? `, checkpoints of ${count(reply.checkpoints, "run")} too` : ""}.`;
      runs.forget(doomed);
    } catch (error) {
      refuse(error);
    }
    $("confirm").disabled = false;
  }

  $("compare").addEventListener("click", compare);
  $("delete").addEventListener("click", confirmFirst);
  $("confirm").addEventListener("click", confirm);
  $("keep").addEventListener("click", () => $("deletion").close());
  return { update };
}

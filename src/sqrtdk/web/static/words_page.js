// Words page: a typed sentence runs through the server's model; recorded sentences need none.

import { $, ask, make, tell } from "./dom.js";
import { showWords } from "./words.js";

const WAITING = "reading the sentence …";
let sequence = 0;

async function show(sentence, weights) {
  tell(null);
  await showWords(document.querySelector(".words"), sentence, weights);
  document.body.dataset.ready = String(Number(document.body.dataset.ready ?? 0) + 1);
}

function showRecorded(sentences) {
  sequence += 1;
  const sentence = sentences[Number($("recorded").value)];
  $("text").value = sentence.text;
  return show(sentence, (layer, head) => sentence.heads.find((one) => one.layer === layer && one.head === head).nats);
}

async function run(event) {
  event?.preventDefault();
  const mine = ++sequence, text = $("text").value;
  $("run").disabled = true;
  $("run").textContent = WAITING;
  try {
    const sentence = await ask("/api/words", { text });
    if (mine !== sequence) return;
    history.replaceState(null, "", `?${new URLSearchParams({ text })}`);
    await show(sentence, async (layer, head) => {
      try {
        return (await ask("/api/head", { text, layer, head })).nats;
      } catch (error) {
        tell(error);
        return null;
      }
    });
  } catch (error) {
    if (mine === sequence) tell(error);
  } finally {
    $("run").disabled = false;
    $("run").textContent = "Show";
  }
}

async function start() {
  const { sentences, model, how } = await ask("/api/sentences");
  $("about").textContent = model
    ? `${model} reads your sentence on this machine. Choose a word, a head, and a temperature.`
    : `Recorded sentences of all-MiniLM-L6-v2. ${how}`;
  for (const id of ["text", "run"]) $(id).disabled = !model;
  $("recorded").append(...sentences.map((sentence, at) => make("option", { value: at }, sentence.text)));
  $("recorded").addEventListener("change", () => showRecorded(sentences));
  $("sentence-form").addEventListener("submit", run);
  const asked = new URLSearchParams(location.search).get("text");
  if (asked && model) {
    $("text").value = asked;
    await run();
  } else {
    await showRecorded(sentences);
  }
}

start().catch(tell);

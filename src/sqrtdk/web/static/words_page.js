// Words page: a typed sentence runs through the server's model; recorded sentences need none. The address keeps the view.

import { $, ask, make, tell } from "./dom.js";
import { showWords } from "./words.js";

const WAITING = "reading the sentence …";
const REST = 150; // browsers allow few changes of the address per second
let sequence = 0, timer = null;

async function show(sentence, weights, text, wanted) {
  tell(null);
  const keep = (state) => {
    clearTimeout(timer);
    timer = setTimeout(() => history.replaceState(null, "", `?${new URLSearchParams({ text, ...state })}${location.hash}`), REST);
  };
  await showWords(document.querySelector(".words"), sentence, weights, wanted, keep);
  document.body.dataset.ready = String(Number(document.body.dataset.ready ?? 0) + 1);
}

function showRecorded(sentences, wanted) {
  sequence += 1;
  const sentence = sentences[Number($("recorded").value)];
  $("text").value = sentence.text;
  return show(sentence, (layer, head) => sentence.heads.find((one) => one.layer === layer && one.head === head).nats, sentence.text, wanted);
}

async function run(wanted) {
  const mine = ++sequence, text = $("text").value;
  $("run").disabled = true;
  $("run").textContent = WAITING;
  try {
    const sentence = await ask("/api/words", { text });
    if (mine !== sequence) return;
    const weights = async (layer, head) => {
      try {
        return (await ask("/api/head", { text, layer, head })).nats;
      } catch (error) {
        tell(error);
        return null;
      }
    };
    await show(sentence, weights, text, wanted);
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
  $("sentence-form").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  const wanted = Object.fromEntries(new URLSearchParams(location.search));
  const recorded = sentences.findIndex((sentence) => sentence.text === wanted.text);
  if (wanted.text && recorded < 0 && model) {
    $("text").value = wanted.text;
    await run(wanted);
  } else {
    $("recorded").value = String(Math.max(recorded, 0));
    await showRecorded(sentences, wanted.text && recorded < 0 ? {} : wanted);
    if (wanted.text && recorded < 0) tell(new Error(`The sentence of this link needs a model. ${how}`));
  }
}

start().catch(tell);

// The report's recorded sentences.
import { showWords } from "./words.js";

(() => {
  const root = document.querySelector(".words");
  if (!root) return;
  const { sentences } = JSON.parse(document.getElementById("recorded-sentences").textContent);
  const choice = root.querySelector("select");
  const start = () => {
    const sentence = sentences[Number(choice.value)];
    return showWords(root, sentence, (layer, head) => sentence.heads.find((one) => one.layer === layer && one.head === head).nats);
  };
  choice.addEventListener("change", start);
  start();
})();

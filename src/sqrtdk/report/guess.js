// Guess, then reveal: shows the reply to a guess, which guess.py wrote, and unfolds the computed answer.
(() => {
  function start(root) {
    const replies = JSON.parse(root.dataset.replies), slider = root.querySelector("input[type=range]");
    const buttons = [...root.querySelectorAll("button[data-guess]")], answer = root.querySelector("details");

    if (slider) {
      const values = slider.dataset.values.split(",");
      const show = () => {
        const text = String(Number(values[Number(slider.value)]));
        root.querySelector("output").textContent = text;
        slider.setAttribute("aria-valuetext", text);
      };
      slider.addEventListener("input", show);
      slider.addEventListener("keydown", (event) => event.key === "Enter" && buttons[0].click());
      show();
    }
    for (const button of buttons) {
      button.addEventListener("click", () => {
        root.querySelector(".guess-says").textContent = replies[Number(slider ? slider.value : button.dataset.guess)];
        if (!slider) for (const one of buttons) one.setAttribute("aria-pressed", String(one === button));
        answer.open = true;
      });
    }
    answer.addEventListener("toggle", () => {
      for (const one of buttons) one.classList.toggle("guess-right", answer.open && one.dataset.guess === root.dataset.right);
    });
  }

  for (const root of document.querySelectorAll(".guess")) start(root);
})();

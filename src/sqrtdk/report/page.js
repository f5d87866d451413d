"use strict";
for (const source of document.querySelectorAll("script.plot-data")) {
  const chart = JSON.parse(source.textContent);
  // The container gives the width; a fixed one would not follow the window.
  delete chart.layout.width;
  Plotly.newPlot(source.dataset.for, chart.data, chart.layout, { responsive: true, displayModeBar: false });
}
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    for (const plot of button.closest(".figure").querySelectorAll(".plot")) {
      const mine = plot.data.flatMap((trace, index) => (trace.legendgroup === button.dataset.group ? [index] : []));
      if (mine.length) Plotly.restyle(plot, { visible: shown }, mine);
    }
  });
}
for (const button of document.querySelectorAll(".filter button")) {
  button.addEventListener("click", () => {
    for (const other of button.parentElement.children) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    const wanted = button.dataset.verdict;
    for (const row of button.closest("section").querySelectorAll("tr[data-verdict]")) {
      row.hidden = Boolean(wanted) && row.dataset.verdict !== wanted;
    }
  });
}

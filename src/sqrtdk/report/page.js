"use strict";
// Plots are drawn when they are seen first: one in a folded part has no width before.
const charts = new Map();
for (const source of document.querySelectorAll("script.plot-data")) charts.set(source.dataset.for, source);
function drawIn(part) {
  for (const plot of part.querySelectorAll(".plot")) {
    const source = charts.get(plot.id);
    if (!source || plot.closest("details:not([open])")) continue;
    charts.delete(plot.id);
    const chart = JSON.parse(source.textContent);
    // The container gives the width; a fixed one would not follow the window.
    delete chart.layout.width;
    // Numbers in the cells of a map only where they have room.
    for (const trace of chart.data) {
      if (!trace.texttemplate) continue;
      const longest = Math.max(...trace.text.flat().map((text) => text.length));
      if ((plot.clientWidth - 60) / trace.z[0].length < 7 * longest) delete trace.texttemplate;
    }
    plot.replaceChildren(); // the picture that stands where no script runs
    Plotly.newPlot(plot, chart.data, chart.layout, { responsive: true, displayModeBar: false });
  }
}
drawIn(document);
for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", () => drawIn(part));

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

// The data of a figure: its table as CSV, or the whole record as JSON.
function writeCsv(rows) {
  const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    const text = typeof value === "object" ? JSON.stringify(value) : String(value);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns, ...rows.map((row) => columns.map((name) => row[name]))].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}
for (const button of document.querySelectorAll("button[data-save]")) {
  button.addEventListener("click", () => {
    const { save, source, table } = button.dataset;
    const record = [...document.querySelectorAll("script.record")].find((one) => one.dataset.name === source);
    const content = save === "json" ? record.textContent : writeCsv(JSON.parse(record.textContent)[table]);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type: save === "json" ? "application/json" : "text/csv" }));
    link.download = save === "json" ? `${source}.json` : `${source}-${table}.csv`;
    link.click();
    URL.revokeObjectURL(link.href);
  });
}

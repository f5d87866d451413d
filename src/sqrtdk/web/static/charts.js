// Plotly charts in the colours of the page, light or dark, each with a description for screen readers.

import { namePower } from "./numbers.js";

const drawn = new Map();
const dark = matchMedia("(prefers-color-scheme: dark)");

/** Plotly reads a little markup in names and texts; names of others are not meant as such. */
export const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return { ink: read("--ink"), soft: read("--soft"), line: read("--line"), paper: read("--paper"), accent: read("--accent") };
}

export const axis = (title, options = {}) => ({ title: { text: title, standoff: 6 }, automargin: true, ...options });

/** A logarithmic axis from 10^low to 10^high. Its powers are written as text: Plotly's own would need inline styles. */
export function logAxis(title, low, high, options = {}) {
  const step = Math.max(1, Math.ceil((high - low) / 6));
  const exponents = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) exponents.push(at);
  const write = (at) => (at >= -2 && at <= 3 ? String(Number((10 ** at).toPrecision(1))) : namePower(at));
  return axis(title, { type: "log", range: [low, high], tickmode: "array", tickvals: exponents.map((at) => 10 ** at), ticktext: exponents.map(write), ...options });
}

/** Draw into an element. `traces` and `layout` are functions of the page's colours; `text` says what is to be seen. */
export function draw(id, text, traces, layout) {
  drawn.set(id, { traces, layout });
  const element = document.getElementById(id);
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", text);
  render(id);
}

function render(id) {
  const { traces, layout } = drawn.get(id);
  const palette = colours();
  const own = layout(palette);
  const shared = { gridcolor: palette.line, zerolinecolor: palette.line, linecolor: palette.line, tickcolor: palette.line };
  const complete = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: palette.soft, size: 12, family: getComputedStyle(document.body).fontFamily },
    margin: { l: 48, r: 12, t: 8, b: 42 },
    showlegend: false,
    dragmode: false,
    hoverlabel: { bgcolor: palette.paper, bordercolor: palette.line, font: { color: palette.ink } },
    ...own,
    xaxis: { fixedrange: true, ...shared, ...own.xaxis },
    yaxis: { fixedrange: true, ...shared, ...own.yaxis },
  };
  const element = document.getElementById(id);
  window.Plotly.react(element, traces(palette), complete, { displayModeBar: false });
  sizes.observe(element);
}

// A figure that appears or goes changes the width of those beside it.
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const { clientWidth: width, clientHeight: height } = target; // before teach mode scales them
    const own = target._fullLayout;
    if (width && own && (Math.abs(own.width - width) > 1 || Math.abs(own.height - height) > 1)) window.Plotly.Plots.resize(target);
  }
});

dark.addEventListener("change", () => drawn.forEach((_, id) => document.getElementById(id) && render(id)));

/** Plotly's script is deferred like the page's own, but larger. */
export function whenReady() {
  return new Promise((resolve) => {
    if (window.Plotly) resolve();
    else window.addEventListener("load", resolve, { once: true });
  });
}

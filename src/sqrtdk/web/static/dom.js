// Elements, numbers as text, and questions to the server. Text goes in as text: nothing here reads markup.

export const $ = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text nodes. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** A number in four digits, as a reader writes it; an en dash for none. */
export function show(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) {
    const [mantissa, exponent] = value.toExponential(Math.min(digits - 1, 2)).split("e");
    const raised = [...String(Math.abs(Number(exponent)))].map((digit) => SUPERSCRIPTS[digit]).join("");
    return `${Number(mantissa)}·10${Number(exponent) < 0 ? "⁻" : ""}${raised}`.replace("-", "−");
  }
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

/** What the server answers, or an error in its words. */
export async function ask(path, query = {}, options = {}) {
  const text = new URLSearchParams(query).toString();
  let response;
  try {
    response = await fetch(text ? `${path}?${text}` : path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it still running?");
  }
  const timing = /dur=([\d.]+)/.exec(response.headers.get("server-timing") ?? "");
  let content;
  try {
    content = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(`The server answered with status ${response.status}.`);
  }
  if (!response.ok) throw new Error(content.error ?? `The server answered with status ${response.status}.`);
  return { ...content, milliseconds: timing ? Number(timing[1]) : null };
}

export function tell(error) {
  $("error").textContent = error ? error.message : "";
  $("error").hidden = !error;
}

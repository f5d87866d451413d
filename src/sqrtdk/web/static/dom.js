// Elements and requests to the server. Strings become text nodes; nothing here reads markup.

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

/** Show an error, or none. Results below an error are those of an earlier question: they are dimmed. */
export function tell(error) {
  $("error").textContent = error ? error.message : "";
  $("error").hidden = !error;
  $("error").parentElement.classList.toggle("outdated", Boolean(error));
}

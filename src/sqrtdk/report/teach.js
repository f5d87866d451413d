// Teach mode of the report and of the local pages: one screen at a time in large type. The address names the screen.
(() => {
  const SCREENS = ".guess, .cause, .try, .words, .exhibit, .answer, [data-screen]";
  const NARROW = ".guess, .answer"; // texts, which can be larger than figures
  const [TEXT_WIDTH, FIGURE_WIDTH, LARGEST, MARGIN, SWIPE] = [600, 860, 2.4, 20, 60];
  const root = document.documentElement, main = document.querySelector("main"), top = document.querySelector(".top");
  let current = null;

  function make(tag, attributes, text, act) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    if (act) element.addEventListener("click", act);
    return element;
  }

  /** The screens in their order; a section's question comes first. */
  function list() {
    const found = [...main.querySelectorAll(SCREENS)].filter((one) => !one.closest("[hidden], details") && !one.parentElement.closest(SCREENS));
    const sections = new Map();
    for (const element of found) {
      const section = element.closest("section[id]")?.id ?? "page";
      const mine = sections.get(section) ?? sections.set(section, []).get(section);
      if (element.matches(".guess")) mine.unshift(element);
      else mine.push(element);
    }
    return [...sections].flatMap(([section, elements]) => elements.map((element, at) => ({ element, section, name: `${section}-${at + 1}` })));
  }

  /** The screen that the address names: its section's first if it has fewer by now, else the first of all. */
  function find(screens) {
    const [, name] = /^#teach-?(.*)$/.exec(location.hash) ?? [];
    if (name === undefined) return -1;
    const places = [screens.findIndex((one) => one.name === name), screens.findIndex((one) => one.section === name.replace(/-\d+$/, "")), 0];
    return screens.length ? places.find((place) => place >= 0) : -1;
  }

  /** Hide all that is neither the screen nor its section's heading; none shows everything again. */
  function isolate(screen) {
    for (const one of document.querySelectorAll(".teach-off")) one.classList.remove("teach-off");
    for (let at = screen; at && at !== main; at = at.parentElement) {
      for (const other of at.parentElement.children) {
        if (other !== at && !other.matches("section > h2:first-child, [role=alert], [data-teach=keep]")) other.classList.add("teach-off");
      }
    }
  }

  /** Scale the screen up until it fills the window; what is too tall at its own size scrolls. */
  function fit() {
    if (!current) return;
    const room = innerWidth - 2 * MARGIN, width = Math.min(room, current.matches(NARROW) ? TEXT_WIDTH : FIGURE_WIDTH);
    main.style.width = `${width}px`;
    const height = innerHeight - bar.offsetHeight - (top?.offsetHeight ?? 0) - 2 * MARGIN;
    const scale = Math.max(1, Math.min(LARGEST, room / width, height / main.offsetHeight));
    main.style.transform = `translate(${(innerWidth - scale * width) / 2}px, ${MARGIN}px) scale(${scale})`;
  }

  function show() {
    const before = current, screens = list(), place = find(screens);
    current = place < 0 ? null : screens[place].element;
    root.classList.toggle("teaching", current !== null);
    isolate(current);
    bar.hidden = !current;
    for (const link of document.querySelectorAll(".top nav a")) link.hash = current ? "teach" : "";
    if (current) {
      refresh();
      fit();
      scrollTo({ top: 0, behavior: "instant" });
    } else {
      main.style.removeProperty("width");
      main.style.removeProperty("transform");
      before?.scrollIntoView({ behavior: "instant", block: "center" });
    }
    if (current || before) dispatchEvent(new Event("resize")); // plots take their new width
  }

  const hides = () => current?.matches(".guess") && !current.querySelector("details").open;

  /** Bring the bar in line with the screens, some of which appear later, and with the answer, folded or not. */
  function refresh() {
    if (!current) return;
    const screens = list(), place = screens.findIndex((one) => one.element === current);
    counter.textContent = `${place + 1} / ${screens.length}`;
    previous.disabled = place <= 0;
    next.textContent = hides() ? "Reveal" : "Next ›";
    next.disabled = place === screens.length - 1 && !hides();
  }

  function go(step) {
    if (step > 0 && hides()) {
      current.querySelector("details").open = true;
      return;
    }
    const screens = list(), place = find(screens) + step;
    if (screens[place]) location.hash = `teach-${screens[place].name}`;
  }

  function leave() {
    history.pushState(history.state, "", location.href.split("#")[0]);
    show();
  }

  const bar = make("div", { class: "teach-bar", role: "toolbar", "aria-label": "Teach mode" }, "");
  const previous = make("button", { type: "button", "aria-label": "Previous screen" }, "‹", () => go(-1));
  const counter = make("output", { "aria-live": "polite" }, "");
  const next = make("button", { type: "button", class: "teach-next" }, "Next ›", () => go(1));
  bar.append(previous, counter, next, make("button", { type: "button", class: "teach-leave" }, "Leave (Esc)", leave));
  bar.hidden = true;
  document.body.append(bar);
  const start = make("button", { type: "button", class: "teach-start" }, "Teach mode", () => (location.hash = "teach"));
  if (list().length) (top ?? document.querySelector("header"))?.append(start);

  addEventListener("keydown", (event) => {
    if (!current || event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape") return leave();
    // Sliders, fields and maps have a use for these keys themselves.
    if (event.target.closest("input:not([type=checkbox]), select, textarea, .words-tokens, .words-map, .heat")) return;
    const step = { ArrowRight: 1, PageDown: 1, ArrowLeft: -1, PageUp: -1, " ": event.shiftKey ? -1 : 1 }[event.key];
    if (!step || (event.key === " " && event.target.closest("button, a, summary, input"))) return;
    event.preventDefault();
    go(step);
  });
  let touched = null;
  addEventListener("touchstart", (event) => {
    const busy = event.target.closest("input, select, .plot, .scroll, .words-map");
    touched = current && !busy && event.touches.length === 1 ? event.touches[0] : null;
  }, { passive: true });
  addEventListener("touchend", (event) => {
    if (!touched) return;
    const [x, y] = [event.changedTouches[0].clientX - touched.clientX, event.changedTouches[0].clientY - touched.clientY];
    touched = null;
    if (Math.abs(x) > SWIPE && Math.abs(x) > 2 * Math.abs(y)) go(x < 0 ? 1 : -1);
  }, { passive: true });
  document.addEventListener("toggle", refresh, true); // which does not bubble
  new MutationObserver(refresh).observe(main, { subtree: true, attributeFilter: ["hidden"] });
  addEventListener("hashchange", show);
  addEventListener("resize", fit);
  new ResizeObserver(fit).observe(main);
  show();
})();

// What the user does: zoom, move, select, search, compare.

const runs = JSON.parse(document.getElementById("data").textContent).map(decode);
const choices = runs.flatMap((run) => run.traces.map((trace) => ({ run, trace })));
const by = (id) => document.getElementById(id);
const scroller = by("scroller"), tip = by("tip"), search = by("search");

// ---- which views ----

function fillChoices() {
  choices.forEach((choice, k) => {
    by("first").append(el("option", { value: k }, traceName(choice.run, choice.trace)));
    by("second").append(el("option", { value: k }, traceName(choice.run, choice.trace)));
  });
  by("second").prepend(el("option", { value: "" }, "nothing"));
  const other = choices.findIndex(({ run, trace }) => run !== choices[0].run || trace.kind !== choices[0].trace.kind);
  by("second").value = other >= 0 ? String(other) : "";
  if (choices.length < 2) by("second-label").hidden = by("first").parentElement.hidden = true;
}

function chooseViews() {
  const first = choices[by("first").value || 0], second = choices[by("second").value];
  S.views = [makeView(first.run, first.trace)];
  if (second && by("second").value !== "") {
    let view = makeView(second.run, second.trace);
    suggestLength(view.seconds / S.views[0].seconds);
    if (by("stretched").checked) view = makeView(second.run, second.trace, S.views[0].seconds / view.seconds);
    S.views.push(view);
  }
  for (const pick of [by("first"), by("second")]) pick.title = (pick.selectedOptions[0] || {}).text || ""; // long names are clipped
  document.body.classList.toggle("comparing", S.views.length > 1);
  by("title").textContent = S.views.length > 1 ? "Piper: two steps compared" : S.views[0].run.name;
  showPath(by("critical").checked);
  fillSummary();
  fillLegend();
  resize();
  select(null);
  fit();
  find();
}

/** Two steps of very different lengths are first shown at the same length: otherwise one is a dot. */
function suggestLength(ratio) {
  if (S.suggested) return;
  S.suggested = true;
  by("stretched").checked = ratio > 4 || ratio < 0.25;
}

function fillSummary() {
  const number = (name, value, title) => el("span", { title }, el("span", {}, `${name} `), el("b", {}, value));
  by("summary").replaceChildren(...S.views.map((view) => el("div", {},
    S.views.length > 1 ? el("span", { class: "name", title: view.name }, view.name) : null,
    number("step", seconds(view.seconds) + stretchText(view)), number("idle", percent(view.idle), "of the time of all devices, compute is idle"),
    number("exposed communication", exposedText(view), "part of the idle time: compute waits for a message that is in flight"),
    number("peak memory", bytes(view.peak), "of the fullest device"), number("devices", view.run.left_out ? `${view.devices.length} of ${view.devices.length + view.run.left_out}` : `${view.devices.length}`))));
}

/** Only kinds that are there; clicking one hides it. */
function fillLegend() {
  const used = new Set(S.views.flatMap((view) => view.devices.flatMap((one) => [...new Set(one.kind)])));
  const chips = KIND_IDS.map((id, k) => [id, k]).filter(([, k]) => used.has(k)).map(([id, k]) => {
    const chip = el("button", { "aria-pressed": String(!S.hidden.has(k)), "data-kind": id, title: "hide or show" }, el("i", { style: `background:${KINDS[id][1]}` }), KINDS[id][0]);
    chip.addEventListener("click", () => {
      if (!S.hidden.delete(k)) S.hidden.add(k);
      chip.setAttribute("aria-pressed", String(!S.hidden.has(k)));
      redraw();
    });
    return chip;
  });
  const wait = el("span", { class: "quiet", title: "striped in the colour of what is waited for" }, "striped: waiting");
  by("legend").replaceChildren(...chips, wait);
}

// ---- zoom and move ----

function limits() {
  const length = Math.max(...S.views.map((view) => view.length));
  return [-0.02 * length, 1.03 * length, length];
}

function setTime(t0, t1) {
  const [least, most, length] = limits();
  const span = Math.min(most - least, Math.max(length * 1e-7, t1 - t0));
  S.t0 = Math.max(least, Math.min(most - span, t0));
  S.t1 = S.t0 + span;
  redraw();
}

function zoom(factor, x = GUTTER + (S.width - GUTTER) / 2) {
  const t = timeAt(x);
  setTime(t - (t - S.t0) * factor, t + (S.t1 - t) * factor);
}

function move(share) {
  const step = share * (S.t1 - S.t0);
  setTime(S.t0 + step, S.t1 + step);
}

function fit() {
  const [least, most] = limits();
  setTime(least / 2, most);
}

function scrollTo(y) {
  scroller.scrollTop = y;
  S.scroll = scroller.scrollTop;
  redraw();
}

function resize() {
  const stage = by("stage");
  layOutFor(scroller.clientWidth, stage.clientHeight);
  if (scroller.clientWidth !== S.width) layOutFor(scroller.clientWidth, stage.clientHeight); // a scrollbar appeared
  scrollTo(scroller.scrollTop);
  draw();
}

function layOutFor(width, height) {
  const dense = window.devicePixelRatio || 1;
  S.width = Math.max(200, width);
  S.height = Math.max(80, height);
  canvas.width = Math.round(S.width * dense);
  canvas.height = Math.round(S.height * dense);
  canvas.style.width = `${S.width}px`;
  canvas.style.height = `${S.height}px`;
  layOut();
}

/** When a bar or a wait begins and ends; null for anything else. */
function timesOf({ one, b, gap }) {
  return b !== undefined ? [one.start[b], one.end[b]] : gap ? [gap.start, gap.end] : null;
}

/** Bring a bar or a wait into sight: move, and zoom in if it is too thin to see. */
function reveal(what) {
  const times = what && timesOf(what);
  if (!times) return;
  const { one, b } = what, span = S.t1 - S.t0, [start, end] = times, middle = (start + end) / 2;
  const thin = end > start && (end - start) / span * (S.width - GUTTER) < 3;
  const wide = thin ? (end - start) * 40 : Math.max(span, 1.5 * (end - start));
  if (thin || start < S.t0 || end > S.t1) setTime(middle - wide / 2, middle + wide / 2);
  const row = S.rowOf.get(one), lane = row && row.lanes[0];
  const box = b !== undefined ? locate(what.view, one, b) : lane && { y: yOf(lane.y), h: lane.h };
  if (box && (box.y < AXIS || box.y + box.h > S.height)) scrollTo(S.scroll + box.y - S.height / 3);
}

// ---- selecting ----

function select(what) {
  S.selected = what;
  S.partners = S.links = S.twin = null;
  if (what && what.b !== undefined) {
    const { view, one, b } = what;
    S.partners = partnersOf(view, one, b);
    S.twin = twinOf(what);
    const beside = ([, d, c]) => d !== one || d.laneOf[c] !== one.laneOf[b]; // adjacent bars need no arrow
    S.links = [...waitsOf(view, one, b).filter(beside).map((from) => [from, [view, one, b]]), ...waitersOf(view, one, b).filter(beside).map((to) => [[view, one, b], to])];
  }
  showPanel();
  panel.scrollTop = 0;
  redraw();
}

/** The same instruction in the other view. */
function twinOf({ view, one, b }) {
  const kind = one.kind[b];
  const alike = (S.partners || []).filter(([v, d, c]) => v !== view && d.kind[c] === kind);
  const [twin] = [...alike.filter(([, d]) => d.device === one.device), ...alike];
  return twin ? { view: twin[0], one: twin[1], b: twin[2] } : null;
}

/** A node of the graph was clicked: select its bar here, or on a device that has one. */
function chooseNode(view, one, node) {
  const bars = view.barsOf.get(node) || [], here = view.devices.indexOf(one);
  const [d, b] = bars.find(([k]) => k === here) || bars[0] || [-1, -1];
  if (d < 0) return;
  const what = { view, one: view.devices[d], b };
  select(what);
  reveal(what);
}

function stepAlong(by) {
  const what = S.selected;
  if (!what || what.b === undefined) {
    const view = S.views[0], one = view.devices[0];
    if (one && one.lanes[0].rows[0].n) { select({ view, one, b: one.lanes[0].rows[0].bars[0] }); reveal(S.selected); }
    return;
  }
  const row = what.one.lanes[what.one.laneOf[what.b]].rows[what.one.rowOf[what.b]];
  const k = row.bars.indexOf(what.b) + by;
  if (k >= 0 && k < row.n) { select({ ...what, b: row.bars[k] }); reveal(S.selected); }
}

// ---- searching ----

/** KEY=VALUE is compared with tags, PASS, KIND, DEVICE and STREAM; other words with all text. */
function matcher(text) {
  const words = text.trim().toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return null;
  return (view, one, b) => words.every((word) => {
    const at = one.at[b], node = one.plan.node[at], nodes = view.run.nodes;
    const pair = /^([a-z]+)=(.+)$/.exec(word);
    if (!pair) {
      const all = [one.plan.text[at], one.plan.kind[at], ...(node < 0 ? [] : [nodes.id[node], nodes.label[node], nodes.region[node], nodes.maker[node], nodes.source[node]])];
      return all.some((one) => one.toLowerCase().includes(word));
    }
    const [, key, value] = pair, own = { pass: node < 0 ? "" : nodes.phase[node], kind: KIND_IDS[one.kind[b]], device: String(one.device), stream: one.plan.stream[at] };
    let seen = own[key];
    if (seen === undefined && node >= 0) for (const [tag, index] of view.run.tags[node]) if (tag.toLowerCase() === key) seen = index;
    return seen !== undefined && seen !== "" && (value === "*" || seen.toLowerCase() === value);
  });
}

function find() {
  const fits = matcher(search.value);
  S.match = fits ? new Map() : null;
  S.found = [];
  S.foundAt = -1;
  if (fits) {
    for (const view of S.views) for (const one of view.devices) {
      const row = new Uint8Array(one.count);
      for (let b = 0; b < one.count; b++) if (fits(view, one, b)) { row[b] = 1; S.found.push({ view, one, b }); }
      S.match.set(one, row);
    }
    S.found.sort((x, y) => S.views.indexOf(x.view) - S.views.indexOf(y.view) || x.one.start[x.b] - y.one.start[y.b]);
  }
  by("found").textContent = fits ? `${S.found.length} found` : "";
  redraw();
}

function stepFound(by_) {
  if (!S.found || !S.found.length) return;
  S.foundAt = (S.foundAt + by_ + S.found.length) % S.found.length;
  by("found").textContent = `${S.foundAt + 1} of ${S.found.length}`;
  select(S.found[S.foundAt]);
  reveal(S.selected);
}

// ---- the mouse ----

let drag = null;

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const amount = event.deltaY * (event.deltaMode === 1 ? 16 : 1);
  if (event.offsetX < GUTTER) scrollTo(S.scroll + amount);
  else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || amount) / (S.width - GUTTER));
  else zoom(Math.exp(Math.max(-300, Math.min(300, amount)) * 0.0022), event.offsetX);
}, { passive: false });

canvas.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  drag = { x: event.offsetX, y: event.offsetY, t0: S.t0, t1: S.t1, scroll: S.scroll, moved: false, mark: event.shiftKey };
  canvas.setPointerCapture(event.pointerId);
});

canvas.addEventListener("pointermove", (event) => {
  if (!drag) { hover(event); return; }
  const dx = event.offsetX - drag.x, dy = event.offsetY - drag.y;
  if (Math.abs(dx) + Math.abs(dy) > 4) drag.moved = true;
  if (!drag.moved) return;
  tip.hidden = true;
  if (drag.mark) { S.mark = [drag.x, event.offsetX]; redraw(); return; }
  const shift = dx / (S.width - GUTTER) * (drag.t1 - drag.t0);
  setTime(drag.t0 - shift, drag.t1 - shift);
  scrollTo(drag.scroll - dy);
});

canvas.addEventListener("pointerup", (event) => {
  if (!drag) return;
  const was = drag;
  drag = null;
  if (S.mark) {
    const times = S.mark.map(timeAt).sort((a, b) => a - b);
    S.mark = null;
    setTime(...times);
  } else if (!was.moved) click(event);
});

canvas.addEventListener("pointerleave", () => { S.hover = null; tip.hidden = true; redraw(); });
canvas.addEventListener("dblclick", fit);

function click(event) {
  canvas.focus({ preventScroll: true });
  const what = pick(event.offsetX, event.offsetY);
  if (what && what.b === undefined && !what.gap && what.memory === undefined) what.memory = what.one.memory.n ? what.one.memory.time[what.one.memory.worst] : 0;
  select(what);
}

function hover(event) {
  const what = pick(event.offsetX, event.offsetY);
  S.hover = what && what.b !== undefined ? what : null;
  const lines = what ? tipLines(what) : null;
  tip.hidden = !lines;
  if (lines) {
    tip.replaceChildren(...lines);
    const left = Math.min(event.offsetX + 14, S.width - tip.offsetWidth - 6);
    const below = event.offsetY + 18;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${below + tip.offsetHeight > S.height ? event.offsetY - tip.offsetHeight - 10 : below}px`;
  }
  redraw();
}

function tipLines({ view, one, b, gap, memory }) {
  const small = (text) => el("small", {}, el("br"), text);
  if (b !== undefined) {
    const at = one.at[b], node = one.plan.node[at], took = (one.end[b] - one.start[b]) / view.stretch;
    const message = one.plan.stream[at] !== COMPUTE;
    const share = message ? `, ${percent(covered(one.lanes[0].rows[0], one.start[b], one.end[b]) / (one.end[b] - one.start[b]))} behind compute` : "";
    const size = message && node >= 0 && view.run.nodes.bytes[node] ? `, ${bytes(view.run.nodes.bytes[node])}` : "";
    return [el("b", {}, longLabel(view, one, b)), small(`${KINDS[KIND_IDS[one.kind[b]]][0]}, ${seconds(took)}${size}${share}`)];
  }
  if (gap) return [el("b", {}, `idle for ${seconds((gap.end - gap.start) / view.stretch)}`), small(gap.cause >= 0 ? `waits for: ${nameOf(view, one, gap.cause)}` : idleText(gap))];
  if (memory === undefined) return null;
  const held = memoryAt(one.memory, memory).filter(([, size]) => size > 0);
  return [el("b", {}, bytes(held.reduce((sum, [, size]) => sum + size, 0))), ...held.map(([kind, size]) => small(`${kind} ${bytes(size)}`))];
}

// ---- keys and controls ----

const KEYS = {
  "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: fit, ArrowLeft: () => move(-0.12), ArrowRight: () => move(0.12),
  ArrowUp: () => scrollTo(S.scroll - 60), ArrowDown: () => scrollTo(S.scroll + 60), PageUp: () => scrollTo(S.scroll - S.height * 0.8), PageDown: () => scrollTo(S.scroll + S.height * 0.8),
  ".": () => stepAlong(1), ",": () => stepAlong(-1), f: zoomToSelected, c: togglePath,
  b: () => stepLost(false, 1), B: () => stepLost(false, -1), x: () => stepLost(true, 1), X: () => stepLost(true, -1), "/": () => search.focus(), "?": () => by("keys").showModal(), Escape: () => select(null),
};

function zoomToSelected() {
  const times = S.selected && timesOf(S.selected);
  if (!times) return;
  const wide = (times[1] - times[0]) * 3;
  setTime(times[0] - wide, times[1] + wide);
}

function togglePath() {
  by("critical").checked = !by("critical").checked;
  changePath();
}

function changePath() {
  showPath(by("critical").checked);
  showPanel();
  redraw();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || by("keys").open) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape" && event.target === search) { search.value = ""; find(); canvas.focus(); }
    return;
  }
  if (event.target.closest("#panel") && !["Escape", "/", "?"].includes(event.key)) return;
  if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); }
});

search.addEventListener("input", find);
search.addEventListener("keydown", (event) => { if (event.key === "Enter" && event.shiftKey) { event.preventDefault(); stepFound(-1); } });
by("search-form").addEventListener("submit", (event) => { event.preventDefault(); stepFound(1); });
by("previous").addEventListener("click", () => stepFound(-1));
by("in").addEventListener("click", () => zoom(0.6));
by("out").addEventListener("click", () => zoom(1 / 0.6));
by("fit").addEventListener("click", fit);
by("help").addEventListener("click", () => by("keys").showModal());
by("first").addEventListener("change", chooseViews);
by("second").addEventListener("change", chooseViews);
by("stretched").addEventListener("change", chooseViews);
by("critical").addEventListener("change", changePath);
for (const name of ["paired", "messages", "memory"]) {
  by(name).addEventListener("change", (event) => { S[name] = event.target.checked; resize(); });
}
scroller.addEventListener("scroll", () => { S.scroll = scroller.scrollTop; redraw(); });
window.addEventListener("resize", resize);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); fillLegend(); redraw(); });

readTheme();
if (choices.length) {
  fillChoices();
  chooseViews();
} else {
  panel.append(el("p", {}, "There is nothing to show: no trace was given."));
}
window.piper = { S, choices, draw, locate, select, pick, zoom, setTime, fit }; // for tests and debugging

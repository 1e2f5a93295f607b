// The panel beside the timeline: what is selected, or the step as a whole.

const MESSAGES = new Set(["send", "recv", "exchange", "reduce-scatter", "all-reduce", "gather", "all-to-all", "all-gather", "shift", "shift-back", "store", "fetch", "loss_norm"]);
const SHOWN = 25; // rows of the table of differences
const panel = document.getElementById("panel");

/** An element with children; text is never read as HTML. */
function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "click") element.addEventListener("click", value);
    else if (value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function showPanel() {
  panel.replaceChildren();
  const what = S.selected;
  if (!what) showStep();
  else if (what.b !== undefined) showBar(what);
  else if (what.gap) showGap(what);
  else showMemory(what);
}

function facts(rows) {
  const shown = rows.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return el("table", { class: "facts" }, ...shown.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, value))));
}

function swatch(kind) {
  return el("i", { style: `background:${KINDS[KIND_IDS[kind]][1]}` });
}

// ---- the step ----

function showStep() {
  const table = differences();
  if (table && S.views[1]) panel.append(table);
  for (const view of S.views) {
    panel.append(el("h2", {}, view.name), el("table", { class: "numbers" },
      el("tr", {}, ...["device", "busy", "exposed communication", "peak memory"].map((t) => el("th", {}, t))),
      ...view.devices.map((one) => el("tr", { class: "go", click: () => select({ view, one, memory: one.memory.n ? one.memory.time[one.memory.worst] : 0 }) },
        el("td", {}, `${one.device}`), el("td", {}, percent(one.busy / view.length)),
        el("td", {}, exposedText({ idle: 1 - one.busy / view.length, exposed: one.exposed / view.length })), el("td", {}, bytes(one.source.peak.total))))));
    if (S.path) panel.append(pathTable(view, S.steps[S.views.indexOf(view)]));
    panel.append(kindTable(view));
    const shares = Object.values(view.run.streams || {});
    if (view.run.machine) panel.append(el("p", { class: "quiet machine" }, `${view.trace.kind === "measured" ? "measured on" : "simulated with"} ${view.run.machine}`));
    for (const note of view.run.notes || []) panel.append(el("p", { class: "quiet note" }, note));
    if (shares.length) panel.append(el("p", { class: "quiet" }, `streams: ${shares.join(", ")}`));
    if (view.run.left_out) panel.append(el("p", { class: "quiet" }, `not shown: ${amount(view.run.left_out, "device")} with the same work as these`));
  }
  if (S.memory) panel.append(el("h3", {}, "memory"), el("p", {}, ...Object.entries(MEMORY).map(([kind, fill]) => el("span", { class: "dot" }, el("i", { style: `background:${fill}` }), ` ${kind}  `))));
  panel.append(el("p", { class: "quiet" }, "Click a bar to see where it comes from and what it waits for. Press ? for the keys."));
  if (table && !S.views[1]) panel.append(table);
}

/** Where the time of a device goes, and how long compute waits for messages. */
function kindTable(view) {
  const count = view.devices.length, many = Math.max(1, count) * view.stretch, rows = view.kinds.map((row, k) => [k, row]).filter(([, row]) => row.count);
  return el("div", {}, el("h3", {}, count > 1 ? `time of a device, mean of ${count}` : "time of a device"), el("table", { class: "numbers" },
    el("tr", {}, ...["", "takes", "behind compute", "exposed"].map((t) => el("th", {}, t))),
    ...rows.map(([k, row]) => el("tr", {}, el("td", {}, el("span", { class: "dot" }, swatch(k), ` ${KINDS[KIND_IDS[k]][0]}`)), el("td", {}, row.time ? row.time / many < 5e-8 ? "under 0.1 us" : seconds(row.time / many) : "not known"),
      el("td", {}, MESSAGES.has(KIND_IDS[k]) ? row.time ? percent(row.hidden / row.time) : "" : ""), el("td", {}, row.exposed ? seconds(row.exposed / many) : "")))));
}

/** What the critical path consists of. */
function pathTable(view, path) {
  const { shares, hosts } = pathShares(view, path);
  const row = (name, time) => el("tr", {}, el("td", {}, name), el("td", {}, seconds(time / view.stretch)), el("td", {}, percent(time / view.length)));
  const rows = shares.map(([k, time]) => row(el("span", { class: "dot" }, swatch(k), ` ${KINDS[KIND_IDS[k]][0]}`), time));
  const some = hosts > 1e-6 * view.length;
  if (some) rows.push(row("hosts", hosts));
  return el("div", { id: "path" }, el("h3", {}, "critical path"), el("table", { class: "numbers" }, el("tr", {}, ...["", "takes", "of the step"].map((t) => el("th", {}, t))), ...rows),
    some ? el("p", { class: "quiet" }, "hosts: nothing on the path runs, until a host starts the next work") : null);
}

/** Mean seconds of every node and kind in a view. */
function means(view) {
  const found = new Map();
  view.devices.forEach((one) => {
    for (let b = 0; b < one.count; b++) {
      const node = one.plan.node[one.at[b]];
      if (node < 0) continue;
      const key = `${KIND_IDS[one.kind[b]]} ${view.run.nodes.id[node]}`;
      const row = found.get(key) || { sum: 0, n: 0, node, kind: one.kind[b], bar: [view, one, b] };
      row.sum += (one.end[b] - one.start[b]) / view.stretch;
      row.n += 1;
      found.set(key, row);
    }
  });
  return found;
}

function expectations(view) {
  const nodes = view.run.nodes;
  return (row) => nodes.expected[row.node] || null;
}

/** Compare two views, or a measured view with the prediction: the worst ratio first. */
function comparison() {
  const [first, second] = S.views;
  if (!second && first.trace.kind !== "measured") return null;
  const seen = means(second || first), base = second ? means(first) : null, expect = expectations(first);
  const rows = [];
  for (const [key, row] of seen) {
    const other = base ? base.get(key) : null, before = base ? other && other.sum / other.n : expect(row);
    if (!before) continue;
    const after = row.sum / row.n, message = MESSAGES.has(KIND_IDS[row.kind]);
    if (message && !S.withMessages) continue;
    rows.push({ key: longLabel(...row.bar), before, after, ratio: after / before, more: (after - before) * row.n, bar: row.bar, kind: row.kind });
  }
  return { rows, names: second ? [first.name, second.name] : ["expected", "measured"] };
}

function differences() {
  const found = comparison();
  if (!found) return null;
  const order = S.byTime ? "more" : "ratio", all = found.rows.length;
  found.rows = found.rows.filter((row) => Math.abs(row.ratio - 1) > 0.005);
  found.rows.sort((a, b) => b[order] - a[order]);
  const box = el("div", { id: "differences" }, el("h3", {}, `${S.views[1] ? "differences" : "measured against expected"}`));
  if (S.views[1]) box.append(totalsTable(found.names));
  if (found.rows.length < all) box.append(el("p", { class: "quiet" }, `equally long in both: ${all - found.rows.length} of ${amount(all, "node")}`));
  box.append(differenceButtons(found.rows.length > 1));
  if (found.rows.length) box.append(el("table", { class: "numbers" }, el("tr", {}, ...["node", S.views[1] ? "A" : "expected", S.views[1] ? "B" : "measured", "ratio"].map((t) => el("th", {}, t))),
    ...found.rows.slice(0, SHOWN).map((row) => el("tr", { class: "go", click: () => { select({ view: row.bar[0], one: row.bar[1], b: row.bar[2] }); reveal(S.selected); } },
      el("td", {}, row.key), el("td", {}, seconds(row.before)), el("td", {}, seconds(row.after)), el("td", {}, `${row.ratio.toFixed(2)}x`)))));
  if (found.rows.length > SHOWN) box.append(el("p", { class: "quiet" }, `and ${found.rows.length - SHOWN} more`));
  return box;
}

/** What the table of differences contains, and its order if there is something to order. */
function differenceButtons(ordered) {
  const button = (text, pressed, change, title) => el("button", { click: () => { change(); showPanel(); }, "aria-pressed": String(Boolean(pressed)), title }, text);
  const order = ["worst first, by ", button("ratio", !S.byTime, () => { S.byTime = false; }), " ", button("time", S.byTime, () => { S.byTime = true; }), "; "];
  const messages = button("messages", S.withMessages, () => { S.withMessages = !S.withMessages; }, "measured messages last from when they were posted");
  return el("p", { class: "quiet" }, ...(ordered ? order : []), "include ", messages);
}

function totalsTable(names) {
  const [a, b] = S.views;
  const rows = [
    ["step", seconds(a.seconds), seconds(b.seconds), `${(b.seconds / a.seconds).toFixed(2)}x`],
    ["idle", percent(a.idle), percent(b.idle), ""],
    ["exposed communication", exposedText(a), exposedText(b), ""],
    ["peak memory", bytes(a.peak), bytes(b.peak), a.peak ? `${(b.peak / a.peak).toFixed(2)}x` : ""],
  ];
  return el("div", {}, el("p", {}, "A: ", names[0], el("br"), "B: ", names[1]),
    el("table", { class: "numbers", id: "totals" }, el("tr", {}, ...["", "A", "B", "B / A"].map((t) => el("th", {}, t))),
      ...rows.map((row) => el("tr", {}, ...row.map((text) => el("td", {}, text))))));
}

// ---- one bar ----

function showBar({ view, one, b }) {
  const at = one.at[b], node = one.plan.node[at], nodes = view.run.nodes, kind = one.kind[b];
  const took = (one.end[b] - one.start[b]) / view.stretch, start = one.start[b] / view.stretch;
  const has = node >= 0, expected = has ? nodes.expected[node] : 0, flops = has ? nodes.flops[node] : 0;
  const message = one.plan.stream[at] !== COMPUTE;
  const hidden = covered(one.lanes[0].rows[0], one.start[b], one.end[b]) / (one.end[b] - one.start[b]);
  const measured = view.trace.kind === "measured";
  panel.append(el("h2", {}, longLabel(view, one, b)));
  panel.append(facts([
    ["does", el("span", {}, el("span", { class: "chip" }, swatch(kind), ` ${KINDS[KIND_IDS[kind]][0]}`), `device ${one.device}, stream ${streamLabel(view.run, one.plan.stream[at])}`)],
    ["tags", has && nodes.tags[node] ? el("span", {}, ...nodes.tags[node].split(" ").map((t) => el("span", { class: "chip" }, t))) : ""],
    [message ? "for region" : "region", has ? nodes.region[node] : ""],
    ["source", has && nodes.source[node] ? el("code", {}, nodes.source[node]) : ""],
    ["recomputes", has && nodes.recomputes ? nodes.recomputes[node] : ""],
    ["made by", has ? nodes.maker[node] : ""],
    ["ordered by", has ? makersAt(view.run, node) : ""],
    [message ? "moves" : "writes", has && nodes.bytes[node] ? bytes(nodes.bytes[node]) : ""],
    [measured ? "measured" : "takes", ratioText(took, measured ? expected : 0)],
    ["expected", expected && (measured || Math.abs(took / expected - 1) > 0.005) ? seconds(expected) : ""],
    ["from, to", `${seconds(start)} \u2013 ${seconds(start + took)}${one.late[b] ? " at the latest (the exact end is unknown)" : ""}`],
    ["behind compute", message ? percent(hidden) : ""],
    ["arithmetic", flops ? `${scaled(flops, "FLOP")}, ${scaled(flops / took, "FLOP/s")}` : ""],
    ["in the other view", otherText(view, one, b, took)],
  ]));
  panel.append(el("h3", {}, `instruction ${at}`), el("pre", {}, one.plan.text[at].replace(/\s+/g, " ")));
  linkList("waits for", waitsOf(view, one, b), true);
  linkList("awaited by", waitersOf(view, one, b), false);
  if (message) otherEnds(view, one, b);
  else linkList("the same on other devices", partnersOf(view, one, b).filter(([v]) => v === view), false);
  if (has) {
    const here = new Set(one.plan.node.filter((k) => k >= 0));
    panel.append(el("h3", {}, `the DAG around it, on device ${one.device}`), drawGraph(view.run, node, here, (k) => chooseNode(view, one, k)));
    panel.append(el("p", { class: "quiet" }, "solid: data; dashed: order in time"));
  }
}

/** The same message on the other devices that take part in it. */
function otherEnds(view, one, b) {
  const ends = everywhere(view, one, one.at[b]).slice(1).filter(([d, k]) => d.barOf[k] >= 0);
  linkList(ends.length > 1 ? "its other ends" : "its other end", ends.map(([d, k]) => [view, d, d.barOf[k]]), false);
}

/** The directives that ordered this node. */
function makersAt(run, node) {
  const both = [...(run.orderAfter.get(node) || []), ...(run.orderBefore.get(node) || [])];
  return [...new Set(both.map((k) => run.orders.maker[k]))].join(", ");
}

function ratioText(took, expected) {
  return expected ? `${seconds(took)} (${(took / expected).toFixed(2)}x of expected)` : seconds(took);
}

function otherText(view, one, b, took) {
  const twin = S.twin;
  if (!twin) return S.views.length > 1 ? "not there" : "";
  const other = (twin.one.end[twin.b] - twin.one.start[twin.b]) / twin.view.stretch;
  return el("button", { class: "link", click: () => { select(twin); reveal(twin); } }, `${seconds(other)} in ${twin.view.name} (${(other / took).toFixed(2)}x)`);
}

function waitersOf(view, one, b) {
  if (!one.waiters) {
    one.waiters = new Map();
    one.plan.waits.forEach((waits, at) => waits.forEach((k) => put(one.waiters, k, at)));
  }
  const found = (one.waiters.get(one.at[b]) || []).map((k) => one.barOf[k]).filter((k) => k >= 0 && one.kind[k] !== KIND_OF.other).map((k) => [view, one, k]);
  const row = one.lanes[0].rows[0];
  if (streamOf(one, b) === COMPUTE) {
    found.push(...nextTo(view, one, row, row.bars.indexOf(b), 1));
  }
  return found;
}

/** The next work on a lane in one direction, without loads and frees. */
function nextTo(view, one, row, k, by) {
  if (k < 0) return [];
  for (k += by; k >= 0 && k < row.n; k += by) if (one.kind[row.bars[k]] !== KIND_OF.other) return [[view, one, row.bars[k]]];
  return [];
}

/** Bars of the same node: on other devices, and in the other view. */
function partnersOf(view, one, b) {
  const node = one.plan.node[one.at[b]];
  if (node < 0) return [];
  const found = [];
  for (const other of S.views) {
    const same = other === view ? node : other.run.nodeOf.get(view.run.nodes.id[node]);
    for (const [d, c] of other.barsOf.get(same) || []) {
      const there = other.devices[d];
      if (there !== one || c !== b) found.push([other, there, c]);
    }
  }
  return found;
}

function linkList(title, bars, mark) {
  if (!bars.length) return;
  const latest = Math.max(...bars.map(([, one, b]) => one.end[b]));
  panel.append(el("h3", {}, title));
  for (const [view, one, b] of bars.slice(0, 12)) panel.append(link(view, one, b, mark && bars.length > 1 && one.end[b] === latest));
  if (bars.length > 12) panel.append(el("p", { class: "quiet" }, `and ${bars.length - 12} more`));
}

function link(view, one, b, last) {
  const where = S.selected && S.selected.one !== one ? ` on device ${one.device}` : "";
  return el("button", { class: last ? "link last" : "link", title: one.plan.text[one.at[b]], click: () => { const what = { view, one, b }; select(what); reveal(what); } },
    swatch(one.kind[b]), el("span", { class: "what" }, `${longLabel(view, one, b)}${where}`),
    el("span", { class: "when" }, `ends ${seconds(one.end[b] / view.stretch)}`));
}

// ---- waits and memory ----

function showGap({ view, one, gap }) {
  panel.append(el("h2", {}, `device ${one.device} is idle`));
  panel.append(facts([["for", seconds((gap.end - gap.start) / view.stretch)], ["from, to", `${seconds(gap.start / view.stretch)} \u2013 ${seconds(gap.end / view.stretch)}`]]));
  const causes = causesOfGap(view, one, gap);
  if (causes.length) showCauses(view, one, gap, causes);
  else panel.append(el("p", {}, gap.cause >= 0 ? `waits for: ${nameOf(view, one, gap.cause)}` : idleText(gap)));
}

/** Why a device is idle that waits for nothing. */
function idleText(gap) {
  if (gap.over) return "it has done its work of this step";
  return "nothing that it waits for is running: its host has not started the next work yet";
}

/** Each of these waited for the next. The last was still running when the wait began, or nothing was. */
function showCauses(view, one, gap, causes) {
  panel.append(el("h3", {}, "why it is late"));
  for (const [d, b] of causes) panel.append(link(view, d, b, false));
  const [d, b] = causes[causes.length - 1], name = longLabel(view, d, b), where = d === one ? "" : ` on device ${d.device}`;
  const late = d.start[b] - gap.start, others = causes.length > 1 ? " Each of the others waited for the one below it." : "";
  const began = late > 1e-9 * view.length ? `${name} began${where} ${seconds(late / view.stretch)} after the wait.` : `When the wait began, ${name} was still running${where}.`;
  panel.append(el("p", { class: "quiet", id: "why" }, began + others));
}

function showMemory({ view, one, memory }) {
  const { source } = one, total = source.peak.total, held = Object.entries(source.peak.held).filter(([, size]) => size > 0);
  panel.append(el("h2", {}, `memory of device ${one.device}`));
  panel.append(el("h3", {}, `at the peak: ${bytes(total)}`), el("div", { class: "meter" }, ...held.map(([kind, size]) => el("i", { style: `width:${100 * size / total}%;background:${MEMORY[kind] || "#999"}`, title: kind }))));
  panel.append(memoryTable(held));
  panel.append(el("h3", {}, `instruction ${source.peak.at}`), el("pre", {}, (one.plan.text[source.peak.at] || "").replace(/\s+/g, " ")));
  const b = one.barOf[source.peak.at];
  if (b >= 0) panel.append(link(view, one, b, false));
  if (source.peak.largest.length) {
    panel.append(el("h3", {}, "the largest temporary buffers"), el("table", { class: "numbers" }, ...source.peak.largest.map(([name, kind, size]) =>
      el("tr", {}, el("td", {}, name, " ", el("span", { class: "quiet" }, kind)), el("td", {}, bytes(size))))));
  }
  panel.append(el("h3", {}, `at ${seconds(memory / view.stretch)}`), memoryTable(memoryAt(one.memory, memory).filter(([, size]) => size > 0)));
}

function memoryTable(rows) {
  const sum = rows.reduce((total, [, size]) => total + size, 0);
  return el("table", { class: "numbers" }, ...rows.map(([kind, size]) => el("tr", {}, el("td", {}, el("span", { class: "chip", style: `background:${MEMORY[kind] || "#999"};color:${inkOn(MEMORY[kind] || "#999999")}` }, kind)), el("td", {}, bytes(size)))),
    el("tr", {}, el("td", {}, "all"), el("td", {}, bytes(sum))));
}

// The data of the page, prepared for drawing. A "run" is a strategy with its traces, a "view" one trace of it.

const KIND_IDS = Object.keys(KINDS);
const KIND_OF = Object.fromEntries(KIND_IDS.map((id, k) => [id, k]));
const COMPUTE = "compute", TOTALS = "loss_norm", UPDATE = "update";
const MOST_ROWS = 3; // of one stream, for messages that are in flight at once

function kindIndex(kind) {
  return kind in KIND_OF ? KIND_OF[kind] : KIND_OF.other;
}

/** Put words back in place of their codes, and find the neighbours of every node. */
function decode(run) {
  const words = run.words, coded = new Set(run.coded);
  const plain = (columns) => {
    for (const name of Object.keys(columns)) {
      if (coded.has(name)) columns[name] = columns[name].map((k) => words[k]);
    }
    return columns;
  };
  plain(run.nodes);
  plain(run.orders);
  run.devices.forEach((one) => plain(one.instructions));
  run.nodes.label = run.nodes.label || run.nodes.id.map((id, k) => (run.nodes.kind[k] === TOTALS ? KINDS[TOTALS][0] : id)); // a run of an older version
  run.count = run.nodes.id.length;
  run.nodeOf = new Map(run.nodes.id.map((id, k) => [id, k]));
  run.after = run.nodes.id.map(() => []);
  run.nodes.data.forEach((before, k) => before.forEach((p) => run.after[p].push(k)));
  run.orderAfter = new Map();
  run.orderBefore = new Map();
  run.orders.before.forEach((group, k) => group.forEach((n) => put(run.orderAfter, n, k)));
  run.orders.after.forEach((group, k) => group.forEach((n) => put(run.orderBefore, n, k)));
  run.parts = partsOfPasses(run.nodes);
  run.tags = run.nodes.tags.map((text) => new Map(text.split(" ").filter(Boolean).map((p) => p.split("="))));
  return run;
}

/** The nodes of passes that have several: of those, each bar has a name of its own. */
function partsOfPasses(nodes) {
  const passes = new Map();
  nodes.phase.forEach((phase, k) => { if (phase) put(passes, [nodes.stage[k], phase, nodes.microbatch[k]].join(), k); });
  return new Set([...passes.values()].filter((parts) => parts.length > 1).flat());
}

/** A stream, with its SMs and priority if the strategy sets them. */
function streamLabel(run, stream) { return (run.streams && run.streams[stream]) || stream; }

function put(map, key, value) {
  if (map.has(key)) map.get(key).push(value); else map.set(key, [value]);
}

/** Temporal neighbours of a node: [node, directive or pass]. */
function ordered(run, node, forward) {
  const found = new Map();
  for (const k of (forward ? run.orderAfter : run.orderBefore).get(node) || []) {
    for (const other of (forward ? run.orders.after : run.orders.before)[k]) found.set(other, run.orders.maker[k]);
  }
  return [...found];
}

/** The name of a trace: "train: simulated", "train: step 3". */
function traceName(run, trace) {
  const own = trace.name && trace.name !== run.name ? `: ${trace.name}` : "";
  const step = trace.kind === "measured" && !/step/.test(own) ? `, step ${trace.step}` : "";
  return `${run.name}${own}${step}`;
}

/** One trace of one run. `stretch` scales its time, for comparison with another view. */
function makeView(run, trace, stretch = 1) {
  let origin = Infinity, last = -Infinity;
  for (const rows of Object.values(trace.devices)) {
    for (const t of rows.issued) origin = Math.min(origin, t);
    for (const t of rows.end) last = Math.max(last, t);
  }
  if (!(last > origin)) [origin, last] = [0, 1];
  const view = { run, trace, stretch, origin, seconds: last - origin, length: (last - origin) * stretch };
  view.name = traceName(run, trace);
  view.devices = run.devices.filter((one) => trace.devices[one.device]).map((one) => makeDevice(view, one));
  view.deviceOf = new Map(view.devices.map((one) => [one.device, one]));
  view.barsOf = new Map();
  view.devices.forEach((one, d) => {
    for (let b = 0; b < one.count; b++) {
      const node = one.plan.node[one.at[b]];
      if (node >= 0) put(view.barsOf, node, [d, b]);
    }
  });
  view.devices.forEach((one) => {
    one.exposedBy = exposedOf(view, one);
    one.exposed = one.exposedBy.reduce((sum, time) => sum + time, 0);
  });
  const total = (name) => view.devices.reduce((sum, one) => sum + one[name], 0);
  const width = view.length * Math.max(1, view.devices.length);
  view.idle = 1 - total("busy") / width;
  view.exposed = total("exposed") / width;
  view.kinds = byKind(view);
  view.peak = Math.max(0, ...view.devices.map((one) => one.source.peak.total));
  return view;
}

/** For each kind: bars, time and hidden time of messages, and how long compute waits for it. */
function byKind(view) {
  const found = KIND_IDS.map(() => ({ count: 0, time: 0, hidden: 0, exposed: 0 }));
  for (const one of view.devices) {
    for (let b = 0; b < one.count; b++) {
      const row = found[one.kind[b]];
      row.count += 1;
      row.time += one.end[b] - one.start[b];
      if (one.laneOf[b]) row.hidden += covered(one.lanes[0].rows[0], one.start[b], one.end[b]);
    }
    one.exposedBy.forEach((time, kind) => { found[kind].exposed += time; });
  }
  return found;
}

function unknown(n) { return new Float64Array(n).fill(NaN); }

function makeDevice(view, source) {
  const plan = source.instructions, rows = view.trace.devices[source.device], n = plan.kind.length;
  const time = (t) => (t - view.origin) * view.stretch;
  const one = { device: source.device, source, plan, barOf: new Int32Array(n).fill(-1), issued: unknown(n), begin: unknown(n), finish: unknown(n) };
  const shown = [];
  rows.at.forEach((at, k) => {
    one.issued[at] = time(rows.issued[k]);
    one.begin[at] = time(rows.start[k]);
    one.finish[at] = time(rows.end[k]);
    if (rows.end[k] > rows.start[k] || plan.kind[at] === UPDATE) shown.push(k); // an update that nobody measured is a mark
  });
  shown.sort((a, b) => rows.start[a] - rows.start[b] || rows.at[a] - rows.at[b]);
  one.count = shown.length;
  one.at = Int32Array.from(shown, (k) => rows.at[k]);
  one.start = Float64Array.from(shown, (k) => time(rows.start[k]));
  one.end = Float64Array.from(shown, (k) => time(rows.end[k]));
  one.late = Uint8Array.from(shown, (k) => (rows.late ? rows.late[k] : 0));
  one.kind = Uint8Array.from(one.at, (at) => kindIndex(plan.kind[at]));
  one.at.forEach((at, b) => { one.barOf[at] = b; });
  one.shade = shades(view.run, one);
  one.lanes = makeLanes(one);
  const compute = one.lanes[0].rows[0];
  one.gaps = findGaps(view, one, compute);
  one.busy = compute.sum[compute.n];
  one.memory = memoryOf(view, one);
  return one;
}

/** Stages that share a device take turns in two shades. */
function shades(run, one) {
  const stages = new Map();
  const found = new Uint8Array(one.count);
  one.several = false;
  for (let b = 0; b < one.count; b++) {
    const node = one.plan.node[one.at[b]];
    if (node < 0 || !run.nodes.phase[node]) continue;
    const first = run.nodes.stage[node];
    if (!stages.has(first)) stages.set(first, stages.size);
    found[b] = stages.get(first) % 2;
  }
  one.several = stages.size > 1;
  return found;
}

function streamOf(one, b) { return one.plan.stream[one.at[b]]; }

/** Compute first, then the streams in order of appearance. Overlapping bars get rows of their own. */
function makeLanes(one) {
  const streams = new Map([[COMPUTE, []]]);
  for (let b = 0; b < one.count; b++) put(streams, streamOf(one, b), b);
  one.laneOf = new Uint8Array(one.count);
  one.rowOf = new Uint8Array(one.count);
  const order = [...streams].sort(([a], [b]) => (b === COMPUTE) - (a === COMPUTE) || (a < b ? -1 : 1));
  return order.map(([stream, bars], lane) => {
    const most = stream === COMPUTE ? 1 : MOST_ROWS, ends = [], rows = [];
    for (const b of bars) {
      let r = ends.findIndex((end) => end <= one.start[b] + 1e-12);
      if (r < 0) r = ends.length < most ? ends.length : ends.indexOf(Math.min(...ends));
      if (!rows[r]) rows[r] = [];
      rows[r].push(b);
      one.laneOf[b] = lane;
      one.rowOf[b] = r;
      ends[r] = Math.max(ends[r] || 0, one.end[b]);
    }
    return { stream, rows: (rows.length ? rows : [[]]).map((row) => makeRow(one, row)) };
  });
}

function makeRow(one, bars) {
  const n = bars.length;
  const row = { n, bars: Int32Array.from(bars), start: new Float64Array(n), end: new Float64Array(n), until: new Float64Array(n), sum: new Float64Array(n + 1) };
  for (let k = 0; k < n; k++) {
    row.start[k] = one.start[bars[k]];
    row.end[k] = one.end[bars[k]];
    row.until[k] = Math.max(k ? row.until[k - 1] : 0, row.end[k]);
    row.sum[k + 1] = row.sum[k] + row.end[k] - row.start[k];
  }
  return row;
}

/** The first k with values[k] > t, in a sorted array. */
function firstAbove(values, t) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > t) high = middle; else low = middle + 1;
  }
  return low;
}

/** Where compute is idle, and the instruction that it waits for: -1 if its host has not started the next work, or there is none. */
function findGaps(view, one, row) {
  const gaps = [], least = view.length * 1e-6, many = one.plan.kind.length;
  const add = (start, end, cause, over) => { if (end - start > least) gaps.push({ start, end, cause, over }); };
  let before = 0, from = 0;
  for (let k = 0; k <= row.n; k++) {
    const over = k === row.n, start = over ? view.length : row.start[k], at = over ? many : one.at[row.bars[k]];
    const cause = over ? lastAwaited(one) : latestWait(one, from, at);
    const until = cause < 0 ? before : Math.max(before, Math.min(start, Number.isNaN(one.finish[cause]) ? start : one.finish[cause]));
    add(before, until, cause, false);
    add(until, start, -1, over);
    before = Math.max(before, over ? before : row.end[k]);
    from = at + 1;
  }
  return gaps;
}

/** Of all that compute instructions wait for, what ends last. */
function latestWait(one, from, to) {
  let cause = -1, latest = -Infinity;
  for (let at = from; at <= to; at++) {
    if (one.plan.stream[at] !== COMPUTE) continue;
    for (const wait of one.plan.waits[at]) {
      const end = one.barOf[wait] >= 0 ? one.finish[wait] : -1;
      if (end > latest) { latest = end; cause = wait; }
    }
  }
  return cause;
}

/** The message that ends last of those that a device does not only send. */
function lastAwaited(one) {
  let last = -1;
  for (let b = 0; b < one.count; b++) if (isAwaited(one, b) && (last < 0 || one.end[b] > one.end[last])) last = b;
  return last < 0 ? -1 : one.at[last];
}

/** How much of a time span is covered by sorted, disjoint intervals. */
function covered(row, start, end) {
  let sum = 0;
  for (let k = firstAbove(row.end, start); k < row.n && row.start[k] < end; k++) {
    sum += Math.min(end, row.end[k]) - Math.max(start, row.start[k]);
  }
  return sum;
}

/** Bytes over time. A message allocates when it is posted, a computation when it ends. */
function memoryOf(view, one) {
  const { at, ...held } = one.source.memory, fixed = one.source.lasting, n = at.length + 1;
  const there = new Set([...Object.keys(fixed).filter((kind) => fixed[kind]), ...Object.keys(held)]);
  const kinds = [...new Set([...Object.keys(MEMORY), ...there])].filter((kind) => there.has(kind));
  const when = new Float64Array(one.plan.kind.length);
  let last = 0;
  for (let k = 0; k < when.length; k++) {
    const bar = one.barOf[k], compute = one.plan.stream[k] === COMPUTE;
    const now = bar >= 0 && compute ? one.start[bar] : one.issued[k];
    last = when[k] = Math.max(last, Number.isNaN(now) ? last : now);
    if (bar >= 0 && compute) last = Math.max(last, one.end[bar]);
  }
  const time = Float64Array.from([0, ...at.map((k) => when[k])]); // before the first, only what lasts
  const levels = kinds.map(() => new Float64Array(n));
  for (let k = 0; k < n; k++) {
    let sum = 0;
    kinds.forEach((kind, j) => { sum += kind in fixed ? fixed[kind] : k ? held[kind][k - 1] : 0; levels[j][k] = sum; });
  }
  const total = levels.length ? levels[levels.length - 1] : new Float64Array(n);
  let worst = 0;
  for (let k = 1; k < n; k++) if (total[k] > total[worst]) worst = k;
  return { n, time, kinds, levels, total, worst, most: n ? total[worst] : 0 };
}

function memoryAt(memory, t) {
  const k = Math.max(0, firstAbove(memory.time, t) - 1);
  return memory.n ? memory.kinds.map((kind, j) => [kind, memory.levels[j][k] - (j ? memory.levels[j - 1][k] : 0)]) : [];
}

// ---- words ----

function amount(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

function seconds(t) {
  const s = Math.abs(t);
  if (s === 0) return "0";
  if (s >= 100) return `${t.toFixed(0)} s`;
  if (s >= 0.9995) return `${t.toFixed(2)} s`;
  if (s >= 0.9995e-3) return `${(t * 1e3).toFixed(s >= 0.1 ? 0 : s >= 0.01 ? 1 : 2)} ms`;
  return `${(t * 1e6).toFixed(s >= 1e-4 ? 0 : 1)} \u00b5s`;
}

function bytes(size) {
  let unit = 0;
  while (size >= 1000 && unit < 4) { size /= 1024; unit++; }
  return `${unit ? size.toFixed(1) : size.toFixed(0)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

/** Arithmetic with a prefix that leaves up to three digits: 8.39 MFLOP. */
function scaled(amount, unit) {
  const prefixes = ["", "k", "M", "G", "T", "P", "E"];
  let k = 0;
  while (amount >= 999.5 && k < prefixes.length - 1) { amount /= 1000; k++; }
  return `${Number(amount.toPrecision(3))} ${prefixes[k]}${unit}`;
}

/** The note of a view that is not to scale. */
function stretchText({ stretch }) {
  if (Math.abs(stretch - 1) < 1e-9) return "";
  return stretch < 1 ? `, drawn ${(1 / stretch).toFixed(1)}x shorter` : `, drawn ${stretch.toFixed(1)}x longer`;
}

function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.01 ? 1 : 0)} %`;
}

/** Exposed communication, rounded as in `piper simulate`: with the bubble it adds up to what is idle. */
function exposedText({ idle, exposed }) {
  const whole = (share) => Math.round(100 * share) / 100, bubble = idle - exposed;
  return percent(Math.min(exposed, bubble) >= 0.01 ? whole(idle) - whole(bubble) : exposed);
}

/** F3, or 1F3 where a device has several stages; of a message, its kind. */
function shortLabel(view, one, b) {
  const at = one.at[b], node = one.plan.node[at], nodes = view.run.nodes;
  if (node < 0) return one.plan.kind[at];
  if (!nodes.phase[node]) return one.plan.kind[at] === "update" ? "U" : KINDS[KIND_IDS[one.kind[b]]][0];
  return `${one.several ? nodes.stage[node] : ""}${nodes.phase[node]}${nodes.microbatch[node]}`;
}

/** Whole passes look alike at every width. */
function isWholePass(view, one, b) {
  const node = one.plan.node[one.at[b]];
  return node >= 0 && !!view.run.nodes.phase[node] && !view.run.parts.has(node);
}

function longLabel(view, one, b) { return nameOf(view, one, one.at[b]); }

/** What an instruction is called everywhere on the page: both ends of a transfer are one node, named by its send. */
function nameOf(view, one, at) {
  const node = one.plan.node[at];
  if (node < 0) return one.plan.text[at].replace(/\s+/g, " ");
  const label = view.run.nodes.label[node];
  return one.plan.kind[at] === "recv" ? label.replace(/^send /, "receive ") : label;
}

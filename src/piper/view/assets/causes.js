// Why things happen when they happen: what a bar waited for, the critical path, and where time is lost.

const LONGEST = 20000; // bars of a path
const SHORT = 1e-3; // of the step
const MOST_CAUSES = 12; // shown for one wait

/** Bars that must end before this one begins. */
function waitsOf(view, one, b) {
  const at = one.at[b], found = one.plan.waits[at].map((k) => one.barOf[k]).filter((k) => k >= 0).map((k) => [view, one, k]);
  const row = one.lanes[one.laneOf[b]].rows[one.rowOf[b]], k = row.bars.indexOf(b);
  if (one.plan.stream[at] === COMPUTE) found.push(...nextTo(view, one, row, k, -1));
  return found;
}

/** What could delay an instruction: its waits, and what its host and its stream did before. With whether it had to end. */
function delaysOf(one, at) {
  const { stream, waits } = one.plan;
  const before = (name) => {
    let k = at - 1;
    while (k >= 0 && stream[k] !== name) k--;
    return k;
  };
  const names = stream[at] === COMPUTE ? [COMPUTE, TOTALS] : [COMPUTE, stream[at]]; // on a GPU, compute queues behind the all-reduce of loss and norm
  const others = names.map(before).filter((k) => k >= 0);
  for (let k = at - 1; k >= 0 && stream[k] !== COMPUTE; k--) others.push(...waits[k]); // the host may have waited to post them
  return [...others.map((k) => [k, false]), ...waits[at].map((k) => [k, true])];
}

/** An instruction, and for a message also its other ends: it starts when all of them are ready. */
function everywhere(view, one, at) {
  if (one.plan.stream[at] === COMPUTE) return [[one, at]];
  const { node, group = [] } = one.plan, meets = ([d, k]) => (d !== one || k !== at) && (d.plan.group || [])[k] === group[at];
  return [[one, at], ...instructionsOf(view, node[at]).filter(meets)];
}

/** The instructions of a node, on all devices. */
function instructionsOf(view, node) {
  if (!view.instructions) {
    view.instructions = new Map();
    for (const one of view.devices) one.plan.node.forEach((k, at) => { if (k >= 0) put(view.instructions, k, [one, at]); });
  }
  return (node >= 0 && view.instructions.get(node)) || [];
}

/** The bar that an instruction waited for last, on any device: compute rather than a message that ended with it. What takes no time is passed through. */
function lastBefore(view, one, at, limit, past) {
  let best = null, latest = -Infinity;
  const seen = new Set(), open = everywhere(view, one, at);
  const offer = (d, b, end) => {
    const later = end > latest || (end === latest && streamOf(d, b) === COMPUTE && streamOf(...best) !== COMPUTE);
    if (end > limit || !later || past.has(barKey(d, b))) return;
    best = [d, b];
    latest = end;
  };
  for (const [d, k] of open) { // grows
    for (const [before, ended] of delaysOf(d, k)) {
      const b = d.barOf[before], key = `${d.device}/${before}`;
      if (seen.has(key)) continue;
      seen.add(key);
      if (b >= 0 && d.end[b] > d.start[b]) offer(d, b, ended ? Math.min(limit, d.end[b]) : d.end[b]); // its end may have been noticed late
      else if (!(d.finish[before] < latest)) open.push(...everywhere(view, d, before));
    }
  }
  return best;
}

/** What decided when a bar began. */
function causeOfBar(view, one, b, past) {
  return lastBefore(view, one, one.at[b], sentAt(view, one, b) + 1e-9 * view.length, past);
}

/** When a bar really began. A measured message is posted before; it starts when all its ends are ready. */
function sentAt(view, one, b) {
  if (streamOf(one, b) === COMPUTE) return one.start[b];
  const ready = everywhere(view, one, one.at[b]).map(([d, k]) => Math.max(d.begin[k] || 0, ...d.plan.waits[k].map((wait) => d.finish[wait] || 0)));
  return Math.max(one.start[b], Math.min(one.end[b], Math.max(...ready)));
}

/** For each kind of message, how long compute waits for it: exposed communication, as `piper simulate` counts it. */
function exposedOf(view, one) {
  const found = new Float64Array(KIND_IDS.length);
  let free = 0;
  one.begin.forEach((begin, at) => {
    if (one.plan.stream[at] !== COMPUTE) return;
    if (begin > free) addExposed(view, lastBefore(view, one, at, begin + 1e-9 * view.length, new Set()), free, begin, found);
    free = Math.max(free, one.finish[at] || 0);
  });
  const last = lastAwaited(one), b = last < 0 ? -1 : one.barOf[last];
  if (b >= 0) addExposed(view, [one, b], free, one.end[b], found);
  return found;
}

function isAwaited(one, b) { return streamOf(one, b) !== COMPUTE && one.plan.kind[one.at[b]] !== "send"; }

/** How long messages are in flight from `begin` to `end`: from what was waited for back to the last computation. */
function addExposed(view, last, begin, end, found) {
  const past = new Set();
  while (last && end > begin) {
    const [d, b] = last;
    if (streamOf(d, b) === COMPUTE) return;
    const start = sentAt(view, d, b);
    found[d.kind[b]] += Math.max(0, Math.min(end, d.end[b]) - Math.max(begin, start));
    end = Math.min(end, start);
    past.add(barKey(d, b));
    last = causeOfBar(view, d, b, past);
  }
}

function barKey(one, b) { return `${one.device}/${b}`; }

/** From the end of the step back to its beginning, with the part of each bar that is on the path: shortening any of these parts shortens the step. */
function criticalPath(view) {
  let last = null, until = view.length;
  for (const one of view.devices) for (let b = 0; b < one.count; b++) if (!last || one.end[b] > last[0].end[last[1]]) last = [one, b];
  const past = new Set(), path = [];
  while (last && path.length < LONGEST) {
    const [one, b] = last, to = Math.min(until, one.end[b]);
    until = Math.min(to, sentAt(view, one, b));
    path.push([one, b, until, to]);
    past.add(barKey(one, b));
    last = causeOfBar(view, one, b, past);
  }
  return path.reverse();
}

/** How much of the step each kind of work on the path takes, and how much of it hosts take to start the next work. */
function pathShares(view, path) {
  const shares = new Map();
  let time = 0, hosts = 0;
  for (const [one, b, from, to] of path) {
    hosts += from - time;
    shares.set(one.kind[b], (shares.get(one.kind[b]) || 0) + to - from);
    time = to;
  }
  return { shares: [...shares].filter(([, own]) => own > 0).sort((x, y) => y[1] - x[1]), hosts: hosts + view.length - time };
}

function showPath(on) {
  S.path = null;
  S.steps = [];
  if (on) {
    S.path = new Map();
    S.steps = S.views.map((view) => criticalPath(view));
    for (const [one, b, from, to] of S.steps.flat()) {
      if (!S.path.has(one)) S.path.set(one, new Map());
      S.path.get(one).set(b, [from, to]);
    }
  }
}

/** Why compute had to wait: from what it waited for back to what was running when the wait began. */
function causesOfGap(view, one, gap) {
  const found = [], seen = new Set();
  let b = gap.cause >= 0 ? one.barOf[gap.cause] : -1, next = b >= 0 ? [one, b] : null;
  while (next && found.length < MOST_CAUSES) {
    found.push(next);
    seen.add(barKey(...next));
    const [d, c] = next;
    if (d.plan.stream[d.at[c]] === COMPUTE && d.start[c] <= gap.start + 1e-12) break;
    next = causeOfBar(view, d, c, seen);
  }
  return found;
}

/** Where compute is idle, in order of time: every wait, or only those for a message. Very short ones are left out. */
function lostTime(messages) {
  const found = [];
  for (const view of S.views) for (const one of view.devices) for (const gap of one.gaps) {
    if (gap.end - gap.start < SHORT * view.length) continue;
    const b = gap.cause >= 0 ? one.barOf[gap.cause] : -1;
    if (!messages) found.push({ at: gap.start, what: { view, one, gap } });
    else if (b >= 0 && one.plan.stream[gap.cause] !== COMPUTE) found.push({ at: gap.start, what: { view, one, b, gap } });
  }
  return found.sort((x, y) => S.views.indexOf(x.what.view) - S.views.indexOf(y.what.view) || x.at - y.at || x.what.one.device - y.what.one.device);
}

/** Go to the next bubble or exposed message, from the one that is selected. */
function stepLost(messages, by) {
  const all = lostTime(messages);
  if (!all.length) return;
  const now = S.lost && S.lost.messages === messages && S.selected === S.lost.what ? S.lost.at : by > 0 ? -1 : 0;
  const at = (now + by + all.length) % all.length, { view, one, b, gap } = all[at].what;
  const what = b === undefined ? { view, one, gap } : { view, one, b };
  S.lost = { messages, at, what };
  select(what);
  reveal(what);
}

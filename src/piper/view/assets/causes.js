// Why things happen when they happen: what a bar waited for, the critical path, and where time is lost.

const LONGEST = 20000; // bars of a path
const SHORT = 1e-3; // of the step
const MOST_CAUSES = 12; // shown for one wait

/** Bars that must end before this one begins. */
function waitsOf(view, one, b) {
  const at = one.at[b], found = one.plan.waits[at].map((k) => one.barOf[k]).filter((k) => k >= 0).map((k) => [view, one, k]);
  const row = one.lanes[one.laneOf[b]].rows[one.rowOf[b]], k = row.bars.indexOf(b);
  if (one.plan.stream[at] === COMPUTE) found.push(...nextTo(view, one, row, k, -1));
  if (one.plan.kind[at] === "recv") found.push(...partnersOf(view, one, b).filter(([v, d, c]) => v === view && d.plan.kind[d.at[c]] === "send"));
  return found;
}

/** Bars that could delay an instruction: what it waits for, and what its stream and its host did before. */
function barsBefore(view, one, at, seen) {
  const { stream, waits } = one.plan, found = [];
  const follow = (k) => {
    if (k < 0 || seen.has(`${one.device}/${k}`)) return;
    seen.add(`${one.device}/${k}`);
    if (one.barOf[k] >= 0) found.push([one, one.barOf[k]]);
    else found.push(...everywhere(view, one, k).flatMap(([d, there]) => barsBefore(view, d, there, seen))); // takes no time
  };
  const before = (name) => {
    let k = at - 1;
    while (k >= 0 && stream[k] !== name) k--;
    return k;
  };
  [...waits[at], before(COMPUTE), before(stream[at])].forEach(follow);
  return found;
}

/** An instruction, and for a message also its other ends: it starts when all of them are ready. */
function everywhere(view, one, at) {
  if (one.plan.stream[at] === COMPUTE) return [[one, at]];
  return [[one, at], ...instructionsOf(view, one.plan.node[at]).filter(([d, k]) => d !== one || k !== at)];
}

/** The instructions of a node, on all devices. */
function instructionsOf(view, node) {
  if (!view.instructions) {
    view.instructions = new Map();
    for (const one of view.devices) one.plan.node.forEach((k, at) => { if (k >= 0) put(view.instructions, k, [one, at]); });
  }
  return (node >= 0 && view.instructions.get(node)) || [];
}

/** What decided when a bar began: the last that ended before. A measured message begins when it is posted, so its end counts. */
function causeOfBar(view, one, b, seen) {
  const limit = view.trace.kind === "measured" ? one.end[b] : one.start[b] + 1e-9 * view.length;
  let best = null;
  for (const [d, c] of everywhere(view, one, one.at[b]).flatMap(([d, k]) => barsBefore(view, d, k, new Set()))) {
    if (seen.has(barKey(d, c)) || d.end[c] > limit) continue;
    if (!best || d.end[c] > best[0].end[best[1]]) best = [d, c];
  }
  return best;
}

function barKey(one, b) { return `${one.device}/${b}`; }

/** From the end of the step back to its beginning: shortening any of these bars shortens the step. */
function criticalPath(view) {
  let last = null;
  for (const one of view.devices) for (let b = 0; b < one.count; b++) if (!last || one.end[b] > last[0].end[last[1]]) last = [one, b];
  const seen = new Set(), path = [];
  while (last && path.length < LONGEST) {
    path.push(last);
    seen.add(barKey(...last));
    last = causeOfBar(view, ...last, seen);
  }
  return path.reverse();
}

/** How much of the step each kind of work on the path takes, and how much of it nothing does. */
function pathShares(view, path) {
  const shares = new Map();
  let time = 0, nothing = 0;
  for (const [one, b] of path) {
    nothing += Math.max(0, one.start[b] - time);
    const own = Math.max(0, one.end[b] - Math.max(time, one.start[b]));
    shares.set(one.kind[b], (shares.get(one.kind[b]) || 0) + own);
    time = Math.max(time, one.end[b]);
  }
  return { shares: [...shares].filter(([, own]) => own > 0).sort((x, y) => y[1] - x[1]), nothing };
}

function showPath(on) {
  S.path = null;
  S.steps = [];
  if (on) {
    S.path = new Map();
    S.steps = S.views.map((view) => criticalPath(view));
    S.steps.forEach((path) => path.forEach(([one, b]) => {
      if (!S.path.has(one)) S.path.set(one, new Uint8Array(one.count));
      S.path.get(one)[b] = 1;
    }));
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
    else if (b >= 0 && one.plan.stream[gap.cause] !== COMPUTE && covered(one.messages, gap.start, gap.end) > 0) found.push({ at: gap.start, what: { view, one, b, gap } });
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

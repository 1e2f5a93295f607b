// The timeline: where everything is on the canvas, and what is under the mouse.

const AXIS = 26, NARROW = 104, BROAD = 240;
let GUTTER = NARROW; // as wide as the names need
const S = { // what is shown now
  views: [], t0: 0, t1: 1, scroll: 0, width: 0, height: 0, rows: [], tall: 0,
  selected: null, hover: null, path: null, steps: [], lost: null, hidden: new Set(), match: null, mark: null, frame: 0,
  paired: false, messages: true, memory: true, theme: {}, fills: [], hatches: new Map(),
};
const canvas = document.getElementById("canvas"), ctx = canvas.getContext("2d");

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ground", "band", "line", "text", "quiet", "accent", "idle", "mark"]) {
    S.theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
  S.fills = KIND_IDS.map((id) => [KINDS[id][1], mixed(KINDS[id][1], "#000000", 0.16)]);
  S.pixels = S.fills.map((pair) => pair.map(pixel));
  S.inks = new Map(S.fills.flat().map((fill) => [fill, inkOn(fill)]));
  S.hatches.clear();
}

/** A colour as one number, the way an image holds it. */
function pixel(hex) {
  const [r, g, b] = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
  return (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
}

function mixed(a, b, share) {
  const part = (hex, k) => parseInt(hex.slice(1 + 2 * k, 3 + 2 * k), 16);
  const both = [0, 1, 2].map((k) => Math.round(part(a, k) * (1 - share) + part(b, k) * share));
  return `#${both.map((x) => x.toString(16).padStart(2, "0")).join("")}`;
}

function inkOn(hex) {
  const [r, g, b] = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16) / 255);
  return 0.299 * r + 0.587 * g + 0.114 * b > 0.52 ? "#10151c" : "#ffffff";
}

/** Stripes in the colour of what is waited for. */
function hatch(colour) {
  if (!S.hatches.has(colour)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    pen.strokeStyle = colour;
    pen.lineWidth = 1.6;
    pen.globalAlpha = 0.75;
    for (const x of [-8, 0, 8]) { pen.beginPath(); pen.moveTo(x, 8); pen.lineTo(x + 8, 0); pen.stroke(); }
    S.hatches.set(colour, ctx.createPattern(tile, "repeat"));
  }
  return S.hatches.get(colour);
}

// ---- where things are ----

/** The width of the names on the left. */
function fitGutter() {
  ctx.font = "600 12px system-ui, sans-serif";
  const names = S.views.flatMap((view) => view.devices.map((one) => ctx.measureText(`device ${one.device} A`).width + 16));
  ctx.font = "10px system-ui, sans-serif";
  const streams = new Set(S.views.flatMap((view) => view.devices.flatMap((one) => one.lanes.map((lane) => streamLabel(view.run, lane.stream)))));
  GUTTER = Math.min(BROAD, Math.ceil(Math.max(NARROW, ...names, ...[...streams].map((name) => ctx.measureText(name).width + 20))));
}

/** Every device of every view from top to bottom, in a scale that fits if it can. */
function layOut() {
  fitGutter();
  const items = [];
  const header = (view) => ({ view, head: true });
  const of = (view) => view.devices.map((one) => ({ view, one }));
  if (S.paired && S.views.length > 1) {
    const names = [...new Set(S.views.flatMap((view) => view.devices.map((one) => one.device)))].sort((a, b) => a - b);
    for (const name of names) for (const view of S.views) if (view.deviceOf.has(name)) items.push({ view, one: view.deviceOf.get(name) });
  } else {
    for (const view of S.views) items.push(...(S.views.length > 1 ? [header(view)] : []), ...of(view));
  }
  const natural = items.reduce((sum, item) => sum + heightOf(item, 1), 0);
  const scale = Math.max(0.52, Math.min(1.9, (S.height - AXIS - 8) / Math.max(1, natural)));
  let y = 4, odd = 0;
  S.rows = items.map((item) => {
    const row = { ...item, y, lanes: [], h: heightOf(item, scale), odd: item.head ? (odd = 0) : ++odd % 2 };
    if (!item.head) placeLanes(row, scale);
    y += row.h;
    return row;
  });
  S.rowOf = new Map(S.rows.filter((row) => row.one).map((row) => [row.one, row]));
  S.tall = y + 4;
  document.getElementById("tall").style.height = `${S.tall + AXIS}px`;
}

function sizes(scale) {
  return { compute: Math.round(Math.min(34, 24 * scale)), message: Math.round(Math.max(6, Math.min(16, 10 * scale))), memory: Math.round(Math.min(54, 30 * scale)), space: Math.round(Math.min(14, 9 * scale)) };
}

function shownLanes(one) {
  return S.messages ? one.lanes : one.lanes.slice(0, 1);
}

function heightOf(item, scale) {
  if (item.head) return 24;
  const size = sizes(scale);
  const messages = shownLanes(item.one).slice(1).reduce((sum, lane) => sum + lane.rows.length * (size.message + 1) + 1, 0);
  return size.compute + 2 + messages + (S.memory ? size.memory + 2 : 0) + size.space;
}

function placeLanes(row, scale) {
  const size = sizes(scale);
  let y = row.y;
  for (const lane of shownLanes(row.one)) {
    const h = lane.stream === COMPUTE ? size.compute : size.message;
    const place = { lane, y, h, rows: [] };
    for (const one of lane.rows) { place.rows.push({ row: one, y, h }); y += h + 1; }
    place.bottom = y;
    y += 1;
    row.lanes.push(place);
  }
  if (S.memory) row.memory = { y: y + 1, h: size.memory };
}

function xOf(t) { return GUTTER + (t - S.t0) / (S.t1 - S.t0) * (S.width - GUTTER); }
function timeAt(x) { return S.t0 + (x - GUTTER) / (S.width - GUTTER) * (S.t1 - S.t0); }
function yOf(y) { return y + AXIS - S.scroll; }

/** Where a bar, or a part of it, is on the canvas now, seen or not. */
function locate(view, one, b, from = one.start[b], to = one.end[b]) {
  const row = S.rowOf.get(one), place = row && row.lanes[one.laneOf[b]];
  if (!place) return null;
  const part = place.rows[one.rowOf[b]], x = xOf(from);
  return { x, y: yOf(part.y), w: xOf(to) - x, h: part.h };
}

/** What is under a point: a bar, a wait, memory, or a device. */
function pick(x, y) {
  const inside = y - AXIS + S.scroll, t = timeAt(x), slack = 2 * (S.t1 - S.t0) / (S.width - GUTTER);
  if (y < AXIS) return null;
  const row = S.rows.find((r) => inside >= r.y && inside < r.y + r.h);
  if (!row || row.head) return null;
  const { view, one } = row;
  if (x < GUTTER) return { view, one };
  if (row.memory && inside >= row.memory.y && inside < row.memory.y + row.memory.h) return { view, one, memory: t };
  for (const place of row.lanes) {
    for (const part of place.rows) {
      if (inside < part.y || inside > part.y + part.h) continue;
      const b = barAt(one, part.row, t, slack);
      if (b >= 0) return { view, one, b };
    }
  }
  const lane = row.lanes[0];
  if (lane && inside >= lane.y && inside <= lane.y + lane.h) {
    const gap = one.gaps.find((g) => g.start <= t && t < g.end);
    if (gap) return { view, one, gap };
  }
  return null;
}

function barAt(one, row, t, slack) {
  let best = -1, distance = Infinity;
  for (let k = firstAbove(row.until, t - slack); k < row.n && row.start[k] <= t + slack; k++) {
    if (S.hidden.has(one.kind[row.bars[k]])) continue;
    const off = Math.max(0, row.start[k] - t, t - row.end[k]);
    if (off < distance) { best = row.bars[k]; distance = off; }
  }
  return best;
}

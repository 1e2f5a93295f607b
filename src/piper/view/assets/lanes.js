// The timeline: where everything goes on the canvas, and drawing what can be seen of it.

const GUTTER = 104, AXIS = 26;
const S = { // what is shown now
  views: [], t0: 0, t1: 1, scroll: 0, width: 0, height: 0, rows: [], tall: 0,
  selected: null, hover: null, hidden: new Set(), match: null, mark: null, frame: 0,
  paired: false, messages: true, memory: true, theme: {}, fills: [], hatches: new Map(),
};
const canvas = document.getElementById("canvas"), ctx = canvas.getContext("2d");

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ground", "band", "line", "text", "quiet", "accent", "idle", "mark"]) {
    S.theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
  S.fills = KIND_IDS.map((id) => [KINDS[id][1], mixed(KINDS[id][1], "#000000", 0.16)]);
  S.hatches.clear();
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

/** Every device of every view from top to bottom, in a scale that fits if it can. */
function layOut() {
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
  const scale = Math.max(0.6, Math.min(1.9, (S.height - AXIS - 8) / Math.max(1, natural)));
  let y = 4;
  S.rows = items.map((item) => {
    const row = { ...item, y, lanes: [], h: heightOf(item, scale) };
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

/** Where a bar is on the canvas now, seen or not. */
function locate(view, one, b) {
  const row = S.rowOf.get(one), place = row && row.lanes[one.laneOf[b]];
  if (!place) return null;
  const part = place.rows[one.rowOf[b]], x = xOf(one.start[b]);
  return { x, y: yOf(part.y), w: xOf(one.end[b]) - x, h: part.h };
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

// ---- drawing ----

function redraw() {
  if (!S.frame) S.frame = requestAnimationFrame(() => { S.frame = 0; draw(); });
}

function draw() {
  const began = performance.now();
  const scale = canvas.width / S.width;
  ctx.setTransform(scale, 0, 0, scale, 0, 0);
  ctx.fillStyle = S.theme.ground;
  ctx.fillRect(0, 0, S.width, S.height);
  ctx.textBaseline = "middle";
  const ticks = tickTimes();
  let odd = 0;
  for (const row of S.rows) {
    odd = row.head ? 0 : odd + 1;
    if (yOf(row.y + row.h) < AXIS || yOf(row.y) > S.height) continue;
    if (row.head) drawHead(row); else drawDevice(row, odd % 2, ticks);
  }
  drawLinks();
  drawAxis(ticks);
  if (S.mark) drawMark();
  S.took = performance.now() - began;
}

function drawHead(row) {
  ctx.fillStyle = S.theme.text;
  ctx.font = "600 12px system-ui, sans-serif";
  ctx.textAlign = "left";
  ctx.fillText(`${row.view.name}   ${seconds(row.view.seconds)}`, 8, yOf(row.y) + 14);
}

function drawDevice(row, odd, ticks) {
  const { one } = row, top = yOf(row.y), right = S.width;
  if (odd) {
    ctx.fillStyle = S.theme.band;
    ctx.fillRect(0, top - 3, right, row.h);
  }
  ctx.save();
  ctx.beginPath();
  ctx.rect(GUTTER, Math.max(AXIS, top - 3), right - GUTTER, row.h);
  ctx.clip();
  ctx.fillStyle = S.theme.line;
  for (const t of ticks.times) ctx.fillRect(Math.round(xOf(t)), top - 3, 1, row.h);
  drawIdle(row);
  drawUnder(row);
  for (const place of row.lanes) for (const part of place.rows) drawBars(row, place, part);
  if (row.memory) drawMemory(row);
  outline(row);
  ctx.restore();
  drawNames(row);
}

/** Where compute stands still: striped in the colour of what it waits for. */
function drawIdle(row) {
  const { one, view } = row, lane = row.lanes[0], y = yOf(lane.y);
  ctx.fillStyle = S.theme.idle;
  const from = Math.max(GUTTER, xOf(0));
  ctx.fillRect(from, y, Math.min(S.width, xOf(view.length)) - from, lane.h);
  const gaps = one.gaps;
  for (let k = 0; k < gaps.length; k++) {
    const gap = gaps[k];
    if (gap.end < S.t0 || gap.start > S.t1 || gap.cause < 0) continue;
    const x = Math.max(GUTTER, xOf(gap.start)), w = Math.min(S.width, xOf(gap.end)) - x;
    if (w < 3) continue;
    ctx.fillStyle = hatch(S.fills[kindIndex(one.plan.kind[gap.cause])][0]);
    ctx.fillRect(x, y + 1, w, lane.h - 2);
  }
}

/** The time of the message that is pointed at or selected, through all lanes of its device. */
function drawUnder(row) {
  for (const what of [S.hover, S.selected]) {
    if (!what || what.one !== row.one || what.view !== row.view || what.b === undefined) continue;
    if (row.one.plan.stream[row.one.at[what.b]] === COMPUTE) continue;
    const x = xOf(row.one.start[what.b]);
    ctx.fillStyle = S.theme.accent;
    ctx.globalAlpha = 0.13;
    ctx.fillRect(x, yOf(row.y) - 3, xOf(row.one.end[what.b]) - x, row.h);
    ctx.globalAlpha = 1;
  }
}

/** Bars that can be seen; those of less than a pixel are drawn together, as full as they are. */
function drawBars(row, place, part) {
  const { one, view } = row, { start, end, bars, n, until } = part.row;
  const y = yOf(part.y), h = part.h, scale = (S.width - GUTTER) / (S.t1 - S.t0);
  const match = S.match && S.match.get(one);
  let column = -1, full = 0, widest = 0, fill = "", faint = true;
  const flush = () => {
    if (column < 0) return;
    ctx.globalAlpha = (faint ? 0.15 : 1) * Math.max(0.55, Math.min(1, full));
    ctx.fillStyle = fill;
    ctx.fillRect(column, y, 1, h);
    ctx.globalAlpha = 1;
    column = -1;
    full = widest = 0;
    faint = true;
  };
  ctx.font = `${h >= 18 ? 11 : 9}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  for (let k = firstAbove(until, S.t0); k < n && start[k] < S.t1; k++) {
    const b = bars[k];
    if (S.hidden.has(one.kind[b])) continue;
    const x = GUTTER + (start[k] - S.t0) * scale, w = (end[k] - start[k]) * scale;
    const pale = match ? !match[b] : false;
    if (w < 1) {
      if ((x | 0) !== column) { flush(); column = x | 0; }
      full += w;
      if (w > widest || (faint && !pale)) { widest = w; fill = S.fills[one.kind[b]][one.shade[b]]; }
      faint = faint && pale;
      continue;
    }
    flush();
    drawBar(view, one, b, x, y, w, h, pale);
  }
  flush();
}

function drawBar(view, one, b, x, y, w, h, pale) {
  const fill = S.fills[one.kind[b]][one.shade[b]];
  const left = Math.max(GUTTER - 4, x), right = Math.min(S.width + 4, x + w), wide = right - left;
  ctx.globalAlpha = pale ? 0.18 : 1;
  ctx.fillStyle = fill;
  ctx.fillRect(left, y, wide > 3 ? wide - 1 : wide, h);
  if (h >= 10 && wide > 15 && !pale) {
    const room = wide / (h >= 18 ? 6.6 : 5.6), short = shortLabel(view, one, b);
    const long = room > 16 ? longLabel(view, one, b) : short; // one way of writing for most zooms
    const text = long.length < room ? long : short.length < room ? short : "";
    ctx.fillStyle = inkOn(fill);
    if (text) ctx.fillText(text, left + wide / 2, y + h / 2 + 0.5);
  }
  ctx.globalAlpha = 1;
}

/** Stacked by kind, from what lasts to what comes and goes; the worst moment is marked. */
function drawMemory(row) {
  const memory = row.one.memory, { y, h } = row.memory, top = yOf(y);
  if (!memory.n || !memory.most) return;
  const most = Math.max(...S.views.map((view) => view.peak), memory.most);
  const scale = (h - 2) / most, kinds = memory.kinds;
  const first = Math.max(0, firstAbove(memory.time, S.t0) - 1);
  const left = Math.max(GUTTER, xOf(memory.time[first]));
  for (let j = kinds.length - 1; j >= 0; j--) {
    const level = memory.levels[j];
    ctx.fillStyle = MEMORY[kinds[j]] || "#999999";
    ctx.beginPath();
    let column = -1e9, high = 0;
    ctx.moveTo(left, top + h);
    for (let k = first; k < memory.n && memory.time[k] <= S.t1; k++) {
      const x = Math.max(GUTTER, xOf(memory.time[k]));
      const next = Math.min(S.width, k + 1 < memory.n ? xOf(memory.time[k + 1]) : xOf(row.view.length));
      if (next - column < 1) { high = Math.max(high, level[k]); continue; } // thinner than a pixel
      const size = Math.max(high, level[k]);
      ctx.lineTo(x, top + h - size * scale);
      ctx.lineTo(next, top + h - size * scale);
      column = next;
      high = 0;
    }
    ctx.lineTo(Math.min(S.width, xOf(row.view.length)), top + h);
    ctx.fill();
  }
  drawPeak(row, memory, top, h, scale);
}

function drawPeak(row, memory, top, h, scale) {
  const x = xOf(memory.time[memory.worst]), y = top + h - memory.most * scale;
  if (x < GUTTER - 4 || x > S.width) return;
  ctx.strokeStyle = ctx.fillStyle = S.theme.mark;
  ctx.lineWidth = 1;
  ctx.beginPath();
  ctx.moveTo(x, top + h);
  ctx.lineTo(x, y);
  ctx.stroke();
  ctx.beginPath();
  ctx.arc(x, y, 2.6, 0, 7);
  ctx.fill();
  if (h < 16) return;
  const text = bytes(memory.most), right = x + 90 > S.width;
  ctx.font = "600 10px system-ui, sans-serif";
  ctx.textAlign = right ? "right" : "left";
  const wide = ctx.measureText(text).width + 6, left = right ? x - wide - 4 : x + 4;
  ctx.globalAlpha = 0.82;
  ctx.fillStyle = S.theme.ground;
  ctx.fillRect(left, top + 1, wide, 13);
  ctx.globalAlpha = 1;
  ctx.fillStyle = S.theme.mark;
  ctx.fillText(text, right ? x - 7 : x + 7, top + 8);
}

/** Frames around what is selected, its partners, what is pointed at, and what hides a message. */
function outline(row) {
  const frame = (b, colour, width) => {
    const box = locate(row.view, row.one, b);
    if (!box) return;
    ctx.strokeStyle = colour;
    ctx.lineWidth = width;
    ctx.strokeRect(box.x - 0.5, box.y - 0.5, Math.max(2, box.w), box.h + 1);
  };
  const mine = (what) => what && what.one === row.one && what.b !== undefined;
  for (const [view, one, b] of S.partners || []) if (one === row.one && view === row.view) frame(b, S.theme.accent, 1.5);
  for (const what of [S.hover, S.selected]) {
    if (!mine(what) || row.one.plan.stream[row.one.at[what.b]] === COMPUTE) continue;
    const compute = row.one.lanes[0].rows[0], until = row.one.end[what.b];
    const first = firstAbove(compute.end, row.one.start[what.b]);
    for (let k = first; k < compute.n && compute.start[k] < until && k < first + 200; k++) frame(compute.bars[k], S.theme.text, 1);
  }
  if (mine(S.hover)) frame(S.hover.b, S.theme.text, 1.5);
  if (mine(S.selected)) frame(S.selected.b, S.theme.mark, 2.5);
}

/** From what the selected bar waits for, and to what waits for it. */
function drawLinks() {
  if (!S.links) return;
  ctx.save();
  ctx.beginPath();
  ctx.rect(GUTTER, AXIS, S.width - GUTTER, S.height - AXIS);
  ctx.clip();
  ctx.strokeStyle = ctx.fillStyle = S.theme.mark;
  ctx.lineWidth = 1.2;
  for (const [from, to] of S.links.slice(0, 60)) {
    const a = locate(...from), b = locate(...to);
    if (!a || !b) continue;
    const x1 = a.x + a.w, y1 = a.y + a.h / 2, x2 = b.x, y2 = b.y + b.h / 2;
    const bend = Math.max(14, Math.abs(x2 - x1) / 3);
    ctx.beginPath();
    ctx.moveTo(x1, y1);
    ctx.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x2 + 1, y2);
    ctx.lineTo(x2 - 6, y2 - 3.5);
    ctx.lineTo(x2 - 6, y2 + 3.5);
    ctx.fill();
  }
  ctx.restore();
}

function drawNames(row) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(0, AXIS, GUTTER, S.height - AXIS);
  ctx.clip();
  const first = row.lanes[0];
  ctx.textAlign = "left";
  ctx.fillStyle = S.theme.text;
  ctx.font = "600 12px system-ui, sans-serif";
  const which = S.paired && S.views.length > 1 ? ` ${"AB"[S.views.indexOf(row.view)]}` : "";
  ctx.fillText(`device ${row.one.device}${which}`, 8, yOf(first.y) + first.h / 2);
  ctx.fillStyle = S.theme.quiet;
  ctx.font = "10px system-ui, sans-serif";
  ctx.textAlign = "right";
  for (const place of row.lanes.slice(1)) ctx.fillText(place.lane.stream.slice(0, 14), GUTTER - 8, (yOf(place.y) + yOf(place.bottom)) / 2 - 0.5);
  if (row.memory) ctx.fillText("memory", GUTTER - 8, yOf(row.memory.y) + row.memory.h / 2);
  ctx.restore();
}

// ---- the axis ----

function tickTimes() {
  const span = S.t1 - S.t0, wanted = Math.max(2, (S.width - GUTTER) / 110);
  const rough = span / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
  const times = [];
  for (let k = Math.ceil(S.t0 / step); k * step <= S.t1 && times.length < 200; k++) times.push(k * step);
  return { step, times };
}

function drawAxis(ticks) {
  ctx.fillStyle = S.theme.ground;
  ctx.fillRect(0, 0, S.width, AXIS);
  ctx.fillStyle = S.theme.line;
  ctx.fillRect(0, AXIS - 1, S.width, 1);
  ctx.font = "11px system-ui, sans-serif";
  ctx.textAlign = "left";
  const [unit, size] = ticks.step >= 0.5 ? ["s", 1] : ticks.step >= 5e-4 ? ["ms", 1e3] : ["\u00b5s", 1e6];
  const digits = Math.max(0, -Math.floor(Math.log10(ticks.step * size * 1.0001)));
  for (const t of ticks.times) {
    const x = xOf(t);
    if (x > S.width - 30) continue;
    ctx.fillStyle = S.theme.line;
    ctx.fillRect(Math.round(x), AXIS - 7, 1, 7);
    ctx.fillStyle = S.theme.quiet;
    ctx.fillText(`${(t * size).toFixed(digits)} ${unit}`, x + 4, AXIS / 2);
  }
  ctx.fillStyle = S.theme.ground;
  ctx.fillRect(0, 0, GUTTER, AXIS - 1);
}

function drawMark() {
  const [a, b] = [Math.min(...S.mark), Math.max(...S.mark)];
  ctx.fillStyle = S.theme.accent;
  ctx.globalAlpha = 0.2;
  ctx.fillRect(a, AXIS, b - a, S.height);
  ctx.globalAlpha = 1;
  ctx.font = "600 12px system-ui, sans-serif";
  ctx.textAlign = "center";
  ctx.fillText(seconds((timeAt(b) - timeAt(a)) / S.views[0].stretch), (a + b) / 2, AXIS + 14);
}

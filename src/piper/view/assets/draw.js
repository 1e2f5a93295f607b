// The timeline: draws its visible part.

const PEAK_LABEL = 13; // the height of the label at a peak of memory

function redraw() {
  if (!S.frame) S.frame = requestAnimationFrame(() => { S.frame = 0; draw(); });
}

function draw() {
  const began = performance.now();
  S.dense = canvas.width / S.width;
  ctx.setTransform(S.dense, 0, 0, S.dense, 0, 0);
  ctx.fillStyle = S.theme.ground;
  ctx.fillRect(0, 0, S.width, S.height);
  ctx.textBaseline = "middle";
  const ticks = tickTimes(), seen = S.rows.filter((row) => yOf(row.y + row.h) >= AXIS && yOf(row.y) <= S.height);
  const devices = seen.filter((row) => !row.head);
  seen.filter((row) => row.head).forEach(drawHead);
  inside(() => {
    devices.forEach((row) => drawGround(row, ticks));
    drawAllBars(devices);
    drawAllMemory(devices);
    devices.forEach(outline);
    drawLinks(S.links || []);
    S.steps.forEach((path, v) => drawLinks(pathLinks(S.views[v], path)));
  });
  devices.forEach(drawNames);
  drawAxis(ticks);
  if (S.mark) drawMark();
  S.took = performance.now() - began;
}

/** Draw on the part of the canvas that shows time. */
function inside(paint) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(GUTTER, AXIS, S.width - GUTTER, S.height - AXIS);
  ctx.clip();
  paint();
  ctx.restore();
}

function drawHead(row) {
  ctx.fillStyle = S.theme.text;
  ctx.font = "600 12px system-ui, sans-serif";
  ctx.textAlign = "left";
  ctx.fillText(`${row.view.name}   ${seconds(row.view.seconds)}${stretchText(row.view)}`, 8, yOf(row.y) + 14);
}

function drawGround(row, ticks) {
  const top = yOf(row.y) - 3;
  if (row.odd) {
    ctx.fillStyle = S.theme.band;
    ctx.fillRect(0, top, S.width, row.h);
  }
  ctx.fillStyle = S.theme.line;
  for (const t of ticks.times) ctx.fillRect(Math.round(xOf(t)), top, 1, row.h);
  drawIdle(row);
  drawUnder(row);
}

/** Where compute is idle: striped in the colour of what it waits for. */
function drawIdle(row) {
  const { one, view } = row, lane = row.lanes[0], y = yOf(lane.y);
  ctx.fillStyle = S.theme.idle;
  const from = Math.max(GUTTER, xOf(0));
  ctx.fillRect(from, y, Math.min(S.width, xOf(view.length)) - from, lane.h);
  const gaps = one.gaps, least = 3 * (S.t1 - S.t0) / (S.width - GUTTER); // thinner stripes cannot be seen
  for (let k = 0; k < gaps.length; k++) {
    const gap = gaps[k];
    if (gap.end - gap.start < least || gap.end < S.t0 || gap.start > S.t1 || gap.cause < 0) continue;
    const x = Math.max(GUTTER, xOf(gap.start)), w = Math.min(S.width, xOf(gap.end)) - x;
    ctx.fillStyle = hatch(S.fills[kindIndex(one.plan.kind[gap.cause])][0]);
    ctx.fillRect(x, y + 1, w, lane.h - 2);
  }
}

/** The time of the message that is pointed at or selected, through all lanes of its device. */
function drawUnder(row) {
  for (const what of [S.hover, S.selected]) {
    if (!what || what.one !== row.one || what.view !== row.view || what.b === undefined) continue;
    if (streamOf(row.one, what.b) === COMPUTE) continue;
    const x = xOf(row.one.start[what.b]);
    ctx.fillStyle = S.theme.accent;
    ctx.globalAlpha = 0.13;
    ctx.fillRect(x, yOf(row.y) - 3, xOf(row.one.end[what.b]) - x, row.h);
    ctx.globalAlpha = 1;
  }
}

// Very many things that are thinner than a pixel are first put together in an image: one number for
// each column is far cheaper than one rectangle.
const sheets = {};

function sheet(name, width, height) {
  const old = sheets[name];
  if (old && old.width === width && old.height === height) { old.pixels.fill(0); return old; }
  const paper = document.createElement("canvas");
  paper.width = width;
  paper.height = height;
  const pen = paper.getContext("2d"), image = pen.createImageData(width, height);
  sheets[name] = { width, height, paper, pen, image, pixels: new Uint32Array(image.data.buffer) };
  return sheets[name];
}

/** Put rows of a sheet on the canvas: each a [row of the sheet, its height there, y, height]. */
function lay(one, places) {
  one.pen.putImageData(one.image, 0, 0);
  ctx.imageSmoothingEnabled = false;
  for (const [from, high, y, h] of places) ctx.drawImage(one.paper, 0, from, one.width, high, GUTTER, y, S.width - GUTTER, h);
}

function drawAllBars(rows) {
  const parts = rows.flatMap((row) => row.lanes.flatMap((place) => place.rows.map((part) => [row, part])));
  if (!parts.length) return;
  const columns = Math.max(1, Math.round((S.width - GUTTER) * S.dense)), strip = sheet("bars", columns, parts.length);
  parts.forEach(([row, part], k) => drawBars(row, part, strip.pixels.subarray(k * columns, (k + 1) * columns)));
  lay(strip, parts.map(([, part], k) => [k, 1, yOf(part.y), part.h]));
}

/** The visible bars. Those of less than a pixel are drawn together, shaded by density. */
function drawBars(row, part, columns) {
  const { one, view } = row, { start, end, bars, n, until } = part.row;
  const y = yOf(part.y), h = part.h, many = columns.length, scale = many / (S.t1 - S.t0), near = S.t0, far = S.t1;
  const match = S.match && S.match.get(one), path = S.path && (S.path.get(one) || new Map()), hidden = KIND_IDS.map((_, k) => S.hidden.has(k));
  let column = -1, full = 0, widest = 0, fill = 0, faint = true;
  const flush = () => {
    if (column < 0) return;
    const alpha = Math.round(255 * (faint ? 0.15 : 1) * Math.max(0.55, Math.min(1, full)));
    if (column < many) columns[column] = ((fill & 0xffffff) | (alpha << 24)) >>> 0;
    column = -1;
    full = widest = 0;
    faint = true;
  };
  ctx.textAlign = "center";
  for (let k = firstAbove(until, near); k < n && start[k] < far; k++) {
    const b = bars[k];
    if (hidden[one.kind[b]]) continue;
    const x = (start[k] - near) * scale, least = one.kind[b] === KIND_OF.update ? 3 * S.dense : 0;
    const w = Math.max(least, (end[k] - start[k]) * scale), pale = (match && !match[b]) || (path && !path.has(b)) || false;
    if (w < 1.5) {
      const at = Math.max(0, x) | 0;
      if (at !== column) { flush(); column = at; }
      full += w;
      if (w > widest || (faint && !pale)) { widest = w; fill = S.pixels[one.kind[b]][one.shade[b]]; }
      faint = faint && pale;
      continue;
    }
    flush();
    const part = !pale && path && path.get(b), whole = !part || part[1] - part[0] > 0.99 * (end[k] - start[k]);
    drawBar(view, one, b, GUTTER + x / S.dense, y, w / S.dense, h, pale || !whole);
    if (!whole) drawPart(one, b, part, y, h);
  }
  flush();
}

const widths = new Map();

function textWidth(text) {
  const key = ctx.font + text;
  if (!widths.has(key)) widths.set(key, ctx.measureText(text).width);
  return widths.get(key);
}

function drawBar(view, one, b, x, y, w, h, pale) {
  const fill = S.fills[one.kind[b]][one.shade[b]];
  const left = Math.max(GUTTER - 4, x), right = Math.min(S.width + 4, x + w), wide = right - left;
  ctx.globalAlpha = pale ? 0.18 : one.late[b] ? 0.6 : 1; // fainter: it ended earlier, at an unknown time
  ctx.fillStyle = fill;
  ctx.fillRect(left, y, wide > 3 ? wide - 1 : wide, h);
  if (h >= 10 && wide > 15 && !pale) {
    const short = shortLabel(view, one, b), long = wide > 110 && !isWholePass(view, one, b) ? longLabel(view, one, b) : short;
    ctx.fillStyle = S.inks.get(fill);
    for (const size of h >= 18 ? [11, 9] : [9, 8]) {
      ctx.font = `${size}px system-ui, sans-serif`;
      const text = [long, short].find((label) => textWidth(label) < wide - 2);
      if (text) { ctx.fillText(text, left + wide / 2, y + h / 2 + 0.5); break; }
    }
  }
  ctx.globalAlpha = 1;
}

/** The part of a bar that is on the critical path. */
function drawPart(one, b, [from, to], y, h) {
  ctx.fillStyle = S.fills[one.kind[b]][one.shade[b]];
  ctx.fillRect(xOf(from), y, Math.max(1, xOf(to) - xOf(from)), h);
}

/** Memory stacked by kind, lasting kinds first. The peak is marked. */
function drawAllMemory(rows) {
  const shown = rows.filter((row) => row.memory && row.one.memory.n);
  if (!shown.length) return;
  const most = Math.max(...S.views.map((view) => view.peak), ...shown.map((row) => row.one.memory.most), 1);
  const columns = Math.max(1, Math.round((S.width - GUTTER) * S.dense)), high = Math.round(shown[0].memory.h * S.dense);
  const paper = sheet("memory", columns, high * shown.length);
  shown.forEach((row, k) => fillMemory(row, paper.pixels.subarray(k * high * columns, (k + 1) * high * columns), columns, high, (high - 2) / most));
  lay(paper, shown.map((row, k) => [k * high, high, yOf(row.memory.y), row.memory.h]));
  shown.forEach((row) => drawPeak(row, row.one.memory, yOf(row.memory.y), row.memory.h, (row.memory.h - 2) / most));
}

function fillMemory(row, pixels, columns, high, scale) {
  const memory = row.one.memory, worst = worstOf(memory, row.view, columns);
  const fills = memory.kinds.map((kind) => pixel(MEMORY[kind] || "#999999"));
  for (let x = 0; x < columns; x++) {
    if (worst[x] < 0) continue;
    let from = 0;
    for (let j = 0; j < fills.length; j++) {
      const to = Math.min(high, Math.round(memory.levels[j][worst[x]] * scale));
      for (let y = from; y < to; y++) pixels[(high - 1 - y) * columns + x] = fills[j];
      from = Math.max(from, to);
    }
  }
}

/** For each column of pixels, its peak. */
function worstOf(memory, view, columns) {
  const worst = new Int32Array(columns).fill(-1), scale = columns / (S.t1 - S.t0);
  for (let k = Math.max(0, firstAbove(memory.time, S.t0) - 1); k < memory.n && memory.time[k] <= S.t1; k++) {
    const until = k + 1 < memory.n ? memory.time[k + 1] : view.length;
    const from = Math.max(0, Math.floor((memory.time[k] - S.t0) * scale)), to = Math.min(columns, Math.ceil((until - S.t0) * scale));
    for (let x = from; x < Math.max(to, from + 1) && x < columns; x++) {
      if (worst[x] < 0 || memory.total[k] > memory.total[worst[x]]) worst[x] = k;
    }
  }
  return worst;
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
  const text = bytes(memory.most), right = x + 90 > S.width, label = peakLabelTop(y, top, h);
  ctx.font = "600 10px system-ui, sans-serif";
  ctx.textAlign = right ? "right" : "left";
  const wide = ctx.measureText(text).width + 6, left = right ? x - wide - 4 : x + 4;
  ctx.globalAlpha = 0.82;
  ctx.fillStyle = S.theme.ground;
  ctx.fillRect(left, label, wide, PEAK_LABEL);
  ctx.globalAlpha = 1;
  ctx.fillStyle = S.theme.mark;
  ctx.fillText(text, right ? x - 7 : x + 7, label + 7);
}

/** Beside the dot at `y`, and inside the band of memory. */
function peakLabelTop(y, top, h) {
  return Math.max(top + 1, Math.min(top + h - PEAK_LABEL, y - PEAK_LABEL / 2));
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
    if (!mine(what) || streamOf(row.one, what.b) === COMPUTE) continue;
    const compute = row.one.lanes[0].rows[0], until = row.one.end[what.b];
    const first = firstAbove(compute.end, row.one.start[what.b]);
    for (let k = first; k < compute.n && compute.start[k] < until && k < first + 200; k++) frame(compute.bars[k], S.theme.text, 1);
  }
  const gap = S.selected && S.selected.one === row.one && S.selected.gap;
  if (gap) {
    const x = xOf(gap.start), lane = row.lanes[0];
    ctx.strokeStyle = S.theme.mark;
    ctx.lineWidth = 2.5;
    ctx.strokeRect(x, yOf(lane.y), Math.max(2, xOf(gap.end) - x), lane.h);
  }
  if (mine(S.hover)) frame(S.hover.b, S.theme.text, 1.5);
  if (mine(S.selected)) frame(S.selected.b, S.theme.mark, 2.5);
}

/** Where the critical path changes its lane, as far as it can be seen. */
function pathLinks(view, path) {
  const found = [];
  for (let k = 1; k < path.length; k++) {
    const [one, b, from, to] = path[k - 1], [next, c, begin, end] = path[k];
    if (begin > S.t1 || end < S.t0 || (one === next && one.laneOf[b] === next.laneOf[c])) continue;
    found.push([[view, one, b, from, to], [view, next, c, begin, end]]);
  }
  return found;
}

/** Arrows: what the selected bar waits for, and what waits for it; or the critical path. */
function drawLinks(links) {
  ctx.strokeStyle = ctx.fillStyle = S.theme.mark;
  ctx.lineWidth = 1.2;
  for (const [from, to] of links.slice(0, 200)) {
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
}

function drawNames(row) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(0, AXIS, GUTTER, S.height - AXIS);
  ctx.clip();
  if (row.odd) {
    ctx.fillStyle = S.theme.band;
    ctx.fillRect(0, yOf(row.y) - 3, GUTTER, row.h);
  }
  const first = row.lanes[0];
  ctx.textAlign = "left";
  ctx.fillStyle = S.theme.text;
  ctx.font = "600 12px system-ui, sans-serif";
  const which = S.paired && S.views.length > 1 ? ` ${"AB"[S.views.indexOf(row.view)]}` : "";
  const share = streamLabel(row.view.run, COMPUTE), up = share === COMPUTE ? 0 : 5;
  ctx.fillText(`device ${row.one.device}${which}`, 8, yOf(first.y) + first.h / 2 - up);
  ctx.fillStyle = S.theme.quiet;
  ctx.font = "10px system-ui, sans-serif";
  if (up) ctx.fillText(share, 8, yOf(first.y) + first.h / 2 + 6, GUTTER - 12);
  ctx.textAlign = "right";
  const low = Math.min(10, ...row.lanes.slice(1).map((place) => place.bottom - place.y + 1));
  ctx.font = `${low}px system-ui, sans-serif`;
  for (const place of row.lanes.slice(1)) ctx.fillText(streamLabel(row.view.run, place.lane.stream), GUTTER - 8, (yOf(place.y) + yOf(place.bottom)) / 2 - 0.5, GUTTER - 12);
  ctx.font = "10px system-ui, sans-serif";
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
    const text = `${(t * size).toFixed(digits)} ${unit}`;
    if (x + 8 + ctx.measureText(text).width > S.width) continue;
    ctx.fillStyle = S.theme.line;
    ctx.fillRect(Math.round(x), AXIS - 7, 1, 7);
    ctx.fillStyle = S.theme.quiet;
    ctx.fillText(text, x + 4, AXIS / 2);
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

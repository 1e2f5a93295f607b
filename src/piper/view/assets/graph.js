// The DAG around one node, on its device: data edges solid, temporal edges dashed.

const HOPS = 2, ACROSS = 4, CELL = 84, SPACE = 24, LINE = 11; // pixels
const LETTERS = 14, MOST_LINES = 3; // of a label

/** Nodes within a few hops, by level (negative: before). Those that do not fit are only counted. */
function around(run, node, here) {
  const levels = new Map([[0, [node]]]), level = new Map([[node, 0]]), more = new Map();
  const data = (k, forward) => (forward ? run.after[k] : run.nodes.data[k]);
  for (const forward of [false, true]) {
    let edge = [node];
    for (let hop = 1; hop <= HOPS; hop++) {
      const next = new Set(edge.flatMap((k) => data(k, forward)));
      if (hop === 1) ordered(run, node, forward).forEach(([k]) => next.add(k));
      const fresh = [...next].filter((k) => here.has(k) && !level.has(k));
      const at = forward ? hop : -hop;
      edge = fresh.length > ACROSS ? fresh.slice(0, ACROSS - 1) : fresh; // the last place says how many more there are
      edge.forEach((k) => level.set(k, at));
      levels.set(at, edge);
      if (fresh.length > edge.length) more.set(at, fresh.length - edge.length);
    }
  }
  return { levels, level, more };
}

function edgesAmong(run, level) {
  const found = [];
  for (const k of level.keys()) {
    for (const p of run.nodes.data[k]) if (level.has(p)) found.push([p, k, false, "data flow"]);
    for (const [p, maker] of ordered(run, k, false)) if (level.has(p) && !run.nodes.data[k].includes(p)) found.push([p, k, true, maker]);
  }
  const near = (p, k) => level.get(k) - level.get(p) === 1 || !level.get(p) || !level.get(k);
  return found.filter(([p, k]) => level.get(p) < level.get(k) && near(p, k));
}

function drawGraph(run, node, here, choose) {
  const { levels, level, more } = around(run, node, here);
  const lines = new Map([...level.keys()].map((k) => [k, wrapped(run.nodes.label[k])]));
  const high = 8 + LINE * Math.max(...[...lines.values()].map((some) => some.length));
  const shown = [...levels.keys()].filter((at) => levels.get(at).length).sort((a, b) => a - b);
  const width = ACROSS * CELL + 8, place = new Map(), rests = [];
  shown.forEach((at, r) => {
    const row = levels.get(at), many = row.length + (more.has(at) ? 1 : 0), y = 10 + high / 2 + r * (high + SPACE);
    const x = (c) => width / 2 + (c - (many - 1) / 2) * CELL;
    row.forEach((k, c) => place.set(k, { x: x(c), y, high }));
    if (more.has(at)) rests.push(tagged("text", { class: "free", x: x(many - 1), y: y + 3.5, "text-anchor": "middle" }, `and ${more.get(at)} more`));
  });
  const svg = tagged("svg", { class: "graph", viewBox: `0 0 ${width} ${shown.length * (high + SPACE) - 4}`, role: "img" });
  svg.append(arrowHead(), ...edgesAmong(run, level).map((edge) => drawEdge(place, ...edge)));
  for (const [k, at] of place) svg.append(box(run, k, at, lines.get(k), k === node, choose));
  svg.append(...rests);
  return svg;
}

function drawEdge(place, a, b, temporal, maker) {
  const p = place.get(a), q = place.get(b), y1 = p.y + p.high / 2, y2 = q.y - q.high / 2 - 2;
  const path = tagged("path", { d: `M${p.x},${y1} C${p.x},${y1 + 14} ${q.x},${y2 - 14} ${q.x},${y2}`, class: temporal ? "edge temporal" : "edge", "marker-end": "url(#arrow)" });
  path.append(tagged("title", {}, maker));
  return path;
}

/** A label in lines that fit into a box. What does not fit is cut; the tooltip has all of it. */
function wrapped(label) {
  const lines = [];
  for (const word of label.split(" ")) {
    const last = lines[lines.length - 1];
    if (last && `${last} ${word}`.length <= LETTERS) lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word);
  }
  const cut = (line, k) => line.length > LETTERS || (k === MOST_LINES - 1 && lines.length > MOST_LINES) ? `${line.slice(0, LETTERS - 1)}\u2026` : line;
  return lines.slice(0, MOST_LINES).map(cut);
}

function box(run, k, at, lines, self, choose) {
  const name = run.nodes.label[k], wide = CELL - 6, top = at.y - (lines.length - 1) / 2 * LINE + 3.5;
  const group = tagged("g", { class: "node", tabindex: 0, role: "button", "aria-label": name, "data-node": k });
  const fill = KINDS[KIND_IDS[kindIndex(run.nodes.kind[k])]][1];
  group.append(tagged("rect", { x: at.x - wide / 2, y: at.y - at.high / 2, width: wide, height: at.high, rx: 4, fill, stroke: self ? S.theme.mark : "none", "stroke-width": 2.5 }));
  const text = tagged("text", { "text-anchor": "middle" });
  text.style.fill = inkOn(fill);
  lines.forEach((line, j) => text.append(tagged("tspan", { x: at.x, y: top + j * LINE }, line)));
  group.append(text, tagged("title", {}, name));
  group.addEventListener("click", () => choose(k));
  group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(k); } });
  return group;
}

function arrowHead() {
  const defs = tagged("defs", {}), marker = tagged("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto" });
  marker.append(tagged("path", { d: "M0,0 L8,4 L0,8 z", fill: S.theme.quiet }));
  defs.append(marker);
  return defs;
}

function tagged(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

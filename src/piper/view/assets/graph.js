// The DAG around one node, on its device: data edges solid, temporal edges dashed.

const HOPS = 2, ACROSS = 4, CELL = 84, LEVEL = 46;

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
      edge = fresh.slice(0, ACROSS);
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
  const shown = [...levels.keys()].filter((at) => levels.get(at).length).sort((a, b) => a - b);
  const width = ACROSS * CELL + 8, place = new Map();
  shown.forEach((at, r) => levels.get(at).forEach((k, c) => {
    place.set(k, { x: width / 2 + (c - (levels.get(at).length - 1) / 2) * CELL, y: 20 + r * LEVEL });
  }));
  const svg = tagged("svg", { class: "graph", viewBox: `0 0 ${width} ${shown.length * LEVEL}`, role: "img" });
  svg.append(arrowHead());
  for (const [a, b, temporal, maker] of edgesAmong(run, level)) {
    const p = place.get(a), q = place.get(b), y1 = p.y + 11, y2 = q.y - 13;
    const path = tagged("path", { d: `M${p.x},${y1} C${p.x},${y1 + 14} ${q.x},${y2 - 14} ${q.x},${y2}`, class: temporal ? "edge temporal" : "edge", "marker-end": "url(#arrow)" });
    path.append(tagged("title", {}, maker));
    svg.append(path);
  }
  for (const [k, at] of place) svg.append(box(run, k, at, k === node, choose));
  shown.forEach((at, r) => {
    if (more.has(at)) svg.append(tagged("text", { class: "free", x: width - 4, y: 20 + r * LEVEL - 14, "text-anchor": "end" }, `and ${more.get(at)} more`));
  });
  return svg;
}

function box(run, k, at, self, choose) {
  const id = run.nodes.label[k], wide = CELL - 8;
  const group = tagged("g", { class: "node", tabindex: 0, role: "button", "aria-label": id, "data-node": k });
  const fill = KINDS[KIND_IDS[kindIndex(run.nodes.kind[k])]][1];
  group.append(tagged("rect", { x: at.x - wide / 2, y: at.y - 11, width: wide, height: 22, rx: 4, fill, stroke: self ? S.theme.mark : "none", "stroke-width": 2.5 }));
  const text = tagged("text", { x: at.x, y: at.y + 3.5, "text-anchor": "middle" }, id);
  text.style.fill = inkOn(fill);
  if (id.length > 12) { // a long name is squeezed, not cut
    text.setAttribute("textLength", wide - 6);
    text.setAttribute("lengthAdjust", "spacingAndGlyphs");
  }
  group.append(text, tagged("title", {}, id));
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

"use strict";
// Shows the outcomes that the page holds. Text enters the page as text, never as HTML.
let DATA;
const WIDTH = 360, HEIGHT = 190, LEFT = 46, RIGHT = 10, TOP = 22, BOTTOM = 24;
const COLOURS = 11;

function element(name, parent, attributes, text) {
  const svg = ["svg", "g", "rect", "line", "text", "polyline", "circle", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

function emptied(id) {
  const box = document.getElementById(id);
  box.replaceChildren();
  return box;
}

function brief(value) {
  return Number(value.toPrecision(3)).toString();
}

function ticks(low, high) {
  const rough = (high - low) / 4;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const gap = [1, 2, 2.5, 5, 10].map((m) => m * power).find((g) => g >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / gap - 1e-9); i * gap <= high + gap * 1e-9; i++) found.push(i * gap);
  return found;
}

// Map a value from [low, high] to [start, end].
function scale(low, high, start, end) {
  return (value) => Math.round((start + (value - low) / (high - low || 1) * (end - start)) * 10) / 10;
}

function framed(box, title, keys, height) {
  const figure = element("figure", box);
  const caption = element("figcaption", figure, {}, title);
  const legend = element("span", caption, { class: "keys" });
  keys.forEach((key, i) =>
    element("span", legend, { class: `key c${i % COLOURS}` }, key));
  const view = `0 0 ${WIDTH} ${height || HEIGHT}`;
  return element("svg", figure, { viewBox: view, role: "img", "aria-label": title });
}

function xAxis(svg, x, low, high, name, height) {
  for (const tick of ticks(low, high)) {
    element("text", svg, { class: "tick", x: x(tick), y: height - 12, "text-anchor": "middle" },
      brief(tick));
  }
  element("text", svg, { class: "tick", x: WIDTH - RIGHT, y: height - 2, "text-anchor": "end" },
    name);
}

function yAxis(svg, y, low, high, name) {
  for (const tick of ticks(low, high)) {
    element("line", svg, { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) });
    element("text", svg, { class: "tick", x: LEFT - 6, y: y(tick) + 3.5, "text-anchor": "end" },
      brief(tick));
  }
  element("text", svg, { class: "tick", x: 2, y: 12 }, name);
}

function chart(box, figure) {
  const points = figure.curves.flatMap((curve) => curve.points).filter((p) => p[1] !== null);
  if (!points.length) return;
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const first = Math.min(...xs), last = Math.max(...xs);
  let low = Math.min(...ys), high = Math.max(...ys);
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  low = low >= 0 && low <= (high - low) * 0.5 ? 0 : low - pad;
  high += pad;
  const x = scale(first, last, LEFT, WIDTH - RIGHT), y = scale(low, high, HEIGHT - BOTTOM, TOP);
  const svg = framed(box, figure.title, figure.curves.map((curve) => curve.label));
  yAxis(svg, y, low, high, figure.y);
  xAxis(svg, x, first, last, figure.x, HEIGHT);
  figure.curves.forEach((curve, i) => {
    const stretches = [[]];
    for (const [at, value] of curve.points) {
      if (value === null) stretches.push([]);
      else stretches[stretches.length - 1].push([x(at), y(value)]);
    }
    for (const stretch of stretches) {
      if (stretch.length === 1) {
        element("circle", svg,
          { class: `dot c${i % COLOURS}`, cx: stretch[0][0], cy: stretch[0][1], r: 2.6 });
      } else if (stretch.length) {
        element("polyline", svg, { class: `line c${i % COLOURS}`, points: stretch.join(" ") });
      }
    }
  });
}

function bars(box, figure) {
  const low = Math.min(0, ...figure.values), high = Math.max(0, ...figure.values) || 1;
  const svg = framed(box, figure.title, []);
  const y = scale(low, high, HEIGHT - BOTTOM, TOP);
  yAxis(svg, y, low, high, figure.y);
  const width = (WIDTH - LEFT - RIGHT) / figure.values.length;
  const every = Math.ceil(figure.values.length / 12);
  figure.values.forEach((value, i) => {
    const x = LEFT + i * width, top = Math.min(y(value), y(0));
    const bar = element("rect", svg, { class: "fill c0", x: x + width * 0.1, y: top,
      width: width * 0.8, height: Math.abs(y(value) - y(0)) });
    element("title", bar, {}, `${figure.labels[i]}: ${figure.shown[i]}`);
    if (i % every === 0) {
      element("text", svg, { class: "tick", x: x + width / 2, y: HEIGHT - 8,
        "text-anchor": "middle" }, figure.labels[i]);
    }
  });
}

function timeline(box, figure) {
  const rows = [...new Set(figure.spans.map((span) => span[0]))];
  const kinds = [...new Set(figure.spans.map((span) => span[3]))];
  const last = Math.max(...figure.spans.map((span) => span[2]));
  const height = TOP + BOTTOM + 24 * rows.length;
  const svg = framed(box, figure.title, kinds, height);
  const x = scale(0, last, 2 * LEFT, WIDTH - RIGHT);
  xAxis(svg, x, 0, last, figure.x, height);
  rows.forEach((row, i) =>
    element("text", svg, { class: "tick", x: 0, y: TOP + 24 * i + 13 }, row));
  for (const [row, start, end, kind] of figure.spans) {
    const bar = element("rect", svg, { class: `fill c${kinds.indexOf(kind) % COLOURS}`,
      x: x(start), y: TOP + 24 * rows.indexOf(row), width: Math.max(0.5, x(end) - x(start)),
      height: 18 });
    element("title", bar, {}, `${kind}: ${brief(start)} to ${brief(end)}`);
  }
}

function show(outcome, command) {
  const values = emptied("values"), lines = emptied("lines");
  for (const [name, value] of outcome.values) {
    const tile = element("div", values, { class: "tile" });
    element("i", tile, {}, name);
    element("b", tile, {}, value);
  }
  for (const line of outcome.lines) element("p", lines, {}, line);
  const figures = emptied("figures"), tables = emptied("tables");
  const draw = { chart, bars, timeline };
  for (const figure of outcome.figures) draw[figure.kind](figures, figure);
  for (const shown of outcome.tables) {
    element("h3", tables, {}, shown.title);
    const table = element("table", element("div", tables, { class: "scroll" }));
    if (shown.columns.some((column) => column)) {
      const head = element("tr", table);
      for (const column of shown.columns) element("th", head, {}, column);
    }
    for (const cells of shown.rows) {
      const row = element("tr", table);
      for (const cell of cells) element("td", row, {}, cell);
    }
  }
  document.getElementById("command").textContent = command;
}

function withTables(outcome) {
  return { ...outcome, tables: outcome.tables.map((place) => DATA.tables[place]) };
}

function place(i, index) {
  document.getElementById(`control${i}`).value = index;
  document.getElementById(`shown${i}`).textContent = DATA.controls[i].shown[index];
}

// Result of a part at the present positions: in the order of nested loops over its controls.
function result(part) {
  let at = 0;
  for (const i of part.controls) at = at * DATA.controls[i].shown.length + DATA.controls[i].at;
  return part.found[at];
}

// Outcome of all parts. Tables of equal title become one.
function joined(parts) {
  const tables = new Map();
  for (const table of parts.flatMap((part) => part.tables)) {
    const before = tables.get(table.title) || { ...table, rows: [] };
    tables.set(table.title, { ...before, rows: [...before.rows, ...table.rows] });
  }
  const all = (name) => parts.flatMap((part) => part[name]);
  return { values: all("values"), figures: all("figures"), lines: all("lines"),
    tables: [...tables.values()] };
}

function showCombination() {
  const words = DATA.words.map((part) => DATA.texts[result(part)]);
  const parts = DATA.parts.map((part) => withTables(DATA.outcomes[result(part)]));
  show(joined(parts), words.filter((text) => text).join(" "));
}

// Show control `moved` at value number `index`. All others keep their values.
function move(moved, index) {
  DATA.controls[moved].at = index;
  place(moved, index);
  showCombination();
}

// Data of all combinations is base64 of a zlib stream.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

function start(text) {
  DATA = JSON.parse(text);
  DATA.controls.forEach((control, i) => {
    const input = document.getElementById(`control${i}`);
    input.addEventListener("input", () => move(i, Number(input.value)));
  });
  showCombination();
}

unpacked(document.getElementById("data").textContent).then(start).catch((error) => element("p",
  emptied("lines"), { class: "error" }, `This browser cannot unpack the page's data: ${error}`));

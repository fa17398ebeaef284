// Runs the script of a page with controls on a minimal document.
// stdin: {"script", "data", "type", "moves": [[control, value number]]}.
// stdout: what the page shows at first and after each move.
"use strict";

class Element {
  constructor(name) {
    Object.assign(this, { name, children: [], attributes: {}, listeners: {}, textContent: "" });
  }
  setAttribute(key, value) { this.attributes[key] = value; }
  getAttribute(key) { return this.attributes[key]; }
  appendChild(child) { this.children.push(child); }
  replaceChildren() { this.children = []; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  get texts() { return this.children.map((child) => child.textContent); }
  find(name) {
    return this.children.flatMap((child) => [...(child.name === name ? [child] : []),
      ...child.find(name)]);
  }
}

const elements = {};
globalThis.document = {
  getElementById: (id) => (elements[id] ||= new Element(id)),
  createElement: (name) => new Element(name),
  createElementNS: (_, name) => new Element(name),
};
const given = JSON.parse(require("fs").readFileSync(0, "utf8"));
document.getElementById("data").setAttribute("type", given.type);
document.getElementById("data").textContent = given.data;

function seen() {
  const titles = elements.tables.find("h3").map((title) => title.textContent);
  const tables = elements.tables.find("table").map((table) => table.children
    .filter((row) => row.children[0].name === "td").map((row) => row.texts));
  return {
    command: elements.command.textContent,
    values: elements.values.children.map((tile) => tile.texts),
    tables: titles.map((title, i) => [title, tables[i]]),
    lines: elements.lines.texts,
    figures: elements.figures.find("figcaption").map((caption) => caption.textContent),
    positions: Object.keys(elements).filter((id) => /^shown\d/.test(id))
      .map((id) => elements[id].textContent),
  };
}

async function drive() {
  require("vm").runInThisContext(given.script);
  for (let i = 0; i < 1000 && !elements.command?.textContent && !elements.lines; i++) {
    await new Promise((done) => setTimeout(done, 10));
  }
  const found = [seen()];
  for (const [control, index] of given.moves) {
    const input = elements[`control${control}`];
    input.value = String(index);
    input.listeners.input();
    found.push(seen());
  }
  process.stdout.write(JSON.stringify(found));
}

drive();

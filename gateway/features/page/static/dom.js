// Elements and numbers. Text enters the page as text nodes alone: what clients choose (model names, tenants, errors)
// is never parsed as HTML, and the page's policy (trusted types) lets nothing parse any.
const SVG = "http://www.w3.org/2000/svg";

const fill = (element, properties, children) => {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name === "className" ? "class" : name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child != null && child !== false).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return element;
};
export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

/** Sets text only where it differs, so that a selection and the layout stay. */
export const put = (element, text) => {
  const wanted = text == null ? "–" : String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
};

export const fixed = (value, places = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
export const number = (value) => {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  return fixed(value, size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2);
};
export const short = (value) => {
  if (value == null) return "–";
  for (const [unit, name] of [[1e9, " G"], [1e6, " M"], [1e4, " k"]])
    if (Math.abs(value) >= unit) return fixed(value / (unit === 1e4 ? 1e3 : unit), value / unit >= 100 ? 0 : 1) + name;
  return number(value);
};
export const percent = (share, places = 0) => (share == null ? "–" : `${fixed(share * 100, places)} %`);
export const milliseconds = (value) => {
  if (value == null) return "–";
  if (value >= 1000) return `${fixed(value / 1000, value >= 10000 ? 1 : 2)} s`;
  return `${fixed(value, value >= 100 ? 0 : value >= 10 ? 1 : value === 0 ? 0 : 2)} ms`;
};
export const duration = (seconds) => {
  if (seconds == null) return "–";
  if (seconds < 60) return `${fixed(seconds, seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
};
export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");
export const bytes = (value) => (value == null ? "–" : value >= 1e9 ? `${fixed(value / 1e9, 2)} GB`
  : value >= 1e6 ? `${fixed(value / 1e6, value >= 1e8 ? 0 : 1)} MB` : `${fixed(value / 1e3, 1)} kB`);

/** A table; a cell is text, a node, or {text, className, title}. A row may have `properties`. */
export const table = (columns, rows, empty) => {
  const cell = (tag, value, column) => {
    const told = value != null && typeof value === "object" && !(value instanceof Node) ? value : { text: value };
    return h(tag, { className: [column.className, told.className].filter(Boolean).join(" ") || null, title: told.title },
      told.text == null ? "–" : told.text);
  };
  if (!rows.length) return h("p", { className: "soft" }, empty);
  return h("table", {},
    h("thead", {}, h("tr", {}, columns.map((column) => cell("th", column.name, column)))),
    h("tbody", {}, rows.map((row) => {
      const [cells, properties] = Array.isArray(row) ? [row, {}] : [row.cells, row.properties];
      return h("tr", properties, cells.map((value, at) => cell("td", value, columns[at] || {})));
    })));
};

/** A small tile: name, value, and a remark below; `set` changes the two. */
export const tile = (name) => {
  const value = h("strong", {}, "–"), remark = h("small", {});
  return { node: h("div", { className: "tile" }, h("span", {}, name), value, remark),
    set: (text, below) => { put(value, text); put(remark, below || ""); } };
};
export const tiles = (...names) => {
  const made = names.map(tile);
  return { node: h("div", { className: `tiles of${names.length}` }, made.map((each) => each.node)), set: (at, ...what) => made[at].set(...what) };
};

/** Keeps one child for each key, in order, and makes only what is new. */
export const keyed = (parent, make) => {
  const known = new Map();
  return (items, keyOf) => {
    const keys = new Set(items.map(keyOf));
    for (const [key, one] of known) if (!keys.has(key)) { one.node.remove(); known.delete(key); }
    items.forEach((item, at) => {
      let one = known.get(keyOf(item));
      if (!one) known.set(keyOf(item), (one = make(item)));
      if (parent.children[at] !== one.node) parent.insertBefore(one.node, parent.children[at] || null);
      one.update(item);
    });
  };
};

/** A bar of several parts over one another, each [share, class]; shares are of the whole. */
export const meter = (className, parts) => {
  const rects = parts.map((kind) => s("rect", { className: kind, y: 0, height: 10, width: 0 }));
  const node = h("div", { className: `meter ${className}` },
    s("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, rects));
  return { node, set: (...shares) => shares.forEach((share, at) => {
    const place = Math.round(1000 * Math.min(1, Math.max(0, share || 0)));
    if (parts[at] === "mark") { rects[at].setAttribute("x", Math.max(0, place - 4)); rects[at].setAttribute("width", share == null ? 0 : 4); }
    else rects[at].setAttribute("width", place);
  }) };
};
export const bar = (share, className) => h("span", { className: `bar ${className || "s1"}` },
  s("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { width: Math.round(100 * Math.min(1, Math.max(0, share || 0))), height: 10 })));

"use strict";
// Adds the figures of other runs or series to the page's tables: of folders that are dropped on it, or chosen.
(() => {
  const zone = document.getElementById("folders");
  const status = zone.querySelector("[role=status]");
  const tables = [...document.querySelectorAll("table.figures")];
  const MOST_BYTES = 10_000_000;

  // Fields may be quoted, with "" for a quote, as Python's csv module writes them.
  const parsed = (text) => {
    const rows = [[""]];
    let quoted = false;
    for (let at = 0; at < text.length; at++) {
      const one = text[at], row = rows.at(-1);
      if (quoted && one === '"' && text[at + 1] === '"') row[row.length - 1] += text[++at];
      else if (one === '"') quoted = !quoted;
      else if (one === "," && !quoted) row.push("");
      else if (one === "\n" && !quoted) rows.push([""]);
      else row[row.length - 1] += one;
    }
    const [head, ...lines] = rows.filter((row) => row.length > 1);
    return (lines || []).map((line) => Object.fromEntries(head.map((name, at) => [name, line[at]])));
  };

  const shown = (value, kind) => {
    if (kind === "ratio") return `${(100 * value).toFixed(1)}%`;
    if (kind === "ms" && value >= 1000) return `${(value / 1000).toFixed(value >= 10000 ? 1 : 2)} s`;
    const places = value >= 100 || (kind !== "ms" && Number.isInteger(value)) ? 0 : value >= 10 ? 1 : 2;
    const text = value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
    return kind === "ms" ? `${text} ms` : text;
  };
  const change = (value, first) => {
    if (value === first) return "same";
    return first ? `${value >= first ? "+" : ""}${(100 * (value / first - 1)).toFixed(1)}%` : "from zero";
  };

  const cell = (tag, text, note) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (note) {
      const small = document.createElement("span");
      small.className = "soft";
      small.textContent = note;
      made.append(document.createElement("br"), small);
    }
    return made;
  };

  const add = (name, lines) => {
    let found = 0;
    for (const table of tables) {
      const { target, load } = table.dataset;
      const line = lines.find((one) => one.target === target && one.load === load)
        || (lines.length === 1 && tables.length === 1 ? lines[0] : null);
      found += line ? 1 : 0;
      table.rows[0].append(cell("th", name));
      for (const row of [...table.rows].slice(1)) {
        const { column, kind, first } = row.dataset;
        const text = line && line[column];
        const made = text ? cell("td", shown(+text, kind), first === "" ? "" : change(+text, +first)) : cell("td", "-");
        made.dataset.title = name;
        row.append(made);
      }
    }
    return found;
  };

  const take = async (named) => {
    const told = [];
    for (const [name, file] of named) {
      try {
        if (file.size > MOST_BYTES) throw new Error("too large");
        const lines = parsed(await file.text());
        if (!lines.length || !("requests_per_second" in lines[0])) throw new Error("no figures of loadtest");
        const found = add(name, lines);
        told.push(found ? `${name} added` : `${name}: none of its loads is on this page`);
      } catch (error) {
        told.push(`${name}: results.csv cannot be read (${error.message})`);
      }
    }
    status.textContent = told.length ? told.join("; ") : "no results.csv in there";
  };

  // A dropped file or folder. Chromium lists folders for pages of files by handles alone, other browsers by entries.
  const byHandle = (handle) => ({
    name: handle.name,
    isFile: handle.kind === "file",
    file: () => handle.getFile(),
    inside: async () => {
      const found = [];
      for await (const one of handle.values()) found.push(byHandle(one));
      return found;
    },
  });
  const byEntry = (entry) => ({
    name: entry.name,
    isFile: entry.isFile,
    file: () => new Promise((resolve, reject) => entry.file(resolve, reject)),
    inside: async () => (await new Promise((resolve, reject) => entry.createReader().readEntries(resolve, reject))).map(byEntry),
  });
  const opened = async (item) =>
    item.getAsFileSystemHandle ? byHandle(await item.getAsFileSystemHandle()) : byEntry(item.webkitGetAsEntry());

  // Of a folder its results.csv, or those of the folders in it.
  const within = async (node, depth) => {
    if (node.isFile) return depth ? [] : [[node.name, await node.file()]];
    const inside = await node.inside();
    const own = inside.find((one) => one.isFile && one.name === "results.csv");
    if (own) return [[node.name, await own.file()]];
    return depth ? [] : (await Promise.all(inside.map((one) => within(one, depth + 1)))).flat();
  };

  document.addEventListener("dragover", (event) => { event.preventDefault(); zone.classList.add("over"); });
  document.addEventListener("dragleave", () => zone.classList.remove("over"));
  document.addEventListener("drop", async (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    try {
      const dropped = await Promise.all([...event.dataTransfer.items].filter((item) => item.kind === "file").map(opened));
      await take((await Promise.all(dropped.map((node) => within(node, 0)))).flat());
    } catch (error) {
      status.textContent = `the folder cannot be read: ${error.message}`;
    }
  });
  zone.querySelector("input").onchange = async (event) => {
    const files = [...event.target.files].filter((file) => file.name === "results.csv");
    const parts = files.map((file) => [file.webkitRelativePath.split("/"), file]);
    const least = Math.min(...parts.map(([path]) => path.length));
    await take(parts.filter(([path]) => path.length === least).map(([path, file]) => [path.at(-2) || file.name, file]));
    event.target.value = "";
  };
  zone.hidden = false;
})();

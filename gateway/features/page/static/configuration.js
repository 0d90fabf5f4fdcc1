// The configuration in force, without secrets, and what a reload would change.
import { askJson } from "./connection.js";
import { h, put, table } from "./dom.js";

const plain = (value) => (value === null ? "null" : typeof value === "string" ? (value === "" || /[:#{}[\],&*?|<>=!%@`'"\s]/.test(value) ? JSON.stringify(value) : value) : String(value));
const lines = (value, indent) => {
  const pad = "  ".repeat(indent);
  if (Array.isArray(value)) return value.flatMap((each) => {
    if (each === null || typeof each !== "object") return [`${pad}- ${plain(each)}`];
    const inner = lines(each, indent + 1);
    return inner.length ? [`${pad}- ${inner[0].trimStart()}`, ...inner.slice(1)] : [`${pad}- {}`];
  });
  return Object.entries(value).flatMap(([key, each]) => {
    const isEmpty = each !== null && typeof each === "object" && !Object.keys(each).length;
    if (isEmpty) return [`${pad}${key}: ${Array.isArray(each) ? "[]" : "{}"}`];
    return each !== null && typeof each === "object" ? [`${pad}${key}:`, ...lines(each, indent + 1)] : [`${pad}${key}: ${plain(each)}`];
  });
};
const shown = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));

export const configuration = () => {
  const text = h("pre", { id: "config" }), changes = h("div", { className: "card" }, h("p", { className: "soft" }, "Not looked at yet."));
  const note = h("span", { className: "soft" }), search = h("input", { type: "search", placeholder: "find a line" });
  const look = h("button", { id: "preview" }, "What would a reload change?");
  let all = [];
  const show = () => put(text, (search.value ? all.filter((line) => line.toLowerCase().includes(search.value.toLowerCase())) : all).join("\n"));
  search.addEventListener("input", show);
  askJson("/admin/dashboard/config").then((config) => { all = lines(config, 0); show(); }, (error) => put(note, error.message));
  look.addEventListener("click", async () => {
    look.disabled = true;
    try {
      const { changed, needs_restart: restart } = await askJson("/admin/dashboard/reload");
      const rows = [...changed.map((each) => [each, "at once"]), ...restart.map((each) => [each, "needs a restart"])];
      changes.replaceChildren(table([{ name: "Key" }, { name: "In force", className: "text" }, { name: "In the file", className: "text" }, { name: "Applies", className: "text" }],
        rows.map(([each, when]) => [each.path, { text: shown(each.before), className: "wide" }, { text: shown(each.after), className: "wide" }, { text: when, className: when === "at once" ? "good" : "warn" }]), "Nothing: the file says what is in force."));
    } catch (error) {
      changes.replaceChildren(h("p", { className: "bad" }, error.message));
    }
    look.disabled = false;
  });
  return {
    node: h("div", {}, h("div", { className: "tools" }, look, note), changes,
      h("h2", {}, "In force", h("small", {}, "with defaults; secrets are ***")), h("div", { className: "tools" }, search), h("div", { className: "card text" }, text)),
    update: () => {},
  };
};

// The last requests. A click on one shows what each engine would have cost it when it arrived.
import { askJson } from "./connection.js";
import { bar, clock, h, keyed, milliseconds, number, put } from "./dom.js";

// Columns with `more` are in the details of a row where the screen is narrow.
const COLUMNS = [["Ended"], ["Model", "text name"], ["Tenant", "text name more", "by the tenant header, or the API key"], ["Engine", "text name more"], ["Outcome", "text outcome"], ["Wait", "more"], ["TTFT", "more", "time to the first token of a stream"],
  ["Duration"], ["Prompt", "more", "tokens"], ["Hit", "more", "prompt tokens found in the cache: predicted / actual"], ["Output", "more", "tokens"]];
const PARTS = { ahead: "prefill ahead", prefill: "own prefill", cache: "cache taken", stall: "stall of others", steps: "steps waited for", slowdown: "slower decoding", slot: "wait for a slot", memory: "wait for KV cache" };

export const tenantOf = (row) => row.tenant || row.client || "–";
const name = (each) => each.backend + (each.rank == null ? "" : `#${each.rank}`);
const costTable = (rows, columns, isChosen) => {
  const most = Math.max(...rows.map((each) => each.cost || 0), 1e-9);
  return h("div", { className: "card" }, h("table", { className: "costs" },
    h("thead", {}, h("tr", {}, h("th", {}, "Engine"), columns.map(([header]) => h("th", {}, header)))),
    h("tbody", {}, rows.map((each) => h("tr", { className: isChosen(each) ? "chosen" : null },
      h("td", {}, bar((each.cost || 0) / most, each.open === false ? "soft" : "s1"), name(each)),
      columns.map(([header, of]) => { const value = of(each); return h("td", { className: value === "closed" ? "soft" : null, "data-label": header }, value); }))))));
};

/** What each engine would have cost a request: when it arrived (or `when`), and when it was bound. `chosen`: the backend. */
export const prices = ({ engines, bound, prompt_tokens: prompt, prefix_blocks: blocks, in_seconds: inSeconds }, chosen, when = "When it arrived") => {
  const cost = (each) => (each.cost == null ? "kept for a starving request" : inSeconds ? milliseconds(each.cost) : number(each.cost));
  const parts = engines ? [...new Set(engines.flatMap((each) => Object.entries(each.cost_parts_ms).filter(([, value]) => value).map(([part]) => part)))] : [];
  const waited = bound && bound.after_ms >= 1;
  return h("div", {},
    h("p", {}, `${number(prompt)} prompt tokens in ${number(blocks)} prefix ${blocks === 1 ? "block" : "blocks"}.`),
    bound && (waited || !engines) ? [h("h2", {}, "When it was bound", h("small", {}, waited ? `after ${milliseconds(bound.after_ms)} in the queue; costs include requests before it that wait for the engine` : "at once")),
      costTable(bound.engines, [[inSeconds ? "Cost" : "Cost (policy's unit)", cost], ["Hit", (each) => number(each.hit_tokens)], ["Own prefill", (each) => milliseconds(each.prefill_ms)]], (each) => each.chosen)] : null,
    engines ? [h("h2", {}, when, h("small", {}, waited ? "it joined the queue" : bound ? "it was bound at once" : "")),
      costTable(engines, [[inSeconds ? "Cost" : "Cost (policy's unit)", cost], ["Capacity", (each) => (each.open ? "open" : "closed")], ["In flight", (each) => number(each.in_flight)], ["Hit", (each) => number(each.hit_tokens)],
        ...parts.map((part) => [PARTS[part] || part, (each) => (each.cost_parts_ms[part] ? milliseconds(each.cost_parts_ms[part]) : "–")])], (each) => !waited && each.backend === chosen)]
      : h("p", { className: "soft" }, "Its costs at arrival were not computed: that is done for a limited number of engines a second."));
};

const line = (open) => (first) => {
  const cells = COLUMNS.map(([, className]) => h("td", { className }));
  const node = h("tr", { className: "open", tabindex: 0, "data-id": first.request_id }, cells);
  node.addEventListener("click", () => open(node, first));
  node.addEventListener("keydown", (event) => { if (event.key === "Enter") open(node, first); });
  return { node, update: (row) => {
    if (node.dataset.done) return; // a request that has ended does not change
    node.dataset.done = "1";
    const texts = [clock(row.time), row.model || row.endpoint, tenantOf(row), row.backend || "–", row.outcome + (row.attempts > 1 ? ` (${row.attempts} attempts)` : ""),
      milliseconds(row.queue_ms), row.stream && row.first_byte_ms != null ? milliseconds(row.first_byte_ms) : "–", milliseconds(row.duration_ms), number(row.prompt_tokens || null),
      row.prompt_tokens ? `${number(row.predicted_hit_tokens)} / ${number(row.actual_hit_tokens)}` : "–", number(row.completion_tokens || null)];
    cells.forEach((cell, at) => put(cell, texts[at]));
    for (const at of [1, 2, 3]) cells[at].title = texts[at];
    cells[4].classList.toggle("bad", row.outcome !== "completed");
  } };
};

export const requests = () => {
  const body = h("tbody", {}), count = h("span", { className: "soft" }), empty = h("p", { className: "soft" }, "No request has ended yet.");
  const failed = h("input", { type: "checkbox", id: "only-failed" }), hold = h("input", { type: "checkbox", id: "hold" });
  const search = h("input", { type: "search", placeholder: "model, tenant, key, engine, id", id: "search" });
  let last = null, detail = null, seen = 0;
  const close = () => { if (detail) detail.remove(); detail = null; };
  const open = async (node, row) => {
    const again = detail && detail.previousSibling === node;
    close();
    if (again) return;
    const place = h("div", { className: "within" }, h("p", {}, h("code", {}, row.request_id), ` ${row.endpoint}, ${row.class}, ${row.stream ? "stream" : "no stream"}, status ${row.status}`, row.client && row.client !== row.tenant ? `, key ${row.client}` : "", row.error ? [", ", h("span", { className: "bad" }, row.error)] : ""),
      h("p", { className: "narrow" }, COLUMNS.map(([title, className], at) => (className || "").includes("more") && h("span", {}, `${title} `, h("b", {}, node.children[at].innerText || node.children[at].textContent)))));
    const mine = (detail = h("tr", { className: "detail" }, h("td", { colspan: COLUMNS.length }, place)));
    hold.checked = true; // the row stays where it is while it is read
    node.after(mine);
    try {
      place.append(prices(await askJson(`/admin/dashboard/decisions/${encodeURIComponent(row.request_id)}`), row.backend));
    } catch (error) {
      place.append(h("p", { className: "soft" }, error.message));
    }
  };
  const fill = keyed(body, line(open));
  const view = {
    node: h("div", {},
      h("div", { className: "tools" }, search, h("label", {}, failed, " only failed"), h("label", {}, hold, " hold"), count),
      h("div", { className: "card" }, h("table", { id: "tape" }, h("thead", {}, h("tr", {}, COLUMNS.map(([name, className, title]) => h("th", { className, title }, name)))), body), empty),
      h("p", { className: "soft" }, "The last 200 requests, or the last 200 that failed. A click shows what each engine would have cost a request when it arrived, if this page was open then.")),
    update: (state, changed) => {
      last = state;
      if (hold.checked && !changed && body.children.length) { put(count, `held, ${number(state.requestsSeen - seen)} newer`); return; }
      seen = state.requestsSeen;
      const wanted = search.value.toLowerCase();
      const rows = (failed.checked ? state.failed : state.requests).filter((row) => !wanted
        || [row.model, row.tenant, row.client, row.backend, row.request_id, row.outcome].some((each) => (each || "").toLowerCase().includes(wanted)));
      close();
      fill(rows.slice().reverse(), (row) => row.key);
      empty.hidden = rows.length > 0;
      put(count, `${number(rows.length)} shown`);
    },
  };
  for (const input of [failed, search, hold]) input.addEventListener("input", () => last && view.update(last, !hold.checked || input !== hold));
  return view;
};

// The queue, live: tenants by model and class, their expected waits, and for what the next requests wait.
import { chart } from "./charts.js";
import { bytes, duration, h, milliseconds, number, put, table, tiles } from "./dom.js";

const engines = (head) => h("div", {}, head.engines.map((each, at) => h("div", { className: at ? "then" : null },
  at ? "then " : "waits for ", h("b", {}, each.engine), ` (${head.inSeconds ? milliseconds(each.cost) : number(each.cost)}, hit ${number(each.hit_tokens)}): `,
  each.why || h("span", { className: "good" }, "open for the next scan"))),
  head.open_elsewhere ? h("div", { className: "soft" }, `${head.open_elsewhere} more open at a higher cost`) : null);

const model = (view, inSeconds) => h("section", {},
  h("h2", {}, view.model, h("small", {}, `${number(view.waiting)} waiting, ${number(view.in_flight)} in flight, `
    + `${view.drain_per_second == null ? "drain rate not known" : `${number(view.drain_per_second)} a second drained`}, not empty for ${duration(view.since_seconds)}`)),
  h("div", { className: "two waiting" },
    h("div", { className: "card" }, table(
      [{ name: "Tenant", className: "name" }, { name: "Class", className: "text" }, { name: "Waiting" }, { name: "In flight" }, { name: "Weight" }, { name: "Oldest" }, { name: "Expected wait", title: "of a request that joins now" }],
      view.flows.map((flow) => [{ text: flow.tenant || "(none)", title: flow.tenant }, flow.class, number(flow.waiting), number(flow.in_flight), number(flow.weight), duration(flow.oldest_seconds),
        flow.expected_seconds == null ? { text: "–", title: "not known yet" } : duration(flow.expected_seconds)]), "No tenant waits."),
      view.flows_not_shown ? h("p", { className: "soft" }, `${view.flows_not_shown} more tenants wait.`) : null),
    h("div", { className: "card" }, table(
      [{ name: "Next", className: "name" }, { name: "Waited" }, { name: "Prompt" }, { name: "What for", className: "text wide" }],
      view.head.map((head, at) => [
        { text: `${at + 1}. ${head.tenant || "(none)"}`, title: head.tenant },
        { text: duration(head.waited_seconds), className: head.starving ? "bad" : "", title: head.starving ? "starving: the emptiest engine is kept for it" : null },
        number(head.prompt_tokens),
        { className: "wide", text: head.why ? h("span", { className: "bad" }, head.why) : engines({ ...head, inSeconds }) }]), "Nothing waits."))));

const offline = (rows) => h("section", {}, h("h2", {}, "Offline lines", h("small", {}, "of batches, on idle capacity only")),
  h("div", { className: "card" }, table([{ name: "Model", className: "name" }, { name: "Waiting" }, { name: "In flight" }],
    rows.map((row) => [{ text: row.model, title: row.model }, number(row.waiting), number(row.in_flight)]))));

export const queue = () => {
  const sums = tiles("Waiting", "Models", "Bytes", "Longest wait");
  const place = h("div", {}), more = h("p", { className: "soft" });
  let columns = {};
  const waiting = chart("Waiting and in flight", [
    { name: "waiting", style: "s4", of: (point) => point[columns.waiting], area: true },
    { name: "in flight", style: "s1", of: (point) => point[columns.in_flight] }, { name: "limit", style: "s2", dashed: true, of: (point) => point[columns.slots] }], { most: 1 });
  return {
    node: h("div", {}, sums.node, place, more, h("div", { className: "charts" }, waiting.node)),
    update: (state) => {
      const { queue, settings } = state;
      columns = state.columns;
      sums.set(0, number(queue.waiting), `limit ${number(queue.limit)}`);
      sums.set(1, number(queue.models.length + queue.models_not_shown));
      sums.set(2, bytes(queue.waiting_bytes));
      sums.set(3, duration(Math.max(0, ...queue.models.flatMap((view) => view.flows.map((flow) => flow.oldest_seconds)))));
      if (!place.contains(document.activeElement) && getSelection().isCollapsed)
        place.replaceChildren(...(queue.offline.length ? [offline(queue.offline)] : []), ...(queue.models.length ? queue.models.map((view) => model(view, settings.policy === "prefix"))
          : [h("p", { className: "card text soft" }, "Nothing waits: requests go to an engine at once.")]));
      put(more, queue.models_not_shown ? `${queue.models_not_shown} more models have requests that wait.` : "");
      waiting.update(state.points);
    },
    close: () => waiting.close(),
  };
};

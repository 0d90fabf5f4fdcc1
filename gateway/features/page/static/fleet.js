// A tile for each engine: what is taken, what is reserved, what is ahead, and why it is in its state.
import { chart } from "./charts.js";
import { duration, h, keyed, meter, milliseconds, number, percent, put, short, tiles } from "./dom.js";

const REASONS = { preemptions: "preemptions", waiting: "requests waited in the engine", inter_token_latency: "tokens came too slowly",
  room: "all slots were in use", restart: "the engine restarted" };

const engine = () => {
  const name = h("span", {}), lamp = h("i", { className: "lamp" }), state = h("p", {}), model = h("p", { className: "more" });
  const slots = meter("", ["ghost", "fill", "mark"]), kv = meter("kv", ["ghost", "fill", "mark"]);
  const facts = {};
  const row = (key, label, title) => [h("dt", { title }, label), (facts[key] = h("dd", {}))];
  const node = h("section", { className: "engine" }, h("h3", {}, lamp, name), state, model,
    h("dl", {}, row("slots", "Slots", "sequences in flight / limit now / cap")), slots.node,
    h("dl", {}, row("kv", "KV tokens", "reserved / limit; used, as the engine reports")), kv.node,
    h("dl", { className: "more" }, row("ahead", "Prefill ahead", "predicted time until a new request's prefill begins"),
      row("hits", "Hit rate", "share of prompt tokens found in the cache, of the last requests"),
      row("trust", "Trust", "share of predicted hits that is used: 100 % while they are confirmed"),
      row("cost", "Relative cost", "time for the same work: 2 = half as fast as others"),
      row("reported", "Engine reports", "running and waiting, by its own metrics")),
    (facts.limit = h("p", { className: "more" })));
  return { node, update: (tile) => {
    const why = tile.draining ? "draining" : tile.state;
    node.className = `engine ${why}`;
    lamp.className = `lamp ${why}`;
    node.dataset.engine = tile.name + (tile.rank == null ? "" : `#${tile.rank}`);
    put(name, node.dataset.engine);
    put(state, `${why}${tile.state_seconds == null ? "" : ` for ${duration(tile.state_seconds)}`}: ${tile.state_reason}`);
    put(model, [tile.models.slice(0, 3).join(", ") || "no models", tile.models.length > 3 && `${tile.models.length - 3} more`,
      tile.version && `vLLM ${tile.version}`, tile.zone].filter(Boolean).join(" · "));
    put(facts.slots, `${tile.in_flight} / ${tile.slots} / ${tile.cap}`);
    slots.set(tile.slots / tile.cap, tile.in_flight / tile.cap, tile.slots < tile.cap ? tile.slots / tile.cap : null);
    put(facts.kv, tile.kv_tokens ? `${short(tile.kv_reserved)} / ${short(tile.kv_limit || tile.kv_tokens)}${tile.kv_used == null ? "" : `; ${short(tile.kv_used)} used`}` : "size unknown");
    kv.set(tile.kv_tokens ? (tile.kv_used || 0) / tile.kv_tokens : 0, tile.kv_tokens ? tile.kv_reserved / tile.kv_tokens : 0,
      tile.kv_limit && tile.kv_limit < tile.kv_tokens ? tile.kv_limit / tile.kv_tokens : null);
    put(facts.ahead, `${milliseconds(tile.prefill_ahead_ms)}, ${tile.prefilling} in prefill`);
    put(facts.hits, percent(tile.hit_rate));
    put(facts.trust, percent(tile.trust));
    put(facts.cost, number(tile.relative_cost));
    put(facts.reported, tile.reported ? `${number(tile.reported.running)} running, ${number(tile.reported.waiting)} waiting` : "–");
    const moved = tile.limit_moved;
    put(facts.limit, moved ? `Limit ${moved.before} → ${moved.after} ${duration(moved.seconds_ago)} ago: ${REASONS[moved.reason] || moved.reason}` : "Limit has not moved");
  } };
};

const MANY = 24;

export const fleet = () => {
  const sums = tiles("Engines up", "In flight", "Waiting", "Requests", "Output tokens", "Hit rate", "KV reserved");
  const board = h("div", { className: "engines" }), more = h("p", { className: "soft" });
  const fill = keyed(board, engine);
  const order = h("select", { id: "order" }, ["name", "state", "load"].map((each) => h("option", { value: each }, each)));
  const compact = h("input", { type: "checkbox", id: "compact" });
  compact.addEventListener("change", () => { compact.dataset.chosen = "1"; board.classList.toggle("compact", compact.checked); });
  const column = (name) => (point) => point[columns[name]];
  let columns = {};
  const charts = [
    chart("Requests a second", [{ name: "completed", style: "s1", of: column("completed"), area: true }, { name: "failed", style: "bad", of: column("failed") }], { most: 1 }),
    chart("Slots", [{ name: "in flight", style: "s1", of: column("in_flight"), area: true }, { name: "limit", style: "s2", of: column("slots"), dashed: true }, { name: "waiting", style: "s4", of: column("waiting") }], { most: 1 }),
    chart("Tokens a second", [{ name: "output", style: "s3", of: column("output_tokens") }, { name: "prompt, computed", style: "s2", of: (p) => Math.max(0, p[columns.prompt_tokens] - p[columns.hit_tokens]) }, { name: "prompt, from cache", style: "s1", of: column("hit_tokens") }], { most: 1, shown: short }),
  ];
  const weight = { name: () => 0, state: (one) => (one.state === "up" ? (one.draining ? 1 : 2) : 0), load: (one) => -one.in_flight / one.cap };
  let last = null;
  order.addEventListener("change", () => last && view.update(last));
  const view = {
    node: h("div", {}, sums.node, h("div", { className: "tools" }, h("label", {}, "Order by ", order), h("label", {}, compact, " compact")), board, more,
      h("div", { className: "charts" }, charts.map((each) => each.node))),
    update: (state) => {
      last = state;
      columns = state.columns;
      const all = state.fleet.tiles, up = all.filter((one) => one.state === "up" && !one.draining), { traffic } = state;
      const sum = (key) => all.reduce((total, one) => total + (one[key] || 0), 0);
      const rate = Object.values(traffic.outcomes).reduce((total, each) => total + each, 0);
      sums.set(0, `${up.length} / ${state.fleet.engines}`);
      sums.set(1, `${sum("in_flight")} / ${up.reduce((total, one) => total + one.slots, 0)}`, `${sum("prefilling")} in prefill`);
      sums.set(2, number(state.queue.waiting), `limit ${number(state.queue.limit)}`);
      sums.set(3, `${number(rate)} /s`, rate ? `${percent((traffic.outcomes.completed || 0) / rate)} completed` : "");
      sums.set(4, `${short(traffic.output_tokens)} /s`);
      const since = traffic.since_start;
      sums.set(5, traffic.prompt_tokens ? percent(traffic.hit_tokens / traffic.prompt_tokens) : "–", since.prompt_tokens ? `${percent(since.hit_tokens / since.prompt_tokens)} since start` : "");
      sums.set(6, sum("kv_tokens") ? percent(sum("kv_reserved") / sum("kv_tokens")) : "–", `${short(sum("kv_reserved"))} tokens`);
      if (!compact.dataset.chosen) board.classList.toggle("compact", (compact.checked = state.fleet.engines > MANY));
      const by = weight[order.value];
      fill(order.value === "name" ? all : [...all].sort((one, other) => by(one) - by(other)), (one) => one.engine);
      put(more, state.fleet.not_shown ? `${state.fleet.not_shown} more engines are not shown.` : "");
      charts.forEach((each) => each.update(state.points));
    },
    close: () => charts.forEach((each) => each.close()),
  };
  return view;
};

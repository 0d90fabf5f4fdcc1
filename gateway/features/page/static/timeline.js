// Errors and changes of the fleet on one time axis: a lane for each backend with events, one for failed requests.
import { chart } from "./charts.js";
import { clock, h, number, put, s, table, tiles } from "./dom.js";
import { tenantOf } from "./requests.js";

const LANE = 24, TOP = 8, MOST_LANES = 24, LEAST_SECONDS = 120;
const FAILED = "failed requests";
const GOOD = ["up", "joined", "undrained"];

const lanes = (marks, now, width) => {
  const isNarrow = width < 600, left = isNarrow ? 104 : 190, longest = isNarrow ? 14 : 26;
  const first = Math.min(now - LEAST_SECONDS, ...marks.map((mark) => mark.time));
  const names = new Set(marks.slice().reverse().map((mark) => mark.lane)); // those with the latest events, if not all
  const shown = [...(names.delete(FAILED) ? [FAILED] : []), ...names].slice(0, MOST_LANES).sort((one, other) => (one === FAILED) - (other === FAILED) || one.localeCompare(other, "en", { numeric: true }));
  const height = TOP + LANE * Math.max(1, shown.length) + 22, foot = height - 20;
  const place = (time) => left + ((time - first) / Math.max(1, now - first)) * (width - left - 8);
  const ticks = (isNarrow ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]).map((share) => first + share * (now - first));
  return s("svg", { class: "lanes", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Events over time" },
    ticks.map((time, at) => [s("line", { class: "grid", x1: place(time), x2: place(time), y1: TOP, y2: foot }),
      s("text", { x: place(time), y: height - 5, "text-anchor": at === ticks.length - 1 ? "end" : "middle" }, clock(time))]),
    shown.map((name, at) => {
      const y = TOP + LANE * at + LANE / 2;
      return [s("line", { class: "grid", x1: left, x2: width, y1: y, y2: y }), s("text", { x: 0, y: y + 4 }, name.length > longest ? `${name.slice(0, longest - 1)}…` : name, s("title", {}, name)),
        marks.filter((mark) => mark.lane === name).map((mark) => s("circle", { class: `mark ${mark.bad ? "bad" : GOOD.includes(mark.kind) ? "good" : ""}`, cx: place(mark.time), cy: y, r: 5 },
          s("title", {}, `${clock(mark.time)} ${mark.kind}: ${mark.detail}`)))];
    }));
};

/** Failures in a row that differ in nothing but their time, as one with their number; the latest first. */
const ALIKE = ["outcome", "status", "model", "tenant", "client", "backend", "error"];
const folded = (rows) => rows.reduceRight((found, row) => {
  const last = found.at(-1);
  if (last && ALIKE.every((name) => last.row[name] === row[name])) last.count += 1;
  else found.push({ row, count: 1 });
  return found;
}, []);

export const timeline = () => {
  const sums = tiles("Failed since start", "Ejected now", "Down now", "Failed now", "Errors inside the gateway");
  const picture = h("figure", {}), events = h("div", { className: "card" }), failures = h("div", { className: "card" }), outcomes = h("div", { className: "card" });
  let columns = {}, drawn = "";
  const failed = chart("Failed requests a second", [{ name: "failed", style: "bad", of: (point) => point[columns.failed], area: true }], { most: 1 });
  return {
    node: h("div", {}, sums.node, h("h2", {}, "Timeline"), picture, h("div", { className: "charts" }, failed.node),
      h("div", { className: "two" }, h("section", {}, h("h2", {}, "Events"), events), h("section", {}, h("h2", {}, "Outcomes since the start"), outcomes)),
      h("h2", {}, "Failed requests"), failures),
    update: (state) => {
      columns = state.columns;
      const since = state.traffic.since_start.outcomes, bad = Object.entries(since).filter(([name]) => name !== "completed");
      const count = (wanted) => state.fleet.tiles.filter((one) => one.state === wanted).length;
      const rate = Object.entries(state.traffic.outcomes).reduce((sum, [name, each]) => sum + (name === "completed" ? 0 : each), 0);
      sums.set(0, number(bad.reduce((sum, [, each]) => sum + each, 0)), "requests");
      sums.set(1, count("ejected"), "engines");
      sums.set(2, count("down"), "engines");
      sums.set(3, `${number(rate)} /s`);
      sums.set(4, number(state.gateway.background_errors), "a bug, if not 0");
      failed.update(state.points);
      const width = Math.max(260, picture.clientWidth - 30), stamp = `${width} ${state.eventsSeen} ${state.failed.length} ${state.failed.at(-1)?.request_id} ${bad.map(([, each]) => each)}`;
      if (stamp === drawn && Math.round(state.time) % 10) return; // the axis moves on once in a while
      drawn = stamp;
      const marks = [...state.events.map((each) => ({ ...each, lane: each.subject || "gateway" })),
        ...state.failed.map((row) => ({ time: row.time, kind: row.outcome, detail: row.error || row.backend || "", bad: true, lane: FAILED }))].sort((one, other) => one.time - other.time);
      picture.replaceChildren(h("figcaption", {}, "Events", h("small", {}, "backends: states, falls of the limit, restarts; failed requests")),
        marks.length ? lanes(marks, state.time, width) : h("p", { className: "soft" }, "Nothing has happened."));
      events.replaceChildren(table([{ name: "Time" }, { name: "What", className: "text" }, { name: "Backend", className: "text name" }, { name: "Why", className: "text" }],
        state.events.slice(-100).reverse().map((each) => [clock(each.time), { text: each.kind, className: each.bad ? "bad" : "" }, { text: each.subject || "–", title: each.subject }, { text: each.detail, className: "wide" }]), "Nothing has happened."));
      outcomes.replaceChildren(table([{ name: "Outcome" }, { name: "Requests" }], Object.entries(since).sort((one, other) => other[1] - one[1]).map(([name, each]) => [name, number(each)]), "No request has ended."));
      failures.replaceChildren(table([{ name: "Time" }, { name: "Outcome", className: "text outcome" }, { name: "Status", className: "more" }, { name: "Model", className: "text name more" }, { name: "Tenant", className: "text name more" }, { name: "Backend", className: "text name more" }, { name: "Message", className: "text" }],
        folded(state.failed).slice(0, 100).map(({ row, count }) => [clock(row.time), { text: row.outcome + (count > 1 ? ` (${count} times)` : ""), className: "bad" }, row.status || "–", row.model || row.endpoint, tenantOf(row), row.backend || "–", { text: row.error || "–", className: "wide" }]), "No request has failed."));
    },
    close: () => failed.close(),
  };
};

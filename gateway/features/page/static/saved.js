// Prompt tokens that needed no prefill, by prefix family; and what keeps caches cold, from the prefix report.
import { askJson } from "./connection.js";
import { chart } from "./charts.js";
import { bar, duration, h, number, percent, put, s, short, table, tiles } from "./dom.js";

const HOUR = 3600;
const KEPT_MS = 60000; // a report takes the gateway seconds: opening the view again shows the last one
let kept = null;

const NO_REPORT = "backends report no hits: start vLLM with --enable-prompt-tokens-details";

/** Where the prompt tokens of the window went, as one bar. */
const shares = ({ shares: found }) => {
  if (found.hit == null) return h("p", { className: "soft" }, "No prompt has been answered.");
  const parts = [[found.hit, "s3", "found in a cache"], [found.behind_a_difference, "s2", "seen before, but after a difference"], [found.other, "soft", "new, or evicted"]];
  let from = 0;
  const rects = parts.map(([share, className]) => s("rect", { className, x: 1000 * from, width: 1000 * share, height: 10, y: ((from += share), 0) }));
  return h("div", {}, h("div", { className: "meter stack" }, s("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, rects)),
    h("p", { className: "legend" }, parts.map(([share, className, text]) => h("span", {}, h("b", { className }, percent(share)), ` ${text}`))));
};
const prefixes = (report) => {
  const most = Math.max(1, ...report.prefixes.map((each) => each.saved_tokens));
  return table([{ name: "Prefix family", className: "text" }, { name: "Saved tokens", title: "prompt tokens found in a cache, of all requests that begin with this prefix" }, { name: "Length", className: "more" }, { name: "Requests" }, { name: "Cached on", className: "text" }],
    report.prefixes.map((each) => [
      { className: "wide", text: h("span", {}, bar(each.saved_tokens / most, "s3"), h("code", {}, each.id), each.text ? [" … ", each.text] : "") },
      short(each.saved_tokens), `${number(each.tokens)} tokens`, number(each.requests),
      { className: "wide", text: each.backends.slice(0, 4).join(", ") + (each.backends.length > 4 ? ` and ${each.backends.length - 4} more` : "") }]),
    "No prefix was used twice.");
};
const applications = (report) => table(
  [{ name: "Application", className: "text" }, { name: "Key", className: "text" }, { name: "Requests" }, { name: "Prompt tokens" }, { name: "Hit rate" }],
  report.applications.map((each) => [{ className: "wide", text: h("span", {}, each.name || h("code", {}, each.id), each.text ? [" ", h("span", { className: "soft" }, each.text)] : "") }, each.client || "–", number(each.requests), short(each.prompt_tokens), percent(each.hit_rate ?? each.predicted_hit_rate)]),
  "No application has sent anything.");
const breaker = (each) => h("section", { className: "card text" },
  h("p", {}, h("b", {}, each.kind), ` in ${each.part}: `, h("span", { className: "bad" }, `${short(each.saved_tokens_per_hour)} tokens an hour`),
    ` would be saved, ${percent(each.saved_share)} of the prompt tokens of ${number(Math.round(each.requests))} requests.`),
  h("p", {}, each.advice), each.examples?.length ? h("p", { className: "soft" }, "Such as: ", each.examples.map((one) => [h("code", {}, one), " "])) : null);

export const saved = () => {
  const sums = tiles("Saved since start", "Computed since start", "Hit rate now", "Predicted hits", "Saved now");
  const report = h("div", {}), note = h("span", { className: "soft" });
  const again = h("button", { id: "make-report" }, "Make the report");
  let columns = {};
  const charts = [
    chart("Prompt tokens a second", [{ name: "from cache", style: "s3", area: true, of: (point) => point[columns.hit_tokens] },
      { name: "computed", style: "s2", of: (point) => Math.max(0, point[columns.prompt_tokens] - point[columns.hit_tokens]) }], { most: 1, shown: short }),
    chart("Hit rate", [{ name: "hit rate", style: "s3", of: (point) => (point[columns.prompt_tokens] ? point[columns.hit_tokens] / point[columns.prompt_tokens] : null) }], { most: 1, shown: (value) => percent(value) })];
  const make = async (fresh) => {
    again.disabled = true;
    put(note, "the report is made");
    try {
      if (fresh || !kept || Date.now() - kept.at > KEPT_MS) kept = { at: Date.now(), report: await askJson("/admin/prefixes?minutes=60") };
      const found = kept.report;
      report.replaceChildren(
        h("h2", {}, "Prompt tokens", h("small", {}, `of the last ${duration(found.window_seconds)}`)), h("div", { className: "card text" }, shares(found)),
        h("h2", {}, "By prefix family", h("small", {}, "requests whose prompts begin alike; a longer prefix is counted in a shorter one, too")), h("div", { className: "card" }, prefixes(found)),
        h("h2", {}, "What keeps caches cold", h("small", {}, `of ${number(found.samples.kept)} sampled prompts`)),
        ...(found.breakers.length ? found.breakers.map(breaker) : [h("p", { className: "card text soft" }, "Nothing that the authors of the prompts could change was found.")]),
        h("h2", {}, "By application"), h("div", { className: "card" }, applications(found)));
      put(note, "");
    } catch (error) {
      put(note, error.message);
    }
    again.disabled = false;
  };
  again.addEventListener("click", () => make(true));
  make(false);
  return {
    node: h("div", {}, sums.node,
      h("p", { className: "soft" }, "Saved tokens are prompt tokens that an engine took from its KV cache. Without prefix caches, the engines would have computed all prompt tokens: saved and computed."),
      h("div", { className: "charts" }, charts.map((each) => each.node)), h("div", { className: "tools" }, again, note), report),
    update: (state) => {
      columns = state.columns;
      const { traffic } = state, since = traffic.since_start;
      const unreported = !since.hit_tokens && since.predicted_hit_tokens > 0 && since.prompt_tokens > 0;
      sums.set(0, short(since.hit_tokens), unreported ? NO_REPORT : since.prompt_tokens ? `${percent(since.hit_tokens / since.prompt_tokens, 1)} of all prompt tokens` : "");
      sums.set(1, short(Math.max(0, since.prompt_tokens - since.hit_tokens)), `of ${short(since.prompt_tokens)} prompt tokens`);
      sums.set(2, traffic.prompt_tokens ? percent(traffic.hit_tokens / traffic.prompt_tokens, 1) : "–", since.prompt_tokens ? `${percent(since.hit_tokens / since.prompt_tokens, 1)} since start` : "");
      sums.set(3, short(since.predicted_hit_tokens), "tokens since start");
      sums.set(4, `${short(traffic.hit_tokens * HOUR)} /h`, "tokens at this pace");
      charts.forEach((each) => each.update(state.points));
    },
    close: () => charts.forEach((each) => each.close()),
  };
};
